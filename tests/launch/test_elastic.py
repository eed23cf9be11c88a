"""After a worker is killed, training continues from the last commit and ends with the bits of a run without fault."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path
from typing import Any

import jobs
import pytest

pytestmark = pytest.mark.waits

SCRIPT = str(Path(__file__).parent / "scripts" / "horovod_style_elastic.py")
SAMPLES, BATCH, COMMIT_EVERY, KILL_AT = 96, 4, 2, 3


def torchrun(backend: str, notes: Path, *argv: str, restarts: int = 1) -> jobs.Job:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    command = [*launcher, "-m", "hvdbridge.run", SCRIPT, f"--notes={notes}", *argv]
    return jobs.run(None, backend, 2, command, timeout=120, env={"HVDBRIDGE_CACHE": str(notes / "cache")})


def elastic_horovodrun(
    backend: str, notes: Path, hosts: list[str], *argv: str, least: int = 2, seconds: int = 0
) -> jobs.Job:
    """Run an elastic job on names of this host: horovodrun does not reuse a host that lost a worker.

    ``seconds``: delay of the third host after a worker was killed.
    """
    script = notes / "hosts.sh"
    lines = [f"echo {host}:1" for host in hosts]
    if seconds:
        lines[2] = f'at=$(stat -c %Y "{notes}/killed") && [ $(($(date +%s) - at)) -ge {seconds} ] && {lines[2]}'
    script.write_text("\n".join(["#!/bin/sh", *lines, "true\n"]))
    script.chmod(0o700)
    size = min(2, len(hosts))
    launcher = ["-np", str(size), "--min-np", str(least), "--max-np", "2", "--host-discovery-script", str(script)]
    horovodrun, python = (str(jobs.forking() / name) for name in ("horovodrun", "python"))
    program = [horovodrun, *launcher, python, "-m", "hvdbridge.run", SCRIPT]
    command = ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", *program, f"--notes={notes}", *argv]
    return jobs.run(None, backend, 2, command, timeout=120, env={"TMPDIR": str(notes)})


def notes_of(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """Return the workers' notes in the order of time."""
    found = []
    for file in folder.glob("[0-9]*-*"):
        for line in file.read_text().splitlines():
            when, _, what = line.partition(" ")
            found.append((float(when), ast.literal_eval(what)))
    return sorted(found, key=lambda entry: entry[0])


def judge(job: jobs.Job, notes: Path, left_at_start: int, size: int = 2) -> None:
    """Check that workers continued from the last commit and processed each sample of the epoch exactly once."""
    assert (notes / "killed").exists()
    entries = notes_of(notes)
    starts = [what for _, what in entries if "starts" in what]
    again = [i for i, (_, what) in enumerate(entries) if "starts" in what][2:]
    assert [s["starts"] for s in starts[:2]] == [(0, 0)] * 2
    committed = (KILL_AT // COMMIT_EVERY) * COMMIT_EVERY
    assert [s["starts"] for s in starts[2:]] == [(1, committed)] * size
    assert {s["left"] for s in starts[2:]} == {left_at_start} == {SAMPLES - committed * 2 * BATCH}
    before = [what for _, what in entries[: again[0]] if what.get("epoch") == 1 and what["batch"] <= committed]
    after = [what for _, what in entries[again[0] :] if "indices" in what]
    seen = sorted(index for what in (*before, *after) for index in what["indices"])
    assert seen == list(range(SAMPLES))
    assert [r["resets"] for r in job.records if r is not None] == [[size]] * size


@pytest.fixture
def weights() -> Any:
    """Return the final weights of a run without a fault."""
    notes = jobs.folder() / "undisturbed"
    notes.mkdir(exist_ok=True)
    argv = ["-m", "hvdbridge.run", SCRIPT, f"--notes={notes}"]
    return jobs.once("fork", "torch", 2, argv, timeout=120).check().records[0]["weights"]


@pytest.mark.parametrize(
    ("backend", "how", "culprit"),
    [("torch", "kill", 1), ("horovod", "kill", 1), ("mpi", "kill", 0), ("torch", "raise", 0), ("torch", "internal", 1)],
)
def test_torchrun_restarts_all_workers(backend: str, how: str, culprit: int, tmp_path: Path, weights: Any) -> None:
    argv = (f"--kill-at={KILL_AT}", f"--how={how}", f"--culprit={culprit}", f"--commit-every={COMMIT_EVERY}")
    job = torchrun(backend, tmp_path, *argv).check()
    judge(job, tmp_path, 80)
    assert [r["weights"] for r in job.records] == [weights] * 2
    assert not list((tmp_path / "cache").rglob("*.pt")), "commits are removed at the end"


@pytest.mark.parametrize(("backend", "culprit"), [("torch", 1), ("horovod", 1), ("mpi", 0)])
def test_horovodrun_replaces_a_lost_worker(backend: str, culprit: int, tmp_path: Path, weights: Any) -> None:
    hosts = ["localhost", "127.0.0.1", socket.gethostname()]
    job = elastic_horovodrun(backend, tmp_path, hosts, f"--kill-at={KILL_AT}", f"--culprit={culprit}").check()
    judge(job, tmp_path, 80)
    assert [r["weights"] for r in job.records] == [weights] * 2
    assert not list((tmp_path / f"hvdbridge-{os.getuid()}").rglob("*.pt"))


def test_a_worker_waits_for_another_host_as_long_as_it_takes(tmp_path: Path) -> None:
    hosts = ["localhost", "127.0.0.1", socket.gethostname()]
    job = elastic_horovodrun("torch", tmp_path, hosts, f"--kill-at={KILL_AT}", "--culprit=1", seconds=10).check()
    judge(job, tmp_path, 80)


def test_horovodrun_goes_on_with_fewer(tmp_path: Path) -> None:
    job = elastic_horovodrun("torch", tmp_path, ["localhost", "127.0.0.1"], f"--kill-at={KILL_AT}", least=1)
    assert job.status == 0, job.output[-4000:]
    judge(job, tmp_path, 80, size=1)
    assert job.records[0]["size"] == 1


def test_without_restarts_the_job_ends(tmp_path: Path) -> None:
    job = torchrun("torch", tmp_path, f"--kill-at={KILL_AT}", restarts=0)
    assert job.status not in (0, -1)
    assert "rank 1" in job.output
    assert [what["starts"] for _, what in notes_of(tmp_path) if "starts" in what] == [(0, 0)] * 2
