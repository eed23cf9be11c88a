"""Runs a job of real processes (launcher x backend x number of ranks) and returns what each rank recorded.

The launchers are ``torchrun``, ``horovodrun``, ``mpiexec``, None (one process, ``python script.py``), and ``fork``:
ranks that nobody launches, which find each other by ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``. All Python processes
come from a server that has imported torch already (``forkserver.py``), in a launcher's job, too (``forked.py``), unless
a test asks for the ``real`` interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import forkserver
import psutil

BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "horovodrun", "mpiexec")
BACKENDS = ("torch", "horovod", "mpi")
CELLS = [(launcher, backend) for launcher in LAUNCHERS for backend in BACKENDS]
NATIVE = {"torch": "torchrun", "horovod": "horovodrun", "mpi": "mpiexec"}
SERVERS = "JOBS_FORK_SERVERS"
"""The variable with the fork servers' folder and the process whose end they wait for; set by ``session``."""


@dataclass
class Job:
    """What a finished job left: exit status, seconds, output, and one record per rank (None: it wrote none)."""

    status: int
    seconds: float
    output: str
    records: list[Any]

    def check(self) -> Job:
        assert self.status == 0, f"exit status {self.status} after {self.seconds:.1f} s\n{self.output[-8000:]}"
        assert None not in self.records, f"a rank recorded nothing\n{self.output[-8000:]}"
        return self


def command(launcher: str | None, size: int, argv: Sequence[str], real: bool = False) -> list[str]:
    """The command line that a user would type, with Python processes that fork unless ``real``."""
    binaries = BIN if real else forking()
    python = str(binaries / "python")
    if launcher == "torchrun":
        # Not at the top: real ranks import this file, too, and decide themselves when hvdbridge is imported.
        from hvdbridge.startup.network import free_port

        return [str(binaries / "torchrun"), f"--nproc-per-node={size}", f"--master-port={free_port()}", *argv]
    if launcher == "horovodrun":
        return [str(binaries / "horovodrun"), "-np", str(size), python, *argv]
    if launcher == "mpiexec":
        return [str(binaries / "mpiexec"), "-n", str(size), python, *argv]
    assert launcher is None, launcher
    return [python, *argv]


def environment(backend: str | None = None, **extra: str) -> dict[str, str]:
    """This environment with the test's backend, and this virtual environment's programs first."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HVDBRIDGE_")}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if backend:
        env["HVDBRIDGE_BACKEND"] = backend
    return env | extra


def session() -> None:
    """Make this process, and the test workers that it starts, use fork servers that end when it ends."""
    os.environ[SERVERS] = f"{os.getpid()} {tempfile.mkdtemp(prefix='hvdbridge-fork-')}"


def folder() -> Path:
    """A folder of this test session, for all its workers."""
    return Path(os.environ[SERVERS].split(" ", 1)[1])


def forking() -> Path:
    """The folder of the ``python``, ``torchrun`` and ``horovodrun`` that fork."""
    forkserver.start(folder(), int(os.environ[SERVERS].split()[0]))
    return folder() / "bin"


def bare(size: int) -> list[dict[str, str]]:
    """The variables of ``size`` ranks on this host that no launcher starts."""
    from hvdbridge.startup.network import free_port

    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} for rank in range(size)]


def run(
    launcher: str | None,
    backend: str | None,
    size: int,
    argv: Sequence[str],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    real: bool = False,
) -> Job:
    """Run ``argv`` (script and arguments) on ``size`` ranks; ends only processes that it started itself.

    What a launcher starts is forked, and so are torchrun and horovodrun, unless ``real``.
    """
    with tempfile.TemporaryDirectory(prefix="hvdbridge-job-") as out:
        log, files = Path(out) / "log", [Path(out) / f"{rank}.json" for rank in range(size)]
        started = time.monotonic()
        environ = environment(backend, JOB_RECORDS=out, **({"TMPDIR": out} | dict(env or {})))
        if launcher == "fork":
            forking()
            ranks = [environ | rank for rank in bare(size)]
            status, left = forkserver.run(folder(), argv, ranks, log, timeout)
        else:
            status, left = _launch(command(launcher, size, argv, real), environ, log, timeout)
        seconds = time.monotonic() - started
        _end(out)
        output = log.read_text(errors="replace") if log.exists() else ""
        if status is None:
            output += f"\n[the job was ended after its limit of {timeout:.0f} s]"
        assert not left, f"processes that ranks left: {left}\n{output[-4000:]}"
        records = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return Job(-1 if status is None else status, seconds, output, records)


def once(launcher: str | None, backend: str | None, size: int, argv: Sequence[str], timeout: float = 60.0) -> Job:
    """:func:`run`, but a second call in this test session, in whichever worker, takes the first one's result."""
    name = hashlib.sha256(repr((launcher, backend, size, list(argv))).encode()).hexdigest()
    place = folder() / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            try:
                found: Job | AssertionError = run(launcher, backend, size, argv, timeout)
            except AssertionError as error:
                found = error
            place.write_bytes(pickle.dumps(found))
    found = pickle.loads(place.read_bytes())
    if isinstance(found, AssertionError):
        raise found
    return found


def _launch(line: Sequence[str], env: Mapping[str, str], log: Path, timeout: float) -> tuple[int | None, list[str]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            line, env=env,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout)
    status = process.returncode
    deadline = time.monotonic() + forkserver.GRACE_SECONDS
    while status is not None and (left := _of_job(env["JOB_RECORDS"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    _end(env["JOB_RECORDS"])
    process.wait()
    return status, [str(process.info["cmdline"]) for process in left] if status == 0 else []


def record(rank: int, value: Any) -> None:
    """Called in a rank: leave ``value`` (JSON) for the test. Does nothing outside a test's job."""
    if "JOB_RECORDS" in os.environ:
        target = Path(os.environ["JOB_RECORDS"]) / f"{rank}.json"
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(value))
        partial.rename(target)


def wait_for_records(size: int) -> None:
    """Called in a rank that is about to fail: a launcher ends the others as soon as one has."""
    deadline = time.monotonic() + 20
    while len(list(Path(os.environ["JOB_RECORDS"]).glob("*.json"))) < size and time.monotonic() < deadline:
        time.sleep(0.01)


def leave_torch() -> NoReturn:
    """The last act of a rank that used torch.distributed by itself: no thread of Gloo's outlives the interpreter.

    After a collective Gloo's thread takes the GIL to free what it kept of Python. If the interpreter is ending by then,
    the process aborts ("terminate called without an active exception", torch 2.13), rarely, but also after a
    monitored_barrier(): 3 of 30 ranks whose Gloo threads had the lowest priority on busy cores did.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.monitored_barrier()
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")  # what follows passes by its Finalize, and mpiexec would end the others
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end(records: str) -> None:
    """End what is left of the job that writes there, also what its launcher has lost track of."""
    for _ in range(10):
        if not (left := _of_job(records)):
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)  # what one of them started meanwhile is found in the next round


def _of_job(records: str) -> list[psutil.Process]:
    """The processes of the job that writes there, but for its helper, which ends by itself."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):  # None: it has ended, or is not ours to ask
        ours = (process.info["environ"] or {}).get("JOB_RECORDS") == records
        if ours and not any(argument.startswith("hvdbridge.supervisor") for argument in process.info["cmdline"] or ()):
            found.append(process)
    return found
