"""Dense policies: every element of the gradient travels.

Rules:

1. The result is ``sum_r w_r g_r / sum(w)``; ``sum`` is N times that.
2. Half types are for the wire alone: additions are made in float32 by one owner (:mod:`.sharded`), so results
   do not depend on the number of ranks by more than two roundings.
3. Updates have the type of the bucket's buffer or a wider one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.deprecated import own_member_first
from hvdbridge.errors import ConfigurationError
from hvdbridge.policies.sharded import sharded_sum
from hvdbridge.policies.shards import FlatShards, accumulator, scaled, shards_of, sum_rows
from hvdbridge.policy.base import CODED_MB, Aggregated, Exchange, Flow, Policy, State, acts_after_step, rewrite
from hvdbridge.policy.bucket import DDP_MB, Bucket, scale
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, output_of


@dataclass(frozen=True)
class Mean(Policy):
    """The weighted mean, ``sum_r w_r g_r / sum(w)``: one all-reduce per bucket, plain DDP's bits.

    Attributes:
        exact: sum in rank order in float32 (float64 stays float64), by the sharded scheme. The same bytes on
            the wire, and the same bits on every backend at any number of ranks, whatever the buckets.
    """

    exact: bool = False
    additive = True

    @property
    def rounds(self) -> int | None:
        return 2 if self.exact else 1

    @property
    def bytewise(self) -> bool:
        return self.exact

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        flat, rest = bucket.weighted().buffer, None
        if bucket.needs_sent:
            flat = bucket.output(flat.dtype).copy_(flat)
            rest = bucket.buffer.zero_()
        if not self.exact:
            return Aggregated((yield AllReduce(flat)), rest=rest)
        # Nothing is rounded for the wire, so the owner of a shard does not matter: flat ones are enough.
        shards, wide = FlatShards(flat.numel(), bucket.size), accumulator(flat.dtype)
        update = yield from sharded_sum(flat, shards, bucket.rank, flat.dtype, wide, bucket.pool, bucket.output)
        return Aggregated(update, rest=rest)


MEAN = Mean()
"""The default inner policy."""


@dataclass(frozen=True)
class Sum(Policy):
    """The sum over ranks, as ``hvd.Sum``; one all-reduce per bucket.

    Weights are multipliers relative to their mean, ``sum_r (N w_r / sum(w)) g_r``: equal ones give the plain sum.
    It is not additive: ErrorFeedback accounts for shares of a mean, and this update is N times that.
    """

    rounds = 1

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield AllReduce(scale(bucket.buffer, share_of_sum(bucket)))))


def share_of_sum(bucket: Bucket) -> float:
    """The factor that makes this rank's gradient its part of a sum: ``N w_r / sum(w)``."""
    if bucket.scaled:
        return float(bucket.size)
    if bucket.weights is None or len(set(bucket.weights)) == 1:
        return 1.0  # exactly: N w / sum(w) may be off by a rounding
    return bucket.size * bucket.factor


def plain_mean(policy: Policy) -> bool:
    """Whether the update is what plain DDP makes of a gradient, if no weights are set: then DDP may make it."""
    return type(policy) is Mean and not policy.exact


def all_reduces(policy: Policy) -> bool:
    """Whether a flow is one all-reduce in the bucket's memory, with next to no computation."""
    return plain_mean(policy) or type(policy) is Sum


@own_member_first(warn=False)
def bucket_mb(policy: Policy) -> float:
    """The size of a bucket in MiB on one machine, if none is given. A class may have an attribute of this name.

    Else the size is DDP's, or less where flows compute between collectives and run ahead of their turns
    (:attr:`Policy.rounds`), so that one bucket is coded while another travels. With DDP's size, buckets on torch are
    those of plain DDP, whose bits the mean reproduces.
    """
    return DDP_MB if policy.rounds is None or plain_mean(policy) or isinstance(policy, Sum) else CODED_MB


def own(bucket: Bucket) -> Tensor:
    """This rank's gradient as it is; zeros where its weight is 0, so that not even its optimizer sees a NaN."""
    return bucket.buffer.zero_() if bucket.weight == 0.0 else bucket.buffer


@dataclass(frozen=True)
class Noop(Policy):
    """This rank's own gradient, and nothing on the wire: to find out what communication costs. Replicas drift.

    It says so once, on the logger ``hvdbridge``.
    """

    replicas = "drift"

    def init(self, params: Mapping[str, Tensor]) -> State:
        _warn_of_drift()
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        return Aggregated(own(bucket))


@cache
def _warn_of_drift() -> None:
    logging.getLogger("hvdbridge").warning("policy noop aggregates nothing: from the first step on, replicas drift")


