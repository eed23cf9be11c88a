"""Dot products and linear combinations of the ranks' pieces of one shard, by parameter or in all.

Rules:

1. A cell is a block of one parameter that this owner holds. What is summed inside a cell, and in which order,
   depends on the model alone: results do not change with bucket boundaries.
2. Dot products are made in float64: products of float32 numbers are exact in it.
3. A combination multiplies, rounds, adds, rounds, in the order of the rows, so no element's bits depend on where
   it lies (fused multiply-adds in vector loops and not in their remainders would make them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdbridge.policy.bucket import BLOCK, Layout

CHUNK, ON_DEVICE = 1 << 17, 1 << 21
"""Elements that are worked on at a time: what a core's cache holds in float64; of a GPU, which needs longer to be told
than to do less, what is little beside a bucket."""

WIDTHS = (16, 64, 256, BLOCK)
"""Short cells are padded to the next of these, and those of one width are worked on together."""


class Cells:
    """The cells of one shard of :class:`~hvdbridge.policies.shards.BlockShards`: full blocks first, then short ones.

    Args:
        layout: of the vector that was divided.
        pieces: of this owner: ``(offset in the vector, blocks, elements of each, offset in the shard)``.

    Attributes:
        full: number of full blocks.
        used: elements of the shard before its padding.
    """

    def __init__(self, layout: Layout, pieces: Sequence[tuple[int, int, int, int]], device: torch.device) -> None:
        cpu: Any = {"dtype": torch.int64, "device": "cpu"}  # a default device may be another
        starts = [layout.offsets[name] for name in layout.names]
        pieces = sorted(pieces, key=lambda piece: piece[3])
        whole = [piece for piece in pieces if piece[2] == BLOCK]
        short = [piece for piece in pieces if piece[2] < BLOCK]
        self.full = sum(count for _, count, _, _ in whole)
        self.used = self.full * BLOCK + sum(width for _, _, width, _ in short)
        owners = [bisect_right(starts, start) - 1 for start, count, _, _ in whole for _ in range(count)]
        order = owners.copy()
        indices = []
        self._end = self.used - self.full * BLOCK  # of the short part; the zero behind it is what pads
        floor = 0
        for width in WIDTHS:
            chosen = [piece for piece in short if floor < piece[2] <= width]
            floor = width
            if chosen:
                rows = torch.full((len(chosen), width), self._end, **cpu)
                for row, (start, _, size, offset) in zip(rows, chosen, strict=True):
                    row[:size] = torch.arange(size, **cpu) + offset - self.full * BLOCK
                    order.append(bisect_right(starts, start) - 1)
                indices.append(rows.to(device))
        self._groups = indices
        self.count = len(order)
        self.parameters = len(starts)
        names = {number: place for place, number in enumerate(sorted(range(len(starts)), key=layout.names.__getitem__))}
        number = torch.tensor(order, **cpu)
        place = torch.tensor([names[i] for i in order], **cpu)
        self._by_parameter = torch.argsort(number, stable=True).to(device)
        self._by_name = torch.argsort(place, stable=True).to(device)
        self._lengths = torch.bincount(number, minlength=len(starts)).to(device)
        self._of_block = torch.tensor(owners, dtype=torch.int64, device=device)
        sizes = torch.tensor([width for _, _, width, _ in short], **cpu)
        short_owners = torch.tensor([bisect_right(starts, start) - 1 for start, _, _, _ in short], **cpu)
        self._of_element = torch.repeat_interleave(short_owners, sizes).to(device)

    def batches(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """All cells of all rows as float64 ``[cells, rows, width]``, some at a time, zeros behind short ones.

        The next ones may come in the memory of these.
        """
        count, step = len(rows), max(1, chunk(rows[0].device) // (BLOCK * len(rows)))
        room = torch.empty((min(step, self.full), count, BLOCK), dtype=torch.float64, device=rows[0].device)
        for start in range(0, self.full, step):
            end = min(start + step, self.full)
            batch = room[: end - start]
            for i, row in enumerate(rows):
                batch[:, i] = row[start * BLOCK : end * BLOCK].view(-1, BLOCK)
            yield batch
        if self._groups:
            tail = torch.zeros((count, self._end + 1), dtype=torch.float64, device=rows[0].device)
            for i, row in enumerate(rows):
                tail[i, :-1] = row[self.full * BLOCK : self.used]
            for index in self._groups:
                yield tail[:, index].transpose(0, 1).contiguous()


def dots(rows: Sequence[Tensor], cells: Cells) -> Tensor:
    """The dot product of each pair of rows in each cell: float64 ``[cells, rows, rows]``.

    >>> cells = Cells(Layout({"w": (2,), "b": (1,)}), [(0, 1, 2, 0), (2, 1, 1, 2)], torch.device("cpu"))
    >>> dots([torch.tensor([1., 2., 3.]), torch.tensor([0., 1., 1.])], cells)
    tensor([[[5., 2.], [2., 1.]],
            [[9., 3.], [3., 1.]]], dtype=torch.float64)
    """
    batches = [torch.bmm(batch, batch.transpose(1, 2)) for batch in cells.batches(rows)]
    if not batches:
        return torch.zeros((0, len(rows), len(rows)), dtype=torch.float64, device=rows[0].device)
    return torch.cat(batches)


def by_parameter(table: Tensor, cells: Cells) -> Tensor:
    """``[cells, ...]`` added over the cells of each parameter: ``[parameters, ...]``, in the layout's order."""
    ordered = table[cells._by_parameter].view(cells.count, table[0].numel() if cells.count else 1)
    if not cells.count:
        return table.new_zeros((cells.parameters, *table.shape[1:]))
    total = torch.segment_reduce(ordered, "sum", lengths=cells._lengths, axis=0, unsafe=True, initial=0)
    return total.view(cells.parameters, *table.shape[1:])


