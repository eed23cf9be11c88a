"""The coordinator on rank 0: matches the ranks' raw operations by name, and decides one order of execution.

Rules:

1. Logic without I/O: ``receive()`` and ``tick()`` take messages and the time; ``take()`` returns the messages to send.
2. Operations match by name within a process set, in whatever order ranks submit them. An operation is ready when every
   member has submitted it or has joined. All members execute ready operations in the order in which they became ready,
   but fused ones (rule 7) together with the first of them.
3. The coordinator compares an operation's requests when it is ready. If they differ, all ranks that submitted it get
   the same error.
4. A joined rank contributes zeros to all-reduces and Adasum, and passes barriers. Other collectives fail. The join ends
   when all ranks have joined. Steps of optimizers are not negotiated. While a rank has joined, the others announce the
   steps that they begin, and the coordinator sends ``follow`` messages to the joined rank.
5. A rank that left (it shut down, or its script ended) submits nothing more: an operation that needs it fails at once.
6. The coordinator reports an incomplete operation after ``stall`` seconds, and fails all after ``timeout`` seconds.
7. Operations that become ready together are fused into one decision, up to ``fusion_bytes`` in all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdbridge.errors import ranks_text
from hvdbridge.supervisor.wire import Message

REDUCTIONS = ("allreduce", "adasum")
FUSIBLE = ("allreduce", "broadcast")
SAME_SHAPES = ("allreduce", "adasum", "broadcast", "reducescatter")
ROW_KINDS = ("allgather", "alltoall", "reducescatter")
"""Kinds that divide or concatenate tensors along the first dimension."""

SHUT_DOWN = "has called hvd.shutdown() or come to the end of its script"
CONNECTION_ENDED = "is gone: its connection ended"


class Packed:
    """Base of dataclasses that are sent as a JSON list of their fields; ``Class(*packed)`` restores one."""

    def pack(self) -> list[Any]:
        """Return the values of all fields in order."""
        return list(vars(self).values())


@dataclass(frozen=True)
class Request(Packed):
    """An operation as one rank submits it.

    Attributes:
        kind: ``allreduce``, ``adasum``, ``allgather``, ``broadcast``, ``broadcast_object``, ``alltoall``,
            ``reducescatter``, ``barrier``, ``join``, ``add_set``, ``remove_set`` or ``channel``.
        name: kind and name, ``allreduce.loss``; ranks match operations by it.
        process_set: number of the process set.
        dtypes, shapes: dtype and shape of each tensor (several in a grouped operation).
        op: name of a reduction: ``Sum``, ``Average``, ``Min``, ``Max``, ``Product``.
        root: root of a broadcast, a rank of the job.
        factors: prescale and postscale factor of a reduction.
        splits: number of rows that an all-to-all sends to each member.
        device: ``cpu`` or ``cuda``.
        ranks: the new set's ranks for ``add_set``; the set's number for ``remove_set``.
        label: the operation's text in reports, in place of ``name``.
        bytes: size of all tensors together.
    """

    kind: str
    name: str
    process_set: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    label: str = ""
    bytes: int = 0

    @property
    def title(self) -> str:
        """The operation's text in reports and errors.

        >>> Request("allreduce", "allreduce.loss").title
        "allreduce 'loss'"
        """
        kind, _, name = self.name.partition(".")
        return self.label or (f"{kind} {name!r}" if name else kind)

    @property
    def fusion(self) -> Hashable:
        """Key for fusion: one collective may carry operations with equal keys."""
        return self.kind, self.process_set, self.op, self.root, tuple(self.factors), self.device


@dataclass
class Decision(Packed):
    """Command to all members of a process set to execute operations.

    Attributes:
        names: the operations to execute in one fused collective.
        error: if not empty, the operations fail with this text instead.
        sizes: values that depend on all members' requests. ``allgather``: per member the rows of each tensor.
            ``alltoall``: per member its splits. ``broadcast``: the root's index among the members.
            ``broadcast_object``: the same, and the root's length in bytes. ``add_set``: the new set's number.
            ``join``: the rank that joined last.
        requests: a packed request for each name, for joined ranks, which have none of their own.
    """

    kind: str
    names: list[str]
    process_set: int = 0
    error: str = ""
    sizes: list[Any] = field(default_factory=list)
    requests: list[list[Any]] = field(default_factory=list)


@dataclass
class Entry:
    """An undecided operation that some ranks have submitted. ``requests``: by rank, in the order of submission.
    ``follow_sent``: joined ranks that were sent a ``follow`` message to open this channel."""

    submitted_at: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False
    follow_sent: set[int] = field(default_factory=set)

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))


JOIN_KEY = (0, "join")


class Coordinator:
    """The state of the negotiation among ``size`` ranks.

    Args:
        stall, timeout: time limits in seconds (rule 6).
        fusion_bytes: maximum size of a fused decision; 0 disables fusion.
        limit: the environment variable that sets ``timeout``, for error messages.

    Attributes:
        failure: the text with which all operations fail, or empty.
        sets: the members of each process set, by its number.
    """

    def __init__(
        self, size: int, stall: float = 30.0, timeout: float = 300.0, fusion_bytes: int = 128 << 20,
        limit: str = "HVDBRIDGE_TIMEOUT_SECONDS",
    ) -> None:  # fmt: skip
        self.size = size
        self.failure = ""
        self.sets: dict[int, list[int]] = {0: list(range(size))}
        self._stall, self._timeout, self._fusion_bytes = stall, timeout, fusion_bytes
        self._limit = f" ({limit}={timeout:g})"
        self._next_set = 1
        self._entries: dict[tuple[int, str], Entry] = {}
        self._announced_steps: dict[tuple[int, str], int] = {}  # the last one of each channel
        self._last_activity = 0.0  # the time of the last submission or announcement
        self._left: dict[int, str] = {}
        self._ready: list[tuple[Decision, Request, list[int]]] = []
        self._outbox: list[tuple[int, Message]] = []

    # Events ---------------------------------------------------------------------------------------------

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Handle a message of a rank; ``now`` is the time in seconds."""
        if "submit" in message:
            self.submit(rank, [Request(*packed) for packed in message["submit"]], now)
        elif "begun" in message:
            self.begin(message["begun"], now)
        elif "fail" in message:
            self.fail(message["fail"])
        else:
            self.leave(rank, SHUT_DOWN)

    def submit(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """Handle operations that a rank submits."""
        if self.failure:
            self._send([rank], {"failed": self.failure})
            return
        self._last_activity = now
        for request in requests:
            key = (request.process_set, request.name)
            entry = self._entries.setdefault(key, Entry(now))
            entry.requests[rank] = request
            if request.kind == "join":
                entry.warned = False
                self._send(range(self.size), {"announce": True})
                for channel, step in self._announced_steps.items():
                    self._send_follow(rank, channel, step)
                self._check_all_ready()
            else:
                self._check_ready(key, entry)
        self._flush()

    def begin(self, steps: Iterable[tuple[int, str, int]], now: float) -> None:
        """Send announced steps to joined ranks: (process set, channel, number) of the last step that a rank began."""
        self._last_activity = now
        for process_set, name, step in steps:
            if step > self._announced_steps.get((process_set, name), 0):
                self._announced_steps[process_set, name] = step
                for rank in self._joined:
                    self._send_follow(rank, (process_set, name), step)

    def leave(self, rank: int, reason: str) -> None:
        """Handle the end of a rank, which submits nothing more. ``reason`` is a text: it shut down, or is lost."""
        if rank in self._left:
            return
        self._left[rank] = reason
        self._check_all_ready()
        self._flush()
        if len(self._left) == self.size:
            self._send(range(self.size), {"end": True})

    def fail(self, text: str) -> None:
        """Fail open and later operations on every rank with ``text``."""
        if not self.failure:
            self.failure = text
            self._entries.clear()
            self._send(range(self.size), {"failed": text})

    def tick(self, now: float) -> None:
        """Report operations that exceed ``stall``, and fail all operations when one exceeds ``timeout``."""
        for entry in list(self._entries.values()):
            join = entry.first.kind == "join"
            if join and len(self._entries) > 1:
                continue  # the other ranks still submit operations, and the age of these is checked
            age = now - (self._last_activity if join else entry.submitted_at)
            if age >= self._timeout:
                verb = "waits for" if join else "did not start within"
                return self.fail(f"{entry.first.title} {verb} {age:.1f} s{self._limit}: {self._missing_text(entry)}")
            if age >= self._stall and not entry.warned:
                entry.warned = True
                verb = "waits for" if join else "has not started for"
                text = f"{entry.first.title} {verb} {age:.1f} s: {self._missing_text(entry)}"
                self._send(sorted({0, *entry.requests}), {"stalled": text})
        return None

    def take(self) -> list[tuple[int, Message]]:
        """Remove and return the messages to send, in order, each with its receiver's rank.

        The keys of messages are ``do`` (decisions), ``stalled``, ``failed``, ``end``, ``announce`` (a rank has joined)
        and, to a joined rank, ``follow`` (``[process set, channel, step]``; step 0: open the channel).
        """
        messages, self._outbox = self._outbox, []
        return messages

    # Readiness ------------------------------------------------------------------------------------------

    @property
    def _joined(self) -> dict[int, Request]:
        return self._entries[JOIN_KEY].requests if JOIN_KEY in self._entries else {}

    def _check_all_ready(self) -> None:
        for key, entry in list(self._entries.items()):
            if key != JOIN_KEY:
                self._check_ready(key, entry)
        if JOIN_KEY in self._entries:  # last, because a decided join empties self._joined
            self._check_ready(JOIN_KEY, self._entries[JOIN_KEY])

    def _check_ready(self, key: tuple[int, str], entry: Entry) -> None:
        """Decide an operation that is ready or can no longer become ready."""
        members, joined = self.sets.get(key[0], []), self._joined
        is_channel = entry.first.kind == "channel"  # joined ranks open it, too, to follow its steps
        missing = [rank for rank in members if rank not in entry.requests and (is_channel or rank not in joined)]
        left = [rank for rank in missing if rank in self._left]
        if missing and not left:
            for rank in missing:
                if rank in joined and rank not in entry.follow_sent:
                    entry.follow_sent.add(rank)
                    self._send_follow(rank, key, 0)
            return
        del self._entries[key]
        request = entry.first
        decision = Decision(request.kind, [request.name], request.process_set)
        not_submitted = [rank for rank in members if rank not in entry.requests]
        if key[0] not in self.sets:
            decision.error = f"{request.title}: its process set, number {key[0]}, was removed"
        elif left:
            ends = "; ".join(f"rank {rank} {self._left[rank]}" for rank in left)
            decision.error = f"{request.title} cannot complete: {ends}, and {ranks_text(entry.requests)} waits for it"
        else:
            decision.error = _difference(entry.requests) or self._rejection(request, not_submitted)
        if not decision.error:
            self._apply(decision, request, members, entry.requests)
            decision.requests = [request.pack()] if not_submitted else []
        self._ready.append((decision, request, list(entry.requests) if decision.error else members))

    def _rejection(self, request: Request, joined: list[int]) -> str:
        """Return why the operation cannot be executed, or an empty string; ``joined`` ranks did not submit it."""
        if joined and request.kind not in (*REDUCTIONS, "barrier"):
            cause = f"{ranks_text(joined)} called hvd.join()"
            return f"{request.title}: {request.kind.capitalize()} is not supported with Join at this time: {cause}"
        if request.kind in ROW_KINDS and not all(request.shapes):
            return f"{request.title}: the tensors need a first dimension, and have none (a rank-zero tensor, a scalar)"
        if request.kind == "add_set" and list(request.ranks) in self.sets.values():
            return f"Attempted to add a duplicate process set: ranks {list(request.ranks)} are one already"
        if request.kind == "remove_set" and request.ranks[0] not in self.sets:
            return f"there is no process set {request.ranks[0]} to remove"
        return ""

    def _apply(self, decision: Decision, request: Request, members: list[int], requests: dict[int, Request]) -> None:
        """Set ``decision.sizes``, and update process sets and channels."""
        match request.kind:
            case "allgather":
                decision.sizes = [[shape[0] for shape in requests[rank].shapes] for rank in members]
            case "alltoall":
                decision.sizes = [list(requests[rank].splits) for rank in members]
            case "broadcast":
                decision.sizes = [members.index(request.root)]
            case "broadcast_object":
                decision.sizes = [members.index(request.root), *requests[request.root].shapes[0]]
            case "join":
                decision.sizes = [list(requests)[-1]]
            case "add_set":
                self.sets[self._next_set] = list(request.ranks)
                decision.sizes = [self._next_set]
                self._next_set += 1
            case "remove_set":
                del self.sets[request.ranks[0]]
                for key, entry in list(self._entries.items()):  # its open operations fail
                    if key[0] == request.ranks[0]:
                        self._check_ready(key, entry)
            case "channel":
                self._announced_steps.pop((request.process_set, request.name), None)

    def _send_follow(self, rank: int, channel: tuple[int, str], step: int) -> None:
        if rank in self.sets.get(channel[0], ()):
            self._send([rank], {"follow": [*channel, step]})

    def _flush(self) -> None:
        """Fuse the decisions on ready operations, and send each to its recipients."""
        fused: list[tuple[Decision, list[int]]] = []
        fusible: dict[Hashable, tuple[Decision, int]] = {}  # the last decision of each key and its size in bytes
        for decision, request, recipients in self._ready:
            if request.kind in FUSIBLE and not decision.error and self._fusion_bytes > 0:
                key = (request.fusion, bool(decision.requests))
                previous = fusible.get(key)
                if previous is not None and previous[1] + request.bytes <= self._fusion_bytes:
                    previous[0].names += decision.names
                    previous[0].requests += decision.requests
                    fusible[key] = (previous[0], previous[1] + request.bytes)
                    continue
                fusible[key] = (decision, request.bytes)
            fused.append((decision, recipients))
        self._ready.clear()
        packed = [decision.pack() for decision, _ in fused]
        messages: dict[tuple[int, ...], Message] = {}  # shared, because the hub serializes a message object once
        for rank in range(self.size):
            indices = tuple(i for i, (_, recipients) in enumerate(fused) if rank in recipients)
            if indices:
                self._send([rank], messages.setdefault(indices, {"do": [packed[i] for i in indices]}))

    # Texts of reports and errors ------------------------------------------------------------------------

    def _missing_text(self, entry: Entry) -> str:
        """Describe which ranks have submitted an operation, and which have not."""
        members, joined = self.sets[entry.first.process_set], self._joined
        missing = self._describe([rank for rank in members if rank not in entry.requests and rank not in joined])
        if entry.first.kind == "join":
            return f"{ranks_text(joined)} joined; missing: {missing}"
        submitted = f"{ranks_text(entry.requests)} submitted it"
        return f"{submitted}; missing: {missing}. Every member of a process set must submit it"

    def _describe(self, ranks: list[int], limit: int = 8) -> str:
        """Describe ranks, each with the open operations that it has submitted; at most ``limit`` in detail."""
        parts = []
        for rank in ranks[:limit]:
            waits = [entry.first.title for entry in self._entries.values() if rank in entry.requests]
            also = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
            state = f"waits for {', '.join(waits[:3])}{also}" if waits else "has submitted nothing that is open"
            parts.append(f"rank {rank} ({state})")
        if ranks[limit:]:
            parts.append(ranks_text(ranks[limit:]))
        return ", ".join(parts)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        self._outbox += [(rank, message) for rank in ranks]


def _difference(requests: dict[int, Request]) -> str:
    """Return an error text for the first property in which requests differ, or an empty string."""
    first = next(iter(requests.values()))
    for label, value, kinds in _COMPARED:
        if kinds and first.kind not in kinds:
            continue
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(value(requests[rank]), []).append(rank)
        if len(groups) > 1:
            values = "; ".join(
                f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}" for text, ranks in groups.items()
            )
            return f"{first.title}: Mismatched {label.format(kind=first.kind)}: {values}"
    return ""


