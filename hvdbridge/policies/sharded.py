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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.fused import fused
from hvdbridge.kernels.places import Places, Strip
from hvdbridge.kernels.quantise import Code, decode, encode
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
    plan.own.decode(code, *plan.own.read(code, theirs), total)
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
    update = plan.everyone.decode(back, *plan.everyone.read(back, answer, wide), bucket.output(wide))
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
    """A vector in coded blocks as messages, one for each shard: its scales, then its codes, padded to the longest.

    By fused kernels where these can, in one pass between vector and message; else codes and scales are made in the
    order of the vector, and moved.

    Args:
        blocks: of the vector.
        strips: of all shards, those of each in its order.
        used: elements and blocks of each shard.
        slots, length: blocks and elements of the longest shard.
        shards: how the vector is divided; None: it is one shard, in this order.
    """

    def __init__(
        self, blocks: Blocks, strips: Sequence[Strip], used: Sequence[tuple[int, int]], slots: int, length: int,
        shards: BlockShards | None = None,
    ) -> None:  # fmt: skip
        self._blocks, self._shards = blocks, shards
        self._slots, self._length = slots, length
        self._used = used
        self._places = Places(strips, len(used), blocks.width)

    @cached_property
    def _slot(self) -> Tensor:
        """Of each block, the place of its scale among those of all messages."""
        _, _, row, _, scale = self._places.blocks().unbind(1)
        return (row * self._slots + scale).to(self._blocks.device)

    def nbytes(self, code: Code) -> int:
        """Of all messages."""
        return len(self._used) * (self._head(code) + code.wire_bytes(self._length))

    def encode(self, code: Code, flat: Tensor, seed: int, keep_rest: bool, out: Tensor) -> Tensor:
        """uint8 ``[shards, bytes]``, in ``out``, uint8 and long enough; with ``keep_rest`` ``flat`` becomes what these
        do not say."""
        head, rows = self._head(code), len(self._used)
        messages = out[: self.nbytes(code)].view(rows, -1)
        scales, packed = messages[:, :head], messages[:, head:]
        kernels = fused(flat, bits=code.bits) if flat.dtype == torch.float32 else None
        if kernels and code.encoded_by(kernels):
            if kernels.aligned:
                scales = torch.empty_like(scales, memory_format=torch.contiguous_format)
            among_zeros, direct = kernels.packed and code.bits != 8, kernels.packed or code.bits == 8
            codes = packed if direct else code.room(kernels, rows, self._length, flat.device)
            if among_zeros:
                packed.zero_()
            code.encode_fused(kernels, flat, self._places, codes, scales, keep_rest, seed)
            for i, (elements, blocks) in enumerate(self._used):
                if not among_zeros:
                    codes[i, elements:] = 0
                scales[i, 4 * blocks :] = 0
            if not direct:
                packed.copy_(code.to_wire(codes)[:, : packed.shape[1]])
            if kernels.aligned:
                messages[:, :head] = scales
            return messages
        codes, found = encode(code, flat, self._blocks, seed)
        if keep_rest:
            decode(code, codes.unsqueeze(0), None if found is None else found.unsqueeze(0), self._blocks, flat, add=-1)
        codes = codes.unsqueeze(0) if self._shards is None else self._shards.pack(codes, codes.dtype)
        packed.copy_(code.to_wire(codes))
        if found is not None:
            floats = torch.zeros(rows * self._slots, dtype=torch.float32, device=flat.device)
            floats[self._slot] = found
            scales.copy_(floats.view(torch.uint8).view(rows, head))
        return messages

    def read(self, code: Code, messages: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
        """The codes and scales of messages, uint8 ``[messages, bytes]``: one for each shard of the vector, or several
        of an only shard. They are for :meth:`decode` alone, to write ``dtype``."""
        head = self._head(code)
        scales, packed = messages[:, :head], messages[:, head:]
        kernels = fused(messages, bits=code.bits) if dtype == torch.float32 else None
        if kernels and code.decoded_by(kernels):
            codes = packed if kernels.packed else code.from_wire(packed, self._length)
            return codes, scales.clone(memory_format=torch.contiguous_format) if kernels.aligned else scales
        codes = code.from_wire(packed, self._length)
        floats = None
        if code.scaled:
            # Where their bytes lie aligned
            floats = torch.empty((messages.shape[0], self._slots), dtype=torch.float32, device=messages.device)
            floats.view(torch.uint8).copy_(scales)
            floats = (
                floats[:, : self._blocks.count] if self._shards is None else floats.view(-1)[self._slot].unsqueeze(0)
            )
        return codes if self._shards is None else self._shards.unpack(codes, codes.dtype).unsqueeze(0), floats

    def decode(self, code: Code, codes: Tensor, scales: Tensor | None, out: Tensor | None = None) -> Tensor:
        """What was :meth:`read`, float32 ``[numel]``, several messages added in their order; ``out``: where to."""
        if scales is None or scales.dtype == torch.float32:
            return decode(code, codes, scales, self._blocks, out)
        total = torch.empty(self._blocks.numel, dtype=torch.float32, device=codes.device) if out is None else out
        total = total.contiguous()
        kernels = fused(total, bits=code.bits)
        assert kernels is not None, "as it was read"
        code.decode_fused(kernels, codes, scales, self._places, total, None)
        self._blocks.clear_padding(total)
        return total if out is None or total is out else out.copy_(total)

    def _head(self, code: Code) -> int:
        """Bytes of a shard's scales."""
        return 4 * self._slots if code.scaled else 0


class _CodePlan:
    """Where blocks and their scales lie in the vector, in the shards and in messages.

    Attributes:
        everyone: this rank's vector, for the owners of its shards, and back from them.
        own: this rank's own shard, from everyone, and back to them.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        self.shards, rank, device = block_shards(bucket), bucket.rank, bucket.buffer.device
        shards, hop = self.shards, bucket.size * BLOCK
        first, strips, used = _first_numbers(bucket), [], [(0, 0)] * bucket.size
        for start, count, width, owner, at in shards.pieces:
            elements, blocks = used[owner]
            strips.append(Strip(start, hop, count, width, owner, at, blocks, first(start), hop))
            used[owner] = elements + count * width, blocks + count * -(-width // block)
        slots, length = max(blocks for _, blocks in used), shards.length
        self.everyone = _Messages(blocks_of(bucket, block), strips, used, slots, length, shards)
        mine = [strip for strip in strips if strip.row == rank]
        owned = Blocks([Part(s.code, s.size, s.number, s.parts, hop) for s in mine], block, length, device)
        mine = [strip._replace(start=strip.code, hop=strip.size, row=0) for strip in mine]
        self.own = _Messages(owned, mine, [used[rank]], slots, length)


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
