"""The start of MPI through mpi4py.

MPI starts by itself under launchers that support it (mpiexec; srun if Slurm is configured for it). Under other
launchers an MPI library with PMI-1 connects to the job's helper.

Rules:

1. The import of mpi4py.MPI calls MPI_Init by default. This module disables that and calls MPI_Init itself.
2. MPI cannot start twice in a process. It keeps running when the session ends. mpi4py finalizes it at exit, after all
   of Python's own exit hooks, when all ranks have left the job.
3. MPI_Init holds the GIL. Only :meth:`Monitor.phase` can end a rank that hangs in it. Where ranks connect over MPI
   itself, there is no monitor yet, so a :class:`Guard` process does.
4. This module must know before MPI_Init whether the launcher can start the library. MPI_Init aborts the process where
   the protocols differ, or starts a world of one rank. A library with PMI-1 then connects to the job's helper.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdbridge.backends import registry
from hvdbridge.backends.starter import EnvironmentOverrides, RankAndSize, RendezvousInfo, Starter
from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable
from hvdbridge.startup.channels import Channel, ObjectChannel
from hvdbridge.startup.world import World
from hvdbridge.supervisor.guard import Guard
from hvdbridge.supervisor.processes import SHM

log = logging.getLogger("hvdbridge")
SEGMENT_BYTES = 6 << 20  # what MPICH 5 maps for a rank of a shared host, its cells included
MINIMUM_BYTES = 1 << 20  # what a rank touches in MPI_Init
PMI1_LIBRARIES = ("MPICH Version", "Intel(R) MPI", "MVAPICH")
_started_by_hvdbridge = False  # global, since a process has one MPI, which starts once


class MpiStarter(Starter):
    """Calls ``MPI_Init_thread`` with MPI_THREAD_MULTIPLE, since the scheduler communicates in a thread of its own."""

    name = "mpi"

    @classmethod
    def running(cls) -> RankAndSize | None:
        if _started_by_hvdbridge or "mpi4py.MPI" not in sys.modules:
            return None
        mpi = _library()
        return _rank_and_size() if mpi.Is_initialized() and not mpi.Is_finalized() else None

    def all_gather(self, value: str) -> list[Any]:
        duplicate = _library().COMM_WORLD.Dup()
        gathered = list(duplicate.allgather(value))
        duplicate.Free()
        return gathered

    def native_channel(self, world: World, config: Config) -> Channel | None:
        if not launcher_starts_mpi(world) or incompatibility(world):
            return None
        self.check(world)
        rank_text = f"rank {world.rank} of {world.size} ({world.launcher})"
        _set_network(config)
        check_shared_memory(world)
        guard = Guard(config.start_seconds, rank_text, world.local_size)
        _initialize()
        guard.started()
        # An MPI library of another launcher reports rank 0 of 1; a channel over it would have no peers.
        self.verify_rank_and_size(world)
        return ObjectChannel(self.all_gather, guard.release)

    def check(self, world: World) -> None:
        super().check(world)
        mpi = _library()
        if mpi.Is_finalized():
            raise BackendUnavailable(
                "MPI was finalized in this process, and MPI cannot start twice: let it run until exit"
            )
        text, reason = _version(), incompatibility(world)
        by_launcher = launcher_starts_mpi(world) and not reason
        if world.size > 1 and not by_launcher and not any(name in text for name in PMI1_LIBRARIES):
            raise BackendUnavailable(
                reason or f"{text} cannot join ranks that {world.launcher} started: it does not speak PMI-1, as MPICH "
                f"and Intel MPI do. Run: {_command(world)} (or install MPICH in an environment of your own: pip "
                "install 'hvdbridge[mpich]')"
            )

    def start(self, rendezvous: RendezvousInfo) -> None:
        mpi = _library()
        if mpi.Is_initialized():
            return
        check_shared_memory(rendezvous.world)
        overrides = EnvironmentOverrides()
        if rendezvous.helper is not None or incompatibility(rendezvous.world):
            overrides.unset(("PMI_", "PMIX_", "MPI_LOCAL", "HYDI_"))  # set by an outer launcher
        if rendezvous.helper is not None:
            _set_network(rendezvous.config)
            overrides.set(rendezvous.helper.pmi_environment(rendezvous.world.rank, rendezvous.world.size))
        else:  # Open MPI 5 leaves the segment that a single process would share with others
            overrides.set_defaults({"OMPI_MCA_btl": "self"})
        try:
            with rendezvous.monitor.phase("MPI_Init"):
                _initialize()
        finally:
            overrides.restore()

    def rank_and_size(self) -> RankAndSize:
        return _rank_and_size()

    def hint(self, world: World) -> str:
        return (
            f"mpi4py uses {_version()}; start the ranks by that library's own mpiexec, or srun by the --mpi= that it "
            "needs (srun --mpi=list). If MPI was imported before hb.init(), import it after."
        )

    def stop(self) -> None:
        """Do nothing: MPI runs until exit (rule 2)."""


def launcher_starts_mpi(world: World) -> bool:
    """Return whether the launcher supports MPI itself. srun does if ``--mpi=`` or Slurm's configuration enables it."""
    by_slurm = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK"))
    return world.launcher == "mpiexec" or (world.launcher == "srun" and by_slurm)