def _dtypes(request: Request) -> str:
    return ", ".join(request.dtypes if len(set(request.dtypes)) > 1 else request.dtypes[:1])


def _shapes(request: Request) -> str:
    shapes = [list(shape) for shape in request.shapes]
    return str(shapes[0] if len(shapes) == 1 else shapes)


def _inner_shapes(request: Request) -> str:
    """Return the shapes with ``*`` for the first dimension, which may differ between ranks."""
    shapes = [["*", *shape[1:]] if shape else [] for shape in request.shapes]
    return str(shapes[0] if len(shapes) == 1 else shapes).replace("'", "")


_COMPARED: tuple[tuple[str, Callable[[Request], str], tuple[str, ...]], ...] = (
    ("operations", lambda r: r.kind, ()),
    ("numbers of tensors in a group", lambda r: str(len(r.shapes)), ()),
    ("data types", _dtypes, ()),
    ("{kind} tensor shapes", _shapes, SAME_SHAPES),
    ("{kind} tensor shapes", _inner_shapes, ("allgather", "alltoall")),
    ("prescale and/or postscale factors", lambda r: str(tuple(r.factors)), (*REDUCTIONS, "reducescatter")),
    ("reduction operation", lambda r: r.op, (*REDUCTIONS, "reducescatter")),
    ("{kind} root ranks", lambda r: str(r.root), ("broadcast", "broadcast_object")),
    ("{kind} CPU/GPU device selection", lambda r: r.device.upper(), ()),
    ("ranks of a process set", lambda r: str(list(r.ranks)), ("add_set", "remove_set")),
)
"""Compared properties: text in the error, value of a request as text, and kinds to compare (empty: all)."""
