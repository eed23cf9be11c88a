"""What the tests of real launchers start: a Slurm cluster, simulated hosts, and MPI libraries with their launchers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jobs
import pytest
from launchers import install
from launchers.cluster import NoCluster, Slurm, cluster

from benchmarks.hosts import Hosts, NoHosts
from benchmarks.hosts import hosts as simulated


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A cluster of two hosts."""
    try:
        with cluster(2) as running:
            yield running
    except (NoCluster, NoHosts) as error:
        pytest.skip(str(error))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts without Slurm, which a test may change."""
    try:
        with simulated(2) as made:
            yield made
    except NoHosts as error:
        pytest.skip(str(error))


def output(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command with further variables, and return its output."""
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Library:
    """An MPI library: the Python whose mpi4py loads it, its own mpiexec, and variables that select it."""

    python: str
    mpiexec: str
    env: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="session")
def libraries() -> dict[str, Library]:
    """The MPI libraries that this machine has."""
    found = {"MPICH": Library(f"{jobs.BIN}/python", f"{jobs.BIN}/mpiexec")}
    for title, name, mpiexec in (("Open MPI 5", "open-mpi", "mpirun"), ("Intel MPI", "intel-mpi", "mpiexec")):
        environment = install.FOLDER / name
        if (environment / "complete").exists():
            found[title] = Library(f"{environment}/bin/python", f"{environment}/bin/{mpiexec}")
    if (mpirun := shutil.which("mpirun.openmpi")) and "4.1." in output([mpirun, "--version"]):
        ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"  # not on every user's PATH
        path = next((word for word in output([ldconfig, "-p"]).split() if word.endswith("/libmpi.so.40")), "")
        found["Open MPI 4.1"] = Library(f"{jobs.BIN}/python", mpirun, {"MPI4PY_LIBMPI": path})
    return found


@pytest.fixture
def library(libraries: dict[str, Library]) -> Callable[[str], Library]:
    """Return a library by its name, or skip the test."""

    def find(name: str) -> Library:
        if name not in libraries:
            pytest.skip(f"{name} is not installed: make test-launchers installs it, Debian's packages as root")
        return libraries[name]

    return find
