"""How a flat vector is divided among owners, and sums in rank order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from hvdbridge.kernels import native
from hvdbridge.kernels.runs import SHORT, Runs
from hvdbridge.policy.bucket import BLOCK, Bucket, Layout
from hvdbridge.policy.buffer_pool import BufferPool

NO_POOL = BufferPool()
"""Keeps nothing: what is taken is new."""

PIECE = 1 << 17
"""Elements that are brought to another type at a time on a CPU, where torch would make a copy of all of them."""


class _Scratch(threading.local):
    """Memory of each thread for a piece."""

    def __init__(self) -> None:
        self._of: dict[torch.dtype, Tensor] = {}

    def like(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        if piece.numel() > PIECE:
            return torch.empty(piece.shape, dtype=dtype, device="cpu")
        if dtype not in self._of:
            with torch.inference_mode(False):  # it outlives the modes that it is first wanted in
                self._of[dtype] = torch.empty(PIECE, dtype=dtype, device="cpu")
        return self._of[dtype][: piece.numel()].view(piece.shape)


_scratch = _Scratch()


def add(total: Tensor, part: Tensor, alpha: float = 1.0) -> Tensor:
    """``total += alpha part``, which is no wider."""
    if total.dtype == part.dtype or total.device.type != "cpu":
        return total.add_(part, alpha=alpha)
    for ours, theirs in _pieces(total, part):
        ours.add_(_scratch.like(theirs, ours.dtype).copy_(theirs), alpha=alpha)
    return total


def scaled(part: Tensor, factor: float, out: Tensor) -> None:
    """The product in the type of ``part``, then rounded to that of ``out``."""
    if factor == 1.0:
        out.copy_(part)
        return
    if out.dtype == part.dtype or out.device.type != "cpu":
        torch.mul(part, factor, out=out)
        return
    for theirs, ours in _pieces(part, out):
        ours.copy_(torch.mul(theirs, factor, out=_scratch.like(theirs, theirs.dtype)))


def _pieces(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Of two tensors of one shape, along the first axis."""
    count = max(1, PIECE // max(1, a.numel() // max(1, len(a))))
    return zip(a.split(count), b.split(count), strict=True)


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
    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0, pool: BufferPool = NO_POOL) -> Tensor:
        """``flat * power`` as ``[size, length]`` of type ``wire``, row r for owner r: of ``pool``, or an alias of
        ``flat``."""

    @abstractmethod
    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """``rows`` of shape ``[size, length]`` as a flat vector of ``dtype``; ``out``, or may alias ``rows``."""


