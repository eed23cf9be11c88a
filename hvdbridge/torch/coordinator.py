"""Negotiation by name: which raw operations are ready, in one order for all ranks. It runs in the process of rank 0.

Rules:

1. Logic without I/O: messages of ranks and the time go in; ``take()`` gives the messages to send.
2. Operations match by name within a process set, in whatever order ranks submit them. An operation is ready when every
   member has submitted it or has joined. All members execute ready operations in the order in which they became ready.
3. The requests of an operation are compared when it is ready, so every rank gets the same error.
4. A joined rank takes part in all-reduces with zeros, and in nothing else. The join ends when all ranks have joined.
   Steps of optimizers are not negotiated. While a rank has joined, the others announce the steps that they begin, and
   the joined rank is told to follow.
5. A rank that left (it shut down, or its script ended) submits nothing more: an operation that needs it fails at once.
6. An incomplete operation is reported after ``stall`` seconds, and ends everything after ``timeout`` seconds.
7. Small operations that are ready together are fused into one decision, up to ``fusion_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdbridge.errors import ranks_text
from hvdbridge.supervisor.wire import Message

REDUCES = ("allreduce", "adasum")
FUSES = ("allreduce", "broadcast")
SAME_SHAPES = ("allreduce", "adasum", "broadcast", "reducescatter")
ROWS = ("allgather", "alltoall", "reducescatter")
"""Kinds whose tensors are divided along the first dimension."""

LEFT = "has called hvd.shutdown() or come to the end of its script"
GONE = "is gone: its connection ended"


class Packed:
    """A dataclass that travels as the JSON list of its fields: ``Class(*packed)`` reads it."""

    def pack(self) -> list[Any]:
        return list(vars(self).values())


@dataclass(frozen=True)
class Request(Packed):
    """An operation as one rank submits it.

    Attributes:
        kind: ``allreduce``, ``adasum``, ``allgather``, ``broadcast``, ``broadcast_object``, ``alltoall``,
            ``reducescatter``, ``barrier``, ``join``, ``add_set``, ``remove_set`` or ``channel``.
        name: with the kind in front, ``allreduce.loss``.
        process_set: its number.
        dtypes, shapes: of each tensor (several in a grouped operation).
        op: of a reduction: ``Sum``, ``Average``, ``Min``, ``Max``, ``Product``.
        root: of a broadcast, a rank of the job.
        factors: before and after a reduction.
        splits: of an all-to-all: the number of rows for each member.
        device: ``cpu`` or ``cuda``.
        ranks: of ``add_set``; the number of the set for ``remove_set``.
        label: the name in messages, in place of ``name``.
        bytes: of all tensors together.
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
        """The operation's name in messages.

        >>> Request("allreduce", "allreduce.loss").title
        "allreduce 'loss'"
        """
        kind, _, name = self.name.partition(".")
        return self.label or (f"{kind} {name!r}" if name else kind)

    @property
    def fusion(self) -> Hashable:
        """Operations with the same value may travel in one collective."""
        return self.kind, self.process_set, self.op, self.root, tuple(self.factors), self.device


@dataclass
class Decision(Packed):
    """What all members of a process set do next.

    Attributes:
        names: the operations to execute together.
        error: instead, the operations fail with this text.
        sizes: facts that follow from all requests together. ``allgather``: per member the rows of each tensor.
            ``alltoall``: per member its splits. ``broadcast``: the root's number among the members.
            ``broadcast_object``: the same, and the root's length. ``add_set``: the new set's number. ``join``: the rank
            that joined last.
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
    """An operation that some ranks have submitted."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False
    asked: set[int] = field(default_factory=set)

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))


JOIN = (0, "join")


