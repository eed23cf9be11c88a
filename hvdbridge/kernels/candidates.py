"""The largest elements of a vector's large parameters, found on a GPU by sampled thresholds, for all at once.

A sample of each parameter gives a threshold that slightly more elements reach than are wanted. One pass over memory
lists these candidates, and the largest of them are exactly those that the CPU selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hvdbridge.kernels.cuda_select import BLOCK

Array = np.ndarray[Any, Any]


class Part(Protocol):
    """A parameter to search: a :class:`~hvdbridge.kernels.select.LargeParam`."""

    @property
    def start(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def sample_positions(self) -> Array: ...


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
    """Tables to search ``parts`` of a vector on ``device``."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        samples = [part.start + part.sample_positions() for part in parts]
        width = max(map(len, samples))
        padded = np.stack([np.pad(sample, (0, width - len(sample)), constant_values=-1) for sample in samples])
        self.sample = torch.from_numpy(np.maximum(padded, 0).reshape(-1)).to(device)
        self.padding = torch.from_numpy(padded < 0).to(device)
        self.tails = torch.tensor([[part.tail - 1] for part in parts], dtype=torch.int64, device=device)
        self.most = max(part.tail for part in parts)
        capacities = [part.capacity for part in parts]
        self.blocks = Blocks([part.start for part in parts], [part.size for part in parts], capacities, device)
        numbers = np.repeat(np.arange(1, len(parts) + 1, dtype=np.int64) << 32, capacities)
        self.numbers = torch.from_numpy(numbers).to(device)
        bases = accumulate(capacities, initial=0)
        chosen = [np.arange(base, base + part.count) for base, part in zip(bases, parts, strict=False)]
        self.chosen = torch.from_numpy(np.concatenate(chosen)).to(device)

    def largest(self, bits: Tensor, mask: int, kernels: ModuleType) -> tuple[Tensor, Tensor] | None:
        """Return magnitudes and positions of the largest elements of each part, in turn; None: no kernel compiles.

        Of equal elements the first are selected. Where there are too few, magnitudes are 0.
        """
        sample = bits.index_select(0, self.sample).bitwise_and_(mask).view(self.padding.shape)
        tops = torch.topk(sample.masked_fill_(self.padding, 0), self.most, dim=1).values
        positions = self.blocks.positions(kernels, bits, tops.gather(1, self.tails).clamp_(min=1).view(-1))
        if positions is None:
            return None
        missing = positions < 0
        positions.masked_fill_(missing, 0)
        magnitudes = bits.index_select(0, positions).bitwise_and_(mask).masked_fill_(missing, 0)
        # Sorted by part, then from the largest magnitude on, equal ones in their order
        order = torch.sort(self.numbers - magnitudes, stable=True).indices.index_select(0, self.chosen)
        return magnitudes.index_select(0, order), positions.index_select(0, order)
