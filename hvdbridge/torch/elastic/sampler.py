"""A sampler that divides the remaining samples of an epoch among the present ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdbridge.torch import basics


class ElasticSampler(Sampler[int]):
    """Divides a dataset among the ranks; after a reset, the samples that no rank has processed, in the same order.

    Make it part of :class:`~hvdbridge.torch.elastic.TorchState`, and call :meth:`record_batch` after each batch. Call
    :meth:`set_epoch` at the END of each epoch, because it forgets which samples were processed.

    Args:
        dataset: anything of constant length.
        shuffle: in an order that depends on ``seed`` and the epoch alone, and so is the same on all ranks.
        seed: equal on all ranks.

    Raises:
        ValueError: ``hvd.init()`` is missing.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.indices: list[int] = []
        ElasticSampler.set_epoch(self, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go on to ``epoch``: another order, of which nothing is processed."""
        ElasticSampler.load_state_dict(self, {"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed ``batch_size`` samples more; ``batch_idx`` is not used."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: set[int]) -> None:
        """Some rank has processed these samples. If ranks record different ones, rank 0's count."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        processed = sorted(self.processed_indices)
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up :meth:`state_dict`, of any number of ranks, and divide the remaining samples."""
        self.epoch: int = state_dict["epoch"]
        self.processed_num: int = state_dict["processed_num"]  # leading samples of the epoch's order
        self.processed_indices: set[int] = set(state_dict.get("processed_indices", ()))  # other samples
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the present ranks."""
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
