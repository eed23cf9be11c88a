"""qsgd, terngrad, natural: rounded at random, so that the mean over the random numbers is the gradient itself.

Rules:

1. By the sharded scheme: every rank's shares travel to their owners, who decode and add in rank order and send the
   sum to all. Where the sum is rounded again, that is unbiased, too, and errs as much as if one rank had sent it.
2. Random numbers are keyed by (seed, step, stage, element), those of the first stage by the rank as well: with equal
   ones the errors of two ranks would not average out. The second stage has one owner per element and its own numbers.
3. Errors of a step are independent of those of others, so no feedback is needed; ``ef(qsgd)`` has it all the same.
4. Memory: without a C compiler the bits of ``natural``, 9 per element, are taken apart and put together beside gradient
   and update: two and a half buckets beside the gradients.
5. Arithmetic is in float32. NaN and inf reach all ranks: with the block in ``qsgd``, with the whole parameter in
   ``terngrad``, alone in ``natural``, where NaN arrives as inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.codes import Linear, PowerOfTwo, Ternary, largest, norms
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
    """Levels ``-s .. s`` of each block's norm, rounded at random (Alistarh 2017, section 3.1 and 4).

    ``Q(v_i) = |v| sign(v_i) xi_i / s``, ``xi_i`` one of the two integers around ``s |v_i| / |v|``, such that its mean
    is that. An element errs by less than ``|v| / s``, in either stage. A norm of zero gives zeros.

    On the wire: ``ceil(log2(2 s + 1))`` bits per element, and 4 bytes per block; 0.51 bytes per element at the
    default. (The paper's Elias code is shorter, but its length depends on the data.)

    Attributes:
        levels: s, from 1 to 127; or
        bits: per element, 2 to 8, for ``s = 2**(bits - 1) - 1``. Neither given: 4 bits, s = 7.
        norm: ``"max"``, which the paper's experiments use, or ``"l2"``, of which its theorem speaks:
            the variance is at most ``min(d / s**2, sqrt(d) / s) |v|**2``, d the block's length. That bound is
            small only where s is about sqrt(d): ``"l2"`` wants ``bits=8`` or short blocks.
        block: elements that share a norm (the paper's bucket); a power of two from 16 to 1024.
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
    """Rounded at random to one of the two powers of two around each element (Horvath 2019, section 2).

    The variance is at most 1/8 of the square, whatever the values: no scale, no blocks.

    On the wire: 9 bits per element, 1.125 bytes: the exponent of float32 as a byte, and eight signs in a byte. So the
    range is that of float32; what lies below 2**-126 becomes that or zero. (The last binade, above 2**127, has no
    upper neighbour and is rounded down.)
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
    add integers, and the second stage loses nothing.

    On the wire: 4 bytes per parameter to each of the others (``s``, an all-gather before the rest), 2 bits per
    element to the owners, and ``ceil(log2(2 N + 1))`` bits back: 3 at 2 ranks, 4 at 4, 5 at 8.

    Attributes:
        clip: Elements beyond so many deviations of their parameter's gradient are clipped before s is taken
            (section 3.4, which says 2.5). The deviation is that from zero, ``sqrt(mean(g**2))``: about their mean,
            a parameter of one element would always be zero. None: no clipping, and so unbiased.
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
        given = torch.stack([scales, limits], 1)[parameters.of_block]
        once, back = Ternary(), Linear(size)
        codes, _ = encode(once, flat, blocks, seed_of(bucket, "to owner", private=True), given)
        per_block = given[:, 0].unsqueeze(0)
        rest = decode(once, codes.unsqueeze(0), per_block, blocks, flat, add=-1) if bucket.needs_sent else None
        # Sums of integers do not depend on the owner of a shard: flat ones are enough.
        shards = FlatShards(flat.numel(), size)
        rows = pack(shards.pack(codes, torch.uint8), 2)
        del codes
        theirs = yield AllToAll(rows)
        del rows
        request = AllGather(back.to_wire(counted(unpack(theirs, shards.length, 2), back)))
        del theirs
        answer = yield request
        codes = shards.unpack(back.from_wire(answer, shards.length), back.dtype)
        update = decode(back, codes.unsqueeze(0), per_block, blocks, bucket.output(accumulator(flat.dtype)))
        return Aggregated(update, rest=rest)


def counted(votes: Tensor, back: Linear) -> Tensor:
    """The sum of ranks' signs as codes ``[n]`` of ``back``, whose levels are as many as ranks; overwrites ``votes``.

    Args:
        votes: uint8 ``[ranks, n]``, 0 to 2 for -1 to 1 (3, of NaN, gives any code).

    >>> counted(torch.tensor([[0, 1, 2], [0, 2, 2]], dtype=torch.uint8), Linear(2)).tolist()
    [0, 3, 4]
    """
    size = len(votes)
    total = votes[0] if size <= 127 else votes[0].to(torch.int32)
    for vote in votes[1:]:
        total.add_(vote)
    if back.levels > 63:  # other codes count from zero, as votes do
        total.sub_(size)
    return total.to(back.dtype) if size > 127 else total.bitwise_and_((1 << back.bits) - 1)


class _Parameters:
    """What is measured per parameter, from what is measured per block."""

    def __init__(self, bucket: Bucket, blocks: Blocks) -> None:
        self.blocks = blocks
        sizes = [size for size in bucket.layout.sizes.values() if size]
        device = bucket.buffer.device
        self.sizes = torch.tensor(sizes, dtype=torch.float64, device=device)
        self._counts = torch.tensor([-(-size // BLOCK) for size in sizes], dtype=torch.int64, device=device)

    @staticmethod
    def of(bucket: Bucket, blocks: Blocks) -> _Parameters:
        key = ("parameters", bucket.buffer.device)
        return bucket.layout.derive(key, lambda: _Parameters(bucket, blocks))

    @property
    def of_block(self) -> Tensor:
        """Number of each block's parameter, the empty ones not counted; int64 ``[blocks]``."""
        numbers = torch.arange(self._counts.numel(), device=self._counts.device)
        return numbers.repeat_interleave(self._counts, output_size=self.blocks.count)

    def largest(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each parameter, float32; NaN where it has one."""
        found = torch.zeros(self.sizes.numel(), dtype=torch.float32, device=flat.device)
        return found.scatter_reduce_(0, self.of_block, self.blocks.measure(flat, largest), "amax")

    def deviations(self, flat: Tensor) -> Tensor:
        """``sqrt(mean(g**2))`` of each parameter, float64."""
        squares = self.blocks.measure(flat, norms).to(torch.float64).square_()
        return torch.zeros_like(self.sizes).index_add_(0, self.of_block, squares).div_(self.sizes).sqrt_()
