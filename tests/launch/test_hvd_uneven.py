"""``hvd.DistributedOptimizer`` with unequal data on ranks, or operations in other orders, on each backend.

At two ranks the parameters equal those of the real Horovod, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

import hvdbridge.torch as hvd
from hvdbridge.errors import NotInitialized

SCRIPT = str(Path(__file__).parent / "scripts" / "hvd_uneven.py")

HALF = 2.0**-10
"""Tolerance for 16 bits: roundings of gradients (below 4) and of their sum, times the learning rate, in 8 steps."""


def ranks_of(backend: str, size: int) -> list[Any]:
    return jobs.once("fork", backend, size, [SCRIPT, "hvdbridge.torch"], 120).check().records


every_job = pytest.mark.parametrize(
    ("backend", "size"), [*((b, 2) for b in jobs.BACKENDS), ("torch", 4), ("horovod", 3), ("mpi", 4)]
)


ROUNDING = {
    "join": 1e-6,
    "join_without_data": 1e-6,
    "join_two_optimizers": HALF,
    "operation_before_or_after_backward": 1e-6,
    "optimizers_in_another_order": 1e-6,
}
"""Scenario -> largest allowed difference from the result of one process."""


def real() -> Any:
    """Return rank 0's record under the real Horovod."""
    return jobs.once("horovodrun", None, 2, [SCRIPT, "horovod.torch", *ROUNDING], 120).check().records[0]


@pytest.mark.parametrize("name", ROUNDING)
@every_job
def test_as_horovod_and_as_arithmetic_says(backend: str, size: int, name: str) -> None:
    ranks = ranks_of(backend, size)
    assert all(seen[name] == ranks[0][name] for seen in ranks)
    found = ranks[0][name]
    assert found[-1] <= ROUNDING[name]
    if size == 2:
        assert found[0] == real()[name][0]


@every_job
def test_a_rank_that_joins_after_a_backward_completes_that_step(backend: str, size: int) -> None:
    """Horovod itself fails here, with "has been shut down"."""
    ranks = ranks_of(backend, size)
    assert all(seen["join_after_a_backward"] == ranks[0]["join_after_a_backward"] for seen in ranks)
    assert ranks[0]["join_after_a_backward"][-1] <= 1e-6


@every_job
def test_the_number_of_the_last_rank(backend: str, size: int) -> None:
    assert ranks_of(backend, size)[0]["join"][1] == [size - 1, 0]


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_timeline_and_the_fusion_threshold_reach_the_optimizer(backend: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    env = {"HOROVOD_TIMELINE": str(trace), "HOROVOD_FUSION_THRESHOLD": "0"}
    argv = [SCRIPT, "hvdbridge.torch", "operation_before_or_after_backward"]
    jobs.run("fork", backend, 2, argv, env=env).check()
    events = json.loads(trace.read_text())
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        own = [event for event in events if event.get("tid") == rows[f"allreduce.order.{name}"] and "ts" in event]
        assert [event["name"] for event in own] == ["QUEUE", "ALLREDUCE"] * 3
        assert [event["args"] for event in own[1::2]] == [{"fused": 1}] * 3


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_horovods_limits_reach_the_optimizer(backend: str) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    script = str(Path(SCRIPT).with_name("hvd_faults.py"))
    job = jobs.run("fork", backend, 2, [script, "optimizer"], env=env)
    assert job.records[0] is not None, job.output
    text, seconds = job.records[0]
    assert "DistributedOptimizer 1 (first parameter 'weight'): AllReduce[8]" in text
    assert seconds < 10
    assert "WARNING: rank 0: DistributedOptimizer 1 (first parameter 'weight')" in job.output


def test_what_is_called_before_init_is_both_errors() -> None:
    for call in (lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, hvd.join, hvd.rank):
        with pytest.raises(ValueError, match=r"hvd\.init") as caught:
            call()
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert isinstance(caught.value, NotInitialized)
