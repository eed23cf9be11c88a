"""The clock that measures time limits."""

from __future__ import annotations


class Clock:
    """A clock, in seconds, that is paused while some rank has requested patience. Not thread-safe.

    >>> clock = Clock()
    >>> clock.pause(10.0)
    >>> clock.reading(70.0)
    10.0
    >>> clock.resume(70.0)
    >>> clock.reading(75.0)
    15.0
    """

    def __init__(self) -> None:
        self._paused_since: float | None = None
        self._paused_seconds = 0.0

    @property
    def paused(self) -> bool:
        return self._paused_since is not None

    def reading(self, now: float) -> float:
        """Return this clock's time when ``time.monotonic()`` returns ``now``."""
        return (now if self._paused_since is None else self._paused_since) - self._paused_seconds

    def pause(self, now: float) -> None:
        """Stop the clock; no effect if it is paused."""
        if self._paused_since is None:
            self._paused_since = now

    def resume(self, now: float) -> None:
        """Continue the clock; no effect if it runs."""
        if self._paused_since is not None:
            self._paused_seconds += now - self._paused_since
            self._paused_since = None
