"""Whether this thread captures a flow as a CUDA graph, and the error for what a graph cannot replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NotCapturable(Exception):
    """The flow cannot run as a graph. The message says why."""


class _Captures(threading.local):
    active = False


_captures = _Captures()


@contextmanager
def capturing() -> Iterator[None]:
    """Refuse in this thread, within the block, what :func:`refuse_in_capture` guards."""
    _captures.active = True
    try:
        yield
    finally:
        _captures.active = False


def in_capture() -> bool:
    """Return whether this thread captures a flow."""
    return _captures.active


def refuse_in_capture(what: str) -> None:
    """Check that this thread does not capture a flow, whose operations give no values before its replay.

    Raises:
        NotCapturable: the thread captures a flow; the message says that it needs ``what``.
    """
    if _captures.active:
        raise NotCapturable(f"it needs {what}")
