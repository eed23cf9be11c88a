"""A queue from any threads to one.

Not ``queue.SimpleQueue``, which may take a short timeout for none: after a look in vain CPython 3.11 goes on with what
is left of it, and a negative number means for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """
    >>> box: Mailbox[str] = Mailbox()
    >>> box.put("a")
    >>> box.get(), box.get(timeout=0.001)
    ('a', None)
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, item: T) -> None:
        self._items.append(item)
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def get(self, timeout: float | None = None) -> T | None:
        """The oldest item; None: there was none in ``timeout`` seconds (None: without limit)."""
        while not self._items:
            if not self._bell.acquire(timeout=-1 if timeout is None else timeout):
                break
        return self._items.popleft() if self._items else None
