"""MPI by mpi4py: native under mpiexec and srun; elsewhere an MPI that speaks PMI-1 joins the job's helper.

Rules:

1. Importing mpi4py.MPI is MPI_Init unless it is told otherwise, so it is told so, and MPI_Init runs where we say.
2. MPI cannot start twice in a process. It stays up when the session ends, and is finalized at exit by mpi4py,
   after all of Python's own exit hooks: the ranks have said goodbye to each other by then.
3. MPI_Init holds the GIL: only :meth:`Monitor.phase` can end a rank that hangs in it, and where the ranks meet
   by MPI itself, and so have no monitor yet, a :class:`Guard`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hvdbridge import communicators
from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable
from hvdbridge.helper.guard import Guard
from hvdbridge.rendezvous.channels import Channel, ObjectChannel
from hvdbridge.rendezvous.starter import Meeting, Numbers, Starter, Variables
from hvdbridge.world import World

SPEAKS_PMI1 = ("MPICH Version", "Intel(R) MPI", "MVAPICH")
_started_here = False  # MPI is one per process and starts once, so this is, too


class MpiStarter(Starter):
    """``MPI_Init_thread`` with MPI_THREAD_MULTIPLE: the driver communicates from a thread of its own."""

    name = "mpi"

    @classmethod
    def running(cls) -> Numbers | None:
        if _started_here or "mpi4py.MPI" not in sys.modules:
            return None
        mpi = _library()
        if not mpi.Is_initialized() or mpi.Is_finalized():
            return None
        return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()

    def own_channel(self) -> Channel:
        return self._channel()

    def _channel(self, release: Callable[[], None] = lambda: None) -> Channel:
        duplicate = _library().COMM_WORLD.Dup()

        def all_gather(value: str) -> list[Any]:
            return list(duplicate.allgather(value))

        def close() -> None:
            duplicate.Free()
            release()

        return ObjectChannel(all_gather, close)

    def native_channel(self, world: World, config: Config) -> Channel | None:
        if not native(world):
            return None
        self.check(world)
        who = f"rank {world.rank} of {world.size} ({world.launcher})"
        guard = Guard(config.timeout_seconds, who, world.local_size)
        _initialize()
        found = self.numbers()
        # An MPI that is not this launcher's own finds one rank of one, which would be a channel to nobody.
        if found != (world.rank, world.size):
            raise BackendUnavailable(
                f"{world.launcher} started rank {world.rank} of {world.size}, but MPI found rank {found[0]} of "
                f"{found[1]}. {self.hint(world)}"
            )
        return self._channel(guard.release)

    def check(self, world: World) -> None:
        super().check(world)
        mpi = _library()
        if mpi.Is_finalized():
            raise BackendUnavailable(
                "MPI was finalized in this process, and MPI cannot start twice: let it run until exit"
            )
        text = _version()
        if world.size > 1 and not native(world) and not any(name in text for name in SPEAKS_PMI1):
            raise BackendUnavailable(
                f"{text} cannot join ranks that {world.launcher} started: it does not speak PMI-1, as MPICH and "
                f"Intel MPI do. Run: mpiexec -n {world.size} python {sys.argv[0] or 'train.py'} "
                "(or install MPICH: pip install 'hvdbridge[mpich]')"
            )

    def start(self, meeting: Meeting) -> None:
        mpi = _library()
        if mpi.Is_initialized():
            return
        variables = Variables()
        if meeting.helper is not None:
            variables.remove(("PMI_", "PMIX_", "MPI_LOCAL", "HYDI_"))  # of an outer launcher
            variables.set(meeting.helper.pmi_environment(meeting.world.rank, meeting.world.size))
        try:
            with meeting.monitor.phase("MPI_Init"):
                _initialize()
        finally:
            variables.restore()

    def numbers(self) -> Numbers:
        world = _library().COMM_WORLD
        return world.Get_rank(), world.Get_size()

    def hint(self, world: World) -> str:
        return (
            f"mpi4py uses {_version()}; start the ranks by that library's own mpiexec, or srun by the --mpi= that it "
            "needs (srun --mpi=list). If MPI was imported before hb.init(), import it after."
        )

    def stop(self) -> None:
        """Rule 2."""


def native(world: World) -> bool:
    """Whether this launcher starts MPI by itself."""
    return world.launcher in ("mpiexec", "srun")


def _library() -> Any:
    """mpi4py.MPI without MPI_Init.

    Raises:
        BackendUnavailable: mpi4py finds no MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"mpi4py is installed but finds no MPI library: {error}. {communicators.entry('mpi').remedy}"
        ) from error
    return MPI


def _version() -> str:
    text: str = _library().Get_library_version()
    return " ".join(text.replace("\0", "").splitlines()[0].split(",")[0].split())


def _initialize() -> None:
    global _started_here
    mpi = _library()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _started_here = True
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailable(
            f"{_version()} was started without MPI_THREAD_MULTIPLE, which hvdbridge needs: it communicates from a "
            "thread of its own. Leave mpi4py.rc.thread_level at 'multiple', and use an MPI built with threads."
        )
