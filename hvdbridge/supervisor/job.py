"""The helper's rules: store, agreement, who waits for what, and the ONE cause for which a job ends.

Rules:

1. Logic without I/O: messages of ranks and the time go in, ``take()`` gives the messages to send.
2. The first cause wins and is told to every rank; whatever follows from it is not told.
3. A secondary error (a connection that broke) is believed only when no better cause comes within GRACE.
4. The end of a connection without ``bye`` or ``leave`` before is a death, and a primary cause.
5. To leave without shutdown is a failure only if another rank waits for LEFT_GRACE afterwards: a script in
   which all ranks just end is fine.
6. Nothing grows with the length of a job: an answered request is forgotten.
7. The ranks are told when the one whose failure it was has gone: launchers blame the rank that ends first.
8. Limits and stalls are judged by a clock that stands still while a rank has asked for patience, for no longer than it
   asked for. The ranks are told, for what they judge themselves.
9. When a rank wants to stop, all are asked, and then told, for the last step: last_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdbridge.errors import ranks_text
from hvdbridge.supervisor.clock import Clock
from hvdbridge.supervisor.last_step import latest
from hvdbridge.supervisor.wire import Message

GRACE = 0.5
LEFT_GRACE = 1.5
Send = tuple[int, Message, bytes]


@dataclass
class Wait:
    """One thing that a rank waits for; it was in it ``since`` then, ``began`` by the clock of limits."""

    label: str
    since: float
    began: float
    limit: float
    stall: float
    phase: bool = False
    warned: bool = False


@dataclass
class Member:
    """A rank that has said hello."""

    rank: int
    host: str
    pid: int
    state: str = "here"  # here, left, bye, dead
    left_at: float = 0.0
    leave_id: int | None = None
    connected: bool = True
    waits: dict[int, Wait] = field(default_factory=dict)
    patience: dict[int, tuple[float, float]] = field(default_factory=dict)  # token: seconds, until when

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass
class Gathering:
    """Values that the ranks posted under one name; all are answered when all came, or at the deadline (rule 8)."""

    deadline: float
    values: dict[int, str] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)


@dataclass
class Getter:
    """A rank that waits for a key."""

    rank: int
    id: int
    key: str
    deadline: float


class Job:
    """State of one job of ``size`` ranks.

    Attributes:
        failure: the message that every rank was sent, or None.
        failed_at: when.
    """

    def __init__(self, size: int, timeout: float, stall: float, start: float = 0.0) -> None:
        self.size = size
        self.timeout = timeout
        self.start = start
        self.stall = stall
        self.members: dict[int, Member] = {}
        self.failure: Message | None = None
        self.failed_at = 0.0
        self._out: list[Send] = []
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._getters: list[Getter] = []
        self._gatherings: dict[str, Gathering] = {}
        self._suspects: list[tuple[float, int, int, str]] = []  # (until, rank, id, text): secondary errors
        self._clock = Clock()
        self._stopping: dict[int, dict[str, int]] | None = None  # what ranks have answered, once all are asked
        self._stopped = False

    # What the server calls ---------------------------------------------------------------------------

    def join(self, rank: int, size: int, host: str, pid: int) -> str | None:
        """A rank says hello; returns why it may not join, or None."""
        if size != self.size:
            return f"this rank was told that the job has {size} ranks, rank 0 that it has {self.size}"
        if not 0 <= rank < size:
            return f"rank {rank} does not exist in a job of {size} ranks"
        if rank in self.members:
            return f"{self.members[rank]} is in this job already; two processes were given rank {rank}"
        self.members[rank] = Member(rank, host, pid)
        if self.failure:
            self._send(rank, self.failure)
        if self._stopping is not None:
            self._send(rank, {"op": "stop?"})
        return None

    def receive(self, rank: int, message: Message, payload: bytes, now: float) -> None:
        """Handle one message. Raises KeyError, TypeError or ValueError on one that cannot be meant."""
        _HANDLERS[message["op"]](self, self.members[rank], message, payload, now)

    def lost(self, rank: int, now: float) -> None:
        """The connection of ``rank`` is at its end."""
        member = self.members[rank]
        member.connected = False
        member.waits.clear()
        member.patience.clear()
        self._set_clock(now)
        self._getters = [g for g in self._getters if g.rank != rank]
        if self.failure and self.failure["origin"] == rank:
            self.failure = {**self.failure, "origin": None}
            for other in self.members:
                self._send(other, {"op": "origin gone"})
        if member.state == "here":
            member.state = "dead"
            self.fail(f"{member} died without a word (killed, or crashed?)", now)
        self._name_last_step()

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, stalls, suspicions."""
        self._set_clock(now)
        clock = self._clock.at(now)
        for getter in [g for g in self._getters if clock >= g.deadline]:
            self._getters.remove(getter)
            self._send(getter.rank, {"id": getter.id, "missing": True})
        for name, gathering in list(self._gatherings.items()):
            if clock >= gathering.deadline:
                self._verdict(name, gathering)
        for until, rank, _, text in self._suspects:
            if now >= until:
                self.fail(text, now, origin=rank)
                break
        if not self.failure:
            self._judge_waits(now)

    def fail(self, text: str, now: float, kind: str = "RankFailed", origin: int | None = None) -> None:
        """End the job for this cause, unless it has one already."""
        if not self.failure:
            self.failure = {"op": "failure", "kind": kind, "text": text, "origin": origin}
            self.failed_at = now
            for member in self.members.values():
                if member.rank != origin:  # the origin hears it in the answer to its report
                    self._send(member.rank, self.failure)
        for _, rank, number, _ in self._suspects:
            self._send(rank, {"id": number, **self.failure, "op": "reported"})
        self._suspects.clear()

    def take(self) -> list[Send]:
        """The messages to send, in order."""
        out, self._out = self._out, []
        return out

    @property
    def over(self) -> bool:
        """Nobody is connected, and nobody is to be expected."""
        gone = not any(m.connected for m in self.members.values())
        return gone and bool(self.members) and (len(self.members) == self.size or self.failure is not None)

    # Messages ----------------------------------------------------------------------------------------

    def _set(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        key = str(message["key"])
        self._values[key] = payload
        for getter in [g for g in self._getters if g.key == key]:
            self._getters.remove(getter)
            self._send(getter.rank, {"id": getter.id}, payload)
        self._send(member.rank, {"id": message["id"]})

    def _get(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        key = str(message["key"])
        if key in self._values:
            self._send(member.rank, {"id": message["id"]}, self._values[key])
        else:
            self._getters.append(Getter(member.rank, message["id"], key, self._deadline(message, now)))

    def _add(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        key = str(message["key"])
        self._counters[key] = self._counters.get(key, 0) + int(message["amount"])
        self._send(member.rank, {"id": message["id"], "value": self._counters[key]})

    def _delete(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        prefix = str(message["prefix"])
        self._values = {k: v for k, v in self._values.items() if not k.startswith(prefix)}
        self._counters = {k: v for k, v in self._counters.items() if not k.startswith(prefix)}
        self._send(member.rank, {"id": message["id"]})

    def _gather(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        name = str(message["name"])
        gathering = self._gatherings.setdefault(name, Gathering(self._deadline(message, now)))
        gathering.values[member.rank] = str(message["value"])
        gathering.ids[member.rank] = message["id"]
        if len(gathering.values) == self.size:
            self._verdict(name, gathering)

    def _verdict(self, name: str, gathering: Gathering) -> None:
        del self._gatherings[name]
        missing = [r for r in range(self.size) if r not in gathering.values]
        groups: dict[str, list[int]] = {}
        for rank in sorted(gathering.values):
            groups.setdefault(gathering.values[rank], []).append(rank)
        verdict: Message = {"missing": self._describe(missing)} if missing else {}
        if len(groups) > 1:
            verdict["groups"] = list(groups.items())
        for rank, number in gathering.ids.items():
            self._send(rank, {"id": number, **verdict})

    def _waiting(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        limit = float(message.get("limit") or self.timeout)
        age, stall = float(message["age"]), float(message.get("stall") or self.stall)
        began = self._clock.at(now) - age
        wait = Wait(str(message["label"]), now - age, began, limit, stall, "phase" in message)
        member.waits[int(message["token"])] = wait

    def _waited(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.waits.pop(int(message["token"]), None)

    def _report(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        text = f"{member} {message['text']}"
        if self.failure or not message["secondary"]:
            self.fail(text, now, origin=member.rank)
            self._send(member.rank, {"id": message["id"], **(self.failure or {}), "op": "reported"})
        else:
            self._suspects.append((now + GRACE, member.rank, message["id"], text))

    def _leave(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.state, member.left_at, member.leave_id = "left", now, message["id"]
        self._release()

    def _bye(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.state = "bye"
        self._send(member.rank, {"id": message["id"]})
        self._release()
        self._name_last_step()

    def _release(self) -> None:
        """Let those go who left, once all have left or shut down."""
        if len(self.members) == self.size and all(m.state in ("left", "bye") for m in self.members.values()):
            for member in self.members.values():
                if member.leave_id is not None:
                    self._send(member.rank, {"id": member.leave_id})
                    member.leave_id = None

    # Patience, and the last step ---------------------------------------------------------------------

    def _patience(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        if seconds := float(message["seconds"]):
            member.patience[int(message["token"])] = seconds, now + seconds
        else:
            member.patience.pop(int(message["token"]), None)
        self._set_clock(now)

    def _set_clock(self, now: float) -> None:
        patient = any(until > now for m in self.members.values() for _, until in m.patience.values())
        if patient != self._clock.stands:
            (self._clock.stand_still if patient else self._clock.go_on)(now)
            for rank in self.members:
                self._send(rank, {"op": "patience", "on": patient})

    def _deadline(self, message: Message, now: float) -> float:
        return self._clock.at(now) + float(message["timeout"])

    def _stop(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        if self._stopping is None:
            self._stopping = {}
            for rank in self.members:
                self._send(rank, {"op": "stop?"})

    def _passed(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        if self._stopping is not None:
            self._stopping[member.rank] = {str(key): int(step) for key, step in message["steps"].items()}
            self._name_last_step()

    def _name_last_step(self) -> None:
        """Once all that make steps have answered."""
        if self._stopping is None or self._stopped or len(self.members) < self.size:
            return
        if all(m.state != "here" or m.rank in self._stopping for m in self.members.values()):
            self._stopped = True
            for rank in self.members:
                self._send(rank, {"op": "stop", "steps": latest(self._stopping)})

    # Waits -------------------------------------------------------------------------------------------

    def _judge_waits(self, now: float) -> None:
        left = [m for m in self.members.values() if m.state == "left"]
        for member in self.members.values():
            for wait in member.waits.values():
                age = self._clock.at(now) - wait.began
                if left and now - max(wait.since, left[0].left_at) >= LEFT_GRACE:
                    who = ", ".join(map(str, left[:4]))
                    return self.fail(f"{who} left without hb.shutdown() while {self._picture(wait.label)}", now)
                if age >= wait.limit:
                    text = f"{wait.label} is not finished after {age:.1f} s"
                    if wait.limit in (self.timeout, self.start):
                        stage = "TIMEOUT" if wait.limit == self.timeout else "START"
                        text += f" (HVDBRIDGE_{stage}_SECONDS={wait.limit:g})"
                    return self.fail(f"{text}: {self._picture(wait.label)}", now, kind="CollectiveTimeout")
                if age >= wait.stall and not wait.warned:
                    self._warn(wait.label, age)
        return None

    def _warn(self, label: str, age: float) -> None:
        text = f"{label} is not finished after {age:.1f} s: {self._picture(label)}"
        waiting = [m for m in self.members.values() if any(w.label == label for w in m.waits.values())]
        for member in waiting:
            for wait in member.waits.values():
                wait.warned = wait.warned or wait.label == label
        for rank in {0, *(m.rank for m in waiting)}:
            self._send(rank, {"op": "stalled", "text": text})

    def _picture(self, label: str) -> str:
        """Who waits for ``label``, and what the others do."""
        inside = [m.rank for m in self.members.values() if any(w.label == label for w in m.waits.values())]
        outside = [r for r in range(self.size) if r not in inside]
        text = f"{ranks_text(inside)} wait{'s' if len(inside) == 1 else ''} in {label}"
        return f"{text}; not in it: {self._describe(outside)}" if outside else text

    def _describe(self, ranks: list[int], limit: int = 8) -> str:
        """Each rank with what is known of it; of many, the first few and the numbers of the rest.

        A rank that came in the last moments has not said so yet: it is called busy, which it was.
        """
        parts = []
        for rank in ranks[:limit]:
            member = self.members.get(rank)
            if member is None:
                parts.append(f"rank {rank} (never came)")
            elif member.state != "here":
                ends = {"left": "left without hb.shutdown()", "bye": "has shut down", "dead": "died"}
                parts.append(f"{member}: {ends[member.state]}")
            elif member.patience:
                seconds = ", ".join(f"{seconds:g}" for seconds, _ in member.patience.values())
                parts.append(f"{member}: within hb.patience({seconds})")
            elif member.waits:
                labels = dict.fromkeys(w.label for w in member.waits.values())
                parts.append(f"{member}: waits in {' and '.join(labels)}")
            else:
                parts.append(f"{member}: busy elsewhere or asleep")
        if ranks[limit:]:
            parts.append(ranks_text(ranks[limit:]))
        return "; ".join(parts)

    def _send(self, rank: int, message: Message, payload: bytes = b"") -> None:
        if self.members[rank].connected:
            self._out.append((rank, message, payload))


_HANDLERS = {
    "set": Job._set, "get": Job._get, "add": Job._add, "delete": Job._delete, "gather": Job._gather,
    "waiting": Job._waiting, "waited": Job._waited, "report": Job._report, "leave": Job._leave, "bye": Job._bye,
    "patience": Job._patience, "stop": Job._stop, "passed": Job._passed,
}  # fmt: skip
