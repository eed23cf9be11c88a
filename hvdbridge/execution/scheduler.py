"""Runs flows on a communicator, in one order that is the same on every rank.

Rules:

1. One issuer: only the driver starts gradient collectives, on its own communicator, so that a user's
   collectives cannot interleave with them.
2. Canonical order, never arrival or completion order: flows begin in the order of :meth:`Driver.submit`, which
   callers make the order of bucket indices. Those that may overlap take turns, and at each turn start one operation:
   a flow that begins takes its first turn, then each older one takes its next, oldest first, once or as often as the
   flow says (``Pending.turns``); ``flush`` and a flow that stands alone let the older ones take turns until they end.
   So bucket k+1 is encoded while bucket k travels. Where flows are heavy and it is not known how many collectives they
   ask for, rounds of turns that none begins keep them few.
   In groups of several sizes a request has several numbers of operations, or none: there a turn starts all of it.
   Flows of which it is known how many collectives they ask for (``Policy.rounds``) share nothing that another changes.
   What lies between two of their starts runs when it can, ahead of its turn, too: while a turn waits for what travels,
   others decode, and the next bucket is encoded. (In a flush where operations must be looked at, one waits instead.)
   If its last operation is under way, such a flow has no more turns: nobody waits for it before the end. Others may
   share what they like (the state of a user's hook): all of theirs runs at turns, in one order on all ranks.
3. Where the backend blocks the host, one daemon thread runs the flows, one future per flow; ``no_grad``, the CUDA
   device and a stream of its own are set inside the thread (all belong to a thread), so that a copy to the host waits
   for what it copies and not for backward. A flow begins behind an event of the stream that submitted it; who has
   waited for it lets his stream wait for the driver's (:meth:`Driver.order`).
   To hand over to a thread costs as much as a small step, so where nothing is before it that has not started all it
   will, there is no device or autocast (a thread has its own) and signatures are not compared, a flow starts in the
   thread that submits it: one of a single collective and next to no arithmetic (``Pending.brief``), which the waiter's
   thread ends; and a step's only small one, which that thread would wait for anyway (``Pending.awaited``). It has the
   same place in the order as by the thread.
4. Where the backend enqueues (NCCL), flows run at once, on one side stream that waits for the current one;
   a future carries the stream's event and nobody waits on the host.
5. The first failure poisons the driver: all pending and later flows fail with the same cause. A collective
   is never skipped. An exception is thrown into the waiting flow, so the traceback shows the policy's line.
   After it nothing starts, not even the next part of a request: ranks may come to what fails at several moments. Who
   waits for an operation waits for the earliest, so that it comes to that answer, too, before what others never start.
6. With HVDBRIDGE_DEBUG=1 the signature of each collective is compared across ranks before it starts, under a
   running number, through the job's helper and never by a collective.

Completion callbacks (``future.then``) are not used to chain rounds: they run in another order on each rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Work
from hvdbridge.errors import HvdbridgeError, NotInitialized
from hvdbridge.execution.flow import ANSWERED, Pending, Run, Task, Waiter
from hvdbridge.execution.mailbox import Mailbox
from hvdbridge.policy.collectives import Collective, relay, used_here

T = TypeVar("T")
Check = Callable[[int, str], None]


POLL_SECONDS, LONGEST_POLL_SECONDS = 5e-5, 3e-4
"""Between looks at what travels, while the thread has nothing else to do."""
SETTLE_SECONDS = 5e-3
"""Between looks at what is under way when a script has ended."""
PATIENT_POLL_SECONDS, PATIENCE, LONGEST_PATIENT_POLL_SECONDS = 2e-3, 1.125, 0.1
"""The same where nothing starts or progresses by a look: only so that what is done is not taken for waited for. Each
pause is so many times the one before, so an eighth of a long wait is the most by which it is overrated; a look costs a
thread's turn at a core, which a backward may need."""

AWAIT_SECONDS = 0.05
"""Who submits a flow and waits for it, waits in the library below for so long. From then on a failure that others tell
of must reach him."""

CLOSE, WAKE = object(), object()


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


