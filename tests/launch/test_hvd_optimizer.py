"""``hvd.DistributedOptimizer`` and ``hvd.SyncBatchNorm`` on 3 and 4 ranks; their bits: test_hvd_scripts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "hvd_optimizer.py")


@pytest.fixture(params=[("torch", 4), ("horovod", 3), ("mpi", 3)], ids=lambda of: f"{of[0]}-{of[1]}")
def ranks(request: pytest.FixtureRequest) -> list[Any]:
    """Return the records of all ranks."""
    return jobs.once("fork", *request.param, [SCRIPT], timeout=120).check().records


def alike(ranks: list[Any], name: str) -> Any:
    assert all(seen[name] == ranks[0][name] for seen in ranks)
    return ranks[0][name]


def test_what_is_refused(ranks: list[Any]) -> None:
    assert "hvd.init()" in alike(ranks, "before init")
    words = (
        "0.weight", "names no parameter", "tuples", "must be > 0", "op=Average", "not negative",
        "one group only", "torch.Tensor", "policy=", "no_such_policy", "already", "op=77", "policy=",
        *["acts after the optimizer's step. Use a GradientSynchronizer"] * 5,
    )  # fmt: skip
    for text, word in zip(alike(ranks, "refusals"), words, strict=True):
        assert word in text


def test_the_class_is_the_users_own(ranks: list[Any]) -> None:
    assert alike(ranks, "is_what_it_wraps") is True
    assert alike(ranks, "step_hooks_run_once") == ["pre", "post"]


def test_the_order_of_calls(ranks: list[Any]) -> None:
    early, again, zeros, none, warned = alike(ranks, "order_of_calls")
    assert "zero_grad() between" in early
    assert "backward_passes_per_step" in again
    assert zeros
    assert none
    assert len(warned) == 1
    words = "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()"
    assert warned[0].startswith(words), "as Horovod's, by which scripts filter it"


def test_gradients_are_final_after_synchronize(ranks: list[Any]) -> None:
    assert alike(ranks, "final_after_synchronize") == [True] * 3


def test_gradients_that_are_held_stay(ranks: list[Any]) -> None:
    assert alike(ranks, "held_over_zero_grad") is True


def test_a_closure_sees_reduced_gradients(ranks: list[Any]) -> None:
    smaller, _ = alike(ranks, "closure")
    assert smaller


def test_a_gradient_scaler_skips_on_all_ranks(ranks: list[Any]) -> None:
    assert alike(ranks, "scaled") == [True, False, True]


def test_parameters_that_come_later_stay_equal(ranks: list[Any]) -> None:
    alike(ranks, "parameters_that_come_later")


def test_parameters_that_come_while_gradients_travel(ranks: list[Any]) -> None:
    assert alike(ranks, "parameters_that_come_while_gradients_travel") == [True] * 4


def test_a_process_set_leaves_others_alone(ranks: list[Any]) -> None:
    sums = alike(ranks, "process_set")
    assert sums[0] == sums[2] != sums[1]


def test_a_compressor_may_be_an_object(ranks: list[Any]) -> None:
    assert alike(ranks, "compressor_that_is_an_object") is True


def test_one_that_gave_way(ranks: list[Any]) -> None:
    warnings, (a, b), steady = alike(ranks, "one_that_gave_way")
    assert all("reduces them in its place" in text for text in warnings)
    assert a == b, "the two that are in one set have the same"
    assert all(all(checks) for checks in steady)


def test_one_optimizer_after_the_other(ranks: list[Any]) -> None:
    assert alike(ranks, "one_after_the_other") == [True] * 4


def test_policies(ranks: list[Any]) -> None:
    assert alike(ranks, "policies") == [True] * 3


def test_a_policys_state_is_saved_and_loaded(ranks: list[Any]) -> None:
    empty, same, lines, refused = alike(ranks, "policy_state")
    assert empty == {}
    differs = {name for name, equal in same.items() if not equal}
    assert differs == {"int4 without", "dgc:ratio=0.25 without"}
    assert len(same) == 13
    for policy in ("int4", "dgc:ratio=0.25"):
        (line,) = lines[policy]
        assert repr(policy) in line
        assert "policy_state_dict(gather=True)" in line
    assert lines["int8"] == lines["None"] == []
    for text, words in zip(refused, ("empty", "'int8'", "before backward()", "expected float32[9, 4]"), strict=True):
        assert words in text


def test_ranks_that_differ_are_told(ranks: list[Any]) -> None:
    text, again = alike(ranks, "ranks_that_differ")
    assert text == again
    assert "rank 1 differs from rank 0" in text
    assert "'weight' is [3, 2] float32, not [2, 2] float32" in text


def test_adasum_combines_what_optimizers_changed(ranks: list[Any]) -> None:
    """The error is at most five roundings (a change, three shares, the parameter) by 2**-24 of the largest value."""
    error, largest, same, refused, failed, restored = alike(ranks, "adasum")
    assert 0 <= error <= 5 * 2.0**-24 * max(1.0, largest)
    assert same
    assert "no meaning" in refused
    assert failed == "cannot compress [8, 4]"
    assert restored  # each gradient, though the step had failed


def test_sync_batch_norm(ranks: list[Any]) -> None:
    assert alike(ranks, "sync_batch_norm") == [True] * 4
