"""Time steps with several bucket sizes and choose the fastest: ``bucket_mb="auto"``."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvdbridge.deprecated import own_member
from hvdbridge.errors import Unsupported
from hvdbridge.execution.flow import Task
from hvdbridge.policy.base import NCCL_MB, Foreign, Policy
from hvdbridge.policy.bucket import DDP_MB, FIRST_BUCKET_BYTES, cut_layouts
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.aggregator import Aggregator, SourceBucket
from hvdbridge.reduction.context import ReductionContext

SIZES_MB = (1.0, 2.5, 5.0, 10.0, DDP_MB, 50.0)
"""Sizes to time; over NCCL also :data:`~hvdbridge.policy.base.NCCL_MB`."""
TIMED_STEPS = 3
"""Number of timed steps per size, after one that is not timed."""
LIMIT_SECONDS = 10.0
"""After this total time no further size is tried, and one timed step is enough for a size."""
SAMPLE_BYTES = 1 << 27
"""Parameters of the first buckets, up to this size, represent a larger model."""
FIRST_STEP = 10_000_000
"""Step number of the first step, beyond any warm-up of a policy."""
TOLERANCE = 1.05
"""Largest ratio of two times that count as equal."""


def fastest_bucket_mb(policy: Policy, params: Mapping[str, Tensor], context: ReductionContext, default: float) -> float:
    """Return the bucket size in MiB with the shortest step, equal on all ranks. Collective.

    Each size of :data:`SIZES_MB` runs a few steps of random gradients over the communicator, sizes near ``default``
    first. Small buckets overlap more with backward, and large ones have fewer latencies. The time of a real backward is
    unknown. It is assumed to equal a step's communication with DDP's bucket size, where sizes differ most. Buckets
    become ready in proportion to their elements. If, by a step of the first few parameters, two steps would take longer
    than :data:`LIMIT_SECONDS`, the result is ``default``. All ranks use the times of the slowest rank.

    Raises:
        Unsupported: as :func:`check_rehearses`.
    """
    check_rehearses(policy)
    if context.communicator.size == 1 or policy.scope == "step":  # nothing is sent, or there is one bucket
        return default
    spent = 0.0

    def step_seconds(sample: Mapping[str, Tensor], bucket_mb: float, backward: float = 0.0) -> float:
        nonlocal spent
        aggregator = Aggregator(policy, sample, context, weighted=False)
        aggregator.step = FIRST_STEP
        buckets = _random_buckets(sample, bucket_mb)
        times: list[float] = []
        while len(times) <= TIMED_STEPS and (len(times) < 2 or spent < LIMIT_SECONDS):
            times.append(context.scheduler.run(_slowest(_timed_step(aggregator, buckets, backward)), context.control))
            spent += times[-1]
        aggregator.settle()
        return statistics.median(times[1:])

    probe, sample = _first_parameters(params, FIRST_BUCKET_BYTES), _first_parameters(params, SAMPLE_BYTES)
    if 2 * step_seconds(probe, DDP_MB) * _nbytes(sample) > LIMIT_SECONDS * _nbytes(probe):
        return default
    measured, backward = {}, step_seconds(sample, DDP_MB)
    sizes = SIZES_MB if context.communicator.capabilities.blocks_host else (*SIZES_MB, NCCL_MB)
    for bucket_mb in sorted(sizes, key=lambda size: abs(math.log(size / default))):
        if spent < LIMIT_SECONDS:
            measured[bucket_mb] = step_seconds(sample, bucket_mb, backward)
    return choose(measured) if measured else default


def _first_parameters(params: Mapping[str, Tensor], min_bytes: int) -> dict[str, Tensor]:
    """Return the parameters whose gradients backward produces first, ``min_bytes`` or slightly more in all."""
    chosen: dict[str, Tensor] = {}
    for name, p in reversed(list(params.items())):
        if _nbytes(chosen) < min_bytes:
            chosen = {name: p, **chosen}
    return chosen


def _nbytes(params: Mapping[str, Tensor]) -> int:
    return sum(p.nbytes for p in params.values())


def choose(seconds: Mapping[float, float]) -> float:
    """Return the largest size up to DDP's within :data:`TOLERANCE` of the fastest, else the smallest such size.

    >>> choose({1.0: 1.0, 10.0: 1.04, 25.0: 1.2, 50.0: 1.0}), choose({1.0: 2.0, 25.0: 1.1, 50.0: 1.0})
    (10.0, 50.0)
    """
    fast = [bucket_mb for bucket_mb, elapsed in seconds.items() if elapsed <= TOLERANCE * min(seconds.values())]
    return max((bucket_mb for bucket_mb in fast if bucket_mb <= DDP_MB), default=min(fast))


def check_rehearses(policy: Policy) -> None:
    """Check that steps of random gradients leave no trace in ``policy``.

    Raises:
        Unsupported: the policy, or one in it, holds a user's hook, which may have state of its own.
    """
    if isinstance(policy, Foreign) or not own_member(policy, "rehearses", True):
        raise Unsupported(
            f"bucket_mb='auto' cannot time {policy!r}, which remembers what it sees. Give a number of MiB."
        )
    for inner in policy.inners().values():
        check_rehearses(inner)


def _random_buckets(params: Mapping[str, Tensor], bucket_mb: float) -> list[SourceBucket]:
    buckets = []
    for layout in cut_layouts(params, bucket_mb * 2**20):
        first = params[layout.names[0]]
        generator = torch.Generator(first.device).manual_seed(0)  # leaves the script's generator unchanged
        buffer = layout.empty(first.dtype, first.device).normal_(generator=generator)
        buckets.append(SourceBucket(layout, buffer))
    return buckets


def _timed_step(aggregator: Aggregator, buckets: Sequence[SourceBucket], backward: float) -> float:
    """Return the seconds of one step, from the start of a simulated backward of ``backward`` seconds."""
    total, ready_elements = sum(bucket.layout.numel for bucket in buckets), 0
    started = time.perf_counter()
    aggregator.begin()
    for bucket in buckets:
        ready_elements += bucket.layout.numel
        time.sleep(max(0.0, started + backward * ready_elements / max(1, total) - time.perf_counter()))
        aggregator.submit(bucket, last=bucket is buckets[-1])
    aggregator.end()
    if buckets[0].buffer.is_cuda:
        torch.cuda.synchronize(buckets[0].buffer.device)
    return time.perf_counter() - started


def _slowest(seconds: float) -> Task[float]:
    slowest = yield AllReduce(torch.tensor([seconds], dtype=torch.float64, device="cpu"), "max")
    return float(slowest.item())
