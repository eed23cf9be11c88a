"""Sparse policies: few elements travel, the rest waits in the residual of error feedback.

Rules:

1. How many elements travel is decided by parameter name: ``ceil(ratio * numel)`` of each, at least one.
   For parameters that should travel whole write ``partition(<1024=mean, rest=topk)``.
2. Messages have a fixed capacity; an empty slot is (index 0, value 0).
3. What ranks sent is added in rank order: equal bits everywhere.
4. Memory: an all-gather brings ``8 k N`` bytes to a rank.
5. NaN and inf are chosen first, or, where nothing is chosen by size, poison what their parameter sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.random import key
from hvdbridge.kernels.select import Plan, add_up, count_of, largest, owners, pack_pairs, poison, shuffled, unpack_pairs
from hvdbridge.policies.combining import participants
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policies.shards import accumulator
from hvdbridge.policy.base import Aggregated, Exchange, Flow, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllGather, AllReduce
from hvdbridge.policy.options import option


def plan_of(bucket: Bucket, ratio: float, exact: bool = False) -> Plan:
    """The plan that chooses ``ceil(ratio * numel)`` elements of each parameter."""
    counts = {name: count_of(ratio, size) for name, size in bucket.layout.sizes.items()}
    return Plan.of(bucket.layout, counts, bucket.buffer.device, exact)


def gathered_sum(bucket: Bucket, indices: Tensor, values: Tensor) -> Exchange:
    """The sum over ranks of sparse vectors like the bucket: one all-gather of 8 bytes per element. It goes to the
    bucket's :meth:`~hvdbridge.Bucket.output`."""
    dtype = values.dtype
    if not indices.numel():  # so it is on every rank
        return bucket.output(dtype).zero_()
    request = AllGather(pack_pairs(indices, values))
    del indices, values
    messages = yield request
    del request
    return add_up((unpack_pairs(message, dtype) for message in messages), bucket.output(dtype))


def rest_of(bucket: Bucket, indices: Tensor, values: Tensor) -> Tensor | None:
    """The bucket's buffer, less ``values`` at ``indices``, where the caller needs it."""
    if not bucket.needs_sent:
        return None
    return bucket.buffer.index_add_(0, indices, values.to(bucket.buffer.dtype), alpha=-1)


@dataclass(frozen=True)
class TopK(WithFeedback):
    """The elements of largest magnitude of each parameter (Aji and Heafield 2017; Stich 2018, definition 2.1).

    ``topk_k(p)`` keeps the ``k = ceil(ratio n)`` largest of n elements, so ``|p - topk_k(p)|^2 <= (1 - k/n) |p|^2``.
    On the wire: one all-gather of k values (float32, or float64) and k int32 indices, so ``8 k (N-1)`` bytes per
    rank, which grow with N. Both are one message of integers, so ``fp16(topk)`` finds nothing to cast.

    Attributes:
        ratio: share of the elements that travel.
        select: ``"sampled"`` (fast): the threshold that a sample of the parameter gives leaves about 1.2 k to 3 k
            candidates, of which the k largest are kept: what ``"exact"`` keeps, save in one case of 100 000, when it
            is a few less than k. ``"exact"``: all elements are compared. Parameters of up to 32768 elements are
            searched exactly by both; on CUDA those of less than a million, too, of float64, and without Triton all.
        ef: error feedback.
    """

    ratio: float = option(0.01, above=0, at_most=1)
    select: Literal["sampled", "exact"] = "sampled"
    ef: bool = True
    rounds = 1

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        indices, values = largest(flat, plan_of(bucket, self.ratio, self.select == "exact"))
        rest = rest_of(bucket, indices, values)
        return Aggregated((yield from gathered_sum(bucket, indices, values)), rest=rest)


@dataclass(frozen=True)
class Threshold(WithFeedback):
    """The elements whose magnitude reaches a fixed value (Strom 2015; here they travel with their own values).

    An element of ``p = g w/sum(w) + e`` travels where ``N |p| >= value``, N ranks having a weight: the value is in
    units of one rank's gradient, whatever the number of ranks. The capacity is ``ceil(ratio n)`` of each parameter;
    where more reach the value the largest travel and the rest waits in the residual.
    On the wire: as ``topk`` of the same ratio, however many reach the value.

    Attributes:
        value: what a magnitude must reach; it is not rescaled with a loss scale.
        ratio: capacity.
        ef: error feedback.
    """

    value: float = option(0.01, above=0)
    ratio: float = option(0.05, above=0, at_most=1)
    ef: bool = True
    rounds = 1

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        indices, values = largest(flat, plan_of(bucket, self.ratio))
        low = values.abs() < self.value / len(participants(bucket))  # False for NaN
        indices.masked_fill_(low, 0)
        values.masked_fill_(low, 0)
        rest = rest_of(bucket, indices, values)
        return Aggregated((yield from gathered_sum(bucket, indices, values)), rest=rest)


@dataclass(frozen=True)
class RandomK(WithFeedback):
    """Random elements of each parameter, the same on all ranks (Stich 2018, definition 2.1; Wangni 2018).

    Every element has the probability k/n to be one of the ``k = ceil(ratio n)``; which are is known from
    (seed, step, name). On the wire: one all-reduce of k values, no indices.

    Attributes:
        ratio: share of the elements that travel.
        unbiased: multiply by n/k, so that the expectation is the mean. It needs ``ef=false``: what is multiplied
            is no contraction, and its residual would grow without bounds.
        ef: error feedback.
    """

    ratio: float = option(0.01, above=0, at_most=1)
    unbiased: bool = False
    ef: bool = True
    rounds = 1
    deterministic = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unbiased and self.ef:
            raise ConfigurationError(
                "RandomK: unbiased=true needs ef=false: n/k times the chosen elements is no contraction, so "
                "the residual of error feedback would grow without bounds"
            )

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat, layout = bucket.weighted().buffer, bucket.layout
        plan = plan_of(bucket, self.ratio)
        dtype = accumulator(flat.dtype)
        if not plan.total:
            return Aggregated(bucket.output(dtype).zero_(), rest=flat if bucket.needs_sent else None)
        indices = shuffled(plan, key(bucket.seed, bucket.step, "randomk"), flat.device)
        values = flat.index_select(0, indices).to(dtype)
        numbers, slots, counts, scale = layout.derive(("randomk", plan), lambda: _slots(plan, flat.device))
        values.index_add_(0, slots, poison(flat, layout)[numbers].to(dtype))
        if self.unbiased:
            values.mul_(scale.index_select(0, owners(counts, plan.total)))
        rest = rest_of(bucket, indices, values)
        total = yield AllReduce(values)
        return Aggregated(bucket.output(dtype).zero_().index_copy_(0, indices, total), rest=rest)


def _slots(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers of the parameters that have elements, and the first slot of each; k and n/k of all parameters."""
    sizes = torch.tensor([plan.layout.sizes[name] for name in plan.layout.names], dtype=torch.int64, device="cpu")
    counts = torch.tensor(list(plan.counts.values()), dtype=torch.int64, device="cpu")
    chosen = [i for i, count in enumerate(plan.counts.values()) if count]
    numbers = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    scale = (sizes.double() / counts.clamp(min=1)).float()
    first = (counts.cumsum(0) - counts)[numbers]
    return numbers.to(device), first.to(device), counts.to(device), scale.to(device)
