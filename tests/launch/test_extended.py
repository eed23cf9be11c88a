"""To add a backend takes a folder and a line, to add a launcher a class and a line: nothing else knows their names."""

from __future__ import annotations

from pathlib import Path

import jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "extended.py")


def test_a_backend_of_ones_own_gives_torchs_bits_under_a_launcher_of_ones_own() -> None:
    ours = jobs.run("fork", "shelf", 2, [SCRIPT]).check().records
    theirs = jobs.run("fork", "torch", 2, [SCRIPT]).check().records
    assert ours == theirs
    assert all(each["backend"] and each["launcher"] == "farm" and each["message"] == [0.0] * 3 for each in ours)
    assert ours[0] == ours[1]
