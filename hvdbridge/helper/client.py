"""A rank's end of the job's helper: the :class:`Monitor`.  (INTERFACE; being filled in)"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from hvdbridge.config import Config
from hvdbridge.errors import HvdbridgeError
from hvdbridge.helper.start import HelperAddress


class Monitor:
    """This rank's connection to the job's helper: key-value store, agreement, and who failed why.

    Attributes:
        rank: this process's rank.
        size: number of ranks in the job.
        failure: why the job ends (the same first cause on every rank), or None while all is well.
    """

    rank: int
    size: int
    failure: HvdbridgeError | None

    @classmethod
    def connect(cls, address: HelperAddress, rank: int, size: int, config: Config, host: str | None = None) -> Monitor:
        """Join the job; retries until the helper answers or the start-up timeout is over.

        ``host`` names the node: ranks with the same text share memory (PMI's process mapping is made of it).
        Raises RendezvousError: nobody answers there, the secret is wrong, the rank is taken or the size differs.
        """

    @classmethod
    def alone(cls, config: Config) -> Monitor:
        """The monitor of a job of one: the same interface without helper, sockets and threads."""

    def store_set(self, key: str, value: bytes) -> None:
        """Set ``key``; whoever waits for it in :meth:`store_get` goes on."""

    def store_get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of ``key``; waits until a rank sets it (default: the timeout of the configuration)."""

    def store_add(self, key: str, amount: int = 1) -> int:
        """Add to a counter that starts at 0; returns its new value."""

    def store_delete(self, prefix: str) -> None:
        """Forget all keys that start with ``prefix``."""

    def agree(self, name: str, value: str, timeout: float | None = None) -> None:
        """Return when every rank posted the same ``value`` under ``name``; a barrier, too.

        Raises (on EVERY rank) RankMismatch: who has what; RendezvousError: who did not come.
        """

    def check(self, number: int, signature: str) -> None:
        """HVDBRIDGE_DEBUG=1: return when every rank is about to start collective ``number`` with this signature.

        Raises (on EVERY rank) CollectiveMismatch: who starts what; CollectiveTimeout: who starts nothing.
        """

    def watch(self, label: str) -> AbstractContextManager[None]:
        """``with monitor.watch("AllReduce[3] ..."):`` what this rank waits for meanwhile. Any thread; < 1 us.

        A connection error that leaves the block is replaced by the job's primary cause, if one is known
        within half a second (``raise cause from error``).
        """

    def phase(self, label: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """Like :meth:`watch` for start-up steps that may hold the GIL (MPI_Init): ends the process after ``seconds``."""

    def report(self, error: BaseException) -> BaseException:
        """Tell the job that this rank fails; returns the job's first cause (``error`` itself if it is the first)."""

    def on_failure(self, callback: Callable[[HvdbridgeError], None]) -> None:
        """Call ``callback(failure)`` from the monitor's thread when the job fails (at once if it has failed)."""

    def remove_on_failure(self, callback: Callable[[HvdbridgeError], None]) -> None:
        """Undo :meth:`on_failure`; harmless if it is not registered."""

    def install_exit_hooks(self) -> None:
        """From now on an uncaught exception, or leaving without :meth:`bye`, is told to the job. :meth:`bye` undoes it."""

    def leave(self) -> None:
        """Normal exit without shutdown: returns when ALL ranks have left or shut down, so that MPI_Finalize cannot hang.

        Called by the exit hooks (atexit). If the job fails meanwhile this process ends with status 1.
        """

    def bye(self) -> None:
        """Normal end of the session: from now on this rank may be gone. Harmless when repeated."""
