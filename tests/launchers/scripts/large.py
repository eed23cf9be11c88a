"""Train with messages of 100 MB, larger than a container's /dev/shm. Each rank records its size and largest error."""

import torch
from jobs import record

import hvdbridge as hb

hb.init()
model = torch.nn.Linear(5120, 5120, bias=False)  # 100 MiB
sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_mb=200)
start = model.weight.detach().clone()
for _ in range(3):
    sync.optimizer.zero_grad()
    sync.model(torch.full((1, 5120), hb.rank() + 1.0)).sum().backward()
    sync.optimizer.step()
expected = start - 3 * (hb.size() + 1) / 2
record(hb.rank(), [hb.size(), (model.weight - expected).abs().max().item()])
hb.shutdown()
