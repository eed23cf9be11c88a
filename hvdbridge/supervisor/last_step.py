"""A last step that all ranks share, agreed upon without a collective: a rank's part.

Rules:

1. A rank that wants to stop tells the helper. The helper asks all ranks, whose monitor threads answer with the last
   step that each has passed (at which :meth:`LastStep.over` said no). From its answer on a rank passes no other step
   until the helper has named the last one, so the answer holds.
2. The helper names one more than the largest answer, once all ranks have answered. No rank has passed it, and each will
   come to it, since a step needs all ranks: :meth:`LastStep.over` says yes there and from there on, everywhere.
3. Steps are counted per synchronizer. One that was made after a rank had answered has passed none on any rank: its
   first step is the last.
4. While no rank wants to stop, :meth:`LastStep.over` takes a free lock. Afterwards it waits for one round trip.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping


class LastStep:
    """The state of one rank. :meth:`over` is called where steps are made, the others by the monitor's thread.

    Attributes:
        wanted: this rank wants to stop. Set by signal handlers: no more than an assignment may happen there.
        named: set when the helper has named the last step.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.named = threading.Event()
        self._lock = threading.Lock()
        self._passed: dict[str, int] = {}
        self._asked = False
        self._last: Mapping[str, int] = {}

    def over(self, key: str, step: int) -> bool | None:
        """Whether ``step`` of the synchronizer ``key`` is the last one, or comes after it. None: wait for
        :attr:`named`, and ask again."""
        with self._lock:
            if self.named.is_set():
                return step >= self._last.get(key, 1)
            if self._asked:
                return None
            self._passed[key] = step
            return False

    def answer(self) -> dict[str, int]:
        """The steps that this rank has passed; it passes no other from here on."""
        with self._lock:
            self._asked = True
            return dict(self._passed)

    def name(self, last: Mapping[str, int]) -> None:
        """The helper's word: per synchronizer the last step."""
        with self._lock:
            self._last = last
            self.named.set()


def latest(answers: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """The last steps that follow from what all ranks have passed.

    >>> latest({0: {"0": 7}, 1: {"0": 8, "1": 2}})
    {'0': 9, '1': 3}
    """
    found: dict[str, int] = {}
    for passed in answers.values():
        for key, step in passed.items():
            found[key] = max(step + 1, found.get(key, 0))
    return found
