"""The blocks of a flat vector, as matrices.

Long runs of full blocks are matrices in place; the others are copied into matrices, filled up with zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hvdbridge.kernels.places import Places, Strip, blocks_in
from hvdbridge.kernels.random import hashed_bits
from hvdbridge.kernels.runs import Runs

CHUNK = 1 << 18
"""Elements that a CPU codes at a time, so that temporaries stay in its cache."""

RUN = 1 << 13
"""Elements from which a run of full blocks is worth a turn of a Python loop."""


@dataclass(frozen=True)
class Loose:
    """Blocks that are copied: which, int64, their lengths, and where they lie in the vector and in the matrix."""

    which: Tensor
    lengths: Tensor
    runs: Runs


class Part(NamedTuple):
    """``times`` times ``size`` elements of a vector, which lie side by side, each of them cut into blocks.

    Attributes:
        start: of the first.
        number, hop: what randomness calls its first element, and from each of them to the next; see :mod:`.random`.
    """

    start: int
    size: int
    number: int = 0
    times: int = 1
    hop: int = 0


class Blocks:
    """Where the blocks of a flat vector lie: all of ``width`` elements, some shorter.

    Long runs of full blocks are matrices in place; the others are copied into matrices, filled up with zeros.

    Args:
        parts: in their order; ``width`` divides the size of those that are several.
        numel: of the vector; what no block covers is padding behind the last.
        device: of the vectors.

    >>> blocks = Blocks([Part(0, 6), Part(6, 1)], 4, 7, "cpu")
    >>> blocks.gather(torch.arange(7.), blocks.loose[0])
    tensor([[0., 1., 2., 3.],
            [4., 5., 0., 0.],
            [6., 0., 0., 0.]])
    """

    def __init__(self, parts: Iterable[Part], width: int, numel: int, device: torch.device | str) -> None:
        self.parts, self.width, self.numel = [part for part in parts if part.size and part.times], width, numel
        self.device = torch.device(device)
        self.count = sum(-(-part.size // width) * part.times for part in self.parts)
        self._ends = max((part.start + part.size * part.times for part in self.parts), default=0)
        self._at_once = max(1, CHUNK // width if self.device.type == "cpu" else self.count)

    @cached_property
    def places(self) -> Places:
        """With codes in the order of the vector, as :func:`encode` has them."""
        return Places(self._strips(), 1, self.width)

    def _strips(self) -> Iterator[Strip]:
        scale = 0
        for part in self.parts:
            yield Strip(part.start, part.size, part.times, part.size, 0, part.start, scale, part.number, part.hop)
            scale += -(-part.size // self.width) * part.times

    @cached_property
    def numbers(self) -> Tensor:
        """int32 ``[blocks]``: of each block's first element, for randomness."""
        numbered = [strip._replace(start=strip.number, hop=strip.skip) for strip in self._strips()]
        strips = torch.tensor(numbered, dtype=torch.int64, device="cpu").view(-1, len(Strip._fields))
        return blocks_in(strips, self.width)[:, 0].to(self.device, torch.int32)

    @cached_property
    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Blocks that follow each other without a gap, of which the last may be short: (position, first block, full
        blocks, elements of the short one)."""
        groups: list[tuple[int, int, int, int]] = []
        first = 0
        for part in self.parts:
            full, short = divmod(part.size * part.times, self.width)
            at, begin, before = part.start, first, 0
            first += full + (short > 0)
            if groups and groups[-1][0] + groups[-1][2] * self.width == at and not groups[-1][3]:
                at, begin, before, _ = groups.pop()
            groups.append((at, begin, before + full, short))
        return groups

    def _in_place(self, full: int) -> int:
        """How many of a group's full blocks are a matrix in place."""
        return full if full * self.width >= RUN else 0

    @cached_property
    def loose(self) -> list[Loose]:
        """The blocks outside of runs, on a CPU in parts that stay in its cache."""
        blocks = [
            (at + i * self.width, begin + i, self.width if i < full else short)
            for at, begin, full, short in self._groups
            for i in range(self._in_place(full), full + (short > 0))
        ]
        found = []
        for some in (blocks[i : i + self._at_once] for i in range(0, len(blocks), self._at_once)):
            runs = Runs((at, row * self.width, length) for row, (at, _, length) in enumerate(some))
            which, lengths = (torch.tensor([b[i] for b in some], device="cpu").to(self.device) for i in (1, 2))
            found.append(Loose(which, lengths, runs))
        return found

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """The runs as (position, first block, blocks), on a CPU in pieces that stay in its cache."""
        for at, first, full, _ in self._groups:
            count = self._in_place(full)
            for skip in range(0, count, self._at_once):
                yield at + skip * self.width, first + skip, min(self._at_once, count - skip)

    def view(self, flat: Tensor, at: int, count: int) -> Tensor:
        """``count`` full blocks from position ``at`` as a matrix."""
        return flat[at : at + count * self.width].view(count, self.width)

    def gather(self, flat: Tensor, some: Loose) -> Tensor:
        """Blocks filled up with zeros: ``[blocks, width]``."""
        matrix = torch.zeros((some.which.numel(), self.width), dtype=flat.dtype, device=flat.device)
        some.runs.to(flat, matrix.view(-1))
        return matrix

    def scatter(self, matrix: Tensor, flat: Tensor, some: Loose) -> None:
        """The inverse of :meth:`gather`, into ``flat``."""
        some.runs.back(flat, matrix.view(-1))

    def clear_padding(self, flat: Tensor) -> None:
        """Zeros behind the last block."""
        flat[self._ends :] = 0

    def measure(self, flat: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
        """``what`` of every block, float32 ``[blocks]``; it is given float32 matrices, not to be changed."""
        found = torch.empty(self.count, dtype=torch.float32, device=flat.device)
        for at, first, count in self.pieces():
            found[first : first + count] = what(self.view(flat, at, count).to(torch.float32))
        for some in self.loose:
            found.index_copy_(0, some.which, what(self.gather(flat, some).to(torch.float32)))
        return found

    def noise(self, blocks: slice | Tensor, seed: int) -> Tensor:
        """24 bits for every element of some blocks, int32 ``[blocks, width]``."""
        inside = torch.arange(self.width, dtype=torch.int32, device=self.device)
        return hashed_bits(self.numbers[blocks].unsqueeze(1) + inside, seed)
