"""State that an earlier release saved loads, and training goes on as it would have gone on there."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "old_state.py"


ROUNDING = 12 * 8 * 2**-24
"""What a BLAS may add in another order: 12 terms of size 1 in float32, in each of 8 steps."""


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_state_of_release_0_1_0_loads(backend: str) -> None:
    """Bit for bit but for a BLAS: gradients are exact, and a sum of two does not depend on its order."""
    for differences in jobs.run("fork", backend, 2, [str(SCRIPT)]).check().records:
        assert differences
        limits = {spec: ROUNDING if "powersgd" in spec else 0.0 for spec in differences}
        assert {spec: value for spec, value in differences.items() if not value <= limits[spec]} == {}
