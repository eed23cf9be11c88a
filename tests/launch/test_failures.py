"""A rank that fails ends the job in time with a non-zero status, names the cause, and leaves nothing behind."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.waits

SCRIPTS = Path(__file__).parent / "scripts"
FAULT, NONSENSE = str(SCRIPTS / "fault.py"), str(SCRIPTS / "nonsense.py")
KINDS = ("raise", "kill", "sleep", "leave")
SHORT = 6.0  # HVDBRIDGE_TIMEOUT_SECONDS for silent ranks; all other faults must end before the default
NAMED = {
    "raise": r"this rank has a bug",
    "kill": r"rank 1 .*died|exitcode: -9|Killed \(signal 9\)|exit with status code 137",
    "sleep": r"rank 1|MPI_Init did not return",
    "leave": r"rank 1|a rank is gone",
}
CATCHES = """
import os, signal
import jobs, torch
import hvdbridge as hb
from hvdbridge.startup import launchers
rank = launchers.detect().rank
if rank == 1 and os.fork():  # a launcher ends the others when it sees a rank die, and it sees this one
    jobs.record(rank, "nothing")
    jobs.wait_for_records(3)
    os._exit(3)
hb.init()
try:
    for step in range(100):
        if rank == 1 and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        hb.all_reduce(torch.ones(1000))
except hb.RankFailed as error:
    jobs.record(rank, str(error))
"""
ON_RANK_0 = """
import time
import torch
import hvdbridge as hb
hb.init()
model = torch.nn.Linear(2, 1)
sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="ef(int8)")
sync.model(torch.ones(1, 2)).sum().backward()
sync.optimizer.step()
if hb.rank() == 0:
    sync.state_dict(gather=True)
time.sleep(30)
"""


@dataclass
class Ended:
    """A finished job, and the processes and segments that it left behind."""

    job: jobs.Job
    left: list[str]


def fault(when: str, kind: str, launcher: str, backend: str, culprit: int = 1) -> Ended:
    silent = kind == "sleep" or (when, kind) == ("before", "leave")
    mark = f"{time.time_ns()}"
    env = {"FAULT_MARK": mark, "CULPRIT": str(culprit)}
    if silent:
        env["HVDBRIDGE_TIMEOUT_SECONDS"] = f"{SHORT:g}"
    started = time.time()
    # If two ranks end at about the same time, mpiexec returns the first one's status; a forked rank ends too late.
    job = jobs.run(launcher, backend, 2, [FAULT, kind, when], timeout=120, env=env, real=kind == "exit")
    deadline = time.monotonic() + 10
    while (left := processes(mark) + segments(started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return Ended(job, left)


def processes(mark: str) -> list[str]:
    """Return the command lines of the job's living processes."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FAULT_MARK={mark}" in environ.read_text(errors="replace"):
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:  # another user's, or ended
            continue
    return found


def segments(since: float) -> list[str]:
    """Return MPI's segments in /dev/shm that are newer than ``since`` and that no process maps."""
    found = set()
    for segment in Path("/dev/shm").glob("mpich_*"):
        with suppress(FileNotFoundError):  # another job has just removed it
            if segment.stat().st_mtime >= since:
                found.add(segment.name)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        found -= {name for name in found if name in text}
    return sorted(found)


def judge(ended: Ended, named: str) -> None:
    assert ended.job.status not in (0, -1), f"status {ended.job.status} after {ended.job.seconds:.1f} s"
    assert re.search(named, ended.job.output), f"the cause is not named:\n{ended.job.output[-3000:]}"
    assert not ended.left, f"left behind: {ended.left}"


def square(offset: int = 0) -> list[tuple[str, str, str]]:
    """Return a Latin square: each launcher and each backend has each kind of fault, and the kinds cover all cells."""
    kinds = list(enumerate(KINDS))
    return [(kind, *jobs.CELLS[3 * row + (row + n + offset) % 3]) for n, kind in kinds for row in range(3)]


@pytest.mark.parametrize(("kind", "launcher", "backend"), square())
def test_in_a_collective(kind: str, launcher: str, backend: str) -> None:
    judge(fault("collective", kind, launcher, backend), NAMED[kind])


