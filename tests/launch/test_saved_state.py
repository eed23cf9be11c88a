"""State that an earlier release saved loads, and training goes on as it would have gone on there."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "old_state.py"


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_state_of_release_0_1_0_loads(backend: str) -> None:
    """Bit for bit: gradients are exact, and the sums of two ranks do not depend on their order."""
    for differences in jobs.run("fork", backend, 2, [str(SCRIPT)]).check().records:
        assert differences
        assert {spec: value for spec, value in differences.items() if value} == {}
