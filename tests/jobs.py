"""Starts a real job (launcher x backend x number of ranks) and brings back what each rank recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "horovodrun", "mpiexec")
BACKENDS = ("torch", "horovod", "mpi")
CELLS = [(launcher, backend) for launcher in LAUNCHERS for backend in BACKENDS]
NATIVE = {"torch": "torchrun", "horovod": "horovodrun", "mpi": "mpiexec"}


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


def command(launcher: str | None, size: int, argv: Sequence[str]) -> list[str]:
    """The command line that a user would type."""
    if launcher == "torchrun":
        # Not at the top: ranks import this file, too, and decide themselves when hvdbridge is imported.
        from hvdbridge.rendezvous.network import free_port

        return [str(BIN / "torchrun"), f"--nproc-per-node={size}", f"--master-port={free_port()}", *argv]
    if launcher == "horovodrun":
        return [str(BIN / "horovodrun"), "-np", str(size), sys.executable, *argv]
    if launcher == "mpiexec":
        return [str(BIN / "mpiexec"), "-n", str(size), sys.executable, *argv]
    assert launcher is None, launcher
    return [sys.executable, *argv]


def environment(backend: str | None = None, **extra: str) -> dict[str, str]:
    """This environment with the test's backend, warnings as errors where ranks import our code, own bin first."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HVDBRIDGE_")}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if backend:
        env["HVDBRIDGE_BACKEND"] = backend
    return env | extra


def run(
    launcher: str | None,
    backend: str | None,
    size: int,
    argv: Sequence[str],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Job:
    """Run ``argv`` (script and arguments) on ``size`` ranks; ends only processes that it started itself."""
    with tempfile.TemporaryDirectory(prefix="hvdbridge-job-") as out, tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command(launcher, size, argv),
            env=environment(backend, JOB_RECORDS=out, **(env or {})),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        seconds = time.monotonic() - started
        status = process.returncode if process.returncode is not None else -1
        _end(out)
        process.wait()
        log.seek(0)
        output = log.read()
        if status == -1:
            output += f"\n[the job was ended after its limit of {timeout:.0f} s]"
        files = [Path(out) / f"{rank}.json" for rank in range(size)]
        return Job(status, seconds, output, [json.loads(f.read_text()) if f.exists() else None for f in files])


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
        if not (left := [process for process in psutil.process_iter() if _of_job(process, records)]):
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)  # what one of them started meanwhile is found in the next round


def _of_job(process: psutil.Process, records: str) -> bool:
    with suppress(psutil.Error):  # it has ended, or is not ours to ask
        ours = process.environ().get("JOB_RECORDS") == records
        return ours and not any(argument.startswith("hvdbridge.helper") for argument in process.cmdline())  # by itself
    return False
