"""The helper's state of a job: key-value store, agreement, waits of the ranks, and the ONE cause for which a job ends.

Rules:

1. This module has no I/O. It takes messages of ranks and the time; ``take()`` returns the messages to send.
2. The first cause of a failure is sent to all ranks. Errors that follow from it are not sent.
3. A secondary error (a broken connection) becomes the cause only if no primary error arrives within GRACE_SECONDS.
4. If a connection ends without ``bye`` or ``leave``, the rank has died. This is a primary cause.
5. An exit without shutdown is a failure only if another rank still waits LEFT_GRACE_SECONDS later. A script in which
   all ranks just end is no failure.
6. No state grows with the duration of the job: a request is deleted once it is answered, and training stores no keys.
7. All ranks are notified when the rank that caused the failure has ended, since launchers blame the first that ends.
8. Limits and stalls use a clock that is paused while a rank has requested patience, at most for the requested time. The
   ranks are notified, so that they pause their own clocks.
9. When a rank requests a stop, the helper agrees on a last step with all ranks, see last_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from hvdbridge.errors import ranks_text
from hvdbridge.supervisor.clock import Clock
from hvdbridge.supervisor.last_step import last_steps
from hvdbridge.supervisor.wire import Message

GRACE_SECONDS = 0.5
LEFT_GRACE_SECONDS = 1.5
OutgoingMessage = tuple[int, Message, bytes]


@dataclass
class Wait:
    """One wait of a rank. It started at ``since`` in real time, at ``began`` on the clock of rule 8."""

    label: str
    since: float
    began: float
    limit: float
    stall: float
    phase: bool = False
    hint: str = ""
    warned: bool = False


@dataclass
class Member:
    """A rank that has joined the job.

    Attributes:
        host: the identity of its host: the host's name, and what differs between hosts of one name.
        namesakes: the identities of all hosts of that name; messages print the name alone where it is unique.
        leave_id: the id of its unanswered leave request.
    """

    rank: int
    host: str
    pid: int
    namesakes: set[str]
    state: str = "here"  # "here", "left" (without shutdown), "bye" (after shutdown) or "dead"
    left_at: float = 0.0
    leave_id: int | None = None
    connected: bool = True
    waits: dict[int, Wait] = field(default_factory=dict)
    patience: dict[int, tuple[float, float]] = field(default_factory=dict)  # by token: seconds requested, end

    def __str__(self) -> str:
        host = self.host if len(self.namesakes) > 1 else self.host.partition("/")[0]
        return f"rank {self.rank} ({host}, pid {self.pid})"


@dataclass
class Gathering:
    """Values that ranks post under one name. All get a reply when each rank has posted, or at the deadline (rule 8)."""

    deadline: float
    values: dict[int, str] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)  # request ids


@dataclass
class PendingGet:
    """A request for a key that no rank has set yet."""

    rank: int
    id: int
    key: str
    deadline: float


class Job:
    """State of one job of ``size`` ranks, with default limits of waits in seconds (``start``: for messages only).

    Attributes:
        failure: the failure message that was sent to all ranks, or None.
        failed_at: time of the failure.
    """

    def __init__(self, size: int, timeout: float, stall: float, start: float = 0.0) -> None:
        self.size = size
        self.timeout = timeout
        self.start = start
        self.stall = stall
        self.members: dict[int, Member] = {}
        self._hosts: dict[str, set[str]] = {}  # identities by the host's name
        self.failure: Message | None = None
        self.failed_at = 0.0
        self._outgoing: list[OutgoingMessage] = []
        self._values: dict[str, bytes] = {}
        self._pending_gets: list[PendingGet] = []
        self._gatherings: dict[str, Gathering] = {}
        self._secondary_errors: list[tuple[float, int, int, str]] = []  # (deadline, rank, request id, text)
        self._clock = Clock()
        self._passed_steps: dict[int, dict[str, int]] | None = None  # replies by rank; None: no stop requested
        self._last_step_sent = False

    # What the server calls ---------------------------------------------------------------------------

    def join(self, rank: int, size: int, host: str, pid: int) -> str | None:
        """Add a rank to the job; return the reason if it is rejected, else None."""
        if size != self.size:
            return f"this rank was started as one of {size} ranks, rank 0 as one of {self.size}"
        if not 0 <= rank < size:
            return f"rank {rank} does not exist in a job of {size} ranks"
        if rank in self.members:
            return f"{self.members[rank]} is in this job already; two processes were given rank {rank}"
        namesakes = self._hosts.setdefault(host.partition("/")[0], set())
        namesakes.add(host)
        self.members[rank] = Member(rank, host, pid, namesakes)
        if self.failure:
            self._send(rank, self.failure)
        if self._clock.paused:
            self._send(rank, {"op": "patience", "on": True})
        if self._passed_steps is not None:
            self._send(rank, {"op": "stop?"})
        return None

    def receive(self, rank: int, message: Message, payload: bytes, now: float) -> None:
        """Handle one message of ``rank``; raise KeyError, TypeError or ValueError if it is malformed."""
        _HANDLERS[message["op"]](self, self.members[rank], message, payload, now)

    def lost(self, rank: int, now: float) -> None:
        """Handle the end of the connection of ``rank``."""
        member = self.members[rank]
        member.connected = False
        member.waits.clear()
        member.patience.clear()
        self._set_clock(now)
        self._pending_gets = [g for g in self._pending_gets if g.rank != rank]
        if self.failure and self.failure["origin"] == rank:
            self.failure = {**self.failure, "origin": None}
            for other in self.members:
                self._send(other, {"op": "origin gone"})
        if member.state == "here":
            member.state = "dead"
            self.fail(f"{member} died without a word (killed, or crashed?)", now)
        self._send_last_step()

    def tick(self, now: float) -> None:
        """Handle deadlines, stalls and pending secondary errors as of ``now``."""
        self._set_clock(now)
        clock = self._clock.reading(now)
        for pending in [g for g in self._pending_gets if clock >= g.deadline]:
            self._pending_gets.remove(pending)
            self._send(pending.rank, {"id": pending.id, "missing": True})
        for name, gathering in list(self._gatherings.items()):
            if clock >= gathering.deadline:
                self._finish_gathering(name, gathering)
        for deadline, rank, _, text in self._secondary_errors:
            if now >= deadline:
                self.fail(text, now, origin=rank)
                break
        if not self.failure:
            self._check_waits(now)

    def fail(self, text: str, now: float, kind: str = "RankFailed", origin: int | None = None) -> None:
        """Make the job fail with this cause, unless it has failed already; reply to pending secondary errors."""
        if not self.failure:
            self.failure = {"op": "failure", "kind": kind, "text": text, "origin": origin}
            self.failed_at = now
            for member in self.members.values():
                if member.rank != origin:  # the origin gets it in the reply to its report
                    self._send(member.rank, self.failure)
        for _, rank, request_id, _ in self._secondary_errors:
            self._send(rank, {"id": request_id, **self.failure, "op": "reported"})
        self._secondary_errors.clear()

    def take(self) -> list[OutgoingMessage]:
        """Return and remove the messages to send, in order: (rank, message, payload)."""
        out, self._outgoing = self._outgoing, []
        return out

    # Messages ----------------------------------------------------------------------------------------

    def _set(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        key = str(message["key"])
        self._values[key] = payload
        for pending in [g for g in self._pending_gets if g.key == key]:
            self._pending_gets.remove(pending)
            self._send(pending.rank, {"id": pending.id}, payload)
        self._send(member.rank, {"id": message["id"]})

    def _get(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        key = str(message["key"])
        if key in self._values:
            self._send(member.rank, {"id": message["id"]}, self._values[key])
        else:
            self._pending_gets.append(PendingGet(member.rank, message["id"], key, self._deadline(message, now)))

    def _gather(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        name = str(message["name"])
        gathering = self._gatherings.setdefault(name, Gathering(self._deadline(message, now)))
        gathering.values[member.rank] = str(message["value"])
        gathering.ids[member.rank] = message["id"]
        if len(gathering.values) == self.size:
            self._finish_gathering(name, gathering)

    def _finish_gathering(self, name: str, gathering: Gathering) -> None:
        """Reply to all ranks of a gathering: the ranks of each value if values differ, and the missing ranks."""
        del self._gatherings[name]
        missing = [r for r in range(self.size) if r not in gathering.values]
        groups: dict[str, list[int]] = {}
        for rank in sorted(gathering.values):
            groups.setdefault(gathering.values[rank], []).append(rank)
        reply: Message = {"missing": self._describe_ranks(missing)} if missing else {}
        if len(groups) > 1:
            reply["groups"] = list(groups.items())
        for rank, request_id in gathering.ids.items():
            self._send(rank, {"id": request_id, **reply})

    def _waiting(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        limit = float(message.get("limit") or self.timeout)
        age, stall = float(message["age"]), float(message.get("stall") or self.stall)
        began = self._clock.reading(now) - age
        label, hint = str(message["label"]), str(message.get("hint", ""))
        wait = Wait(label, now - age, began, limit, stall, "phase" in message, hint)
        member.waits[int(message["token"])] = wait

    def _waited(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.waits.pop(int(message["token"]), None)

    def _report(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        text = f"{member} {message['text']}"
        if self.failure or not message["secondary"]:
            self.fail(text, now, origin=member.rank)
            self._send(member.rank, {"id": message["id"], **(self.failure or {}), "op": "reported"})
        else:
            self._secondary_errors.append((now + GRACE_SECONDS, member.rank, message["id"], text))

    def _leave(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.state, member.left_at, member.leave_id = "left", now, message["id"]
        self._release_leaving()

    def _bye(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        member.state = "bye"
        self._send(member.rank, {"id": message["id"]})
        self._release_leaving()
        self._send_last_step()

    def _release_leaving(self) -> None:
        """Reply to the ranks that are leaving, once all ranks have left or shut down."""
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
        """Pause or resume the clock, and notify all ranks of a change."""
        paused = any(until > now for m in self.members.values() for _, until in m.patience.values())
        if paused != self._clock.paused:
            (self._clock.pause if paused else self._clock.resume)(now)
            for rank in self.members:
                self._send(rank, {"op": "patience", "on": paused})

    def _deadline(self, message: Message, now: float) -> float:
        return self._clock.reading(now) + float(message["timeout"])

    def _stop(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        if self._passed_steps is None:
            self._passed_steps = {}
            for rank in self.members:
                self._send(rank, {"op": "stop?"})

    def _passed(self, member: Member, message: Message, payload: bytes, now: float) -> None:
        if self._passed_steps is not None:
            self._passed_steps[member.rank] = {str(key): int(step) for key, step in message["steps"].items()}
            self._send_last_step()

    def _send_last_step(self) -> None:
        """Send the last step to all ranks, once each rank that is still training has replied."""
        if self._passed_steps is None or self._last_step_sent or len(self.members) < self.size:
            return
        if all(m.state != "here" or m.rank in self._passed_steps for m in self.members.values()):
            self._last_step_sent = True
            for rank in self.members:
                self._send(rank, {"op": "stop", "steps": last_steps(self._passed_steps)})

    # Waits -------------------------------------------------------------------------------------------

    def _check_waits(self, now: float) -> None:
        """Fail the job for a wait that exceeds its limit or waits for a rank that has left; warn of stalled waits."""
        left = sorted((m for m in self.members.values() if m.state == "left"), key=attrgetter("left_at"))
        for member in self.members.values():
            for wait in member.waits.values():
                age = self._clock.reading(now) - wait.began
                if left and now - max(wait.since, left[0].left_at) >= LEFT_GRACE_SECONDS:
                    who = ", ".join(map(str, left[:4]))
                    return self.fail(f"{who} left without hb.shutdown() while {self._describe_wait(wait.label)}", now)
                if age >= wait.limit:
                    text = f"{wait.label} is not finished after {age:.1f} s"
                    if wait.limit in (self.timeout, self.start):
                        stage = "TIMEOUT" if wait.limit == self.timeout else "START"
                        text += f" (HVDBRIDGE_{stage}_SECONDS={wait.limit:g})"
                    return self.fail(f"{text}: {self._describe_wait(wait.label)}", now, kind="CollectiveTimeout")
                if age >= wait.stall and not wait.warned:
                    self._send_stall_warning(wait.label, age)
        return None

    def _send_stall_warning(self, label: str, age: float) -> None:
        text = f"{label} is not finished after {age:.1f} s: {self._describe_wait(label)}"
        waiting = [m for m in self.members.values() if any(w.label == label for w in m.waits.values())]
        for member in waiting:
            for wait in member.waits.values():
                wait.warned = wait.warned or wait.label == label
        for rank in {0, *(m.rank for m in waiting)}:
            self._send(rank, {"op": "stalled", "text": text})

    def _describe_wait(self, label: str) -> str:
        """Return a text: the ranks that wait in ``label``, and the state of all others; a hint if every rank waits."""
        inside = [m.rank for m in self.members.values() if any(w.label == label for w in m.waits.values())]
        outside = [r for r in range(self.size) if r not in inside]
        text = f"{ranks_text(inside)} wait{'s' if len(inside) == 1 else ''} in {label}"
        text += f"; not in it: {self._describe_ranks(outside)}" if outside else ""
        hints = [w.hint for m in self.members.values() for w in m.waits.values() if w.label == label and w.hint]
        everybody = len(self.members) == self.size and all(m.waits for m in self.members.values())
        return f"{text}. {hints[0]}" if hints and everybody else text

    def _describe_ranks(self, ranks: list[int], limit: int = 8) -> str:
        """Return a text: the state of each of the first ``limit`` ranks, and the numbers of the rest.

        Ranks announce a wait with a delay. A rank whose wait is not announced yet is described as busy.
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
            self._outgoing.append((rank, message, payload))


_HANDLERS = {
    "set": Job._set, "get": Job._get, "gather": Job._gather, "waiting": Job._waiting,
    "waited": Job._waited, "report": Job._report, "leave": Job._leave, "bye": Job._bye,
    "patience": Job._patience, "stop": Job._stop, "passed": Job._passed,
}  # fmt: skip
