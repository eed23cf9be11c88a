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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from hvdbridge.bucket import BLOCK, Bucket, Layout, number_blocks
from hvdbridge.collectives import AllGather, AllToAll, Collective


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Shards(ABC):
    """How a flat vector of ``numel`` elements is divided among ``size`` owners."""

    numel: int
    size: int
    length: int
    """Elements of the longest shard."""

    @abstractmethod
    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0) -> Tensor:
        """``flat * power`` as ``[size, length]`` of type ``wire``, row r for owner r; may alias ``flat``."""

    @abstractmethod
    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """``rows`` of shape ``[size, length]`` as a flat vector of ``dtype``; may alias ``rows``."""


class FlatShards(Shards):
    """Contiguous pieces of equal length.

    >>> FlatShards(5, 2).pack(torch.arange(5.), torch.float32)
    tensor([[0., 1., 2.],
            [3., 4., 0.]])
    """

    def __init__(self, numel: int, size: int) -> None:
        self.numel, self.size = numel, size
        self.length = -(-numel // size)

    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0) -> Tensor:
        if self.numel == self.size * self.length and flat.dtype == wire and power == 1.0:
            return flat.view(self.size, self.length)
        rows = torch.empty(self.size * self.length, dtype=wire, device=flat.device)
        rows[self.numel :] = 0
        if power == 1.0:
            rows[: self.numel].copy_(flat)
        else:
            torch.mul(flat, power, out=rows[: self.numel])  # in the type of flat, then rounded to wire
        return rows.view(self.size, self.length)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows.reshape(-1)[: self.numel].to(dtype)


class BlockShards(Shards):
    """Whole blocks of :data:`BLOCK` elements, dealt out by number; the last of a parameter may be short.

    In a shard the full blocks come first, then the short ones. Full blocks of one parameter and owner are
    one strided view of the vector, so packing copies by parameter, not by block.

    >>> shards = BlockShards(Layout({"a": (3,), "b": (1,), "c": (2,)}), {"a": 0, "b": 1, "c": 2}, size=2)
    >>> shards.pack(torch.arange(6.), torch.float32)
    tensor([[0., 1., 2., 4., 5.],
            [3., 0., 0., 0., 0.]])
    """

    def __init__(self, layout: Layout, first: Mapping[str, int], size: int) -> None:
        self.numel, self.size = layout.numel, size
        # (offset in the vector, blocks, elements of each, owner, offset in the owner's shard)
        self.pieces: list[tuple[int, int, int, int, int]] = []
        filled = [0] * size
        for name, numel in layout.sizes.items():
            full = numel // BLOCK
            for skip in range(min(size, full)):
                owner = (first[name] + skip) % size
                count = len(range(skip, full, size))
                start = layout.offsets[name] + skip * BLOCK
                self.pieces.append((start, count, BLOCK, owner, filled[owner]))
                filled[owner] += count * BLOCK
        for name, numel in layout.sizes.items():
            full, short = divmod(numel, BLOCK)
            if short:
                owner = (first[name] + full) % size
                start = layout.offsets[name] + full * BLOCK
                self.pieces.append((start, 1, short, owner, filled[owner]))
                filled[owner] += short
        self.length = max(filled)

    def _pairs(self, flat: Tensor, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the vector, and of the same elements in the shards."""
        theirs, ours = [], []
        origin, stride = flat.storage_offset(), (self.size * BLOCK, 1)
        for start, count, width, owner, offset in self.pieces:
            theirs.append(flat.as_strided((count, width), stride, origin + start))
            ours.append(rows[owner, offset : offset + count * width].view(count, width))
        return theirs, ours

    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0) -> Tensor:
        rows = torch.zeros((self.size, self.length), dtype=wire, device=flat.device)
        if self.pieces:
            theirs, ours = self._pairs(flat if power == 1.0 else flat * power, rows)
            torch._foreach_copy_(ours, theirs)
        return rows

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        flat = torch.empty(self.numel, dtype=dtype, device=rows.device)
        if self.pieces:
            theirs, ours = self._pairs(flat, rows)
            torch._foreach_copy_(theirs, ours)
        return flat


def shards_of(bucket: Bucket) -> Shards:
    """The shards of a bucket: by blocks where the owner matters, else flat."""
    layout, size = bucket.layout, bucket.size
    if not bucket.needs_sent:
        return FlatShards(layout.numel, size)
    first = bucket.blocks or layout.derive("blocks", lambda: number_blocks(layout.shapes))
    key = ("shards", size, tuple(first[name] for name in layout.names))
    return layout.derive(key, lambda: BlockShards(layout, first, size))


def sum_rows(rows: Tensor) -> Tensor:
    """``rows`` ``[N, ...]`` added in rank order, in float32 (float64 stays)."""
    total = rows[0].to(accumulator(rows.dtype), copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total


def sharded_sum(
    flat: Tensor,
    shards: Shards,
    rank: int,
    wire: torch.dtype,
    back: torch.dtype,
    power: float = 1.0,
    group: str = "world",
    needs_sent: bool = False,
) -> Generator[Collective, Tensor, tuple[Tensor, Tensor | None]]:
    """The sum of all ranks' ``flat``, and on demand what they decoded of this rank's.

    Args:
        flat: this rank's vector; given away where it needs no packing.
        wire, back: the types that the first and the second stage send.
        power: contributions travel multiplied by it, the sum does not; a power of two costs no rounding.

    Returns:
        ``(sum, sent)``, flat, in float32 (float64 where a stage sends float64). ``sent`` is this rank's
        vector as the owners decoded it, plus, on the shard that this rank owns, the error of the second
        stage: summed over ranks it is the first result. None unless ``needs_sent``.
    """
    exact = accumulator(torch.promote_types(wire, back))
    rows = shards.pack(flat, wire, power)
    sent = rows.to(exact, copy=True).div_(power) if needs_sent else None
    theirs = yield AllToAll(rows, group)
    total = sum_rows(theirs)
    if power != 1.0:
        total.div_(power)
    message = total.to(back)
    if sent is not None:
        sent[rank] += message.to(exact) - total
    answer = yield AllGather(message, group)
    return shards.unpack(answer, exact), None if sent is None else shards.unpack(sent, exact)
