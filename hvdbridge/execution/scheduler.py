"""Runs flows on a communicator, in one order that is the same on every rank.

Rules:

1. Only the scheduler issues gradient collectives, but for the plain mean that DDP aggregates itself. It has a
   communicator of its own, so that a user's collectives cannot interleave with them.
2. Where the backend blocks the host, one thread runs the flows. Flow k issues its round j at turn k S + j W, the older
   flow first. k counts the flows that the thread begins, in the order of :meth:`Scheduler.submit`, which is that of
   bucket indices; a flow that begins in the submitting thread (rule 5) takes no turn. W is the largest number with
   (R - 1) W <= 2, and at least 1, where R is the number of rounds that the flow declares. S is the smallest number
   with which the F flows of rule 4 suffice: 1 for all R up to 3.
   A turn ends when the last operation of its collective has started. Turn t comes after all flows have begun whose
   first turn is earlier. :meth:`Scheduler.flush` ends this wait for newer flows, since none follows for now.
3. A flow that declares no rounds may share state with other flows. It runs alone, after all earlier flows have ended.
4. Encoding and decoding need no turn. A flow decodes an answer when it arrives. The next flow encodes its first message
   when all flows in flight have issued a collective, and fewer than F are in flight. F is 2 among ranks of one node.
   Between nodes, where messages travel for longer, it is 3, or R - 1 for the largest R of a flow so far. ``inline``
   flows do not count here, because they need almost no memory or computation.
5. Handing a flow to the thread costs as much as a small step, so two kinds of flow start in the submitting thread. An
   ``inline`` flow does if no earlier flow has a collective left to issue. An ``awaited`` flow does if no other flow is
   pending. Neither does on a CUDA device, or while signatures are compared, or under autocast: autocast is set per
   thread, and results must not depend on the thread.
6. Where the backend only enqueues (NCCL), a flow runs at once in the submitting thread, on one side stream, which first
   waits for the current stream.
7. The first failure poisons the scheduler: all pending and later flows fail with the same cause, and no operation
   starts any more. Even the rest of a collective is not started, since ranks detect a failure at different moments.
   The exception is thrown into the waiting flow, so that the traceback shows the policy's line.
8. With HVDBRIDGE_DEBUG=1, the signature of each collective is compared across ranks before it starts. The job's helper
   compares them by a running number, without a collective.

Rule 2 depends on numbers alone, never on which flow is ready first. Completion callbacks (``future.then``) cannot chain
rounds, because they run in a different order on each rank.
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
Check = Callable[[int, str], None]  # called with a collective's running number and signature


ACROSS_NODES, WITHIN_NODE = 3, 2
"""Number of flows in flight: while the message of one is sent, another decodes and a third encodes. Within a node a
third flow does not shorten steps, and its messages and new state need memory."""

SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS, LONGEST_IDLE_POLL_SECONDS = 5e-5, 3e-4, 1e-2
"""First and longest pause between polls of operations; each pause is a quarter longer than the one before it. The idle
limit applies if operations progress by themselves and the scheduler has none to issue, because each poll takes the
interpreter's lock from backward."""

SETTLE_SECONDS = 5e-3
"""Pause between polls in :meth:`Scheduler.settle`."""

AWAIT_SECONDS = 0.05
"""Time that a submitting thread waits in the library for its own flow. It then hands the flow to the scheduler's
thread, because only :meth:`Submission.wait` ends when other ranks report a failure."""

FLUSH, CLOSE, WAKE = object(), object(), object()  # marks in the mailbox of a ThreadScheduler


