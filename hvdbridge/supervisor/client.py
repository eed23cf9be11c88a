"""A rank's end of the helper: the :class:`Monitor`.

Rules:

1. The first cause of a failure is the same on every rank, and is known everywhere within a second.
2. When the job fails: pending requests and callbacks get the cause, the main thread has UNWIND seconds to
   leave by itself, then the process ends with the cause on stderr and status 1. Nothing cancels that.
3. ``watch`` costs less than a microsecond; only a wait of some length is told to the helper, which decides
   about stalls and timeouts for all ranks alike.
4. The rank whose failure it is ends first, if it does within ORIGIN_SECONDS: a launcher reports the status of
   the first, and may end the others at once. The kernel closes a process's connections some moments before its
   parent can collect its status (up to 12 ms on busy cores), so the others stay REAP_SECONDS longer.
5. A job of one has the same interface, without helper, sockets and threads.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Protocol

from hvdbridge import errors
from hvdbridge.config import Config
from hvdbridge.errors import HvdbridgeError, RendezvousError, ranks_text
from hvdbridge.supervisor.causes import _describe, secondary
from hvdbridge.supervisor.clock import Clock
from hvdbridge.supervisor.exits import ExitHooks, end_process
from hvdbridge.supervisor.last_step import LastStep, latest
from hvdbridge.supervisor.link import Link, SocketLink, join
from hvdbridge.supervisor.processes import identity
from hvdbridge.supervisor.spawn import HelperAddress
from hvdbridge.supervisor.wire import VALUE, Message, pack

UNWIND = 2.0
ORIGIN_SECONDS = 1.0
REAP_SECONDS = 0.1
CAUSE_SECONDS = 1.0
log = logging.getLogger("hvdbridge")
OnFailure = Callable[[HvdbridgeError], None]


class Guarded(Protocol):
    """An object with collectives in flight in threads of its own (a scheduler)."""

    def fail(self, cause: BaseException) -> None:
        """The job failed; must not block."""

    def settle(self) -> None:
        """Return when all that was started is over."""


class _Wait:
    """One ``with monitor.watch(label)``. Slots and no locks: it stands around every collective."""

    __slots__ = ("label", "limit", "monitor", "phase", "since", "stall", "token")

    def __init__(
        self, monitor: Monitor, label: object, limit: float = 0.0, phase: bool = False, stall: float = 0.0
    ) -> None:
        self.monitor, self.label, self.limit, self.phase, self.token = monitor, label, limit, phase, 0
        self.stall = stall

    def __enter__(self) -> None:
        monitor = self.monitor
        if monitor.failure is not None:
            raise monitor._copy_of_failure()
        self.since = time.monotonic()
        monitor._waits.add(self)
        if self.phase:
            monitor._announce(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        monitor = self.monitor
        monitor._waits.discard(self)
        if self.token:
            monitor._withdraw(self)
        if error is not None and monitor.cause_of(error) is not error:
            raise monitor._copy_of_failure() from error


class Monitor:
    """This rank's connection to the job's helper: key-value store, agreement, and the job's failure.

    Attributes:
        rank: this process's rank.
        size: number of ranks in the job.
        host: an address of rank 0's host that every rank reaches.
        failure: why the job ends (the same first cause on every rank), or None while all is well.
        starting: HVDBRIDGE_START_SECONDS is the default limit. True until the session is open, and again until the
            first step of a synchronizer has ended.
        last_step: this rank's part in the agreement on a last step.
    """

    def __init__(self, rank: int, size: int, config: Config) -> None:
        self.rank = rank
        self.size = size
        self.host = "127.0.0.1"
        self.failure: HvdbridgeError | None = None
        self._config = config
        self.starting = True
        self.last_step = LastStep()
        self._stop_told = False
        self._clock = Clock()
        self._link = Link(config.timeout_seconds, config.stall_seconds)
        self._closed = False
        self._waits: set[_Wait] = set()
        self._tokens = itertools.count(1)
        self._told_after = min(1.0, config.stall_seconds / 2, config.timeout_seconds / 4)
        self._failed = threading.Event()
        self._origin = False  # the failure is this rank's own
        self._origin_gone = threading.Event()
        self._failing = threading.Lock()
        self._said = False
        self._failed_at = 0.0
        self._spared = False
        self._callbacks: list[OnFailure] = []
        self._guarded: list[Guarded] = []
        self._hooks: ExitHooks | None = None

    @classmethod
    def connect(cls, address: HelperAddress, rank: int, size: int, config: Config, host: str | None = None) -> Monitor:
        """Join the job; retries until the helper answers or the start-up timeout is over.

        ``host`` names the node: ranks with the same text share memory (PMI's process mapping is made of it).

        Raises:
            RendezvousError: no helper answers there, the secret is another job's, the rank is taken, the size differs.
        """
        monitor = cls(rank, size, config)
        pid = os.getpid()
        hello = {
            "secret": address.secret, "rank": rank, "size": size, "host": host or socket.gethostname(),
            "pid": pid, "process": identity(pid),
        }  # fmt: skip
        sock = join(address, pack(hello), rank, config.start_seconds)
        link = SocketLink(sock, monitor._hear, monitor._tick, monitor._helper_gone)
        monitor._link = link
        monitor.host = address.host
        link.start()
        return monitor

    @classmethod
    def alone(cls, config: Config) -> Monitor:
        """The monitor of a job of one: the same interface without helper, sockets and threads."""
        return cls(0, 1, config)

    @property
    def limit(self) -> float:
        """The default limit of a wait, in seconds."""
        return self._config.start_seconds if self.starting else self._config.timeout_seconds

    # Store and agreement -----------------------------------------------------------------------------

    def store_set(self, key: str, value: bytes) -> None:
        """Set ``key``; ends the waits for it in :meth:`store_get`."""
        if len(value) > VALUE:
            raise RendezvousError(f"store_set({key!r}) of {len(value)} bytes: the helper's store takes {VALUE}")
        self._link.ask({"op": "set", "key": key}, value)

    def store_get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of ``key``; waits until a rank sets it (default: the timeout of the configuration).

        Raises:
            RendezvousError: no rank set it in time.
        """
        limit = self.limit if timeout is None else timeout
        with _Wait(self, f"store_get({key!r})", limit + UNWIND):
            reply, value = self._link.ask({"op": "get", "key": key, "timeout": limit})
        if "missing" in reply:
            raise RendezvousError(f"no rank stored {key!r}, for which rank {self.rank} waits at most {limit:g} s")
        return value

    def own_address(self) -> str:
        """An address of this host by which the other ranks reach it: where it talks to the job's helper from."""
        return self._link.own_address()

    def agree(self, name: str, value: str, timeout: float | None = None, remedy: str = "") -> None:
        """Return when every rank posted the same ``value`` under ``name``; a barrier, too.

        Raises:
            RankMismatch: on EVERY rank, with each rank's value.
            RendezvousError: on every rank that came, with the missing ranks.
        """
        limit = self.limit if timeout is None else timeout
        groups, missing = self._gather(name, value, limit)
        if missing:
            variable = "HVDBRIDGE_START_SECONDS" if self.starting else "HVDBRIDGE_TIMEOUT_SECONDS"
            raise RendezvousError(
                f"{name}: not all {self.size} ranks came within {limit:g} s. Missing: {missing}. "
                f"Look for an earlier error of theirs; if they are only slow, raise {variable}. {remedy}".rstrip()
            )
        if groups:
            raise errors.RankMismatch(f"the ranks disagree about {name}: {groups}. Give every rank the same.")

    def check(self, number: int, signature: str) -> None:
        """HVDBRIDGE_DEBUG=1: return when every rank is about to start collective ``number`` with this signature.

        Raises:
            CollectiveMismatch: on EVERY rank, with each rank's signature.
            CollectiveTimeout: on every rank that came, with the missing ranks.
        """
        limit = self.limit
        groups, missing = self._gather(f"collective {number}", signature, limit)
        if groups:
            raise errors.CollectiveMismatch(f"the ranks start different collectives as their number {number}: {groups}")
        if missing:
            text = f"collective {number}, {signature}, was not started within {limit:g} s"
            raise errors.CollectiveTimeout(f"{text} by: {missing}")

    def _gather(self, name: str, value: str, limit: float) -> tuple[str, str]:
        """Post a value and wait for all: the ranks of each value (empty if all are equal), and the missing ranks."""
        with _Wait(self, name, limit + UNWIND):
            verdict, _ = self._link.ask({"op": "gather", "name": name, "value": value, "timeout": limit})
        groups = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in verdict.get("groups", ()))
        return groups, verdict.get("missing", "")

    # Waiting -----------------------------------------------------------------------------------------

    def watch(self, label: object, limit: float = 0.0, stall: float = 0.0) -> AbstractContextManager[None]:
        """``with monitor.watch("AllReduce[3] ..."):`` registers a wait of this rank; reports print ``str(label)``.

        Any thread may call it.

        A connection error that leaves the block is replaced by the job's first cause, if that becomes known
        within a second (``raise cause from error``). A block is not entered once the job has failed.
        After ``stall`` seconds the wait is reported, after ``limit`` seconds it ends the job (0: as configured).
        """
        return _Wait(self, label, limit, stall=stall)

    @contextmanager
    def phase(self, label: str, seconds: float | None = None) -> Iterator[None]:
        """Like :meth:`watch`, for a step of start-up that may hold the GIL (MPI_Init), where no thread can act.

        After ``seconds`` the helper ends the job and names the phase; a process that cannot hear it prints
        its traceback and ends UNWIND later.
        """
        limit = self._config.start_seconds if seconds is None else seconds
        faulthandler.dump_traceback_later(limit + UNWIND, exit=True, file=2)
        try:
            with _Wait(self, label, limit, phase=True):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _announce(self, wait: _Wait) -> None:
        """Tell the helper of a wait. It may end in another thread at any moment: then this one withdraws it."""
        wait.token = next(self._tokens)
        note: Message = {"op": "waiting", "token": wait.token, "label": str(wait.label)}
        note |= {"age": time.monotonic() - wait.since, "limit": wait.limit or self.limit, "stall": wait.stall}
        self._link.tell(note | {"phase": True} if wait.phase else note)
        if wait not in self._waits:
            self._withdraw(wait)

    def _withdraw(self, wait: _Wait) -> None:
        note: Message = {"op": "waited", "token": wait.token}
        self._link.tell(note | {"phase": True} if wait.phase else note)

    # Patience, and the last step ---------------------------------------------------------------------

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """No limit passes on any rank meanwhile, for at most so long."""
        token = next(self._tokens)
        self._link.tell({"op": "patience", "token": token, "seconds": seconds})
        try:
            yield
        finally:
            self._link.tell({"op": "patience", "token": token, "seconds": 0.0})

    def clock(self) -> float:
        """The time by which limits are judged: it stands still while a rank has asked for patience."""
        return self._clock.at(time.monotonic())

    def over(self, key: str, step: int) -> bool:
        """Whether ``step`` of the synchronizer ``key`` is the last one, or later: the same answer on all ranks.

        Raises:
            HvdbridgeError: the job fails meanwhile.
        """
        last = self.last_step
        if self.size == 1 and last.wanted and not last.named.is_set():
            last.name(latest({0: last.answer()}))
        found = last.over(key, step)
        if found is None:
            with self.watch("the step after which all ranks stop"):
                while not last.named.wait(0.05):
                    if self.failure is not None:
                        raise self._copy_of_failure()
            found = last.over(key, step)
        assert found is not None
        return found

    # Failure -----------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> BaseException:
        """Tell the job that this rank fails; returns the job's first cause (``error`` itself if it is the first).

        From then on the job ends, on this rank, too.
        """
        if self.failure is None:
            text = f"left with sys.exit({error.code!r})" if isinstance(error, SystemExit) else _describe(error)
            try:
                question = {"op": "report", "text": text, "secondary": secondary(error)}
                reply, _ = self._link.ask(question, timeout=UNWIND)
            except (HvdbridgeError, TimeoutError, OSError):  # the job failed in the same moment, or has no helper
                return self.failure or error
            self._fail(getattr(errors, reply["kind"])(reply["text"]))
            if reply["origin"] == self.rank:
                self._origin = True
                return error
        return self.failure or error

    def let_origin_end(self) -> None:
        """Called by a rank that ends for a failure, as its last act: rule 4."""
        if not self._origin and self._origin_gone.wait(max(0.0, self._failed_at + ORIGIN_SECONDS - time.monotonic())):
            time.sleep(REAP_SECONDS)

    def cause_of(self, error: BaseException) -> BaseException:
        """The job's first cause where ``error`` is its consequence, else ``error``; waits a second to learn it."""
        if self.size == 1 or isinstance(error, HvdbridgeError) or not secondary(error):
            return error
        self._failed.wait(CAUSE_SECONDS)
        return self.failure or error

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback(failure)`` from the monitor's thread when the job fails (at once if it has failed).

        It must not block.
        """
        with self._failing:
            self._callbacks.append(callback)
        if self.failure is not None:
            self._call_back()

    def remove_on_failure(self, callback: OnFailure) -> None:
        """Undo :meth:`on_failure`; harmless if it is not registered."""
        with self._failing:
            self._callbacks = [c for c in self._callbacks if c != callback]

    def guard(self, work: Guarded) -> None:
        """It fails when the job does, and is settled before this rank leaves without shutdown."""
        self._guarded.append(work)
        self.on_failure(work.fail)

    def unguard(self, work: Guarded) -> None:
        """Undo :meth:`guard`; harmless when repeated."""
        if work in self._guarded:
            self._guarded.remove(work)
        self.remove_on_failure(work.fail)

    def spare(self) -> None:
        """From now on a failure does not end this process: the caller starts it anew (elastic training)."""
        self._spared = True

    def _fail(self, failure: HvdbridgeError) -> None:
        with self._failing:
            if self.failure is not None or self._closed:
                return
            self._failed_at = time.monotonic()
            self.failure = failure
        self._failed.set()
        self._link.fail(failure)
        self._call_back()

    def _call_back(self) -> None:
        """Each callback once, whichever thread comes first."""
        assert self.failure is not None
        while True:
            with self._failing:
                if not self._callbacks:
                    return
                callback = self._callbacks.pop(0)
            try:
                callback(self.failure)
            except Exception:
                log.exception("a callback failed while the job ends")

    def _copy_of_failure(self) -> HvdbridgeError:
        """A fresh exception: raised in several threads, one object would collect all their tracebacks."""
        assert self.failure is not None
        return type(self.failure)(*self.failure.args)

    # The monitor's thread ----------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        if message["op"] == "failure":
            if message["origin"] is None:
                self._origin_gone.set()
            failure = getattr(errors, message["kind"])(message["text"])
            self._say(failure)
            self._fail(failure)
        elif message["op"] == "origin gone":
            self._origin_gone.set()
        elif message["op"] == "stalled":
            log.warning("rank %d: %s", self.rank, message["text"])
        elif message["op"] == "patience":
            (self._clock.stand_still if message["on"] else self._clock.go_on)(time.monotonic())
        elif message["op"] == "stop?":
            self._link.tell({"op": "passed", "steps": self.last_step.answer()})
        elif message["op"] == "stop":
            self.last_step.name(message["steps"])

    def _tick(self) -> None:
        now = time.monotonic()
        if self.failure is not None:
            if now >= self._failed_at + UNWIND and not (self._closed or self._spared):
                self._say(self.failure)
                end_process(1)
            return
        if self.last_step.wanted and not self._stop_told:
            self._stop_told = True
            self._link.tell({"op": "stop"})
        for wait in list(self._waits):
            soon = min(self._told_after, (wait.stall or math.inf) / 2, (wait.limit or math.inf) / 4)
            if not wait.token and now - wait.since >= soon:
                self._announce(wait)

    def _say(self, failure: HvdbridgeError) -> None:
        """Print the cause, once, and at once: a launcher ends the other ranks within moments of the first."""
        if not (self._said or self._closed):
            self._said = True
            verb = "starts over" if self._spared else "ends"
            with suppress(OSError):
                os.write(2, f"hvdbridge: rank {self.rank} {verb}: {failure}\n".encode())

    def _helper_gone(self) -> None:
        self._origin_gone.set()
        self._fail(
            errors.RankFailed("hvdbridge's helper process, on rank 0's host, ended before the job did (killed?)")
        )

    # The end -----------------------------------------------------------------------------------------

    def install_exit_hooks(self) -> None:
        """From now on the job is told of an uncaught exception, and of leaving without :meth:`bye` (which undoes this).

        Called again it moves before the exit hooks that were installed meanwhile (Horovod has one, too).
        """
        if self.size > 1:
            if self._hooks is not None:
                self._hooks.remove()
            self._hooks = ExitHooks(self)
            self._hooks.install()

    def leave(self) -> None:
        """Normal exit without shutdown: returns when ALL ranks have left or shut down, so MPI_Finalize cannot hang.

        Called by the exit hooks. Guarded work is settled before: later no monitor would notice that another rank never
        starts its part. If the job fails meanwhile this process ends with status 1.
        """
        if self._closed:
            return
        try:
            for work in list(self._guarded):
                with self.watch("what was started before the end of the script"):
                    work.settle()
            self._link.ask({"op": "leave"})
        except (HvdbridgeError, OSError) as error:
            self.let_origin_end()
            end_process(1, f"rank {self.rank} ends: {self.failure or error}")
        self._close()

    def bye(self) -> None:
        """Normal end of the session: from now on this rank may be gone. Harmless when repeated.

        After a failure it changes nothing: the process still ends.
        """
        if self._closed or self.failure is not None:
            return
        try:
            self._link.ask({"op": "bye"}, timeout=UNWIND)
        except (HvdbridgeError, TimeoutError, OSError):  # the job failed in the same moment: rule 2 holds
            return
        self._close()

    def detach(self) -> None:
        """After a failure: this process starts anew by itself, however long that takes; the helper would kill it."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        if self._hooks is not None:
            self._hooks.remove()
        self._link.close()