class Coordinator:
    """The state of the negotiation among ``size`` ranks.

    Attributes:
        failure: why everything ends, or empty.
        sets: the members of each process set.

    Args:
        limit: the variable that ``timeout`` is from.
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
        self._begun: dict[tuple[int, str], int] = {}  # of each channel the last announced step
        self._heard = 0.0  # when a rank last submitted or announced something
        self._left: dict[int, str] = {}
        self._ready: list[tuple[Decision, Request, list[int]]] = []
        self._out: list[tuple[int, Message]] = []

    # Events ---------------------------------------------------------------------------------------------

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Handle one message of a rank."""
        if "submit" in message:
            self.submit(rank, [Request(*packed) for packed in message["submit"]], now)
        elif "begun" in message:
            self.begin(message["begun"], now)
        elif "fail" in message:
            self.fail(message["fail"])
        else:
            self.leave(rank, LEFT)

    def submit(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """A rank submits operations."""
        if self.failure:
            self._send([rank], {"failed": self.failure})
            return
        self._heard = now
        for request in requests:
            key = (request.process_set, request.name)
            entry = self._entries.setdefault(key, Entry(now))
            entry.requests[rank] = request
            if request.kind == "join":
                entry.warned = False
                self._send(range(self.size), {"announce": True})
                for channel, step in self._begun.items():
                    self._have_follow(rank, channel, step)
                self._look_at_all()
            else:
                self._look_at(key, entry)
        self._flush()

    def begin(self, steps: Iterable[tuple[int, str, int]], now: float) -> None:
        """A rank announces (process set, channel, number) of the last step that it began; joined ranks follow."""
        self._heard = now
        for process_set, name, number in steps:
            if number > self._begun.get((process_set, name), 0):
                self._begun[process_set, name] = number
                for rank in self._joined:
                    self._have_follow(rank, (process_set, name), number)

    def leave(self, rank: int, how: str) -> None:
        """A rank will submit nothing more: it has shut down, or its connection ended."""
        if rank in self._left:
            return
        self._left[rank] = how
        self._look_at_all()
        self._flush()
        if len(self._left) == self.size:
            self._send(range(self.size), {"end": True})

    def fail(self, text: str) -> None:
        """Everything ends: open and later operations fail on every rank with this text."""
        if not self.failure:
            self.failure = text
            self._entries.clear()
            self._send(range(self.size), {"failed": text})

    def tick(self, now: float) -> None:
        """Let time pass: report stalled operations, fail when one is too old."""
        for entry in list(self._entries.values()):
            join = entry.first.kind == "join"
            if join and len(self._entries) > 1:
                continue  # ranks that have not joined are at work; the operation that they wait for is judged itself
            age = now - (self._heard if join else entry.since)
            if age >= self._timeout:
                what = "waits for" if join else "did not start within"
                return self.fail(f"{entry.first.title} {what} {age:.1f} s{self._limit}: {self._who(entry)}")
            if age >= self._stall and not entry.warned:
                entry.warned = True
                what = "waits for" if join else "has not started for"
                text = f"{entry.first.title} {what} {age:.1f} s: {self._who(entry)}"
                self._send(sorted({0, *entry.requests}), {"stalled": text})
        return None

    def take(self) -> list[tuple[int, Message]]:
        """The messages to send, in order: ``do`` (decisions), ``stalled``, ``failed``, ``end``, ``announce`` (a rank
        has joined) and, to a joined rank, ``follow`` (``[process set, channel, step]``; step 0: open the channel)."""
        out, self._out = self._out, []
        return out

    # Readiness ------------------------------------------------------------------------------------------

    @property
    def _joined(self) -> dict[int, Request]:
        return self._entries[JOIN].requests if JOIN in self._entries else {}

    def _look_at_all(self) -> None:
        for key, entry in list(self._entries.items()):
            if key != JOIN:
                self._look_at(key, entry)
        if JOIN in self._entries:  # last: until here its ranks count as joined
            self._look_at(JOIN, self._entries[JOIN])

    def _look_at(self, key: tuple[int, str], entry: Entry) -> None:
        members, joined = self.sets.get(key[0], []), self._joined
        opens = entry.first.kind == "channel"  # joined ranks open it, too, to follow its steps
        missing = [rank for rank in members if rank not in entry.requests and (opens or rank not in joined)]
        gone = [rank for rank in missing if rank in self._left]
        if missing and not gone:
            for rank in missing:
                if rank in joined and rank not in entry.asked:
                    entry.asked.add(rank)
                    self._have_follow(rank, key, 0)
            return
        del self._entries[key]
        request = entry.first
        decision = Decision(request.kind, [request.name], request.process_set)
        absent = [rank for rank in members if rank not in entry.requests]
        if key[0] not in self.sets:
            decision.error = f"{request.title}: its process set, number {key[0]}, was removed"
        elif gone:
            ends = "; ".join(f"rank {rank} {self._left[rank]}" for rank in gone)
            decision.error = f"{request.title} cannot complete: {ends}, and {ranks_text(entry.requests)} waits for it"
        else:
            decision.error = _difference(entry.requests) or self._refusal(request, absent)
        if not decision.error:
            self._complete(decision, request, members, entry.requests)
            decision.requests = [request.pack()] if absent else []
        self._ready.append((decision, request, list(entry.requests) if decision.error else members))

    def _refusal(self, request: Request, joined: list[int]) -> str:
        if joined and request.kind not in (*REDUCES, "barrier"):
            who = f"{ranks_text(joined)} called hvd.join()"
            return f"{request.title}: {request.kind.capitalize()} is not supported with Join at this time: {who}"
        if request.kind in ROWS and not all(request.shapes):
            return f"{request.title}: the tensors need a first dimension, and have none (a rank-zero tensor, a scalar)"
        if request.kind == "add_set" and list(request.ranks) in self.sets.values():
            return f"Attempted to add a duplicate process set: ranks {list(request.ranks)} are one already"
        if request.kind == "remove_set" and request.ranks[0] not in self.sets:
            return f"there is no process set {request.ranks[0]} to remove"
        return ""

    def _complete(self, decision: Decision, request: Request, members: list[int], requests: dict[int, Request]) -> None:
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
                for key, entry in list(self._entries.items()):  # nobody can complete what is still open there
                    if key[0] == request.ranks[0]:
                        self._look_at(key, entry)
            case "channel":
                self._begun.pop((request.process_set, request.name), None)

    def _have_follow(self, rank: int, channel: tuple[int, str], number: int) -> None:
        if rank in self.sets.get(channel[0], ()):
            self._send([rank], {"follow": [*channel, number]})

    def _flush(self) -> None:
        """Send the decisions about ready operations, fused."""
        decided: list[tuple[Decision, list[int]]] = []
        open_: dict[Hashable, tuple[Decision, int]] = {}
        for decision, request, told in self._ready:
            if request.kind in FUSES and not decision.error and self._fusion_bytes > 0:
                key = (request.fusion, bool(decision.requests))
                before = open_.get(key)
                if before is not None and before[1] + request.bytes <= self._fusion_bytes:
                    before[0].names += decision.names
                    before[0].requests += decision.requests
                    open_[key] = (before[0], before[1] + request.bytes)
                    continue
                open_[key] = (decision, request.bytes)
            decided.append((decision, told))
        self._ready.clear()
        packed = [decision.pack() for decision, _ in decided]
        messages: dict[tuple[int, ...], Message] = {}  # most often all ranks are sent the same
        for rank in range(self.size):
            mine = tuple(i for i, (_, told) in enumerate(decided) if rank in told)
            if mine:
                self._send([rank], messages.setdefault(mine, {"do": [packed[i] for i in mine]}))

    # Words ----------------------------------------------------------------------------------------------

    def _who(self, entry: Entry) -> str:
        members, joined = self.sets[entry.first.process_set], self._joined
        missing = self._describe([rank for rank in members if rank not in entry.requests and rank not in joined])
        if entry.first.kind == "join":
            return f"{ranks_text(joined)} joined; missing: {missing}"
        there = f"{ranks_text(entry.requests)} submitted it"
        return f"{there}; missing: {missing}. Every member of a process set must submit it"

    def _describe(self, ranks: list[int], limit: int = 8) -> str:
        """Each rank with what it waits for itself."""
        parts = []
        for rank in ranks[:limit]:
            waits = [entry.first.title for entry in self._entries.values() if rank in entry.requests]
            also = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
            what = f"waits for {', '.join(waits[:3])}{also}" if waits else "has submitted nothing that is open"
            parts.append(f"rank {rank} ({what})")
        if ranks[limit:]:
            parts.append(ranks_text(ranks[limit:]))
        return ", ".join(parts)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        self._out += [(rank, message) for rank in ranks]


def _difference(requests: dict[int, Request]) -> str:
    """What the ranks do not agree about, with ranks and values; empty if they agree."""
    first = next(iter(requests.values()))
    for what, value, concerned in _COMPARED:
        if concerned and first.kind not in concerned:
            continue
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(value(requests[rank]), []).append(rank)
        if len(groups) > 1:
            who = "; ".join(
                f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}" for text, ranks in groups.items()
            )
            return f"{first.title}: Mismatched {what.format(kind=first.kind)}: {who}"
    return ""


