"""The samples of a data set that belong to this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hvdbridge.errors import ConfigurationError
from hvdbridge.training import runtime


class DistributedSampler(Sampler[int]):
    """Deals a data set out to the ranks, one sample each in turn.

    ``torch.utils.data.DistributedSampler`` repeats samples until all ranks have equally many, which counts those twice,
    in training and in evaluation. Here every sample is used exactly once per epoch, so the lengths may differ by one.
    Then the last batches differ too, and even their number where the shorter part fills whole batches. With
    ``sync.weight = len(x)`` the result is that of one process on the union of the batches, and ``sync.join()`` lets a
    rank end earlier. ``pad=True`` is torch's way, in torch's order.

    Args:
        dataset: anything with a length.
        rank, size: the rank that gets the samples, and the number of ranks; None: this job's.
        shuffle: a new order for each epoch, a function of ``seed`` and :meth:`set_epoch` alone.
        seed: equal on all ranks.
        pad: repeat the first samples until every rank has equally many.

    >>> [list(DistributedSampler(range(5), rank=r, size=2, shuffle=False)) for r in (0, 1)]
    [[0, 2, 4], [1, 3]]
    >>> [list(DistributedSampler(range(5), rank=r, size=2, shuffle=False, pad=True)) for r in (0, 1)]
    [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        dataset: Sized,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = False,
    ) -> None:
        self.rank = runtime.rank() if rank is None else rank
        self.size = runtime.size() if size is None else size
        if not 0 <= self.rank < self.size:
            raise ConfigurationError(f"DistributedSampler: rank {self.rank} is not in 0..{self.size - 1}")
        self.dataset, self.shuffle, self.seed, self.pad = dataset, shuffle, seed, pad
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it with the same number on all ranks."""
        self.epoch = epoch

    def _own(self) -> range:
        """This rank's numbers in the order of an epoch; those beyond its end begin it again."""
        count = len(self.dataset)
        return range(self.rank, -(-count // self.size) * self.size if self.pad else count, self.size)

    def __len__(self) -> int:
        return len(self._own())

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator, device="cpu").tolist()
        return iter([order[i % len(order)] for i in self._own()])
