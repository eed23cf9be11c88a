"""torchrun --nproc-per-node 2 examples/migrate/by_hand_after.py, or mpiexec -n 2 python ..., or horovodrun ..."""

import hashlib

import torch
from torch import nn

import hvdbridge as hb

hb.init()
rank = hb.rank()
torch.set_num_threads(1)
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = hb.GradientSynchronizer(model, optimizer)
model, optimizer = sync.model, sync.optimizer
for step in range(10):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"rank {rank} digest {hashlib.sha256(parameters).hexdigest()[:16]}", flush=True)
hb.shutdown()
