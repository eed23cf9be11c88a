"""``ElasticSampler``: divides the remaining samples of an epoch among the current ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvdbridge.torch import basics


class ElasticSampler(Sampler[int]):
    """Divides the indices of a dataset among the ranks. After a reset, it divides those that no rank has processed.

    Pass it to :class:`~hvdbridge.torch.elastic.TorchState`, and call :meth:`record_batch` after each batch. Call
    :meth:`set_epoch` at the END of each epoch, because it clears the record of processed samples.

    Args:
        dataset: any object of constant length.
        shuffle: whether to shuffle; the order depends on ``seed`` and the epoch alone, so all ranks use the same.
        seed: equal on all ranks.

    Raises:
        ValueError: before ``hvd.init()``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.indices: list[int] = []
        ElasticSampler.set_epoch(self, 0)

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``, with its own order and no processed samples."""
        ElasticSampler.load_state_dict(self, {"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed ``batch_size`` further samples; ``batch_idx`` is ignored."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: set[int]) -> None:
        """Record processed samples by index. If ranks record different ones, only rank 0's are used after a reset."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the processed samples."""
        processed = sorted(self.processed_indices)
        return {"epoch": self.epoch, "processed_num": self.processed_num, "processed_indices": processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, saved with any number of ranks, and divide the remaining samples."""
        self.epoch: int = state_dict["epoch"]
        self.processed_num: int = state_dict["processed_num"]  # as many samples at the start of the order
        self.processed_indices: set[int] = set(state_dict.get("processed_indices", ()))  # indices of further samples
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas, self.rank = basics.size(), basics.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [i for i in order[self.processed_num :] if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        padded = remaining + [remaining[i % len(remaining)] for i in range(self.total_size - len(remaining))]
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
