"""Sampled thresholds, by which the largest elements of large parameters are found; on a GPU for all of them at once.

A sample of a parameter gives a threshold that slightly more elements reach than are wanted. One pass over memory lists
these candidates. On a GPU the largest of them are exactly those that the CPU selects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdbridge.kernels.random import generator

Array = np.ndarray[Any, Any]


CHUNK = 131072
"""Number of elements that the CPU searches at a time, so that they stay in its cache."""
SAMPLE_HITS = 400
"""Mean number of sampled elements that are among the k largest, if the parameter is large enough."""
MOST_CANDIDATES = 1 / 16
"""Share of a parameter's elements above which a GPU does not list candidates: sorting them would take longer than
``torch.topk``, and tables of their number more memory."""
BLOCK = 8192
"""Number of elements that a program of Triton's kernels compares."""


@dataclass(frozen=True)
class LargeParam:
    """A parameter that is searched separately.

    Attributes:
        start: offset in the vector.
        size: number of elements.
        count: number of elements to select.
        slot: their first slot in the message.
        sample_size: number of elements of the sample; 0: none is taken.
        tail: the ``tail``-th largest magnitude of the sample is the threshold for candidates.
        capacity: maximum number of candidates, for devices where the host must not wait for their number.
    """

    start: int
    size: int
    count: int
    slot: int
    sample_size: int
    tail: int
    capacity: int

    @property
    def listed(self) -> bool:
        """True if a GPU lists candidates."""
        return self.sample_size > 0 and self.capacity <= MOST_CANDIDATES * self.size

    def sample_positions(self) -> Array:
        """Positions of the sample, ascending: one in each of equal strata, so distinct. The same in every step."""
        return _sample(self.size, self.sample_size)


