"""The sharded scheme: each rank owns 1/N of the vector, combines all ranks' pieces of it, sends the result.

    all-to-all  ->  the owner combines in rank order  ->  all-gather

One rank sends ``2 (N-1)/N`` of the vector, like a ring all-reduce, but nothing is added on the way: the wire
may carry a narrow type while sums are made in float32, in rank order, with the same bits on every backend.

Rules:

1. A sum of elements is the same wherever it is made, so where nobody asks who made it, shards are flat
   pieces of equal length (:class:`FlatShards`), mostly without a copy.
2. Where the owner matters (its second-stage error enters its ``sent`` and so its residual) shards consist
   of whole blocks (:class:`BlockShards`): block j belongs to rank j mod N, wherever bucket boundaries lie.
3. Shards are padded with zeros to the longest.
4. Messages and sums are in memory of the bucket's pool. The update goes to the output buffer (:meth:`Bucket.output
   <hvdbridge.Bucket.output>`), and what was sent is taken off the bucket's buffer.
5. What travels in blocks with a scale each (:func:`sharded_code`) has a :class:`~hvdbridge.kernels.quantise.Code`
   for either stage; codes and scales are one message, so two collectives a bucket do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.fused import InC, fused
from hvdbridge.kernels.quantise import Code, decode, encode_rows
from hvdbridge.kernels.random import seed_of
from hvdbridge.policies.shards import BlockShards, Shards, accumulator, add, block_shards, first_blocks, sum_rows
from hvdbridge.policy.base import Aggregated
from hvdbridge.policy.bucket import BLOCK, Bucket
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather, AllToAll, Collective


def sharded_sum(
    flat: Tensor,
    shards: Shards,
    rank: int,
    wire: torch.dtype,
    back: torch.dtype,
    pool: BufferPool,
    out: Callable[[torch.dtype], Tensor],
    power: float = 1.0,
    group: str = "world",
    needs_sent: bool = False,
) -> Generator[Collective, Tensor, Tensor]:
    """The sum of all ranks' ``flat``, in float32 (float64 where a stage sends float64).

    Args:
        flat: this rank's vector; given away where it needs no packing.
        wire, back: the types that the first and the second stage send.
        out: gives the memory for the sum, when the time has come; it may be that of ``flat``.
        power: contributions travel multiplied by it, the sum does not; a power of two costs no rounding.
        needs_sent: ``flat`` becomes what was not sent: less what the owners decoded of it and, on the shard that this
            rank owns, plus the error of the second stage. Needs shards by blocks.
    """
    exact = accumulator(torch.promote_types(wire, back))
    rows = shards.pack(flat, wire, power, pool)
    if needs_sent:
        assert isinstance(shards, BlockShards)
        shards.subtract(flat, rows, power)
    theirs = yield AllToAll(rows, group, pool.take(rows.numel(), wire, flat.device))
    total = sum_rows(theirs, pool.take(shards.length, exact, flat.device))
    pool.give(rows, theirs, but=[flat])
    if power != 1.0:
        total.div_(power)
    message = total if back == exact else pool.take(shards.length, back, flat.device).copy_(total)
    if needs_sent:
        assert isinstance(shards, BlockShards)
        shards.add_owned(flat, rank, add(total, message, -1.0))
    answer = yield AllGather(message, group, pool.take(shards.size * shards.length, back, flat.device))
    update = shards.unpack(answer, exact, out(exact))
    pool.give(total, message, answer, but=[flat, update])
    return update


@dataclass(frozen=True, eq=False)
class Coded:
    """What :func:`sharded_code` made of a vector; all flat, in the bucket's layout.

    Attributes:
        update: the sum over ranks as everybody decoded it, float32 (or the bucket's wider type), equal bits everywhere.
        rest: the bucket's buffer, less what the owners decoded of it, and on this rank's own shard plus what the
            second stage did not send: summed over ranks, inputs less rests are ``update``. None unless the bucket
            needs to know what was sent.
        error: on this rank's own shard, what the second stage did not send; zeros elsewhere. Where ``carry`` was given;
            then it is not in ``rest``.
    """

    update: Tensor
    rest: Tensor | None = None
    error: Tensor | None = None

    @property
    def aggregated(self) -> Aggregated:
        """For a policy without state."""
        return Aggregated(self.update, rest=self.rest)


def sharded_code(
    bucket: Bucket, code: Code, block: int = BLOCK, carry: Tensor | None = None, back: Code | None = None
) -> Generator[Collective, Tensor, Coded]:
    """The sum of all ranks' weighted buckets through codes: coded blocks to their owners, which add in float32 in rank
    order, code the sum, and send it to all.

    Blocks of ``block`` elements start anew at each parameter, and an owner has whole blocks, so the result does not
    depend on bucket boundaries. Noise is private in the first stage and the owner's own in the second: two ranks
    never share it, two stages neither.

    Args:
        code, back: of the first and the second stage; None = the same.
        block: a power of two that divides :data:`BLOCK`; see :func:`check_block`.
        carry: flat, what the owner adds to its shard of the sum before it is coded (a server's error feedback,
            as DoubleSqueeze has it); only this rank's own shard is read. Gives :attr:`Coded.error`, which is the
            next step's ``carry``.

    On the wire, per stage: ``code.bits`` per element, and 4 bytes per block where the code has scales.
    """
    rank, back, flat, pool = bucket.rank, back or code, bucket.weighted().buffer, bucket.pool
    plan = _code_plan(bucket, block)
    rest = flat if bucket.needs_sent else None
    seed = seed_of(bucket, "to owner", private=True) if code.random else 0
    size = max(plan.everyone.nbytes(code), plan.everyone.nbytes(back))
    sent, came = (bucket.scratch(size, torch.uint8) for _ in range(2))
    message = plan.everyone.encode(code, flat, seed, bucket.needs_sent, sent)
    theirs = yield AllToAll(message, out=came[: message.numel()])
    wide, total = accumulator(flat.dtype), bucket.scratch(plan.shards.length, torch.float32)
    plan.own.decode(code, theirs, total)
    if carry is not None:
        plan.shards.add_to(total, carry, rank)
    seed = seed_of(bucket, "back") if back.random else 0
    message = plan.own.encode(back, total, seed, rest is not None or carry is not None, sent)[0]
    error = None if carry is None else bucket.fresh(carry).zero_()
    if error is not None:
        plan.shards.add_owned(error, rank, total)
    elif rest is not None:
        plan.shards.add_owned(rest, rank, total)
    answer = yield AllGather(message, out=came[: bucket.size * message.numel()])
    update = plan.everyone.decode(back, answer, bucket.output(wide))
    pool.give(sent, came, total)
    return Coded(update, rest, error)


def check_block(policy: object, block: int) -> None:
    """
    Raises:
        ConfigurationError: ``block`` does not divide the blocks that owners have, or is too short to be packed.
    """
    if block & (block - 1) or not 16 <= block <= BLOCK:
        raise ConfigurationError(
            f"{type(policy).__name__}: block={block} must be a power of two from 16 to {BLOCK} "
            "(owners have whole blocks of that size)"
        )


class _Messages:
    """A vector in coded blocks as messages, one for each row of ``blocks``: its scales, then its codes.

    Fused kernels write and read messages in one pass where they can.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def nbytes(self, code: Code) -> int:
        """Of all messages."""
        return self._blocks.rows * (self._head(code) + code.wire_bytes(self._blocks.length))

    def encode(self, code: Code, flat: Tensor, seed: int, keep_rest: bool, out: Tensor) -> Tensor:
        """uint8 ``[rows, bytes]``, in ``out``, uint8 and long enough; with ``keep_rest`` ``flat`` becomes what these
        do not say."""
        blocks, messages = self._blocks, out[: self.nbytes(code)].view(self._blocks.rows, -1)
        scales, packed = self._split(code, messages)
        kernels = fused(flat, packs=True) if flat.dtype == torch.float32 else None
        if isinstance(kernels, InC):
            messages.zero_()
            if kernels.encode(code.fields, flat, blocks, packed, scales, keep_rest, seed):
                return messages
        codes, found = encode_rows(code, flat, blocks, seed, keep_rest, packs=True)
        packed.copy_(code.to_wire(codes)[:, : packed.shape[1]])
        if found is not None:
            scales.copy_(found.view(torch.uint8))
        return messages

    def decode(self, code: Code, messages: Tensor, out: Tensor) -> Tensor:
        """What messages ``[messages * rows, bytes]`` stand for, added in their order, in ``out`` ``[numel]``."""
        scales, packed = self._split(code, messages)
        kernels = fused(messages, out, packs=True) if out.dtype == torch.float32 else None
        if isinstance(kernels, InC) and kernels.decode(code.fields, packed, scales, self._blocks, out, 0):
            return out
        floats = None
        if code.scaled:
            floats = torch.empty((len(messages), self._blocks.slots), dtype=torch.float32, device=out.device)
            floats.view(torch.uint8).copy_(scales)
        return decode(code, code.from_wire(packed, self._blocks.length), floats, self._blocks, out)

    def _split(self, code: Code, messages: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of scales, and those of codes."""
        return messages[:, : self._head(code)], messages[:, self._head(code) :]

    def _head(self, code: Code) -> int:
        """Bytes of a message's scales."""
        return 4 * self._blocks.slots if code.scaled else 0


class _CodePlan:
    """The messages of a bucket.

    Attributes:
        everyone: this rank's vector, for the owners of its shards, and back from them.
        own: this rank's own shard, from everyone, and back to them.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        self.shards, device, hop = block_shards(bucket), bucket.buffer.device, bucket.size * BLOCK
        first, length = _first_numbers(bucket), self.shards.length
        pieces = [
            (at, Part(start, width, first(start), owner, count, hop, hop))
            for start, count, width, owner, at in self.shards.pieces
        ]
        blocks = Blocks((part for _, part in pieces), block, bucket.layout.numel, device, bucket.size, length)
        mine = (part._replace(start=at, row=0, hop=part.size) for at, part in pieces if part.row == bucket.rank)
        self.everyone = _Messages(blocks)
        self.own = _Messages(Blocks(mine, block, length, device, slots=blocks.slots))


def _first_numbers(bucket: Bucket) -> Callable[[int], int]:
    """What randomness calls the element at a position of the bucket."""
    layout, first = bucket.layout, first_blocks(bucket)
    names = [name for name, size in layout.sizes.items() if size]
    starts = [layout.offsets[name] for name in names]

    def number(at: int) -> int:
        i = bisect_right(starts, at) - 1
        return first[names[i]] * BLOCK + at - starts[i]

    return number


def blocks_of(bucket: Bucket, block: int = BLOCK) -> Blocks:
    """The blocks of a bucket, starting anew at each parameter, in its order."""
    layout, first, device = bucket.layout, first_blocks(bucket), bucket.buffer.device
    key = ("blocks of", block, device, tuple(first[name] for name in layout.names))

    def make() -> Blocks:
        parts = (Part(layout.offsets[name], size, first[name] * BLOCK) for name, size in layout.sizes.items())
        return Blocks(parts, block, layout.numel, device)

    return layout.derive(key, make)


def _code_plan(bucket: Bucket, block: int) -> _CodePlan:
    layout, first, device = bucket.layout, first_blocks(bucket), bucket.buffer.device
    key = ("code", block, bucket.rank, bucket.size, device, tuple(first[name] for name in layout.names))
    return layout.derive(key, lambda: _CodePlan(bucket, block))
