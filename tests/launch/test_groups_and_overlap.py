"""Groups, bits at four ranks, and overlap of communication with backward, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"


def four(backend: str) -> list[dict[str, Any]]:
    return jobs.once("fork", backend, 4, [str(SCRIPTS / "groups.py")]).check().records


@pytest.mark.parametrize("backend", jobs.BACKENDS)
@pytest.mark.parametrize("kind", ["by_ranks", "by_own_group"])
def test_two_groups_at_once(backend: str, kind: str) -> None:
    digests = [rank[kind] for rank in four(backend)]
    assert digests[0] == digests[2] != digests[1] == digests[3]
    assert digests == [rank["by_ranks"] for rank in four("torch")], "pairs add two numbers: the same bits everywhere"


@pytest.mark.parametrize("policy", ["mean", "exact", "bf16"])
def test_bits_at_four_ranks(policy: str) -> None:
    found = [four(backend) for backend in jobs.BACKENDS]
    for records in found:
        assert len({rank[policy][0] for rank in records}) == 1, "all ranks end with the same bits"
    everywhere = {records[0][policy][0] for records in found}
    if policy == "mean":
        # In three steps each gradient is a sum of four numbers below 1: three float32 roundings of 6e-8 per backend.
        # Learning rate 0.1 and momentum 0.9 multiply them by up to 0.1 (1 + 1.9 + 2.71).
        values = [torch.tensor(records[0][policy][1]) for records in found]
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=0, atol=2 * 3 * 6e-8 * 0.561 + 6 * 6e-8)
    else:
        assert len(everywhere) == 1, "added in rank order: the same bits on every backend"


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_first_collective_starts_before_the_last_gradient_exists(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [str(SCRIPTS / "overlap.py")]).check()
    assert job.records == ["overlapped"] * 2


def test_a_static_graph_waits_for_nobody() -> None:
    """The first step of a static graph ends within DDP's own call, before any callback of hvdbridge."""
    job = jobs.run("fork", "torch", 2, [str(SCRIPTS / "ddp_waits.py"), "static"]).check()
    assert job.records == [{"mean": True, "int8": True}] * 2


def test_a_policys_failure_does_not_wait_for_what_ddp_waits_for() -> None:
    job = jobs.run("fork", "torch", 2, [str(SCRIPTS / "ddp_waits.py"), "unused"])
    assert job.status != 0
    assert "ValueError: the policy has a bug" in job.output
    assert "its limit" not in job.output


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_debug_finds_the_rank_that_starts_another_collective(backend: str) -> None:
    env = {"HVDBRIDGE_DEBUG": "1"}
    job = jobs.run("fork", backend, 2, [str(SCRIPTS / "mismatch.py")], env=env)
    assert job.status != 0
    assert [name for name, _ in job.records] == ["CollectiveMismatch"] * 2, job.records
    for _, text in job.records:
        assert "[96]" in text
        assert "[97]" in text
        assert "rank" in text
