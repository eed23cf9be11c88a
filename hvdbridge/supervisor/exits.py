"""Hooks that report the end of a rank's process to the other ranks.

Rules:

1. After an uncaught exception the process prints its traceback as usual, reports the failure and calls ``os._exit``.
   Otherwise an MPI rank would wait in MPI_Finalize for ranks that wait for it.
2. ``sys.exit(n)`` with n not 0 is a failure. The process ends with status n.
3. At the end of the script without shutdown the process calls ``leave()``. This is a failure only if other ranks wait
   for this rank.
4. ``os._exit`` and signals need no hook: the connection ends, and the helper detects it.
5. Hooks call the hooks that they replace, act in this process only (not in forked children), and can be removed.

Python passes the exit status to no hook. So ``sys.exit`` (and ``exit`` and ``quit`` of the site module) is replaced by
a function that raises a subclass of SystemExit. The interpreter deletes this exception when no frame is left, which
separates an exit from an exception that the script caught. The hooks do not detect a bare ``raise SystemExit(3)``, nor
the status in ``sys.exit(main())`` if main calls hb.init, because Python looks up sys.exit first. The rank then leaves
by rule 3, with its own status unless other ranks wait for it.
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
"""Argument of sys.exit: None, an int, or an object that is printed (status 1)."""


def end_process(status: int, text: str = "") -> NoReturn:
    """Flush, print ``text`` to stderr, and end without atexit hooks, which could wait for ranks that have ended."""
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
        self._replaced: list[tuple[Any, str, object, object]] = []  # (owner, name, original, replacement)
        self._error_at_start = _last_error()

    def install(self) -> None:
        hooks = self

        class Exit(SystemExit):
            def __del__(self) -> None:
                try:
                    sys._getframe(1)
                except ValueError:  # no caller: the interpreter ends with this exception
                    if threading.current_thread() is threading.main_thread():
                        hooks._status = self.code

        def exit(status: Any = None, /) -> NoReturn:
            raise Exit(status)

        self._replace(sys, "excepthook", self._excepthook(sys.excepthook))
        for owner, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(owner, name):
                self._replace(owner, name, exit)
        atexit.register(self._at_exit)

    def remove(self) -> None:
        for owner, name, original, replacement in reversed(self._replaced):
            if getattr(owner, name) is replacement:  # else another hook calls ours, which then only forwards
                setattr(owner, name, original)
        self._replaced.clear()
        atexit.unregister(self._at_exit)

    def _replace(self, owner: Any, name: str, replacement: object) -> None:
        self._replaced.append((owner, name, getattr(owner, name), replacement))
        setattr(owner, name, replacement)

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
        if error is not None and error is not self._error_at_start:  # another excepthook did not call ours
            self._fail(error)
        if self._status is None or self._status == 0:
            self._monitor.leave()
        else:
            status = self._status if isinstance(self._status, int) else 1
            self._fail(SystemExit(self._status), status & 0xFF or 1)

    def _fail(self, error: BaseException, status: int = 1) -> NoReturn:
        """Report ``error`` as this rank's failure and end the process."""
        first = self._monitor.report(error)
        self._monitor.wait_for_origin()
        text = f"rank {self._monitor.rank} ends: {first}"
        if isinstance(error, SystemExit):  # printed here too: a launcher may kill the other ranks before they print it
            text = f"rank {self._monitor.rank} ends: it left with sys.exit({error.code!r})" if first is error else text
        elif first is error or (isinstance(error, HvdbridgeError) and str(first) == str(error)):
            text = ""  # the traceback has been printed
        end_process(status, text)


def _last_error() -> BaseException | None:
    """Return the exception that the interpreter has printed last, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
