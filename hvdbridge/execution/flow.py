"""Flows that a driver was given: while they wait, while they are under way, and a thread that waits for their
operations."""

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
class Pending(Generic[T]):
    """A flow that was submitted.

    Attributes:
        then: called with the result, in the driver's order; what it raises is the driver's failure.
        overlaps: other flows may be under way meanwhile; else it stands alone.
        rounds: how many collectives the flow asks for at most, where that is known and no other flow changes it
            (``Policy.rounds``): then it runs ahead of its turns.
        at_once: it holds about as much memory as its bucket while it is under way, so at most so many such flows are
            at once; None: any number.
        turns: that it takes as it begins, in rounds with all that are under way.
        brief: one collective, next to nothing to compute before and after it, and nothing shared: it may start in the
            thread that submits it, and end in any.
        awaited: no other is submitted before who submits it waits for its end.
        settled: called once when :meth:`wait` would not block any more, after a failure too.
    """

    flow: Task[T]
    communicator: Communicator
    overlaps: bool = False
    rounds: int | None = None
    at_once: int | None = None
    turns: int = 1
    brief: bool = False
    awaited: bool = False
    then: Callable[[T], None] | None = None
    settled: Callable[[Pending[T]], None] | None = None
    result: T | None = None
    error: BaseException | None = None
    since: float = 0.0  # when its flow last went on
    asked: int = 0  # collectives, so far
    grouped: bool = False  # the last one is that of a group
    ending: bool = False  # it will start no more operations
    done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _bell: threading.Lock = field(default_factory=threading.Lock)  # free when it is done; an Event is ten calls more

    def __post_init__(self) -> None:
        self._bell.acquire()

    @property
    def ahead(self) -> bool:
        """What lies between two of its starts may run before its turn."""
        return self.rounds is not None

    def wait(self) -> T:
        """The flow's result, or the driver's failure raised."""
        with self._bell:
            pass
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Finish; the first call wins (a failure from outside may meet the flow's own end)."""
        with self._lock:
            if self.done:
                return
            self.result, self.error = result, error
            try:
                if self.settled is not None:
                    self.settled(self)
            finally:
                self.done = True
                self._bell.release()


class Answered(Work):
    """Where a flow that does not run ahead waits for its turn, with its answer, and also if that took no operation: so
    what follows comes in one order, also where groups have several sizes."""

    last = True

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


ANSWERED = Answered()


class Run:
    """A flow under way: at a gate (about to start an operation), waiting for one, or ended."""

    def __init__(self, pending: Pending[Any], steps: Generator[Work | None, None, None]) -> None:
        self._pending = pending
        self._steps = steps
        self._work: Work | None = None
        self.announced = False  # somebody waits for the present operation, and will tell
        self.started = self.ended = False
        self.number = 0  # of its present operation, in the order of starts
        self._next()

    @property
    def waits(self) -> bool:
        return self._work is not None

    @property
    def at_gate(self) -> bool:
        return self._work is None and not self.ended

    @property
    def ending(self) -> bool:
        """Its last operation is under way."""
        return self._work is not None and self._pending.ending

    @property
    def heavy(self) -> bool:
        return self._pending.at_once is not None

    @property
    def ahead(self) -> bool:
        return self._pending.ahead

    @property
    def travels(self) -> bool:
        return self._work is not None and self._work is not ANSWERED

    @property
    def shared(self) -> bool:
        return self._work is not None and self._work.shared

    @property
    def wants_looks(self) -> bool:
        """A look may let it go on, or is what moves its operation."""
        settled = self.ending and self._pending.communicator.capabilities.progresses
        return self.travels and not (self.announced or settled)

    def announce(self, waiter: Waiter, wake: Callable[[], None]) -> None:
        """Have ``waiter`` tell when its operation is over, where it can."""
        if self._work is not None and self._work.shared and not self.announced:
            waiter.watch(self._work, wake)
            self.announced = True

    def _next(self, error: Exception | None = None) -> None:
        self.announced = False
        try:
            self._work = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration:
            self._work, self.ended = None, True

    def proceed(self, turn: bool = False, block: bool = False) -> bool:
        """Go on to the next gate, the answer that only a ``turn`` hands over, or the end, as far as that needs no
        waiting unless ``block``. Whether it moved."""
        moved = False
        while self._work is not None and (turn or self._work is not ANSWERED):
            try:
                if not (block or self._work.done()):
                    break
            except Exception as error:  # the flow's, as what its wait() raises is
                self._next(error)
            else:
                self._next()
            moved = True
        return moved

    def go_on(self, seconds: float) -> None:
        """Start its operations and wait for them, as far as that takes no longer."""
        end = time.perf_counter() + seconds
        while not self.ended:
            if self._work is None:
                self.start()
                continue
            try:
                if not self._work.over_within(end - time.perf_counter()):
                    break
            except Exception as error:  # the flow's, as in proceed(): not every library tells twice
                self._next(error)
            else:
                self.proceed(turn=True, block=True)

    def start(self) -> bool:
        """From a gate: start the operation, pass a request that has none, or end. Whether that was all of the turn."""
        self.started = True
        asked = self._pending.asked
        if self.at_gate:
            self.number = next(STARTS)
        while self._work is None and not self.ended and self._pending.asked == asked:
            self._next()
        return self._work is None or self._work.last or not self._pending.grouped


class Waiter:
    """Waits for operations in a thread of its own, in the order in which they started and so should end, and after each
    calls what is to follow it."""

    def __init__(self) -> None:
        self._works: Mailbox[tuple[Work, Callable[[], None]] | None] = Mailbox()
        self._thread: threading.Thread | None = None

    def watch(self, work: Work, then: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="hvdbridge-waiter", daemon=True)
            self._thread.start()
        self._works.put((work, then))

    def close(self) -> None:
        """When all that it watches is over."""
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
