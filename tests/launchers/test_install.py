"""``install.py`` says what it leaves out and why, ends with apt-get's failure, and keeps a ``policy-rc.d``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launchers import install


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that lacks Slurm, whose apt-get is a script; return the folder of the script and ``policy-rc.d``."""
    monkeypatch.setattr(install, "PACKAGES", {"no-such-slurmd": "slurmd"})
    monkeypatch.setattr(install, "LIBRARIES", {"no/such/file": "libpmix-dev"})
    monkeypatch.setattr(install, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path, "exit 0")
    return tmp_path


def script(folder: Path, line: str) -> None:
    """Make apt-get a script that records its arguments and whether services may start, and then runs ``line``."""
    file = folder / "apt-get"
    file.write_text(f'#!/bin/sh\ncd {folder}\n./policy-rc.d; echo "$? $@" >>calls\n{line}\n')
    file.chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_missing_packages_are_installed_and_no_service_starts(apt: Path) -> None:
    install.debian()
    assert calls(apt) == ["101 update -q", "101 install -y -q --no-install-recommends slurmd libpmix-dev"]
    assert not install.POLICY.exists()


def test_a_policy_that_exists_stays(apt: Path) -> None:
    install.POLICY.write_text("#!/bin/sh\nexit 7\n")
    install.POLICY.chmod(0o755)
    install.debian()
    assert {line.split()[0] for line in calls(apt)} == {"7"}
    assert install.POLICY.read_text() == "#!/bin/sh\nexit 7\n"


def test_a_failure_of_apt_get_ends_the_script(apt: Path) -> None:
    script(apt, "exit 100")
    with pytest.raises(SystemExit, match=r"apt-get install .* slurmd libpmix-dev\nended with status 100"):
        install.debian()
    assert not install.POLICY.exists()


def test_without_root_the_reason_is_printed(
    apt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    install.debian()
    assert capsys.readouterr().out == "left out, since they need root and apt-get: slurmd, libpmix-dev\n"
    assert not (apt / "calls").exists()
