"""Run a training script under a launcher and return its metrics: helpers of demo.py and of benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdbridge.startup.network import free_port

BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "horovodrun", "mpiexec")
BACKENDS = ("torch", "horovod", "mpi")
NATIVE = {"torch": "torchrun", "horovod": "horovodrun", "mpi": "mpiexec"}


class JobFailed(RuntimeError):
    """The job failed or timed out; the message has an excerpt of its output."""


def command(launcher: str, ranks: int, script: Path, args: Sequence[str]) -> list[str]:
    """Return the command line of a launcher, with the executables of this environment."""
    if launcher == "torchrun":
        start = ["torchrun", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]  # the default may be in use
    elif launcher == "horovodrun":
        start = ["horovodrun", "-np", str(ranks), sys.executable]
    else:
        start = ["mpiexec", "-n", str(ranks), sys.executable]
    return [str(BIN / start[0]), *start[1:], str(script), *args]


def run(
    launcher: str,
    backend: str | None,
    script: Path,
    args: Sequence[str] = (),
    ranks: int = 2,
    timeout: float = 120.0,
) -> dict[str, Any]:
    """Run a job to its end and return the metrics that rank 0 wrote; without ``backend`` the script chooses its own.

    Raises:
        JobFailed: the job failed, wrote no metrics, or took more than ``timeout`` seconds.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("HVDBRIDGE_BACKEND", "HVDBRIDGE_POLICY")}
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', os.defpath)}"
    if backend:
        env["HVDBRIDGE_BACKEND"] = backend
    with tempfile.TemporaryDirectory(prefix="hvdbridge-") as directory:
        metrics, log = Path(directory, "metrics.json"), Path(directory, "log")
        argv = command(launcher, ranks, script, [*args, f"--metrics={metrics}"])
        with log.open("w") as output:  # a file: a process that inherits a pipe could keep it open
            job = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = f"exit status {job.wait(timeout)}"
            except subprocess.TimeoutExpired:
                status = f"no end after {timeout:.0f} s"
            finally:
                end(job)
        if job.returncode or not metrics.exists():
            excerpt = "\n".join(error_excerpt(log.read_text(errors="replace").splitlines()))
            raise JobFailed(f"{launcher} x {backend or 'plain'}: {status}\n{' '.join(argv)}\n{excerpt}")
        return dict(json.loads(metrics.read_text()))


def error_excerpt(lines: Sequence[str], before: int = 20, last: int = 10) -> list[str]:
    """Return the lines that lead to the first Python error and the last lines, without the launcher's text between.

    >>> error_excerpt(["rank 0 starts", "ValueError: no data", *["..."] * 20, "bye"], last=1)
    ['rank 0 starts', 'ValueError: no data', '[20 lines]', 'bye']
    """
    first = next((i for i, line in enumerate(lines) if re.search(r"\b\w*(Error|Exception)\b: ", line)), -1)
    tail_start = max(first + 1, len(lines) - last)
    omitted = [f"[{tail_start - first - 1} lines]"] if tail_start > first + 1 else []
    return [*lines[max(0, first - before) : first + 1], *omitted, *lines[tail_start:]]


def end(job: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher that still runs, so that it ends its ranks; after 10 s, kill its session."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
