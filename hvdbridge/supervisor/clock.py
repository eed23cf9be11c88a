"""The time by which limits are judged."""

from __future__ import annotations


class Clock:
    """Seconds that stand still while some rank has asked for patience. Not for several threads.

    >>> clock = Clock()
    >>> clock.stand_still(10.0)
    >>> clock.at(70.0)
    10.0
    >>> clock.go_on(70.0)
    >>> clock.at(75.0)
    15.0
    """

    def __init__(self) -> None:
        self._stands_since: float | None = None
        self._stood = 0.0

    @property
    def stands(self) -> bool:
        return self._stands_since is not None

    def at(self, now: float) -> float:
        """The time when a clock that never stands still says ``now``."""
        return (now if self._stands_since is None else self._stands_since) - self._stood

    def stand_still(self, now: float) -> None:
        """Harmless when repeated."""
        if self._stands_since is None:
            self._stands_since = now

    def go_on(self, now: float) -> None:
        """Harmless when repeated."""
        if self._stands_since is not None:
            self._stood += now - self._stands_since
            self._stands_since = None
