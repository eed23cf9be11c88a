from __future__ import annotations

from typing import Any, ClassVar

from hvdbridge.backends.starter import Meeting, Numbers, Starter
from hvdbridge.supervisor.client import Monitor


class ShelfStarter(Starter):
    name = "shelf"
    monitor: ClassVar[Monitor | None] = None
    places: ClassVar[Numbers] = (0, 1)

    @classmethod
    def running(cls) -> Numbers | None:
        return None

    def all_gather(self, value: str) -> list[Any]:
        raise AssertionError("nobody has started it before")

    def start(self, meeting: Meeting) -> None:
        ShelfStarter.monitor, ShelfStarter.places = meeting.monitor, (meeting.world.rank, meeting.world.size)

    def numbers(self) -> Numbers:
        return self.places

    def stop(self) -> None:
        ShelfStarter.monitor = None
