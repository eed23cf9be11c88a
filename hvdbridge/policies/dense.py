"""Dense policies: every element of the gradient is sent.

Rules:

1. The result is ``sum_r w_r g_r / sum(w)``; ``sum`` is N times that.
2. Half types are used on the wire only. One owner per element adds in float32 (:mod:`.sharded`), so each element is
   rounded to the half type twice, whatever the number of ranks.
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
from hvdbridge.policy.bucket import DDP_MB, Bucket, Number, scale
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, output_of


@dataclass(frozen=True)
class Mean(Policy):
    """Weighted mean of the gradients, ``sum_r w_r g_r / sum(w)``.

    The mean is one all-reduce per bucket and has the bits of plain DDP. State: none. Weights: any.
    On the wire: ``2 (N-1)/N`` of the gradient, in its own type.

    Source:
        PyTorch's DistributedDataParallel computes the same mean.

    When to choose:
        The network is fast, or nothing was measured yet. The mean loses nothing and has nothing to tune.

    Attributes:
        exact: add in rank order in float32 (float64 for float64), by an all-to-all and an all-gather (:mod:`.sharded`).
            As many bytes are sent. The bits depend neither on the backend nor on bucket boundaries.
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
        # Nothing is rounded for the wire, so no residual depends on the owner of a shard: flat shards suffice.
        shards, wide = FlatShards(flat.numel(), bucket.size), accumulator(flat.dtype)
        update = yield from sharded_sum(flat, shards, bucket.rank, flat.dtype, wide, bucket.pool, bucket.output)
        return Aggregated(update, rest=rest)


MEAN = Mean()
"""The default inner policy."""


@dataclass(frozen=True)
class Sum(Policy):
    """Sum of the gradients over ranks, as ``hvd.Sum``; one all-reduce per bucket.

    Weights are multipliers relative to their mean, ``sum_r (N w_r / sum(w)) g_r``; equal weights give the plain sum.
    State: none. Not additive: :class:`~.wrappers.ErrorFeedback` needs an update that is a mean, and the sum is N times
    the mean. On the wire: ``2 (N-1)/N`` of the gradient, in its own type.

    Source:
        Horovod's ``op=hvd.Sum``.

    When to choose:
        The code and its learning rate were written for the sum over ranks.
    """

    rounds = 1

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield AllReduce(scale(bucket.buffer, share_of_sum(bucket)))))


def share_of_sum(bucket: Bucket) -> Number:
    """Return the factor that turns this rank's buffer into its term of the sum: ``N w_r / sum(w)``, and N if the buffer
    is weighted already."""
    if bucket.scaled:
        return float(bucket.size)
    if bucket.decide(lambda _, weights: weights is None or len(set(weights)) == 1):
        return 1.0  # N w / sum(w) may differ from 1 by a rounding
    return 0.0 if bucket.excluded else bucket.number(lambda ranks: ranks.size * ranks.share)


def plain_mean(policy: Policy) -> bool:
    """Return whether the update equals plain DDP's if no weights are set, so that DDP itself may compute it."""
    return type(policy) is Mean and not policy.exact


def all_reduces(policy: Policy) -> bool:
    """Return whether each flow is one all-reduce in the bucket's memory, with next to no computation."""
    return plain_mean(policy) or type(policy) is Sum


@own_member_first(warn=False)
def bucket_mb(policy: Policy) -> float:
    """Return the default bucket size in MiB on one machine. A class may define an attribute of this name instead.

    The default is DDP's size: buckets on torch are then those of plain DDP, whose bits the mean reproduces. It is
    smaller for policies that compute between collectives and state their :attr:`Policy.rounds`: the scheduler then
    encodes one bucket while another is in flight.
    """
    return DDP_MB if policy.rounds is None or plain_mean(policy) or isinstance(policy, Sum) else CODED_MB


def local_gradient(bucket: Bucket) -> Tensor:
    """Return this rank's gradient unchanged; zeros if its weight is 0, so that its optimizer gets no NaN either."""
    return bucket.buffer.zero_() if bucket.excluded else bucket.buffer


@dataclass(frozen=True)
class Noop(Policy):
    """This rank's own gradient, without communication: a baseline to measure the cost of communication against.

    Replicas drift apart from the first step on; the logger ``hvdbridge`` warns of this once per process. A rank of
    weight 0 gets zeros. State: none.

    When to choose:
        A benchmark measures a step without communication. Do not train with it.
    """

    replicas = "drift"

    def init(self, params: Mapping[str, Tensor]) -> State:
        _warn_of_drift()
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        return Aggregated(local_gradient(bucket))


@cache
def _warn_of_drift() -> None:
    logging.getLogger("hvdbridge").warning("policy noop aggregates nothing: from the first step on, replicas drift")


