"""qsgd, terngrad, natural: stochastic rounding, whose expectation is the gradient itself.

Rules:

1. The policies use the sharded scheme: every rank sends its shares to their owners, which decode them, add them in rank
   order, and send the sum to all ranks. If the sum is rounded again, that is unbiased too, and its error is that of one
   rank's message.
2. Random numbers are keyed by (seed, step, stage, element), those of the first stage also by the rank: with equal
   numbers the errors of two ranks would not average out. The second stage has one owner per element, and its own
   numbers.
3. Errors of different steps are independent, so no error feedback is needed. ``ef(qsgd)`` has it all the same.
4. Memory: without a C compiler, ``natural`` splits and joins its 9 bits per element in temporary memory: two and a half
   buckets in addition to the gradients.
5. Arithmetic is in float32. NaN and inf reach all ranks: with the whole block in ``qsgd``, with the whole parameter in
   ``terngrad``, alone in ``natural``, where NaN arrives as inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.codes import Linear, PowerOfTwo, Ternary, max_magnitude, norms
from hvdbridge.kernels.pack import pack, unpack
from hvdbridge.kernels.quantise import decode, encode
from hvdbridge.kernels.random import seed_of
from hvdbridge.policies.sharded import blocks_of, check_block, sharded_code
from hvdbridge.policies.shards import FlatShards, accumulator
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import BLOCK, Bucket
from hvdbridge.policy.collectives import AllGather, AllToAll
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class Qsgd(Policy):
    """Levels ``-s .. s`` of each block's norm, with stochastic rounding (Alistarh 2017, sections 3.1 and 4).

    ``Q(v_i) = |v| sign(v_i) xi_i / s``, where ``xi_i`` is one of the two integers around ``s |v_i| / |v|`` and has that
    expectation. The error of an element is below ``|v| / s``, in either stage. A norm of zero gives zeros.

    On the wire: ``ceil(log2(2 s + 1))`` bits per element, and 4 bytes per block; 0.51 bytes per element at the
    default. (The paper's Elias code is shorter, but its length depends on the data.)

    Source:
        Alistarh et al., *QSGD: communication-efficient SGD via gradient quantization and encoding*, 2017, sections 3.1
        and 4.

    When to choose:
        An eighth of the bytes is needed, unbiased and without state.

    Attributes:
        levels: number s of levels, from 1 to 127. Give ``levels`` or ``bits``.
        bits: bits per element, 2 to 8, for ``s = 2**(bits - 1) - 1``. If neither is given: 4 bits, s = 7.
        norm: ``"max"``, as in the paper's experiments, or ``"l2"``, as in its theorem: the variance is at most
            ``min(d / s**2, sqrt(d) / s) |v|**2``, d the block's length. That bound is small only if s is about sqrt(d):
            ``"l2"`` requires ``bits=8`` or short blocks.
        block: number of elements that share a norm (the paper's bucket); a power of two from 16 to 1024.
    """

    levels: int | None = option(None, at_least=1, at_most=127)
    bits: int | None = option(None, at_least=2, at_most=8)
    norm: Literal["max", "l2"] = "max"
    block: int = 512
    additive = True
    deterministic = False
    rounds = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block(self, self.block)
        if self.levels is not None and self.bits is not None:
            raise ConfigurationError(f"Qsgd: levels={self.levels} and bits={self.bits} say the same; give one of them")

    @property
    def code(self) -> Linear:
        levels = self.levels or 2 ** ((self.bits or 4) - 1) - 1
        return Linear(levels, "stochastic", self.norm)

    @property
    def bytewise(self) -> bool:
        return self.code.bits >= 8

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return (yield from sharded_code(bucket, self.code, self.block)).aggregated


@dataclass(frozen=True)
class Natural(Policy):
    """Stochastic rounding to one of the two powers of two around each element (Horvath 2019, section 2).

    The variance is at most 1/8 of the square for any values, without scales or blocks.

    On the wire: 9 bits per element, 1.125 bytes: float32's exponent as a byte, and eight signs in a byte. So the range
    is that of float32; elements below 2**-126 become that or zero. (Above 2**127 there is no upper neighbor, so these
    are rounded down.)

    Source:
        Horváth et al., *Natural compression for distributed deep learning*, 2019, section 2.

    When to choose:
        Gradients may have any range, and the policy must be unbiased and without state.
    """

    additive = True
    deterministic = False
    rounds = 2
    bytewise = True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return (yield from sharded_code(bucket, PowerOfTwo())).aggregated


@dataclass(frozen=True)
class TernGrad(Policy):
    """-1, 0 or 1 times one scale per parameter (Wen 2017, sections 3.1 and 3.3, with scaler sharing).

    ``s = max over ranks and elements of |g|``, ``P(+-1) = |g_i| / s``, else 0. As all ranks have the same s, owners
    add integers, and the second stage is exact.

    On the wire: 4 bytes per parameter to each other rank (``s``, in an all-gather before the rest), 2 bits per
    element to the owners, and ``ceil(log2(2 N + 1))`` bits back: 3 at 2 ranks, 4 at 4, 5 at 8.

    Source:
        Wen et al., *TernGrad: ternary gradients to reduce communication in distributed deep learning*, 2017, sections
        3.1, 3.3 and 3.4.

    When to choose:
        Many ranks average out the rounding errors, and the policy must have no state.

    Attributes:
        clip: Elements beyond this number of deviations of their parameter's gradient are clipped before s is computed
            (section 3.4, which uses 2.5). It is the deviation from zero, ``sqrt(mean(g**2))``: the deviation from the
            mean of a parameter of one element is zero, so it would always be clipped to zero. None: no clipping, so
            unbiased.
    """

    clip: float | None = option(2.5, above=0)
    additive = True
    deterministic = False
    rounds = 3

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        flat, size = bucket.weighted().buffer, bucket.size
        blocks = blocks_of(bucket)
        parameters = _Parameters.of(bucket, blocks)
        limits = parameters.largest(flat)
        if self.clip is not None:
            limits = torch.minimum(limits, parameters.deviations(flat).mul_(self.clip).to(torch.float32))
        scales = (yield AllGather(limits)).amax(0)
        scales_and_limits = torch.stack([scales, limits], 1)[parameters.of_block]
        ternary, back = Ternary(), Linear(size)
        codes, _ = encode(ternary, flat, blocks, seed_of(bucket, "to owner", private=True), scales_and_limits)
        block_scales = scales_and_limits[:, 0].unsqueeze(0)
        rest = decode(ternary, codes.unsqueeze(0), block_scales, blocks, flat, add=-1) if bucket.needs_sent else None
        # Sums of integers do not depend on the owner of a shard: flat ones are enough.
        shards = FlatShards(flat.numel(), size)
        message = pack(shards.pack(codes, torch.uint8), 2)
        del codes
        received = yield AllToAll(message)
        del message
        request = AllGather(back.to_wire(counted(unpack(received, shards.length, 2), back)))
        del received
        gathered = yield request
        codes = shards.unpack(back.from_wire(gathered, shards.length), back.dtype)
        update = decode(back, codes.unsqueeze(0), block_scales, blocks, bucket.output(accumulator(flat.dtype)))
        return Aggregated(update, rest=rest)


def counted(votes: Tensor, back: Linear) -> Tensor:
    """Sum the ranks' signs as codes ``[n]`` of ``back``, whose levels are as many as ranks; overwrites ``votes``.

    Args:
        votes: uint8 ``[ranks, n]``, 0 to 2 for -1 to 1 (3, from NaN, gives any code).

    >>> counted(torch.tensor([[0, 1, 2], [0, 2, 2]], dtype=torch.uint8), Linear(2)).tolist()
    [0, 3, 4]
    """
    size = len(votes)
    total = votes[0] if size <= 127 else votes[0].to(torch.int32)
    for vote in votes[1:]:
        total.add_(vote)
    if back.levels > 63:  # with fewer levels, codes count from zero, as votes do
        total.sub_(size)
    return total.to(back.dtype) if size > 127 else total.bitwise_and_((1 << back.bits) - 1)


class _Parameters:
    """Per-parameter statistics of a bucket, computed from those of its blocks; empty parameters are omitted."""

    def __init__(self, bucket: Bucket, blocks: Blocks) -> None:
        self.blocks = blocks
        sizes = [size for size in bucket.layout.sizes.values() if size]
        device = bucket.buffer.device
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._counts = torch.tensor([-(-size // BLOCK) for size in sizes], dtype=torch.int64, device=device)

    @staticmethod
    def of(bucket: Bucket, blocks: Blocks) -> _Parameters:
        """Return the instance for a bucket, cached with its layout."""
        key = ("parameters", bucket.buffer.device)
        return bucket.layout.derive(key, lambda: _Parameters(bucket, blocks))

    @property
    def of_block(self) -> Tensor:
        """Number of each block's parameter, empty ones not counted; int64 ``[blocks]``."""
        numbers = torch.arange(self._counts.numel(), device=self._counts.device)
        return numbers.repeat_interleave(self._counts, output_size=self.blocks.count)

    def largest(self, flat: Tensor) -> Tensor:
        """Return the largest magnitude of each parameter, float32 ``[parameters]``; NaN if it contains one."""
        maxima = torch.zeros(self.sizes.numel(), dtype=torch.float32, device=flat.device)
        return maxima.scatter_reduce_(0, self.of_block, self.blocks.measure(flat, max_magnitude), "amax")

    def deviations(self, flat: Tensor) -> Tensor:
        """Return ``sqrt(mean(g**2))`` of each parameter, float64 ``[parameters]``."""
        squares = self.blocks.measure(flat, norms).to(torch.float64).square_()
        return torch.zeros_like(self.sizes).index_add_(0, self.of_block, squares).div_(self.sizes).sqrt_()
