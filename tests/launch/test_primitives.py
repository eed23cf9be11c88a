"""The primitives on every backend, at two and at three ranks."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = str(SCRIPTS / "primitives.py")


def records(backend: str, size: int) -> list[dict[str, str]]:
    return jobs.once("fork", backend, size, [SCRIPT], timeout=150).check().records


@pytest.mark.parametrize(("backend", "size"), [("torch", 2), ("mpi", 2), ("torch", 3), ("horovod", 3), ("mpi", 3)])
def test_each_is_what_it_means(backend: str, size: int) -> None:
    """Results have the same bits on all ranks and backends; the script compares float sums of three ranks."""
    found = records(backend, size)
    for rank in found:
        for result in rank.values():
            assert "Traceback" not in result, result
    assert len(found[0]) == 19
    assert found == [records("torch", size)[0]] * size, "the same bits on all ranks and backends"


@pytest.mark.parametrize(
    ("launcher", "backend"), [("mpiexec", "torch"), ("torchrun", "horovod"), ("horovodrun", "mpi")]
)
def test_messages_under_another_launcher(launcher: str, backend: str) -> None:
    scenarios = ["messages", "from_anyone", "groups"]
    for rank in jobs.run(launcher, backend, 2, [SCRIPT, *scenarios]).check().records:
        assert rank == dict.fromkeys(scenarios, "right"), rank


@pytest.mark.waits
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_receive_that_nobody_answers_names_itself_and_ends(backend: str) -> None:
    env = {"HVDBRIDGE_STALL_SECONDS": "1", "HVDBRIDGE_TIMEOUT_SECONDS": "15"}
    job = jobs.run("fork", backend, 2, [str(SCRIPTS / "no_message.py")], env=env, timeout=90)
    assert job.status != 0
    assert re.search(r"recv\[3\] float32 from rank 1, tag 4 is not finished after [\d.]+ s", job.output), job.output
    assert "CollectiveTimeout" in job.output or "HVDBRIDGE_TIMEOUT_SECONDS=15" in job.output, job.output


def test_lengths_that_differ_are_found_where_asked() -> None:
    """HVDBRIDGE_DEBUG finds them, because MPI itself raises no error."""
    call = "import hvdbridge as hb, torch; hb.init(); hb.all_reduce(torch.ones(3 + hb.rank())); hb.shutdown()"
    job = jobs.run("fork", "mpi", 2, ["-c", call], env={"HVDBRIDGE_DEBUG": "1"})
    assert job.status != 0
    assert "CollectiveMismatch" in job.output
    assert re.search(r"AllReduce\[3\].*AllReduce\[4\]", job.output), job.output
