"""The user starts a library; hvdbridge takes it as it is, and leaves it running.

adopt.py torch|horovod|mpi
"""

import sys

import torch
from jobs import leave_torch, record

import hvdbridge as hb

name = sys.argv[1]
if name == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
elif name == "horovod":
    import horovod.torch as hvd

    hvd.init()
else:
    from mpi4py import MPI

seen = []
for _ in range(2):
    hb.init()
    seen.append([hb.backend(), hb.rank(), hb.size(), hb.launcher(), hb.broadcast_object("hello")])
    hb.shutdown()

rank = seen[0][1]
mine = torch.tensor([rank + 1.0])
if name == "torch":
    dist.all_reduce(mine)
elif name == "horovod":
    mine = hvd.allreduce(mine, op=hvd.Sum)
else:
    mine = torch.tensor([MPI.COMM_WORLD.allreduce(mine.item())])
record(rank, {"seen": seen, "sum": mine.item()})
if name == "torch":
    leave_torch()
