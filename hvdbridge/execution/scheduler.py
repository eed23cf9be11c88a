"""Runs flows on a communicator, in one order that is the same on every rank.

Rules:

1. One issuer: only the scheduler starts gradient collectives, on its own communicator, so that a user's collectives
   cannot interleave with them.
2. Where the backend blocks the host, one thread runs the flows. Flow k (in the order of :meth:`Scheduler.submit`, which
   callers make the order of bucket indices) issues its round j at turn k + j W, the older flow first. W is the largest
   number with (R - 1) W + 1 <= IN_FLIGHT, and at least 1, where R is the number of rounds that the flow declares. So
   the order of issues never depends on what was ready first. A turn lasts until the last operation of the collective
   has started. :meth:`Scheduler.flush` says that no flow follows for now; then the remaining turns need no new flows.
3. A flow that declares no rounds may share state with other flows. It runs alone, behind those before it.
4. Encoding and decoding do not wait for turns: an answer is decoded when it is there, and the next flow is encoded up
   to its first collective, if no more than max(IN_FLIGHT, R) flows are in flight then. A flow whose last operation has
   started takes no more turns.
5. To hand a flow over to the thread costs as much as a small step. So a flow of one collective in its bucket's memory
   (``inline``) starts in the submitting thread, if all flows before it have issued everything; and so does a step's
   only small flow (``awaited``), if no other is in flight. Neither does if signatures are compared, or under autocast,
   which belongs to a thread: the bits must not depend on the thread.
6. Where the backend enqueues (NCCL), flows run at once, on one side stream that waits for the current one.
7. The first failure poisons the scheduler: all pending and later flows fail with the same cause. A collective is never
   skipped. An exception is thrown into the waiting flow, so the traceback shows the policy's line. After a failure
   nothing starts, not even the next operation of a collective, since ranks may come to the failure at several moments.
   In a flush the thread waits for the earliest operation: it comes to an operation that failed before it comes to those
   that other ranks never start.
8. With HVDBRIDGE_DEBUG=1 the signature of each collective is compared across ranks before it starts, under a running
   number, through the job's helper and never by a collective.

Completion callbacks (``future.then``) are not used to chain rounds: they run in another order on each rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Work
from hvdbridge.errors import HvdbridgeError, NotInitialized
from hvdbridge.execution.flow import Mailbox, Steps, Submission, Task, Waiter
from hvdbridge.policy.collectives import Collective, relay, used_here

T = TypeVar("T")
Check = Callable[[int, str], None]


IN_FLIGHT = 3
"""Flows that travel at a time: one is sent, one is decoded, one is encoded."""

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS, LONGEST_IDLE_POLL_SECONDS = 5e-5, 3e-4, 1e-2
"""The first pause between looks at operations, and the longest: each is a quarter longer than the one before. The last
one holds where operations progress by themselves and no other will be issued: each look takes the interpreter's lock
from backward."""

SETTLE_SECONDS = 5e-3
"""Between looks at what is in flight when a script has ended."""

AWAIT_SECONDS = 0.05
"""A submitting thread waits in the library below for so long. Then it hands its flow over, and waits where a failure
that other ranks report ends the wait."""

FLUSH, CLOSE, WAKE = object(), object(), object()


def drive(flow: Task[T], execute: Callable[[Collective], Tensor]) -> T:
    """Run one flow to its end: execute what it yields, send back the answer, return what it returns.

    >>> from hvdbridge.policy.collectives import AllReduce
    >>> def double():
    ...     total = yield AllReduce(torch.ones(2))
    ...     return total + total
    >>> drive(double(), lambda request: request.tensor * 4)
    tensor([8., 8.])
    """

    def answer(request: Collective) -> Answer:
        return execute(request)
        yield

    try:
        next(relay(flow, answer))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("nothing is yielded")


@dataclass
class Traffic:
    """What was carried since this was last reset.

    Attributes:
        seconds: during which at least one collective was under way.
        computing: seconds between collectives, in which flows computed; of the host, where the device is not one.
    """

    collectives: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    computing: float = 0.0


class Scheduler:
    """Base: books, checks and poison; see :class:`ThreadScheduler` and :class:`StreamScheduler`."""

    def __init__(self, check: Check | None = None) -> None:
        self.traffic = Traffic()
        self.failure: BaseException | None = None
        self._check = check
        self._number = 0
        self._travelling = 0
        self._since = 0.0
        self._open: set[Submission[Any]] = set()  # submitted and not settled; what fail() must not leave waiting
        # Of these, and of what several threads add to. Reentrant: the garbage collector may end a flow within it.
        self._lock = threading.RLock()

    @property
    def checks(self) -> bool:
        """Whether signatures of collectives are compared across ranks."""
        return self._check is not None

    def submit(self, submission: Submission[T]) -> Submission[T]:
        """Run a flow on its communicator after all that was submitted before; returns ``submission``.

        Raises:
            BaseException: the failure of an earlier flow.
        """
        raise NotImplementedError

    def run(self, flow: Task[T], communicator: Communicator) -> T:
        """Submit a flow that stands alone, and wait."""
        result = self.submit(Submission(flow, communicator)).wait()
        self.order()
        return result

    def flush(self) -> None:
        """No more flows follow for now: let those that were submitted come to their ends."""

    def check_failure(self) -> None:
        """
        Raises:
            BaseException: the first failure, if there is one.
        """
        if self.failure is not None:
            raise self.failure

    def settle(self) -> None:
        """Return when all that was submitted is over, or the scheduler has failed."""

    def order(self) -> None:
        """Let what the caller enqueues from now on see the results of the flows that were waited for."""

    def fail(self, cause: BaseException) -> None:
        """Poison: all pending flows, and all later ones, fail with ``cause``."""
        with self._lock:
            if self.failure is None:
                self.failure = cause
            left = list(self._open)
        for submission in left:  # one may be stuck in the library below: nobody waits for it
            with suppress(Exception):  # whatever it meets, the others settle
                submission.settle(error=self.failure)

    def close(self) -> None:
        """Let what was submitted finish, then take no more. Harmless when repeated."""
        self.fail(NotInitialized("this synchronizer was closed, by close() or hb.shutdown(); construct a new one"))

    def _steps(self, submission: Submission[Any]) -> Steps:
        """A flow as steps of its communicator, to its settlement; raises nothing."""
        try:
            self.check_failure()
            submission.since = time.perf_counter()
            result = yield from relay(submission.flow, partial(self._answer, submission))
            self._computed(submission)
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever it is belongs to the caller of backward(), not to this thread
            self.fail(error)
            submission.settle(error=self.failure)
        else:
            submission.settle(result)
        with self._lock:
            self._open.discard(submission)

    def _answer(self, submission: Submission[Any], request: Collective) -> Answer:
        self._computed(submission)
        communicator = submission.communicator
        submission.asked += 1
        if submission.rounds is not None and submission.asked > submission.rounds:
            raise HvdbridgeError(
                f"the policy says that its flows ask for {submission.rounds} collectives, and one asks for another: "
                f"{request.signature()}. Correct its `rounds`, or leave it out."
            )
        used_here(request.tensor)  # the user's script may own it, and drop it
        steps = communicator.answer(request)
        yield next(steps)
        self.check_failure()
        if self._check is not None:
            self._number += 1
            self._check(self._number, request.signature())
        sent = request.bytes_sent(communicator.size_of(request.group))
        with self._lock:
            self.traffic.collectives += 1
            self.traffic.bytes_sent += sent
        work: Work | None = None
        lost: Exception | None = None
        try:
            while True:
                # Where the communicator waits for the operation before, and explains its failure
                before, work = work, next(steps) if lost is None else steps.throw(lost)
                self._travels((work is not None) - (before is not None))
                try:
                    yield work
                    lost = None
                except Exception as error:  # of a look
                    lost = error
                if work is None:
                    self.check_failure()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            self._travels(-(work is not None))
            submission.since = time.perf_counter()

    def _computed(self, submission: Submission[Any]) -> None:
        with self._lock:
            self.traffic.computing += time.perf_counter() - submission.since

    def _travels(self, more: int) -> None:
        """So many more operations are under way."""
        with self._lock:
            now = time.perf_counter()
            if self._travelling:
                self.traffic.seconds += now - self._since
            self._since = now
            self._travelling += more


class ThreadScheduler(Scheduler):
    """For backends whose collectives block the host: one daemon thread, with ``no_grad``, the CUDA device and a stream
    of its own set inside, all of which belong to a thread. A flow begins behind an event of the submitting stream."""

    def __init__(self, check: Check | None = None, device: torch.device | None = None) -> None:
        super().__init__(check)
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._mail: Mailbox[Any] = Mailbox()  # submissions, and marks
        self._inbox: deque[Any] = deque()  # taken from there, not yet begun
        self._runs: list[Submission[Any]] = []  # in flight, oldest first
        self._begun = 0  # the turn of the next flow
        self._flushing = False  # nothing begins until all runs have ended
        self._pause = SHORTEST_POLL_SECONDS
        self._waiter = Waiter(partial(self._mail.put, WAKE))
        self._placing = threading.RLock()  # held from where a flow gets its place to where it starts, or waits for that
        self._thread = threading.Thread(target=self._loop, name="hvdbridge-scheduler", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission[T]) -> Submission[T]:
        with self._placing:
            with self._lock:
                self.check_failure()
                idle = all(run.last for run in self._open) if submission.inline else not self._open
                self._open.add(submission)
            here = idle and (submission.inline or submission.awaited) and self._check is None and self._device is None
            if here and not torch.is_autocast_enabled("cpu"):
                try:
                    # In autograd's hook gradients are off, mostly, and the context is a good part of the cost
                    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                        submission.begin(self._steps(submission))
                        submission.issue()
                        if submission.awaited:
                            submission.run_for(AWAIT_SECONDS)
                except BaseException as error:  # no flow's; what was left half done is nobody's
                    self.fail(error)
                    raise
            elif self._device is not None:
                submission.event = torch.cuda.current_stream(self._device).record_event()
            if not submission.ended:
                self._mail.put(submission)
        return submission

    def flush(self) -> None:
        if self._open:
            self._mail.put(FLUSH)

    def settle(self) -> None:
        self.flush()
        while self.failure is None and any(not submission.done for submission in list(self._open)):
            time.sleep(SETTLE_SECONDS)

    def order(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        if self._thread.is_alive():
            self._mail.put(CLOSE)
            if self.failure is None:
                self._thread.join()
        super().close()

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # no flow's, but what was left to this thread is done by nobody else
            self.fail(error)

    @torch.no_grad()
    def _serve(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        while not (self._inbox and self._inbox[0] is CLOSE and not self._runs):
            if self._begin() or self._compute() or self._issue():
                self._pause = SHORTEST_POLL_SECONDS
                self._runs = [run for run in self._runs if not run.ended]
            else:
                self._wait()
        self._waiter.close()

    def _begin(self) -> bool:
        """Take the next item of the inbox, if its time has come. Whether it had."""
        if not self._inbox:
            return False
        item = self._inbox[0]
        if not isinstance(item, Submission) or (item.steps is None and item.rounds is None):
            self._flushing = bool(self._runs)  # a flush, or a flow that runs alone
            if self._flushing or item is CLOSE:
                return False
        elif item.steps is None and not self._has_room(item):
            return False
        self._inbox.popleft()
        if isinstance(item, Submission):
            if item.steps is None:
                if item.event is not None:
                    torch.cuda.current_stream(self._device).wait_event(item.event)
                item.begin(self._steps(item), self._begun, turns_between(item.rounds))
                self._begun += 1
            self._runs.append(item)
        return True

    def _has_room(self, submission: Submission[Any]) -> bool:
        """Whether a flow may encode its first message."""
        if any(run.rounds is None or not run.issued for run in self._runs):
            return False
        others = [run for run in self._runs if not run.inline]
        most = max(IN_FLIGHT, *(run.rounds or 0 for run in [submission, *others]))  # the oldest must find its turns
        return submission.inline or len(others) < most

    def _compute(self) -> bool:
        """Have the flows go on whose operations are over. Whether one did."""
        moved = [run.proceed() for run in self._runs]
        return any(moved)

    def _issue(self) -> bool:
        """Start the operation that is next in the order of turns, if it is ready. Whether it was."""
        run = min((run for run in self._runs if not run.last), key=attrgetter("turn"), default=None)
        if run is None or run.work is not None or (run.turn > self._begun and not self._flushing):
            return False
        run.issue()
        return True

    def _wait(self) -> None:
        """Until something was submitted, or a flow may be able to go on."""
        travelling = sorted((run for run in self._runs if run.work is not None), key=attrgetter("number"))
        if self._flushing and travelling:
            travelling[0].proceed(block=True)
            self._runs = [run for run in self._runs if not run.ended]
            return
        for run in travelling:
            if not run.announced and run.work is not None and run.work.shared:
                self._waiter.watch(run.work)
                run.announced = True
        looked_at = [run for run in travelling if not run.announced]
        item = self._mail.get(self._pause if looked_at else None)
        if item is not None and item is not WAKE:
            self._inbox.append(item)
        else:
            settled = all(run.last and run.communicator.capabilities.progresses for run in looked_at)
            idle = settled and not self._inbox
            self._pause = min(self._pause * 1.25, LONGEST_IDLE_POLL_SECONDS if idle else LONGEST_POLL_SECONDS)


def turns_between(rounds: int | None) -> int:
    """W of rule 2: the turns from one round of a flow to its next.

    >>> [turns_between(rounds) for rounds in (1, 2, 3, 4, 5)]
    [0, 2, 1, 1, 1]
    """
    return 0 if rounds is None or rounds < 2 else max(1, (IN_FLIGHT - 1) // (rounds - 1))


class StreamScheduler(Scheduler):
    """For NCCL: flows run in the caller's thread and only enqueue, on a side stream of ``device``."""

    def __init__(self, device: torch.device, check: Check | None = None) -> None:
        super().__init__(check)
        self.stream = torch.cuda.Stream(device)

    @torch.no_grad()
    def submit(self, submission: Submission[T]) -> Submission[T]:
        self.check_failure()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for _ in self._steps(submission):
                pass  # a wait only makes the stream wait
        return submission

    def order(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def open_scheduler(communicator: Communicator, device: torch.device, check: Check | None = None) -> Scheduler:
    """The scheduler that suits what the communicator declares."""
    if communicator.capabilities.blocks_host or device.type != "cuda":  # CPU tensors block the host with NCCL, too
        return ThreadScheduler(check, device)
    return StreamScheduler(device, check)
