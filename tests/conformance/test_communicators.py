"""Each backend meets the specification at 1 to 4 ranks: a job runs the whole suite, and each test is reported here."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from conformance.suite import suite_names

RANK = str(Path(__file__).with_name("rank.py"))


@pytest.mark.parametrize("name", suite_names())
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_communicator(backend: str, size: int, name: str) -> None:
    check(backend, size, name)


# The example reduces nothing in place itself
@pytest.mark.parametrize("name", [name for name in suite_names() if name != "test_no_copy"])
def test_the_backend_of_the_examples(name: str) -> None:
    check("mesh", 3, name)


def check(backend: str, size: int, name: str) -> None:
    wrong = []
    for rank, found in enumerate(jobs.once("fork", backend, size, [RANK], timeout=120).check().records):
        assert found["size"] == size
        wrong += [f"rank {rank}: {text}" for text in found["wrong"][name]]
    assert not wrong, "\n".join(wrong)
