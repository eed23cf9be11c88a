"""Sparse policies: each rank sends few elements; error feedback keeps the others in the residual.

Rules:

1. Each parameter sends ``ceil(ratio * numel)`` elements, at least one. To send small parameters completely, write
   ``partition(<1024=mean, rest=topk)``.
2. Messages have a fixed capacity. An empty slot is (index 0, value 0).
3. The ranks' messages are added in rank order, so all ranks have equal bits.
4. Memory: a rank receives ``8 k N`` bytes from an all-gather.
5. NaN and inf count as the largest magnitudes. If elements are not chosen by magnitude, NaN and inf make all values
   that their parameter sends NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.random import key
from hvdbridge.kernels.select import Plan, add_up, count_of, largest, owners, pack_pairs, poison, unpack_pairs
from hvdbridge.kernels.shuffle import round_keys, shuffled
from hvdbridge.policies.combining import participants
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policies.shards import accumulator
from hvdbridge.policy.base import Aggregated, Exchange, Flow, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllGather, AllReduce
from hvdbridge.policy.options import option


def plan_of(bucket: Bucket, ratio: float, exact: bool = False) -> Plan:
    """Return the plan that chooses ``ceil(ratio * numel)`` elements of each parameter; ``exact``: without a sample."""
    counts = {name: count_of(ratio, size) for name, size in bucket.layout.sizes.items()}
    return Plan.of(bucket.layout, counts, bucket.buffer.device, exact)


def gathered_sum(bucket: Bucket, indices: Tensor, values: Tensor) -> Exchange:
    """Return the sum over ranks of sparse vectors of the bucket's size, in :meth:`~hvdbridge.Bucket.output`.

    The flow is one all-gather of 8 bytes per element (12 for float64). ``indices`` and ``values`` are ``[k]``.
    """
    dtype = values.dtype
    if not indices.numel():  # equal on all ranks
        return bucket.output(dtype).zero_()
    request = AllGather(pack_pairs(indices, values))
    del indices, values
    messages = yield request
    del request
    return add_up((unpack_pairs(message, dtype) for message in messages), bucket.output(dtype))


def subtract_sent(bucket: Bucket, indices: Tensor, values: Tensor) -> Tensor | None:
    """Subtract ``values`` at ``indices`` from the bucket's buffer and return it; None unless ``bucket.needs_sent``."""
    if not bucket.needs_sent:
        return None
    return bucket.buffer.index_add_(0, indices, values.to(bucket.buffer.dtype), alpha=-1)


@dataclass(frozen=True)
class TopK(WithFeedback):
    """The elements of largest magnitude of each parameter (Aji and Heafield 2017; Stich 2018, definition 2.1).

    ``topk_k(p)`` keeps the ``k = ceil(ratio n)`` largest of n elements, so ``|p - topk_k(p)|^2 <= (1 - k/n) |p|^2``.
    The update is ``sum_r topk_k(p_r)`` of the weighted gradients p_r, error feedback included.

    State: with ``ef`` the residual, the size of the parameters in float32 (float64 for float64), local to the rank.
    Weights: any. On the wire: one all-gather of k values (float32, or float64) and k int32 indices, so ``8 k (N-1)``
    bytes per rank, growing with N. Both form one integer message, which ``fp16(topk)`` does not cast.

    Source:
        Aji and Heafield, *Sparse communication for distributed gradient descent*, 2017; Stich et al., *Sparsified SGD
        with memory*, 2018, definition 2.1.

    When to choose:
        Ranks are few and the network is slow, or gradients are sparse by nature (embeddings).

    Attributes:
        ratio: share of the elements that are sent.
        select: ``"exact"`` compares all elements. ``"sampled"`` (faster) compares about 1.2 k to 3 k candidates above a
            threshold from a sample of the parameter. It chooses the same elements, except that with a probability
            below 1e-5 it chooses slightly fewer than k. Parameters of up to 32768 elements are always compared
            completely; on CUDA also those with candidates for more than a 16th, those of float64, and all without
            Triton.
        ef: error feedback.
    """

    ratio: float = option(0.01, above=0, at_most=1)
    select: Literal["sampled", "exact"] = "sampled"
    ef: bool = True
    rounds = 1

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        indices, values = largest(flat, plan_of(bucket, self.ratio, self.select == "exact"))
        rest = subtract_sent(bucket, indices, values)
        return Aggregated((yield from gathered_sum(bucket, indices, values)), rest=rest)


