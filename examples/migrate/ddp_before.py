"""torchrun --nproc-per-node 2 examples/migrate/ddp_before.py"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(10):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"rank {rank} digest {hashlib.sha256(parameters).hexdigest()[:16]}", flush=True)
dist.monitored_barrier()
dist.destroy_process_group()
