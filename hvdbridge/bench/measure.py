"""Steps of the native way, of ours and of no synchronization at all, in turn in one run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import hvdbridge as hb
from hvdbridge.bench.models import Loss
from hvdbridge.bench.models import model as named_model
from hvdbridge.bench.native import Way, alone, native
from hvdbridge.bench.network import Network

WARM_UP = 5
"""Steps that are not counted: DDP rebuilds its buckets, policies warm up, caches fill."""


@dataclass(frozen=True)
class Row:
    """What one policy came to; times are medians in seconds, of the slowest rank in each step.

    Attributes:
        step: a whole step: forward, backward, synchronization, optimizer.
        compute: the same without synchronization.
        compression: what the policy computed in a step.
        communication: time in which at least one collective was under way.
        exposed: the part of it that backward did not hide: step - compute - compression, at least 0.
        bytes_sent: per step and rank.
        bucket_mb: size of a bucket of ours, in MiB.
        cpu, compute_cpu: seconds that a rank's process kept cores busy in a step, and in one without synchronization;
            means over ranks.
        native: the step of the native way that ``against`` names.
        ratio: step / native, each step by the native one beside it: lower quartile, median, upper quartile.
        limit: step / max(compute + compression, bytes_sent / the network's bandwidth).
    """

    backend: str
    launcher: str
    ranks: int
    model: str
    policy: str
    against: str
    parameters: int
    steps: int
    step: float
    compute: float
    compression: float
    communication: float
    exposed: float
    bytes_sent: float
    cpu: float
    compute_cpu: float
    native: float
    ratio: tuple[float, float, float]
    limit: float
    bucket_mb: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that this rank sent while a collective was under way."""
        return self.bytes_sent / self.communication if self.communication else 0.0


def measure(
    model: str,
    policy: str,
    against: str | None,
    network: Network,
    steps: int,
    samples: int | None = None,
    bucket_mb: float | Literal["auto"] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Row:
    """Train ``model`` for ``steps`` steps in each of the three ways. Collective, in the session that runs."""
    torch.manual_seed(0)
    module, loss = named_model(model, samples)
    module.to(hb.device())
    name, make = native(hb.backend(), against)
    theirs, mine, plain = module, copy.deepcopy(module), copy.deepcopy(module)
    sync = hb.GradientSynchronizer(mine, _optimizer(mine), policy=policy, bucket_mb=bucket_mb)
    ways = {
        "native": make(theirs, _optimizer(theirs)),
        "ours": Way(sync.model, sync.optimizer.zero_grad, sync.optimizer.step, sync.stats),
        "alone": alone(plain, _optimizer(plain)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    parts: list[list[float]] = []
    order = list(ways)
    for number in range(WARM_UP + steps):
        for way in order:
            spent, cpu = _step(ways[way], loss)
            if number >= WARM_UP:
                seconds[way].append(spent)
                busy[way].append(cpu)
        if number >= WARM_UP:
            figures = sync.stats()
            parts.append([figures[k] for k in ("compression_seconds", "communication_seconds", "bytes_sent")])
        order = [*order[1:], order[0]]
        on_step()
    sync.close()
    slowest = {way: _slowest(values) for way, values in seconds.items()}
    step, compute, other = (statistics.median(slowest[way]) for way in ("ours", "alone", "native"))
    compression, communication, sent = (statistics.median(part) for part in zip(*parts, strict=True))
    cpu, compute_cpu = _mean([statistics.median(busy[way]) for way in ("ours", "alone")])
    ratios = [a / b for a, b in zip(slowest["ours"], slowest["native"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    floor = max(compute + compression, sent / network.bandwidth)
    return Row(
        hb.backend(), hb.launcher(), hb.size(), model, policy, name, sum(p.numel() for p in mine.parameters()), steps,
        step, compute, compression, communication, max(0.0, step - compute - compression), sent, cpu, compute_cpu,
        other, (low, middle, high), step / floor, sync.bucket_mb,
    )  # fmt: skip


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-6)


def _step(way: Way, loss: Loss) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    hb.barrier()
    started, before = time.perf_counter(), time.process_time()
    way.zero_grad()
    loss(way.model).backward()
    way.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent = time.perf_counter() - started
    way.settle()
    return spent, time.process_time() - before


def _mean(figures: Sequence[float]) -> list[float]:
    """Over ranks."""
    found = torch.tensor(figures, dtype=torch.float64)
    hb.all_reduce(found)
    return [float(value) / hb.size() for value in found]


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    found = torch.tensor(seconds, dtype=torch.float64)
    hb.all_reduce(found, op=hb.ReduceOp.MAX)
    return [float(value) for value in found]
