"""MPI libraries under launchers: the table of ``docs/how-to/mpi.md`` is what happens here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from launchers.cluster import Slurm
from launchers.conftest import Library
from launchers.shell import TRAINS, check, environment, last_error, shell

from hvdbridge.startup.network import free_port

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "mpi.md"
NAMES = {"MPICH": "MPICH", "Intel MPI": "Intel(R) MPI", "Open MPI 4.1": "Open MPI v4.1", "Open MPI 5": "Open MPI v5"}
"""Name of a library -> the beginning of its version text."""
OWN = {"MPICH": "mpiexec", "Intel MPI": "mpiexec", "Open MPI 4.1": "mpirun", "Open MPI 5": "mpirun"}


def table() -> list[tuple[str, str, str]]:
    """Return (library, launcher, the cell's word) for each cell of the page's table."""
    lines = PAGE.read_text().partition("<!-- table: launchers")[2].partition("<!-- end of table -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = [cell.replace("`", "") for cell in rows[0]]
    return [(row[0], launcher, cell) for row in rows[2:] for launcher, cell in zip(head[1:], row[1:], strict=True)]


CELLS = table()


def named(text: str) -> str:
    return next(name for name in NAMES if text.startswith(name))


def cells(by_srun: bool) -> pytest.MarkDecorator:
    chosen = [cell for cell in CELLS if cell[1].startswith("srun") == by_srun]
    return pytest.mark.parametrize(("title", "launcher", "expected"), chosen, ids=lambda text: text)


@cells(by_srun=False)
def test_under_a_launcher(title: str, launcher: str, expected: str, library: Callable[[str], Library]) -> None:
    found, name = library(named(title)), "mpiexec" if "'s " in launcher else launcher
    if name == "mpiexec":
        over = " --oversubscribe" if "Open" in launcher else ""
        command = f"{library(named(launcher)).mpiexec} -n 2{over} {found.python} {TRAINS}"
    elif name == "torchrun":
        command = f"{found.python} -m torch.distributed.run --standalone --nproc-per-node 2 {TRAINS}"
    else:
        command = f"horovodrun -np 2 {found.python} {TRAINS}"
    env = environment("mpi", **found.env)
    job = shell(command, "mpi", 2, env=env)
    if expected == "yes":
        check(job, "mpi", name)
        return
    refused(job, title, launcher)
    if expected == "address":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        check(shell(command, "mpi", 2, env=env), "mpi", name)
    else:
        assert expected == "no"


@cells(by_srun=True)
def test_under_srun(title: str, launcher: str, expected: str, library: Callable[[str], Library], slurm: Slurm) -> None:
    found = library(named(title))
    job = slurm.run(f"{launcher} -N 2 -n 2 {found.python} {TRAINS}", "mpi", 2, **found.env)
    if expected == "yes":
        check(job, "mpi", "srun", [0, 1])
    else:
        assert expected == "no"
        refused(job, title, launcher)


def refused(job: jobs.Job, title: str, launcher: str) -> None:
    """Every rank raised BackendUnavailable before MPI_Init, and its message has the command that works."""
    assert job.status not in (0, -1)
    assert job.records == [None, None]
    text = last_error(job.output, "BackendUnavailable")
    assert NAMES[named(title)].partition("(")[0] in text
    if launcher.startswith("srun"):
        assert f"srun --mpi={'pmix' if 'Open' in title else 'pmi2'} python" in text
    else:
        assert f"{OWN[named(title)]}" in text
        assert "-n 2 python" in text
    for word in ("Abort(", "unsupported PMI", "MPI_ERRORS_ARE_FATAL"):
        assert word not in job.output


@pytest.mark.parametrize("backend", [None, "torch", "horovod"])
@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5", "Intel MPI"])
def test_backends_under_the_library_s_own_launcher(
    name: str, backend: str | None, library: Callable[[str], Library]
) -> None:
    """The ranks meet by MPI, whatever they train on; ``auto`` takes MPI."""
    found = library(name)
    over = " --oversubscribe" if "Open" in name else ""
    command = f"{found.mpiexec} -n 2{over} {found.python} {TRAINS}"
    check(shell(command, backend, 2, env=environment(backend, **found.env)), backend or "mpi", "mpiexec")


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_backends_without_mpi(backend: str, library: Callable[[str], Library]) -> None:
    """MPICH under Open MPI's mpirun: with an address to meet at, torch and Horovod need no MPI; without, a remedy."""
    found, mpirun = library("MPICH"), library("Open MPI 4.1").mpiexec
    command = f"{mpirun} -n 2 --oversubscribe {found.python} {TRAINS}"
    text = last_error(shell(command, backend, 2).output, "BackendUnavailable")
    assert "Open MPI's mpirun speaks PMIx" in text
    assert "set MASTER_ADDR and MASTER_PORT" in text
    env = environment(backend, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    check(shell(command, backend, 2, env=env), backend, "mpiexec")


@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5", "Intel MPI", "MPICH"])
def test_one_process_under_another_launcher(name: str, library: Callable[[str], Library]) -> None:
    """``-n 1`` works with any library, since no rank needs to meet another."""
    found, other = library(name), library("MPICH" if "Open" in name else "Open MPI 4.1")
    check(shell(f"{other.mpiexec} -n 1 {found.python} {TRAINS}", "mpi", 1, env=environment("mpi", **found.env)),
          "mpi", "mpiexec")  # fmt: skip


@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5", "Intel MPI"])
def test_mpirun_in_a_batch_script(name: str, library: Callable[[str], Library], slurm: Slurm) -> None:
    """It starts its daemons by srun, on both nodes."""
    found = library(name)
    options = "-ppn 1" if name == "Intel MPI" else "--map-by node"
    line = f"{found.mpiexec} -n 2 {options} {found.python} {TRAINS}"
    check(slurm.batch(line, "-N 2 --ntasks-per-node 1", "mpi", 2, **found.env), "mpi", "mpiexec", [0, 1])
