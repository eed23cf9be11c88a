"""A stop on which all ranks agree: what asks for it. ``sync.stop_requested`` says when it is time.

Rules:

1. A handler makes one assignment; the monitor's thread tells the helper within a tenth of a second.
2. Handlers are chained: what was there is called, too. A second signal ends the process as it would have without them;
   one that follows at once is the same one by another way, as when a launcher passes on what its group got, too.
3. A process that was forked (a DataLoader's worker) does what it would have done without them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from hvdbridge import runtime
from hvdbridge.helper.last_step import LastStep

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SECONDS = 0.5
log = logging.getLogger("hvdbridge")


class Handlers:
    """The handlers of one session."""

    def __init__(self, last_step: LastStep) -> None:
        self._last_step = last_step
        self._found: dict[int, Any] = {}
        self._pid = os.getpid()
        self._first = 0.0

    def install(self, signals: Iterable[int]) -> None:
        for number in signals:
            if number not in self._found:
                self._found[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        for number, found in self._found.items():
            if signal.getsignal(number) == self._handle:  # else somebody chained to it
                signal.signal(number, found)
        self._found.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        found, now = self._found.get(number, signal.SIG_DFL), time.monotonic()
        again = self._first and now > self._first + SAME_SECONDS
        if again or os.getpid() != self._pid:
            signal.signal(number, found)
            os.kill(os.getpid(), number)
            return
        self._first = self._first or now
        self._last_step.wanted = True
        if callable(found):
            found(number, frame)


def stop() -> None:
    """Have all ranks stop after the same step: ``sync.stop_requested`` becomes True there. Any rank may call it, at any
    time; harmless when repeated.

    Raises:
        NotInitialized: ``hb.init()`` is missing.
    """
    runtime.current().monitor.last_step.wanted = True


def stop_on_signals(signals: Iterable[int] = SIGNALS) -> None:
    """Have signals do what :func:`stop` does: SIGTERM (a scheduler's end, an evicted pod, a spot notice) and SIGUSR1
    (Slurm's ``--signal=USR1@120``). A second signal ends the process as ever. ``sync.stop_requested`` does this when it
    is read first; scripts that never ask keep their handlers. Only the main thread can install them; elsewhere nothing
    happens.

    Raises:
        NotInitialized: ``hb.init()`` is missing.
    """
    session = runtime.current()
    handlers = session.opened.get("stopping")
    if handlers is None or signals is not SIGNALS:
        if threading.current_thread() is not threading.main_thread():
            log.debug("stop_on_signals: not in the main thread, which alone can install handlers")
            return
        if handlers is None:
            handlers = session.opened["stopping"] = Handlers(session.monitor.last_step)
            runtime.at_shutdown(handlers.remove)
        handlers.install(signals)
