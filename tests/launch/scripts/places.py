"""Every rank records who it is and what the others told it.

places.py [buckets|again|leave]: and how large buckets are; closes the session, opens it again and trains; just ends
"""

import hashlib
import os
import sys
import time

import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.policy.collectives import AllReduce

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


def trained(policy: str, weighted: bool = False) -> str:
    """The digest of a model after three steps; the optimizer is three words here, since torch's import its compiler."""
    torch.manual_seed(hb.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    sync = hb.GradientSynchronizer(model, policy=policy, weighted=weighted)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + hb.rank())
        sync.weight = 1.0 + hb.rank() if weighted else None
        model.zero_grad()
        sync.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    sync.close()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


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
    seen["digests"] = [trained("mean"), trained("mean", weighted=True), trained("bf16")]
record(hb.rank(), seen | {"seconds": seconds, "pid": os.getpid()})
if then != "leave":
    hb.shutdown()
