"""Runs: contiguous parts of one vector that are elsewhere in another, as parameters in a bucket and in a message.

One call of native.c copies many short runs, if it is available and both vectors are on a CPU and of one dtype. torch's
operations need a view of each run instead, and creating a view takes as long as copying some thousand elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hvdbridge.kernels import native

SHORT = 4096
"""Mean number of elements per run below which creating views takes longer than copying."""
CPU = torch.device("cpu")


class Runs:
    """Runs ``(first, second, length)``: ``length`` elements at offset ``first`` of one vector, ``second`` of another.

    The runs do not overlap in either vector.

    >>> runs = Runs([(0, 2, 2), (3, 0, 1)])
    >>> runs.to(torch.arange(4.), torch.zeros(4))
    tensor([3., 0., 0., 1.])
    >>> runs.back(torch.zeros(4), torch.arange(4.))
    tensor([2., 3., 0., 0.])
    """

    def __init__(self, runs: Iterable[tuple[int, int, int]]) -> None:
        merged: list[tuple[int, int, int]] = []
        for first, second, length in runs:
            if merged and length:
                last = merged[-1]
                if (last[0] + last[2], last[1] + last[2]) == (first, second):
                    merged[-1] = (last[0], last[1], last[2] + length)
                    continue
            if length:
                merged.append((first, second, length))
        self._table = torch.tensor(merged, dtype=torch.int64, device="cpu").reshape(-1, 3)
        self._first, self._second = (_Splits([r[side] for r in merged], [r[2] for r in merged]) for side in (0, 1))
        self._short = sum(run[2] for run in merged) < SHORT * len(merged)

    def to(self, first: Tensor, second: Tensor) -> Tensor:
        """Copy the runs from ``first`` to ``second``, both flat; returns ``second``. torch raises if one is short."""
        self._copy(first, second, forward=True)
        return second

    def back(self, first: Tensor, second: Tensor) -> Tensor:
        """Copy the runs from ``second`` to ``first``, both flat; returns ``first``. torch raises if one is short."""
        self._copy(first, second, forward=False)
        return first

    def _copy(self, first: Tensor, second: Tensor, forward: bool) -> None:
        count = len(self._table)
        flat = first.is_contiguous() and second.is_contiguous() and first.dtype == second.dtype
        fits = self._first.fits(first) and self._second.fits(second)  # if not, torch raises below
        c = native.compiled() if flat and fits and {first.device, second.device} == {CPU} and self._short else None
        if c is not None:
            source, target = (first, second) if forward else (second, first)
            table, size = self._table, first.element_size()
            c.copy_runs(source.data_ptr(), target.data_ptr(), table.data_ptr(), count, size, 0 if forward else 1)
        elif count:
            first_views, second_views = self._first.views(first), self._second.views(second)
            torch._foreach_copy_(*((second_views, first_views) if forward else (first_views, second_views)))


class _Splits:
    """The positions of runs in one vector. It splits the vector at once, which is faster than a slice per run."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._sizes: list[int] = []
        self._covered = 0
        for i in order:
            self._sizes += [starts[i] - self._covered, lengths[i]]
            self._covered = starts[i] + lengths[i]
        self._order = None if order == list(range(len(order))) else sorted(range(len(order)), key=order.__getitem__)

    def fits(self, flat: Tensor) -> bool:
        return flat.numel() >= self._covered

    def views(self, flat: Tensor) -> list[Tensor]:
        views = list(flat[: self._covered].split(self._sizes)[1::2])
        return views if self._order is None else [views[i] for i in self._order]
