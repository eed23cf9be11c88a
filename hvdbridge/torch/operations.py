"""The raw operations of this rank: submitted by any thread, carried out by one, in the order that all ranks agreed on.

Rules:

1. Only the thread of :meth:`Operations._run` starts collectives, on communicators of our own (one per process set), in
   the order of the coordinator's decisions: operations of several sets cannot cross.
2. A request is sent at once where nothing was sent for a while, else with those of the next ``cycle_seconds``, or when
   somebody waits for one. Requests that travel together are decided, and may be fused, together.
3. A rank that waits, waits for an event; what ends it is a decision, the end of the collective, a failure that the
   coordinator or the job's monitor tells, and at last its own clock.
4. The first failure while data travels ends all operations, here and on the other ranks, with the same text.
5. Channels of optimizers are opened here, so their order is agreed on, too; what travels in them passes by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import HvdbridgeError, Unsupported
from hvdbridge.execution.flow import Mailbox
from hvdbridge.policy.collectives import AllGather, AllToAll, Broadcast
from hvdbridge.reduction.session import Session
from hvdbridge.torch import arithmetic
from hvdbridge.torch.arithmetic import as_bytes, from_bytes
from hvdbridge.torch.control import Control, Hub, Spoke
from hvdbridge.torch.coordinator import Coordinator, Decision, Message, Request
from hvdbridge.torch.exceptions import DuplicateNameError, internal_error
from hvdbridge.torch.joining import find, followers
from hvdbridge.torch.settings import Settings, log
from hvdbridge.torch.timeline import Timeline

LATER = 10.0
"""Seconds by which a rank's own clock comes after the coordinator's: that one knows who is missing."""

CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Channel:
    """Communicators for one purpose among the members of a process set.

    Attributes:
        control: for host memory.
        offers: what each member said when it was opened, in rank order.
        check: compares collectives before they start, under HVDBRIDGE_DEBUG.
    """

    communicator: Communicator
    control: Communicator
    offers: list[Any]
    check: Callable[[int, str], None] | None

    def close(self) -> None:
        self.control.close()
        self.communicator.close()


@dataclass(frozen=True)
class Offer:
    """What this rank says to the others when a channel opens, and what takes the channel."""

    text: Any
    opened: Callable[[Channel], None]


@dataclass(eq=False)
class Pending:
    """An operation of this rank under way.

    Attributes:
        inputs: what it sends; kept until it is complete.
        targets: the tensors that take the results, if it works in place.
        grouped: whether the result is several tensors.
        results: when it is complete.
        sizes: what the decision told (rows of each member, splits, a number).
        since, decided: when it was submitted, and found ready (0: not yet), by the monotonic clock.
        ready: on CUDA, recorded when the inputs were complete;  after: when the results are.
        offer: of a channel.
    """

    request: Request
    inputs: list[Tensor]
    targets: list[Tensor] | None = None
    grouped: bool = False
    results: list[Tensor] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    error: str = ""
    cause: BaseException | None = None
    since: float = field(default_factory=time.monotonic)
    decided: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    ready: Any = None
    after: Any = None
    offer: Offer | None = None

    @property
    def key(self) -> tuple[int, str]:
        return self.request.process_set, self.request.name

    @property
    def result(self) -> Any:
        return tuple(self.results) if self.grouped else self.results[0] if self.results else None


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
        self._announcing = False  # somebody has joined
        self._clock = session.monitor.clock
        self._heard = 0.0  # when the coordinator last said something
        self._follow: Mailbox[list[Any]] = Mailbox()  # of a rank that joined: what to do
        self._messages: Mailbox[Message] = Mailbox()
        self._sets: dict[int, list[int]] = {0: list(range(self.size))}
        with session.monitor.watch("hvd.init()"):
            self._comms: dict[int, Communicator | None] = {0: session.communicator.split([range(self.size)])}
            self._control = self._open_control()
        if settings.timeline:
            self.start_timeline(settings.timeline, settings.mark_cycles)
        session.monitor.on_failure(self._job_failed)
        self._thread = threading.Thread(target=self._run, name="hvdbridge-operations", daemon=True)
        self._thread.start()

    def _open_control(self) -> Control:
        session, settings = self.session, self.settings
        count = session.opened["hvd"] = session.opened.get("hvd", 0) + 1
        key, seconds = f"hvd/{count}", session.config.timeout_seconds
        coordinator = Coordinator(
            self.size, settings.stall_seconds, settings.timeout_seconds, settings.fusion_bytes, settings.limit
        )
        if self.size == 1:
            return Control(coordinator, self._deliver, self._clock)
        if self.rank == 0:
            ports = session.config.ports
            return Hub(coordinator, self._deliver, session.monitor, session.monitor.host, key, seconds, ports)
        return Spoke(self._deliver, session.monitor, self.rank, key, seconds)

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
        """Make a process set; all ranks call it alike. Its number.

        Raises:
            ValueError: no such ranks, or they are a set already.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"a process set needs distinct ranks below {self.size}, got {ranks}")
        if ranks in self._sets.values():
            raise ValueError(f"Attempted to add a duplicate process set: ranks {ranks} are one already")
        pending = self.submit("add_set", "add_set", None, [], ranks=tuple(ranks))
        self.wait(pending)
        return int(pending.sizes[0])

    def remove_set(self, process_set_id: int) -> bool:
        """Remove a process set; all ranks call it alike. Whether there was one."""
        if process_set_id not in self._sets:
            return False
        self.wait(self.submit("remove_set", "remove_set", None, [], ranks=(process_set_id,)))
        return True

    # Channels and joining -------------------------------------------------------------------------------

    def open(self, name: str, process_set: int, title: str, offer: Any, opened: Callable[[Channel], None]) -> Pending:
        """Start to open a channel, which ranks know by its number and ``channel.{name}``.

        Args:
            title: how reports call it and what travels in it; rank 0's counts.
            offer: anything that pickles, for the other members.
            opened: called with it on the thread, before :meth:`wait` returns; must not wait for other ranks.
        """
        return self.submit(
            "channel", "channel", name, [], process_set=process_set, offer=Offer(offer, opened), title=title
        )

    def begins(self, process_set: int, name: str, step: int) -> None:
        """This rank begins a step in a channel; who joined must hear of it."""
        self._begun[process_set, name] = step
        if self._announcing:
            self._control.announce([(process_set, name, step)])

    def join(self) -> int:
        """Follow the others with zeros until all have joined; the rank that joined last.

        Raises:
            HorovodInternalError: see ``hvd.join``.
        """
        for each in followers():
            each.join(begins=True)
        self._announce()  # who joined before must follow these to their end
        pending = self.submit("join", "join", None, [])
        self.flush()
        while not pending.done.is_set():
            self._follow_one()
        self.wait(pending)
        for each in followers():
            each.join(begins=False)
        return int(pending.sizes[0])

    def _follow_one(self) -> None:
        limit = self.settings.timeout_seconds + LATER
        wanted = self._follow.get(limit)
        if wanted is None:
            if self._clock() - self._heard > limit:
                self._fail(f"join: rank 0, which coordinates, said nothing for {limit:g} s")
            return
        if not wanted:  # all have joined, or a failure
            return
        process_set, name, step = wanted
        if 0 < step <= self._begun.get((process_set, name), 0):
            return  # this rank made that step itself, with an optimizer that may be gone by now
        follower = find(process_set, name)
        if follower is None:
            text = f"rank {self.rank} called hvd.join() and has no optimizer of its own for {name!r}, which others use"
            self._fail(text)
            self._control.fail(text)
            return
        follower.follow(step)

    def _announce(self) -> None:
        if self._begun:
            self._control.announce([(*channel, step) for channel, step in list(self._begun.items())])

    # Submitting and waiting -----------------------------------------------------------------------------

    def submit(
        self, kind: str, label: str, name: str | None, inputs: Sequence[Tensor], *,
        targets: Sequence[Tensor] | None = None, grouped: bool = False, process_set: int = 0,
        offer: Offer | None = None, title: str = "", **more: Any,
    ) -> Pending:  # fmt: skip
        """Start an operation.

        Args:
            kind: of :class:`~hvdbridge.torch.coordinator.Request`; ``more`` are its other fields.
            title: how messages call it, if not by its name.
            label: the kind as in names, which tells grouped operations apart.
            name: None or empty: the next running number of this label and process set.

        Raises:
            ValueError: this rank is not in the set, or there is no such set.
            DuplicateNameError: the name is in flight.
            HorovodInternalError: operations have failed or ended before.
        """
        if self.rank not in self.members(process_set):
            raise ValueError(
                f"{label}: Rank {self.rank} is not a member of the provided process set {self._sets[process_set]}"
            )
        device = "cuda" if inputs and inputs[0].is_cuda else "cpu"
        if any(tensor.is_cuda != inputs[0].is_cuda for tensor in inputs):
            raise ValueError(f"{label}: the tensors of a group must be on the same device")
        with self._lock:
            self._check_open(label)
            own = name if name else f"noname.{self._numbers.get((label, process_set), 0) + 1}"
            request = Request(
                kind, f"{label}.{own}" if kind not in ("join", "barrier") or name else label, process_set,
                tuple(str(tensor.dtype).removeprefix("torch.") for tensor in inputs),
                tuple(tuple(tensor.shape) for tensor in inputs), device=device, label=title, **more,
            )  # fmt: skip
            pending = Pending(request, list(inputs), None if targets is None else list(targets), grouped, offer=offer)
            if pending.key in self._pending:
                raise internal_error(
                    f"rank {self.rank}: {request.title} is in flight already: a name can be used again after "
                    "synchronize() of its handle. Use a different name.", DuplicateNameError,
                )  # fmt: skip
            if not name:
                self._numbers[label, process_set] = self._numbers.get((label, process_set), 0) + 1
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
                self._control.send(batch)

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
                if tensor.is_cuda:  # how much came of an all-to-all is known on the host
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
                decision = Decision.unpack(packed)
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
        """From the control's threads: a message of the coordinator."""
        self._heard = self._clock()
        if "follow" in message:
            self._follow.put(message["follow"])
        elif "failed" in message:
            self._fail(message["failed"])
        elif "stalled" in message:
            log.warning("rank %d: %s", self.rank, message["stalled"])
        else:
            now = time.monotonic()
            if "announce" in message:  # begins() from now on, and the thread what has begun
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
        keys = [(decision.process_set, name) for name in decision.names]
        jobs = [self._pending.get(key) for key in keys]
        if (timeline := self.timeline) is not None:  # which another thread may stop
            for job in filter(None, jobs):
                timeline.negotiated(job.request.name, job.request.kind, job.since, job.decided)
        if decision.error:
            for job in filter(None, jobs):
                self._settle(job, error=decision.error)
            return
        if self.failure:  # its operations have failed already; the other ranks will, too
            return
        known = [job or Pending(request, []) for job, request in _with_requests(jobs, decision)]
        if decision.kind == "join":
            self._numbers.clear()  # ranks that joined early have counted less
        self._with_stream(decision, known)
        for job in filter(None, jobs):
            job.sizes = decision.sizes
            if timeline is not None:  # before anybody is told that it is done, and may stop the timeline
                together = {"fused": len(jobs)} if len(jobs) > 1 else {}
                timeline.executed(job.request.name, job.request.kind, began, together)
            self._settle(job)

    def _with_stream(self, decision: Decision, jobs: list[Pending]) -> None:
        action = _ACTIONS[decision.kind]
        if self._stream is None or all(job.request.device == "cpu" for job in jobs):
            action(self, decision, jobs)
            return
        with torch.cuda.stream(self._stream):
            for job in jobs:
                if job.ready is not None:
                    self._stream.wait_event(job.ready)
                for tensor in (*job.inputs, *(job.targets or ())):
                    tensor.record_stream(self._stream)
            action(self, decision, jobs)
            event = self._stream.record_event()
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
        if isinstance(error, Unsupported):  # refused alike on all ranks, before anything was sent
            for name in decision.names:
                if (job := self._pending.get((decision.process_set, name))) is not None:
                    self._settle(job, str(error), error)
            return
        first = self.session.monitor.cause_of(error)
        text = str(first) if isinstance(first, HvdbridgeError) else f"{type(first).__name__}: {first}"
        text = f"rank {self.rank}: {names} failed: {text}"
        self._fail(text, first)
        self._control.fail(text)

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
            self._control.leave()

    def close(self) -> None:
        """End the threads; called when all ranks close. Harmless when repeated."""
        if self.closed:
            return
        self.leave()
        if self.failure:
            self._messages.put({"end": True})  # it may be stuck in a collective: nobody waits for it long
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

    # What is done, on the thread ------------------------------------------------------------------------

    def _comm(self, decision: Decision) -> Communicator:
        comm = self._comms[decision.process_set]
        assert comm is not None, "decisions are told to members"
        return comm

    def _allreduce(self, decision: Decision, jobs: list[Pending]) -> None:
        """Fused: one buffer for each type."""
        comm = self._comm(decision)
        request = jobs[0].request
        buckets: dict[torch.dtype, list[tuple[Pending, int, Tensor]]] = {}
        for job in jobs:
            job.results = list(job.targets or job.inputs)
            for index, tensor in enumerate(job.inputs or self._zeros(job.request)):
                buckets.setdefault(tensor.dtype, []).append((job, index, tensor.detach()))
        for pieces in buckets.values():
            buffer = _packed(pieces)
            answer = arithmetic.all_reduce(buffer, request.op, request.factors, comm).view(-1)
            parts = answer.split([tensor.numel() for *_, tensor in pieces])
            for (job, index, tensor), part in zip(pieces, parts, strict=True):
                if job.targets is not None:
                    _write(job.targets[index], part.view(tensor.shape))
                elif job.results:
                    job.results[index] = (
                        part.view(tensor.shape) if len(pieces) == 1 else part.view(tensor.shape).clone()
                    )

    def _adasum(self, decision: Decision, jobs: list[Pending]) -> None:
        for job in jobs:
            job.results = []
            for index, tensor in enumerate(job.inputs or self._zeros(job.request)):
                answer = arithmetic.adasum(_copy(tensor), job.request.factors, self._comm(decision))
                if job.targets is not None:
                    _write(job.targets[index], answer)
                job.results.append(answer if job.targets is None else job.targets[index])

    def _allgather(self, decision: Decision, jobs: list[Pending]) -> None:
        comm = self._comm(decision)
        for job in jobs:
            rows = decision.sizes  # [member][tensor]
            widths = [_width(tensor) for tensor in job.inputs]
            totals = [sum(count * width for count, width in zip(each, widths, strict=True)) for each in rows]
            mine = torch.cat([as_bytes(tensor.detach()) for tensor in job.inputs])
            buffer = mine.new_zeros(max(totals))
            buffer[: mine.numel()] = mine
            answer = comm.execute(AllGather(buffer))
            job.results = []
            starts = [0] * comm.size
            for index, tensor in enumerate(job.inputs):
                lengths = [each[index] * widths[index] for each in rows]
                parts = [answer[i, starts[i] : starts[i] + length] for i, length in enumerate(lengths)]
                shape = (sum(each[index] for each in rows), *tensor.shape[1:])
                job.results.append(from_bytes(torch.cat(parts), tensor.dtype, shape))
                starts = [start + length for start, length in zip(starts, lengths, strict=True)]

    def _broadcast(self, decision: Decision, jobs: list[Pending]) -> None:
        """Fused: the bytes of all in one message."""
        comm = self._comm(decision)
        root = self.members(decision.process_set).index(jobs[0].request.root)
        tensors = [tensor.detach() for job in jobs for tensor in (job.targets or job.inputs)]
        if len(tensors) == 1 and jobs[0].targets is not None and tensors[0].is_contiguous():
            buffer = as_bytes(tensors[0])
        else:
            buffer = torch.cat([as_bytes(tensor) for tensor in tensors])
        answer = comm.execute(Broadcast(buffer, root))
        parts = iter(answer.split([tensor.numel() * tensor.element_size() for tensor in tensors]))
        for job in jobs:
            job.results = []
            for tensor in job.targets or job.inputs:
                part = next(parts)
                if job.targets is None:
                    job.results.append(from_bytes(part, tensor.dtype, tensor.shape))
                    continue
                if comm.rank != root and part.data_ptr() != tensor.data_ptr():
                    _write(tensor, from_bytes(part, tensor.dtype, tensor.shape))
                job.results.append(tensor)

    def _broadcast_object(self, decision: Decision, jobs: list[Pending]) -> None:
        root = self.members(decision.process_set).index(jobs[0].request.root)
        comm = self._comm(decision)
        length = decision.sizes[0]
        data = jobs[0].inputs[0] if comm.rank == root else torch.empty(length, dtype=torch.uint8, device="cpu")
        jobs[0].results = [comm.execute(Broadcast(data, root))]

    def _alltoall(self, decision: Decision, jobs: list[Pending]) -> None:
        comm = self._comm(decision)
        splits = decision.sizes  # [from][to]
        tensor = jobs[0].inputs[0].detach()
        width = _width(tensor)
        longest = max(max(each) for each in splits) * width
        data = as_bytes(tensor)
        rows = data.new_zeros(comm.size, longest)
        start = 0
        for row, count in zip(rows.unbind(), splits[comm.rank], strict=True):
            row[: count * width] = data[start : start + count * width]
            start += count * width
        answer = comm.execute(AllToAll(rows))
        received = [each[comm.rank] for each in splits]
        parts = [answer[i, : count * width] for i, count in enumerate(received)]
        output = from_bytes(torch.cat(parts), tensor.dtype, (sum(received), *tensor.shape[1:]))
        jobs[0].results = [output, torch.tensor(received, dtype=torch.int32, device="cpu")]

    def _reducescatter(self, decision: Decision, jobs: list[Pending]) -> None:
        for job in jobs:
            request, comm = job.request, self._comm(decision)
            job.results = [
                arithmetic.reduce_scatter(tensor.detach(), request.op, request.factors, comm) for tensor in job.inputs
            ]

    def _nothing(self, decision: Decision, jobs: list[Pending]) -> None:
        """That all ranks agreed is all there is to a barrier, and to the end of a join."""

    def _add_set(self, decision: Decision, jobs: list[Pending]) -> None:
        ranks, world = list(jobs[0].request.ranks), self._comms[0]
        assert world is not None
        self._comms[decision.sizes[0]] = world.split([ranks])
        self._sets[decision.sizes[0]] = ranks

    def _remove_set(self, decision: Decision, jobs: list[Pending]) -> None:
        number = jobs[0].request.ranks[0]
        del self._sets[number]
        if (comm := self._comms.pop(number)) is not None:
            comm.close()

    def _channel(self, decision: Decision, jobs: list[Pending]) -> None:
        session, settings, parent = self.session, self.settings, self._comm(decision)
        members = self._sets[decision.process_set]
        self._begun.pop((decision.process_set, decision.names[0]), None)  # the steps in it are counted anew
        for job in jobs:
            assert job.offer is not None, "every member has asked for it"
            communicator = parent.split([range(parent.size)])
            assert communicator is not None, "every member is in it"
            control = communicator.control()
            offers = control.all_gather_object((job.offer.text, job.request.title))
            # What the monitor is told of waits in it: whose they are, and Horovod's limits.
            title = offers[0][1]
            watch = partial(_watch, session, title, settings)
            communicator.watch = control.watch = watch
            check = session.check(None if len(members) == self.size else members)
            job.offer.opened(Channel(communicator, control, [text for text, _ in offers], check))

    def _zeros(self, request: Request) -> list[Tensor]:
        """What a rank that joined contributes."""
        device = self._cuda if request.device == "cuda" else None
        return [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
        ]


