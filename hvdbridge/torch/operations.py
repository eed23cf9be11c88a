"""Raw operations of this rank: any thread submits them; one thread executes them, in the order that all agreed on.

Rules:

1. Only the thread of :meth:`Operations._run` starts collectives. It uses communicators of its own (one per process
   set) and follows the order of the decisions, so operations of several sets cannot cross.
2. A request is sent at once if nothing was sent for ``cycle_seconds``. Otherwise it is sent with those of the same
   cycle, or when a thread waits for one. Requests that travel together are decided, and may be fused, together.
3. A waiting thread waits for an event. The end of the collective sets it, a decision that refuses the operation, a
   failure that the coordinator or the job's monitor reports, and at last this rank's own clock.
4. The first failure while data travels ends all operations, here and on the other ranks, with the same text.
5. Channels of optimizers are opened here, so their order is agreed on, too. What travels in them is not negotiated.
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
from hvdbridge.torch.channel import Channel
from hvdbridge.torch.control import open_control
from hvdbridge.torch.coordinator import Decision, Request
from hvdbridge.torch.exceptions import DuplicateNameError, internal_error
from hvdbridge.torch.joining import find, followers
from hvdbridge.torch.settings import Settings, log
from hvdbridge.torch.timeline import Timeline

CLOSE_SECONDS = 10.0

LATER = 10.0
"""Seconds by which a rank's own clock comes after the coordinator's, which knows the missing ranks."""


class Operations:
    """Between ``hvd.init()`` and ``hvd.shutdown()``; the constructor is collective.

    Attributes:
        failure: why everything ended, or empty.
        closed: no more operations.
        optimizers: how many DistributedOptimizers share a name, by process set and name.
        on_failure: called with the failure that ends everything; must not block.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self.session = session
        self.settings = settings
        self.rank, self.size = session.world.rank, session.world.size
        self.failure = ""
        self.closed = False
        self.timeline: Timeline | None = None
        self.optimizers: dict[tuple[int, str], int] = {}
        self.on_failure: list[Callable[[BaseException], None]] = []
        self._cause: BaseException | None = None
        self._cuda = session.device if session.device.type == "cuda" else None
        self._stream: Any = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._pending: dict[tuple[int, str], Pending] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._outbox: list[Request] = []
        self._sent_at = 0.0
        self._left = False
        self._begun: dict[tuple[int, str], int] = {}  # of each channel the last step
        self._announcing = False  # a rank has joined
        self._clock = session.monitor.clock
        self._heard = 0.0  # when the coordinator sent its last message
        self._follow: Mailbox[list[Any]] = Mailbox()  # of a joined rank: [process set, channel, step]; empty: the end
        self._messages: Mailbox[Message] = Mailbox()
        self._sets: dict[int, list[int]] = {0: list(range(self.size))}
        own = {"add_set": self._add_set, "remove_set": self._remove_set, "channel": self._channel}
        self._actions: dict[str, Action] = {**ACTIONS, **own}
        with session.monitor.watch("hvd.init()"):
            self._comms: dict[int, Communicator | None] = {0: session.communicator.split([range(self.size)])}
            self._control = open_control(session, settings, self._deliver)
        if settings.timeline:
            self.start_timeline(settings.timeline, settings.mark_cycles)
        session.monitor.on_failure(self._job_failed)
        self._thread = threading.Thread(target=self._run, name="hvdbridge-operations", daemon=True)
        self._thread.start()

    # Process sets ---------------------------------------------------------------------------------------

    def members(self, process_set_id: int) -> list[int]:
        """The ranks of a set, ascending.

        Raises:
            ValueError: there is no such set.
        """
        if process_set_id not in self._sets:
            raise ValueError(f"Process set {process_set_id} does not exist or has not been registered.")
        return self._sets[process_set_id]

    def add_set(self, ranks: list[int]) -> int:
        """Make a process set, and return its number. All ranks must call this.

        Raises:
            ValueError: no such ranks, or they are a set already.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"a process set needs distinct ranks below {self.size}, got {ranks}")
        if ranks in self._sets.values():
            raise ValueError(f"Attempted to add a duplicate process set: ranks {ranks} are one already")
        pending = self.submit("add_set", None, [], ranks=tuple(ranks))
        self.wait(pending)
        return int(pending.sizes[0])

    def remove_set(self, process_set_id: int) -> bool:
        """Remove a process set; all ranks must call this. Returns whether it existed."""
        if process_set_id not in self._sets:
            return False
        self.wait(self.submit("remove_set", None, [], ranks=(process_set_id,)))
        return True

    # Channels and joining -------------------------------------------------------------------------------

    def open(self, name: str, process_set: int, title: str, offer: Any, opened: Callable[[Channel], None]) -> Pending:
        """Start to open a channel, whose name among the operations is ``channel.{name}``.

        Args:
            title: the channel's name in reports; rank 0's counts.
            offer: anything that pickles, for the other members.
            opened: called with the channel on the thread, before :meth:`wait` returns; must not wait for other ranks.
        """
        return self.submit("channel", name, [], process_set=process_set, offer=offer, opened=opened, title=title)

    def begins(self, process_set: int, name: str, step: int) -> None:
        """This rank begins a step in a channel; a joined rank must follow."""
        self._begun[process_set, name] = step
        if self._announcing:
            self._control.tell({"begun": [(process_set, name, step)]})

    def join(self) -> int:
        """Follow the others with zeros until all have joined; the rank that joined last.

        Raises:
            HorovodInternalError: see ``hvd.join``.
        """
        for each in followers():
            each.join(begins=True)
        self._announce()  # ranks that joined before must follow these steps to their end
        pending = self.submit("join", None, [], title="join()")
        self.flush()
        limit = self.settings.timeout_seconds + LATER
        while not pending.done.is_set():
            if wanted := self._follow.get(limit):
                self._follow_one(*wanted)
            elif self._clock() - self._heard > limit:
                self._fail(f"join: rank 0, which coordinates, said nothing for {limit:g} s")
        self.wait(pending)
        for each in followers():
            each.join(begins=False)
        return int(pending.sizes[0])

    def _follow_one(self, process_set: int, name: str, step: int) -> None:
        if 0 < step <= self._begun.get((process_set, name), 0):
            return  # this rank made that step itself, with an optimizer that may be gone by now
        if (follower := find(process_set, name)) is not None:
            follower.follow(step)
            return
        who = f"rank {self.rank} called hvd.join()"
        self._fail_all(f"{who} and has no optimizer of its own for {name!r}, which others use")

    def _announce(self) -> None:
        if self._begun:
            self._control.tell({"begun": [(*channel, step) for channel, step in list(self._begun.items())]})

    # Submitting and waiting -----------------------------------------------------------------------------

    def submit(
        self, kind: str, name: str | None, inputs: Sequence[Tensor], *, label: str = "", in_place: bool = False,
        grouped: bool = False, process_set: int = 0, title: str = "", offer: Any = None,
        opened: Callable[[Channel], None] | None = None, **more: Any,
    ) -> Pending:  # fmt: skip
        """Start an operation.

        Args:
            kind: of :class:`~hvdbridge.torch.coordinator.Request`; ``more`` are its other fields.
            name: None or empty: the next running number of this label and process set.
            label: the kind as in names, if it is another one there (grouped operations).
            title: the name in messages, in place of ``name``.
            offer, opened: see :meth:`open`.

        Raises:
            ValueError: this rank is not in the set, or there is no such set.
            DuplicateNameError: the name is in flight.
            HorovodInternalError: operations have failed or ended before.
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
            number = self._numbers.get((label, process_set), 0) + 1
            request = Request(
                kind, f"{label}.{name or f'noname.{number}'}" if name or kind not in ("join", "barrier") else label,
                process_set, tuple(str(tensor.dtype).removeprefix("torch.") for tensor in inputs),
                tuple(tuple(tensor.shape) for tensor in inputs), device=device, label=title,
                bytes=sum(tensor.nbytes for tensor in inputs), **more,
            )  # fmt: skip
            sent = [tensor.detach() for tensor in inputs]
            pending = Pending(request, sent, list(inputs) if in_place else None, grouped, offer, opened)
            if pending.key in self._pending:
                raise internal_error(
                    f"rank {self.rank}: {request.title} is in flight already: a name can be used again after "
                    "synchronize() of its handle. Use a different name.", DuplicateNameError,
                )  # fmt: skip
            if not name:
                self._numbers[label, process_set] = number
            if device == "cuda":
                pending.ready = torch.cuda.current_stream(inputs[0].device).record_event()
            self._pending[pending.key] = pending
            self._outbox.append(request)
            due = time.monotonic() - self._sent_at >= self.settings.cycle_seconds
            first = len(self._outbox) == 1
        if due:
            self.flush()
        elif first:
            self._messages.put({})  # the thread sends it when the cycle is over
        return pending

    def flush(self) -> None:
        """Send what was submitted."""
        with self._sending:
            with self._lock:
                batch, self._outbox = self._outbox, []
                self._sent_at = time.monotonic()
            if batch:
                if (timeline := self.timeline) is not None:
                    timeline.cycle()
                self._control.tell({"submit": [request.pack() for request in batch]})

    def poll(self, pending: Pending) -> bool:
        """Whether :meth:`wait` would not block."""
        if not pending.done.is_set() and self._outbox:
            self.flush()
        return pending.done.is_set() and (pending.after is None or pending.after.query())

    def wait(self, pending: Pending) -> Any:
        """The results of an operation.

        Raises:
            HorovodInternalError: it failed, on whatever rank.
        """
        if not pending.done.is_set():
            if self._outbox:
                self.flush()
            self._await(pending)
        if pending.error:
            raise internal_error(pending.error) from pending.cause
        if pending.after is not None:
            for tensor in pending.results:
                if tensor.is_cuda:  # the received splits of an all-to-all are in host memory
                    current = torch.cuda.current_stream(tensor.device)
                    current.wait_event(pending.after)
                    tensor.record_stream(current)
        return pending.result

    def _await(self, pending: Pending) -> None:
        limit = self.settings.timeout_seconds + LATER
        since = self._clock()
        while not pending.done.wait(LATER):
            if not pending.decided and self._clock() - since > limit:
                self._fail(f"{pending.request.title}: rank 0, which coordinates, gave no answer within {limit:g} s")

    def _check_open(self, label: str) -> None:
        if self.failure:
            raise internal_error(self.failure) from self._cause
        if self._left or self.closed:
            raise internal_error(f"rank {self.rank}: {label} after hvd.shutdown()")

    # The thread -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
            self._stream = torch.cuda.Stream(self._cuda)
        while True:
            message = self._next_message()
            if "end" in message:
                return
            if "announce" in message:
                self._announce()
            for packed in message.get("do", ()):
                decision = Decision(*packed)
                try:
                    self._carry_out(decision)
                except Exception as error:
                    self._failed(decision, error)

    def _next_message(self) -> Message:
        while True:
            due = None
            if self._outbox:
                due = self._sent_at + self.settings.cycle_seconds - time.monotonic()
                if due <= 0:
                    self.flush()
                    continue
            if (message := self._messages.get(due)) is not None:
                return message

    def _deliver(self, message: Message) -> None:
        """On the control's thread: a message of the coordinator."""
        self._heard = self._clock()
        if "follow" in message:
            self._follow.put(message["follow"])
        elif "failed" in message:
            self._fail(message["failed"])
        elif "stalled" in message:
            log.warning("rank %d: %s", self.rank, message["stalled"])
        else:
            now = time.monotonic()
            if "announce" in message:  # begins() announces from now on, and the thread announces earlier steps
                self._announcing = True
            for kind, names, process_set, *_ in message.get("do", ()):
                if kind == "join":
                    self._announcing = False
                for name in names:
                    if (job := self._pending.get((process_set, name))) is not None:
                        job.decided = now
            self._messages.put(message)

    def _carry_out(self, decision: Decision) -> None:
        began = time.monotonic()
        known = [self._pending.get((decision.process_set, name)) for name in decision.names]
        jobs = [job for job in known if job is not None]
        if (timeline := self.timeline) is not None:  # which another thread may stop
            for job in jobs:
                timeline.negotiated(job.request.name, job.request.kind, job.since, job.decided)
        if decision.error:
            for job in jobs:
                self._settle(job, error=decision.error)
            return
        if self.failure:  # the operations have failed already, and will fail on the other ranks
            return
        if decision.kind == "join":
            self._numbers.clear()  # ranks that joined early have counted less
        self._execute(decision, known)
        for job in jobs:
            if timeline is not None:  # before any thread learns that it is done, and may stop the timeline
                together = {"fused": len(known)} if len(known) > 1 else {}
                timeline.executed(job.request.name, job.request.kind, began, together)
            self._settle(job)

    def _execute(self, decision: Decision, known: list[Pending | None]) -> None:
        """Execute the operations together. A joined rank takes part with zeros in those that it does not know."""
        if None in known and len(decision.requests) != len(known):
            raise RuntimeError(f"a decision about {decision.names}, of which this rank knows nothing")
        requests = [Request(*decision.requests[i]) if job is None else job.request for i, job in enumerate(known)]
        stream: Any = self._stream if any(request.device == "cuda" for request in requests) else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            jobs = [job or Pending(request, self._zeros(request)) for job, request in zip(known, requests, strict=True)]
            for job in jobs if stream is not None else ():
                if job.ready is not None:
                    stream.wait_event(job.ready)
                for tensor in job.inputs:
                    tensor.record_stream(stream)
            comm = self._comms[decision.process_set]
            assert comm is not None, "decisions are sent to members"
            values = self._actions[decision.kind](comm, decision, jobs)
            for job in jobs:
                count = len(job.inputs) if len(jobs) > 1 else len(values)
                job.take(values[:count])
                del values[:count]
                job.sizes = decision.sizes
            event = stream.record_event() if stream is not None else None
        for job in jobs:
            job.after = event

    def _settle(self, job: Pending, error: str = "", cause: BaseException | None = None) -> None:
        with self._lock:
            self._pending.pop(job.key, None)
            if job.done.is_set():
                return
            job.error, job.cause = error, cause
            job.inputs = []
            job.done.set()
        if job.request.kind == "join":
            self._follow.put([])

    # Failure --------------------------------------------------------------------------------------------

    def _failed(self, decision: Decision, error: Exception) -> None:
        """An exception on the thread, rule 4."""
        names = ", ".join(decision.names[:3])
        if isinstance(error, Unsupported):  # all ranks refuse it, before anything is sent
            for name in decision.names:
                if (job := self._pending.get((decision.process_set, name))) is not None:
                    self._settle(job, str(error), error)
            return
        first = self.session.monitor.cause_of(error)
        text = str(first) if isinstance(first, HvdbridgeError) else f"{type(first).__name__}: {first}"
        self._fail_all(f"rank {self.rank}: {names} failed: {text}", first)

    def _fail_all(self, text: str, cause: BaseException | None = None) -> None:
        self._fail(text, cause)
        self._control.tell({"fail": text})

    def _job_failed(self, failure: HvdbridgeError) -> None:
        self._fail(str(failure), failure)

    def _fail(self, text: str, cause: BaseException | None = None) -> None:
        with self._lock:
            if not self.failure:
                self.failure, self._cause = text, cause
            open_ = list(self._pending.values())
        for job in open_:
            self._settle(job, self.failure, self._cause)
        for callback in () if self.closed else list(self.on_failure):
            callback(self._cause or internal_error(self.failure))

    # The end --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This rank submits nothing more; operations of others that need it fail. Harmless when repeated."""
        if not self._left:
            self.flush()
            self._left = True
            self._control.tell({"leave": True})

    def close(self) -> None:
        """End the threads; called when all ranks close. Harmless when repeated."""
        if self.closed:
            return
        self.leave()
        if self.failure:
            self._messages.put({"end": True})  # the thread may be stuck in a collective, so the wait is short
        self._thread.join(1.0 if self.failure else CLOSE_SECONDS)
        self.closed = True
        self.session.monitor.remove_on_failure(self._job_failed)
        self._fail("operations were still open when hvd.shutdown() was called")
        self._control.close()
        self.stop_timeline()
        for comm in self._comms.values():
            if comm is not None and not self._thread.is_alive():
                comm.close()

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Begin a trace, in place of one that is open; rank 0 writes it."""
        self.stop_timeline()
        if self.rank == 0:
            self.timeline = Timeline(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the trace. Harmless without one."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    # Actions that concern this object, on the thread ----------------------------------------------------

    def _add_set(self, comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
        ranks = list(jobs[0].request.ranks)
        self._comms[decision.sizes[0]] = comm.split([ranks])
        self._sets[decision.sizes[0]] = ranks
        return []

    def _remove_set(self, comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
        number = jobs[0].request.ranks[0]
        del self._sets[number]
        if (removed := self._comms.pop(number)) is not None:
            removed.close()
        return []

    def _channel(self, comm: Communicator, decision: Decision, jobs: list[Pending]) -> list[Tensor]:
        job, members = jobs[0], self._sets[decision.process_set]
        self._begun.pop(job.key, None)  # the steps in it are counted anew
        assert job.opened is not None
        job.opened(Channel.open(self.session, self.settings, comm, members, job.request.title, job.offer))
        return []

    def _zeros(self, request: Request) -> list[Tensor]:
        """What a joined rank contributes."""
        device = self._cuda if request.device == "cuda" else None
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
        ]
