"""Every rank records who it is and what the others told it.

places.py [buckets|again|leave]     and how large buckets are; the session is closed and opened again; it just ends
"""

import os
import sys
import time

import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.collectives import AllReduce

then = sys.argv[1] if len(sys.argv) > 1 else ""
began = time.monotonic()
hb.init()
seconds = time.monotonic() - began


def steps(static_graph: bool) -> tuple[float, float]:
    """The size of a bucket that nobody said, and how many there are of three layers of 1.2 MiB, once DDP has cut them
    anew."""
    model = torch.nn.Sequential(*(torch.nn.Linear(560, 560, bias=False) for _ in range(3)))
    sync = hb.GradientSynchronizer(model, static_graph=static_graph)
    for _ in range(3):
        sync.model(torch.ones(1, 560)).sum().backward()
    buckets = sync.stats()["collectives"]
    sync.close()
    return sync.bucket_mb, buckets


def look() -> dict:
    hb.barrier()
    session = hb.current()
    total = session.communicator.execute(AllReduce(torch.tensor([hb.rank() + 1.0])))
    tensors = {"a": torch.full((3,), float(hb.rank())), "b": torch.full((2, 2), hb.rank(), dtype=torch.int64)}
    hb.broadcast_parameters(tensors, root=hb.size() - 1)
    return {
        "rank": hb.rank(), "size": hb.size(), "local_rank": hb.local_rank(), "local_size": hb.local_size(),
        "node_rank": hb.node_rank(), "num_nodes": hb.num_nodes(), "backend": hb.backend(), "launcher": hb.launcher(),
        "sum": total.item(), "from_0": hb.broadcast_object({"rank": hb.rank()}), "threads": torch.get_num_threads(),
        "parameters": [tensors["a"].tolist(), tensors["b"].flatten().tolist()],
    }  # fmt: skip


seen = look()
if then == "buckets":
    seen["buckets"] = [steps(static_graph) for static_graph in (False, True)]
if then == "again":
    hb.shutdown()
    assert not hb.is_initialized()
    hb.init()
    assert look() == seen
record(hb.rank(), seen | {"seconds": seconds, "pid": os.getpid()})
if then != "leave":
    hb.shutdown()
