"""What several terminals, or ``mp.spawn``, would do: N processes with nothing but variables or arguments.

python terminals.py variables|slurm|spawn|file SIZE
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs
import torch.multiprocessing as mp

from hvdbridge.rendezvous.network import free_port

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


def variables(size: int) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(r), "WORLD_SIZE": str(size)} for r in range(size)
    ]


def slurm(size: int) -> list[dict[str, str]]:
    """What srun sets for one step on one host."""
    shared = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }  # fmt: skip
    return [shared | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(size)]


def terminals(environments: list[dict[str, str]]) -> int:
    ranks = [subprocess.Popen([sys.executable, PLACES, "again"], env=os.environ | env) for env in environments]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    how, size = sys.argv[1], int(sys.argv[2])
    if how in ("variables", "slurm"):
        sys.exit(terminals(variables(size) if how == "variables" else slurm(size)))
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{folder}/store" if how == "file" else f"tcp://127.0.0.1:{free_port()}"
        mp.spawn(child, (size, method), size)
