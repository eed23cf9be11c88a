"""Unusual uses of a data-parallel model end alike on every backend and rank: with equal numbers or one error."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "semantics.py")
LIMIT = 120.0
CASES = {
    "ignored_parameters": "ConfigurationError: ignore='nothing.*' is no parameter",
    "group_is_a_mesh": "ConfigurationError: group=mesh has 2 dimensions",
    "optimizers_within_backward": "StepError: rank: in this backward SGD.step() was called for '2.bias'",
    "other_parameters": "assigned: StepError: rank: forward: the model has other parameters",
    "the_same_parameters": "",
    "without_a_forward": "SGD.step() with gradients of 4 parameters that were never aggregated: '0.weight'",
    "changed_within_backward": "1 parameters were changed: '0.weight'",
    "left_in_the_middle": "StepError: rank: a forward or a backward began before the end of another.",
    "sparse_by_function": "Unsupported: rank: parameter 'table' has a sparse gradient",
    "optimizer_of_others": "optimizer.step() of an optimizer that holds none of the model's parameters",
    "refused_at_construction": "Unsupported: parameters of lazy modules have no shape yet: '0.weight'",
    "default_device": " 1.0",
    "torchs_ddp_is_replaced": "StepError: _set_static_graph() should be called before training loop starts",
    "hooks_that_change_gradients": "StepError: rank: in this backward hooks dropped the gradients of '2.weight'.",
    "sharded_optimizer": "Unsupported: torch.distributed.algorithms.Join: its shadows make DDP's collectives",
    "checkpoints_of_plain_ddp": "<All keys matched successfully>",
    "the_forward_decides": "",
    "buffers": "",
    "a_forward_of_one_rank": "StepError: ranks [0] began a forward that aggregates while the others began a backward",
    "buffers_of_the_last": "",
    "an_optimizer_of_the_users": "",
    "static_graph_that_accumulates_first": "StepError: rank: with static_graph=True the first backward of all must",
    "reentrant_from_the_second_step_on": "Unsupported: Reentrant activation checkpointing",
    "outputs_left_out": "looks for tensors in what the forward returns, and there are none in Hidden",
    "wrappers": "whose module was wrapped again since",
    "large_copies": "",
    "compiled": "",
    "backwards_of_all_kinds": "",
    "shared_parts": "",
}
"""Case -> text that its record contains."""


def found(backend: str) -> list[dict[str, str]]:
    return jobs.once("fork", backend, 2, [SCRIPT], LIMIT).check().records


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_one_end_on_every_backend(case: str, backend: str) -> None:
    ranks = [rank[case] for rank in found(backend)]
    assert "Traceback" not in ranks[0], ranks[0]
    assert CASES[case] in ranks[0]
    assert ranks == [found("torch")[0][case]] * 2