def large_param(start: int, size: int, count: int, slot: int, exact: bool) -> LargeParam:
    """Choose the sample size, the threshold's rank in the sample, and the capacity for a large parameter.

    The candidates are the elements that reach the ``tail``-th largest of the sample. The number of sampled elements
    among the ``count`` largest is binomial with mean ``expected``. The candidates lack one of these only if that number
    reaches ``tail``, which is 4.5 deviations and 4 above its mean (probability below 1e-5, and few are lacking then).
    More than ``capacity`` elements exceed the threshold only if fewer than ``tail`` of as many were sampled, 6
    deviations below their mean.
    """
    if not exact:
        sampled = min(size // 32, math.ceil(SAMPLE_HITS * size / count))
        expected = sampled * count / size
        tail = math.ceil(expected + 4.5 * math.sqrt(expected) + 4)
        if tail < sampled // 2:
            hits = (3 + math.sqrt(tail + 9)) ** 2  # solves hits - 6 sqrt(hits) = tail
            return LargeParam(start, size, count, slot, sampled, tail, min(size, math.ceil(hits * size / sampled)))
    return LargeParam(start, size, count, slot, 0, 0, 0)


@cache
def _points(number: int) -> Array:
    """Random points in :data:`CHUNK` strata of length 1. All parameters share these tables."""
    uniform = torch.rand(CHUNK, generator=generator("sample", number), dtype=torch.float64, device="cpu")
    points: Array = np.arange(number * CHUNK, (number + 1) * CHUNK) + uniform.numpy()
    return points


def _sample(size: int, count: int) -> Array:
    return np.minimum((_strata(count) * (size / count)).astype(np.int64), size - 1)


def _strata(count: int) -> Array:
    """Return a random point in each of ``count`` strata of length 1, ascending."""
    if count <= CHUNK:
        return _points(0)[:count]
    return np.concatenate([_points(number) for number in range(-(-count // CHUNK))])[:count]


class Blocks:
    """The tables of :func:`~hvdbridge.kernels.cuda_select.threshold_positions`, for parts of a vector.

    Attributes:
        capacity: of all parts together.
    """

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], capacities: Sequence[int], device: torch.device):
        counts = [-(-size // BLOCK) for size in sizes]
        firsts = list(accumulate(counts, initial=0))
        part = np.repeat(np.arange(len(sizes)), counts)
        offset = (np.arange(len(part)) - np.array(firsts)[part]) * BLOCK
        table = np.stack([part, np.array(starts)[part] + offset, np.minimum(np.array(sizes)[part] - offset, BLOCK)])
        bases = list(accumulate(capacities, initial=0))
        parts = [firsts[:-1], [first - 1 for first in firsts[1:]], bases[:-1], list(capacities)]
        self.table = torch.from_numpy(table.astype(np.int64)).to(device)
        self.parts = torch.tensor(parts, dtype=torch.int64, device=device)
        self.aligned, self.capacity = all(start % 4 == 0 for start in starts), bases[-1]

    def positions(self, kernels: ModuleType, bits: Tensor, limits: Tensor) -> Tensor | None:
        """Return the positions that reach their part's limit, int32 ``[capacity]``, -1 where there are none.

        None: the kernel does not compile.
        """
        found = torch.full((self.capacity,), -1, dtype=torch.int32, device=bits.device)
        done = kernels.threshold_positions(bits, limits, self.table, self.parts, found, self.aligned)
        return found if done else None


class Search:
    """Tables to search parts of a vector on ``device``. ``parts``: in the order of the results."""

    def __init__(self, parts: Sequence[LargeParam], device: torch.device) -> None:
        # Samples of similar size are the rows of a matrix
        self.parts = sorted(parts, key=lambda part: part.sample_size.bit_length())
        self.samples = [
            _Samples(list(rows), device) for _, rows in groupby(self.parts, lambda part: part.sample_size.bit_length())
        ]
        starts, sizes, capacities = ([getattr(p, name) for p in self.parts] for name in ("start", "size", "capacity"))
        self.blocks = Blocks(starts, sizes, capacities, device)
        numbers = np.repeat(np.arange(1, len(parts) + 1, dtype=np.int64) << 32, capacities)
        self.numbers = torch.from_numpy(numbers).to(device)
        bases = accumulate(capacities, initial=0)
        chosen = [np.arange(base, base + part.count) for base, part in zip(bases, self.parts, strict=False)]
        self.chosen = torch.from_numpy(np.concatenate(chosen).astype(np.int32)).to(device)

    def largest(self, bits: Tensor, mask: int, kernels: ModuleType) -> tuple[Tensor, Tensor] | None:
        """Return magnitudes and positions of the largest elements of each part, in turn; None: no kernel compiles.

        Of equal elements the first are selected. Where there are too few, magnitudes are 0.
        """
        limits = [sample.limits(bits, mask) for sample in self.samples]
        positions = self.blocks.positions(kernels, bits, limits[0] if len(limits) == 1 else torch.cat(limits))
        if positions is None:
            return None
        missing = positions < 0
        positions.masked_fill_(missing, 0)
        magnitudes = bits.index_select(0, positions).bitwise_and_(mask).masked_fill_(missing, 0)
        # Sorted by part, then from the largest magnitude on, equal ones in their order
        order = torch.sort(self.numbers - magnitudes, stable=True).indices.index_select(0, self.chosen)
        return magnitudes.index_select(0, order), positions.index_select(0, order)


class _Samples:
    """The samples of some parts, as rows of a matrix."""

    def __init__(self, parts: Sequence[LargeParam], device: torch.device) -> None:
        samples = [part.start + part.sample_positions() for part in parts]
        width = max(map(len, samples))
        padded = np.stack([np.pad(sample, (0, width - len(sample)), constant_values=-1) for sample in samples])
        self.positions = torch.from_numpy(np.maximum(padded, 0).reshape(-1).astype(np.int32)).to(device)
        self.padding = torch.from_numpy(padded < 0).to(device)
        self.tails = torch.tensor([[part.tail - 1] for part in parts], dtype=torch.int64, device=device)
        self.most = max(part.tail for part in parts)

    def limits(self, bits: Tensor, mask: int) -> Tensor:
        """Return the bits of the smallest magnitude that a candidate of each part has, int32 ``[parts]``."""
        sample = bits.index_select(0, self.positions).bitwise_and_(mask).view(self.padding.shape)
        tops = torch.topk(sample.masked_fill_(self.padding, 0), self.most, dim=1).values
        return tops.gather(1, self.tails).clamp_(min=1).view(-1)
