"""Which samples of a data set are this rank's."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hvdbridge.errors import ConfigurationError


class DistributedSampler(Sampler[int]):
    """Deals a data set out to the ranks, one sample each in turn.

    ``torch.utils.data.DistributedSampler`` repeats samples until all ranks have equally many, which counts
    those twice, in training and in evaluation. Here every sample is used exactly once per epoch, so the
    lengths may differ by one. Then the last batches differ too, and even their number where the shorter part
    fills whole batches: ``sync.weight = len(x)`` makes the result that of one process on the union of the
    batches, and ``sync.join()`` lets a rank end earlier. ``pad=True`` is torch's way, in torch's order.

    Args:
        dataset: anything with a length.
        rank, size: whose part, of how many; None = this job's.
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
        if rank is None or size is None:
            from hvdbridge.training import runtime  # here, so that a sampler with both needs no session

            rank = runtime.rank() if rank is None else rank
            size = runtime.size() if size is None else size
        if not 0 <= rank < size:
            raise ConfigurationError(f"DistributedSampler: rank {rank} is not in 0..{size - 1}")
        self.dataset, self.rank, self.size = dataset, rank, size
        self.shuffle, self.seed, self.pad = shuffle, seed, pad
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it with the same number on all ranks."""
        self.epoch = epoch

    def __len__(self) -> int:
        most = -(-len(self.dataset) // self.size)
        short = not self.pad and self.rank >= len(self.dataset) - (most - 1) * self.size
        return most - short if len(self.dataset) else 0

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator, device="cpu")
        else:
            order = torch.arange(count, device="cpu")
        if self.pad and count:
            order = order[torch.arange(-(-count // self.size) * self.size, device="cpu") % count]
        return iter(order[self.rank :: self.size].tolist())
