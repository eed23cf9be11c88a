"""Requests for a stop on which all ranks agree. ``sync.stop_requested`` is True after the last step.

Rules:

1. A handler makes one assignment. The monitor's thread informs the helper process within a tenth of a second.
2. Handlers are chained: each calls the handler that it replaced. A second signal acts as it would without ours. One
   that follows at once counts as the first: a launcher passes on a signal that the whole process group got, too.
3. In a forked process (a DataLoader's worker), and after the session is closed, signals act as they would without ours.
4. A signal of faulthandler's (``faulthandler.register(SIGUSR1)``) is left alone, because it cannot be chained to.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from hvdbridge.supervisor.last_step import LastStep
from hvdbridge.training import runtime

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
        self._closed = False

    def install(self, signals: Iterable[int]) -> None:
        for number in signals:
            if number in self._found:
                continue
            if dumps_stacks(number):
                log.warning("%s is faulthandler's, and stops nothing", signal.Signals(number).name)
                continue
            self._found[number] = signal.signal(number, self._handle) or signal.SIG_DFL

    def remove(self) -> None:
        """Put the earlier handlers back, at the session's end. A handler that another one has replaced stays, and only
        calls the earlier one; in other threads than the main one all stay."""
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number, found in self._found.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, found)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        found, now = self._found[number], time.monotonic()
        again = self._first and now > self._first + SAME_SECONDS
        if again or self._closed or os.getpid() != self._pid:
            if callable(found):
                found(number, frame)
            elif found == signal.SIG_DFL:
                signal.signal(number, found)
                os.kill(os.getpid(), number)
            return
        self._first = self._first or now
        self._last_step.wanted = True
        if callable(found):
            found(number, frame)


class _Place(ctypes.Structure):
    """Dl_info of dladdr(3): the file that holds an address."""

    _fields_ = [
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p),
    ]  # fmt: skip


def dumps_stacks(number: int) -> bool:
    """Whether ``faulthandler`` handles the signal: its handler is Python's own, in C, so the module ``signal`` does not
    show it. MPICH's handler for SIGUSR1 reports ranks that died, which the monitor does, and may be replaced.
    """
    if signal.getsignal(number) != signal.SIG_DFL or not sys.platform.startswith("linux"):
        return False
    libc, action, place = ctypes.CDLL(None), (ctypes.c_void_p * 64)(), _Place()
    libc.sigaction(int(number), None, action)  # the handler's address comes first
    found = libc.dladdr(ctypes.c_void_p(action[0]), ctypes.byref(place)) if action[0] else 0
    return bool(found) and b"python" in (place.file or b"").rpartition(b"/")[2]


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
            session.at_shutdown(handlers.remove)
        handlers.install(signals)
