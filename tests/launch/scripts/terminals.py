"""What several terminals, or ``mp.spawn``, would do: N processes with nothing but variables or arguments.

python terminals.py variables|spawn|file SIZE
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jobs
import torch.multiprocessing as mp

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


def variables(size: int) -> int:
    port = str(jobs.free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, PLACES, "again"],
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(r), "WORLD_SIZE": str(size)},
        )
        for r in range(size)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    how, size = sys.argv[1], int(sys.argv[2])
    if how == "variables":
        sys.exit(variables(size))
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{folder}/store" if how == "file" else f"tcp://127.0.0.1:{jobs.free_port()}"
        mp.spawn(child, (size, method), size)
