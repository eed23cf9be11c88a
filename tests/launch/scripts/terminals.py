"""What several terminals, or ``mp.spawn``, would do: N processes with nothing but variables or arguments.

python terminals.py variables|ipv6|slurm|pmix|spawn|file SIZE [SCRIPT]
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jobs
import torch.multiprocessing as mp

from hvdbridge.startup.network import free_port

PLACES = str(Path(__file__).with_name("places.py"))


def child(rank: int, size: int, init_method: str) -> None:
    import hvdbridge as hb

    with hb.session(rank=rank, size=size, init_method=init_method) as session:
        ranks = session.control.all_gather_object(hb.rank())
        jobs.record(rank, {
            "rank": hb.rank(), "size": hb.size(), "local_rank": hb.local_rank(), "local_size": hb.local_size(),
            "node_rank": hb.node_rank(), "num_nodes": hb.num_nodes(), "backend": hb.backend(),
            "launcher": hb.launcher(), "sum": sum(ranks) + len(ranks),
        })  # fmt: skip


def variables(size: int, host: str = "127.0.0.1") -> list[dict[str, str]]:
    port = str(free_port())
    return [{"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(r), "WORLD_SIZE": str(size)} for r in range(size)]


def slurm(size: int) -> list[dict[str, str]]:
    """What srun sets for one step on one host."""
    shared = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }  # fmt: skip
    return [shared | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(size)]


def pmix(size: int) -> list[dict[str, str]]:
    """What Open MPI's mpirun sets, which mpi4py with MPICH meets here."""
    shared = {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size), "PMIX_NAMESPACE": "prterun-1"}
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
    return [shared | dict.fromkeys(ranks, str(r)) for r in range(size)]


def terminals(environments: list[dict[str, str]], script: list[str]) -> int:
    ranks = [subprocess.Popen([sys.executable, *script], env=os.environ | env) for env in environments]
    return max(rank.wait() for rank in ranks)


PLACES_OF = {"variables": variables, "ipv6": partial(variables, host="::1"), "slurm": slurm, "pmix": pmix}


if __name__ == "__main__":
    how, size = sys.argv[1], int(sys.argv[2])
    if how in PLACES_OF:
        sys.exit(terminals(PLACES_OF[how](size), sys.argv[3:] or [PLACES, "again"]))
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{folder}/store" if how == "file" else f"tcp://127.0.0.1:{free_port()}"
        mp.spawn(child, (size, method), size)
