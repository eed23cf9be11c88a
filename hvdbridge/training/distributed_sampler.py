"""DistributedSampler: the samples of a data set for this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hvdbridge.errors import ConfigurationError
from hvdbridge.training import runtime


class DistributedSampler(Sampler[int]):
    """Samples a data set for this rank: every ``size``-th sample, from ``rank`` on.

    Every sample is used exactly once per epoch, so the ranks' numbers of samples may differ by one. torch's
    ``DistributedSampler`` repeats samples until the numbers are equal. Here the last batches may differ in size, and
    ranks in their numbers of batches. ``sync.weight = len(x)`` gives the result of one process on the union of the
    batches, and ``sync.join()`` lets a rank end earlier.

    Args:
        dataset: an object with a length.
        rank, size: the rank to sample for and the number of ranks; None: those of this job.
        shuffle: use a new order for each epoch, which depends only on ``seed`` and :meth:`set_epoch`.
        seed: seed of the order, equal on all ranks.
        pad: as torch does, repeat the first samples until every rank has the same number.

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
        """Set the epoch, which determines the next order; call it with the same number on all ranks."""
        self.epoch = epoch

    def _positions(self) -> range:
        """Return this rank's positions in the order of an epoch; positions beyond its end wrap around."""
        count = len(self.dataset)
        return range(self.rank, -(-count // self.size) * self.size if self.pad else count, self.size)

    def __len__(self) -> int:
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator, device="cpu").tolist()
        return iter([order[i % len(order)] for i in self._positions()])
