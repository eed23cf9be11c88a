"""How a rank ends, and how the others hear of it.

Rules:

1. An uncaught exception: traceback as usual, report, ``os._exit``. An MPI rank that leaves by exception
   otherwise waits in MPI_Finalize for ranks that wait for it.
2. ``sys.exit(n)`` with n not 0: a failure, and the process ends with n.
3. The end of the script without shutdown: ``leave()``; a failure only if others wait for this rank.
4. ``os._exit`` and signals: the connection ends, the helper sees it. No hook is needed.
5. Hooks chain to those they found, act in this process only (not in forked children), and are taken back.

No hook of Python has the exit status. ``sys.exit`` (and site's ``exit``, ``quit``) is
replaced by one that raises a SystemExit of our own; the interpreter drops that object when no frame is left,
which tells an exit from one that was caught. A bare ``raise SystemExit(3)`` is not seen, nor the status in
``sys.exit(main())`` where main calls hb.init: Python looks sys.exit up before. The rank then leaves as if by 3., with
its own status unless others wait for it.
"""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hvdbridge.errors import HvdbridgeError

if TYPE_CHECKING:
    from hvdbridge.supervisor.client import Monitor

Status = object
"""What sys.exit takes: None, an int, or something to print (status 1)."""


def end_process(status: int, text: str = "") -> NoReturn:
    """Flush, say why, and end without atexit: nothing below may wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if text:
        with suppress(OSError):
            os.write(2, f"hvdbridge: {text}\n".encode())
    os._exit(status)


class ExitHooks:
    """The hooks of one monitor: :meth:`install`, later :meth:`remove`."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._pid = os.getpid()
        self._status: Status = None
        self._replaced: list[tuple[Any, str, object, object]] = []  # (where, name, found, ours)
        self._stale_error = _last_error()

    def install(self) -> None:
        hooks = self

        class Exit(SystemExit):
            def __del__(self) -> None:
                try:
                    sys._getframe(1)
                except ValueError:  # no caller: the interpreter ends with this object
                    if threading.current_thread() is threading.main_thread():
                        hooks._status = self.code

        def exit(status: Any = None, /) -> NoReturn:
            raise Exit(status)

        self._replace(sys, "excepthook", self._excepthook(sys.excepthook))
        for where, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(where, name):
                self._replace(where, name, exit)
        atexit.register(self._at_exit)

    def remove(self) -> None:
        for where, name, found, ours in reversed(self._replaced):
            if getattr(where, name) is ours:  # else somebody chained to it; it then only passes on
                setattr(where, name, found)
        self._replaced.clear()
        atexit.unregister(self._at_exit)

    def _replace(self, where: Any, name: str, ours: object) -> None:
        self._replaced.append((where, name, getattr(where, name), ours))
        setattr(where, name, ours)

    def _excepthook(self, previous: Callable[..., Any]) -> Callable[..., None]:
        def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            previous(kind, error, traceback)
            if self._replaced and os.getpid() == self._pid:
                self._fail(error)

        return hook

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        error = _last_error()
        if error is not None and error is not self._stale_error:  # somebody else's excepthook did not chain to ours
            self._fail(error)
        if self._status is None or self._status == 0:
            self._monitor.leave()
        else:
            status = self._status if isinstance(self._status, int) else 1
            self._fail(SystemExit(self._status), status & 0xFF or 1)

    def _fail(self, error: BaseException, status: int = 1) -> NoReturn:
        first = self._monitor.report(error)
        self._monitor.let_origin_end()
        shown = isinstance(error, HvdbridgeError) and str(first) == str(error)
        end_process(status, "" if first is error or shown else f"rank {self._monitor.rank} ends: {first}")


def _last_error() -> BaseException | None:
    """The exception that the interpreter printed last, if it did."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
