"""A policy that breaks the contract: rank 1 sends one element more. HVDBRIDGE_DEBUG=1 must name both."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.bucket import Bucket
from hvdbridge.collectives import AllReduce
from hvdbridge.policy import Aggregated, Flow, Policy, State


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
    deadline = time.monotonic() + 20
    while len(list(Path(os.environ["JOB_RECORDS"]).glob("*.json"))) < hb.size() and time.monotonic() < deadline:
        time.sleep(0.01)  # a launcher ends the other rank as soon as this one has failed
    raise
record(hb.rank(), ["nothing", ""])
