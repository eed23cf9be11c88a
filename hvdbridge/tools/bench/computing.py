"""What a policy computes between its collectives, timed on this machine without other ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.state_store import BUFFERS, IN_FLIGHT
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import DDP_MB, cut_layouts
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather
from hvdbridge.policy.dry_run import Asked, Ended, dry_run

SETTLED = 10_000_000
"""A step after any warm-up."""
FEW = (2, 8, 64)
"""Numbers of ranks at which arithmetic is measured: far apart, for a line through them goes on to 100,000."""
MANY, SELDOM = 100, 100_000
"""Steps that are due, after which their share is known; steps among which they are looked for."""
Shapes = Mapping[str, Tensor | Sequence[int]]


def kinds(policy: Policy) -> tuple[dict[bool, int], float]:
    """A settled step that is :meth:`Policy.due` and one that is not, as far as there are any; the former's share.

    What comes more seldom than every SELDOM steps does not come.

    >>> from hvdbridge.policies import from_spec
    >>> round(1 / kinds(from_spec("local_sgd:every=5000"))[1])
    5000
    """
    found: dict[bool, list[int]] = {False: [], True: []}
    for step in range(SETTLED, SETTLED + SELDOM if policy.acts_after_step else SETTLED + 1):
        found[policy.due(step)].append(step)
        if len(found[True]) > MANY:
            break
    due = found[True]
    periods = len(due) - 1  # from one that is due to another, so that no part of a period is counted
    share = periods / (due[-1] - due[0]) if periods > 0 else float(len(due) > 0 and not found[False])
    return {which: steps[-1] for which, steps in found.items() if steps}, share


@dataclass(frozen=True)
class Arithmetic:
    """What a policy computes between its collectives.

    Attributes:
        seconds: (ranks, whether :meth:`Policy.due`) -> seconds before each collective and each end, in order.
        received: alike, what :func:`received` says.
    """

    seconds: Mapping[tuple[int, bool], Sequence[float]]
    received: Mapping[tuple[int, bool], Sequence[float]]

    def scaled(self, factor: float) -> Arithmetic:
        """On a machine that takes ``factor`` times as long."""
        return replace(self, seconds={key: [factor * each for each in legs] for key, legs in self.seconds.items()})

    def at(self, ranks: int, due: bool, received: Sequence[float]) -> list[float]:
        """At any number of ranks, where so much was received.

        Between what was measured it lies on a line. Beyond, what an answer follows that grows with the ranks goes on
        along the line from the fewest to the most, but no faster than the answer; all else stays, so that no noise is
        multiplied.

        Raises:
            ConfigurationError: nowhere were there so many collectives and ends.
        """
        known = sorted(n for (n, also), legs in self.seconds.items() if also == due and len(legs) == len(received))
        if not known:
            raise ConfigurationError(f"among {ranks} ranks it asks for other operations than where it was measured")
        few, most = known[0], known[-1]
        if ranks <= most:
            high = next(n for n in known if ranks <= n)
            low = max((n for n in known if n < high), default=high)
            part = min(1.0, (high - ranks) / max(1, high - low))
            return [y + (x - y) * part for x, y in zip(self.seconds[low, due], self.seconds[high, due], strict=True)]
        further = (ranks - most) / max(1, most - few)
        found = []
        for x, y, before, now in zip(
            self.seconds[few, due], self.seconds[most, due], self.received[most, due], received, strict=True
        ):
            grows = now > before * math.sqrt(ranks / most)  # in between constant and proportional
            found.append(min(y + max(0.0, y - x) * further, y * now / max(1.0, before)) if grows else y)
        return found


def received(events: Iterable[Asked | Ended]) -> list[float]:
    """Bytes of the answer with which the arithmetic before each collective and each end begins, in order; first 0."""
    found, answer = [], 0.0
    for event in events:
        found.append(answer)
        answer = 0.0
        if isinstance(event, Asked):
            tensor, rows = event.request.tensor, event.size if isinstance(event.request, AllGather) else 1
            answer = float(tensor.numel() * tensor.element_size() * rows)
    return found


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
    seconds, before = {}, {}
    for ranks in defined:
        for due, step in steps.items():
            sample = _Sample(policy, params, bucket_mb, ranks, min(local_size, ranks), step, repeats, device)
            seconds[ranks, due] = sample.whole_step()
            before[ranks, due] = received(sample.events(params, "meta"))
    return Arithmetic(seconds, before)


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
    pool: BufferPool = field(default_factory=lambda: BufferPool(IN_FLIGHT + BUFFERS))
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

    def events(
        self, params: Shapes, device: torch.device | str, buckets: Sequence[Sequence[str]] | None = None
    ) -> Iterator[Asked | Ended]:
        return dry_run(
            self.policy, params, self.ranks, self.step, self.bucket_mb, self.local_size, device, buckets, self.pool,
        )  # fmt: skip

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
        for event in self.events(params, device, buckets):
            operations, seconds = found.setdefault(event.bucket, ([], []))
            seconds.append(event.seconds)
            if isinstance(event, Asked):
                operations.append(f"{event.request.kind} {event.request.tensor.dtype} {event.request.group}")
            else:
                numels[event.bucket] = event.numel
        return [(tuple(operations), numels[index], seconds) for index, (operations, seconds) in sorted(found.items())]
