"""A wait that the job's monitor knows of."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdbridge.supervisor.client import Monitor


class _Wait:
    """One ``with monitor.watch(label)``. Slots and no locks: it stands around every collective."""

    __slots__ = ("label", "limit", "monitor", "phase", "since", "stall", "token")

    def __init__(
        self, monitor: Monitor, label: object, limit: float = 0.0, phase: bool = False, stall: float = 0.0
    ) -> None:
        self.monitor, self.label, self.limit, self.phase, self.token = monitor, label, limit, phase, 0
        self.stall = stall

    def __enter__(self) -> None:
        monitor = self.monitor
        if monitor.failure is not None:
            raise monitor._copy_of_failure()
        self.since = time.monotonic()
        monitor._waits.add(self)
        if self.phase:
            monitor._announce(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        monitor = self.monitor
        monitor._waits.discard(self)
        if self.token:
            monitor._withdraw(self)
        if error is not None and monitor.cause_of(error) is not error:
            raise monitor._copy_of_failure() from error
