"""Blocks of a flat vector: their positions in the vector, and those of their codes and scales in messages.

A code is the small integer that stands for an element; a scale is a block's float32 factor.

Rules:

1. Each part of a vector is cut into blocks of one width. The last block of a part may be shorter.
2. A message is a matrix. Each row holds the codes of its parts contiguously, in the order of the parts, and likewise
   their scales.
3. torch's operations process blocks as the rows of a matrix, with zeros after the elements of short blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ctypes import CDLL
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hvdbridge.kernels.random import Seed, hashed_bits

CHUNK = 1 << 18
"""Number of elements that a CPU codes at a time, so that temporaries stay in its cache."""


class Part(NamedTuple):
    """Equally spaced segments of a vector, of ``size`` elements each, which are divided into blocks.

    Attributes:
        start: offset of the first segment in the vector.
        size: number of elements of each segment.
        number: random-number index of the first element; see :mod:`.random`.
        row: row of the message that holds the codes and scales.
        segments: number of segments.
        stride: distance in the vector from each segment to the next.
        number_step: difference of ``number`` from each segment to the next.
    """

    start: int
    size: int
    number: int = 0
    row: int = 0
    segments: int = 1
    stride: int = 0
    number_step: int = 0


class Strip(NamedTuple):
    """Equally spaced segments of full blocks, or of one short block each: native.c's ``struct strip``.

    Attributes:
        size: number of elements of each segment: a multiple of the width, or the length of one short block.
        code, scale: offsets in the row of the first code and the first scale.
        start, stride, segments, row, number, number_step: as in :class:`Part`.
    """

    start: int
    stride: int
    segments: int
    size: int
    row: int
    code: int
    scale: int
    number: int
    number_step: int


class Blocks:
    """A vector's blocks of at most ``width`` elements, and the offsets of their codes and scales in messages.

    Args:
        parts: in the order of their codes within a row; ``width`` must divide the size of parts with ``segments > 1``.
        numel: number of elements of the vector.
        device: device of the vector.
        rows: number of rows of a message.
        length: number of codes of a row. None: ``numel``.
        scales_per_row: number of scales of a row. None: that of the row with the most blocks.

    Attributes:
        count: number of blocks in all rows.
        fits_kernels: whether width and offsets are within the fused kernels' limits (1024 elements, int32).

    >>> blocks = Blocks([Part(0, 6), Part(6, 1)], 4, 7, "cpu")
    >>> [matrix for _, matrix in blocks.matrices(torch.arange(7.))]
    [tensor([[0., 1., 2., 3.],
            [4., 5., 0., 0.],
            [6., 0., 0., 0.]])]
    """

    def __init__(
        self, parts: Iterable[Part], width: int, numel: int, device: torch.device | str, rows: int = 1,
        length: int | None = None, scales_per_row: int | None = None,
    ) -> None:  # fmt: skip
        self.width, self.numel, self.device, self.rows = width, numel, torch.device(device), rows
        self.strips: list[Strip] = []
        code_counts, scale_counts = [0] * rows, [0] * rows
        for start, size, number, row, times, stride, number_step in parts:
            full, short = divmod(size, width)
            full_blocks = (times, size, stride, number_step) if times > 1 else (full, width, width, width)
            for skip, (count, extent, step, jump) in ((0, full_blocks), (full * width, (1, short, 0, 0))):
                if count and extent:
                    code, scale = code_counts[row], scale_counts[row]
                    self.strips.append(Strip(start + skip, step, count, extent, row, code, scale, number + skip, jump))
                    code_counts[row] += count * extent
                    scale_counts[row] += count * -(-extent // width)
        self.count = sum(scale_counts)
        self.length = numel if length is None else length
        self.scales_per_row = max(scale_counts) if scales_per_row is None else scales_per_row
        self.fits_kernels = width <= 1024 and max(code_counts) <= 2**31

    def table(self, native: CDLL) -> Tensor:
        """Return native.c's ``struct block`` of every block, int32 ``[blocks, 8]``. Not cached, as it may be long."""
        table = torch.empty((self.count, 8), dtype=torch.int32, device="cpu")
        native.fill_block_table(self._strips.data_ptr(), len(self.strips), self.width, table.data_ptr())
        return table

    @cached_property
    def _strips(self) -> Tensor:
        return torch.tensor(self.strips, dtype=torch.int64, device="cpu")

    @cached_property
    def sorted_table(self) -> Tensor:
        """The :func:`block_table` in the order of the vector, on the vector's device (for Triton's kernels)."""
        table = block_table(self.strips, self.width)
        return table[:, table[0].argsort()].to(self.device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All blocks: on a CPU in chunks that fit into its cache, elsewhere in one chunk."""
        capacity = max(1, CHUNK // self.width if self.device.type == "cpu" else self.count)
        chunks: list[list[Strip]] = []
        free = 0
        for strip in self.strips:
            blocks, first = -(-strip.size // self.width), 0
            while first < strip.segments:
                if free < blocks:
                    chunks.append([])
                    free = max(capacity, blocks)
                taken = min(strip.segments - first, free // blocks)
                offsets = {
                    "start": strip.start + first * strip.stride, "code": strip.code + first * strip.size,
                    "scale": strip.scale + first * blocks, "number": strip.number + first * strip.number_step,
                }  # fmt: skip
                chunks[-1].append(strip._replace(segments=taken, **offsets))
                free, first = free - taken * blocks, first + taken
        return [Chunk(strips, self.width, self.device) for strips in chunks]

    def matrices(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Yield each chunk with a copy of its blocks, ``[blocks, width]``."""
        return ((chunk, chunk.gather(flat)) for chunk in self.chunks)

    def measure(self, flat: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``statistic``, which returns a number per row, to all blocks in float32; float32 ``[blocks]``."""
        values = [statistic(matrix.to(torch.float32)) for _, matrix in self.matrices(flat)]
        return torch.cat(values) if values else torch.empty(0, dtype=torch.float32, device=flat.device)


class Chunk:
    """Some of a vector's blocks, processed as a matrix ``[blocks, width]``.

    Attributes:
        counts: number of elements of each block, int64 ``[blocks]``.
    """

    def __init__(self, strips: list[Strip], width: int, device: torch.device) -> None:
        self._strips, self._width = strips, width
        table = block_table(strips, width).to(device)
        self.counts, self._numbers = table[1], table[5].to(torch.int32).unsqueeze(1)

    def _shapes(self) -> Iterator[tuple[Strip, tuple[int, int, int], slice]]:
        """Yield each strip, its shape ``(segments, blocks per segment, block length)``, and its rows in the matrix."""
        first = 0
        for strip in self._strips:
            shape = strip.segments, -(-strip.size // self._width), min(strip.size, self._width)
            yield strip, shape, slice(first, first + shape[0] * shape[1])
            first += shape[0] * shape[1]

    def _matrix_views(self, matrix: Tensor) -> list[Tensor]:
        """Return a view of each strip's elements in ``matrix``, without the padding of short blocks."""
        return [matrix[rows, : shape[2]].view(shape) for _, shape, rows in self._shapes()]

    def _vector_views(self, flat: Tensor) -> list[Tensor]:
        first = flat.storage_offset()
        return [flat.as_strided(shape, (s.stride, shape[2], 1), first + s.start) for s, shape, _ in self._shapes()]

    def _code_views(self, codes: Tensor) -> list[Tensor]:
        return [codes[s.row, s.code : s.code + s.segments * s.size].view(shape) for s, shape, _ in self._shapes()]

    def _scale_views(self, scales: Tensor) -> list[Tensor]:
        return [scales[s.row, s.scale : s.scale + rows.stop - rows.start] for s, _, rows in self._shapes()]

    def gather(self, flat: Tensor) -> Tensor:
        """Copy the blocks of a vector into a matrix ``[blocks, width]``, padded with zeros."""
        return self._to_matrix(self._vector_views(flat), flat)

    def scatter(self, matrix: Tensor, flat: Tensor) -> None:
        """Copy a matrix ``[blocks, width]`` into the blocks of a vector; the inverse of :meth:`gather`."""
        torch._foreach_copy_(self._vector_views(flat), self._matrix_views(matrix))

    def codes(self, rows: Tensor) -> Tensor:
        """Copy these blocks' codes from a message ``[rows, n]`` into a matrix ``[blocks, width]``."""
        return self._to_matrix(self._code_views(rows), rows)

    def scales(self, rows: Tensor) -> Tensor:
        """Copy these blocks' scales from a message ``[rows, n, ...]``: ``[blocks, ...]``."""
        return torch.cat(self._scale_views(rows))

    def write(self, block_codes: Tensor, codes: Tensor, scales: Tensor | None, block_scales: Tensor | None) -> None:
        """Write ``block_codes`` ``[blocks, width]`` and, unless None, ``block_scales`` ``[blocks]`` to a message."""
        torch._foreach_copy_(self._code_views(codes), self._matrix_views(block_codes))
        if scales is not None and block_scales is not None:
            targets = self._scale_views(scales)
            torch._foreach_copy_(targets, list(block_scales.split([len(target) for target in targets])))

    def noise(self, seed: Seed) -> Tensor:
        """Return 24 random bits for every element, int32 ``[blocks, width]``."""
        columns = torch.arange(self._width, dtype=torch.int32, device=self._numbers.device)
        return hashed_bits(self._numbers + columns, seed)

    def _to_matrix(self, views: list[Tensor], like: Tensor) -> Tensor:
        matrix = torch.zeros((len(self.counts), self._width), dtype=like.dtype, device=like.device)
        torch._foreach_copy_(self._matrix_views(matrix), views)
        return matrix


def block_table(strips: Iterable[Strip], width: int) -> Tensor:
    """Return the positions of all blocks of ``strips``, in their order: int64 ``[6, blocks]``.

    For each block: offset in the vector, number of elements, row, offset of its codes in the row, offset of its scale
    in the row, random-number index of the first element.

    >>> block_table([Strip(start=0, stride=9, segments=2, size=4, row=1, code=20, scale=3, number=7, number_step=5)], 4)
    tensor([[ 0,  9],
            [ 4,  4],
            [ 1,  1],
            [20, 24],
            [ 3,  4],
            [ 7, 12]])
    """
    tables = [torch.empty((6, 0), dtype=torch.int64, device="cpu")]
    for start, stride, count, size, row, code, scale, number, number_step in strips:
        blocks = -(-size // width)
        block = torch.arange(count * blocks, device="cpu")
        segment, offset = block // blocks, block % blocks * width
        tables.append(
            torch.stack(
                [
                    start + segment * stride + offset,
                    torch.full_like(block, min(size, width)),
                    torch.full_like(block, row),
                    code + block * min(size, width),
                    scale + block,
                    number + segment * number_step + offset,
                ]
            )
        )
    return torch.cat(tables, 1)