_ACTIONS: dict[str, Callable[[Operations, Decision, list[Pending]], None]] = {
    "allreduce": Operations._allreduce, "adasum": Operations._adasum, "allgather": Operations._allgather,
    "broadcast": Operations._broadcast, "broadcast_object": Operations._broadcast_object,
    "alltoall": Operations._alltoall, "reducescatter": Operations._reducescatter, "barrier": Operations._nothing,
    "join": Operations._nothing, "add_set": Operations._add_set, "remove_set": Operations._remove_set,
    "channel": Operations._channel,
}  # fmt: skip


def _watch(session: Session, title: str, settings: Settings, signature: str) -> AbstractContextManager[None]:
    return session.monitor.watch(f"{title}: {signature}", settings.shutdown_seconds, settings.stall_seconds)


def _with_requests(jobs: Sequence[Pending | None], decision: Decision) -> list[tuple[Pending | None, Request]]:
    """Each operation with what all ranks said of it: from this rank, or from the decision where this rank joined."""
    if all(job is not None for job in jobs):
        return [(job, job.request) for job in jobs if job is not None]
    if len(decision.requests) != len(jobs):
        raise RuntimeError(f"a decision about {decision.names}, of which this rank knows nothing")
    return list(zip(jobs, decision.requests, strict=True))


def _packed(pieces: list[tuple[Pending, int, Tensor]]) -> Tensor:
    """The tensors in one flat buffer that may be worked in: a single contiguous one that is reduced in place is it."""
    job, _, tensor = pieces[0]
    if len(pieces) > 1:
        return torch.cat([tensor.reshape(-1) for *_, tensor in pieces])
    if job.targets is not None and tensor.is_contiguous():
        return tensor.view(-1)
    return _copy(tensor).view(-1)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _write(target: Tensor, value: Tensor) -> None:
    if target.data_ptr() != value.data_ptr() or not target.is_contiguous():
        target.detach().copy_(value)


def _width(tensor: Tensor) -> int:
    """The bytes of one row."""
    count = tensor.element_size()
    for length in tensor.shape[1:]:
        count *= length
    return count