@pytest.mark.parametrize(("number", "kind", "launcher", "backend"), [(n, *cell) for n, cell in enumerate(square(1))])
def test_before_and_during_the_start(number: int, kind: str, launcher: str, backend: str) -> None:
    """Faults alternate before and during the start, so that each kind, launcher and backend has both."""
    judge(fault(("before", "start")[number % 2], kind, launcher, backend), NAMED[kind])


@pytest.mark.parametrize("attempt", range(3))
def test_in_mpi_init_when_a_segment_has_just_been_made(attempt: int) -> None:
    judge(fault("init", "kill", "mpiexec", "mpi"), NAMED["kill"])


@pytest.mark.parametrize(
    ("kind", "launcher", "backend"),
    [("raise", "torchrun", "mpi"), ("raise", "mpiexec", "horovod"), ("kill", "torchrun", "mpi"),
     ("kill", "horovodrun", "torch")],
)  # fmt: skip
def test_rank_0_which_started_the_servers(kind: str, launcher: str, backend: str) -> None:
    judge(fault("collective", kind, launcher, backend, culprit=0), NAMED[kind].replace("rank 1", "rank 0"))


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_shutdown_in_a_finally_does_not_hide_the_error(backend: str) -> None:
    judge(fault("collective", "finally", "mpiexec", backend), NAMED["raise"])


def test_sys_exit_has_its_own_status() -> None:
    ended = fault("collective", "exit", "mpiexec", "mpi")
    judge(ended, r"rank 1 ends: it left with sys.exit\(3\)")  # by rank 1: mpiexec may kill rank 0 before it prints
    assert ended.job.status == 3


@pytest.mark.parametrize("kind", ["barrier", "backward", "forward"])
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_script_that_ends_while_others_wait(backend: str, kind: str) -> None:
    job = jobs.run("fork", backend, 2, [str(SCRIPTS / "left.py"), kind])
    assert job.status not in (0, -1), job.output
    assert re.search(r"rank 1 \(.*left without hb\.shutdown\(\) while rank 0 waits in ", job.output), job.output


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_who_died_is_named_by_what_the_others_catch(backend: str, tmp_path: Path) -> None:
    """The errors that other ranks catch name the dead rank, though a library only reports a lost peer."""
    script = tmp_path / "catches.py"
    script.write_text(CATCHES)
    records = jobs.run("fork", backend, 3, [str(script)]).records
    assert records[1] == "nothing"
    for rank in (0, 2):
        assert re.search(r"rank 1 \(.*died without a word", records[rank]), records


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_rank_that_is_late_for_the_first_operation(backend: str, tmp_path: Path) -> None:
    """The first operation opens a channel, and that wait has a limit, too."""
    late = tmp_path / "late.py"
    late.write_text("import hvdbridge as hb, time; hb.init(); time.sleep(30 * hb.rank()); hb.barrier()")
    limits = {"HVDBRIDGE_TIMEOUT_SECONDS": "3", "HVDBRIDGE_START_SECONDS": "60"}
    job = jobs.run("fork", backend, 2, [str(late)], env=limits)
    assert job.status not in (0, -1), job.output
    assert re.search(r"after 3\.\d s .*rank 0 waits in .*not in it: rank 1 \(.*busy elsewhere", job.output), job.output


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_rank_that_does_not_call_state_dict(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "on_rank_0.py"
    script.write_text(ON_RANK_0)
    job = jobs.run("fork", backend, 2, [str(script)], env={"HVDBRIDGE_TIMEOUT_SECONDS": "3"})
    assert job.status not in (0, -1), job.output
    named = r"rank 0 waits in state_dict\(gather=True\), for the state of the group's rank 1; not in it: rank 1 \("
    assert re.search(named, job.output), job.output


@pytest.mark.parametrize("cell", [("torchrun", "horovod"), ("horovodrun", "mpi"), ("mpiexec", "torch")])
def test_nonsense_while_the_job_starts(cell: tuple[str, str]) -> None:
    records = jobs.run(*cell, 2, [NONSENSE]).check().records
    assert [r["sum"] for r in records] == [3, 3]
    assert records[0]["said"]
    assert all("1000 frames" in line for line in records[0]["said"])
    assert records[0]["megabytes"] < 100
