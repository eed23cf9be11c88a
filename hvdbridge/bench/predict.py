"""A step's time, predicted: what a policy asks for and computes, on a network, beside a backward.

Rules:

1. What a policy asks for comes from a dry run at that number of ranks, what it computes from a dry run with real
   tensors at two small numbers: arithmetic grows at most linearly with the ranks (a sparse all-gather is decoded rank
   by rank), so a line through both is enough.
2. Buckets become ready while backward runs, in proportion to their elements. One network carries one collective at
   a time; the policy's arithmetic has a core of its own, or shares that of backward.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvdbridge.bench.network import Network
from hvdbridge.collectives import Collective
from hvdbridge.dry_run import Asked, Ended, dry_run
from hvdbridge.policy import Policy

FEW = (2, 8)
"""Numbers of ranks at which arithmetic is measured."""
DRY_RANKS = 64
"""Beyond so many ranks requests are scaled from those at this number: a row per rank does not fit in memory."""

Shapes = Mapping[str, Tensor | Sequence[int]]


@dataclass
class Bucket:
    """One bucket's way: (compute seconds, collective, ranks in its group), ..., and a last computation."""

    numel: int = 0
    legs: list[tuple[float, Collective, int]] = field(default_factory=list)
    tail: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of one step of one rank; the fields are those of :class:`~hvdbridge.bench.measure.Row`."""

    policy: str
    ranks: int
    step: float
    compute: float
    compression: float
    communication: float
    bytes_sent: float


@dataclass(frozen=True)
class Planner:
    """A job: parameters, computation, network.

    Attributes:
        forward, backward: seconds without synchronization.
        cores: cores per rank; with less than two, a policy computes in the time of backward.
    """

    params: Shapes
    forward: float
    backward: float
    network: Network
    bucket_mb: float = 25.0
    local_size: int = 1
    cores: float = 2.0

    def predict(self, spec: str, policy: Policy, ranks: int, arithmetic: Arithmetic) -> Prediction:
        """One step of ``policy`` among ``ranks`` ranks."""
        buckets = self._buckets(policy, ranks, arithmetic)
        sent = sum(request.bytes_sent(size) for bucket in buckets for _, request, size in bucket.legs)
        compression = sum(bucket.tail + sum(leg[0] for leg in bucket.legs) for bucket in buckets)
        carried = [
            self.network.seconds(request, size, min(self.local_size, ranks))
            for bucket in buckets
            for _, request, size in bucket.legs
        ]
        step = self._simulate(buckets, min(self.local_size, ranks))
        return Prediction(spec, ranks, step, self.forward + self.backward, compression, sum(carried), sent)

    def _buckets(self, policy: Policy, ranks: int, arithmetic: Arithmetic) -> list[Bucket]:
        found: dict[int, Bucket] = {}
        factors = arithmetic.at(ranks)
        events = dry_run(policy, self.params, ranks, arithmetic.step, self.bucket_mb, min(self.local_size, ranks))
        for number, event in enumerate(events):
            bucket = found.setdefault(event.bucket, Bucket())
            seconds = factors[number] if number < len(factors) else 0.0
            match event:
                case Asked():
                    bucket.legs.append((seconds, event.request, event.size))
                case Ended():
                    bucket.numel, bucket.tail = event.numel, seconds
        return [found[index] for index in sorted(found)]

    def _simulate(self, buckets: Sequence[Bucket], local_size: int) -> float:
        """Event by event: whoever is ready first is served first, on the core(s) and on the network."""
        shared = self.cores < 2
        total = max(1, sum(bucket.numel for bucket in buckets))
        free = {"backward": self.forward, "policy": 0.0, "network": 0.0}
        core = "backward" if shared else "policy"
        order = itertools.count()
        waiting: list[tuple[float, int, str, Iterator[tuple[str, float]] | None, float]] = []
        end = self.forward

        def journey(bucket: Bucket) -> Iterator[tuple[str, float]]:
            for seconds, request, size in bucket.legs:
                yield core, seconds
                yield "network", self.network.seconds(request, size, local_size)
            yield core, bucket.tail

        def go_on(at: float, way: Iterator[tuple[str, float]]) -> None:
            step = next(way, None)
            if step is not None:
                heapq.heappush(waiting, (at, next(order), step[0], way, step[1]))

        ready = iter(buckets)

        def produce() -> None:
            """Backward's next piece of work."""
            bucket = next(ready, None)
            if bucket is not None:
                seconds = self.backward * bucket.numel / total
                heapq.heappush(waiting, (free["backward"], next(order), "backward", journey(bucket), -1.0 - seconds))

        produce()
        while waiting:
            at, _, where, way, seconds = heapq.heappop(waiting)
            assert way is not None
            first = seconds < 0
            spent = -1.0 - seconds if first else seconds
            began = max(at, free[where])
            free[where] = began + spent
            end = max(end, free[where])
            go_on(free[where], way)
            if first:
                produce()
        return max(end, self.forward + self.backward)


@dataclass(frozen=True)
class Arithmetic:
    """What a policy computes between its collectives, measured at :data:`FEW` ranks.

    Attributes:
        step: the number of the step that is looked at.
        seconds: for each of FEW: seconds before each collective and before each end, in order.
    """

    step: int
    seconds: Mapping[int, Sequence[float]]

    def at(self, ranks: int) -> list[float]:
        """At any number of ranks: on the line through what was measured, not below zero."""
        low, high = sorted(self.seconds)[0], sorted(self.seconds)[-1]
        a, b = self.seconds[low], self.seconds[high]
        if len(a) != len(b) or low == high:
            return list(b)
        return [max(0.0, x + (y - x) * (ranks - low) / (high - low)) for x, y in zip(a, b, strict=True)]


def measure_arithmetic(
    policy: Policy, params: Shapes, bucket_mb: float, step: int, local_size: int | None = None, repeats: int = 3,
    device: torch.device | str = "cpu",
) -> Arithmetic:  # fmt: skip
    """Time a policy's own work on this machine, without other ranks; the median of ``repeats`` steps, after one."""
    seconds = {}
    for ranks in FEW:
        try:
            policy.check_size(ranks, ranks)
        except Exception:
            continue
        runs = [
            [event.seconds for event in dry_run(policy, params, ranks, step, bucket_mb, local_size, device)]
            for _ in range(repeats + 1)
        ][1:]
        seconds[ranks] = [statistics.median(each) for each in zip(*runs, strict=True)]
    return Arithmetic(step, seconds)
