from __future__ import annotations

from typing import Any, ClassVar

from hvdbridge.backends.starter import RankAndSize, RendezvousInfo, Starter
from hvdbridge.supervisor.client import Monitor


class ShelfStarter(Starter):
    name = "shelf"
    monitor: ClassVar[Monitor | None] = None
    places: ClassVar[RankAndSize] = (0, 1)

    @classmethod
    def running(cls) -> RankAndSize | None:
        return None

    def all_gather(self, value: str) -> list[Any]:
        raise AssertionError("nobody has started it before")

    def start(self, rendezvous: RendezvousInfo) -> None:
        ShelfStarter.monitor, ShelfStarter.places = rendezvous.monitor, (rendezvous.world.rank, rendezvous.world.size)

    def rank_and_size(self) -> RankAndSize:
        return self.places

    def stop(self) -> None:
        ShelfStarter.monitor = None
