"""Runs: pieces of one vector that lie elsewhere in another, as parameters lie in a bucket and in a message.

Many short ones are moved by one call of native.c, where there is one and the vectors are of one type on a CPU. A view
of each, which is what torch's operations need, takes a microsecond, as much as the copy of some thousand elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hvdbridge.kernels import native

SHORT = 4096
"""Elements of a run, on average, below which views are what takes the time."""
CPU = torch.device("cpu")


class Runs:
    """``(here, there, length)``: elements ``here`` of one vector are elements ``there`` of another; none overlap.

    >>> runs = Runs([(0, 2, 2), (3, 0, 1)])
    >>> runs.to(torch.arange(4.), torch.zeros(4))
    tensor([3., 0., 0., 1.])
    >>> runs.back(torch.zeros(4), torch.arange(4.))
    tensor([2., 3., 0., 0.])
    """

    def __init__(self, runs: Iterable[tuple[int, int, int]]) -> None:
        joined: list[tuple[int, int, int]] = []
        for here, there, length in runs:
            if joined and length:
                before = joined[-1]
                if (before[0] + before[2], before[1] + before[2]) == (here, there):
                    joined[-1] = (before[0], before[1], before[2] + length)
                    continue
            if length:
                joined.append((here, there, length))
        self._table = torch.tensor(joined, dtype=torch.int64, device="cpu").reshape(-1, 3)
        self._here, self._there = (_Cuts([run[side] for run in joined], [run[2] for run in joined]) for side in (0, 1))
        self._short = sum(run[2] for run in joined) < SHORT * len(joined)

    def to(self, here: Tensor, there: Tensor) -> Tensor:
        """Copy from ``here`` to ``there``, flat, which is returned."""
        self._move(here, there, forth=True)
        return there

    def back(self, here: Tensor, there: Tensor) -> Tensor:
        """Copy from ``there`` to ``here``, flat, which is returned."""
        self._move(here, there, forth=False)
        return here

    def _move(self, here: Tensor, there: Tensor, forth: bool) -> None:
        count = len(self._table)
        flat = here.is_contiguous() and there.is_contiguous() and here.dtype == there.dtype
        fit = self._here.fit(here) and self._there.fit(there)  # vectors that are too short are refused below, by torch
        c = native.compiled() if flat and fit and {here.device, there.device} == {CPU} and self._short else None
        if c is not None:
            source, target = (here, there) if forth else (there, here)
            table, size = self._table, here.element_size()
            c.move_runs(source.data_ptr(), target.data_ptr(), table.data_ptr(), count, size, 0 if forth else 1)
        elif count:
            mine, theirs = self._here.views(here), self._there.views(there)
            torch._foreach_copy_(*((theirs, mine) if forth else (mine, theirs)))


class _Cuts:
    """Where runs lie in one vector: it is split at once, which takes less time than a slice of each."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._sizes: list[int] = []
        self._covered = 0
        for i in order:
            self._sizes += [starts[i] - self._covered, lengths[i]]
            self._covered = starts[i] + lengths[i]
        self._places = None if order == list(range(len(order))) else sorted(range(len(order)), key=order.__getitem__)

    def fit(self, flat: Tensor) -> bool:
        return flat.numel() >= self._covered

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = list(flat[: self._covered].split(self._sizes)[1::2])
        return parts if self._places is None else [parts[place] for place in self._places]
