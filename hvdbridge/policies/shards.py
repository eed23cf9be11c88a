"""Shards: how a flat vector is divided among owner ranks; and sums in rank order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from hvdbridge.kernels import native
from hvdbridge.kernels.fused import on_flat
from hvdbridge.kernels.runs import SHORT, Runs
from hvdbridge.policy.bucket import BLOCK, Bucket, Layout
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.capture import refuse_in_capture

NO_POOL = BufferPool()
"""A pool without memory: it allocates every buffer."""

CHUNK = 1 << 17
"""Number of elements that a CPU converts to another dtype at a time; torch would allocate a converted copy of all."""


class _Scratch(threading.local):
    """Per-thread scratch buffers of :data:`CHUNK` elements, one per dtype."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def like(self, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        if chunk.numel() > CHUNK:
            return torch.empty(chunk.shape, dtype=dtype, device="cpu")
        if dtype not in self._buffers:
            with torch.inference_mode(False):  # the buffer outlives the caller's mode
                self._buffers[dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return self._buffers[dtype][: chunk.numel()].view(chunk.shape)


_scratch = _Scratch()


def add(total: Tensor, part: Tensor, alpha: float = 1.0) -> Tensor:
    """``total += alpha * part``, in place; returns ``total``. Its dtype is that of ``part`` or wider."""
    if total.dtype == part.dtype or total.device.type != "cpu":
        return total.add_(part, alpha=alpha)
    for total_chunk, part_chunk in _chunks(total, part):
        total_chunk.add_(_scratch.like(part_chunk, total_chunk.dtype).copy_(part_chunk), alpha=alpha)
    return total


def scaled(part: Tensor, factor: float, out: Tensor) -> None:
    """Write ``factor * part`` to ``out``: computed in the dtype of ``part``, then rounded to that of ``out``."""
    if factor == 1.0:
        out.copy_(part)
        return
    if out.dtype == part.dtype or out.device.type != "cpu":
        torch.mul(part, factor, out=out)
        return
    for part_chunk, out_chunk in _chunks(part, out):
        out_chunk.copy_(torch.mul(part_chunk, factor, out=_scratch.like(part_chunk, part_chunk.dtype)))


def _chunks(a: Tensor, b: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Split two tensors of one shape along the first axis into chunks of about :data:`CHUNK` elements."""
    count = max(1, CHUNK // max(1, a.numel() // max(1, len(a))))
    return zip(a.split(count), b.split(count), strict=True)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum numbers of ``dtype``: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Shards(ABC):
    """A division of a flat vector of ``numel`` elements among ``size`` owner ranks."""

    numel: int
    size: int
    length: int
    """Number of elements of the longest shard; others are padded with zeros."""

    @abstractmethod
    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0, pool: BufferPool = NO_POOL) -> Tensor:
        """Return ``flat * power`` as ``[size, length]`` of dtype ``wire``, row r for owner rank r.

        The memory is from ``pool``, or that of ``flat``.
        """

    @abstractmethod
    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return ``rows`` ``[size, length]`` as a flat vector of ``dtype``: ``out``, or maybe an alias of ``rows``."""


class FlatShards(Shards):
    """Contiguous shards of equal length.

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
        rows[self.numel :].zero_()
        scaled(flat, power, rows[: self.numel])
        return rows.view(self.size, self.length)

    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        flat = rows.reshape(-1)[: self.numel]
        if out is not None and out.data_ptr() == flat.data_ptr() and out.dtype == flat.dtype:
            return out
        return flat.to(dtype) if out is None else out.copy_(flat)


class BlockShards(Shards):
    """Shards of whole blocks of :data:`BLOCK` elements, assigned round-robin by block number.

    Blocks start at each parameter, so a parameter's last block may be short. A shard holds its full blocks first, then
    the short ones. The full blocks of one parameter and owner are one strided view of the vector, so packing takes a
    copy per parameter, not per block.

    Attributes:
        groups: ``(offset in the vector, blocks, elements per block, owner rank, offset in the owner's shard)``;
            successive blocks of a group are ``size`` blocks apart in the vector.

    >>> shards = BlockShards(Layout({"a": (3,), "b": (1,), "c": (2,)}), {"a": 0, "b": 1, "c": 2}, size=2)
    >>> shards.pack(torch.arange(6.), torch.float32)
    tensor([[0., 1., 2., 4., 5.],
            [3., 0., 0., 0., 0.]])
    """

    def __init__(self, layout: Layout, first: Mapping[str, int], size: int) -> None:
        self.numel, self.size = layout.numel, size
        self.groups: list[tuple[int, int, int, int, int]] = []
        # Each group as a view: (segment of the vector, its first block there, or None if the group is the segment).
        self._views: list[tuple[int, int | None]] = []
        # Two segments per parameter: its full blocks, and its short one.
        self._segments = [segment for n in layout.sizes.values() for segment in (n - n % BLOCK, n % BLOCK)]
        filled = [0] * size
        for i, (name, numel) in enumerate(layout.sizes.items()):
            full = numel // BLOCK
            for skip in range(min(size, full)):
                owner = (first[name] + skip) % size
                count = len(range(skip, full, size))
                start = layout.offsets[name] + skip * BLOCK
                self.groups.append((start, count, BLOCK, owner, filled[owner]))
                self._views.append((2 * i, skip if full > 1 and size > 1 else None))
                filled[owner] += count * BLOCK
        for i, (name, numel) in enumerate(layout.sizes.items()):
            full, short = divmod(numel, BLOCK)
            if short:
                owner = (first[name] + full) % size
                start = layout.offsets[name] + full * BLOCK
                self.groups.append((start, 1, short, owner, filled[owner]))
                self._views.append((2 * i + 1, None))
                filled[owner] += short
        self.length = max(filled)
        # Sizes of each owner's groups, which are contiguous in its shard, and of the padding.
        self._split_sizes: list[list[int]] = [[] for _ in range(size)]
        for _, count, width, owner, _ in self.groups:
            self._split_sizes[owner].append(count * width)
        for sizes, used in zip(self._split_sizes, filled, strict=True):
            sizes.append(self.length - used)
        self._shortest = min(filled)
        self._tables: dict[tuple[int | None, torch.device], Tensor] = {}

    @cached_property
    def _runs(self) -> list[Runs]:
        """For each owner, the runs from its blocks in the vector to its shard."""
        runs: list[list[tuple[int, int, int]]] = [[] for _ in range(self.size)]
        for start, count, width, owner, offset in self.groups:
            runs[owner] += [(start + i * self.size * BLOCK, offset + i * BLOCK, width) for i in range(count)]
        return [Runs(owner_runs) for owner_runs in runs]

    def _use_runs(self, flat: Tensor) -> bool:
        """Whether to copy by :class:`Runs`, owner by owner, by way of a shard in the vector's dtype.

        With many short groups, creating a view of each takes longer than a second pass over the vector.
        """
        short = self.numel < SHORT * len(self.groups)
        return short and flat.device.type == "cpu" and native.compiled() is not None

    def _view_pairs(self, flat: Tensor, rows: Tensor, rank: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the vector, and of the same elements in ``rows``: all shards, or that of ``rank`` alone."""
        segments, vector_views, shard_views = flat.split(self._segments), [], []
        owners = range(self.size) if rank is None else [rank]
        shards = {r: iter(row.split(self._split_sizes[r])) for r, row in zip(owners, rows.unbind(), strict=True)}
        for (_, _, _, owner, _), (segment, skip) in zip(self.groups, self._views, strict=True):
            if owner in shards:
                shard_view, view = next(shards[owner]), segments[segment]
                if skip is not None:
                    view = view.view(-1, BLOCK)[skip :: self.size]
                    shard_view = shard_view.view(-1, BLOCK)
                vector_views.append(view)
                shard_views.append(shard_view)
        return vector_views, shard_views

    def _move(
        self, flat: Tensor, rows: Tensor, to_rows: bool, rank: int | None = None, alpha: float = 1.0, add: bool = False
    ) -> bool:
        """Copy or add by one kernel, as :func:`hvdbridge.kernels.cuda_flat.move`; return False if there is none.

        For torch each strided group is an operation of its own.

        Args:
            rows: all shards, or that of ``rank`` alone.
        """
        kernels = on_flat(flat, rows)
        if kernels is None or (flat.dtype != torch.float32 and abs(alpha) != 1.0):
            return False
        if (rank, flat.device) not in self._tables:
            self._tables[rank, flat.device] = torch.tensor(self._blocks(rank), dtype=torch.int64, device=flat.device)
        target, source = (rows, flat) if to_rows else (flat, rows)
        return kernels.move(target, source, self._tables[rank, flat.device], to_rows, alpha, add) is not None

    def _blocks(self, rank: int | None) -> list[list[int]]:
        """Return the start in the vector, the start in the rows, and the size of each block, of all ranks or of one."""
        refuse_in_capture("a table of blocks, which no flow before it has made")
        columns: list[list[int]] = [[], [], []]
        for start, count, width, owner, offset in self.groups:
            if rank in (None, owner):
                row = owner * self.length if rank is None else 0
                columns[0] += range(start, start + count * self.size * BLOCK, self.size * BLOCK)
                columns[1] += range(row + offset, row + offset + count * BLOCK, BLOCK)
                columns[2] += [width] * count
        return columns

    def pack(self, flat: Tensor, wire: torch.dtype, power: float = 1.0, pool: BufferPool = NO_POOL) -> Tensor:
        rows = pool.take(self.size * self.length, wire, flat.device).view(self.size, self.length)
        if self._use_runs(flat):
            for rank, row in enumerate(rows):
                shard = self.owned(flat, rank)
                row.copy_(shard if power == 1.0 else shard.mul_(power))
            return rows
        rows[:, self._shortest :].zero_()  # in one operation, also where data follow
        if self._move(flat, rows, True, alpha=power):
            return rows
        vector_views, shard_views = self._view_pairs(flat, rows)
        if power != 1.0:
            for view, shard_view in zip(vector_views, shard_views, strict=True):
                scaled(view, power, shard_view)
        elif shard_views:
            torch._foreach_copy_(shard_views, vector_views)
        return rows

    def owned(self, flat: Tensor, rank: int) -> Tensor:
        """Copy the elements of ``flat`` that ``rank`` owns into a shard ``[length]``, padded with zeros."""
        shard = torch.empty(self.length, dtype=flat.dtype, device=flat.device)
        shard[self.length - self._split_sizes[rank][-1] :].zero_()
        if self._use_runs(flat):
            return self._runs[rank].to(flat, shard)
        if self._move(flat, shard, True, rank):
            return shard
        vector_views, shard_views = self._view_pairs(flat, shard.unsqueeze(0), rank)
        if shard_views:
            torch._foreach_copy_(shard_views, vector_views)
        return shard

    def add_to(self, shard: Tensor, flat: Tensor, rank: int) -> None:
        """Add the elements of ``flat`` that ``rank`` owns to ``shard``, ``[length]``."""
        if self._use_runs(flat):
            shard.add_(self.owned(flat, rank))
            return
        if self._move(flat, shard, True, rank, add=True):
            return
        vector_views, shard_views = self._view_pairs(flat, shard.unsqueeze(0), rank)
        if shard_views:
            torch._foreach_add_(shard_views, vector_views)

    def add_owned(self, flat: Tensor, rank: int, shard: Tensor) -> None:
        """Add ``shard``, ``[length]``, to the elements of ``flat`` that ``rank`` owns."""
        if self._use_runs(flat):
            self._runs[rank].back(flat, self.owned(flat, rank).add_(shard))
            return
        if self._move(flat, shard, False, rank, add=True):
            return
        vector_views, shard_views = self._view_pairs(flat, shard.unsqueeze(0), rank)
        if vector_views:
            torch._foreach_add_(vector_views, shard_views)

    def subtract(self, flat: Tensor, rows: Tensor, power: float = 1.0) -> None:
        """Subtract ``rows / power``, ``[size, length]``, from ``flat``, no narrower; ``power`` is a power of two."""
        if self._use_runs(flat):
            for rank, row in enumerate(rows):
                self._runs[rank].back(flat, self.owned(flat, rank).sub_(row, alpha=1 / power))
        elif self.groups and not self._move(flat, rows, False, alpha=-1 / power, add=True):
            vector_views, shard_views = self._view_pairs(flat, rows)
            for view, sent in zip(vector_views, shard_views, strict=True):
                add(view, sent, -1 / power)

    def unpack(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        flat = torch.empty(self.numel, dtype=dtype, device=rows.device) if out is None else out
        if self._use_runs(flat):
            for runs, row in zip(self._runs, rows, strict=True):
                runs.back(flat, row.to(dtype))
        elif self.groups and not self._move(flat, rows, False):
            vector_views, shard_views = self._view_pairs(flat, rows)
            torch._foreach_copy_(vector_views, shard_views)
        return flat


def shards_of(bucket: Bucket) -> Shards:
    """Return a bucket's shards: :class:`BlockShards` if owners matter (``bucket.needs_sent``), else flat ones."""
    return block_shards(bucket) if bucket.needs_sent else FlatShards(bucket.layout.numel, bucket.size)


def block_shards(bucket: Bucket) -> BlockShards:
    """Return a bucket's :class:`BlockShards`, cached with its layout."""
    layout, size, first = bucket.layout, bucket.size, first_blocks(bucket)
    key = ("shards", size, tuple(first[name] for name in layout.names))
    return layout.derive(key, lambda: BlockShards(layout, first, size))


def first_blocks(bucket: Bucket) -> Mapping[str, int]:
    """Return the model-wide number of each parameter's first block of :data:`BLOCK` elements."""
    return bucket.layout.blocks


def sum_rows(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum ``rows`` ``[N, ...]`` in rank order, in float32 (float64 stays float64), into ``out`` if given."""
    exact = accumulator(rows.dtype)
    total = torch.empty(rows.shape[1:], dtype=exact, device=rows.device) if out is None else out
    kernels = on_flat(rows, total) if total.dtype == torch.float32 else None
    if kernels and kernels.sum_rows(rows, total) is not None:
        return total
    total.copy_(rows[0])
    for row in rows[1:]:
        add(total, row)
    return total