@dataclass(frozen=True)
class _Half(Policy):
    """Base of policies that send a half type, for the weighted mean or for the float32 payloads of any inner policy.

    Around the mean such a policy is additive. Around another policy it is not, because the inner policy does not see
    how its payloads are rounded: put error feedback inside, ``fp16(ef(...))``.

    Raises:
        ConfigurationError: ``inner`` acts after the optimizer's step. Write ``local_sgd(inner=fp16)``, or
            ``inner=bf16``.
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
        return None if self.inner.rounds is None else 2 * self.inner.rounds  # each sum becomes two collectives

    @property
    def bytewise(self) -> bool:
        return type(self.inner) is Mean or self.inner.bytewise

    def power(self, size: int) -> float:
        """Return the power of two by which contributions to a sum of ``size`` ranks are multiplied on the wire."""
        return 1.0

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if type(self.inner) is Mean:  # its payload is the bucket, so its rest is known
            return (yield from self._mean(bucket))
        flow = self.inner.aggregate(bucket, state["inner"])
        result = yield from rewrite(flow, lambda request: self._send_narrow(request, bucket))
        return Aggregated(result.update, result.sent, {"inner": result.state})

    def _mean(self, bucket: Bucket) -> Flow:
        flat, needs_sent = bucket.weighted().buffer, bucket.needs_sent
        update = yield from sharded_sum(
            flat, shards_of(bucket), bucket.rank, self.wire, self.wire, bucket.pool,
            lambda _: bucket.output(accumulator(flat.dtype)), self.power(bucket.size), needs_sent=needs_sent,
        )  # fmt: skip
        return Aggregated(update, rest=flat if needs_sent else None)

    def _send_narrow(self, request: Collective, bucket: Bucket) -> Exchange:
        """Answer ``request`` through requests whose payload has the type ``wire``.

        The answer has the shape and type that ``request`` would give. Payloads other than float32 (such as dot products
        in float64) and the operations min, max and product pass unchanged.
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
                rows, received = (bucket.scratch(tensor.numel(), self.wire) for _ in range(2))
                scaled(tensor.reshape(-1), power, rows)
                contributions = yield AllToAll(rows.view(tensor.shape), request.group, received)
                total = sum_rows(contributions, tensor[0]).div_(power)
                bucket.pool.give(rows, received)
                return total
            case AllGather() | AllToAll() | Broadcast():
                if not bucket.weighting.weighted:  # payloads are gradients, not shares of a mean: no scaling is needed
                    power = 1.0
                shape = request.answer_shape(size)
                numel = math.prod(shape)
                narrow = bucket.scratch(tensor.numel(), self.wire)
                scaled(tensor.reshape(-1), power, narrow)
                if isinstance(request, Broadcast):
                    output, answer = None, (yield replace(request, tensor=narrow.view(tensor.shape)))
                else:
                    output, received = output_of(request, numel), bucket.scratch(numel, self.wire)
                    answer = yield replace(request, tensor=narrow.view(tensor.shape), out=received)
                output = (tensor.new_empty(numel) if output is None else output).copy_(answer.reshape(-1))
                bucket.pool.give(narrow, answer)
                return (output if power == 1.0 else output.div_(power)).view(shape)
            case _:
                return (yield request)


@dataclass(frozen=True)
class Fp16(_Half):
    """IEEE half precision on the wire: 11 bits of significand, magnitudes up to 65504 (as PyTorch's fp16 hook).

    ``fp16`` is the weighted mean; ``fp16(inner)`` casts the float32 payloads of any policy. Contributions are sent as
    ``g w/sum(w) 2^round(log2 N)``, about the size of g itself: at large N, shares ``g / N`` would be smaller than
    fp16's smallest numbers. Magnitudes above 65504 become inf, as in PyTorch's hook.

    State and weights are those of ``inner``. On the wire: half of the bytes that ``inner`` sends in float32.

    Source:
        PyTorch's communication hook ``fp16_compress_hook``.

    When to choose:
        Half of the bytes suffice, bfloat16 rounds too coarsely, and gradients and their sums stay below 65504.

    Attributes:
        inner: the policy whose payloads are cast.
    """

    wire = torch.float16

    def power(self, size: int) -> float:
        return 2.0 ** round(math.log2(size))


@dataclass(frozen=True)
class Bf16(_Half):
    """bfloat16 on the wire: 8 bits of significand and the range of float32, so nothing needs scaling.

    ``bf16`` is the weighted mean; ``bf16(inner)`` casts the float32 payloads of any policy. State, weights and
    bytes are those of :class:`Fp16`.

    Source:
        PyTorch's communication hook ``bf16_compress_hook``.

    When to choose:
        Half of the bytes suffice. The range is that of float32 and there is no state, so try it before other policies.

    Attributes:
        inner: the policy whose payloads are cast.
    """

    wire = torch.bfloat16
