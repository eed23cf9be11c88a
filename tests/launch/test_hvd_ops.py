"""Horovod's operations on every backend, in real jobs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jobs
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
LIMITS = {"HVDBRIDGE_STALL_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}  # of operations, not of the start
LATE = {"HVDBRIDGE_TIMEOUT_SECONDS": "200"}  # immediate failures come long before that


@pytest.mark.parametrize(("backend", "size"), [("torch", 2), ("torch", 4), ("horovod", 2), ("mpi", 4)])
def test_every_operation(backend: str, size: int) -> None:
    job = jobs.run("fork", backend, size, [str(SCRIPTS / "hvd_ops.py")], timeout=120).check()
    assert all(len(record) > 20 for record in job.records)


@pytest.mark.parametrize(
    ("launcher", "backend"), [("mpiexec", "torch"), ("horovodrun", "mpi"), ("torchrun", "horovod")]
)
def test_under_another_launcher(launcher: str, backend: str) -> None:
    jobs.run(launcher, backend, 2, [str(SCRIPTS / "hvd_ops.py")], timeout=120).check()


def test_at_two_ranks_the_bits_are_the_real_horovods() -> None:
    script = str(SCRIPTS / "hvd_parity.py")
    native = jobs.run("horovodrun", None, 2, [script, "horovod.torch"]).check()
    for backend in jobs.BACKENDS:
        ours = jobs.run("fork", backend, 2, [script, "hvdbridge.torch"]).check()
        assert ours.records == native.records, backend


def seconds_in(before: str, text: str) -> float:
    """Return the number of seconds that follows ``before`` in ``text``."""
    found = re.search(re.escape(before) + r" (\d+\.\d) s", text)
    assert found, text
    return float(found[1])


def fault(way: str, backend: str = "torch", env: dict[str, str] = LIMITS) -> jobs.Job:
    return jobs.run("fork", backend, 2, [str(SCRIPTS / "hvd_faults.py"), way], timeout=150, env=env)


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_rank_that_does_not_come_is_reported_and_ends_the_operations(backend: str) -> None:
    job = fault("stall", backend).check()
    report = [line for line in job.output.splitlines() if "'lonely' has not started for" in line]
    assert 1 <= seconds_in("has not started for", report[0]) < 3, job.output
    assert "rank 0 submitted it; missing: rank 1 (has submitted nothing that is open)" in report[0]
    for text, _ in job.records:
        assert 3 <= seconds_in("allreduce 'lonely' did not start within", text) < 5
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=3" in text
        assert "missing: rank 1" in text


@pytest.mark.waits
def test_operations_in_another_order_are_reported_with_what_each_rank_waits_for() -> None:
    job = fault("order").check()
    assert "missing: rank 1 (waits for allgather 'other')" in job.output
    assert "missing: rank 0 (waits for allreduce 'lonely')" in job.output
    assert job.records[0][0] == job.records[1][0]


@pytest.mark.waits
def test_a_join_that_waits_too_long() -> None:
    job = fault("join").check()
    assert "rank 0 joined; missing: rank 1" in job.output
    assert 3 <= seconds_in("join() waits for", job.records[0][0]) < 5  # until the other rank arrives


@pytest.mark.waits
@pytest.mark.parametrize("way", ["leave", "shutdown"])
def test_a_rank_that_left_fails_at_once_what_needs_it(way: str) -> None:
    job = fault(way, env=LATE)
    assert job.status == 0, job.output
    text, seconds = job.records[0]
    assert "rank 1 has called hvd.shutdown() or come to the end of its script, and rank 0 waits for it" in text
    assert seconds < 20


@pytest.mark.waits
@pytest.mark.parametrize(("way", "cause"), [("raise", "ValueError: nothing to add"), ("kill", "died")])
def test_a_rank_that_fails_is_named_where_others_wait(way: str, cause: str) -> None:
    job = fault(way, env=LATE)
    assert job.status != 0
    text, seconds = job.records[0]
    assert "rank 1" in text
    assert cause in text
    assert seconds < 20


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_an_error_that_nobody_catches_ends_the_job(backend: str) -> None:
    job = fault("uncaught", backend, LATE)
    assert job.status != 0
    assert "Mismatched allreduce tensor shapes: rank 0 has [2]; rank 1 has [3]" in job.output
    assert job.seconds < 100


def test_alone_and_with_the_variables_of_horovod(tmp_path: Path) -> None:
    """One process needs no launcher; HOROVOD_TIMELINE writes a trace; variables without effect are reported once."""
    trace = tmp_path / "trace.json"
    code = (
        "import torch, hvdbridge.torch as hvd; hvd.init(); hvd.init(); hvd.allreduce(torch.ones(1), name='x');"
        "assert hvd.join() == 0; assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).sum() == 2; hvd.shutdown()"
    )
    env = {"HOROVOD_TIMELINE": str(trace), "HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "0"}
    job = jobs.run("fork", "torch", 1, ["-c", code], env=env)
    assert job.status == 0, job.output
    assert job.output.count("HOROVOD_AUTOTUNE: set, but without effect") == 1
    assert "allreduce.x" in trace.read_text()


def test_import_brings_in_neither_horovod_nor_mpi() -> None:
    code = "import sys, hvdbridge.torch; assert not {'horovod', 'mpi4py'} & set(sys.modules), sys.modules"
    assert jobs.run(None, None, 1, ["-c", code]).status == 0, sys.executable
