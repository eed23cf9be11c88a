"""Starts without a launcher, libraries that run already, and whatever a start refuses."""

from __future__ import annotations

import os
from pathlib import Path

import jobs
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PLACES, TERMINALS, ADOPT, WRONG = (str(SCRIPTS / f"{n}.py") for n in ("places", "terminals", "adopt", "wrong"))


@pytest.mark.parametrize(("how", "backend"), [("variables", "torch"), ("spawn", "horovod"), ("spawn", "mpi")])
def test_without_a_launcher(how: str, backend: str) -> None:
    """Where no variable tells the place on a host. Forked jobs have them, on each backend."""
    job = jobs.run(None, backend, 2, [TERMINALS, how, "2"]).check()
    for rank, seen in enumerate(job.records):
        assert (seen["rank"], seen["local_rank"], seen["node_rank"]) == (rank, rank, 0)
        assert (seen["size"], seen["local_size"], seen["num_nodes"]) == (2, 2, 1)
        assert (seen["backend"], seen["launcher"], seen["sum"]) == (backend, "bare", 3)


@pytest.mark.parametrize("backend", ["torch", "horovod"])  # MPI under srun needs srun's own PMI
def test_srun(backend: str) -> None:
    job = jobs.run(None, backend, 2, [TERMINALS, "slurm", "2"]).check()
    assert [(r["rank"], r["local_rank"], r["num_nodes"], r["launcher"], r["sum"]) for r in job.records] == [
        (0, 0, 1, "srun", 3), (1, 1, 1, "srun", 3)
    ]  # fmt: skip


def test_meeting_at_a_file() -> None:
    assert [r["sum"] for r in jobs.run(None, "torch", 2, [TERMINALS, "file", "2"]).check().records] == [3, 3]


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_alone(backend: str) -> None:
    (seen,) = jobs.run(None, backend, 1, [PLACES, "again"]).check().records
    assert (seen["size"], seen["num_nodes"], seen["launcher"], seen["sum"]) == (1, 1, "none", 1)


@pytest.mark.parametrize("library", jobs.BACKENDS)
def test_a_library_that_runs_is_adopted_and_left_running(library: str) -> None:
    launcher = jobs.NATIVE[library]
    for rank, seen in enumerate(jobs.run(launcher, None, 2, [ADOPT, library]).check().records):
        assert seen["seen"] == [[library, rank, 2, launcher, "hello"]] * 2
        assert seen["sum"] == 3


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_torchrun_restarts_the_job(backend: str) -> None:
    """Its store stays, with what the first attempt left in it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = jobs.run(None, backend, 2, [*torchrun, str(SCRIPTS / "restart.py")]).check()
    assert "the first attempt fails" in job.output
    assert job.records == [1, 1]


def refused(launcher: str | None, backend: str | None, argv: list[str], **env: str) -> tuple[str, str]:
    """The kind of error that every rank raised, and rank 0's text."""
    job = jobs.run(launcher, backend, 2 if launcher else 1, argv, env=env)
    assert job.status != 0, job.output[-4000:]
    assert None not in job.records, job.output[-4000:]
    assert len({kind for kind, _ in job.records}) == 1, job.records
    return tuple(job.records[0])


@pytest.mark.parametrize("launcher", jobs.LAUNCHERS)
def test_ranks_that_choose_different_backends(launcher: str) -> None:
    kind, text = refused(launcher, None, [WRONG, "backend=torch,mpi"])
    assert kind == "RankMismatch"
    assert "backend torch" in text
    assert "backend mpi" in text
    assert "rank 0:" in text
    assert "rank 1:" in text


def test_ranks_that_choose_different_policies() -> None:
    kind, text = refused("torchrun", "torch", [WRONG, "policy=mean,bf16"])
    assert kind == "RankMismatch"
    assert "policy mean" in text
    assert "policy bf16" in text


@pytest.mark.parametrize(
    ("backend", "module", "launcher", "remedy"),
    [
        ("horovod", "horovod", "torchrun", "Run: hvdbridge install-horovod"),
        ("mpi", "mpi4py", "horovodrun", "Run: pip install 'hvdbridge[mpich]'"),
        ("torch", "mpi4py", "mpiexec", "Run: pip install 'hvdbridge[mpich]'"),  # the ranks meet by MPI
    ],
)
def test_a_library_that_is_not_installed(backend: str, module: str, launcher: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'wrong.py' in ' '.join(sys.orig_argv): sys.modules[{module!r}] = None\n"
    )
    path = os.pathsep.join([str(tmp_path), jobs.environment()["PYTHONPATH"]])
    kind, text = refused(launcher, backend, [WRONG], PYTHONPATH=path)
    assert kind == "BackendUnavailable"
    assert "not installed" in text
    assert remedy in text


def test_an_mpi_that_cannot_join() -> None:
    kind, text = refused("torchrun", "mpi", [str(SCRIPTS / "open_mpi.py")])
    assert kind == "BackendUnavailable"
    assert "Open MPI v5.0.11 cannot join ranks that torchrun started" in text
    assert "mpiexec -n 2 python" in text


def test_a_library_that_found_another_number_of_ranks() -> None:
    kind, text = refused("torchrun", "mpi", [WRONG, "backend=mpi"], IMPORT_FIRST="mpi4py.MPI")
    assert kind == "RendezvousError"
    assert "of 2, but mpi4py found rank 0 of 1" in text
    assert "import it after" in text