class Driver:
    """Base: books, checks and poison; see :class:`ThreadDriver` and :class:`StreamDriver`."""

    def __init__(self, check: Check | None = None) -> None:
        self.traffic = Traffic()
        self.failure: BaseException | None = None
        self._check = check
        self._number = 0
        self._travelling = 0
        self._since = 0.0
        self._counting = threading.Lock()  # of what several threads add to

    @property
    def checks(self) -> bool:
        """Whether signatures of collectives are compared across ranks."""
        return self._check is not None

    def submit(self, pending: Pending[T]) -> Pending[T]:
        """Run a flow on its communicator after all that was submitted before; returns ``pending``.

        Raises:
            BaseException: the failure of an earlier flow.
        """
        raise NotImplementedError

    def run(self, flow: Task[T], communicator: Communicator) -> T:
        """Submit a flow that stands alone, and wait."""
        result = self.submit(Pending(flow, communicator)).wait()
        self.order()
        return result

    def flush(self) -> None:
        """No more flows follow for now: let those that were submitted come to their ends."""

    def settle(self) -> None:
        """Return when all that was submitted is over, or the driver has failed."""

    def order(self) -> None:
        """Let what the caller enqueues from now on see the results of the flows that were waited for."""

    def fail(self, cause: BaseException) -> None:
        """Poison: pending flows that have not begun, and all later ones, fail with ``cause``."""
        if self.failure is None:
            self.failure = cause

    def close(self) -> None:
        """Let what was submitted finish, then take no more. Harmless when repeated."""
        self.fail(NotInitialized("this synchronizer was closed, by close() or hb.shutdown(); construct a new one"))

    def _steps(self, pending: Pending[Any]) -> Generator[Work | None, None, None]:
        """A flow as steps of its communicator, to its settlement; raises nothing."""
        try:
            if self.failure is not None:
                raise self.failure
            pending.since = time.perf_counter()
            result = yield from relay(pending.flow, partial(self._answer, pending))
            self._computed(pending)
            if pending.then is not None:
                pending.then(result)
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever it is belongs to the caller of backward(), not to this thread
            self.fail(error)
            pending.settle(error=self.failure)
        else:
            pending.settle(result)
        self._forget(pending)

    def _forget(self, pending: Pending[Any]) -> None:
        """It is settled."""

    def _answer(self, pending: Pending[Any], request: Collective) -> Answer:
        self._computed(pending)
        communicator = pending.communicator
        pending.asked += 1
        pending.grouped = request.group != "world"
        if pending.rounds is not None and pending.asked > pending.rounds:
            raise HvdbridgeError(
                f"the policy says that its flows ask for {pending.rounds} collectives, and one asks for another: "
                f"{request.signature()}. Correct its `rounds`, or leave it out."
            )
        used_here(request.tensor)  # perhaps the user's, who may drop it
        steps = communicator.answer(request)
        yield next(steps)
        if self.failure is not None:
            raise self.failure
        if self._check is not None:
            self._number += 1
            self._check(self._number, request.signature())
        self._counted(request.bytes_sent(communicator.size_of(request.group)))
        travels, lost = False, None
        try:
            while True:
                # Where the communicator waits for the operation before, and explains its failure
                work = next(steps) if lost is None else steps.throw(lost)
                if travels:
                    self._arrives()
                travels = work is not None
                if work is not None:
                    self._departs()
                    pending.ending = work.last and pending.asked == pending.rounds
                try:
                    yield work
                    lost = None
                except Exception as error:  # of a look
                    lost = error
                if work is None and self.failure is not None:
                    raise self.failure
        except StopIteration as end:
            answer: Tensor = end.value
        finally:
            if travels:
                self._arrives()
            pending.since = time.perf_counter()
        if not pending.ahead:
            yield ANSWERED
            pending.since = time.perf_counter()
        return answer

    def _computed(self, pending: Pending[Any]) -> None:
        with self._counting:
            self.traffic.computing += time.perf_counter() - pending.since

    def _counted(self, sent: int) -> None:
        with self._counting:
            self.traffic.collectives += 1
            self.traffic.bytes_sent += sent

    def _departs(self) -> None:
        with self._counting:
            if not self._travelling:
                self._since = time.perf_counter()
            self._travelling += 1

    def _arrives(self) -> None:
        with self._counting:
            self._travelling -= 1
            if not self._travelling:
                self.traffic.seconds += time.perf_counter() - self._since


