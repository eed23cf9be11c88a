"""Flows that were submitted to a scheduler, their progress, and the threads' queues.

Rules:

1. A flow in flight is about to issue a collective, waits for an operation of one, or has ended.
2. One thread at a time advances a flow: the submitting thread, and from the hand-over on the scheduler's.
3. A :class:`Mailbox` is not ``queue.SimpleQueue``, which may take a short timeout for none: after a look in vain
   CPython 3.11 goes on with what is left of it, and a negative number means for ever.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.policy.collectives import Collective

T = TypeVar("T")
Task = Generator[Collective, Tensor, T]
Steps = Generator[Work | None, None, None]

STARTS = itertools.count()


class Mailbox(Generic[T]):
    """A queue from any threads to one.

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


@dataclass(eq=False)
class Submission(Generic[T]):
    """A flow for a scheduler.

    Attributes:
        flow: yields collectives, is sent their answers, and returns the result.
        communicator: executes the collectives.
        rounds: the most collectives that the flow asks for, where it shares no state with other flows
            (:attr:`Policy.rounds <hvdbridge.Policy.rounds>`). None: no other flow is in flight meanwhile.
        inline: the flow is one collective in the memory of its bucket, with next to no computation. It may start in the
            submitting thread, and any number of such flows may be in flight.
        awaited: the submitting thread waits for the flow before it submits another one.
        settled: called once, when :meth:`wait` would no longer block, after a failure, too.
        result: what the flow returned.
        error: why it did not return.
        done: one of the two is known.
        event: of the submitting CUDA stream; the flow begins behind it.
        steps: the scheduler's steps through the flow; None: it has not begun.
        turn: the scheduler's turn at which the flow issues its next collective, ``width`` turns after the one before.
        work: the operation that the flow waits for; None where the flow is about to start one, or has ended.
        number: that of the operation, in the order of starts.
        issued: the flow has issued a collective.
        ended: the flow came to its end.
        spent: the last operation of the flow's last collective has started.
        announced: the waiter watches :attr:`work`.
        asked: how many collectives the flow has asked for.
        since: when the flow last went on.
    """

    flow: Task[T]
    communicator: Communicator
    rounds: int | None = None
    inline: bool = False
    awaited: bool = False
    settled: Callable[[Submission[T]], None] | None = None
    result: T | None = None
    error: BaseException | None = None
    done: bool = False
    event: Any = None
    steps: Steps | None = None
    turn: int = 0
    width: int = 0
    work: Work | None = None
    number: int = 0
    issued: bool = False
    ended: bool = False
    spent: bool = False
    announced: bool = False
    asked: int = 0
    since: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: threading.Lock = field(default_factory=threading.Lock)  # an Event would be ten calls more

    def __post_init__(self) -> None:
        self._pending.acquire()

    def wait(self) -> T:
        """The flow's result.

        Raises:
            BaseException: the scheduler's failure.
        """
        with self._pending:
            pass
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """End the wait. The first call counts: a failure from outside may meet the flow's own end."""
        with self._lock:
            if self.done:
                return
            self.result, self.error = result, error
            try:
                if self.settled is not None:
                    self.settled(self)
            finally:
                self.done = True
                self._pending.release()

    @property
    def last(self) -> bool:
        """The flow starts no more operations; from any thread."""
        return self.ended or self.spent

    def begin(self, steps: Steps, turn: int = 0, width: int = 0) -> None:
        """Compute up to the first collective."""
        self.steps, self.turn, self.width = steps, turn, width
        self._next()

    def issue(self) -> None:
        """Start the next operation of the flow's collective. The turn is over with the collective's last operation,
        and where the collective needs none."""
        self.issued, self.number = True, next(STARTS)
        asked = self.asked
        while self.work is None and not self.ended and self.asked == asked:
            self._next()
        if self.work is None or self.work.last:
            self.turn += self.width
            self.spent = self.work is not None and self.asked == self.rounds

    def proceed(self, block: bool = False) -> bool:
        """Compute on if the operation is over, which is waited for if ``block``. Whether the flow moved."""
        if self.work is None:
            return False
        try:
            if not (block or self.work.done()):
                return False
        except Exception as error:  # the flow's, as what wait() raises is
            self._next(error)
        else:
            self._next()
        return True

    def run_for(self, seconds: float) -> None:
        """Issue, wait and compute to the end, as far as that takes no longer."""
        end = time.perf_counter() + seconds
        while not self.ended:
            if self.work is None:
                self.issue()
                continue
            try:
                if not self.work.over_within(end - time.perf_counter()):
                    break
            except Exception as error:  # as in proceed(); not every library raises twice
                self._next(error)
            else:
                self._next()

    def _next(self, error: Exception | None = None) -> None:
        assert self.steps is not None
        self.announced, self.work = False, None
        try:
            self.work = next(self.steps) if error is None else self.steps.throw(error)
        except StopIteration:
            self.ended = True


class Waiter:
    """A thread that waits for operations, in the order of their starts, and calls a function after each."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._works: Mailbox[Work | None] = Mailbox()
        self._thread: threading.Thread | None = None

    def watch(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="hvdbridge-waiter", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        """Called when everything that was watched is over."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        while (work := self._works.get()) is not None:
            with suppress(Exception):  # raised again where the flow waits
                work.wait()
            self._then()
            del work  # else it would live on until the next one
