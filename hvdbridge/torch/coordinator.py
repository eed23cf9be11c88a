"""Which operations are ready: the rules by which raw operations of all ranks are brought into one order.

Rules:

1. Logic without I/O: what ranks submit and the time go in; ``take()`` gives the messages to send.
2. Operations match by name within a process set, in whatever order ranks submit them. One is ready when every member
   has submitted it, or has joined; ready ones are decided in the order in which they became so, the same for all.
3. What the ranks say of one operation is compared when it is ready, so a difference is told to all of them.
4. A rank that joined takes part in all-reduces with zeros, in nothing else. When all have joined it is over. The steps
   of optimizers are not negotiated; while somebody has joined, ranks announce those they begin, and who joined is told.
5. A rank that left (shut down, or at the end of its script) will not come: what needs it fails at once.
6. What nobody completes is reported after ``stall_seconds`` and ends everything after ``timeout_seconds``.
7. Small operations that are ready together are decided together, up to ``fusion_bytes``: one collective moves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hvdbridge.errors import ranks_text

Message = dict[str, Any]
Shape = tuple[int, ...]

REDUCES = ("allreduce", "adasum")
FUSES = ("allreduce", "broadcast")
SAME_SHAPES = ("allreduce", "adasum", "broadcast", "reducescatter")
ROWS = ("allgather", "alltoall", "reducescatter")
"""Kinds whose tensors are divided along the first dimension."""


@dataclass(frozen=True)
class Request:
    """What one rank says of an operation that it submits.

    Attributes:
        kind: ``allreduce``, ``adasum``, ``allgather``, ``broadcast``, ``broadcast_object``, ``alltoall``,
            ``reducescatter``, ``barrier``, ``join``, ``add_set``, ``remove_set`` or ``channel``.
        name: with the kind in front, ``allreduce.loss``.
        process_set: its number.
        dtypes, shapes: of each tensor (several in a grouped operation).
        op: of a reduction: ``Sum``, ``Average``, ``Min``, ``Max``, ``Product``.
        root: of a broadcast, a rank of the job.
        factors: before and after a reduction.
        splits: of an all-to-all: how many rows go to each member.
        device: ``cpu`` or ``cuda``.
        ranks: of ``add_set``; the number of the set for ``remove_set``.
        label: how messages call it, if not by its name.
    """

    kind: str
    name: str
    process_set: int = 0
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    label: str = ""

    def pack(self) -> list[Any]:
        """As JSON; :meth:`unpack` reads it."""
        return list(asdict(self).values())

    @classmethod
    def unpack(cls, data: Sequence[Any]) -> Request:
        kind, name, number, dtypes, shapes, op, root, factors, splits, device, ranks, label = data
        return cls(
            kind, name, number, tuple(dtypes), tuple(map(tuple, shapes)), op, root,
            (factors[0], factors[1]), tuple(splits), device, tuple(ranks), label,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """How a message calls the operation.

        >>> Request("allreduce", "allreduce.loss").title
        "allreduce 'loss'"
        """
        if self.label:
            return self.label
        kind, _, name = self.name.partition(".")
        return f"{kind} {name!r}" if name else kind

    @property
    def bytes(self) -> int:
        return sum(math.prod(s) * getattr(torch, d).itemsize for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def fusion(self) -> Hashable:
        """Operations with the same value may travel in one collective."""
        return self.kind, self.process_set, self.op, self.root, self.factors, self.device


@dataclass
class Decision:
    """What all members of a process set do next.

    Attributes:
        names: the operations to carry out together.
        error: instead, the operations fail with this text.
        sizes: what only all requests together tell: per member the rows of each tensor (``allgather``) or the splits
            (``alltoall``); the root's length (``broadcast_object``); the new set's number; the rank that joined last.
        requests: one for each name, for ranks that joined and have none of their own.
    """

    kind: str
    names: list[str]
    process_set: int = 0
    error: str = ""
    sizes: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def pack(self) -> list[Any]:
        requests = [request.pack() for request in self.requests]
        return [self.kind, self.names, self.process_set, self.error, self.sizes, requests]

    @classmethod
    def unpack(cls, data: Sequence[Any]) -> Decision:
        kind, names, number, error, sizes, requests = data
        return cls(kind, names, number, error, sizes, [Request.unpack(each) for each in requests])


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


class Coordinator:
    """The state of the negotiation among ``size`` ranks; it lives in the process of rank 0.

    Attributes:
        failure: why everything ends, or empty.
        sets: the members of each process set.
    """

    def __init__(
        self,
        size: int,
        stall_seconds: float = 30.0,
        timeout_seconds: float = 300.0,
        fusion_bytes: int = 128 << 20,
        limit: str = "HVDBRIDGE_TIMEOUT_SECONDS",
    ) -> None:
        self.size = size
        self.failure = ""
        self.sets: dict[int, list[int]] = {0: list(range(size))}
        self._stall, self._timeout, self._fusion_bytes = stall_seconds, timeout_seconds, fusion_bytes
        self._limit = f"{limit}={timeout_seconds:g}"
        self._next_set = 1
        self._entries: dict[tuple[int, str], Entry] = {}
        self._joined: dict[int, float] = {}  # in the order of joining
        self._begun: dict[tuple[int, str], int] = {}  # the steps of each channel, as far as they were announced
        self._heard = 0.0  # when a rank last did something
        self._join_warned = False
        self._left: dict[int, str] = {}
        self._ready: list[tuple[Decision, Request, list[int]]] = []
        self._out: list[tuple[int, Message]] = []

    # What happens ---------------------------------------------------------------------------------------

    def submit(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """A rank submits operations."""
        if self.failure:
            self._send(rank, {"failed": self.failure})
            return
        self._heard = now
        for request in requests:
            if request.kind == "join":
                self._join(rank, now)
                continue
            key = (request.process_set, request.name)
            entry = self._entries.setdefault(key, Entry(now))
            entry.requests[rank] = request
            self._look_at(key, entry)
        self._flush()

    def begin(self, steps: Iterable[tuple[int, str, int]], now: float) -> None:
        """A rank announces (process set, channel, number) of the last step that it began: ranks that joined follow."""
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
        for key, entry in list(self._entries.items()):
            self._look_at(key, entry)
        self._look_at_joins()
        self._flush()
        if len(self._left) == self.size:
            for each in range(self.size):
                self._send(each, {"end": True})

    def fail(self, text: str) -> None:
        """Everything ends: what is open, and what is submitted later, fails on every rank with this text."""
        if not self.failure:
            self.failure = text
            self._entries.clear()
            for rank in range(self.size):
                self._send(rank, {"failed": text})

    def tick(self, now: float) -> None:
        """Let time pass: report what stalls, end what is too old."""
        if self.failure:
            return None
        for entry in list(self._entries.values()):
            age = now - entry.since
            if age >= self._timeout:
                what = f"{entry.first.title} did not start within {age:.1f} s ({self._limit})"
                return self.fail(f"{what}: {self._who(entry)}")
            if age >= self._stall and not entry.warned:
                entry.warned = True
                self._report(f"{entry.first.title} has not started for {age:.1f} s: {self._who(entry)}", entry.requests)
        if self._joined:
            self._tick_joins(now)
        return None

    def _tick_joins(self, now: float) -> None:
        age = now - max(self._heard, *self._joined.values())
        away = [rank for rank in range(self.size) if rank not in self._joined]
        text = f"join() waits for {age:.1f} s: {ranks_text(self._joined)} joined; missing: {self._describe(away)}"
        if self._entries:
            return  # those that did not join are at work; what they wait for is judged by itself
        if age >= self._timeout:
            self.fail(f"{text} ({self._limit})")
        elif age >= self._stall and not self._join_warned:
            self._join_warned = True
            self._report(text, self._joined)

    def take(self) -> list[tuple[int, Message]]:
        """The messages to send, in order: ``do`` (decisions), ``stalled``, ``failed``, ``end``; ``announce``: somebody
        has joined; ``follow``, to who joined: ``[process set, channel, step]``, step 0: open it."""
        out, self._out = self._out, []
        return out

    # Readiness ------------------------------------------------------------------------------------------

    def _look_at(self, key: tuple[int, str], entry: Entry) -> None:
        members = self.sets.get(key[0], [])
        opens = entry.first.kind == "channel"  # who joined opens it, too, to follow its steps
        missing = [rank for rank in members if rank not in entry.requests and (opens or rank not in self._joined)]
        gone = [rank for rank in missing if rank in self._left]
        if missing and not gone:
            for rank in missing:
                if rank in self._joined and rank not in entry.asked:
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
        if absent and not decision.error:
            decision.requests = [request]
        told = list(entry.requests) if decision.error else members
        self._ready.append((decision, request, told))

    def _refusal(self, request: Request, joined: list[int]) -> str:
        if joined and request.kind not in (*REDUCES, "barrier"):
            who = f"{ranks_text(joined)} called hvd.join()"
            return f"{request.title}: {request.kind.capitalize()} is not supported with Join at this time: {who}"
        if request.kind in ROWS and any(not shape for shape in request.shapes):
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
            case "broadcast_object":
                decision.sizes = list(requests[request.root].shapes[0])
            case "add_set":
                self.sets[self._next_set] = list(request.ranks)
                decision.sizes = [self._next_set]
                self._next_set += 1
            case "remove_set":
                removed = request.ranks[0]
                del self.sets[removed]
                for key, entry in list(self._entries.items()):  # nobody can complete what is still open there
                    if key[0] == removed:
                        self._look_at(key, entry)
            case "channel":
                self._begun.pop((request.process_set, request.name), None)

    def _join(self, rank: int, now: float) -> None:
        self._joined[rank] = now
        self._join_warned = False
        for each in range(self.size):
            self._send(each, {"announce": True})
        for channel, number in self._begun.items():
            self._have_follow(rank, channel, number)
        for key, entry in list(self._entries.items()):
            self._look_at(key, entry)
        self._look_at_joins()

    def _have_follow(self, rank: int, channel: tuple[int, str], number: int) -> None:
        if rank in self.sets.get(channel[0], ()):
            self._send(rank, {"follow": [*channel, number]})

    def _look_at_joins(self) -> None:
        if not self._joined:
            return
        decision = Decision("join", ["join"])
        gone = [rank for rank in self._left if rank not in self._joined]
        if gone:
            ends = "; ".join(f"rank {rank} {self._left[rank]}" for rank in gone)
            decision.error = f"join() cannot complete: {ends}, and {ranks_text(self._joined)} waits for it"
        elif len(self._joined) == self.size:
            decision.sizes = [list(self._joined)[-1]]
        else:
            return
        self._ready.append((decision, Request("join", "join"), list(self._joined)))
        self._joined.clear()

    def _flush(self) -> None:
        """Send what became ready, fused."""
        if not self._ready:
            return
        ready, self._ready = self._ready, []
        decided: list[tuple[Decision, list[int]]] = []
        open_: dict[Hashable, tuple[Decision, int]] = {}
        for decision, request, told in ready:
            fuses = request.kind in FUSES and not decision.error and self._fusion_bytes > 0
            if not fuses:
                decided.append((decision, told))
                continue
            size = request.bytes
            key = (request.fusion, bool(decision.requests))
            before = open_.get(key)
            if before is not None and before[1] + size <= self._fusion_bytes:
                before[0].names += decision.names
                before[0].requests += decision.requests
                open_[key] = (before[0], before[1] + size)
            else:
                open_[key] = (decision, size)
                decided.append((decision, told))
        packed = [decision.pack() for decision, _ in decided]
        messages: dict[tuple[int, ...], Message] = {}  # most often all ranks are sent the same
        for rank in range(self.size):
            mine = tuple(i for i, (_, told) in enumerate(decided) if rank in told)
            if mine:
                self._send(rank, messages.setdefault(mine, {"do": [packed[i] for i in mine]}))

    # Words ----------------------------------------------------------------------------------------------

    def _who(self, entry: Entry) -> str:
        members = self.sets[entry.first.process_set]
        missing = [rank for rank in members if rank not in entry.requests and rank not in self._joined]
        there = f"{ranks_text(entry.requests)} submitted it"
        return f"{there}; missing: {self._describe(missing)}. Every member of a process set must submit it"

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

    def _report(self, text: str, ranks: Iterable[int]) -> None:
        for rank in sorted({0, *ranks}):
            self._send(rank, {"stalled": text})

    def _send(self, rank: int, message: Message) -> None:
        self._out.append((rank, message))


def _difference(requests: dict[int, Request]) -> str:
    """What the ranks do not agree about, with ranks and values; empty if they agree."""
    first = next(iter(requests.values()))
    kind = first.kind
    for what, value, concerned in _COMPARED:
        if concerned is not None and kind not in concerned:
            continue
        groups: dict[str, list[int]] = {}
        for rank in sorted(requests):
            groups.setdefault(value(requests[rank]), []).append(rank)
        if len(groups) > 1:
            who = "; ".join(
                f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}" for text, ranks in groups.items()
            )
            return f"{first.title}: Mismatched {what.format(kind=kind)}: {who}"
    return ""


def _dtypes(request: Request) -> str:
    return ", ".join(request.dtypes if len(set(request.dtypes)) > 1 else request.dtypes[:1])


def _shapes(request: Request) -> str:
    shapes = [list(shape) for shape in request.shapes]
    return str(shapes[0] if len(shapes) == 1 else shapes)


def _inner_shapes(request: Request) -> str:
    """All dimensions but the first, which may differ."""
    shapes = [["*", *shape[1:]] if shape else [] for shape in request.shapes]
    text = str(shapes[0] if len(shapes) == 1 else shapes)
    return text.replace("'", "")


_COMPARED: tuple[tuple[str, Callable[[Request], str], tuple[str, ...] | None], ...] = (
    ("operations", lambda r: r.kind, None),
    ("numbers of tensors in a group", lambda r: str(len(r.shapes)), None),
    ("data types", _dtypes, None),
    ("{kind} tensor shapes", _shapes, SAME_SHAPES),
    ("{kind} tensor shapes", _inner_shapes, ("allgather", "alltoall")),
    ("prescale and/or postscale factors", lambda r: str(r.factors), (*REDUCES, "reducescatter")),
    ("reduction operation", lambda r: r.op, (*REDUCES, "reducescatter")),
    ("{kind} root ranks", lambda r: str(r.root), ("broadcast", "broadcast_object")),
    ("{kind} CPU/GPU device selection", lambda r: r.device.upper(), None),
    ("ranks of a process set", lambda r: str(list(r.ranks)), ("add_set", "remove_set")),
)
"""What is compared, how it is written, and for which kinds (None: all)."""
