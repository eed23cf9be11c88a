"""What a library raises when a rank is silent or gone becomes an error of ours, where the library tells."""

from pathlib import Path

import jobs
import pytest

# MPI tells nobody of a silent rank, and its launcher ends the ranks of a dead one.
TELLS = ["torch", "horovod"]


@pytest.mark.parametrize("request_kind", ["AllReduce", "AllGather"])
@pytest.mark.parametrize(("fate", "error"), [("sleeps", "CollectiveTimeout"), ("exits", "RankFailed")])
@pytest.mark.parametrize("backend", TELLS)
def test_error(backend: str, fate: str, error: str, request_kind: str) -> None:
    script = str(Path(__file__).with_name("failing_rank.py"))
    job = jobs.run(jobs.NATIVE[backend], backend, 2, [script, fate, request_kind], timeout=60)
    assert job.records[0] is not None, job.output[-4000:]
    name, text, seconds, _ = job.records[0]
    assert name == error, text
    assert text.startswith("rank 0: ")
    assert request_kind in text
    assert seconds < 10
