"""Run a shell command that starts a job, here or on a simulated host, and return what its ranks recorded."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import jobs
import psutil
import pytest

PLACES = str(Path(__file__).parents[1] / "launch" / "scripts" / "places.py")
TRAINS = f"{PLACES} again"
"""The script whose ranks record their numbers, and digests of what they trained."""
AS_ROOT = dict.fromkeys(
    ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT",
     "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1",
)  # fmt: skip
GRACE_SECONDS = 10.0
"""Time in which the processes of a job must be gone after its command."""


def environment(backend: str | None, **more: str) -> dict[str, str]:
    """Return the variables of a job: this environment's programs come first, and Open MPI starts for root."""
    return jobs.environment(backend) | AS_ROOT | more


def shell(
    command: str,
    backend: str | None = None,
    size: int = 0,
    timeout: float = 90.0,
    *,
    env: dict[str, str] | None = None,
    enter: Sequence[str] = ("bash", "-c"),
    cancel: Callable[[], object] = lambda: None,
) -> jobs.Job:
    """Run ``command`` in a directory of its own. Its output includes files ``*.out``, which batch jobs write.

    Args:
        env: the variables; default: those of :func:`environment`.
        enter: the command that runs a shell command.
        cancel: called if the command has not ended in time.
    """
    with tempfile.TemporaryDirectory(prefix="hvdbridge-shell-") as name:
        out = Path(name)
        environ = {**(env or environment(backend)), "TMPDIR": name, "JOB_RECORDS": name}
        started = time.monotonic()
        with (out / "log").open("w") as log:
            process = subprocess.Popen(
                [*enter, command], cwd=name, env=environ, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = -1
                cancel()
                process.terminate()
            seconds = time.monotonic() - started
            left = gone(name)
            process.kill()
            process.wait()
        output = "".join(file.read_text(errors="replace") for file in [out / "log", *sorted(out.glob("*.out"))])
        assert not left, f"processes that the job left: {left}\n{output[-6000:]}"
        files = [out / f"{rank}.json" for rank in range(size)]
        records = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return jobs.Job(status, seconds, output, records)


def permitted(*command: str) -> None:
    """Skip the test where this machine refuses ``command``, as containers do without CAP_SYS_ADMIN."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"refused here: {shlex.join(command)}: {done.stderr.strip()}")


def gone(records: str, seconds: float = GRACE_SECONDS) -> list[str]:
    """Wait until no process of the job with this folder of records is left; kill those that are, and return them."""
    deadline = time.monotonic() + seconds
    while (left := jobs._of_job(records)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return [" ".join(process.info["cmdline"] or ()) for process in left]


def check(job: jobs.Job, backend: str, launcher: str, nodes: Sequence[int] = ()) -> None:
    """Check what the ranks of ``TRAINS`` recorded: numbers, backend, launcher, and the digests of torchrun's ranks.

    The order in which a library adds three numbers is its own, so more than two ranks have torchrun's digests on torch
    alone.

    Args:
        nodes: the node of each rank. Default: all share one.
    """
    job.check()
    size = len(job.records)
    nodes = nodes or [0] * size
    for rank, seen in enumerate(job.records):
        assert (seen["rank"], seen["size"], seen["sum"]) == (rank, size, size * (size + 1) / 2)
        assert (seen["node_rank"], seen["num_nodes"]) == (nodes[rank], len(set(nodes)))
        assert seen["local_rank"] == list(nodes[:rank]).count(nodes[rank])
        assert seen["local_size"] == list(nodes).count(nodes[rank])
        assert (seen["backend"], seen["launcher"]) == (backend, launcher)
        assert seen["digests"] == (digests(size) if size <= 2 or backend == "torch" else job.records[0]["digests"])


def digests(size: int) -> list[str]:
    """Return the digests that torchrun's ranks have on one host, without any other launcher."""
    return list(jobs.once("torchrun", "torch", size, [PLACES, "again"]).check().records[0]["digests"])


def last_error(output: str, kind: str) -> str:
    """Return the last line of an output with an error of hvdbridge."""
    lines = [line for line in output.splitlines() if f"hvdbridge.errors.{kind}: " in line]
    assert lines, output[-6000:]
    return lines[-1].partition(f"hvdbridge.errors.{kind}: ")[2]
