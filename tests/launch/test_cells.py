"""Launcher x backend x number of ranks, on one host: everybody is there, knows its place, and can start again."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "places.py")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("launcher", "backend"), jobs.CELLS)
def test_cell(launcher: str, backend: str, size: int) -> None:
    then = {1: "buckets", 2: "again", 4: "leave"}[size]
    records = jobs.run(launcher, backend, size, [SCRIPT, then]).check().records
    for rank, seen in enumerate(records):
        assert (seen["rank"], seen["size"]) == (rank, size)
        assert (seen["local_rank"], seen["local_size"]) == (rank, size)
        assert (seen["node_rank"], seen["num_nodes"]) == (0, 1)
        assert (seen["backend"], seen["launcher"]) == (backend, launcher)
        assert seen["sum"] == size * (size + 1) / 2
        assert seen["from_0"] == {"rank": 0}
        assert seen["parameters"] == [[size - 1.0] * 3, [size - 1] * 4]
        assert size > 1 or seen["buckets"] == [[25, 2]] * 2
        assert size == 1 or seen["threads"] == 1


@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_auto_takes_what_the_launcher_is_made_for(launcher: str) -> None:
    job = jobs.run(launcher, None, 2, [SCRIPT], env={"HVDBRIDGE_LOG_LEVEL": "INFO"}).check()
    native = {launcher: backend for backend, launcher in jobs.NATIVE.items()}[launcher]
    assert [seen["backend"] for seen in job.records] == [native] * 2
    assert job.output.count(f"backend {native}: auto under {launcher}") == 1