def incompatibility(world: World) -> str:
    """Return why this launcher cannot start mpi4py's library, and the remedy; empty if no reason is known."""
    if world.launcher not in ("mpiexec", "srun"):
        return ""
    library = _version()
    by_pmix, by_open_mpi = "PMIX_NAMESPACE" in os.environ, "OMPI_COMM_WORLD_RANK" in os.environ
    launcher = "Open MPI's mpirun" if by_open_mpi else "MPICH's or Intel MPI's mpiexec"
    if world.launcher == "srun":
        launcher = f"srun --mpi={'pmix' if by_pmix else 'pmi2'}"
    speaks = f"{launcher} speaks {'PMIx' if by_pmix else 'PMI'} and mpi4py's library, {library}, does not"
    if library.startswith("MPICH"):
        if by_pmix and not _loaded("libpmix"):
            return f"{speaks}: it would abort. {_remedy(world)}"
        if world.launcher == "srun" and not by_pmix and "PMI_RANK" in os.environ and world.num_nodes > 1:
            return f"{launcher} cuts lines over 1023 bytes, which {library} sends between hosts. {_remedy(world)}"
    elif library.startswith("Intel") and by_open_mpi:
        return f"{launcher} starts no Intel MPI: every rank would find itself alone. {_remedy(world)}"
    elif library.startswith("Open MPI"):
        if not by_pmix and launcher_starts_mpi(world) and not _has_old_pmi(world):
            return f"{speaks}: it would abort, or every rank would find itself alone. {_remedy(world)}"
        if by_open_mpi and library.startswith("Open MPI v4") and os.environ.get("OMPI_VERSION", "4") >= "5":
            return f"mpirun of Open MPI {os.environ['OMPI_VERSION']} starts no {library}. {_remedy(world)}"
    return ""


def check_shared_memory(world: World, folder: Path = SHM) -> None:
    """Warn where MPICH or Intel MPI may find ``folder`` full during the job, since the kernel then sends SIGBUS.

    Raises:
        BackendUnavailable: it is full already, so that MPI_Init would end by SIGBUS.
    """
    if not any(name in _version() for name in PMI1_LIBRARIES):
        return
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    if not found.f_blocks or free >= SEGMENT_BYTES * max(world.local_size, 1):  # no blocks: no limit
        return
    text = (
        f"rank {world.rank}: {folder} of {socket.gethostname()} has {free / 1e6:.1f} MB free. Where it is full, ranks "
        f"of {_version()} end by SIGBUS (Bus error). Enlarge it (containers: --shm-size=1g), or remove files there"
    )
    if free < MINIMUM_BYTES:
        raise BackendUnavailable(text)
    if world.local_rank <= 0:
        log.warning("%s", text)


def _has_old_pmi(world: World) -> bool:
    """Return whether an Open MPI before 5 may have been built with Slurm's PMI-1 or PMI-2, in addition to PMIx."""
    path = _loaded("libmpi")
    if world.launcher != "srun" or path is None or not _version().startswith(("Open MPI v3", "Open MPI v4")):
        return False
    folders = ("openmpi*", "openmpi*/lib/openmpi*")
    components = [file.stem for folder in folders for file in path.parent.glob(f"{folder}/mca_pmix_*.so")]
    return not components or "mca_pmix_s1" in components or "mca_pmix_s2" in components


