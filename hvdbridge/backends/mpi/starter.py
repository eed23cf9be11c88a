"""MPI by mpi4py: native where the launcher starts it (mpiexec; srun, if Slurm was asked to); elsewhere an MPI that
speaks PMI-1 joins the job's helper.

Rules:

1. Importing mpi4py.MPI is MPI_Init unless it is told otherwise, so it is told so, and MPI_Init runs where we say.
2. MPI cannot start twice in a process. It stays up when the session ends, and is finalized at exit by mpi4py,
   after all of Python's own exit hooks: all ranks have left the job by then.
3. MPI_Init holds the GIL: only :meth:`Monitor.phase` can end a rank that hangs in it, and where the ranks meet
   by MPI itself, and so have no monitor yet, a :class:`Guard`.
4. What a launcher offers must be known before MPI_Init: MPICH aborts the process where it meets PMIx alone.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdbridge.backends import registry
from hvdbridge.backends.starter import Meeting, Numbers, Starter, Variables
from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable
from hvdbridge.startup.channels import Channel, ObjectChannel
from hvdbridge.startup.world import World
from hvdbridge.supervisor.guard import Guard

SPEAKS_PMI1 = ("MPICH Version", "Intel(R) MPI", "MVAPICH")
_started_here = False  # MPI is one per process and starts once, so this is, too


class MpiStarter(Starter):
    """``MPI_Init_thread`` with MPI_THREAD_MULTIPLE: the scheduler communicates from a thread of its own."""

    name = "mpi"

    @classmethod
    def running(cls) -> Numbers | None:
        if _started_here or "mpi4py.MPI" not in sys.modules:
            return None
        mpi = _library()
        return _numbers() if mpi.Is_initialized() and not mpi.Is_finalized() else None

    def all_gather(self, value: str) -> list[Any]:
        duplicate = _library().COMM_WORLD.Dup()
        found = list(duplicate.allgather(value))
        duplicate.Free()
        return found

    def native_channel(self, world: World, config: Config) -> Channel | None:
        if not offers_mpi(world) or misfit(world):
            return None
        self.check(world)
        who = f"rank {world.rank} of {world.size} ({world.launcher})"
        _set_network(config)
        guard = Guard(config.start_seconds, who, world.local_size)
        _initialize()
        guard.started()
        # An MPI that is not this launcher's own finds one rank of one, which would be a channel without peers.
        self.compare(world)
        return ObjectChannel(self.all_gather, guard.release)

    def check(self, world: World) -> None:
        super().check(world)
        mpi = _library()
        if mpi.Is_finalized():
            raise BackendUnavailable(
                "MPI was finalized in this process, and MPI cannot start twice: let it run until exit"
            )
        text = _version()
        if world.size > 1 and not offers_mpi(world) and not any(name in text for name in SPEAKS_PMI1):
            script = sys.argv[0] or "train.py"
            run = f"mpiexec -n {world.size} python {script}"
            if world.launcher == "srun":
                run = f"srun --mpi=pmix (or --mpi=pmi2; srun --mpi=list) python {script}, or HVDBRIDGE_BACKEND=torch"
            raise BackendUnavailable(
                f"{text} cannot join ranks that {world.launcher} started: it does not speak PMI-1, as MPICH and "
                f"Intel MPI do. Run: {run} (or install MPICH: pip install 'hvdbridge[mpich]')"
            )

    def start(self, meeting: Meeting) -> None:
        mpi = _library()
        if mpi.Is_initialized():
            return
        variables = Variables()
        if meeting.helper is not None:
            variables.remove(("PMI_", "PMIX_", "MPI_LOCAL", "HYDI_"))  # of an outer launcher
            _set_network(meeting.config)
            variables.set(meeting.helper.pmi_environment(meeting.world.rank, meeting.world.size))
        try:
            with meeting.monitor.phase("MPI_Init"):
                _initialize()
        finally:
            variables.restore()

    def numbers(self) -> Numbers:
        return _numbers()

    def hint(self, world: World) -> str:
        return (
            f"mpi4py uses {_version()}; start the ranks by that library's own mpiexec, or srun by the --mpi= that it "
            "needs (srun --mpi=list). If MPI was imported before hb.init(), import it after."
        )

    def stop(self) -> None:
        """Rule 2."""


def offers_mpi(world: World) -> bool:
    """Whether this launcher starts MPI by itself; srun does if its ``--mpi=`` or Slurm's configuration asks for it."""
    by_slurm = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK"))
    return world.launcher == "mpiexec" or (world.launcher == "srun" and by_slurm)


def misfit(world: World) -> str:
    """Why mpi4py's library cannot start as this launcher offers it, and what to do; empty: nothing is known of it."""
    if "PMIX_NAMESPACE" not in os.environ or not _version().startswith("MPICH"):
        return ""
    with suppress(OSError):
        if "libpmix" in Path("/proc/self/maps").read_text():  # an MPICH that was built with it
            return ""
    whose = "Open MPI's mpirun" if "OMPI_COMM_WORLD_RANK" in os.environ else f"{world.launcher} (--mpi=pmix)"
    own = Path(sys.executable).with_name("mpiexec")
    run = f"{own if own.exists() else 'mpiexec'} -n {world.size}"
    if world.launcher == "srun":
        run = "srun --mpi=pmi2"
    return (
        f"{whose} speaks PMIx and mpi4py's library, {_version()}, does not: it would abort. Start the ranks by "
        f"{run}, or let mpi4py take the launcher's MPI (MPI4PY_LIBMPI, or pip install --no-binary mpi4py mpi4py)"
    )


def _set_network(config: Config) -> None:
    """HVDBRIDGE_PORTS and HVDBRIDGE_IFACE in the words of MPICH (ch3; UCX and libfabric below ch4) and Open MPI, unless
    the user said more. They stay: connections are made when first used. UCX_NET_DEVICES is left alone: it names
    Infiniband's devices, too.
    """
    found: dict[str, str | None] = {}
    if config.ports:
        low, high = config.ports[0], config.ports[-1]
        found |= {"MPIR_CVAR_CH3_PORT_RANGE": f"{low}:{high}"}
        found |= {"UCX_TCP_PORT_RANGE": f"{low}-{high}"}
        found |= {"FI_TCP_PORT_LOW_RANGE": f"{low}", "FI_TCP_PORT_HIGH_RANGE": f"{high}"}
        found |= {"OMPI_MCA_btl_tcp_port_min_v4": f"{low}", "OMPI_MCA_btl_tcp_port_range_v4": f"{len(config.ports)}"}
    if config.iface:
        names = ("MPIR_CVAR_NEMESIS_TCP_NETWORK_IFACE", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
        found |= dict.fromkeys(names, config.iface)
    Variables().default(found)


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
            f"mpi4py is installed but finds no MPI library: {error}. {registry.entry('mpi').remedy}"
        ) from error
    return MPI


def _numbers() -> Numbers:
    world = _library().COMM_WORLD
    return world.Get_rank(), world.Get_size()


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
