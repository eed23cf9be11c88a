"""Dot products and linear combinations of the ranks' contributions to one shard, per parameter or over all.

Rules:

1. A cell is a block of one parameter within this rank's shard. The model alone decides which elements a cell sums, and
   in which order, so results do not depend on bucket boundaries.
2. Dot products are computed in float64, in which products of float32 numbers are exact.
3. A combination multiplies, rounds, adds and rounds, in the order of the rows. So an element's bits do not depend on
   its position, as they would if a vectorised loop fused multiplications with additions and its remainder did not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdbridge.policy.bucket import BLOCK, Layout

CPU_CHUNK, DEVICE_CHUNK = 1 << 17, 1 << 21
"""Number of elements to process at a time. On a CPU that many float64 numbers fit into a core's cache. On a GPU chunks
are larger, as a kernel launch takes longer than the work on few elements, but still small beside a bucket."""

WIDTHS = (16, 64, 256, BLOCK)
"""Short cells are padded to the next of these widths. Cells of equal width are processed together."""


class Cells:
    """The cells of one shard of :class:`~hvdbridge.policies.shards.BlockShards`: full blocks, then short blocks.

    Args:
        layout: layout of the vector that is divided into shards.
        block_groups: this owner's ``(offset in the vector, blocks, elements per block, offset in the shard)``.
        device: device of the shard.

    Attributes:
        full: number of full blocks.
        used: number of elements of the shard before its padding.
        count: number of cells.
        parameters: number of parameters of the layout, also of those without a cell here.
    """

    def __init__(self, layout: Layout, block_groups: Sequence[tuple[int, int, int, int]], device: torch.device) -> None:
        cpu: Any = {"dtype": torch.int64, "device": "cpu"}  # the user may have set another default device
        starts = [layout.offsets[name] for name in layout.names]
        block_groups = sorted(block_groups, key=lambda group: group[3])
        full_groups = [group for group in block_groups if group[2] == BLOCK]
        short_groups = [group for group in block_groups if group[2] < BLOCK]
        self.full = sum(count for _, count, _, _ in full_groups)
        self.used = self.full * BLOCK + sum(width for _, _, width, _ in short_groups)
        block_parameters = [bisect_right(starts, start) - 1 for start, count, _, _ in full_groups for _ in range(count)]
        cell_parameters = block_parameters.copy()
        indices = []
        self._end = self.used - self.full * BLOCK  # index of a zero after the short cells, which pads them
        previous_width = 0
        for width in WIDTHS:
            padded_groups = [group for group in short_groups if previous_width < group[2] <= width]
            previous_width = width
            if padded_groups:
                rows = torch.full((len(padded_groups), width), self._end, **cpu)
                for row, (start, _, size, offset) in zip(rows, padded_groups, strict=True):
                    row[:size] = torch.arange(size, **cpu) + offset - self.full * BLOCK
                    cell_parameters.append(bisect_right(starts, start) - 1)
                indices.append(rows.to(device))
        self._groups = indices
        self.count = len(cell_parameters)
        self.parameters = len(starts)
        by_name = {number: i for i, number in enumerate(sorted(range(len(starts)), key=layout.names.__getitem__))}
        numbers = torch.tensor(cell_parameters, **cpu)
        name_positions = torch.tensor([by_name[i] for i in cell_parameters], **cpu)
        self._parameter_order = torch.argsort(numbers, stable=True).to(device)
        self._name_order = torch.argsort(name_positions, stable=True).to(device)
        self._cell_counts = torch.bincount(numbers, minlength=len(starts)).to(device)
        self._block_parameters = torch.tensor(block_parameters, dtype=torch.int64, device=device)
        short_sizes = torch.tensor([width for _, _, width, _ in short_groups], **cpu)
        short_parameters = torch.tensor([bisect_right(starts, start) - 1 for start, _, _, _ in short_groups], **cpu)
        self._element_parameters = torch.repeat_interleave(short_parameters, short_sizes).to(device)

    def batches(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield all cells of all rows in batches, float64 ``[cells, rows, width]``, zeros after short cells.

        The next batch may reuse the memory of this one.
        """
        count, step = len(rows), max(1, chunk_size(rows[0].device) // (BLOCK * len(rows)))
        buffer = torch.empty((min(step, self.full), count, BLOCK), dtype=torch.float64, device=rows[0].device)
        for start in range(0, self.full, step):
            end = min(start + step, self.full)
            batch = buffer[: end - start]
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
    """Compute the dot product of each pair of rows in each cell: float64 ``[cells, rows, rows]``.

    >>> cells = Cells(Layout({"w": (2,), "b": (1,)}), [(0, 1, 2, 0), (2, 1, 1, 2)], torch.device("cpu"))
    >>> dots([torch.tensor([1., 2., 3.]), torch.tensor([0., 1., 1.])], cells)
    tensor([[[5., 2.], [2., 1.]],
            [[9., 3.], [3., 1.]]], dtype=torch.float64)
    """
    batches = [torch.bmm(batch, batch.transpose(1, 2)) for batch in cells.batches(rows)]
    if not batches:
        return torch.zeros((0, len(rows), len(rows)), dtype=torch.float64, device=rows[0].device)
    return torch.cat(batches)


def sum_by_parameter(table: Tensor, cells: Cells) -> Tensor:
    """Sum ``[cells, ...]`` over the cells of each parameter: ``[parameters, ...]``, in the layout's order."""
    ordered = table[cells._parameter_order].view(cells.count, table[0].numel() if cells.count else 1)
    if not cells.count:
        return table.new_zeros((cells.parameters, *table.shape[1:]))
    total = torch.segment_reduce(ordered, "sum", lengths=cells._cell_counts, axis=0, unsafe=True, initial=0)
    return total.view(cells.parameters, *table.shape[1:])


def sum_all(table: Tensor, cells: Cells) -> Tensor:
    """Sum ``[cells, ...]`` over all cells, in the order of the parameters' names."""
    return table[cells._name_order].sum(0)


def combine(
    rows: Sequence[Tensor], coefficients: Tensor, usable: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``sum_i coefficients[i] rows[i]`` in float32, or in float64 if a row is float64.

    Args:
        rows: flat vectors of one shape, in rank order.
        coefficients: one per row, ``[rows]``.
        usable: bool ``[rows]``; other rows count as zeros, even if they contain NaN.
        out: memory for the sum, used if it has the sum's type. It may be the first row.

    >>> combine([torch.tensor([1., 2.]), torch.tensor([float("nan"), 4.])], torch.tensor([0.5, 1.]),
    ...         torch.tensor([True, False]))
    tensor([0.5000, 1.0000])
    """
    total = sum_buffer(rows, out)
    step = chunk_size(total.device)
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
    """Return ``sum_i coefficients[i, p] rows[i]``, p the parameter of each element. Types are as in :func:`combine`.

    Args:
        coefficients: ``[rows, parameters]``.
        out: as for :func:`combine`. The padding after the cells becomes zero.

    >>> cells = Cells(Layout({"w": (2,), "b": (1,)}), [(0, 1, 2, 0), (2, 1, 1, 2)], torch.device("cpu"))
    >>> rows = [torch.tensor([1., 2., 3.]), torch.tensor([0., 1., 1.])]
    >>> combine_by_parameter(rows, torch.tensor([[1., 0.5], [2., 1.]]), cells)
    tensor([1.0000, 4.0000, 2.5000])
    """
    total = sum_buffer(rows, out)
    factors = coefficients.to(total.dtype)
    block_factors, step = factors[:, cells._block_parameters], chunk_size(total.device) // BLOCK
    scratch = total.new_empty((min(step, cells.full), BLOCK))
    for start in range(0, cells.full, step):
        end = min(start + step, cells.full)
        total_blocks = total[start * BLOCK : end * BLOCK].view(-1, BLOCK)
        for i, row in enumerate(rows):
            row_blocks, factor = row[start * BLOCK : end * BLOCK].view(-1, BLOCK), block_factors[i, start:end, None]
            if i == 0:
                torch.mul(row_blocks, factor, out=total_blocks)
            else:
                total_blocks.add_(torch.mul(row_blocks, factor, out=scratch[: end - start]))
    tail = slice(cells.full * BLOCK, cells.used)
    element_factors = factors[:, cells._element_parameters]
    for i, (row, factor) in enumerate(zip(rows, element_factors, strict=True)):
        if i == 0:
            torch.mul(row[tail], factor, out=total[tail])
        else:
            total[tail].add_(row[tail] * factor)
    total[cells.used :] = 0
    return total


def chunk_size(device: torch.device) -> int:
    """Number of elements to process at a time on ``device``."""
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def sum_buffer(rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return memory for a combination of ``rows``, float32, or float64 if a row is: ``out`` if it has that type."""
    double = any(row.dtype == torch.float64 for row in rows)
    wide = torch.float64 if double else torch.float32
    return torch.empty(rows[0].shape, dtype=wide, device=rows[0].device) if out is None or out.dtype != wide else out
