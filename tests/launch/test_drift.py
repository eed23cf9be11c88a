"""Policies that act on parameters, or one step late, have the bits of one process on every backend at 2 ranks."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "drift.py")
NAMES = [
    "noop", "local_sgd:every=2", "local_sgd(every=3, inner=ef(bf16))", "post_local_sgd:start=2,every=2,group=none",
    "post_local_sgd:start=1,every=2", "diloco:every=2,lr=0.7,momentum=0.9", "diloco(every=2, inner=bf16)", "delayed",
    "delayed(ef(bf16))", "hierarchical(ef(bf16))", "partition(*.bias=delayed, rest=local_sgd:every=2)",
    "clip(mean, norm=0.5)", "clip(delayed(mean), norm=0.5)", "warmup(steps=2, then=diloco:every=2)",
    "weighted", "overflow_on_one_rank", "overflow_before_the_end", "two_optimizers", "parameters_added_later",
    "closures", "without_an_optimizer", "joined", "resumed", "another_number_of_ranks",
]  # fmt: skip


def found(backend: str) -> list[dict[str, str]]:
    return jobs.once("fork", backend, 2, [SCRIPT]).check().records


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_every_scenario_is_asked_for(backend: str) -> None:
    assert [set(rank) for rank in found(backend)] == [set(NAMES)] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_like_one_process(name: str, backend: str) -> None:
    for rank, results in enumerate(found(backend)):
        assert results.get(name) == "ok", f"rank {rank}:\n{results.get(name)}"