def _dtypes(request: Request) -> str:
    return ", ".join(request.dtypes if len(set(request.dtypes)) > 1 else request.dtypes[:1])


def _shapes(request: Request) -> str:
    shapes = [list(shape) for shape in request.shapes]
    return str(shapes[0] if len(shapes) == 1 else shapes)


def _inner_shapes(request: Request) -> str:
    """All dimensions but the first, which may differ."""
    shapes = [["*", *shape[1:]] if shape else [] for shape in request.shapes]
    return str(shapes[0] if len(shapes) == 1 else shapes).replace("'", "")


_COMPARED: tuple[tuple[str, Callable[[Request], str], tuple[str, ...]], ...] = (
    ("operations", lambda r: r.kind, ()),
    ("numbers of tensors in a group", lambda r: str(len(r.shapes)), ()),
    ("data types", _dtypes, ()),
    ("{kind} tensor shapes", _shapes, SAME_SHAPES),
    ("{kind} tensor shapes", _inner_shapes, ("allgather", "alltoall")),
    ("prescale and/or postscale factors", lambda r: str(tuple(r.factors)), (*REDUCES, "reducescatter")),
    ("reduction operation", lambda r: r.op, (*REDUCES, "reducescatter")),
    ("{kind} root ranks", lambda r: str(r.root), ("broadcast", "broadcast_object")),
    ("{kind} CPU/GPU device selection", lambda r: r.device.upper(), ()),
    ("ranks of a process set", lambda r: str(list(r.ranks)), ("add_set", "remove_set")),
)
"""What is compared, how it is written, and for which kinds (empty: all)."""