def _loaded(name: str) -> Path | None:
    """Return the path of the first shared library of this process whose file name begins with ``name``, or None."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(name):
                return path
    return None


def _command(world: World) -> str:
    """Return the command that starts the job with mpi4py's library."""
    library, script = _version(), _script()
    if world.launcher == "srun":
        kind = "pmix" if library.startswith("Open MPI") else "pmi2"
        return f"srun --mpi={kind} python {script} (srun --mpi=list says what Slurm has), or HVDBRIDGE_BACKEND=torch"
    names = {"Open": ("mpirun.openmpi", "mpirun"), "Intel(R)": ("mpiexec.hydra", "mpiexec")}
    own = names.get(library.split()[0], ("mpiexec.mpich", "mpiexec"))
    path = _loaded("libmpi")
    files = [parent / "bin" / name for parent in (path.parents if path else ()) for name in own]
    return f"{next((str(file) for file in files if file.exists()), own[-1])} -n {world.size} python {script}"


def _script() -> str:
    """Return what follows ``python`` in this process's command line: a script or ``-m`` and a module, and arguments."""
    words = sys.orig_argv[1:]  # sys.argv lacks "-m hvdbridge.run", without which the script may not run
    return "train.py" if not words or sys.argv[:1] == ["-c"] else shlex.join(words)


def _remedy(world: World) -> str:
    return (
        f"Start the ranks by {_command(world)}, or let mpi4py take the launcher's MPI (MPI4PY_LIBMPI, or pip install "
        "--no-binary mpi4py mpi4py)"
    )


def _set_network(config: Config) -> None:
    """Set variables of MPICH (ch3, UCX, libfabric) and Open MPI to HVDBRIDGE_PORTS and HVDBRIDGE_IFACE.

    Variables that the user has set keep their values. They are not restored, since MPI connects on first use.
    UCX_NET_DEVICES is not set: it would also have to name Infiniband devices.
    """
    values: dict[str, str | None] = {}
    if config.ports:
        low, high = config.ports[0], config.ports[-1]
        values |= {"MPIR_CVAR_CH3_PORT_RANGE": f"{low}:{high}"}
        values |= {"UCX_TCP_PORT_RANGE": f"{low}-{high}"}
        values |= {"FI_TCP_PORT_LOW_RANGE": f"{low}", "FI_TCP_PORT_HIGH_RANGE": f"{high}"}
        values |= {"OMPI_MCA_btl_tcp_port_min_v4": f"{low}", "OMPI_MCA_btl_tcp_port_range_v4": f"{len(config.ports)}"}
    if config.iface:
        names = ("MPIR_CVAR_NEMESIS_TCP_NETWORK_IFACE", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include")
        values |= dict.fromkeys(names, config.iface)
    EnvironmentOverrides().set_defaults(values)


def _library() -> Any:
    """Import and return mpi4py.MPI without MPI_Init.

    Raises:
        BackendUnavailable: mpi4py finds no MPI library, or cannot open that of ``MPI4PY_LIBMPI``.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if names_no_library(str(error)):
            text = str(error).splitlines()[-1]
            raise BackendUnavailable(
                f"MPI4PY_LIBMPI={os.environ['MPI4PY_LIBMPI']} names a library that mpi4py cannot load ({text}). Unset "
                "or correct MPI4PY_LIBMPI."
            ) from error
        raise BackendUnavailable(
            f"mpi4py is installed but finds no MPI library: {error}. {registry.entry('mpi').remedy}"
        ) from error
    return MPI


def names_no_library(error: str) -> bool:
    """Return whether mpi4py's ``error`` says that the file of ``MPI4PY_LIBMPI`` cannot be opened.

    It is not so if the file can be opened, and a library that it needs cannot.
    """
    return f"{os.environ.get('MPI4PY_LIBMPI')}: cannot open shared object file" in error


def _rank_and_size() -> RankAndSize:
    world = _library().COMM_WORLD
    return world.Get_rank(), world.Get_size()


def _version() -> str:
    """Return name and version of the MPI library: the first part of its version text."""
    text: str = _library().Get_library_version()
    return " ".join(text.replace("\0", "").splitlines()[0].split(",")[0].split())


def _initialize() -> None:
    """Call MPI_Init unless MPI runs already; raise BackendUnavailable if it lacks MPI_THREAD_MULTIPLE."""
    global _started_by_hvdbridge
    mpi = _library()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _started_by_hvdbridge = True
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendUnavailable(
            f"{_version()} was started without MPI_THREAD_MULTIPLE, which hvdbridge needs: it communicates from a "
            "thread of its own. Leave mpi4py.rc.thread_level at 'multiple', and use an MPI built with threads."
        )
