"""Raw operations (``hvd.allreduce`` and the like): any thread submits them, one executes them in the agreed order.

Rules:

1. Only the thread of :meth:`Operations._run` starts collectives, on communicators of its own (one per process set).
   It follows the order of the decisions, so operations of overlapping sets cannot deadlock.
2. A request is sent at once if none was sent for ``cycle_seconds``. Otherwise it is sent at the end of the cycle, or
   when a thread waits for an operation. Requests of one message are decided together, and may be fused.
3. A waiting thread waits for an event. The event is set at the end of the collective, when a decision rejects the
   operation, when the coordinator or the job's monitor reports a failure, and at this rank's own timeout.
4. The first failure of a collective fails all operations, on this rank and on the others, with the same text.
   Unsupported, which all ranks raise before they send, fails its own operation alone.
5. Channels (communicators of optimizers) are opened as raw operations, and so in one order. Their collectives are not
   negotiated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import HvdbridgeError, Unsupported
from hvdbridge.execution.flow import Mailbox
from hvdbridge.reduction.session import Session
from hvdbridge.supervisor.wire import Message
from hvdbridge.torch.actions import ACTIONS, Action, Pending
from hvdbridge.torch.channel import OptimizerChannel
from hvdbridge.torch.control import open_control
from hvdbridge.torch.coordinator import Decision, Request
from hvdbridge.torch.exceptions import DuplicateNameError, internal_error
from hvdbridge.torch.joining import find_follower, followers
from hvdbridge.torch.settings import Settings, log
from hvdbridge.torch.timeline import Timeline

CLOSE_SECONDS = 10.0  # limit of the wait for the operations thread
CLOCK_MARGIN = 10.0  # a rank's own timeout exceeds that of the coordinator, whose report names the missing ranks


class Operations:
    """Raw operations between ``hvd.init()`` and ``hvd.shutdown()``; the constructor is collective.

    Attributes:
        failure: the text with which all operations failed, or empty.
        closed: whether :meth:`close` was called.
        optimizers: number of DistributedOptimizers that share a name, by process set and name.
        on_failure: callbacks that get the failure of all operations; must not block.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self.session, self.settings = session, settings
        self.rank, self.size = session.world.rank, session.world.size
        self.failure, self.closed = "", False
        self.timeline: Timeline | None = None
        self.optimizers: dict[tuple[int, str], int] = {}
        self.on_failure: list[Callable[[BaseException], None]] = []
        self._failure_cause: BaseException | None = None
        self._cuda = session.device if session.device.type == "cuda" else None
        self._stream: Any = None
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self._pending: dict[tuple[int, str], Pending] = {}
        self._unnamed_counts: dict[tuple[str, int], int] = {}
        self._outbox: list[Request] = []
        self._sent_at, self._left = 0.0, False
        self._steps: dict[tuple[int, str], int] = {}  # the last step of each channel
        self._announcing = False  # whether this rank announces steps, because a rank has joined
        self._clock = session.monitor.clock
        self._last_message_at = 0.0  # when the coordinator's last message arrived
        self._follow_requests: Mailbox[list[Any]] = Mailbox()  # [process set, channel, step]; []: the join has ended
        self._messages: Mailbox[Message] = Mailbox()
        self._sets: dict[int, list[int]] = {0: list(range(self.size))}
        methods = {"add_set": self._add_set, "remove_set": self._remove_set, "channel": self._channel}
        self._actions: dict[str, Action] = {**ACTIONS, **methods}
        with session.monitor.watch("hvd.init()"):
            self._comms: dict[int, Communicator | None] = {0: session.communicator.split([range(self.size)])}
            self._control = open_control(session, settings, self._on_message)
        if settings.timeline:
            self.start_timeline(settings.timeline, settings.mark_cycles)
        session.monitor.on_failure(self._on_job_failure)
        self._thread = threading.Thread(target=self._run, name="hvdbridge-operations", daemon=True)
        self._thread.start()

    # Process sets ---------------------------------------------------------------------------------------

    def members(self, process_set_id: int) -> list[int]:
        """Return the ranks of a process set, ascending.

        Raises:
            ValueError: the set does not exist.
        """
        if process_set_id not in self._sets:
            raise ValueError(f"Process set {process_set_id} does not exist or has not been registered.")
        return self._sets[process_set_id]

    def add_set(self, ranks: list[int]) -> int:
        """Create a process set, and return its number. All ranks must call this method.

        Raises:
            ValueError: a rank does not exist or is given twice, or a set of these ranks exists.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"a process set needs distinct ranks below {self.size}, got {ranks}")
        if ranks in self._sets.values():
            raise ValueError(f"Attempted to add a duplicate process set: ranks {ranks} are one already")
        pending = self.submit("add_set", None, [], ranks=tuple(ranks))
        self.wait(pending)
        return int(pending.sizes[0])

    def remove_set(self, process_set_id: int) -> bool:
        """Remove a process set, and return whether it existed. All ranks must call this method."""
        if process_set_id not in self._sets:
            return False
        self.wait(self.submit("remove_set", None, [], ranks=(process_set_id,)))
        return True

    # Channels and joining -------------------------------------------------------------------------------

    def open_channel(
        self, name: str, process_set: int, title: str, member_info: Any, on_open: Callable[[OptimizerChannel], None]
    ) -> Pending:
        """Start to open a channel by an operation of the name ``channel.{name}``.

        Args:
            title: the channel's name in reports; that of the first member is used.
            member_info: picklable object for the other members.
            on_open: called with the channel on the operations thread, before :meth:`wait` returns; must not wait for
                other ranks.
        """
        return self.submit(
            "channel", name, [], process_set=process_set, member_info=member_info, on_open=on_open, title=title
        )

    def record_step(self, process_set: int, name: str, step: int) -> None:
        """Record the step that this rank begins in a channel, and announce it if a rank has joined."""
        self._steps[process_set, name] = step
        if self._announcing:
            self._control.send({"begun": [(process_set, name, step)]})

    def join(self) -> int:
        """Contribute zeros until all ranks have joined, and return the rank that joined last.

        Raises:
            HorovodInternalError: see ``hvd.join``.
        """
        for follower in followers():
            follower.join(begins=True)
        self._announce()  # ranks that joined earlier must take part in the steps that this rank has begun
        pending = self.submit("join", None, [], title="join()")
        self.flush()
        limit = self.settings.timeout_seconds + CLOCK_MARGIN
        while not pending.done.is_set():
            if channel_and_step := self._follow_requests.get(limit):
                self._follow_step(*channel_and_step)
            elif self._clock() - self._last_message_at > limit:
                self._fail(f"join: rank 0, which coordinates, said nothing for {limit:g} s")
        self.wait(pending)
        for follower in followers():
            follower.join(begins=False)
        return int(pending.sizes[0])

    def _follow_step(self, process_set: int, name: str, step: int) -> None:
        """Let the channel's optimizer contribute zeros to its steps up to number ``step``."""
        if 0 < step <= self._steps.get((process_set, name), 0):
            return  # this rank made that step itself, with an optimizer that may not exist any more
        if (follower := find_follower(process_set, name)) is not None:
            follower.follow(step)
            return
        joined = f"rank {self.rank} called hvd.join()"
        self._fail_all(f"{joined} and has no optimizer of its own for {name!r}, which others use")

    def _announce(self) -> None:
        if self._steps:
            self._control.send({"begun": [(*channel, step) for channel, step in list(self._steps.items())]})

    # Submitting and waiting -----------------------------------------------------------------------------

    def submit(
        self, kind: str, name: str | None, inputs: Sequence[Tensor], *, label: str = "", in_place: bool = False,
        grouped: bool = False, process_set: int = 0, title: str = "", member_info: Any = None,
        on_open: Callable[[OptimizerChannel], None] | None = None, **more: Any,
    ) -> Pending:  # fmt: skip
        """Submit an operation without waiting for it.

        Args:
            kind: kind of the :class:`~hvdbridge.torch.coordinator.Request`; ``more`` are further fields of it.
            name: None or empty: the next running number of this label and process set.
            inputs: tensors that this rank contributes, all on CPUs or all on a GPU.
            label: first part of the request's name; default: ``kind`` (grouped operations have labels of their own).
            in_place: whether the results overwrite ``inputs``.
            grouped: whether the result is a tuple of tensors.
            title: the operation's text in reports, in place of ``name``.
            member_info, on_open: see :meth:`open_channel`.

        Raises:
            ValueError: this rank is not in the set, the set does not exist, or the devices of ``inputs`` differ.
            DuplicateNameError: the name is in flight.
            HorovodInternalError: the operations have failed, or were shut down.
        """
        label = label or kind
        if self.rank not in self.members(process_set):
            raise ValueError(
                f"{label}: Rank {self.rank} is not a member of the provided process set {self._sets[process_set]}"
            )
        device = "cuda" if inputs and inputs[0].is_cuda else "cpu"
        if any(tensor.is_cuda != inputs[0].is_cuda for tensor in inputs):
            raise ValueError(f"{label}: the tensors of a group must be on the same device")
        with self._lock:
            self._check_open(label)
            number = self._unnamed_counts.get((label, process_set), 0) + 1
            request = Request(
                kind, f"{label}.{name or f'noname.{number}'}" if name or kind not in ("join", "barrier") else label,
                process_set, tuple(str(tensor.dtype).removeprefix("torch.") for tensor in inputs),
                tuple(tuple(tensor.shape) for tensor in inputs), device=device, label=title,
                bytes=sum(tensor.nbytes for tensor in inputs), **more,
            )  # fmt: skip
            detached = [tensor.detach() for tensor in inputs]
            pending = Pending(request, detached, list(inputs) if in_place else None, grouped, member_info, on_open)
            if pending.key in self._pending:
                raise internal_error(
                    f"rank {self.rank}: {request.title} is in flight already: a name can be used again after "
                    "synchronize() of its handle. Use a different name.", DuplicateNameError,
                )  # fmt: skip
            if not name:
                self._unnamed_counts[label, process_set] = number
            if device == "cuda":
                pending.inputs_ready = torch.cuda.current_stream(inputs[0].device).record_event()
            self._pending[pending.key] = pending
            self._outbox.append(request)
            due = time.monotonic() - self._sent_at >= self.settings.cycle_seconds
            first = len(self._outbox) == 1
        if due:
            self.flush()
        elif first:
            self._messages.put({})  # wakes the operations thread, which sends the request at the end of the cycle
        return pending

    def flush(self) -> None:
        """Send the requests that were submitted and not sent yet."""
        with self._send_lock:
            with self._lock:
                batch, self._outbox = self._outbox, []
                self._sent_at = time.monotonic()
            if batch:
                if (timeline := self.timeline) is not None:
                    timeline.cycle()
                self._control.send({"submit": [request.pack() for request in batch]})

    def poll(self, pending: Pending) -> bool:
        """Return whether the operation has ended, so that :meth:`wait` would not block."""
        if not pending.done.is_set() and self._outbox:
            self.flush()
        return pending.done.is_set() and (pending.results_ready is None or pending.results_ready.query())

    def wait(self, pending: Pending) -> Any:
        """Wait for an operation, and return its result. On CUDA, the current stream waits for the collective.

        Raises:
            HorovodInternalError: the operation failed, on this rank or another.
        """
        if not pending.done.is_set():
            if self._outbox:
                self.flush()
            self._wait_until_done(pending)
        if pending.error:
            raise internal_error(pending.error) from pending.cause
        if pending.results_ready is not None:
            for tensor in pending.results:
                if tensor.is_cuda:  # an all-to-all returns its received splits in host memory
                    current = torch.cuda.current_stream(tensor.device)
                    current.wait_event(pending.results_ready)
                    tensor.record_stream(current)
        return pending.result

    def _wait_until_done(self, pending: Pending) -> None:
        limit, since = self.settings.timeout_seconds + CLOCK_MARGIN, self._clock()
        while not pending.done.wait(CLOCK_MARGIN):
            if not pending.decided_at and self._clock() - since > limit:
                self._fail(f"{pending.request.title}: rank 0, which coordinates, gave no answer within {limit:g} s")

    def _check_open(self, label: str) -> None:
        """Raise HorovodInternalError if no operation can be submitted any more."""
        if self.failure:
            raise internal_error(self.failure) from self._failure_cause
        if self._left or self.closed:
            raise internal_error(f"rank {self.rank}: {label} after hvd.shutdown()")

    # The thread -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        """Execute decisions until the coordinator's ``end`` message. Runs on the operations thread."""
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
            self._stream = torch.cuda.Stream(self._cuda)
        while "end" not in (message := self._next_message()):
            if "announce" in message:
                self._announce()
            for packed in message.get("do", ()):
                decision = Decision(*packed)
                try:
                    self._execute_decision(decision)
                except Exception as error:
                    self._handle_exception(decision, error)

    def _next_message(self) -> Message:
        """Wait for a message of the coordinator; meanwhile send requests whose cycle has ended."""
        while True:
            due = self._sent_at + self.settings.cycle_seconds - time.monotonic() if self._outbox else None
            if due is not None and due <= 0:
                self.flush()
            elif (message := self._messages.get(due)) is not None:
                return message

    def _on_message(self, message: Message) -> None:
        """Handle a message of the coordinator, on the receiving thread or, on rank 0, on any thread."""
        self._last_message_at = self._clock()
        if "follow" in message:
            self._follow_requests.put(message["follow"])
        elif "failed" in message:
            self._fail(message["failed"])
        elif "stalled" in message:
            log.warning("rank %d: %s", self.rank, message["stalled"])
        else:
            now = time.monotonic()
            if "announce" in message:  # for record_step(); the operations thread announces earlier steps
                self._announcing = True
            for kind, names, process_set, *_ in message.get("do", ()):
                if kind == "join":
                    self._announcing = False
                for name in names:
                    if (pending := self._pending.get((process_set, name))) is not None:
                        pending.decided_at = now
            self._messages.put(message)

    def _execute_decision(self, decision: Decision) -> None:
        """Execute or reject the operations of a decision, and write them to the timeline."""
        started_at = time.monotonic()
        known = [self._pending.get((decision.process_set, name)) for name in decision.names]
        batch = [pending for pending in known if pending is not None]
        if (trace := self.timeline) is not None:  # a local reference, because another thread may stop the timeline
            for pending in batch:
                trace.negotiated(pending.request.name, pending.request.kind, pending.submitted_at, pending.decided_at)
        if decision.error:
            for pending in batch:
                self._complete(pending, error=decision.error)
            return
        if self.failure:  # the other ranks will fail it, too
            return
        if decision.kind == "join":
            self._unnamed_counts.clear()  # ranks that joined early have counted fewer operations
        self._execute_batch(decision, known)
        for pending in batch:
            if trace is not None:  # before the operation is done, because a waiting thread may stop the timeline
                args = {"fused": len(known)} if len(known) > 1 else {}
                trace.executed(pending.request.name, pending.request.kind, started_at, args)
            self._complete(pending)

    def _execute_batch(self, decision: Decision, known: list[Pending | None]) -> None:
        """Execute the decision's operations together. ``known`` has None where a joined rank contributes zeros."""
        if None in known and len(decision.requests) != len(known):
            raise RuntimeError(f"a decision about {decision.names}, of which this rank knows nothing")
        requests = [Request(*decision.requests[i]) if own is None else own.request for i, own in enumerate(known)]
        stream: Any = self._stream if any(request.device == "cuda" for request in requests) else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            work = [own or Pending(request, self._zeros(request)) for own, request in zip(known, requests, strict=True)]
            for pending in work if stream is not None else ():
                if pending.inputs_ready is not None:
                    stream.wait_event(pending.inputs_ready)
                for tensor in pending.inputs:
                    tensor.record_stream(stream)
            comm = self._comms[decision.process_set]
            assert comm is not None, "decisions are sent to members"
            values = self._actions[decision.kind](comm, decision, work)
            for pending in work:
                count = len(pending.inputs) if len(work) > 1 else len(values)
                pending.set_results(values[:count])
                del values[:count]
                pending.sizes = decision.sizes
            event = stream.record_event() if stream is not None else None
        for pending in work:
            pending.results_ready = event

    def _complete(self, pending: Pending, error: str = "", cause: BaseException | None = None) -> None:
        """End an operation that has completed or, with ``error``, failed. No effect on one that has ended."""
        with self._lock:
            self._pending.pop(pending.key, None)
            if pending.done.is_set():
                return
            pending.error, pending.cause = error, cause
            pending.inputs = []
            pending.done.set()
        if pending.request.kind == "join":
            self._follow_requests.put([])

    # Failure --------------------------------------------------------------------------------------------

    def _handle_exception(self, decision: Decision, error: Exception) -> None:
        """Handle an exception of the operations thread: fail all operations (rule 4)."""
        names = ", ".join(decision.names[:3])
        if isinstance(error, Unsupported):  # all ranks raise it before they send data, so other operations go on
            for name in decision.names:
                if (pending := self._pending.get((decision.process_set, name))) is not None:
                    self._complete(pending, str(error), error)
            return
        cause = self.session.monitor.cause_of(error)
        text = str(cause) if isinstance(cause, HvdbridgeError) else f"{type(cause).__name__}: {cause}"
        self._fail_all(f"rank {self.rank}: {names} failed: {text}", cause)

    def _fail_all(self, text: str, cause: BaseException | None = None) -> None:
        """Fail all operations on all ranks."""
        self._fail(text, cause)
        self._control.send({"fail": text})

    def _on_job_failure(self, failure: HvdbridgeError) -> None:
        self._fail(str(failure), failure)

    def _fail(self, text: str, cause: BaseException | None = None) -> None:
        """Fail open and later operations on this rank, with the first failure's text."""
        with self._lock:
            if not self.failure:
                self.failure, self._failure_cause = text, cause
            unfinished = list(self._pending.values())
        for pending in unfinished:
            self._complete(pending, self.failure, self._failure_cause)
        for callback in () if self.closed else list(self.on_failure):
            callback(self._failure_cause or internal_error(self.failure))

    # The end --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Announce that this rank submits nothing more, so operations that need it fail. Harmless when repeated."""
        if not self._left:
            self.flush()
            self._left = True
            self._control.send({"leave": True})

    def close(self) -> None:
        """End the threads and free the communicators. All ranks call this together. Harmless when repeated."""
        if self.closed:
            return
        self.leave()
        if self.failure:
            self._messages.put({"end": True})  # the thread may be blocked in a collective, so the wait is short
        self._thread.join(1.0 if self.failure else CLOSE_SECONDS)
        self.closed = True
        self.session.monitor.remove_on_failure(self._on_job_failure)
        self._fail("operations were still open when hvd.shutdown() was called")
        self._control.close()
        self.stop_timeline()
        for comm in self._comms.values():
            if comm is not None and not self._thread.is_alive():
                comm.close()

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Start a trace, which rank 0 writes; an open trace ends."""
        self.stop_timeline()
        if self.rank == 0:
            self.timeline = Timeline(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the trace. Harmless without one."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    # Actions that change this object, on the operations thread ------------------------------------------

    def _add_set(self, comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
        ranks = list(operations[0].request.ranks)
        self._comms[decision.sizes[0]] = comm.split([ranks])
        self._sets[decision.sizes[0]] = ranks
        return []

    def _remove_set(self, comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
        del self._sets[number := operations[0].request.ranks[0]]
        if (removed := self._comms.pop(number)) is not None:
            removed.close()
        return []

    def _channel(self, comm: Communicator, decision: Decision, operations: list[Pending]) -> list[Tensor]:
        pending, members = operations[0], self._sets[decision.process_set]
        self._steps.pop(pending.key, None)  # a new channel counts its steps from 1
        assert pending.on_open is not None
        title, member_info = pending.request.title, pending.member_info
        pending.on_open(OptimizerChannel.open(self.session, self.settings, comm, members, title, member_info))
        return []

    def _zeros(self, request: Request) -> list[Tensor]:
        """Return the tensors of zeros that a joined rank contributes to the operation."""
        device = self._cuda if request.device == "cuda" else None
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
        ]
