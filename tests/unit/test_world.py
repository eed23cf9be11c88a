"""Launcher detection: what each launcher leaves in the environment, and what is no launcher."""

from __future__ import annotations

import pytest

from hvdbridge.errors import ConfigurationError, RendezvousError
from hvdbridge.startup import launchers
from hvdbridge.startup.world import UNKNOWN, World

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
HOROVODRUN = {
    "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "5"}
SRUN = BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "n[1-3]",
}  # fmt: skip
BARE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
U = UNKNOWN


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, World(3, 4, 1, 2, 1, 2, "torchrun")),
        (HOROVODRUN, World(2, 3, 1, 2, U, U, "horovodrun")),
        (OPEN_MPI, World(1, 4, 1, 2, U, U, "mpiexec")),
        (MPICH, World(1, 4, 1, 2, U, U, "mpiexec")),
        (CRAY, World(1, 4, 1, 2, U, U, "mpiexec")),
        (SRUN, World(4, 5, 0, 1, 2, 3, "srun")),
        (BARE, World(1, 2, U, U, U, U, "bare")),
        (BARE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(1, 2, 1, 2, U, U, "bare")),
        ({}, World(0, 1, 0, 1, 0, 1, "none")),
        # what leaked is no launcher
        (BATCH, World(0, 1, 0, 1, 0, 1, "none")),
        (BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "1"}, World(0, 1, 0, 1, 0, 1, "none")),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, World(0, 1, 0, 1, 0, 1, "none")),
        # the innermost wins
        (MPICH | TORCHRUN, World(3, 4, 1, 2, 1, 2, "torchrun")),
        (SRUN | TORCHRUN, World(3, 4, 1, 2, 1, 2, "torchrun")),
        (SRUN | HOROVODRUN, World(2, 3, 1, 2, U, U, "horovodrun")),
        (SRUN | MPICH, World(1, 4, 1, 2, U, U, "mpiexec")),  # hydra in an allocation: its proxies are srun's tasks
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, World(4, 5, 0, 1, 2, 3, "srun")),  # srun --mpi=pmi2
        (SRUN | MPICH | {"PMI_RANK": "4", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0"}, World(4, 5, 0, 2, U, U, "mpiexec")),
        (SRUN | BARE | {"SLURM_PTY_PORT": "1"}, World(1, 2, U, U, U, U, "bare")),  # typed in a terminal of the step
        (MPICH | {"RANK": "0", "WORLD_SIZE": "1"}, World(1, 4, 1, 2, U, U, "mpiexec")),  # a pod's leftovers
        (SRUN | {"RANK": "9", "WORLD_SIZE": "20"}, World(9, 20, launcher="bare")),  # mp.spawn in each task
    ],
)
def test_who_am_i(environ: dict[str, str], expected: World) -> None:
    assert launchers.detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "error", "names"),
    [
        ({"RANK": "1"}, RendezvousError, ["RANK is set but WORLD_SIZE is not"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, RendezvousError, ["rank=2", "RANK=2 WORLD_SIZE=2"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ConfigurationError, ["RANK='one'"]),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "many"}, ConfigurationError, ["WORLD_SIZE='many'"]),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, RendezvousError, ["WORLD_SIZE", "torchrun"]),
        ({"HOROVOD_RANK": "1"}, RendezvousError, ["HOROVOD_SIZE", "horovodrun"]),
        ({"PMI_RANK": "1"}, RendezvousError, ["PMI_SIZE", "mpiexec"]),
        (SRUN | {"SLURM_PTY_PORT": "1"}, RendezvousError, ["step 7.0", "5 tasks", "RANK=0 WORLD_SIZE=1"]),
        (MPICH | {"MPI_LOCALNRANKS": "9"}, RendezvousError, ["local_size=9", "MPI_LOCALNRANKS=9"]),
        (MPICH | {"MPI_LOCALRANKID": "2"}, RendezvousError, ["local_rank=2", "MPI_LOCALRANKID=2"]),
    ],
)
def test_half_a_launcher_is_an_error(environ: dict[str, str], error: type[Exception], names: list[str]) -> None:
    with pytest.raises(error) as raised:
        launchers.detect(environ)
    assert all(name in str(raised.value) for name in names), raised.value


def test_what_the_launcher_told_is_kept() -> None:
    hosts = ["a", "b", "b", "a"]
    assert World(3, 4).completed(hosts) == World(3, 4, 1, 2, 0, 2)
    assert World(3, 4, local_rank=0, local_size=1).completed(hosts) == World(3, 4, 0, 1, 0, 2)
    assert World(3, 4, node_rank=3, num_nodes=4).completed(hosts) == World(3, 4, 1, 2, 3, 4)
