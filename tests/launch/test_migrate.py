"""The scripts of examples/migrate give the same parameters before and after, and a page shows their difference."""

from __future__ import annotations

import re
from difflib import ndiff
from pathlib import Path

import jobs
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migrate"
PLAIN = Path(__file__).parent / "scripts" / "plain.py"


def digests(backend: str | None, *argv: str, launcher: str = "fork") -> list[str]:
    job = jobs.run(launcher, backend, 2, argv)
    assert job.status == 0, job.output[-4000:]
    return [found for _, found in sorted(re.findall(r"rank (\d) digest ([0-9a-f]+)", job.output))]


@pytest.mark.parametrize("kind", ["ddp", "by_hand", "horovod"])
def test_before_is_after(kind: str) -> None:
    script, after = (str(SCRIPTS / f"{kind}_{when}.py") for when in ("before", "after"))
    if kind == "horovod":
        before = digests(None, script, launcher="horovodrun")
    else:
        before = digests(None, str(PLAIN), script)
    assert len(before) == 2
    assert len(set(before)) == 1
    for backend in jobs.BACKENDS:
        assert digests(backend, after) == before, backend


@pytest.mark.parametrize(
    ("kind", "page"),
    [("ddp", "how-to/bridges.md"), ("by_hand", "how-to/bridges.md"), ("horovod", "tutorials/from-horovod.md")],
)
def test_the_page_shows_what_changes(kind: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    before, after = ((SCRIPTS / f"{kind}_{when}.py").read_text().splitlines()[2:] for when in ("before", "after"))
    changes = [line[0] + line[2:] for line in ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert changes
    for change in changes:
        assert change in text, change
