"""Stop all ranks after the same step, on request of any rank or signal; see ``sync.stop_requested``.

Rules:

1. A handler makes one assignment. The monitor's thread informs the helper process within a tenth of a second.
2. Handlers are chained: each calls the handler that it replaced. A second signal acts as it would without ours, but not
   one that follows at once: a launcher forwards a signal that the whole process group has received, too.
3. In a forked process (a DataLoader's worker) and after the session is closed, signals act as they would without ours.
4. A signal of faulthandler's (``faulthandler.register(SIGUSR1)``) is not handled, because its handler cannot be called.
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
DUPLICATE_SECONDS = 0.5
log = logging.getLogger("hvdbridge")


class Handlers:
    """The signal handlers of one session."""

    def __init__(self, last_step: LastStep) -> None:
        self._last_step = last_step
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()
        self._first_time = 0.0
        self._closed = False

    def install(self, signals: Iterable[int]) -> None:
        for number in signals:
            if number in self._previous:
                continue
            if dumps_stacks(number):
                log.warning("%s is faulthandler's, and stops nothing", signal.Signals(number).name)
                continue
            self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL

    def remove(self) -> None:
        """Restore the previous handlers at the end of the session; from other threads than the main one, none.

        A handler that was replaced by another stays installed, and from now on only calls the previous one.
        """
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous, now = self._previous[number], time.monotonic()
        repeated = self._first_time and now > self._first_time + DUPLICATE_SECONDS
        if repeated or self._closed or os.getpid() != self._pid:
            if callable(previous):
                previous(number, frame)
            elif previous == signal.SIG_DFL:
                signal.signal(number, previous)
                os.kill(os.getpid(), number)
            return
        self._first_time = self._first_time or now
        self._last_step.wanted = True
        if callable(previous):
            previous(number, frame)


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dladdr(3): the file that contains an address."""

    _fields_ = [
        ("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p),
    ]  # fmt: skip


def dumps_stacks(number: int) -> bool:
    """Return whether ``faulthandler`` handles the signal.

    Its handler is a C function in Python's library, which the module ``signal`` does not show. Other C handlers may be
    replaced: MPICH's for SIGUSR1 reports failed ranks, which the monitor does, too.
    """
    if signal.getsignal(number) != signal.SIG_DFL or not sys.platform.startswith("linux"):
        return False
    libc, action, info = ctypes.CDLL(None), (ctypes.c_void_p * 64)(), _DlInfo()
    libc.sigaction(int(number), None, action)  # the first member is the handler's address
    resolved = libc.dladdr(ctypes.c_void_p(action[0]), ctypes.byref(info)) if action[0] else 0
    return bool(resolved) and b"python" in (info.path or b"").rpartition(b"/")[2]


def stop() -> None:
    """Stop all ranks after the same step, at which ``sync.stop_requested`` becomes True.

    Any rank may call this at any time. Harmless when repeated.

    Raises:
        NotInitialized: ``hb.init()`` was not called.
    """
    runtime.current().monitor.last_step.wanted = True


def stop_on_signals(signals: Iterable[int] = SIGNALS) -> None:
    """Install handlers that call :func:`stop` at SIGTERM and SIGUSR1, or at ``signals``.

    Job schedulers send SIGTERM before they end or evict a job, and Slurm sends SIGUSR1 with ``--signal=USR1@120``. A
    second signal has its usual effect. The first read of ``sync.stop_requested`` calls this function; scripts without
    one keep their handlers. Outside the main thread, which alone can install handlers, this has no effect.

    Raises:
        NotInitialized: ``hb.init()`` was not called.
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
