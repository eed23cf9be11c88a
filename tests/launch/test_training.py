"""Every way of training has the bits of plain DistributedDataParallel on every backend at 2 ranks."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "scenarios.py")
LIMIT = 120.0  # seconds for all scenarios on busy cores
LIKE_DDP = [
    "plain_training", "unused_on_some_ranks", "unused_on_all_ranks", "shared_and_frozen", "several_optimizers",
    "scheduler", "closure", "compiled", "checkpointing", "two_backwards", "accumulation", "grad_scaler", "clipping",
    "adamw_foreach", "buffers", "gan", "uneven_join", "carried_state", "bucket_by_measurement",
    "never_used", "uneven_batchnorm",
]  # fmt: skip
ALIKE = [
    "broadcast_from_rank_0", "weighted", "weight_zero_hides_nan", "total_weight_zero_skips", "nan_travels",
    "error_feedback_bf16", "step_scope", "average_gradients", "local_gradients", "unreduced_gradients",
    "sync_batchnorm", "misuse", "static_graph", "default_buckets", "unfrozen_later", "nothing_stays_alive",
    "compiled_names", "join_with_sync_batchnorm", "evaluation_by_one_rank", "sync_batchnorm_of_halves",
    "complex_parameters", "sharded_optimizer",
    "without_hook", "backward_in_a_closed_block", "channels_last", "after_close",
    "made_anew", "frozen_later", "optimizer_made_before",
]  # fmt: skip


def plain() -> dict[str, str]:
    """Return rank 0's record under plain DistributedDataParallel."""
    return jobs.once("fork", None, 2, [SCRIPT, "plain"], LIMIT).check().records[0]


def ours(backend: str) -> list[dict[str, str]]:
    return jobs.once("fork", backend, 2, [SCRIPT], LIMIT).check().records


@pytest.mark.parametrize("scenario", LIKE_DDP)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_same_bits_as_ddp(scenario: str, backend: str) -> None:
    assert [rank[scenario] for rank in ours(backend)] == [plain()[scenario]] * 2


@pytest.mark.parametrize("scenario", ALIKE)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_same_bits_on_every_backend(scenario: str, backend: str) -> None:
    found = ours(backend)
    assert "Traceback" not in found[0][scenario], found[0][scenario]
    assert [rank[scenario] for rank in found] == [ours("torch")[0][scenario]] * 2


def test_same_bits_whoever_divides() -> None:
    alike = ["weighted", "error_feedback_bf16", "sync_batchnorm", "made_anew", "after_close"]
    for rank in jobs.run("fork", "torch", 2, [SCRIPT, "copies", *LIKE_DDP, *alike], LIMIT).check().records:
        assert {name: rank[name] for name in LIKE_DDP} == {name: plain()[name] for name in LIKE_DDP}
        assert {name: rank[name] for name in alike} == {name: ours("torch")[0][name] for name in alike}


def test_same_bits_where_division_rounds() -> None:
    names = [name for name in LIKE_DDP if name != "bucket_by_measurement"]  # sums of three depend on a bucket's end
    native = jobs.run("fork", None, 3, [SCRIPT, "plain", *names], LIMIT).check().records[0]
    assert jobs.run("fork", "torch", 3, [SCRIPT, "copies", *names], LIMIT).check().records == [native] * 3
