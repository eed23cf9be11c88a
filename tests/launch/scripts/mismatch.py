"""A policy that breaks the contract: rank 1 sends one element more. HVDBRIDGE_DEBUG=1 must name both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jobs import record, wait_for_records

import hvdbridge as hb
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllReduce


@dataclass(frozen=True)
class Lopsided(Policy):
    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        extra = bucket.buffer.new_zeros(bucket.rank)
        total = yield AllReduce(torch.cat([bucket.weighted().buffer, extra]))
        return Aggregated(total[: bucket.layout.numel])


hb.init()
model = torch.nn.Linear(11, 8)  # 96 elements
sync = hb.GradientSynchronizer(model, policy=Lopsided())
try:
    sync.model(torch.ones(1, 11)).sum().backward()
except hb.CollectiveMismatch as error:
    record(hb.rank(), [type(error).__name__, str(error)])
    wait_for_records(hb.size())
    raise
record(hb.rank(), ["nothing", ""])
