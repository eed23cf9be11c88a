"""What a policy computes between its collectives, timed on this machine without other ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvdbridge.bucket import DDP_MB, cut_layouts
from hvdbridge.dry_run import Asked, dry_run
from hvdbridge.errors import ConfigurationError
from hvdbridge.policy import Policy

SETTLED = 10_000_000
"""A step after any warm-up."""
FEW = (2, 8, 64)
"""Numbers of ranks at which arithmetic is measured: far apart, for a line through them goes on to 100,000."""
Shapes = Mapping[str, Tensor | Sequence[int]]


def kinds(policy: Policy) -> tuple[dict[bool, int], float]:
    """A settled step that is :meth:`Policy.due` and one that is not, as far as there are any; the former's share."""
    every = range(SETTLED, SETTLED + 1000)
    return {policy.due(step): step for step in every}, sum(map(policy.due, every)) / len(every)


@dataclass(frozen=True)
class Arithmetic:
    """What a policy computes between its collectives.

    Attributes:
        seconds: (ranks, whether :meth:`Policy.due`) -> seconds before each collective and each end, in order.
    """

    seconds: Mapping[tuple[int, bool], Sequence[float]]

    def scaled(self, factor: float) -> Arithmetic:
        """On a machine that takes ``factor`` times as long."""
        return Arithmetic({key: [factor * each for each in seconds] for key, seconds in self.seconds.items()})

    def at(self, ranks: int, due: bool, count: int) -> list[float]:
        """At any number of ranks, for ``count`` collectives and ends: on the line through what was measured, not below
        zero.

        Raises:
            ConfigurationError: nowhere were there so many.
        """
        known = sorted(n for (n, also), seconds in self.seconds.items() if also == due and len(seconds) == count)
        if not known:
            raise ConfigurationError(f"among {ranks} ranks it asks for other operations than where it was measured")
        low, high = known[0], known[-1]
        a, b = self.seconds[low, due], self.seconds[high, due]
        if low == high:
            return list(b)
        return [max(0.0, x + (y - x) * (ranks - low) / (high - low)) for x, y in zip(a, b, strict=True)]


def measure_copy(device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """Seconds per element of a copy of DDP_MB on this machine, median after one."""
    source = torch.ones(int(DDP_MB * 2**18), device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) / source.numel()


def measure_arithmetic(
    policy: Policy,
    params: Shapes,
    bucket_mb: float | None = None,
    repeats: int = 3,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] = FEW,
    local_size: int = 1,
) -> Arithmetic:
    """Time a policy's own work on this machine, without other ranks: medians of ``repeats`` steps, after one.

    Of the buckets that ask for the same operations only one is measured, the one of median size; the others' times are
    its, by their elements.

    Args:
        bucket_mb: size of a bucket in MiB; None: the policy's.

    Raises:
        ConfigurationError: the policy is not defined for any of ``sizes`` numbers of ranks.
    """
    bucket_mb = policy.bucket_mb if bucket_mb is None else bucket_mb
    steps, _ = kinds(policy)
    defined, refusal = [], None
    for ranks in sizes:
        try:
            policy.check_size(ranks, -(-ranks // local_size))
            defined.append(ranks)
        except ConfigurationError as error:
            refusal = error
    if not defined:
        raise ConfigurationError(f"its arithmetic is measured at {sizes} ranks: {refusal}") from refusal
    seconds = {}
    for ranks in defined:
        for due, step in steps.items():
            sample = _Sample(policy, params, bucket_mb, ranks, min(local_size, ranks), step, repeats, device)
            seconds[ranks, due] = sample.whole_step()
    return Arithmetic(seconds)


Operations = tuple[str, ...]


@dataclass
class _Sample:
    """Measures few buckets, for all."""

    policy: Policy
    params: Shapes
    bucket_mb: float
    ranks: int
    local_size: int
    step: int
    repeats: int
    device: torch.device | str
    known: dict[Operations, tuple[int, Sequence[float]]] = field(default_factory=dict)  # elements, seconds

    def whole_step(self) -> list[float]:
        """Seconds before each collective and each end of a step with all parameters, in order."""
        buckets = self._dry_run(self.params, "meta")
        meta = {
            n: p.to("meta") if isinstance(p, Tensor) else torch.empty(p, device="meta") for n, p in self.params.items()
        }
        layouts = cut_layouts(meta, self.bucket_mb * 2**20)
        every: list[float] = []
        for index, (operations, numel, _) in enumerate(buckets):
            if operations not in self.known:
                # A flow over the whole model (scope "step", after_step) is measured on a bucket's parameters, too.
                alike = [i for i, each in enumerate(buckets[: len(layouts)]) if each[0] == operations]
                alike = alike if self.policy.scope == "bucket" and index < len(layouts) else list(range(len(layouts)))
                median = sorted(alike, key=lambda i: layouts[i].numel)[len(alike) // 2]
                names = layouts[median].names
                self._measure({name: self.params[name] for name in names}, [names])
            if operations not in self.known:
                self._measure(self.params, None)
            measured, seconds = self.known[operations]
            every += [one * numel / max(1, measured) for one in seconds]
        return every

    def _measure(self, params: Shapes, buckets: Sequence[Sequence[str]] | None) -> None:
        runs = [self._dry_run(params, self.device, buckets) for _ in range(self.repeats + 1)][1:]
        for bucket in zip(*runs, strict=True):
            operations, numel, _ = bucket[0]
            self.known[operations] = (
                numel,
                [statistics.median(leg) for leg in zip(*(run[2] for run in bucket), strict=True)],
            )

    def _dry_run(
        self, params: Shapes, device: torch.device | str, buckets: Sequence[Sequence[str]] | None = None
    ) -> list[tuple[Operations, int, list[float]]]:
        """Of each bucket what it asks for, its elements, and the seconds before each operation and the end."""
        found: dict[int, tuple[list[str], list[float]]] = {}
        numels = {}
        for event in dry_run(
            self.policy, params, self.ranks, self.step, self.bucket_mb, self.local_size, device, buckets
        ):
            operations, seconds = found.setdefault(event.bucket, ([], []))
            seconds.append(event.seconds)
            if isinstance(event, Asked):
                operations.append(f"{event.request.kind} {event.request.tensor.dtype} {event.request.group}")
            else:
                numels[event.bucket] = event.numel
        return [(tuple(operations), numels[index], seconds) for index, (operations, seconds) in sorted(found.items())]
