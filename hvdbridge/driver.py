"""Runs flows on a communicator, in one order that is the same on every rank.

Rules:

1. One issuer: only the driver starts gradient collectives, on its own communicator, so that a user's
   collectives cannot interleave with them.
2. Canonical order, never arrival or completion order: flows run in the order of :meth:`Driver.submit`,
   which callers make the order of bucket indices; one is finished before the next begins.
3. Where the backend blocks the host, one daemon thread runs the flows, first in, first out, one future per
   flow; ``no_grad`` and the CUDA device are set inside the thread (both belong to a thread), and a flow begins
   behind an event of the stream that submitted it.
4. Where the backend enqueues (NCCL), flows run at once, on one side stream that waits for the current one;
   a future carries the stream's event and nobody waits on the host.
5. The first failure poisons the driver: all pending and later flows fail with the same cause. A collective
   is never skipped. An exception is thrown into the waiting flow, so the traceback shows the policy's line.
6. With HVDBRIDGE_DEBUG=1 the signature of each collective is compared across ranks before it starts, under a
   running number, through the job's helper and never by a collective.

Completion callbacks (``future.then``) are not used to chain rounds: they run in another order on each rank.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hvdbridge.collectives import Collective
from hvdbridge.communicators.base import Communicator
from hvdbridge.errors import HvdbridgeError, NotInitialized

T = TypeVar("T")
Task = Generator[Collective, Tensor, T]
Check = Callable[[int, str], None]


def drive(flow: Task[T], execute: Callable[[Collective], Tensor]) -> T:
    """Run one flow to its end: execute what it yields, send back the answer, return what it returns.

    >>> from hvdbridge.collectives import AllReduce
    >>> def double():
    ...     total = yield AllReduce(torch.ones(2))
    ...     return total + total
    >>> drive(double(), lambda request: request.tensor * 4)
    tensor([8., 8.])
    """
    try:
        request = next(flow)
        while True:
            try:
                answer = execute(request)
            except Exception as error:
                request = flow.throw(error)
            else:
                request = flow.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@dataclass
class Traffic:
    """What one communicator carried since it was last reset."""

    collectives: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class Pending(Generic[T]):
    """A flow that was submitted.

    Attributes:
        then: called with the result, in the driver's order; what it raises is the driver's failure.
        settled: called once when :meth:`wait` would not block any more, after a failure too.
    """

    flow: Task[T]
    communicator: Communicator
    then: Callable[[T], None] | None = None
    settled: Callable[[Pending[T]], None] | None = None
    result: T | None = None
    error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> T:
        """The flow's result, or the driver's failure raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Finish; the first call wins (a failure from outside may meet the flow's own end)."""
        with self._lock:
            if self.done:
                return
            self.result, self.error = result, error
            if self.settled is not None:
                self.settled(self)
            self._done.set()


class Driver:
    """Base: books, checks and poison; see :class:`ThreadDriver` and :class:`StreamDriver`."""

    def __init__(self, check: Check | None = None) -> None:
        self.traffic = Traffic()
        self.failure: BaseException | None = None
        self._check = check
        self._number = 0

    def submit(self, pending: Pending[T]) -> Pending[T]:
        """Run a flow on its communicator after all that was submitted before; returns ``pending``.

        Raises:
            BaseException: the failure of an earlier flow.
        """
        raise NotImplementedError

    def run(self, flow: Task[T], communicator: Communicator) -> T:
        """Submit and wait."""
        result = self.submit(Pending(flow, communicator)).wait()
        self.order()
        return result

    def order(self) -> None:
        """Let what the caller enqueues from now on see the results of the flows that were waited for."""

    def fail(self, cause: BaseException) -> None:
        """Poison: pending flows that have not begun, and all later ones, fail with ``cause``."""
        if self.failure is None:
            self.failure = cause

    def close(self) -> None:
        """Let what was submitted finish, then take no more. Harmless when repeated."""
        self.fail(NotInitialized("this synchronizer was closed, by close() or hb.shutdown(); construct a new one"))

    def _run(self, pending: Pending[Any]) -> None:
        communicator = pending.communicator

        def execute(request: Collective) -> Tensor:
            if self.failure is not None:
                raise self.failure
            if self._check is not None:
                self._number += 1
                self._check(self._number, request.signature())
            self.traffic.collectives += 1
            self.traffic.bytes_sent += request.bytes_sent(communicator.size_of(request.group))
            started = time.perf_counter()
            answer = communicator.execute(request)
            self.traffic.seconds += time.perf_counter() - started
            return answer

        try:
            if self.failure is not None:
                raise self.failure
            result = drive(pending.flow, execute)
            if pending.then is not None:
                pending.then(result)
        except BaseException as error:  # whatever it is belongs to the caller of backward(), not to this thread
            self.fail(error)
            pending.settle(error=self.failure)
        else:
            pending.settle(result)


class ThreadDriver(Driver):
    """For backends whose collectives block the host."""

    def __init__(self, check: Check | None = None, device: torch.device | None = None) -> None:
        super().__init__(check)
        self._device = device if device is not None and device.type == "cuda" else None
        self._queue: queue.SimpleQueue[tuple[Pending[Any], Any] | None] = queue.SimpleQueue()
        self._open: set[Pending[Any]] = set()  # submitted and perhaps not done; what fail() must not leave waiting
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="hvdbridge-driver", daemon=True)
        self._thread.start()

    def submit(self, pending: Pending[T]) -> Pending[T]:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._open.add(pending)
        event = None if self._device is None else torch.cuda.current_stream(self._device).record_event()
        self._queue.put((pending, event))
        return pending

    def fail(self, cause: BaseException) -> None:
        with self._lock:
            super().fail(cause)
            left = list(self._open)
        for pending in left:  # one may be stuck in the library below: nobody waits for it
            pending.settle(error=self.failure)

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            if self.failure is None:
                self._thread.join()
        super().close()

    @torch.no_grad()
    def _loop(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (item := self._queue.get()) is not None:
            pending, event = item
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            self._run(pending)
            with self._lock:
                self._open.discard(pending)
            del item, pending  # else the last result would live on until the next step


class StreamDriver(Driver):
    """For NCCL: flows run in the caller's thread and only enqueue, on a side stream of ``device``."""

    def __init__(self, device: torch.device, check: Check | None = None) -> None:
        super().__init__(check)
        self.stream = torch.cuda.Stream(device)

    @torch.no_grad()
    def submit(self, pending: Pending[T]) -> Pending[T]:
        if self.failure is not None:
            raise self.failure
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            self._run(pending)
        return pending

    def order(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def open_driver(communicator: Communicator, device: torch.device, check: Check | None = None) -> Driver:
    """The driver that suits what the communicator declares."""
    if communicator.capabilities.blocks_host:
        return ThreadDriver(check, device)
    if device.type != "cuda":
        raise HvdbridgeError(f"a communicator that enqueues needs a CUDA device, got {device}")
    return StreamDriver(device, check)
