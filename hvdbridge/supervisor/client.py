"""The rank's client of the helper, the process on rank 0's host that watches the job: :class:`Monitor`.

Rules:

1. The first cause of a failure is the same on all ranks, and all ranks know it within a second.
2. When the job fails, pending requests and callbacks receive the cause. The main thread has UNWIND seconds to leave by
   itself. Then the process prints the cause on stderr and ends with status 1, unless it called ``survive_failure``
   before.
3. ``watch`` is cheap, since only long waits are sent to the helper. The helper detects stalls and timeouts for all
   ranks.
4. The rank that caused a failure ends first, if it ends within ORIGIN_SECONDS. A launcher reports the status of the
   first process that ends, and may kill the others at once. The kernel closes the connections of a process some time
   before its parent can collect the status, so the other ranks end REAP_SECONDS later.
5. A job of one rank has the same interface, without helper, sockets and threads.
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
from hvdbridge.supervisor.causes import describe, secondary
from hvdbridge.supervisor.clock import Clock
from hvdbridge.supervisor.exits import ExitHooks, end_process
from hvdbridge.supervisor.last_step import LastStep, last_steps
from hvdbridge.supervisor.link import Link, SocketLink, join
from hvdbridge.supervisor.processes import identity
from hvdbridge.supervisor.spawn import HelperAddress
from hvdbridge.supervisor.wire import VALUE, Message, pack

UNWIND = 2.0  # seconds for the main thread to leave after a failure
ORIGIN_SECONDS, REAP_SECONDS = 1.0, 0.1  # see rule 4
CAUSE_SECONDS = 1.0  # how long a secondary error waits for its cause
log = logging.getLogger("hvdbridge")
OnFailure = Callable[[HvdbridgeError], None]


class InFlightWork(Protocol):
    """An object that runs collectives in threads of its own (a scheduler)."""

    def fail(self, cause: BaseException) -> None:
        """End all pending work with ``cause``. Called when the job fails; must not block."""

    def settle(self) -> None:
        """Block until all work that has started is over."""


class _Wait:
    """The context of :meth:`Monitor.watch`. It has slots and no lock, since it surrounds each collective."""

    __slots__ = ("hint", "label", "limit", "monitor", "phase", "since", "stall", "token")

    def __init__(
        self, monitor: Monitor, label: object, limit: float = 0.0, phase: bool = False, stall: float = 0.0,
        hint: str = "",
    ) -> None:  # fmt: skip
        self.monitor, self.label, self.limit, self.phase, self.token = monitor, label, limit, phase, 0
        self.stall, self.hint = stall, hint

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
        host: an address of rank 0's host that all ranks reach.
        failure: the first cause of the job's failure, the same on all ranks; None if the job has not failed.
        starting: the default limit of waits is HVDBRIDGE_START_SECONDS. True until the session is open, and again until
            the first step of a synchronizer has ended.
        last_step: this rank's state in the agreement on a last step.
    """

    def __init__(self, rank: int, size: int, config: Config) -> None:
        self.rank, self.size, self.host = rank, size, "127.0.0.1"
        self.failure: HvdbridgeError | None = None
        self._config = config
        self.starting = True
        self.last_step = LastStep()
        self._clock = Clock()
        self._link = Link(config.timeout_seconds, config.stall_seconds)
        self._stop_sent = self._closed = False
        self._waits: set[_Wait] = set()
        self._tokens = itertools.count(1)
        self._announce_after = min(1.0, config.stall_seconds / 2, config.timeout_seconds / 4)
        self._failed = threading.Event()
        self._caused = False  # the failure is this rank's own
        self._origin_ended = threading.Event()
        self._failure_lock = threading.Lock()
        self._failure_printed = self._survives_failure = False
        self._failed_at = 0.0
        self._callbacks: list[OnFailure] = []
        self._in_flight: list[InFlightWork] = []
        self._hooks: ExitHooks | None = None

    @classmethod
    def connect(cls, address: HelperAddress, rank: int, size: int, config: Config, host: str | None = None) -> Monitor:
        """Join the job; retry until the helper accepts the connection or the start-up timeout is over.

        ``host`` identifies the node: ranks with the same text share memory. PMI's process mapping uses it.

        Raises:
            RendezvousError: the helper is unreachable, or rejects the secret, the rank (joined already) or the size.
        """
        monitor = cls(rank, size, config)
        pid = os.getpid()
        hello = {
            "secret": address.secret, "rank": rank, "size": size, "host": host or socket.gethostname(),
            "pid": pid, "process": identity(pid),
        }  # fmt: skip
        sock = join(address, pack(hello), rank, config.start_seconds)
        link = SocketLink(sock, monitor._on_message, monitor._tick, monitor._on_helper_lost)
        monitor._link = link
        monitor.host = address.host
        link.start()
        return monitor

    @classmethod
    def alone(cls, config: Config) -> Monitor:
        """Return the monitor of a job of one rank, which has no helper, sockets or threads."""
        return cls(0, 1, config)

    @property
    def limit(self) -> float:
        """Default limit of a wait, in seconds."""
        return self._config.start_seconds if self.starting else self._config.timeout_seconds

    # Store and agreement -----------------------------------------------------------------------------

    def store_set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value`` in the job's store, and complete waiting calls of :meth:`store_get`.

        Raises:
            RendezvousError: the value is too large for the store.
        """
        if len(value) > VALUE:
            raise RendezvousError(f"store_set({key!r}) of {len(value)} bytes: the helper's store takes {VALUE}")
        self._link.request({"op": "set", "key": key}, value)

    def store_get(self, key: str, timeout: float | None = None) -> bytes:
        """Return the value of ``key``; block until a rank sets it, for at most ``timeout`` seconds (:attr:`limit`).

        Raises:
            RendezvousError: no rank has set the key in time.
        """
        limit = self.limit if timeout is None else timeout
        with _Wait(self, f"store_get({key!r})", limit + UNWIND):
            reply, value = self._link.request({"op": "get", "key": key, "timeout": limit})
        if "missing" in reply:
            raise RendezvousError(f"no rank stored {key!r}, for which rank {self.rank} waits at most {limit:g} s")
        return value

    def own_address(self) -> str:
        """Return an address of this host that other ranks can reach: that of its connection to the helper."""
        return self._link.own_address()

    def agree(self, name: str, value: str, timeout: float | None = None, remedy: str = "") -> None:
        """Check that all ranks post the same ``value`` under ``name``. It is also a barrier.

        Args:
            name: what the value is, for messages; each name is used once at a time.
            value: the text to compare.
            timeout: limit in seconds; default :attr:`limit`.
            remedy: sentence that is added to the message if ranks are missing.

        Raises:
            RankMismatch: values differ. Raised on ALL ranks, with each rank's value.
            RendezvousError: ranks are missing. Raised on each rank that has posted, with the missing ranks.
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
        """Check that all ranks start collective ``number`` with this signature (HVDBRIDGE_DEBUG=1). Also a barrier.

        Raises:
            CollectiveMismatch: signatures differ. Raised on ALL ranks, with each rank's signature.
            CollectiveTimeout: ranks are missing. Raised on each rank that has arrived, with the missing ranks.
        """
        limit = self.limit
        groups, missing = self._gather(f"collective {number}", signature, limit)
        if groups:
            raise errors.CollectiveMismatch(f"the ranks start different collectives as their number {number}: {groups}")
        if missing:
            text = f"collective {number}, {signature}, was not started within {limit:g} s"
            raise errors.CollectiveTimeout(f"{text} by: {missing}")

    def _gather(self, name: str, value: str, limit: float) -> tuple[str, str]:
        """Post a value and wait for all ranks. Return two texts: the ranks of each value, and the missing ranks.

        The first is empty if all values are equal, the second if no rank is missing.
        """
        with _Wait(self, name, limit + UNWIND):
            reply, _ = self._link.request({"op": "gather", "name": name, "value": value, "timeout": limit})
        groups = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in reply.get("groups", ()))
        return groups, reply.get("missing", "")

    # Waiting -----------------------------------------------------------------------------------------

    def watch(self, label: object, limit: float = 0.0, stall: float = 0.0) -> AbstractContextManager[None]:
        """Register a wait of this rank: ``with monitor.watch("AllReduce[3] ..."):``. Any thread may call it.

        If the job has failed, entering the block raises the cause. A connection error that leaves the block is replaced
        by the first cause, if that becomes known within a second (``raise cause from error``).

        Args:
            label: reports print ``str(label)``.
            limit: seconds until the wait fails the job; 0: :attr:`limit`.
            stall: seconds until the wait is reported; 0: as configured.
        """
        return _Wait(self, label, limit, stall=stall)

    @contextmanager
    def phase(self, label: str, seconds: float | None = None, hint: str = "") -> Iterator[None]:
        """Register a step of start-up that may hold the GIL (MPI_Init), so that no thread can act; see :meth:`watch`.

        After ``seconds`` the helper fails the job and reports the phase. A process that cannot process the report
        prints its traceback and ends UNWIND seconds later. If every rank waits, the report ends with ``hint``.
        """
        limit = self._config.start_seconds if seconds is None else seconds
        faulthandler.dump_traceback_later(limit + UNWIND, exit=True, file=2)
        try:
            with _Wait(self, label, limit, phase=True, hint=hint):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _announce(self, wait: _Wait) -> None:
        """Announce a wait to the helper. If the wait has ended meanwhile in its own thread, withdraw it again."""
        wait.token = next(self._tokens)
        note: Message = {"op": "waiting", "token": wait.token, "label": str(wait.label)}
        note |= {"age": time.monotonic() - wait.since, "limit": wait.limit or self.limit, "stall": wait.stall}
        self._link.send(note | {"phase": True, "hint": wait.hint} if wait.phase else note)
        if wait not in self._waits:
            self._withdraw(wait)

    def _withdraw(self, wait: _Wait) -> None:
        """Notify the helper that an announced wait has ended."""
        note: Message = {"op": "waited", "token": wait.token}
        self._link.send(note | {"phase": True} if wait.phase else note)

    # Patience, and the last step ---------------------------------------------------------------------

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Pause the time limits of all ranks within the block, for at most ``seconds``."""
        token = next(self._tokens)
        self._link.send({"op": "patience", "token": token, "seconds": seconds})
        try:
            yield
        finally:
            self._link.send({"op": "patience", "token": token, "seconds": 0.0})

    def clock(self) -> float:
        """Return the time, in seconds, that limits use. It is paused while a rank has requested patience."""
        return self._clock.reading(time.monotonic())

    def last_step_reached(self, key: str, step: int) -> bool:
        """Return whether ``step`` of the synchronizer ``key`` is the last one or a later one; equal on all ranks.

        Raises:
            HvdbridgeError: the job fails during the call.
        """
        state = self.last_step
        if self.size == 1 and state.wanted and not state.decided.is_set():
            state.set_last(last_steps({0: state.freeze()}))
        reached = state.reached(key, step)
        if reached is None:
            with self.watch("the step after which all ranks stop"):
                while not state.decided.wait(0.05):
                    if self.failure is not None:
                        raise self._copy_of_failure()
            reached = state.reached(key, step)
        assert reached is not None
        return reached

    # Failure -----------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> BaseException:
        """Report that this rank fails. Return the first cause of the job's failure, or ``error`` if it is the first.

        The job then ends on all ranks, this one included.
        """
        if self.failure is None:
            text = f"left with sys.exit({error.code!r})" if isinstance(error, SystemExit) else describe(error)
            try:
                message = {"op": "report", "text": text, "secondary": secondary(error)}
                reply, _ = self._link.request(message, timeout=UNWIND)
            except (HvdbridgeError, TimeoutError, OSError):  # the job has just failed, or has no helper
                return self.failure or error
            self._fail(getattr(errors, reply["kind"])(reply["text"]))
            if reply["origin"] == self.rank:
                self._caused = True
                return error
        return self.failure or error

    def wait_for_origin(self) -> None:
        """Block until the rank that caused the failure has ended (rule 4); called just before this process ends."""
        if not self._caused and self._origin_ended.wait(max(0.0, self._failed_at + ORIGIN_SECONDS - time.monotonic())):
            time.sleep(REAP_SECONDS)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the job's first cause if ``error`` is its consequence, else ``error``; wait CAUSE_SECONDS for it."""
        if self.size == 1 or isinstance(error, HvdbridgeError) or not secondary(error):
            return error
        self._failed.wait(CAUSE_SECONDS)
        return self.failure or error

    def on_failure(self, callback: OnFailure) -> None:
        """Call ``callback(failure)`` in the thread that learns of the job's failure, or at once if it has failed. The
        callback must not block."""
        with self._failure_lock:
            self._callbacks.append(callback)
        if self.failure is not None:
            self._run_callbacks()

    def remove_on_failure(self, callback: OnFailure) -> None:
        """Undo :meth:`on_failure`; no effect if ``callback`` is not registered."""
        with self._failure_lock:
            self._callbacks = [c for c in self._callbacks if c != callback]

    def register(self, work: InFlightWork) -> None:
        """Call ``work.fail`` when the job fails, and ``work.settle`` before this rank leaves without shutdown."""
        self._in_flight.append(work)
        self.on_failure(work.fail)

    def unregister(self, work: InFlightWork) -> None:
        """Undo :meth:`register`. Further calls do nothing."""
        if work in self._in_flight:
            self._in_flight.remove(work)
        self.remove_on_failure(work.fail)

    def survive_failure(self) -> None:
        """Let this process survive a failure of the job, since the caller restarts it (elastic training)."""
        self._survives_failure = True

    def _fail(self, failure: HvdbridgeError) -> None:
        """Store the first cause; end pending requests and run callbacks with it."""
        with self._failure_lock:
            if self.failure is not None or self._closed:
                return
            self._failed_at = time.monotonic()
            self.failure = failure
        self._failed.set()
        self._link.fail(failure)
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run each callback once, also if several threads call this method."""
        assert self.failure is not None
        while True:
            with self._failure_lock:
                if not self._callbacks:
                    return
                callback = self._callbacks.pop(0)
            try:
                callback(self.failure)
            except Exception:
                log.exception("a callback failed while the job ends")

    def _copy_of_failure(self) -> HvdbridgeError:
        """Return a new exception, since one object raised in several threads collects all their tracebacks."""
        assert self.failure is not None
        return type(self.failure)(*self.failure.args)

    # The monitor's thread ----------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if message["op"] == "failure":
            if message["origin"] is None:
                self._origin_ended.set()
            failure = getattr(errors, message["kind"])(message["text"])
            self._print_failure(failure)
            self._fail(failure)
        elif message["op"] == "origin gone":
            self._origin_ended.set()
        elif message["op"] == "stalled":
            log.warning("rank %d: %s", self.rank, message["text"])
        elif message["op"] == "patience":
            (self._clock.pause if message["on"] else self._clock.resume)(time.monotonic())
        elif message["op"] == "stop?":
            self._link.send({"op": "passed", "steps": self.last_step.freeze()})
        elif message["op"] == "stop":
            self.last_step.set_last(message["steps"])

    def _tick(self) -> None:
        """End the process after a failure, send a stop request, and announce long waits."""
        now = time.monotonic()
        if self.failure is not None:
            if now >= self._failed_at + UNWIND and not (self._closed or self._survives_failure):
                self._print_failure(self.failure)
                end_process(1)
            return
        if self.last_step.wanted and not self._stop_sent:
            self._stop_sent = True
            self._link.send({"op": "stop"})
        for wait in sorted(self._waits, key=lambda wait: wait.since):  # the helper names the outermost of a rank's
            delay = min(self._announce_after, (wait.stall or math.inf) / 2, (wait.limit or math.inf) / 4)
            if not wait.token and now - wait.since >= delay:
                self._announce(wait)

    def _print_failure(self, failure: HvdbridgeError) -> None:
        """Print the cause once. It does so immediately, since a launcher kills the other ranks soon after the first."""
        if not (self._failure_printed or self._closed):
            self._failure_printed = True
            verb = "starts over" if self._survives_failure else "ends"
            with suppress(OSError):
                os.write(2, f"hvdbridge: rank {self.rank} {verb}: {failure}\n".encode())

    def _on_helper_lost(self) -> None:
        self._origin_ended.set()
        text = "hvdbridge's helper process, on rank 0's host, ended before the job did (killed?)"
        self._fail(errors.RankFailed(text))

    # The end -----------------------------------------------------------------------------------------

    def install_exit_hooks(self) -> None:
        """Install hooks that report an uncaught exception and an exit without :meth:`bye`, which removes them. A
        further call moves them before exit hooks that were installed meanwhile, such as Horovod's."""
        if self.size > 1:
            if self._hooks is not None:
                self._hooks.remove()
            self._hooks = ExitHooks(self)
            self._hooks.install()

    def leave(self) -> None:
        """Leave the job without shutdown; return when ALL ranks have left or shut down, so MPI_Finalize cannot hang.

        The exit hooks call it. It first settles the registered work, because later no monitor would detect that another
        rank never starts its part. If the job fails meanwhile, this process ends with status 1.
        """
        if self._closed:
            return
        try:
            for work in list(self._in_flight):
                with self.watch("what was started before the end of the script"):
                    work.settle()
            self._link.request({"op": "leave"})
        except (HvdbridgeError, OSError) as error:
            self.wait_for_origin()
            end_process(1, f"rank {self.rank} ends: {self.failure or error}")
        self._close()

    def bye(self) -> None:
        """Leave the job at the normal end of the session. After a failure this does nothing: the process still ends."""
        if self._closed or self.failure is not None:
            return
        try:
            self._link.request({"op": "bye"}, timeout=UNWIND)
        except (HvdbridgeError, TimeoutError, OSError):  # the job has just failed: rule 2 applies
            return
        self._close()

    def detach(self) -> None:
        """Disconnect after a failure, before this process restarts by itself; otherwise the helper would kill it."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        if self._hooks is not None:
            self._hooks.remove()
        self._link.close()
