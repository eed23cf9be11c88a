"""The state of an earlier release can be loaded, and training continues as it would have continued there."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "old_state.py"


ROUNDING = 12 * 8 * 2**-24
"""Tolerance for the order of a BLAS's sums: 12 terms of size 1 in float32, in each of 8 steps."""


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_state_of_release_0_1_0_loads(backend: str) -> None:
    """Results without a BLAS are equal bit for bit: gradients are exact, and sums of two have no order."""
    for differences in jobs.run("fork", backend, 2, [str(SCRIPT)]).check().records:
        assert differences
        limits = {spec: ROUNDING if "powersgd" in spec else 0.0 for spec in differences}
        assert {spec: value for spec, value in differences.items() if not value <= limits[spec]} == {}
