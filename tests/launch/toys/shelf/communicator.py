from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from hvdbridge.backends.bridge import Bridged
from hvdbridge.backends.communicator import Communicator, Watch, Work, unwatched
from shelf.starter import ShelfStarter

WORLDS = count()


class Fetch(Work):
    """Calls ``fetch`` once; it blocks until the other ranks have laid down theirs."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch: Callable[[], None] | None = fetch

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch()


class ShelfCommunicator(Bridged):
    def __init__(self, name: str, ranks: list[int], rank: int, watch: Watch = unwatched) -> None:
        super().__init__(name, ranks.index(rank), len(ranks), 60.0, watch)
        self._ranks, self._me, self._operations = ranks, rank, count()

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> ShelfCommunicator:
        rank, size = ShelfStarter.places
        return cls(f"shelf{next(WORLDS)}", list(range(size)), rank, watch)

    def _reduces(self, flat: Tensor, op: str) -> bool:
        return False  # the bridge adds in rank order

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        raise AssertionError("it reduces nothing")

    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        return self._lay(data, lambda rank, theirs: answer[rank].copy_(theirs))

    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        return self._lay(rows, lambda rank, theirs: answer[rank].copy_(theirs.view(self.size, -1)[self.rank]))

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        return self._lay(data.clone(), lambda rank, theirs: data.copy_(theirs) if rank == root else None)

    def _lay(self, data: Tensor, take: Callable[[int, Tensor], object]) -> Work:
        monitor, key = ShelfStarter.monitor, f"{self.name}/{next(self._operations)}"
        assert monitor is not None
        monitor.store_set(f"{key}/{self.rank}", data.numpy().tobytes())

        def fetch() -> None:
            for rank in range(self.size):
                take(rank, torch.frombuffer(bytearray(monitor.store_get(f"{key}/{rank}")), dtype=torch.uint8))

        return Fetch(fetch)

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        if mine is None:
            return None
        return ShelfCommunicator(f"{name}-{mine}", [self._ranks[rank] for rank in groups[mine]], self._me, self.watch)

    def _close(self) -> None: ...