class FlatShards(Shards):
    """Contiguous pieces of equal length.

    >>> FlatShards(5, 2).pack(torch.arange(5.), torch.float32)
    tensor([[0., 1., 2.],
            [3., 4., 0.]])
    """

    def __init__(self, numel: int, size: int) -> None:
        self.numel, self.size = numel, size
        self.length = -(-numel // size)

    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0, pool: BufferPool = NO_POOL) -> Tensor:
        if self.numel == self.size * self.length and flat.dtype == wire and power == 1.0:
            return flat.view(self.size, self.length)
        rows = pool.take(self.size * self.length, wire, flat.device)
        rows[self.numel :] = 0
        scaled(flat, power, rows[: self.numel])
        return rows.view(self.size, self.length)

    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        flat = rows.reshape(-1)[: self.numel]
        if out is not None and out.data_ptr() == flat.data_ptr() and out.dtype == flat.dtype:
            return out
        return flat.to(dtype) if out is None else out.copy_(flat)


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
        # The same as views: (segment of the vector, first block and step in it or None for all of it).
        self._views: list[tuple[int, int | None]] = []
        # Segments are the full blocks of a parameter, and its short one.
        self._segments = [part for n in layout.sizes.values() for part in (n - n % BLOCK, n % BLOCK)]
        filled = [0] * size
        for i, (name, numel) in enumerate(layout.sizes.items()):
            full = numel // BLOCK
            for skip in range(min(size, full)):
                owner = (first[name] + skip) % size
                count = len(range(skip, full, size))
                start = layout.offsets[name] + skip * BLOCK
                self.pieces.append((start, count, BLOCK, owner, filled[owner]))
                self._views.append((2 * i, skip if full > 1 and size > 1 else None))
                filled[owner] += count * BLOCK
        for i, (name, numel) in enumerate(layout.sizes.items()):
            full, short = divmod(numel, BLOCK)
            if short:
                owner = (first[name] + full) % size
                start = layout.offsets[name] + full * BLOCK
                self.pieces.append((start, 1, short, owner, filled[owner]))
                self._views.append((2 * i + 1, None))
                filled[owner] += short
        self.length = max(filled)
        # Each owner's pieces lie one behind the other in its shard.
        self._owned: list[list[int]] = [[] for _ in range(size)]
        for _, count, width, owner, _ in self.pieces:
            self._owned[owner].append(count * width)
        for sizes, used in zip(self._owned, filled, strict=True):
            sizes.append(self.length - used)

    @cached_property
    def _runs(self) -> list[Runs]:
        """Where each owner's blocks lie in the vector and in its shard."""
        places: list[list[tuple[int, int, int]]] = [[] for _ in range(self.size)]
        for start, count, width, owner, at in self.pieces:
            places[owner] += [(start + i * self.size * BLOCK, at + i * BLOCK, width) for i in range(count)]
        return [Runs(some) for some in places]

    def _by_runs(self, flat: Tensor) -> bool:
        """Whether to go owner by owner, with a shard in the vector's type beside the message: where a view of each of
        so many pieces costs more than a pass over the vector."""
        many = self.numel < SHORT * len(self.pieces)
        return many and flat.device.type == "cpu" and native.compiled() is not None

    def _pairs(self, flat: Tensor, rows: Tensor, rank: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the vector, and of the same elements in the shards; ``rank``: in the only row, that owner's."""
        segments, theirs, ours = flat.split(self._segments), [], []
        owners = range(self.size) if rank is None else [rank]
        shards = {r: iter(row.split(self._owned[r])) for r, row in zip(owners, rows.unbind(), strict=True)}
        for (_, _, _, owner, _), (segment, skip) in zip(self.pieces, self._views, strict=True):
            if owner in shards:
                mine, part = next(shards[owner]), segments[segment]
                if skip is not None:
                    part = part.view(-1, BLOCK)[skip :: self.size]
                    mine = mine.view(-1, BLOCK)
                theirs.append(part)
                ours.append(mine)
        return theirs, ours

    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0, pool: BufferPool = NO_POOL) -> Tensor:
        rows = pool.take(self.size * self.length, wire, flat.device).view(self.size, self.length)
        if self._by_runs(flat):
            for rank, row in enumerate(rows):
                shard = self.owned(flat, rank)
                row.copy_(shard if power == 1.0 else shard.mul_(power))
            return rows
        for row, sizes in zip(rows, self._owned, strict=True):
            row[self.length - sizes[-1] :].zero_()
        theirs, ours = self._pairs(flat, rows)
        if power != 1.0:
            for part, mine in zip(theirs, ours, strict=True):
                scaled(part, power, mine)
        elif ours:
            torch._foreach_copy_(ours, theirs)
        return rows

    def owned(self, flat: Tensor, rank: int) -> Tensor:
        """The elements of ``flat`` that ``rank`` owns, ``[length]``, padded with zeros."""
        shard = torch.empty(self.length, dtype=flat.dtype, device=flat.device)
        shard[self.length - self._owned[rank][-1] :].zero_()
        if self._by_runs(flat):
            return self._runs[rank].to(flat, shard)
        theirs, ours = self._pairs(flat, shard.unsqueeze(0), rank)
        if ours:
            torch._foreach_copy_(ours, theirs)
        return shard

    def add_to(self, shard: Tensor, flat: Tensor, rank: int) -> None:
        """Add the elements of ``flat`` that ``rank`` owns to ``shard``."""
        if self._by_runs(flat):
            shard.add_(self.owned(flat, rank))
            return
        theirs, ours = self._pairs(flat, shard.unsqueeze(0), rank)
        if ours:
            torch._foreach_add_(ours, theirs)

    def add_owned(self, flat: Tensor, rank: int, shard: Tensor) -> None:
        """Add ``shard`` to the elements of ``flat`` that ``rank`` owns."""
        if self._by_runs(flat):
            self._runs[rank].back(flat, self.owned(flat, rank).add_(shard))
            return
        theirs, ours = self._pairs(flat, shard.unsqueeze(0), rank)
        if theirs:
            torch._foreach_add_(theirs, ours)

    def subtract(self, flat: Tensor, rows: Tensor, power: float = 1.0) -> None:
        """Take ``rows / power`` ``[size, length]`` off ``flat``, which is no narrower. ``power`` is one of two."""
        if self._by_runs(flat):
            for rank, row in enumerate(rows):
                self._runs[rank].back(flat, self.owned(flat, rank).sub_(row, alpha=1 / power))
        elif self.pieces:
            theirs, ours = self._pairs(flat, rows)
            for mine, sent in zip(theirs, ours, strict=True):
                add(mine, sent, -1 / power)

    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        flat = torch.empty(self.numel, dtype=dtype, device=rows.device) if out is None else out
        if self._by_runs(flat):
            for runs, row in zip(self._runs, rows, strict=True):
                runs.back(flat, row.to(dtype))
        elif self.pieces:
            theirs, ours = self._pairs(flat, rows)
            torch._foreach_copy_(theirs, ours)
        return flat


def shards_of(bucket: Bucket) -> Shards:
    """The shards of a bucket: by blocks where the owner matters, else flat."""
    return block_shards(bucket) if bucket.needs_sent else FlatShards(bucket.layout.numel, bucket.size)


def block_shards(bucket: Bucket) -> BlockShards:
    """The shards of a bucket by blocks."""
    layout, size, first = bucket.layout, bucket.size, first_blocks(bucket)
    key = ("shards", size, tuple(first[name] for name in layout.names))
    return layout.derive(key, lambda: BlockShards(layout, first, size))


def first_blocks(bucket: Bucket) -> Mapping[str, int]:
    """Number of each parameter's first block of :data:`BLOCK` elements."""
    return bucket.layout.blocks


def sum_rows(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """``rows`` ``[N, ...]`` added in rank order, in float32 (float64 stays), in ``out`` if given."""
    total = rows[0].to(accumulator(rows.dtype), copy=True) if out is None else out.copy_(rows[0])
    for row in rows[1:]:
        add(total, row)
    return total