class ThreadDriver(Driver):
    """For backends whose collectives block the host."""

    def __init__(self, check: Check | None = None, device: torch.device | None = None) -> None:
        super().__init__(check)
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)
        self._mail: Mailbox[tuple[Pending[Any] | Run | None, Any]] = Mailbox()
        self._inbox: deque[tuple[Pending[Any] | Run | None, Any]] = deque()  # taken from there, not yet begun
        self._runs: list[Run] = []  # oldest first
        self._turns: deque[Run] = deque()  # in their order
        self._flushing = False  # nothing begins until all runs have ended
        self._pause, self._patient_pause = POLL_SECONDS, PATIENT_POLL_SECONDS
        self._waiter = Waiter()
        self._open: set[Pending[Any]] = set()  # submitted and perhaps not done; what fail() must not leave waiting
        self._given = 0  # flows that the thread was given and has not ended
        self._brief = 0  # flows that started without it, and are not over
        self._lock = threading.Lock()
        self._placing = threading.RLock()  # held from where a flow gets its place to where it starts, or waits for that
        self._thread = threading.Thread(target=self._loop, name="hvdbridge-driver", daemon=True)
        self._thread.start()

    def submit(self, pending: Pending[T]) -> Pending[T]:
        with self._placing:
            with self._lock:
                if self.failure is not None:
                    raise self.failure
                self._open.add(pending)
                # Nothing is before it that has not started, or may start more
                idle = not self._given and (pending.brief or not self._brief)
                here = (pending.brief or pending.awaited) and idle and self._check is None and self._device is None
                # Which thread it is differs between ranks, and their bits must not
                here = here and not torch.is_autocast_enabled("cpu")
                self._brief += here
                self._given += not here
            if here:
                try:
                    # In autograd's hook there is none, mostly, and the context is a good part of what this costs
                    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                        self._start_here(pending)
                except BaseException as error:  # no flow's. What was left half done is nobody's
                    self.fail(error)
                    raise
            else:
                event = None if self._device is None else torch.cuda.current_stream(self._device).record_event()
                self._mail.put((pending, event))
        return pending

    def _start_here(self, pending: Pending[Any]) -> None:
        run = Run(pending, self._steps(pending))
        has_turn = not run.start()
        if pending.awaited:
            run.go_on(AWAIT_SECONDS)
            has_turn = False
        if run.waits and run.ending and run.shared:
            run.announce(self._waiter, partial(self._end, run))
            return
        with self._lock:
            self._brief -= 1
            self._given += not run.ended
        if not run.ended:
            self._mail.put((run, has_turn))

    def _end(self, run: Run) -> None:
        try:
            run.proceed(block=True)
        except BaseException as error:  # no flow's, as in the thread
            self.fail(error)
        with self._lock:
            self._brief -= 1
            waited_for = self._given > 0
        if waited_for:
            self._wake()

    def _wake(self) -> None:
        self._mail.put((None, WAKE))

    def flush(self) -> None:
        with self._lock:
            given = self._given
        if given:
            self._mail.put((None, None))

    def settle(self) -> None:
        self.flush()
        while self.failure is None and any(not pending.done for pending in list(self._open)):
            time.sleep(SETTLE_SECONDS)

    def order(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def fail(self, cause: BaseException) -> None:
        with self._lock:
            super().fail(cause)
            left = list(self._open)
        for pending in left:  # one may be stuck in the library below: nobody waits for it
            with suppress(Exception):  # whatever it meets, the others settle
                pending.settle(error=self.failure)

    def close(self) -> None:
        if self._thread.is_alive():
            self._mail.put((None, CLOSE))
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
        while True:
            self._progress()
            given, event = self._inbox[0] if self._inbox else (None, WAKE)
            if isinstance(given, Run):
                self._inbox.popleft()
                self._runs.append(given)
                if event:  # its turn is not over
                    self._turns.append(given)
                del given
                continue
            if event is WAKE or not self._may_begin(given):
                self._wait()
                continue
            self._inbox.popleft()
            if given is not None:
                self._begin(given, event)
            elif event is CLOSE:
                self._waiter.close()
                return
            del given  # else the last result would live on until the next step

    def _progress(self) -> None:
        """All that needs no waiting: what is next in the order starts, flows go on to their gates."""
        self._pause = min(self._pause * 1.25, LONGEST_POLL_SECONDS)
        moved = True
        while moved:
            moved = False
            if self._flushing and not self._turns:
                self._turns.extend(run for run in self._runs if not run.ending)
            while self._turns:
                head = self._turns[0]
                moved |= head.proceed(turn=True)
                if head.waits and not head.ending:
                    break
                moved = True
                if head.start():
                    self._turns.popleft()
            for run in self._runs:
                moved |= run.proceed()
            ended = sum(run.ended for run in self._runs)
            if ended:
                self._runs = [run for run in self._runs if not run.ended]
                with self._lock:
                    self._given -= ended
            if moved:
                self._pause, self._patient_pause = POLL_SECONDS, PATIENT_POLL_SECONDS
        self._flushing = self._flushing and bool(self._runs)

    def _may_begin(self, pending: Pending[Any] | None) -> bool:
        """Whether a flow may compute what it will send first. What stands alone has all others end before; among flows
        that do not run ahead one begins a round of turns, and while too many heavy ones are under way there are rounds
        that none begins; of those that do, one runs ahead, and few heavy ones are at once, unless all wait for their
        turns."""
        if pending is None or not pending.overlaps:
            if self._runs and not self._flushing:
                self._flushing = True
                self._progress()
            return not (self._runs or (pending is not None and self._brief))
        if self._flushing or not all(run.started for run in self._runs):
            return False
        heavy = sum(run.heavy for run in self._runs)
        if not (pending.ahead and all(run.ahead for run in self._runs)):
            while not self._turns and pending.at_once is not None and heavy >= pending.at_once:
                self._turns.extend(self._runs)  # on all ranks: these end at turns, so all see the same number
                self._progress()
                heavy = sum(run.heavy for run in self._runs)
            return not self._turns
        return pending.at_once is None or heavy < pending.at_once or not any(run.waits for run in self._runs)

    def _begin(self, pending: Pending[Any], event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        run = Run(pending, self._steps(pending))
        self._turns.extend([run, *self._runs] * pending.turns)
        self._runs.append(run)
        self._flushing = not pending.overlaps

    def _forget(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._open.discard(pending)

    def _wait(self) -> None:
        """Until something was submitted, or a flow may be able to go on."""
        travelling = sorted((run for run in self._runs if run.travels), key=attrgetter("number"))
        if self._flushing and (len(travelling) == 1 or not all(run.shared for run in travelling)):
            # The earliest, and no other: where its answer is that of a failure, other ranks start nothing after it
            travelling[0].proceed(block=True)
            return
        for run in travelling:
            run.announce(self._waiter, self._wake)
        timeout = None
        if any(run.wants_looks for run in travelling):
            timeout = self._pause
        elif not all(run.announced for run in travelling):
            timeout = self._patient_pause
            self._patient_pause = min(self._patient_pause * PATIENCE, LONGEST_PATIENT_POLL_SECONDS)
        given = self._mail.get(timeout)
        if given is not None and given[1] is not WAKE:
            self._inbox.append(given)
            self._pause, self._patient_pause = POLL_SECONDS, PATIENT_POLL_SECONDS


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
            for _ in self._steps(pending):
                pass  # a wait only makes the stream wait
        return pending

    def order(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def open_driver(communicator: Communicator, device: torch.device, check: Check | None = None) -> Driver:
    """The driver that suits what the communicator declares."""
    if communicator.capabilities.blocks_host or device.type != "cuda":  # CPU tensors block the host with NCCL, too
        return ThreadDriver(check, device)
    return StreamDriver(device, check)
