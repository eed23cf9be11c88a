"""All ranks stop after the same step when one is told to; what one rank does alone may take longer than the limit."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "stopping.py")


@pytest.mark.parametrize(("backend", "how"), [("torch", "SIGUSR1"), ("horovod", "SIGTERM"), ("mpi", "stop")])
def test_all_stop_after_the_same_step(backend: str, how: str) -> None:
    first, *others = jobs.run("fork", backend, 3, [SCRIPT, "stop", how]).check().records
    steps, digest, later, later_digest, _ = first
    assert 6 <= steps < 5000
    assert later == 1, "a synchronizer that is made afterwards"
    for rank in others:
        assert rank[:4] == [steps, digest, later, later_digest]
    assert others[-1][-1] == (1 if how == "SIGUSR1" else 0), "the script's own handler is called, too"


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_rank_that_is_through_within_join(backend: str) -> None:
    first, second = jobs.run("fork", backend, 2, [SCRIPT, "join"]).check().records
    assert first[0] == 3
    assert 6 <= second[0] < 5000
    assert first[1] == second[1]


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_drifting_replicas_stop_after_an_average(backend: str) -> None:
    first, second = jobs.run("fork", backend, 2, [SCRIPT, "drift"]).check().records
    assert first == second
    assert first[0] % 8 == 0
    assert 8 <= first[0] < 5000


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_second_signal_ends_at_once(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [SCRIPT, "twice"])
    assert job.status
    assert job.records[1] == "the second signal comes"
    assert "rank 1" in job.output
    assert job.seconds < 12


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_what_one_rank_does_alone_may_take_longer_than_the_limit(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [SCRIPT, "patience"], env={"HVDBRIDGE_TIMEOUT_SECONDS": "2"})
    assert job.check().records == [[6.0, 6.0]] * 2


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_patience_that_is_over(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [SCRIPT, "patience", "too_long"], env={"HVDBRIDGE_TIMEOUT_SECONDS": "2"})
    assert job.status
    assert "within hb.patience(1)" in job.output
    assert "HVDBRIDGE_TIMEOUT_SECONDS=2" in job.output
