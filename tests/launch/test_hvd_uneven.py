"""``hvd.DistributedOptimizer`` where ranks have unequal data, or do things in another order, on each backend.

At two ranks the parameters are the real Horovod's, bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "hvd_uneven.py")

HALF = 2.0**-10
"""Of 16 bits: two roundings, of the gradients (below 4) and their sum, times the learning rate, in 8 steps."""


@pytest.fixture(scope="module", params=[(b, n) for b in jobs.BACKENDS for n in (2, 4)], ids=lambda p: f"{p[0]}-{p[1]}")
def job(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    backend, size = request.param
    return size, jobs.run(jobs.NATIVE[backend], backend, size, [SCRIPT, "hvdbridge.torch"], 120).check().records


@pytest.fixture(scope="module")
def real() -> Any:
    """What rank 0 ended with under Horovod itself."""
    return jobs.run("horovodrun", None, 2, [SCRIPT, "horovod.torch"], 120).check().records[0]


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("join", 1e-6),
        ("join_without_data", 1e-6),
        ("join_two_optimizers", HALF),
        ("join_after_a_backward", 1e-6),
        ("operation_before_or_after_backward", 1e-6),
        ("optimizers_in_another_order", 1e-6),
    ],
)
def test_as_horovod_and_as_arithmetic_says(job: tuple[int, list[Any]], real: Any, name: str, rounding: float) -> None:
    size, ranks = job
    assert all(seen[name] == ranks[0][name] for seen in ranks)
    found = ranks[0][name]
    assert found[-1] <= rounding
    if size == 2:
        assert found[0] == real[name][0]


def test_the_number_of_the_last_rank(job: tuple[int, list[Any]]) -> None:
    size, ranks = job
    assert ranks[0]["join"][1] == [0, size - 1]
