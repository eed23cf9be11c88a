"""A user's module: models, and a policy that it registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hvdbridge as hb

ModelAndLoss = tuple[nn.Module, Callable[[nn.Module], Tensor]]


@dataclass(frozen=True)
class Own(hb.Policy):
    share: float = 1.0

    def aggregate(self, bucket: hb.Bucket, state: hb.State) -> hb.Flow:
        return hb.Aggregated((yield hb.AllReduce(bucket.weighted().buffer)))


hb.policies.register("own_of_tests", Own)


def make() -> ModelAndLoss:
    return nn.Linear(8, 8), lambda module: module(torch.ones(2, 8)).sum()


def breaks() -> ModelAndLoss:
    """Return a model whose ninth step fails on rank 1."""
    steps = iter(range(9))

    def loss(module: nn.Module) -> Tensor:
        if next(steps) == 8 and hb.rank() == 1:
            raise RuntimeError("bad batch")
        return module(torch.ones(2, 8)).sum()

    return nn.Linear(8, 8), loss
