"""Measures with which size of buckets a step ends first: ``bucket_mb="auto"``."""

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
from hvdbridge.policy.base import Foreign, Policy
from hvdbridge.policy.bucket import DDP_MB, FIRST_BUCKET_BYTES, cut_layouts
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.aggregator import Aggregator, Piece
from hvdbridge.reduction.context import ReductionContext

SIZES_MB = (1.0, 2.5, 5.0, 10.0, DDP_MB, 50.0)
STEPS = 3
"""How many steps are timed at each size, after one that is not."""
LIMIT_SECONDS = 10.0
"""When the steps have taken so long, no other size is tried, and of a size one timed step is enough."""
MOST_BYTES = 1 << 27
"""Of a larger model the parameters of the first buckets stand for all."""
SETTLED = 10_000_000
"""The number of the first step: any warm-up of a policy is over."""
ALIKE = 1.05
"""Times that differ by less count as equal."""


def fastest_bucket_mb(policy: Policy, params: Mapping[str, Tensor], context: ReductionContext, usual: float) -> float:
    """The size of a bucket, in MiB, with which a step ends first here; equal on all ranks. Collective.

    Each size of :data:`SIZES_MB` carries some steps of made-up gradients over the communicator, those next to ``usual``
    first. Small buckets overlap more with backward, large ones wait less often. Backward is not known yet. It counts as
    long as a step's flows take with DDP's buckets, where sizes differ most, and buckets become ready in proportion to
    their elements. Where the network is so slow that two such steps would take :data:`LIMIT_SECONDS`, by a step of the
    first parameters, the size is ``usual``. All ranks decide by the slowest rank's times.

    Raises:
        Unsupported: as :func:`check_rehearses`.
    """
    check_rehearses(policy)
    if context.communicator.size == 1 or policy.scope == "step":  # nothing travels, or all in one bucket
        return usual
    spent = 0.0

    def seconds(some: Mapping[str, Tensor], bucket_mb: float, backward: float = 0.0) -> float:
        nonlocal spent
        aggregator = Aggregator(policy, some, context, weighted=False)
        aggregator.step = SETTLED
        pieces = _pieces(some, bucket_mb)
        times: list[float] = []
        while len(times) <= STEPS and (len(times) < 2 or spent < LIMIT_SECONDS):
            times.append(context.scheduler.run(_slowest(_step(aggregator, pieces, backward)), context.control))
            spent += times[-1]
        aggregator.settle()
        return statistics.median(times[1:])

    few, some = _first(params, FIRST_BUCKET_BYTES), _first(params, MOST_BYTES)
    if 2 * seconds(few, DDP_MB) * _nbytes(some) > LIMIT_SECONDS * _nbytes(few):
        return usual
    found, backward = {}, seconds(some, DDP_MB)
    for bucket_mb in sorted(SIZES_MB, key=lambda size: abs(math.log(size / usual))):
        if spent < LIMIT_SECONDS:
            found[bucket_mb] = seconds(some, bucket_mb, backward)
    return choose(found) if found else usual


def _first(params: Mapping[str, Tensor], least: int) -> dict[str, Tensor]:
    """The parameters whose gradients backward makes first, of ``least`` bytes or a little more."""
    some: dict[str, Tensor] = {}
    for name, p in reversed(list(params.items())):
        if _nbytes(some) < least:
            some = {name: p, **some}
    return some


def _nbytes(params: Mapping[str, Tensor]) -> int:
    return sum(p.nbytes for p in params.values())


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
        pieces.append(Piece(layout, buffer))
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
