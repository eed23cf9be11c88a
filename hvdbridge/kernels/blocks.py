"""The blocks of a flat vector: rows of a matrix for torch's operations, and runs of codes and scales in messages.

Rules:

1. A part of a vector is cut into blocks of one width, of which the last may be short.
2. A message has rows. A row's codes stand side by side in the order of its parts, and so do its scales.
3. torch's operations see blocks as the rows of a matrix, with zeros behind the elements of short blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ctypes import CDLL
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hvdbridge.kernels.random import hashed_bits

CHUNK = 1 << 18
"""Elements that a CPU codes at a time, so that temporaries stay in its cache."""


class Part(NamedTuple):
    """``parts`` times ``size`` elements of a vector, each of them cut into blocks.

    Attributes:
        start, hop: of the first element, and from each part to the next.
        number, skip: the same among the numbers by which elements get their randomness; see :mod:`.random`.
        row: of the message.
    """

    start: int
    size: int
    number: int = 0
    row: int = 0
    parts: int = 1
    hop: int = 0
    skip: int = 0


class Strip(NamedTuple):
    """Some blocks, as native.c reads them: ``size`` is a multiple of the width, or the length of one short block.

    Attributes:
        code, scale: how many codes and scales precede those of this strip in its row.
    """

    start: int
    hop: int
    parts: int
    size: int
    row: int
    code: int
    scale: int
    number: int
    skip: int


class Blocks:
    """The blocks of ``width`` elements or fewer of a vector, and where their codes and scales are in messages.

    Args:
        parts: in the order that codes have in their rows; ``width`` divides the size of repeated ones.
        numel: elements of the vector.
        device: of the vector.
        rows: of a message.
        length, slots: codes and scales of a row. None: ``numel``; as many as the row of most blocks has.

    >>> blocks = Blocks([Part(0, 6), Part(6, 1)], 4, 7, "cpu")
    >>> [matrix for _, matrix in blocks.matrices(torch.arange(7.))]
    [tensor([[0., 1., 2., 3.],
            [4., 5., 0., 0.],
            [6., 0., 0., 0.]])]
    """

    def __init__(
        self, parts: Iterable[Part], width: int, numel: int, device: torch.device | str, rows: int = 1,
        length: int | None = None, slots: int | None = None,
    ) -> None:  # fmt: skip
        self.width, self.numel, self.device, self.rows = width, numel, torch.device(device), rows
        self.strips: list[Strip] = []
        filled, used = [0] * rows, [0] * rows
        for start, size, number, row, times, hop, skip in parts:
            full, short = divmod(size, width)
            several = (times, size, hop, skip) if times > 1 else (full, width, width, width)
            for at, (count, elements, step, turn) in ((0, several), (full * width, (1, short, 0, 0))):
                if count and elements:
                    code, scale = filled[row], used[row]
                    self.strips.append(Strip(start + at, step, count, elements, row, code, scale, number + at, turn))
                    filled[row] += count * elements
                    used[row] += count * -(-elements // width)
        self.count = sum(used)
        self.length = numel if length is None else length
        self.slots = max(used) if slots is None else slots
        self.fit = width <= 1024 and max(filled) <= 2**31  # for kernels

    def table(self, native: CDLL) -> Tensor:
        """A struct of native.c for each block, int32 ``[blocks, 8]``: made anew, as it may be long."""
        made = torch.empty((self.count, 8), dtype=torch.int32, device="cpu")
        native.lay_blocks(self._strips.data_ptr(), len(self.strips), self.width, made.data_ptr())
        return made

    @cached_property
    def _strips(self) -> Tensor:
        return torch.tensor(self.strips, dtype=torch.int64, device="cpu")

    @cached_property
    def columns(self) -> Tensor:
        """See :func:`places`, in the order of the vector; kept on the GPU that they are for."""
        table = places(self.strips, self.width)
        return table[:, table[0].argsort()].to(self.device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All blocks; on a CPU cut into chunks that its cache holds."""
        most = max(1, CHUNK // self.width if self.device.type == "cpu" else self.count)
        chunks: list[list[Strip]] = []
        left = 0
        for strip in self.strips:
            each, done = -(-strip.size // self.width), 0
            while done < strip.parts:
                if left < each:
                    chunks.append([])
                    left = max(most, each)
                some = min(strip.parts - done, left // each)
                moved = {
                    "start": strip.start + done * strip.hop, "code": strip.code + done * strip.size,
                    "scale": strip.scale + done * each, "number": strip.number + done * strip.skip,
                }  # fmt: skip
                chunks[-1].append(strip._replace(parts=some, **moved))
                left, done = left - some * each, done + some
        return [Chunk(strips, self.width, self.device) for strips in chunks]

    def matrices(self, flat: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk, and a copy of its blocks."""
        return ((chunk, chunk.gather(flat)) for chunk in self.chunks)

    def measure(self, flat: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
        """``what`` of float32 matrices, a number for each row; float32 ``[blocks]``."""
        found = [what(matrix.to(torch.float32)) for _, matrix in self.matrices(flat)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float32, device=flat.device)


class Chunk:
    """Some of a vector's blocks, as a matrix ``[blocks, width]``.

    Attributes:
        counts: elements of each block, int64 ``[blocks]``.
    """

    def __init__(self, strips: list[Strip], width: int, device: torch.device) -> None:
        self._strips, self._width = strips, width
        table = places(strips, width).to(device)
        self.counts, self._numbers = table[1], table[5].to(torch.int32).unsqueeze(1)

    def _shapes(self) -> Iterator[tuple[Strip, tuple[int, int, int], slice]]:
        """Each strip, the shape of its blocks, and their rows in the matrix."""
        first = 0
        for strip in self._strips:
            shape = strip.parts, -(-strip.size // self._width), min(strip.size, self._width)
            yield strip, shape, slice(first, first + shape[0] * shape[1])
            first += shape[0] * shape[1]

    def _inside(self, matrix: Tensor) -> list[Tensor]:
        """The elements of each strip's blocks in a matrix."""
        return [matrix[rows, : shape[2]].view(shape) for _, shape, rows in self._shapes()]

    def _in_vector(self, flat: Tensor) -> list[Tensor]:
        first = flat.storage_offset()
        return [
            flat.as_strided(shape, (strip.hop, shape[2], 1), first + strip.start) for strip, shape, _ in self._shapes()
        ]

    def _in_codes(self, codes: Tensor) -> list[Tensor]:
        return [codes[s.row, s.code : s.code + s.parts * s.size].view(shape) for s, shape, _ in self._shapes()]

    def _in_scales(self, scales: Tensor) -> list[Tensor]:
        return [scales[s.row, s.scale : s.scale + rows.stop - rows.start] for s, _, rows in self._shapes()]

    def gather(self, flat: Tensor) -> Tensor:
        """The blocks of a vector."""
        return self._filled(self._in_vector(flat), flat)

    def scatter(self, matrix: Tensor, flat: Tensor) -> None:
        """The inverse of :meth:`gather`."""
        torch._foreach_copy_(self._in_vector(flat), self._inside(matrix))

    def codes(self, rows: Tensor) -> Tensor:
        """The codes of these blocks in a message ``[rows, n]``."""
        return self._filled(self._in_codes(rows), rows)

    def scales(self, rows: Tensor) -> Tensor:
        """The scales of these blocks in a message ``[rows, n, ...]``."""
        return torch.cat(self._in_scales(rows))

    def write(self, made: Tensor, codes: Tensor, scales: Tensor | None, given: Tensor | None) -> None:
        """Put codes, and scales where there are ``given`` ones, into a message."""
        torch._foreach_copy_(self._in_codes(codes), self._inside(made))
        if scales is not None and given is not None:
            theirs = self._in_scales(scales)
            torch._foreach_copy_(theirs, list(given.split([len(some) for some in theirs])))

    def noise(self, seed: int) -> Tensor:
        """24 bits for every element, int32 ``[blocks, width]``."""
        inside = torch.arange(self._width, dtype=torch.int32, device=self._numbers.device)
        return hashed_bits(self._numbers + inside, seed)

    def _filled(self, views: list[Tensor], like: Tensor) -> Tensor:
        matrix = torch.zeros((len(self.counts), self._width), dtype=like.dtype, device=like.device)
        torch._foreach_copy_(self._inside(matrix), views)
        return matrix


def places(strips: Iterable[Strip], width: int) -> Tensor:
    """int64 ``[6, blocks]``: of each block its start, its elements, its row, the codes and scales that precede its own
    there, and its number.

    >>> places([Strip(start=0, hop=9, parts=2, size=4, row=1, code=20, scale=3, number=7, skip=5)], 4)
    tensor([[ 0,  9],
            [ 4,  4],
            [ 1,  1],
            [20, 24],
            [ 3,  4],
            [ 7, 12]])
    """
    found = [torch.empty((6, 0), dtype=torch.int64, device="cpu")]
    for start, hop, parts, size, row, code, scale, number, skip in strips:
        each = -(-size // width)
        block = torch.arange(parts * each, device="cpu")
        part, inside = block // each, block % each * width
        found.append(
            torch.stack(
                [
                    start + part * hop + inside,
                    torch.full_like(block, min(size, width)),
                    torch.full_like(block, row),
                    code + block * min(size, width),
                    scale + block,
                    number + part * skip + inside,
                ]
            )
        )
    return torch.cat(found, 1)