@dataclass(frozen=True)
class Threshold(WithFeedback):
    """The elements whose magnitude reaches a fixed value (Strom 2015, but with the elements' own values).

    An element of ``p = g w/sum(w) + e`` is sent if ``N |p| >= value``, where N counts the ranks of positive weight: the
    value is in units of one rank's gradient, for any number of ranks. A message holds at most ``ceil(ratio n)``
    elements of each parameter, the largest first; further elements stay in the residual.

    State: with ``ef`` the residual, as in :class:`TopK`. Weights: any. On the wire: as ``topk`` of the same ratio,
    however many elements reach the value.

    Source:
        Strom, *Scalable distributed DNN training using commodity GPU cloud computing*, 2015.

    When to choose:
        A magnitude is known below which elements do not matter.

    Attributes:
        value: smallest magnitude that is sent, in units of the gradient; it is not rescaled with a loss scale.
        ratio: capacity of a message, as a share of the elements.
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
        rest = subtract_sent(bucket, indices, values)
        return Aggregated((yield from gathered_sum(bucket, indices, values)), rest=rest)


@dataclass(frozen=True)
class RandomK(WithFeedback):
    """Random elements of each parameter, the same on all ranks (Stich 2018, definition 2.1; Wangni 2018).

    Each of a parameter's n elements is one of the ``k = ceil(ratio n)`` chosen with probability k/n. The choice is a
    function of (seed, step, name). The update is the weighted mean at the chosen elements, and 0 elsewhere.

    State: with ``ef`` the residual, as in :class:`TopK`. Weights: any. On the wire: one all-reduce of k values, without
    indices.

    Source:
        Stich et al., *Sparsified SGD with memory*, 2018, definition 2.1; Wangni et al., *Gradient sparsification for
        communication-efficient distributed optimization*, 2018.

    When to choose:
        The choice of elements must cost little, at any number of ranks, and the optimizer has no momentum or a low
        rate.

    Attributes:
        ratio: share of the elements that are sent.
        unbiased: multiply by n/k, so that the expectation is the mean. It needs ``ef=false``: the multiplied elements
            are no contraction, so the residual would grow without bounds.
        ef: error feedback.

    Raises:
        ConfigurationError: ``unbiased`` together with ``ef``.
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
        seed = bucket.seed
        keys = bucket.integers(lambda step: round_keys(key(seed, step, "randomk")))
        indices = shuffled(plan, keys, flat.device)
        values = flat.index_select(0, indices).to(dtype)
        numbers, first_slots, counts, scales = layout.derive(("randomk", plan), lambda: _tables(plan, flat.device))
        values.index_add_(0, first_slots, poison(flat, layout)[numbers].to(dtype))
        if self.unbiased:
            values.mul_(scales.index_select(0, owners(counts, plan.total)))
        rest = subtract_sent(bucket, indices, values)
        summed = yield AllReduce(values)
        return Aggregated(bucket.output(dtype).zero_().index_copy_(0, indices, summed), rest=rest)


def _tables(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tables of a plan, on ``device``.

    Returns:
        ``(numbers, first, counts, scale)``: the index and the first slot of each parameter that has elements, int64;
        k (int64) and n/k (float32) of all parameters.
    """
    sizes = torch.tensor([plan.layout.sizes[name] for name in plan.layout.names], dtype=torch.int64, device="cpu")
    counts = torch.tensor(list(plan.counts.values()), dtype=torch.int64, device="cpu")
    chosen = [i for i, count in enumerate(plan.counts.values()) if count]
    numbers = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    scale = (sizes.double() / counts.clamp(min=1)).float()
    first = (counts.cumsum(0) - counts)[numbers]
    return numbers.to(device), first.to(device), counts.to(device), scale.to(device)
