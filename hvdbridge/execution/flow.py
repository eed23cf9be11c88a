"""Flows that were submitted to a scheduler, their progress, and the thread that waits for their operations."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.execution.mailbox import Mailbox
from hvdbridge.policy.collectives import Collective

T = TypeVar("T")
Task = Generator[Collective, Tensor, T]

STARTS = itertools.count()


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
        then: called with the result, in the scheduler's order. What it raises is the scheduler's failure.
        settled: called once, when :meth:`wait` would no longer block, after a failure, too.
        result: what the flow returned.
        error: why it did not return.
        done: one of the two is known.
    """

    flow: Task[T]
    communicator: Communicator
    rounds: int | None = None
    inline: bool = False
    awaited: bool = False
    then: Callable[[T], None] | None = None
    settled: Callable[[Submission[T]], None] | None = None
    result: T | None = None
    error: BaseException | None = None
    done: bool = False
    asked: int = 0  # collectives, so far
    since: float = 0.0  # when the flow last went on
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


class Run:
    """A flow in flight: about to issue a collective, waiting for an operation of one, or ended.

    Attributes:
        turn: the scheduler's turn at which the flow issues its next collective.
        work: the operation that the flow waits for; None where the flow is about to start one, or has ended.
        number: that of the operation, in the order of starts.
        issued: the flow has issued a collective.
        ended: the flow came to its end.
        announced: the waiter watches :attr:`work`.
        open: submitters count on it to issue more.
    """

    def __init__(
        self, submission: Submission[Any], steps: Generator[Work | None, None, None], turn: int = 0, width: int = 0
    ) -> None:
        self.submission, self.turn = submission, turn
        self.work: Work | None = None
        self.number = 0
        self.issued = self.ended = self.announced = False
        self.open = True
        self._steps, self._width = steps, width
        self._next()

    @property
    def last(self) -> bool:
        """The flow starts no more operations."""
        sub = self.submission
        return self.ended or (self.work is not None and self.work.last and sub.asked == sub.rounds)

    def issue(self) -> None:
        """Start the next operation of the flow's collective. The turn is over with the collective's last operation,
        and where the collective needs none."""
        self.issued, self.number = True, next(STARTS)
        asked = self.submission.asked
        while self.work is None and not self.ended and self.submission.asked == asked:
            self._next()
        if self.work is None or self.work.last:
            self.turn += self._width

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
                self.proceed(block=True)

    def _next(self, error: Exception | None = None) -> None:
        self.announced = False
        try:
            self.work = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration:
            self.work, self.ended = None, True


class Waiter:
    """A thread that waits for operations, in the order of their starts, and calls a function after each."""

    def __init__(self) -> None:
        self._works: Mailbox[tuple[Work, Callable[[], None]] | None] = Mailbox()
        self._thread: threading.Thread | None = None

    def watch(self, work: Work, then: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="hvdbridge-waiter", daemon=True)
            self._thread.start()
        self._works.put((work, then))

    def close(self) -> None:
        """Called when everything that was watched is over."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        while (given := self._works.get()) is not None:
            work, then = given
            with suppress(Exception):  # raised again where the flow waits
                work.wait()
            then()
            del given, work, then  # else they would live on until the next one
