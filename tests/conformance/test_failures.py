"""A library's report of a silent or dead rank becomes an error of hvdbridge."""

from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.waits

# MPI is missing: it does not report a silent rank, and its launcher ends the others after a death.
CASES = [
    ("torch", "sleeps", "AllReduce", "CollectiveTimeout"),
    ("torch", "sleeps", "AllGather", "CollectiveTimeout"),
    ("torch", "exits", "AllGather", "RankFailed"),
    ("horovod", "sleeps", "AllReduce", "CollectiveTimeout"),
    ("horovod", "freezes", "AllReduce", "CollectiveTimeout"),
    ("horovod", "exits", "AllReduce", "RankFailed"),
    ("horovod", "exits", "many", "RankFailed"),
]


@pytest.mark.parametrize(("backend", "fate", "kind", "error"), CASES)
def test_error(backend: str, fate: str, kind: str, error: str) -> None:
    script = str(Path(__file__).with_name("failing_rank.py"))
    job = jobs.run(jobs.NATIVE[backend], backend, 2, [script, fate, kind], timeout=60)
    assert job.records[0] is not None, job.output[-4000:]
    name, text, seconds, cause = job.records[0]
    assert name == error, text
    assert cause != "NoneType"
    assert text.startswith("rank 0: ")
    assert kind.replace("many", "AllReduce") in text
    assert seconds < 30


def test_what_horovod_takes_while_it_ends_fails_soon() -> None:
    script = str(Path(__file__).with_name("failing_rank.py"))
    job = jobs.run("horovodrun", "horovod", 2, [script, "exits", "late"], timeout=60)
    assert job.records[0] is not None, job.output[-4000:]
    name, text, seconds = job.records[0]
    assert name == "HorovodInternalError", text
    assert text == "Horovod has been shut down; late was never done"
    assert seconds < 30
