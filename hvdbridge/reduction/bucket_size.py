"""Measures with which size of buckets a step ends first: ``bucket_mb="auto"``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator
from hvdbridge.deprecated import own_member
from hvdbridge.errors import Unsupported
from hvdbridge.execution.flow import Task
from hvdbridge.execution.scheduler import Scheduler
from hvdbridge.policies.dense import bucket_mb
from hvdbridge.policy.base import Foreign, Policy
from hvdbridge.policy.bucket import DDP_MB, cut_layouts
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.aggregator import Aggregator, Piece

SIZES_MB = (1.0, 2.5, 5.0, 10.0, DDP_MB, 50.0)
STEPS = 3
"""How many steps are timed at each size, after one that is not."""
MOST_BYTES = 1 << 27
"""Of a larger model the parameters of the first buckets stand for all."""
SETTLED = 10_000_000
"""The number of the first step: any warm-up of a policy is over."""
ALIKE = 1.05
"""Times that differ by less count as equal."""


def fastest_bucket_mb(
    policy: Policy,
    params: Mapping[str, Tensor],
    communicator: Communicator,
    control: Communicator,
    scheduler: Scheduler,
) -> float:
    """The size of a bucket, in MiB, with which a step ends first here; equal on all ranks. Collective.

    Each size of :data:`SIZES_MB` carries some steps of made-up gradients over the communicator. Small buckets overlap
    more with backward, large ones wait less often. Backward is not known yet. It counts as long as a step's flows take
    with DDP's buckets, where sizes differ most, and buckets become ready in proportion to their elements.

    Raises:
        Unsupported: as :func:`check_rehearses`.
    """
    check_rehearses(policy)
    if communicator.size == 1 or policy.scope == "step":  # nothing travels, or all in one bucket
        return bucket_mb(policy)

    some: dict[str, Tensor] = {}
    for name, p in reversed(list(params.items())):
        if sum(each.nbytes for each in some.values()) < MOST_BYTES:
            some = {name: p, **some}

    def seconds(bucket_mb: float, backward: float) -> float:
        aggregator = Aggregator(policy, some, communicator, control, scheduler, weighted=False)
        aggregator.step = SETTLED
        pieces = _pieces(some, bucket_mb)
        times = [_step(aggregator, pieces, backward) for _ in range(STEPS + 1)][1:]
        slowest = scheduler.run(_slowest(statistics.median(times)), control)
        aggregator.settle()
        return slowest

    backward = seconds(DDP_MB, 0.0)
    return choose({bucket_mb: seconds(bucket_mb, backward) for bucket_mb in SIZES_MB})


def choose(seconds: Mapping[float, float]) -> float:
    """The largest size up to DDP's whose time is that of the fastest, to a twentieth; else the smallest such size.

    >>> choose({1.0: 1.0, 10.0: 1.04, 25.0: 1.2, 50.0: 1.0}), choose({1.0: 2.0, 25.0: 1.1, 50.0: 1.0})
    (10.0, 50.0)
    """
    good = [bucket_mb for bucket_mb, spent in seconds.items() if spent <= ALIKE * min(seconds.values())]
    return max((bucket_mb for bucket_mb in good if bucket_mb <= DDP_MB), default=min(good))


def check_rehearses(policy: Policy) -> None:
    """
    Raises:
        Unsupported: the policy, or one in it, holds a user's hook, which would remember made-up gradients.
    """
    if isinstance(policy, Foreign) or not own_member(policy, "rehearses", True):
        raise Unsupported(
            f"bucket_mb='auto' cannot time {policy!r}, which remembers what it sees. Give a number of MiB."
        )
    for inner in policy.inners().values():
        check_rehearses(inner)


def _pieces(params: Mapping[str, Tensor], bucket_mb: float) -> list[Piece]:
    pieces = []
    for layout in cut_layouts(params, bucket_mb * 2**20):
        like = params[layout.names[0]]
        own = torch.Generator(like.device).manual_seed(0)  # the script's random numbers stay as they are
        buffer = layout.empty(like.dtype, like.device).normal_(generator=own)
        pieces.append(Piece(layout, buffer, lambda _: None))
    return pieces


def _step(aggregator: Aggregator, pieces: Sequence[Piece], backward: float) -> float:
    """Seconds of one step, from the begin of a backward of ``backward`` seconds."""
    total, ready = sum(piece.layout.numel for piece in pieces), 0
    started = time.perf_counter()
    aggregator.begin()
    for piece in pieces:
        ready += piece.layout.numel
        time.sleep(max(0.0, started + backward * ready / max(1, total) - time.perf_counter()))
        aggregator.submit(piece, last=piece is pieces[-1])
    aggregator.end()
    if pieces[0].buffer.is_cuda:
        torch.cuda.synchronize(pieces[0].buffer.device)
    return time.perf_counter() - started


def _slowest(seconds: float) -> Task[float]:
    slowest = yield AllReduce(torch.tensor([seconds], dtype=torch.float64, device="cpu"), "max")
    return float(slowest.item())