def in_all(table: Tensor, cells: Cells) -> Tensor:
    """``[cells, ...]`` added over all cells, in the order of the parameters' names."""
    return table[cells._by_name].sum(0)


def combine(
    rows: Sequence[Tensor], coefficients: Tensor, usable: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``sum_i coefficients[i] rows[i]``, in float32 (float64 where a row is).

    Args:
        usable: bool ``[rows]``; what is not counts as zeros, whatever stands in it.
        out: memory for the sum, used where it has that type; may be the first row.

    >>> combine([torch.tensor([1., 2.]), torch.tensor([float("nan"), 4.])], torch.tensor([0.5, 1.]),
    ...         torch.tensor([True, False]))
    tensor([0.5000, 1.0000])
    """
    total = room(rows, out)
    step = chunk(total.device)
    scratch = torch.empty_like(total[:step])
    factors = coefficients.to(total.dtype).unbind()
    flags = [None] * len(rows) if usable is None else list(usable.unbind())
    for start in range(0, total.numel(), step):
        out = total[start : start + step]
        for i, (row, factor, flag) in enumerate(zip(rows, factors, flags, strict=True)):
            part = (scratch if i else out)[: len(out)].copy_(row[start : start + step])
            if flag is not None:
                part.masked_fill_(~flag, 0.0)
            part.mul_(factor)
            if i:
                out.add_(part)
    return total


def combine_by_parameter(
    rows: Sequence[Tensor], coefficients: Tensor, cells: Cells, out: Tensor | None = None
) -> Tensor:
    """``sum_i coefficients[i, p] rows[i]`` with p the parameter of each element, in float32 (float64 where a row is).

    ``out``: as for :func:`combine`; what stands behind the cells is zero.

    >>> cells = Cells(Layout({"w": (2,), "b": (1,)}), [(0, 1, 2, 0), (2, 1, 1, 2)], torch.device("cpu"))
    >>> rows = [torch.tensor([1., 2., 3.]), torch.tensor([0., 1., 1.])]
    >>> combine_by_parameter(rows, torch.tensor([[1., 0.5], [2., 1.]]), cells)
    tensor([1.0000, 4.0000, 2.5000])
    """
    total = room(rows, out)
    factors = coefficients.to(total.dtype)
    of_block, step = factors[:, cells._of_block], chunk(total.device) // BLOCK
    scratch = total.new_empty((min(step, cells.full), BLOCK))
    for start in range(0, cells.full, step):
        end = min(start + step, cells.full)
        here = total[start * BLOCK : end * BLOCK].view(-1, BLOCK)
        for i, row in enumerate(rows):
            part, factor = row[start * BLOCK : end * BLOCK].view(-1, BLOCK), of_block[i, start:end, None]
            if i == 0:
                torch.mul(part, factor, out=here)
            else:
                here.add_(torch.mul(part, factor, out=scratch[: end - start]))
    tail = slice(cells.full * BLOCK, cells.used)
    of_element = factors[:, cells._of_element]
    for i, (row, factor) in enumerate(zip(rows, of_element, strict=True)):
        if i == 0:
            torch.mul(row[tail], factor, out=total[tail])
        else:
            total[tail].add_(row[tail] * factor)
    total[cells.used :] = 0
    return total


def chunk(device: torch.device) -> int:
    """Elements to work on at a time."""
    return CHUNK if device.type == "cpu" else ON_DEVICE


def room(rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Memory for what is made of these rows, float32 (float64 where one is): ``out`` if it has that type."""
    double = any(row.dtype == torch.float64 for row in rows)
    wide = torch.float64 if double else torch.float32
    return torch.empty(rows[0].shape, dtype=wide, device=rows[0].device) if out is None or out.dtype != wide else out
