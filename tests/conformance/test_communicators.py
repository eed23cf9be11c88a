"""Each backend, under its own launcher, at 1 to 4 ranks: one job runs the whole suite; each test is reported here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jobs
import pytest
from conformance.suite import suite_names


@cache
def job(backend: str, size: int) -> jobs.Job:
    return jobs.run(jobs.NATIVE[backend], backend, size, [str(Path(__file__).with_name("rank.py"))], timeout=120)


@pytest.mark.parametrize("name", suite_names())
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_communicator(backend: str, size: int, name: str) -> None:
    wrong = []
    for rank, found in enumerate(job(backend, size).check().records):
        assert found["size"] == size
        wrong += [f"rank {rank}: {text}" for text in found["wrong"][name]]
    assert not wrong, "\n".join(wrong)
