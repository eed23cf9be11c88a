"""Train with flows that run as tapes (``--tape``) or as they are; record the parameters' digest and the graphs.

Each policy meets what a script may do between two steps: accumulation, a new loss scale, gradients that are not finite,
weights that add up to zero, a saved state that is loaded again, and ranks that run out of data.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from jobs import record
from tape import as_on_a_device, install
from torch import nn

import hvdbridge as hb

as_on_a_device()
if "--tape" in sys.argv:
    install()
hb.init()
torch.set_num_threads(1)
RANK = hb.rank()
SPECS = [
    "mean", "int8:rounding=stochastic", "onebit", "topk:ratio=0.1", "dgc:ratio=0.1,warmup=3",
    "powersgd:rank=2,alternate=true", "sign:momentum=0.9", "warmup(mean(exact=true), int8, steps=9)",
    "clip(ef(bf16))", "delayed(int8)",
]  # fmt: skip


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + RANK))


def train(spec: str, weighted: bool) -> list[object]:
    models = [net(1), net(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    options = {"policy": spec, "weighted": weighted, "bucket_mb": 0.01}
    sync, other = (hb.GradientSynchronizer(m, o, **options) for m, o in zip(models, optimizers, strict=True))
    saved = sync.state_dict()
    captured = 0
    for step in range(26):
        for one in (sync, other):
            if weighted:
                one.weight = 0.0 if step == 17 else 1.0 + (step * RANK) % 3
            scale = 2.0 if one is sync and step in (11, 12) else 1.0
            if one is sync:
                sync.loss_scale = scale
            one.optimizer.zero_grad()
            if step == 13:
                with one.no_sync():
                    one.model(batch(1000)).square().mean().backward()
            loss = one.model(batch(step)).square().mean() * scale
            if step == 15 and RANK == 1 and spec not in ("median:f=0",):
                loss = loss * float("nan")
            loss.backward()
            if step not in (11, 12, 15):
                one.optimizer.step()
        if step == 19:
            saved = sync.state_dict()
        if step == 21:
            sync.load_state_dict(saved)
        if sync._context.graphs is not None:
            captured = max(captured, sync._context.graphs.captured)
            assert other._context.graphs is None, "one synchronizer at a time has graphs"
    with sync.join():
        for step in range(2 + 2 * RANK):
            sync.optimizer.zero_grad()
            sync.model(batch(50 + step)).square().mean().backward()
            sync.optimizer.step()
    digest = hashlib.sha256()
    for parameter in [p for model in models for p in model.parameters()]:
        digest.update(parameter.detach().numpy().tobytes())
    found = [digest.hexdigest(), sync.stats()["bytes_sent"], captured]
    sync.close()
    other.close()
    return found


results = {f"{spec} {weighted}": train(spec, weighted) for spec in SPECS for weighted in (False, True)}
record(RANK, results)
hb.shutdown()
