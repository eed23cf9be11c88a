"""A sampler that divides what is left of an epoch among the ranks that there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdbridge.torch import basics


class ElasticSampler(Sampler[int]):
    """Divides a dataset among the ranks; after a reset only what no rank has processed, in the same order.

    Make it part of :class:`~hvdbridge.torch.elastic.TorchState`, call :meth:`record_batch` after each batch, and
    :meth:`set_epoch` at the END of each epoch, for it forgets what was processed.

    Args:
        dataset: anything of constant length.
        shuffle: in an order that depends on ``seed`` and the epoch alone, so on all ranks the same.
        seed: equal on all ranks.

    Raises:
        ValueError: ``hvd.init()`` is missing.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # leading samples of the epoch's order that are done
        self.processed_indices: set[int] = set()  # ... and others
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Go on to ``epoch``: another order, and nothing of it is processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed ``batch_size`` samples more; ``batch_idx`` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: set[int]) -> None:
        """These samples are processed, by any rank. If ranks record different ones, rank 0's count."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up :meth:`state_dict`, of any number of ranks, and divide what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks that there are now."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [i for i in order[self.processed_num :] if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        padded = left + [left[i % len(left)] for i in range(self.total_size - len(left))]
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
