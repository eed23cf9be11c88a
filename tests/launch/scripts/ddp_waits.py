"""Where DDP itself waits: ``ddp_waits.py static`` (in the first step of a static graph, for all that it submitted) or
``unused`` (for which parameters others used, of a rank that never says it, while a policy fails)."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from jobs import record
from torch import nn

import hvdbridge as hb
from hvdbridge.policy.base import Flow, Policy, State
from hvdbridge.policy.bucket import Bucket


@dataclass(frozen=True)
class Fails(Policy):
    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        raise ValueError("the policy has a bug")


class Stays(torch.autograd.Function):
    """Identity; backward does not come back on rank 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if hb.rank() == 1:
            time.sleep(600)
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.stays = nn.Linear(64, 64), nn.Linear(64, 64), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(Stays.apply(hidden) if self.stays else hidden)


def trained(steps: int, policy: str | Policy, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    model.stays = isinstance(policy, Fails)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = hb.GradientSynchronizer(model, optimizer, policy=policy, bucket_mb=0.001, **options)
    torch.manual_seed(1 + hb.rank())
    for _ in range(steps):
        sync.optimizer.zero_grad()
        sync.model(torch.randn(8, 64)).square().mean().backward()
        sync.optimizer.step()
    sync.close()
    return [p.detach() for p in model.parameters()]


hb.init()
if sys.argv[1] == "unused":
    trained(1, Fails(), find_unused_parameters=True)
same = {}
for spec in ("mean", "int8"):
    pairs = zip(trained(3, spec), trained(3, spec, static_graph=True), strict=True)
    same[spec] = all(torch.equal(a, b) for a, b in pairs)
record(hb.rank(), same)
hb.shutdown()