@dataclass(frozen=True)
class _Half(Policy):
    """A half type on the wire, of the weighted mean or of any inner policy's floating payloads.

    Around the mean it is additive. Around another policy it is not, because that policy does not learn how its payloads
    were rounded: put error feedback inside, ``fp16(ef(...))``. A policy that acts after the optimizer's step is
    refused: ``local_sgd(inner=fp16)``.
    """

    inner: Policy = MEAN
    wire: ClassVar[torch.dtype]

    def __post_init__(self) -> None:
        super().__post_init__()
        if acts_after_step(self.inner):
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} cannot wrap {type(self.inner).__name__}, which acts after the optimizer's step: it narrows "
                f"gradients alone. Put it inside, where the policy sends parameters: local_sgd(inner={name.lower()})"
            )

    @property
    def additive(self) -> bool:
        return type(self.inner) is Mean

    @property
    def rounds(self) -> int | None:
        if type(self.inner) is Mean:
            return 2
        return None if self.inner.rounds is None else 2 * self.inner.rounds  # a sum takes two, all else one

    @property
    def bytewise(self) -> bool:
        return type(self.inner) is Mean or self.inner.bytewise

    def power(self, size: int) -> float:
        """What contributions to a sum of ``size`` are multiplied by while they travel."""
        return 1.0

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if type(self.inner) is Mean:  # the one inner whose payload is the bucket: what was sent is known exactly
            return (yield from self._mean(bucket))
        flow = self.inner.aggregate(bucket, state["inner"])
        result = yield from rewrite(flow, lambda request: self._travel(request, bucket))
        return Aggregated(result.update, result.sent, {"inner": result.state})

    def _mean(self, bucket: Bucket) -> Flow:
        flat, needs_sent = bucket.weighted().buffer, bucket.needs_sent
        update = yield from sharded_sum(
            flat, shards_of(bucket), bucket.rank, self.wire, self.wire, bucket.pool,
            lambda _: bucket.output(accumulator(flat.dtype)), self.power(bucket.size), needs_sent=needs_sent,
        )  # fmt: skip
        return Aggregated(update, rest=flat if needs_sent else None)

    def _travel(self, request: Collective, bucket: Bucket) -> Exchange:
        """Answer ``request`` by requests whose payload is half; its shape and type are kept.

        float64 (dot products) and min, max, product pass through unchanged.
        """
        tensor = request.tensor
        if tensor.dtype != torch.float32:
            return (yield request)
        rank, size = bucket.place(request.group)
        power = self.power(size)
        match request:
            case AllReduce(op="sum"):
                flat, shards = tensor.reshape(-1), FlatShards(tensor.numel(), size)
                total = yield from sharded_sum(
                    flat, shards, rank, self.wire, self.wire, bucket.pool, lambda _: flat, power, request.group
                )
                return total.view(tensor.shape)
            case ReduceScatter(op="sum"):
                rows, came = (bucket.scratch(tensor.numel(), self.wire) for _ in range(2))
                scaled(tensor.reshape(-1), power, rows)
                theirs = yield AllToAll(rows.view(tensor.shape), request.group, came)
                total = sum_rows(theirs, tensor[0]).div_(power)
                bucket.pool.give(rows, came)
                return total
            case AllGather() | AllToAll() | Broadcast():
                if not bucket.weighting.weighted:  # a raw gradient is no share of a mean: it needs no lift
                    power = 1.0
                shape = request.answer_shape(size)
                numel = math.prod(shape)
                narrow = bucket.scratch(tensor.numel(), self.wire)
                scaled(tensor.reshape(-1), power, narrow)
                if isinstance(request, Broadcast):
                    whole, answer = None, (yield replace(request, tensor=narrow.view(tensor.shape)))
                else:
                    whole, came = output_of(request, numel), bucket.scratch(numel, self.wire)
                    answer = yield replace(request, tensor=narrow.view(tensor.shape), out=came)
                whole = (tensor.new_empty(numel) if whole is None else whole).copy_(answer.reshape(-1))
                bucket.pool.give(narrow, answer)
                return (whole if power == 1.0 else whole.div_(power)).view(shape)
            case _:
                return (yield request)


@dataclass(frozen=True)
class Fp16(_Half):
    """IEEE half precision on the wire: 11 bits of significand, up to 65504.

    ``fp16`` is the weighted mean; ``fp16(inner)`` casts the floating payloads of any policy.
    Contributions travel as ``g w/sum(w) 2^round(log2 N)``, about the size of g itself: a share ``g / N``
    would fall below fp16's smallest numbers at large N. What exceeds 65504 travels as inf, as it does in
    PyTorch's own fp16 hook.
    """

    wire = torch.float16

    def power(self, size: int) -> float:
        return 2.0 ** round(math.log2(size))


@dataclass(frozen=True)
class Bf16(_Half):
    """bfloat16 on the wire: 8 bits of significand and the range of float32, so nothing needs scaling.

    ``bf16`` is the weighted mean; ``bf16(inner)`` casts the floating payloads of any policy.
    """

    wire = torch.bfloat16
