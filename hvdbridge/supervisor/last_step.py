"""Agreement of all ranks on a last step, without a collective: the state of one rank.

Rules:

1. A rank that wants to stop notifies the helper. The helper queries all ranks. The monitor thread of each rank replies
   with the last step that the rank has passed, which is the last one for which :meth:`LastStep.reached` returned False.
   After its reply a rank passes no further step until the helper sends the last one, so the reply stays valid.
2. When all ranks have replied, the helper sends the largest step plus one. No rank has passed it, and each rank will
   reach it, since a step needs all ranks. From this step on :meth:`LastStep.reached` returns True on all ranks.
3. Steps are counted per synchronizer. A synchronizer that is created after a rank's reply has passed no step on any
   rank, so its first step is its last.
4. Unless a rank wants to stop, :meth:`LastStep.reached` only takes a free lock. Afterwards it returns None while
   the agreement takes one round trip, for which :meth:`Monitor.last_step_reached` waits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping


class LastStep:
    """The state of one rank. The training thread calls :meth:`reached`, the monitor's thread the other methods.

    Attributes:
        wanted: stop is requested on this rank. A plain attribute, since signal handlers set it.
        decided: event that is set when the helper has sent the last step.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.decided = threading.Event()
        self._lock = threading.Lock()
        self._passed: dict[str, int] = {}
        self._frozen = False
        self._last: Mapping[str, int] = {}

    def reached(self, key: str, step: int) -> bool | None:
        """Return whether ``step`` of the synchronizer ``key`` is the last one or a later one.

        None means that the decision is pending: wait for :attr:`decided` and call again.
        """
        with self._lock:
            if self.decided.is_set():
                return step >= self._last.get(key, 1)
            if self._frozen:
                return None
            self._passed[key] = step
            return False

    def freeze(self) -> dict[str, int]:
        """Return the last step that this rank has passed, by synchronizer; it passes no further step from now on."""
        with self._lock:
            self._frozen = True
            return dict(self._passed)

    def set_last(self, last: Mapping[str, int]) -> None:
        """Store the last step of each synchronizer, as the helper has decided."""
        with self._lock:
            self._last = last
            self.decided.set()


def last_steps(passed_by_rank: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Return the last step of each synchronizer, from the steps that each rank has passed.

    >>> last_steps({0: {"0": 7}, 1: {"0": 8, "1": 2}})
    {'0': 9, '1': 3}
    """
    last: dict[str, int] = {}
    for passed in passed_by_rank.values():
        for key, step in passed.items():
            last[key] = max(step + 1, last.get(key, 0))
    return last
