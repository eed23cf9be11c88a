"""Which MPI library starts under which launcher, from their variables. ``make test-launchers`` has the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdbridge.backends.mpi import starter
from hvdbridge.backends.starting import choose
from hvdbridge.errors import BackendUnavailable
from hvdbridge.startup import launchers
from hvdbridge.startup.world import World

MPICH, OPEN_4, OPEN_5 = "MPICH Version: 5.0.2", "Open MPI v4.1.4", "Open MPI v5.0.11"
INTEL = "Intel(R) MPI Library 2021"
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPIRUN_4 = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "7", "PMIX_RANK": "1"}
MPIRUN_5 = MPIRUN_4 | {"OMPI_VERSION": "5.0.11"}
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NODEID": "0",
}  # fmt: skip
TWO_NODES = SRUN | {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
PMI2, PMIX = {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}

STARTS = [
    (MPICH, HYDRA), (MPICH, SRUN | PMI2), (INTEL, HYDRA), (INTEL, TWO_NODES | PMI2), (INTEL, TWO_NODES | PMIX),
    (OPEN_4, MPIRUN_4), (OPEN_5, MPIRUN_4), (OPEN_5, MPIRUN_5), (OPEN_5, TWO_NODES | PMIX), (OPEN_5, SRUN),
    (MPICH, TWO_NODES), (OPEN_4, MPIRUN_5 | TORCHRUN), ("MVAPICH 4.0", HYDRA),
]  # fmt: skip
"""Open MPI below srun without PMI, and below torchrun, is refused for another reason: no one starts it there."""
REFUSED = [
    (MPICH, MPIRUN_4, "Open MPI's mpirun speaks PMIx", "/own/bin/mpiexec -n 2 python"),
    (MPICH, TWO_NODES | PMIX, "srun --mpi=pmix speaks PMIx", "srun --mpi=pmi2 python"),
    (MPICH, TWO_NODES | PMI2, "cuts lines", ""),
    (INTEL, MPIRUN_5, "starts no Intel MPI", "/own/bin/mpiexec -n 2 python"),
    (OPEN_4, HYDRA, "MPICH's or Intel MPI's mpiexec speaks PMI", "/own/bin/mpirun -n 2 python"),
    (OPEN_5, SRUN | PMI2, "srun --mpi=pmi2 speaks PMI", "srun --mpi=pmix python"),
    (OPEN_4, MPIRUN_5, "mpirun of Open MPI 5.0.11 starts no Open MPI v4.1.4", "/own/bin/mpirun -n 2 python"),
]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """The shared libraries of a process, which a test may change. /own/bin has a launcher of each kind."""
    for name in ("mpirun", "mpiexec"):
        (tmp_path / "own" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / "bin" / name).touch()
    found = {"libmpi": tmp_path / "own" / "lib" / "libmpi.so.40"}
    monkeypatch.setattr(starter, "_loaded", found.get)
    return found


def reason(monkeypatch: pytest.MonkeyPatch, library: str, env: dict[str, str]) -> str:
    monkeypatch.setattr(starter, "_version", lambda: library)
    for name in (*HYDRA, *MPIRUN_5, *TWO_NODES, *PMIX, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return starter.incompatibility(launchers.detect())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("library", "env"), STARTS)
def test_no_reason_against_it(library: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch, library, env) == ""


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("library", "env", "cause", "remedy"), REFUSED)
def test_a_reason_and_the_command_that_works(
    library: str, env: dict[str, str], cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reason(monkeypatch, library, env)
    assert cause in text
    assert remedy in text
    assert library in text or "Intel MPI" in text


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("words", "argv", "shown"),
    [
        (["-m", "hvdbridge.run", "train.py", "--tag", "a b"], ["train.py", "--tag", "a b"],
         "python -m hvdbridge.run train.py --tag 'a b',"),
        (["/bin/hvdbridge", "run", "train.py"], ["train.py"], "python /bin/hvdbridge run train.py,"),
        (["-c", "import x"], ["-c"], "python train.py,"),
        ([], [""], "python train.py,"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("library", "env", "start"), [(MPICH, MPIRUN_4, "-n 2 "), (MPICH, TWO_NODES | PMIX, "pmi2 ")])
def test_the_command_runs_the_same_script(
    library: str, env: dict[str, str], start: str, words: list[str], argv: list[str], shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "orig_argv", ["python", *words])
    monkeypatch.setattr(sys, "argv", argv)
    text = reason(monkeypatch, library, env)
    shown = shown.removesuffix(",") + (" (srun" if "SLURM_PROCID" in env else ",")
    assert start + shown in text


def test_an_mpich_with_pmix(loaded: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded["libpmix"] = Path("/usr/lib/libpmix.so.2")
    assert reason(monkeypatch, MPICH, MPIRUN_4) == ""


@pytest.mark.parametrize(("component", "starts"), [("s2", True), ("ext3x", False), (None, True)])
def test_an_open_mpi_with_slurms_pmi(
    component: str | None, starts: bool, loaded: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Components that are linked into the library leave no file, so it is tried."""
    folder = loaded["libmpi"].parent / "openmpi" / "lib" / "openmpi3"
    folder.mkdir(parents=True)
    if component:
        (folder / f"mca_pmix_{component}.so").touch()
    assert (reason(monkeypatch, OPEN_4, SRUN | PMI2) == "") == starts


