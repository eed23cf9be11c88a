"""All ranks stop after the same step if one rank is signaled; work of one rank alone may exceed the time limit."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import jobs
import pytest

from hvdbridge import policies
from hvdbridge.policies.wrappers import averaged
from hvdbridge.supervisor.last_step import LastStep
from hvdbridge.training.stopping import Handlers, dumps_stacks

SCRIPT = str(Path(__file__).parent / "scripts" / "stopping.py")
IMPATIENT = {"HVDBRIDGE_TIMEOUT_SECONDS": "2", "HVDBRIDGE_START_SECONDS": "60"}


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


def test_replicas_that_drift_no_more_wait_for_no_average() -> None:
    (first,), (second,) = jobs.run("fork", "mpi", 2, [SCRIPT, "phases"]).check().records
    assert first == second
    assert 6 <= first < 500


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("mean", [0, 1, 2, 3]),
        ("local_sgd(every=2)", [1, 3]),
        ("ef(bf16)", [0, 1, 2, 3]),
        ("noop", [0, 1, 2, 3]),
        ("post_local_sgd(start=2,every=2)", [0, 1, 2]),
        ("warmup(steps=3,first=local_sgd(every=2),then=mean)", [1, 2, 3]),
        ("warmup(steps=2,then=local_sgd(every=3))", [0, 1, 2]),
        ("partition(*.bias=mean,rest=local_sgd(every=2))", [1, 3]),
        ("adasum_delta", [0, 1, 2, 3]),
    ],
)
def test_after_which_steps_a_job_may_stop(spec: str, steps: list[int]) -> None:
    policy = policies.from_spec(spec)
    assert [step for step in range(4) if averaged(policy, step)] == steps


def test_signal_handlers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chained handlers and faulthandler stay in effect; after their removal hvdbridge's only forward signals."""
    called: list[str] = []
    last, usr1 = LastStep(), signal.SIGUSR1
    before = signal.signal(usr1, lambda *_: called.append("first"))
    try:
        handlers = Handlers(last)
        handlers.install([usr1])
        ours = signal.getsignal(usr1)
        signal.signal(usr1, lambda *given: (called.append("second"), ours(*given)))  # type: ignore[operator]
        signal.raise_signal(usr1)
        assert called == ["second", "first"]
        assert last.wanted
        last.wanted = False
        handlers.remove()
        signal.raise_signal(usr1)
        assert called == ["second", "first"] * 2
        assert not last.wanted
        signal.signal(usr1, signal.SIG_DFL)
        assert not dumps_stacks(usr1)
        with open(os.devnull, "w") as nowhere:
            faulthandler.register(usr1, file=nowhere, chain=False)
            assert dumps_stacks(usr1)
            Handlers(last).install([usr1])
            assert signal.getsignal(usr1) == signal.SIG_DFL
            faulthandler.unregister(usr1)
    finally:
        signal.signal(usr1, before)


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
    job = jobs.run("fork", backend, 2, [SCRIPT, "patience"], env=IMPATIENT)
    assert job.check().records == [[6.0, 6.0]] * 2


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_patience_that_is_over(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [SCRIPT, "patience", "too_long"], env=IMPATIENT)
    assert job.status
    assert "within hb.patience(1)" in job.output
    assert "HVDBRIDGE_TIMEOUT_SECONDS=2" in job.output
