"""Where the blocks of a code are in a vector, and their codes and scales in a message."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import CDLL
from typing import NamedTuple

import torch
from torch import Tensor


class Strip(NamedTuple):
    """Equal parts of a vector, each cut into blocks, of which the last may be short; and where these travel.

    Attributes:
        start, hop: of the first part, and from each to the next, in elements of the vector.
        parts, size: how many, and elements of each.
        row: of the codes, and of the scales, that they are in.
        code, scale: how many of that row come before.
        number, skip: what randomness calls the first element, and from each part to the next; see :mod:`.random`.
    """

    start: int
    hop: int
    parts: int
    size: int
    row: int
    code: int
    scale: int
    number: int = 0
    skip: int = 0


def blocks_in(strips: Tensor, width: int) -> Tensor:
    """int64 ``[blocks, 5]``: of each block its start, its elements, its row, and the codes and scales before it there.

    Args:
        strips: int64 ``[strips, 9]``, see :class:`Strip`.

    >>> blocks_in(torch.tensor([Strip(start=0, hop=9, parts=2, size=6, row=1, code=20, scale=3)]), 4)
    tensor([[ 0,  4,  1, 20,  3],
            [ 4,  2,  1, 24,  4],
            [ 9,  4,  1, 26,  5],
            [13,  2,  1, 30,  6]])
    """
    start, hop, parts, size, row, code, scale, _, _ = strips.unbind(1)
    each = (size + width - 1) // width
    number = parts * each
    strip = torch.arange(len(strips), device=strips.device).repeat_interleave(number)
    place = torch.arange(strip.numel(), device=strips.device) - (number.cumsum(0) - number)[strip]
    part, inside = place // each[strip], place % each[strip] * width
    return torch.stack(
        [
            start[strip] + part * hop[strip] + inside,
            (size[strip] - inside).clamp_(max=width),
            row[strip],
            code[strip] + part * size[strip] + inside,
            scale[strip] + place,
        ],
        1,
    )


class Places:
    """Where :mod:`.fused` kernels find blocks of ``width``, and their codes and scales in messages of ``height`` rows.

    For these kernels blocks have at most 1024 elements, and a row at most 2**31 codes; else a ValueError is raised.
    """

    def __init__(self, strips: Iterable[Strip], height: int, width: int) -> None:
        self._strips = torch.tensor([*strips], dtype=torch.int64, device="cpu").view(-1, len(Strip._fields))
        _, _, parts, size, _, code, _, _, _ = self._strips.unbind(1)
        self._fit = width <= 1024 and not bool((code + parts * size > 2**31).any())
        self._number = int((parts * ((size + width - 1) // width)).sum())
        self._columns: Tensor | None = None
        self.height, self.width = height, width

    def table(self, native: CDLL) -> Tensor:
        """A struct of native.c for each block, int32 ``[blocks, 8]``: made anew, as it may be long."""
        self._check()
        made = torch.empty((self._number, 8), dtype=torch.int32, device="cpu")
        native.lay_blocks(self._strips.data_ptr(), len(self._strips), self.width, made.data_ptr())
        return made

    def blocks(self) -> Tensor:
        """See :func:`blocks_in`; in the order of the vector."""
        table = blocks_in(self._strips, self.width)
        return table[table[:, 0].argsort()]

    def columns(self, device: torch.device) -> tuple[Tensor, int]:
        """The same as ``[5, blocks]``, and how many; kept on the one GPU that they are for."""
        if self._columns is None:
            self._check()
            self._columns = self.blocks().t().contiguous().to(device)
        return self._columns, self._number

    def _check(self) -> None:
        if not self._fit:
            raise ValueError(f"kernels have no room for blocks of {self.width}, or for so many codes in a row")