@pytest.mark.parametrize("name", ["/nowhere/libmpi.so", "libmpi_of_nobody.so"])
def test_an_mpi_library_that_the_variable_names_and_nobody_has(name: str) -> None:
    code = "from hvdbridge.backends.mpi import starter; starter._library()"
    env = os.environ | {"MPI4PY_LIBMPI": name}
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert f"BackendUnavailable: MPI4PY_LIBMPI={name} names a library that mpi4py cannot load" in last
    assert last.endswith("Unset or correct MPI4PY_LIBMPI.")
    assert "hvdbridge[mpich]" not in last


def test_auto_takes_mpi_where_slurm_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, backend in [(PMI2, "mpi"), (PMIX, "mpi"), ({}, "torch")]:
        reason(monkeypatch, MPICH, SRUN | variables)
        assert choose("auto", launchers.detect()) == (backend, False)


MIB = 1 << 20


def shared_memory(monkeypatch: pytest.MonkeyPatch, library: str, blocks: int, free: int, **place: int) -> None:
    """Check a /dev/shm with ``blocks`` and ``free`` bytes, as rank 0 of four on one host; ``place`` changes that."""
    monkeypatch.setattr(starter, "_version", lambda: library)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=1))
    starter.check_shared_memory(World(**({"rank": 0, "size": 4, "local_rank": 0, "local_size": 4} | place)))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("library", [MPICH, INTEL])
def test_a_full_shared_memory_is_refused(library: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone would end by SIGBUS, too."""
    with pytest.raises(BackendUnavailable, match=r"^rank 0: /dev/shm of .* has 1\.0 MB free\. .*SIGBUS.*--shm-size"):
        shared_memory(monkeypatch, library, 64 * MIB, MIB - 1, size=size, local_size=size)


@pytest.mark.parametrize(
    ("free", "place", "warned"),
    [
        (23 * MIB, {}, True), (24 * MIB, {}, False), (MIB, {}, True),
        (23 * MIB, {"rank": 1, "local_rank": 1}, False),
        (5 * MIB, {"local_rank": -1, "local_size": -1}, True),
        (5 * MIB, {"local_size": 1}, True), (6 * MIB, {"local_size": 1}, False),
    ],
)  # fmt: skip
def test_a_small_shared_memory_is_named_once_on_each_host(
    free: int, place: dict[str, int], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared_memory(monkeypatch, MPICH, 64 * MIB, free, **place)
    assert ("MB free" in caplog.text) is warned


@pytest.mark.parametrize(("library", "blocks"), [(OPEN_4, 64 * MIB), (OPEN_5, 64 * MIB), (MPICH, 0)])
def test_a_full_shared_memory_that_does_no_harm(
    library: str, blocks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Open MPI goes on without it. No blocks: a tmpfs without a limit."""
    shared_memory(monkeypatch, library, blocks, 0)
    assert not caplog.text