def drive(flow: Task[T], execute: Callable[[Collective], Tensor]) -> T:
    """Run one flow to its end: send it ``execute(request)`` for each request, and return its result.

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
    """Counts of a scheduler's collectives since the last reset.

    Attributes:
        seconds: time during which at least one operation was in flight.
        computing: host seconds that flows computed between their collectives.
    """

    collectives: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    computing: float = 0.0


class Scheduler:
    """Base class of :class:`ThreadScheduler` and :class:`StreamScheduler`: traffic counts, checks and failures."""

    def __init__(self, check: Check | None = None) -> None:
        self.traffic = Traffic()
        self.failure: BaseException | None = None
        self._check = check
        self._check_number = 0
        self._operations = 0
        self._counted_at = 0.0
        self._open: set[Submission[Any]] = set()  # submitted and not settled: fail() settles them
        # Guards what several threads change. Reentrant, because the garbage collector may end a flow while it is held.
        self._lock = threading.RLock()

    @property
    def checks(self) -> bool:
        """True if signatures of collectives are compared across ranks (HVDBRIDGE_DEBUG=1)."""
        return self._check is not None

    @property
    def in_users_graph(self) -> bool:
        """True if the user captures the current stream as a CUDA graph."""
        return False

    def submit(self, submission: Submission[T]) -> Submission[T]:
        """Accept a flow, which runs now or later and may overlap with others (rules 2 to 6). Returns ``submission``.

        Raises:
            BaseException: the failure of an earlier flow.
        """
        raise NotImplementedError

    def run(self, flow: Task[T], communicator: Communicator) -> T:
        """Submit a flow that runs alone, wait for it, and return its result."""
        result = self.submit(Submission(flow, communicator)).wait()
        self.order()
        return result

    def flush(self) -> None:
        """Declare that no flow follows for now, so that the submitted flows can run to their ends."""

    def check_failure(self) -> None:
        """Raise the first failure of this scheduler, if there is one."""
        if self.failure is not None:
            raise self.failure

    def settle(self) -> None:
        """Wait until all submitted flows have ended, or the scheduler has failed."""

    def order(self) -> None:
        """Make the caller's current CUDA stream wait for the scheduler's stream, after the flows' :meth:`wait`."""

    def fail(self, cause: BaseException) -> None:
        """Poison the scheduler: all pending and later flows fail with ``cause``, or with an earlier failure."""
        with self._lock:
            if self.failure is None:
                self.failure = cause
            pending = list(self._open)
        for submission in pending:  # also one that is blocked in the library
            with suppress(Exception):  # an error in one callback must not keep the others from being settled
                submission.settle(error=self.failure)

    def close(self) -> None:
        """Let the submitted flows finish, and accept no more. May be called repeatedly."""
        self.fail(NotInitialized("this synchronizer was closed, by close() or hb.shutdown(); construct a new one"))

    def _steps(self, submission: Submission[Any]) -> Steps:
        """Run a flow and settle it. Yields as :meth:`Communicator.answer` does, and raises no exception."""
        try:
            self.check_failure()
            submission.resumed_at = time.perf_counter()
            result = yield from relay(submission.flow, partial(self._answer, submission))
            self._computed(submission)
        except GeneratorExit:
            raise
        except BaseException as error:  # of any kind: the caller of backward() raises it, not this thread
            self.fail(error)
            submission.settle(error=self.failure)
        else:
            submission.settle(result)
        with self._lock:
            self._open.discard(submission)

    def _answer(self, submission: Submission[Any], request: Collective) -> Answer:
        """Execute one collective of a flow: check and count it, and yield each of its operations."""
        self._computed(submission)
        communicator = submission.communicator
        submission.requested += 1
        if submission.rounds is not None and submission.requested > submission.rounds:
            raise HvdbridgeError(
                f"the policy says that its flows ask for {submission.rounds} collectives, and one asks for another: "
                f"{request.signature()}. Correct its `rounds`, or leave it out."
            )
        used_here(request.tensor)  # another stream may own its memory, and free it
        steps = communicator.answer(request)
        yield next(steps)
        self.check_failure()
        if self._check is not None:
            self._check_number += 1
            self._check(self._check_number, request.signature())
        sent = request.bytes_sent(communicator.size_of(request.group))
        with self._lock:
            self.traffic.collectives += 1
            self.traffic.bytes_sent += sent
        work: Work | None = None
        raised: Exception | None = None
        try:
            while True:
                # The communicator now waits for the previous operation, or explains the error that is thrown into it
                before, work = work, next(steps) if raised is None else steps.throw(raised)
                self._count_operations((work is not None) - (before is not None))
                try:
                    yield work
                    raised = None
                except Exception as error:  # raised by a poll of the operation
                    raised = error
                if work is None:
                    self.check_failure()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            self._count_operations(-(work is not None))
            submission.resumed_at = time.perf_counter()

    def _computed(self, submission: Submission[Any]) -> None:
        """Add the time since the flow was resumed to :attr:`Traffic.computing`."""
        with self._lock:
            self.traffic.computing += time.perf_counter() - submission.resumed_at

    def _count_operations(self, change: int) -> None:
        """Change the number of operations in flight, and add the time since the last change to the traffic."""
        with self._lock:
            now = time.perf_counter()
            if self._operations:
                self.traffic.seconds += now - self._counted_at
            self._counted_at = now
            self._operations += change


