"""Launchers: the environment variables that each sets in its processes, and the channel on which its ranks meet.

Rules:

1. The innermost launcher wins: torchrun inside mpiexec is torchrun, mpiexec inside srun is mpiexec.
2. Inherited variables do not make a launcher: SLURM_* in a batch shell, or MASTER_ADDR alone.
3. A launcher's rank and size are used as they are or refused. An incomplete set, or numbers that contradict each other,
   are an error that names the variables. A process never runs as a world of one instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError, RendezvousError
from hvdbridge.startup import channels
from hvdbridge.startup.channels import Channel
from hvdbridge.startup.world import World, tasks_per_node

Environ = Mapping[str, str]


class Launcher:
    """Base class of launchers.

    Class attributes:
        name: :attr:`World.launcher <hvdbridge.startup.world.World.launcher>` of its ranks.
        one_rank_each: each process of the launcher is a rank. Otherwise a process may have started several ranks, as
            ``mp.spawn`` does under ``srun --ntasks-per-node=1``.
        by_mpi: the ranks meet by MPI, if an MPI library is installed that this launcher starts.
        needed: names of the variables for rank and size.
        optional: field of :class:`.World` -> name of its variable.
    """

    name: ClassVar[str]
    one_rank_each: ClassVar[bool] = False
    by_mpi: ClassVar[bool] = False
    needed: ClassVar[tuple[str, str]]
    optional: ClassVar[Mapping[str, str]] = {}

    def world(self, env: Environ) -> World | None:
        """Return the world of this process, or None if this launcher did not start it.

        Numbers for which the launcher sets no variable are UNKNOWN.

        Raises:
            RendezvousError: the launcher's variables are incomplete or contradict each other.
            ConfigurationError: one of them is not a number.
        """
        return _world(env, self.name, self.needed, self.optional)

    def channel(self, world: World, key: str, config: Config) -> Channel:
        """Return the channel on which the ranks meet.

        Raises:
            RendezvousError, ConfigurationError: variables are missing or not valid, or no server answers.
        """
        return channels.from_variables(world, key, config)


class Torchrun(Launcher):
    """torchrun and torch.distributed.run."""

    name = "torchrun"
    one_rank_each = True
    needed = ("RANK", "WORLD_SIZE")
    optional: ClassVar = {
        "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE",
    }  # fmt: skip

    def world(self, env: Environ) -> World | None:
        return super().world(env) if "TORCHELASTIC_RUN_ID" in env else None


class Horovodrun(Launcher):
    """horovodrun. HOROVOD_CROSS_RANK is no node number: it counts only the hosts that have this local rank."""

    name = "horovodrun"
    one_rank_each = True
    needed = ("HOROVOD_RANK", "HOROVOD_SIZE")
    optional: ClassVar = {"local_rank": "HOROVOD_LOCAL_RANK", "local_size": "HOROVOD_LOCAL_SIZE"}

    def channel(self, world: World, key: str, config: Config) -> Channel:
        return channels.HorovodChannel.from_environment(world, key, config)


class OpenMpi(Launcher):
    """mpiexec of Open MPI."""

    name = "mpiexec"
    by_mpi = True
    needed = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    optional: ClassVar = {"local_rank": "OMPI_COMM_WORLD_LOCAL_RANK", "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE"}


class Pmi(Launcher):
    """MPICH, Intel MPI, MVAPICH and Cray; ``srun --mpi=pmi2`` sets the same variables."""

    name = "mpiexec"
    by_mpi = True

    def world(self, env: Environ) -> World | None:
        names = {"local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
        if "MPI_LOCALRANKID" not in env:
            names = {"local_rank": "PMI_LOCAL_RANK", "local_size": "PMI_LOCAL_SIZE"}
        world = _world(env, self.name, ("PMI_RANK", "PMI_SIZE"), names)
        # srun --mpi=pmi2. Hydra's proxies may be tasks of srun with the same numbers, but Hydra sets MPI_LOCALRANKID
        step = Srun().world(env) if world and "MPI_LOCALRANKID" not in env else None
        return step if step and world and (step.rank, step.size) == (world.rank, world.size) else world


class Srun(Launcher):
    """srun of Slurm."""

    name = "srun"

    def world(self, env: Environ) -> World | None:
        """Return the world of a task that srun started. A batch shell has SLURM_PROCID, too, but no numbered step."""
        step = env.get("SLURM_STEP_ID", "")
        if not step.isdigit() or int(step) >= 0xFFFFFFF0 or "SLURM_STEP_NUM_TASKS" not in env:
            return None
        world = _world(
            env, self.name, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
            {"local_rank": "SLURM_LOCALID", "node_rank": "SLURM_NODEID", "num_nodes": "SLURM_STEP_NUM_NODES"},
        )  # fmt: skip
        counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if world and world.size > 1 and "SLURM_PTY_PORT" in env and not _is_task():
            if env.get("RANK") and env.get("WORLD_SIZE"):
                return None
            raise RendezvousError(
                f"this is one process in a terminal of step {env.get('SLURM_JOB_ID')}.{step} (srun --pty), which has "
                f"{world.size} tasks: the others will not come. Start ranks in it by srun --overlap -n {world.size}, "
                "torchrun or SLURM_OVERLAP=1 mpiexec; for one process set RANK=0 WORLD_SIZE=1"
            )
        if world and 0 <= world.node_rank < len(counts):
            return replace(world, local_size=counts[world.node_rank])
        return world

    def channel(self, world: World, key: str, config: Config) -> Channel:
        return channels.from_slurm(world, key, config)


class Bare(Launcher):
    """Processes that the user started with RANK and WORLD_SIZE."""

    name = "bare"

    def world(self, env: Environ) -> World | None:
        names = {"local_rank": "LOCAL_RANK"}
        if env.get("LOCAL_RANK"):
            names["local_size"] = "LOCAL_WORLD_SIZE"
        return _world(env, self.name, ("RANK", "WORLD_SIZE"), names)


LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), Horovodrun(), OpenMpi(), Pmi(), Srun(), Bare())
"""All launchers, innermost first."""


def detect(environ: Environ | None = None) -> World:
    """Return the world of this process from the variables in ``environ`` (default: ``os.environ``).

    Raises:
        RendezvousError: a launcher's variables are incomplete or contradict each other.
        ConfigurationError: one of them is not a number.

    >>> detect({"RANK": "1", "WORLD_SIZE": "2"}).launcher
    'bare'
    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
    1
    >>> detect({"WORLD_SIZE": "2"})
    Traceback (most recent call last):
    hvdbridge.errors.RendezvousError: WORLD_SIZE is set but RANK is not: set both, or neither
    """
    env = os.environ if environ is None else environ
    for launcher in LAUNCHERS:
        if (world := launcher.world(env)) is not None:
            # If WORLD_SIZE is larger than the launcher's size, its processes have started several ranks each. An equal
            # or smaller WORLD_SIZE is inherited from a shell.
            several = not launcher.one_rank_each and env.get("RANK") and env.get("WORLD_SIZE")
            inside = several and _number(env, "WORLD_SIZE") > world.size
            return (Bare().world(env) if inside else None) or world
    return World(0, 1, 0, 1, 0, 1)


def allocation_warning(world: World, environ: Environ | None = None) -> str:
    """Return a warning if this process is its job's only rank in a shell of ``salloc`` with several tasks; else empty.

    Batch shells and srun's tasks have SLURM_PROCID, so that a batch script may evaluate a model in one process.
    """
    env = os.environ if environ is None else environ
    tasks = env.get("SLURM_NTASKS", "")
    if world.launcher != "none" or "SLURM_JOB_ID" not in env or "SLURM_PROCID" in env or tasks in ("", "1"):
        return ""
    return (
        f"this process is the only rank, and Slurm's allocation {env['SLURM_JOB_ID']} has {tasks} tasks. Put srun "
        "before the command to start a rank for each; for one process set RANK=0 WORLD_SIZE=1"
    )


def named(name: str) -> Launcher:
    """Return the first launcher of that name."""
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


def _number(env: Environ, name: str) -> int:
    """Return the variable ``name`` as an int, or raise ConfigurationError."""
    try:
        return int(env[name])
    except ValueError:
        raise ConfigurationError(f"{name}={env[name]!r} must be a whole number") from None


def _world(env: Environ, launcher: str, needed: Sequence[str], optional: Mapping[str, str]) -> World | None:
    """Return a world from the variables ``needed`` (rank, size) and ``optional`` (field -> variable), or None.

    Raises:
        RendezvousError: only one of ``needed`` is set, or the numbers contradict each other.
        ConfigurationError: a variable is not a number.
    """
    given = [name for name in needed if env.get(name)]
    if not given:
        return None
    missing = [name for name in needed if name not in given]
    if missing:
        raise RendezvousError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: "
            + ("set both, or neither" if launcher == "bare" else f"start the script by {launcher}, or unset {given[0]}")
        )
    fields = {field: _number(env, name) for field, name in optional.items() if env.get(name)}
    rank, size = (_number(env, name) for name in needed)
    try:
        return World(rank, size, launcher=launcher, **fields)
    except RendezvousError as error:
        settings = " ".join(f"{name}={env[name]}" for name in (*needed, *optional.values()) if name in env)
        raise RendezvousError(f"{error}: the environment says {settings}") from None


def _is_task() -> bool:
    """Return whether this process belongs to a task of Slurm, and not to a shell in a terminal of ``srun --pty``.

    Tasks that srun starts from such a shell inherit its variables, but have no terminal.
    """
    try:
        parent, in_terminal = os.getppid(), _stat("self")[5] != "0"
        if _stat(parent)[0] == "slurmstepd":
            return True
        while parent > 1 and _stat(parent)[0] != "slurmstepd":
            parent = int(_stat(parent)[2])
        return parent > 1 and not in_terminal
    except OSError:
        return True


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the process id: name, state, parent, group, session, terminal, ..."""
    head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return [head.partition("(")[2], *tail.split()]
