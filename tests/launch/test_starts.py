"""Starts without a launcher, adoption of libraries that already run, and the errors of a start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from hvdbridge.startup.network import free_port

SCRIPTS = Path(__file__).parent / "scripts"
PLACES, TERMINALS, ADOPT, WRONG = (str(SCRIPTS / f"{n}.py") for n in ("places", "terminals", "adopt", "wrong"))


@pytest.mark.parametrize(("how", "backend"), [("variables", "torch"), ("spawn", "horovod"), ("spawn", "mpi")])
def test_without_a_launcher(how: str, backend: str) -> None:
    """Ranks find their positions on a host without variables for them, which forked jobs have."""
    job = jobs.run(None, backend, 2, [TERMINALS, how, "2"]).check()
    for rank, seen in enumerate(job.records):
        assert (seen["rank"], seen["local_rank"], seen["node_rank"]) == (rank, rank, 0)
        assert (seen["size"], seen["local_size"], seen["num_nodes"]) == (2, 2, 1)
        assert (seen["backend"], seen["launcher"], seen["sum"]) == (backend, "bare", 3)


@pytest.mark.parametrize("backend", [None, *jobs.BACKENDS])
def test_srun_without_mpi(backend: str | None) -> None:
    """Under ``--mpi=none`` MPI joins the helper, and ``auto`` selects torch."""
    job = jobs.run(None, backend, 2, [TERMINALS, "slurm", "2"]).check()
    assert [(r["rank"], r["local_rank"], r["num_nodes"], r["launcher"], r["sum"]) for r in job.records] == [
        (0, 0, 1, "srun", 3), (1, 1, 1, "srun", 3)
    ]  # fmt: skip
    assert {r["backend"] for r in job.records} == {backend or "torch"}


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_meeting_at_an_address_of_ipv6(backend: str) -> None:
    assert [r["sum"] for r in jobs.run(None, backend, 2, [TERMINALS, "ipv6", "2"]).check().records] == [3, 3]


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_mpich_below_a_launcher_that_speaks_pmix(backend: str) -> None:
    """Every backend is refused, because ranks would meet by MPI and MPI_Init aborts; an address to meet at helps."""
    kind, text = refused(None, backend, [TERMINALS, "pmix", "2", WRONG], size=2)
    assert kind == "BackendUnavailable"
    assert "Open MPI's mpirun speaks PMIx" in text
    for word in ("MPICH Version", "mpiexec -n 2", "MPI4PY_LIBMPI", "set MASTER_ADDR and MASTER_PORT"):
        assert word in text
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = jobs.run(None, backend, 2, [TERMINALS, "pmix", "2"], env=meet).check()
    assert [(r["backend"], r["launcher"], r["sum"]) for r in job.records] == [(backend, "mpiexec", 3)] * 2


def test_a_user_whom_nobody_knows(tmp_path: Path) -> None:
    """In a container with an unknown user id there is no home; kernels are cached in the temporary directory."""
    code = "import hvdbridge as hb; from hvdbridge.kernels import native; hb.init(); assert native.compiled()"
    unset = ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "HVDBRIDGE_CACHE"]
    unshare = ["unshare", "--user", "--map-user=12345", *unset]
    call = [*unshare, f"TMPDIR={tmp_path}", sys.executable, "-c", code]
    subprocess.run(call, env=jobs.environment("torch"), check=True, timeout=60)
    assert list((tmp_path / "hvdbridge-12345" / "kernels").glob("native-*.so"))


def test_one_process_in_a_terminal_of_a_step() -> None:
    """In the terminal of ``srun --pty bash``, python needs RANK and WORLD_SIZE to run as one process."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "1"}
    job = jobs.run(None, None, 1, [PLACES], env=step, timeout=30.0)
    assert job.status == 1
    assert "srun --pty" in job.output
    assert "RANK=0 WORLD_SIZE=1" in job.output
    (seen,) = jobs.run(None, None, 1, [PLACES], env=step | {"RANK": "0", "WORLD_SIZE": "1"}).check().records
    assert (seen["size"], seen["launcher"]) == (1, "bare")


@pytest.mark.parametrize(
    ("others", "warned"),
    [
        ({}, True), ({"SLURM_PROCID": "0"}, False), ({"SLURM_NTASKS": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
    ids=["shell", "batch", "one task", "variables"],
)  # fmt: skip
def test_one_process_in_a_shell_of_salloc(others: dict[str, str], warned: bool) -> None:
    """A batch script, which has SLURM_PROCID, may run one process without a warning."""
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", **others}
    job = jobs.run(None, None, 1, [PLACES], env=env).check()
    assert job.records[0]["size"] == 1
    assert job.output.count("Slurm's allocation 7 has 4 tasks. Put srun before the command") == warned


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_ports_and_interface_as_asked_for(backend: str) -> None:
    """HVDBRIDGE_PORTS applies to the helper and to MPI; the kernel chooses Gloo's ports."""
    low = free_port()
    env = {"HVDBRIDGE_PORTS": f"{low}-{low + 9}", "HVDBRIDGE_IFACE": "lo"}
    first, second = jobs.run("fork", backend, 2, [str(SCRIPTS / "ports.py")], env=env).check().records
    assert len(first["helper"]) == 2
    assert all(low <= port < low + 10 for port in first["helper"])
    if backend == "mpi":
        assert all(low <= port < low + 10 for port in second["own"])


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_an_interface_that_one_rank_lacks(backend: str) -> None:
    kind, text = refused("fork", backend, [WRONG, "HVDBRIDGE_IFACE=lo,none7"])
    assert kind == "RendezvousError"
    assert "HVDBRIDGE_IFACE=none7" in text
    assert "lo (127.0.0.1)" in text


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
    """torchrun's store survives the restart, with the keys of the first attempt."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    job = jobs.run(None, backend, 2, [*torchrun, str(SCRIPTS / "restart.py")]).check()
    assert "the first attempt fails" in job.output
    assert job.records == [1, 1]


def refused(launcher: str | None, backend: str | None, argv: list[str], size: int = 0, **env: str) -> tuple[str, str]:
    """Return the type of the error that every rank raised, and rank 0's message."""
    job = jobs.run(launcher, backend, size or (2 if launcher else 1), argv, env=env)
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
        ("torch", "mpi4py", "mpiexec", "Run: pip install 'hvdbridge[mpich]'"),  # ranks meet by MPI
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
    assert "-n 2 python" in text


def test_a_library_that_found_another_number_of_ranks() -> None:
    kind, text = refused("torchrun", "mpi", [WRONG, "backend=mpi"], IMPORT_FIRST="mpi4py.MPI")
    assert kind == "RendezvousError"
    assert "of 2, but mpi4py found rank 0 of 1" in text
    assert "import it after" in text