class ThreadScheduler(Scheduler):
    """Scheduler for backends whose collectives block the host: one daemon thread runs all flows.

    The thread sets ``no_grad``, the CUDA device and a stream of its own, because these are settings of a thread. A flow
    starts after an event of the submitting stream.
    """

    def __init__(
        self, check: Check | None = None, device: torch.device | None = None, flows: int = ACROSS_NODES
    ) -> None:
        super().__init__(check)
        self._flows = flows
        self._most_rounds = 0  # of a flow so far
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._mailbox: Mailbox[Any] = Mailbox()  # submissions, FLUSH, CLOSE and WAKE
        self._queue: deque[Any] = deque()  # read from the mailbox, not yet in flight
        self._in_flight: list[Submission[Any]] = []  # oldest first
        self._next_turn = 0  # first turn of the next flow
        self._flushing = False  # no flow begins until all flows in flight have ended
        self._pause = SHORTEST_POLL_SECONDS
        self._waiter = Waiter(partial(self._mailbox.put, WAKE))
        self._order_lock = threading.RLock()  # makes the order of submissions that of starts and of the mailbox
        self._thread = threading.Thread(target=self._loop, name="hvdbridge-scheduler", daemon=True)
        self._thread.start()

    @property
    def in_users_graph(self) -> bool:
        return self._device is not None and torch.cuda.is_current_stream_capturing()

    def submit(self, submission: Submission[T]) -> Submission[T]:
        with self._order_lock:
            with self._lock:
                self.check_failure()
                idle = all(run.starts_no_more for run in self._open) if submission.inline else not self._open
                self._open.add(submission)
            eager = idle and (submission.inline or submission.awaited) and self._check is None and self._device is None
            if eager and not torch.is_autocast_enabled("cpu"):
                try:
                    # Gradients are mostly disabled in autograd's hooks: the context would be a large part of the cost
                    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                        submission.begin(self._steps(submission))
                        submission.issue()
                        if submission.awaited:
                            submission.run_for(AWAIT_SECONDS)
                except BaseException as error:  # not a flow's, which _steps() catches; no thread would finish this flow
                    self.fail(error)
                    raise
            elif self._device is not None:
                submission.event = torch.cuda.current_stream(self._device).record_event()
            if not submission.ended:
                self._mailbox.put(submission)
        return submission

    def flush(self) -> None:
        if self._open:
            self._mailbox.put(FLUSH)

    def settle(self) -> None:
        self.flush()
        while self.failure is None and any(not submission.done for submission in list(self._open)):
            time.sleep(SETTLE_SECONDS)

    def order(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        if self._thread.is_alive():
            self._mailbox.put(CLOSE)
            if self.failure is None:
                self._thread.join()
        super().close()

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # not a flow's, which _steps() catches; no other thread runs what is pending
            self.fail(error)

    @torch.no_grad()
    def _serve(self) -> None:
        """Apply the rules until the scheduler is closed."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        while not (self._queue and self._queue[0] is CLOSE and not self._in_flight):
            if self._begin() or self._advance() or self._issue():
                self._pause = SHORTEST_POLL_SECONDS
                self._in_flight = [run for run in self._in_flight if not run.ended]
            else:
                self._wait()
        self._waiter.close()

    def _begin(self) -> bool:
        """Begin the first flow of the queue, or remove the mark there, if the rules allow it. Returns whether."""
        if not self._queue:
            return False
        item = self._queue[0]
        if not isinstance(item, Submission) or (item.steps is None and item.rounds is None):
            self._flushing = bool(self._in_flight)  # for a mark, or a flow that runs alone
            if self._flushing or item is CLOSE:
                return False
        elif item.steps is None:
            self._most_rounds = max(self._most_rounds, item.rounds or 0)
            if not self._has_capacity(item):
                return False
        self._queue.popleft()
        if isinstance(item, Submission):
            if item.steps is None:
                if item.event is not None:
                    torch.cuda.current_stream(self._device).wait_event(item.event)
                item.begin(self._steps(item), self._next_turn, turns_between(item.rounds))
                # The last turn of a flow comes at most max(2, R - 1) turns after its first one
                self._next_turn += -(-max(2, self._most_rounds - 1) // self._capacity)
            self._in_flight.append(item)
        return True

    def _has_capacity(self, submission: Submission[Any]) -> bool:
        """Return whether a flow may encode its first message now (rules 3 and 4)."""
        if any(run.rounds is None or not run.issued for run in self._in_flight):
            return False
        return submission.inline or sum(not run.inline for run in self._in_flight) < self._capacity

    @property
    def _capacity(self) -> int:
        """F of rule 4."""
        return max(self._flows, self._most_rounds - 1) if self._flows > WITHIN_NODE else self._flows

    def _advance(self) -> bool:
        """Continue the flows whose operations are over. Returns whether there was one."""
        moved = [run.proceed() for run in self._in_flight]
        return any(moved)

    def _issue(self) -> bool:
        """Start the operation of the next turn, if its flow is ready. Returns whether it was."""
        run = min((run for run in self._in_flight if not run.starts_no_more), key=attrgetter("turn"), default=None)
        if run is None or run.work is not None or (run.turn > self._next_turn and not self._flushing):
            return False
        run.issue()
        return True

    def _wait(self) -> None:
        """Wait until the mailbox has an item, or for the time until the next poll.

        In a flush, block in the operation that started first. If an operation failed, the thread reaches it before
        operations that other ranks never start.
        """
        waiting = sorted((run for run in self._in_flight if run.work is not None), key=attrgetter("start_number"))
        if self._flushing and waiting:
            waiting[0].proceed(block=True)
            self._in_flight = [run for run in self._in_flight if not run.ended]
            return
        for run in waiting:
            if not run.watched and run.work is not None and run.work.thread_safe_wait:
                self._waiter.watch(run.work)
                run.watched = True
        polled = [run for run in waiting if not run.watched]
        item = self._mailbox.get(self._pause if polled else None)
        if item is not None and item is not WAKE:
            self._queue.append(item)
        else:
            settled = all(run.starts_no_more and run.communicator.capabilities.progresses for run in polled)
            idle = settled and not self._queue
            self._pause = min(self._pause * 1.25, LONGEST_IDLE_POLL_SECONDS if idle else LONGEST_POLL_SECONDS)


def turns_between(rounds: int | None) -> int:
    """Return W of rule 2, the number of turns between two rounds of a flow.

    >>> [turns_between(rounds) for rounds in (1, 2, 3, 4, 5)]
    [0, 2, 1, 1, 1]
    """
    return 0 if rounds is None or rounds < 2 else max(1, 2 // (rounds - 1))


class StreamScheduler(Scheduler):
    """Scheduler for NCCL: flows run in the submitting thread and only enqueue, on a side stream of ``device``."""

    def __init__(self, device: torch.device, check: Check | None = None) -> None:
        super().__init__(check)
        self.stream = torch.cuda.Stream(device)

    @property
    def in_users_graph(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @torch.no_grad()
    def submit(self, submission: Submission[T]) -> Submission[T]:
        self.check_failure()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for _ in self._steps(submission):
                pass  # resumed, NCCL's wait makes only the stream wait
        return submission

    def order(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def open_scheduler(communicator: Communicator, device: torch.device, check: Check | None = None) -> Scheduler:
    """Return the scheduler that the communicator's capabilities and the device require."""
    if communicator.capabilities.blocks_host or device.type != "cuda":  # CPU tensors also block where NCCL runs
        flows = ACROSS_NODES if len(set(communicator.nodes)) > 1 else WITHIN_NODE
        return ThreadScheduler(check, device, flows)
    return StreamScheduler(device, check)
