"""Sums in two stages: each rank owns 1/N of a bucket, combines all ranks' shares of it, and sends the result.

    all-to-all (first stage)  ->  the owner combines in rank order  ->  all-gather (second stage)

One rank sends ``2 (N-1)/N`` of the vector, as in a ring all-reduce, but no sums are formed in transit. So messages may
be of a narrow type while sums are in float32, in rank order, with the same bits on every backend.

Rules:

1. A sum of elements does not depend on its owner. So shards are contiguous and of equal length (:class:`FlatShards`),
   mostly without a copy, unless the owner matters.
2. The owner matters if its second-stage error enters its ``sent``, and so its residual. Then shards consist of whole
   blocks (:class:`BlockShards`): block j belongs to rank j mod N, for any bucket boundaries.
3. Shards are padded with zeros to the longest.
4. Messages and sums use memory of the bucket's pool. The update goes to the output buffer (:meth:`Bucket.output
   <hvdbridge.Bucket.output>`), and the values that were sent are subtracted from the bucket's buffer.
5. In :func:`sharded_code` each stage sends blocks encoded by a :class:`~hvdbridge.kernels.quantise.Code`. Codes and
   scales are one message, so a bucket takes two collectives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.deprecated import moved_names
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.fused import NativeKernels, fused
from hvdbridge.kernels.quantise import Code, decode, encode_rows
from hvdbridge.kernels.random import Seed, seed_of
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
    """Sum all ranks' ``flat``, in float32 (float64 if a stage sends float64).

    Args:
        flat: this rank's vector. If it needs no packing, it is the message and may be overwritten.
        shards: division of the vector.
        rank: this rank's number among the owners.
        wire, back: dtypes that the first and the second stage send.
        pool: provides the memory of messages and sums.
        out: called with the sum's dtype after the last read of ``flat``; returns the memory for the sum, which may be
            that of ``flat``.
        power: factor of the contributions in messages, which the sum is divided by. A power of two is exact.
        needs_sent: ``flat`` becomes what was not sent: the owners' decoded values are subtracted, and the error of the
            second stage is added on the shard that this rank owns. Requires :class:`BlockShards`.

    Returns:
        The sum, flat, ``[numel]``.
    """
    exact = accumulator(torch.promote_types(wire, back))
    rows = shards.pack(flat, wire, power, pool)
    if needs_sent:
        assert isinstance(shards, BlockShards)
        shards.subtract(flat, rows, power)
    received = yield AllToAll(rows, group, pool.take(rows.numel(), wire, flat.device))
    total = sum_rows(received, pool.take(shards.length, exact, flat.device))
    pool.give(rows, received, but=[flat])
    if power != 1.0:
        total.div_(power)
    message = total if back == exact else pool.take(shards.length, back, flat.device).copy_(total)
    if needs_sent:
        assert isinstance(shards, BlockShards)
        shards.add_owned(flat, rank, add(total, message, -1.0))
    gathered = yield AllGather(message, group, pool.take(shards.size * shards.length, back, flat.device))
    update = shards.unpack(gathered, exact, out(exact))
    pool.give(total, message, gathered, but=[flat, update])
    return update


@dataclass(frozen=True, eq=False)
class CodedSum:
    """Result of :func:`sharded_code`; all tensors are flat, in the bucket's layout.

    Attributes:
        update: the sum over ranks as every rank decoded it, with equal bits, float32 (or the bucket's wider dtype).
        rest: what was not sent: the bucket's buffer less the values that the owners decoded, plus, on this rank's own
            shard, the error of the second stage. Summed over ranks, inputs less rests are ``update``. None unless the
            bucket needs to know what was sent.
        error: the error of the second stage on this rank's own shard, zeros elsewhere. None unless ``owner_error`` was
            given. If not None, it is not part of ``rest``.
    """

    update: Tensor
    rest: Tensor | None = None
    error: Tensor | None = None

    @property
    def aggregated(self) -> Aggregated:
        """The result for a policy without state."""
        return Aggregated(self.update, rest=self.rest)


def sharded_code(
    bucket: Bucket, code: Code, block: int = BLOCK, owner_error: Tensor | None = None, back: Code | None = None
) -> Generator[Collective, Tensor, CodedSum]:
    """Sum all ranks' weighted buckets through codes.

    Each rank sends encoded blocks to their owners. An owner adds in float32 in rank order, encodes the sum, and sends
    it to all ranks.

    Blocks of ``block`` elements start at each parameter, and an owner has whole blocks, so the result does not depend
    on bucket boundaries. The noise of the first stage is private to each rank, and that of the second stage is the
    owner's. So neither two ranks nor two stages share noise.

    Args:
        code, back: codes of the first and the second stage. ``back=None``: the same.
        block: a power of two that divides :data:`BLOCK`; see :func:`check_block`.
        owner_error: flat; the owner adds it to its shard of the sum before encoding (the server's error feedback of
            DoubleSqueeze). Only this rank's own shard is read. :attr:`CodedSum.error` is the next step's.

    On the wire, per stage: ``code.bits`` per element, and 4 bytes per block if the code has scales.
    """
    rank, back, flat, pool = bucket.rank, back or code, bucket.weighted().buffer, bucket.pool
    plan = _code_plan(bucket, block)
    rest = flat if bucket.needs_sent else None
    seed = seed_of(bucket, "to owner", private=True) if code.random else 0
    size = max(plan.all_shards.nbytes(code), plan.all_shards.nbytes(back))
    send_buffer, receive_buffer = (bucket.scratch(size, torch.uint8) for _ in range(2))
    message = plan.all_shards.encode(code, flat, seed, bucket.needs_sent, send_buffer)
    received = yield AllToAll(message, out=receive_buffer[: message.numel()])
    wide, total = accumulator(flat.dtype), bucket.scratch(plan.shards.length, torch.float32)
    plan.own_shard.decode(code, received, total)
    if owner_error is not None:
        plan.shards.add_to(total, owner_error, rank)
    seed = seed_of(bucket, "back") if back.random else 0
    message = plan.own_shard.encode(back, total, seed, rest is not None or owner_error is not None, send_buffer)[0]
    error = None if owner_error is None else bucket.fresh(owner_error).zero_()
    if error is not None:
        plan.shards.add_owned(error, rank, total)
    elif rest is not None:
        plan.shards.add_owned(rest, rank, total)
    gathered = yield AllGather(message, out=receive_buffer[: bucket.size * message.numel()])
    update = plan.all_shards.decode(back, gathered, bucket.output(wide))
    pool.give(send_buffer, receive_buffer, total)
    return CodedSum(update, rest, error)


def check_block(policy: object, block: int) -> None:
    """Check that ``block`` divides the owners' blocks and is long enough to be packed.

    Raises:
        ConfigurationError: it is not a power of two from 16 to :data:`BLOCK`.
    """
    if block & (block - 1) or not 16 <= block <= BLOCK:
        raise ConfigurationError(
            f"{type(policy).__name__}: block={block} must be a power of two from 16 to {BLOCK} "
            "(owners have whole blocks of that size)"
        )


class _Messages:
    """Messages of a vector in encoded blocks, one for each row of ``blocks``: scales, then codes.

    Fused kernels write and read messages in one pass where they support the code.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def nbytes(self, code: Code) -> int:
        """Return the number of bytes of all messages."""
        return self._blocks.rows * (self._head(code) + code.wire_bytes(self._blocks.length))

    def encode(self, code: Code, flat: Tensor, seed: Seed, keep_rest: bool, out: Tensor) -> Tensor:
        """Encode a vector into messages, uint8 ``[rows, bytes]``, in ``out``.

        Args:
            out: uint8, at least ``nbytes(code)`` long.
            keep_rest: subtract the decoded values from ``flat``, in place.
        """
        blocks, messages = self._blocks, out[: self.nbytes(code)].view(self._blocks.rows, -1)
        scales, packed = self._split(code, messages)
        x = flat if flat.device.type == "cpu" or flat.itemsize > 4 else flat.to(torch.float32)
        if (kernels := self._kernels(code, x)) is not None:
            codes = packed
            if code.bits == 1 and not isinstance(kernels, NativeKernels):  # Triton sets bits of aligned words
                codes = torch.zeros((blocks.rows, -(-blocks.length // 32)), dtype=torch.int32, device=flat.device)
            messages.zero_()
            if kernels.encode(code.fields, x, blocks, codes, scales, keep_rest, seed):
                if keep_rest and x is not flat:
                    flat.copy_(x)
                if codes is not packed:
                    packed.copy_(codes.view(torch.uint8)[:, : packed.shape[1]])
                return messages
        codes, floats = encode_rows(code, flat, blocks, seed, keep_rest)
        packed.copy_(code.to_wire(codes)[:, : packed.shape[1]])
        if floats is not None:
            scales.copy_(floats.view(torch.uint8))
        return messages

    def decode(self, code: Code, messages: Tensor, out: Tensor) -> Tensor:
        """Decode messages ``[messages * rows, bytes]`` and sum them in their order, in ``out``, ``[numel]``."""
        scales, packed = self._split(code, messages)
        kernels = self._kernels(code, out, messages)
        if kernels is not None and kernels.decode(code.fields, packed, scales, self._blocks, out, 0):
            return out
        floats = None
        if code.scaled:
            floats = torch.empty((len(messages), self._blocks.scales_per_row), dtype=torch.float32, device=out.device)
            floats.view(torch.uint8).copy_(scales)
        return decode(code, code.from_wire(packed, self._blocks.length), floats, self._blocks, out)

    @staticmethod
    def _kernels(code: Code, vector: Tensor, *messages: Tensor) -> Any:
        """Return kernels that read and write messages: native.c's, or Triton's for codes of 1 and 8 bits; or None."""
        kernels = fused(vector, *messages, packs=True) if vector.dtype == torch.float32 else None
        return kernels if isinstance(kernels, NativeKernels) or code.bits in (1, 8) else None

    def _split(self, code: Code, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of the scales, and those of the codes."""
        return messages[:, : self._head(code)], messages[:, self._head(code) :]

    def _head(self, code: Code) -> int:
        """Return the number of bytes of a message's scales."""
        return 4 * self._blocks.scales_per_row if code.scaled else 0


class _CodePlan:
    """The messages of a bucket.

    Attributes:
        shards: division of the bucket.
        all_shards: messages of the whole vector, one per owner.
        own_shard: message of this rank's own shard, sent by each rank to this one, and by this rank to all.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        self.shards, device, stride = block_shards(bucket), bucket.buffer.device, bucket.size * BLOCK
        first, length = _first_numbers(bucket), self.shards.length
        parts = [
            (offset, Part(start, width, first(start), owner, count, stride, stride))
            for start, count, width, owner, offset in self.shards.groups
        ]
        blocks = Blocks((part for _, part in parts), block, bucket.layout.numel, device, bucket.size, length)
        own = (part._replace(start=start, row=0, stride=part.size) for start, part in parts if part.row == bucket.rank)
        self.all_shards = _Messages(blocks)
        self.own_shard = _Messages(Blocks(own, block, length, device, scales_per_row=blocks.scales_per_row))


def _first_numbers(bucket: Bucket) -> Callable[[int], int]:
    """Return a function from a position in the bucket to the element's random-number index."""
    layout, first = bucket.layout, first_blocks(bucket)
    names = [name for name, size in layout.sizes.items() if size]
    starts = [layout.offsets[name] for name in names]

    def number(position: int) -> int:
        i = bisect_right(starts, position) - 1
        return first[names[i]] * BLOCK + position - starts[i]

    return number


def blocks_of(bucket: Bucket, block: int = BLOCK) -> Blocks:
    """Return the blocks of a bucket, in its order; they start at each parameter."""
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


__getattr__ = moved_names(__name__)
