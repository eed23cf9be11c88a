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
    """Return (library, launcher, what the table says) for each cell."""
    lines = PAGE.read_text().partition("<!-- table: launchers")[2].partition("<!-- end of table -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head = [cell.replace("`", "") for cell in rows[0]]
    return [(row[0], launcher, cell) for row in rows[2:] for launcher, cell in zip(head[1:], row[1:], strict=True)]


CELLS = table()


def named(text: str) -> str:
    return next(name for name in NAMES if text.startswith(name))


@pytest.mark.parametrize(("title", "launcher", "said"), CELLS, ids=lambda text: text)
def test_cell(
    title: str, launcher: str, said: str, library: Callable[[str], Library], request: pytest.FixtureRequest
) -> None:
    found = library(named(title))
    run = shell
    env = environment("mpi", **found.env)
    if launcher.startswith("srun"):
        slurm: Slurm = request.getfixturevalue("slurm")
        command, name, nodes = f"{launcher} -N 2 -n 2 {found.python}", "srun", [0, 1]
        job = slurm.run(f"{command} {TRAINS}", "mpi", 2, **found.env)
    else:
        nodes = [0, 0]
        if "'s " in launcher:
            mpiexec = library(named(launcher)).mpiexec
            over = " --oversubscribe" if "Open" in launcher else ""
            command, name = f"{mpiexec} -n 2{over} {found.python}", "mpiexec"
        elif launcher == "torchrun":
            command, name = f"{found.python} -m torch.distributed.run --standalone --nproc-per-node 2", "torchrun"
        else:
            command, name = f"horovodrun -np 2 {found.python}", "horovodrun"
        job = run(f"{command} {TRAINS}", "mpi", 2, env=env)
    if said == "yes":
        check(job, "mpi", name, nodes)
        return
    refused(job, title, launcher)
    if said == "address":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        check(run(f"{command} {TRAINS}", "mpi", 2, env=env), "mpi", name)
    else:
        assert said == "no"


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
    for word in ("abort", "Abort"):
        assert word not in job.output.replace("it would abort", ""), job.output[-4000:]


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
