"""A flow that was submitted to a scheduler, with its progress; a queue between threads; a thread that waits.

Rules:

1. A flow in flight is about to issue a collective, waits for an operation of one, or has ended.
2. One thread at a time advances a flow: the submitting thread until it hands the flow over, then the scheduler's.
3. :class:`Mailbox` replaces ``queue.SimpleQueue``, whose ``get`` in CPython 3.11 may block forever with a short
   timeout: it recomputes the remaining time, and treats a negative one as no timeout.
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
Task = Generator[Collective, Tensor, T]  # a flow with a result of any type
Steps = Generator[Work | None, None, None]
"""The asynchronous library calls ("operations") of a flow, of which a collective may take several: None before each
starts, then its handle."""

START_NUMBERS = itertools.count()  # of operations, in all schedulers of the process


class Mailbox(Generic[T]):
    """A queue that any thread puts items into, and one thread gets them from.

    >>> box: Mailbox[str] = Mailbox()
    >>> box.put("a")
    >>> box.get(), box.get(timeout=0.001)
    ('a', None)
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._available = threading.Lock()  # released by put(), acquired by the thread that waits
        self._available.acquire()

    def put(self, item: T) -> None:
        """Append an item. May be called by any thread."""
        self._items.append(item)
        with suppress(RuntimeError):  # released already
            self._available.release()

    def get(self, timeout: float | None = None) -> T | None:
        """Return the oldest item, or None if there is none within ``timeout`` seconds (None: no limit)."""
        while not self._items:
            if not self._available.acquire(timeout=-1 if timeout is None else timeout):
                break
        return self._items.popleft() if self._items else None


@dataclass(eq=False)
class Submission(Generic[T]):
    """A flow that was submitted to a scheduler, and its progress.

    Attributes:
        flow: generator that yields collectives, receives their answers, and returns the result.
        communicator: executes the collectives.
        rounds: maximum number of collectives of the flow, which then shares no state with other flows
            (:attr:`Policy.rounds <hvdbridge.Policy.rounds>`). None: not declared, so the flow runs alone.
        inline: the flow is one collective in its bucket's memory, with almost no computation. It may start in the
            submitting thread, and any number of such flows may be in flight.
        awaited: the submitting thread waits for the flow before it submits another one.
        on_settled: called once with the submission when its result or error is known, before :meth:`wait` returns.
        result: the value that the flow returned.
        error: the failure because of which the flow has no result.
        done: the flow has a result or an error.
        event: CUDA event of the submitting stream, for which the flow's stream waits first.
        steps: generator by which the scheduler runs the flow; None: the flow has not begun.
        turn: the scheduler's turn at which the flow issues its next collective.
        turn_interval: number of turns between two collectives of the flow.
        work: the operation that the flow waits for; None if the flow is about to start one, or has ended.
        start_number: position of the operation in the order in which all operations started.
        issued: the flow has issued a collective.
        ended: the flow has ended.
        exhausted: the last operation of the last declared collective has started.
        watched: a :class:`Waiter` waits for :attr:`work`.
        requested: number of collectives that the flow has requested.
        resumed_at: time at which the flow last continued.
    """

    flow: Task[T]
    communicator: Communicator
    rounds: int | None = None
    inline: bool = False
    awaited: bool = False
    on_settled: Callable[[Submission[T]], None] | None = None
    result: T | None = None
    error: BaseException | None = None
    done: bool = False
    event: Any = None
    steps: Steps | None = None
    turn: int = 0
    turn_interval: int = 0
    work: Work | None = None
    start_number: int = 0
    issued: bool = False
    ended: bool = False
    exhausted: bool = False
    watched: bool = False
    requested: int = 0
    resumed_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: threading.Lock = field(default_factory=threading.Lock)  # held until settled; cheaper than an Event

    def __post_init__(self) -> None:
        self._pending.acquire()

    def wait(self) -> T:
        """Wait for the flow and return its result.

        Raises:
            BaseException: the scheduler's failure.
        """
        with self._pending:
            pass
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Set the result or the error, and end :meth:`wait`. Only the first call has an effect, because the scheduler
        may fail while the flow ends."""
        with self._lock:
            if self.done:
                return
            self.result, self.error = result, error
            try:
                if self.on_settled is not None:
                    self.on_settled(self)
            finally:
                self.done = True
                self._pending.release()

    @property
    def starts_no_more(self) -> bool:
        """True if the flow starts no more operations. May be read by any thread."""
        return self.ended or self.exhausted

    def begin(self, steps: Steps, turn: int = 0, turn_interval: int = 0) -> None:
        """Run the flow up to its first collective, which it issues at ``turn``."""
        self.steps, self.turn, self.turn_interval = steps, turn, turn_interval
        self._resume()

    def issue(self) -> None:
        """Start the next operation of the flow's collective.

        The turn ends with the last operation of the collective, or if the collective needs no operation.
        """
        self.issued, self.start_number = True, next(START_NUMBERS)
        requested = self.requested
        while self.work is None and not self.ended and self.requested == requested:
            self._resume()
        if self.work is None or self.work.last:
            self.turn += self.turn_interval
            self.exhausted = self.work is not None and self.requested == self.rounds

    def proceed(self, block: bool = False) -> bool:
        """Continue the flow if its operation is over; with ``block``, wait for the operation. Returns whether it
        continued."""
        if self.work is None:
            return False
        try:
            if not (block or self.work.done()):
                return False
        except Exception as error:  # belongs to the flow, as an error of wait() does
            self._resume(error)
        else:
            self._resume()
        return True

    def run_for(self, seconds: float) -> None:
        """Run the flow to its end in this thread, or until an operation is not over in time."""
        end = time.perf_counter() + seconds
        while not self.ended:
            if self.work is None:
                self.issue()
                continue
            try:
                if not self.work.wait_at_most(end - time.perf_counter()):
                    break
            except Exception as error:  # as in proceed(): not every library raises its error again
                self._resume(error)
            else:
                self._resume()

    def _resume(self, error: Exception | None = None) -> None:
        """Run the flow to its next operation, or its end. An ``error`` of the last operation is thrown into it."""
        assert self.steps is not None
        self.watched, self.work = False, None
        try:
            self.work = next(self.steps) if error is None else self.steps.throw(error)
        except StopIteration:
            self.ended = True


class Waiter:
    """A thread that waits for operations, in the order of :meth:`watch`, and calls ``then`` after each."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._works: Mailbox[Work | None] = Mailbox()
        self._thread: threading.Thread | None = None

    def watch(self, work: Work) -> None:
        """Wait for ``work`` after the operations that are watched already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="hvdbridge-waiter", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        """End the thread, once all watched operations are over."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        while (work := self._works.get()) is not None:
            with suppress(Exception):  # the scheduler's own wait raises it again
                work.wait()
            self._then()
            del work  # frees its memory before the next one arrives
