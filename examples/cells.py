"""Start a training script under a launcher and bring back its metrics: what demo.py and parity.py share."""

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
    """The job ended with an error or not in time; the message has what its output says of it."""


def command(launcher: str, ranks: int, script: Path, args: Sequence[str]) -> list[str]:
    """What a user would type, with this environment's executables."""
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
    """Run a job to its end and return what rank 0 wrote to ``--metrics``.

    Raises:
        JobFailed: a non-zero exit, or no end within ``timeout`` seconds.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("HVDBRIDGE_BACKEND", "HVDBRIDGE_POLICY")}
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', os.defpath)}"
    if backend:
        env["HVDBRIDGE_BACKEND"] = backend
    with tempfile.TemporaryDirectory(prefix="hvdbridge-") as directory:
        metrics, log = Path(directory, "metrics.json"), Path(directory, "log")
        line = command(launcher, ranks, script, [*args, f"--metrics={metrics}"])
        with log.open("w") as output:  # a file, not a pipe: nothing can keep us waiting for its end
            job = subprocess.Popen(
                line, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = f"exit status {job.wait(timeout)}"
            except subprocess.TimeoutExpired:
                status = f"no end after {timeout:.0f} s"
            finally:
                end(job)
        if job.returncode or not metrics.exists():
            said = "\n".join(telling(log.read_text(errors="replace").splitlines()))
            raise JobFailed(f"{launcher} x {backend or 'plain'}: {status}\n{' '.join(line)}\n{said}")
        return dict(json.loads(metrics.read_text()))


def telling(lines: Sequence[str], before: int = 20, last: int = 10) -> list[str]:
    """What led to the first error of a Python program, and the end: launchers have many words between the two.

    >>> telling(["rank 0 starts", "ValueError: no data", *["..."] * 20, "bye"], last=1)
    ['rank 0 starts', 'ValueError: no data', '[20 lines]', 'bye']
    """
    first = next((i for i, line in enumerate(lines) if re.search(r"\b\w*(Error|Exception)\b: ", line)), -1)
    behind = max(first + 1, len(lines) - last)
    between = [f"[{behind - first - 1} lines]"] if behind > first + 1 else []
    return [*lines[max(0, first - before) : first + 1], *between, *lines[behind:]]


def end(job: subprocess.Popen[bytes]) -> None:
    """Let a launcher that still runs end its ranks; if it does not, end its whole session."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
