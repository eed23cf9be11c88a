"""Every rank records what its network interface sent per step, and what the policy predicts.

traffic.py INTERFACE SPEC...
"""

import os
import sys
from pathlib import Path

import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.policies import bytes_per_step, from_spec

COUNTER = Path(f"/sys/class/net/{sys.argv[1]}/statistics/tx_bytes")
BEFORE, STEPS = 2, 3  # DDP lays its buckets anew after the first step

hb.init()
found = {}
for spec in sys.argv[2:]:
    torch.manual_seed(hb.rank())
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = hb.GradientSynchronizer(model, optimizer, policy=spec, weighted=False)
    x = torch.randn(8, 1024)
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            hb.barrier()
            began = int(COUNTER.read_text())
        optimizer.zero_grad()
        sync.model(x).square().mean().backward()
        sync.optimizer.step()
    counted = sync.stats()["bytes_sent"]
    hb.barrier()
    sent = (int(COUNTER.read_text()) - began) / STEPS
    params = dict(model.named_parameters())
    predicted = bytes_per_step(from_spec(spec), params, hb.size(), step=BEFORE, local_size=1)
    found[spec] = {"sent": sent, "predicted": predicted, "counted": counted}
    sync.close()
record(hb.rank(), found | {"pid": os.getpid()})
hb.shutdown()
