"""The site's build refuses links and anchors that lead nowhere, and copies linked files of the repository.

These tests need MkDocs, which ``make docs`` (and so ``make ci``) installs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[2]


def build(tmp_path: Path, link: str) -> tuple[int, str]:
    """Build a site of two pages by this repository's rules; return the status and the output."""
    rules = (ROOT / "mkdocs.yml").read_text()
    validation = rules[rules.index("\nvalidation:") : rules.index("\nplugins:")].replace("docs/hooks.py", "hooks.py")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nstrict: true\nuse_directory_urls: false\ntheme: null\nplugins: []\n{validation}\n"
        "exclude_docs: '*.py'\n"
    )
    (tmp_path / "hooks.py").write_text((ROOT / "docs" / "hooks.py").read_text())
    (tmp_path / "docs" / "a").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.py").write_text("pass\n")
    (tmp_path / "NOTES.md").write_text("[x](docs/index.md)\n")
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n## Part\n\n[page](a/page.md)\n")
    (tmp_path / "docs" / "a" / "page.md").write_text(f"# Page\n\n{link}\n\n```text\n[code](../../no.py)\n```\n")
    (tmp_path / "docs" / "theme").mkdir()
    line = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[text](../index.md#part)", 'href="../index.html#part"'),
        ("[train.py](../../examples/train.py)", 'href="../repository/examples/train.py"'),
        ("[notes](../../NOTES.md)", 'href="../repository/NOTES.md.txt"'),
        ("[the examples](../../examples/)", "the examples (<code>examples/</code>)"),
    ],
)
def test_a_link_that_leads_somewhere(link: str, found: str, tmp_path: Path) -> None:
    status, output = build(tmp_path, link)
    assert status == 0, output
    assert found in (tmp_path / "site" / "a" / "page.html").read_text()
    if ".py" in link:
        assert (tmp_path / "site" / "repository" / "examples" / "train.py").read_text() == "pass\n"


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[text](../other.md)", "other.md"),
        ("[text](../index.md#no-part)", "no-part"),
        ("[text](#nowhere)", "nowhere"),
        ("[text](../../examples/other.py)", "the repository has no examples/other.py"),
        ("[text](/index.md)", "/index.md"),
    ],
)
def test_a_link_that_leads_nowhere(link: str, message: str, tmp_path: Path) -> None:
    status, output = build(tmp_path, link)
    assert status != 0
    assert message in output
