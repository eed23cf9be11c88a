"""Launcher x backend x number of ranks, on one host: every rank has its numbers, and the session can start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "places.py")


def seen_by(launcher: str, backend: str | None, size: int, then: str, real: bool = False) -> list[dict[str, Any]]:
    env = {"HVDBRIDGE_LOG_LEVEL": "INFO"}
    job = jobs.run(launcher, backend, size, [SCRIPT, then], env=env, real=real).check()
    for rank, seen in enumerate(job.records):
        assert (seen["rank"], seen["size"]) == (rank, size)
        assert (seen["local_rank"], seen["local_size"]) == (rank, size)
        assert (seen["node_rank"], seen["num_nodes"]) == (0, 1)
        assert seen["launcher"] == launcher
        assert seen["sum"] == size * (size + 1) / 2
        assert seen["from_0"] == {"rank": 0}
        assert seen["parameters"] == [[size - 1.0] * 3, [size - 1] * 4]
        assert size == 1 or seen["threads"] == 1
    if backend is None:
        native = {launcher: backend for backend, launcher in jobs.NATIVE.items()}[launcher]
        assert job.output.count(f"backend {native}: auto under {launcher}") == 1
        backend = native
    assert [seen["backend"] for seen in job.records] == [backend] * size
    return job.records


@pytest.mark.parametrize(("launcher", "backend"), jobs.CELLS)
def test_cell(launcher: str, backend: str) -> None:
    """Training with the mean, with weights and in half precision has the same bits in every cell."""
    (without,) = {str(seen["digests"]) for seen in jobs.once("fork", "torch", 2, [SCRIPT, "again"]).check().records}
    assert [str(seen["digests"]) for seen in seen_by(launcher, backend, 2, "again", real=True)] == [without] * 2


@pytest.mark.parametrize(
    ("launcher", "backend"), [("torchrun", "horovod"), ("horovodrun", "mpi"), ("mpiexec", "torch")]
)
def test_one_rank(launcher: str, backend: str) -> None:
    (seen,) = seen_by(launcher, backend, 1, "buckets")
    assert seen["buckets"] == [[25, 2]] * 2


@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_four_ranks_on_what_the_launcher_is_made_for(launcher: str) -> None:
    seen_by(launcher, None, 4, "leave")
