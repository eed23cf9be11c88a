"""A new backend takes a package and a line, a new launcher a class and a line: no other code has their names."""

from __future__ import annotations

from pathlib import Path

import jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "extended.py")


def test_a_backend_of_ones_own_gives_torchs_bits_under_a_launcher_of_ones_own() -> None:
    ours = jobs.run("fork", "shelf", 2, [SCRIPT]).check().records
    expected = jobs.run("fork", "torch", 2, [SCRIPT]).check().records
    assert ours == expected
    assert all(record["backend"] and record["launcher"] == "farm" and record["message"] == [0.0] * 3 for record in ours)
    assert ours[0] == ours[1]
