"""Run a job of real processes (launcher x backend x number of ranks) and return the record of each rank.

The launchers are ``torchrun``, ``horovodrun``, ``mpiexec``, None (one process, ``python script.py``), and ``fork``:
ranks without a launcher, which find each other by ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``. All Python processes
are forked from a server that has already imported torch (``forkserver.py``), also those that a launcher starts
(``forked.py``), unless a test requests the ``real`` interpreter.
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
"""The variable with the process that the fork servers wait for, and their folder; set by ``session``."""


@dataclass
class Job:
    """The results of a finished job: exit status, seconds, output, and one record per rank (None: no record)."""

    status: int
    seconds: float
    output: str
    records: list[Any]

    def check(self) -> Job:
        assert self.status == 0, f"exit status {self.status} after {self.seconds:.1f} s\n{self.output[-8000:]}"
        assert None not in self.records, f"a rank recorded nothing\n{self.output[-8000:]}"
        return self


def command(launcher: str | None, size: int, argv: Sequence[str], real: bool = False) -> list[str]:
    """Return the command line that a user would type, with Python processes that are forked unless ``real``."""
    binaries = BIN if real else forking()
    python = str(binaries / "python")
    if launcher == "torchrun":
        # Imported here, because real ranks also import this file, and decide themselves when to import hvdbridge.
        from hvdbridge.startup.network import free_port

        return [str(binaries / "torchrun"), f"--nproc-per-node={size}", f"--master-port={free_port()}", *argv]
    if launcher == "horovodrun":
        return [str(binaries / "horovodrun"), "-np", str(size), python, *argv]
    if launcher == "mpiexec":
        return [str(binaries / "mpiexec"), "-n", str(size), python, *argv]
    assert launcher is None, launcher
    return [python, *argv]


def environment(backend: str | None = None, **extra: str) -> dict[str, str]:
    """Return this environment with the test's backend, and with this virtual environment's programs first."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HVDBRIDGE_")}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if backend:
        env["HVDBRIDGE_BACKEND"] = backend
    return env | extra


def session() -> None:
    """Let this process and its test workers use fork servers that end with this process."""
    os.environ[SERVERS] = f"{os.getpid()} {tempfile.mkdtemp(prefix='hvdbridge-fork-')}"


def folder() -> Path:
    """Return the folder of this test session, which all its workers share."""
    return Path(os.environ[SERVERS].split(" ", 1)[1])


def forking() -> Path:
    """Start the fork servers; return the folder of the ``python``, ``torchrun`` and ``horovodrun`` that fork."""
    forkserver.start(folder(), int(os.environ[SERVERS].split()[0]))
    return folder() / "bin"


def bare(size: int) -> list[dict[str, str]]:
    """Return the variables of ``size`` ranks on this host without a launcher."""
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
    """Run ``argv`` (script and arguments) on ``size`` ranks, and kill what remains of this job's processes.

    The processes that a launcher starts are forked, and so are torchrun and horovodrun, unless ``real``.
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
            status, left = launch(command(launcher, size, argv, real), environ, log, timeout)
        seconds = time.monotonic() - started
        _end(out)
        output = log.read_text(errors="replace") if log.exists() else ""
        if status is None:
            output += f"\n[the job was ended after its limit of {timeout:.0f} s]"
        assert not left, f"processes that ranks left: {left}\n{output[-4000:]}"
        records = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return Job(-1 if status is None else status, seconds, output, records)


def once(launcher: str | None, backend: str | None, size: int, argv: Sequence[str], timeout: float = 60.0) -> Job:
    """Like :func:`run`, but run each job once per test session; later calls in any worker return the same result."""
    name = hashlib.sha256(repr((launcher, backend, size, list(argv))).encode()).hexdigest()
    path = folder() / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                result: Job | AssertionError = run(launcher, backend, size, argv, timeout)
            except AssertionError as error:
                result = error
            path.write_bytes(pickle.dumps(result))
    result = pickle.loads(path.read_bytes())
    if isinstance(result, AssertionError):
        raise result
    return result


def launch(
    argv: Sequence[str], env: Mapping[str, str], log: Path, timeout: float, cwd: Path | None = None
) -> tuple[int | None, list[str]]:
    """Run one command with its output in ``log``; then kill the processes with the same ``JOB_RECORDS``.

    Returns:
        The exit status, None after ``timeout`` seconds; and the processes that a successful command left behind.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, env=env, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    limit = forkserver.Limit(timeout)
    while process.returncode is None and limit.left > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit.wait_for())
    status = process.returncode
    deadline = time.monotonic() + forkserver.GRACE_SECONDS
    while status is not None and (left := _of_job(env["JOB_RECORDS"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    _end(env["JOB_RECORDS"])
    process.wait()
    return status, [str(process.info["cmdline"]) for process in left] if status == 0 else []


def record(rank: int, value: Any) -> None:
    """Store ``value`` (JSON) as the record of this rank. Does nothing outside of a test's job."""
    if "JOB_RECORDS" in os.environ:
        target = Path(os.environ["JOB_RECORDS"]) / f"{rank}.json"
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(value))
        partial.rename(target)


def wait_for_records(size: int) -> None:
    """Wait for ``size`` records, before this rank fails: a launcher then ends the other ranks."""
    deadline = time.monotonic() + 20
    while len(list(Path(os.environ["JOB_RECORDS"]).glob("*.json"))) < size and time.monotonic() < deadline:
        time.sleep(0.01)


def leave_torch() -> NoReturn:
    """End a rank that used torch.distributed directly, without finalizing the interpreter.

    After a collective Gloo's thread takes the GIL to free Python objects. If the interpreter is finalizing by then, the
    process aborts ("terminate called without an active exception", torch 2.13). That is rare, but also happens after a
    monitored_barrier() if the cores are busy.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.monitored_barrier()
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")  # os._exit() skips its Finalize, and mpiexec would end the other ranks
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end(records: str) -> None:
    """Kill the remaining processes of the job with this folder of records, also those unknown to its launcher."""
    for _ in range(10):
        if not (left := _of_job(records)):
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)  # the next iteration finds processes that were started meanwhile


def _of_job(records: str) -> list[psutil.Process]:
    """Return the processes of the job with this folder of records, except its helper, which ends by itself."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):  # None: another user's, or ended
        match = (process.info["environ"] or {}).get("JOB_RECORDS") == records
        if match and not any(argument.startswith("hvdbridge.supervisor") for argument in process.info["cmdline"] or ()):
            found.append(process)
    return found
