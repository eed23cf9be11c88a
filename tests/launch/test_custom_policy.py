"""A user's own policy: in one process, and on every backend."""

from __future__ import annotations

import runpy
from pathlib import Path

import jobs
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy.py"


def test_it_is_tested_without_a_process() -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["simulated"]()


def test_its_code_is_short() -> None:
    lines = EXAMPLE.read_text().splitlines()
    start, end = lines.index("@dataclass(frozen=True)"), lines.index('hb.policies.register("agreement", Agreement)')
    assert end - start + 1 < 40


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_it_runs_on(backend: str) -> None:
    job = jobs.run("fork", backend, 2, [str(EXAMPLE)])
    assert job.status == 0, job.output
    assert f"2 ranks on {backend}" in job.output
