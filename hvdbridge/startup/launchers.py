"""The launchers: what each leaves in the environment of the processes that it starts, and where its ranks meet.

Rules:

1. The innermost launcher wins: torchrun inside mpiexec is torchrun, mpiexec inside srun is mpiexec.
2. Variables that merely leaked are no launcher: SLURM_* in a batch shell, MASTER_ADDR alone.
3. A launcher is taken at its word or refused: half a set of variables, or numbers that contradict each other,
   is an error that names the variables. Nothing degrades into a world of one.
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
    """A launcher, as its ranks see it.

    Class attributes:
        name: :attr:`World.launcher <hvdbridge.startup.world.World.launcher>` of its ranks.
        spreads: each process is a rank. Otherwise something inside may have started several ranks in each
            (``mp.spawn`` under ``srun --ntasks-per-node=1``).
        by_mpi: ranks meet by MPI, where its library starts.
        needed: its variables for rank and size.
        optional: field of :class:`.World` -> variable.
    """

    name: ClassVar[str]
    spreads: ClassVar[bool] = False
    by_mpi: ClassVar[bool] = False
    needed: ClassVar[tuple[str, str]]
    optional: ClassVar[Mapping[str, str]] = {}

    def world(self, env: Environ) -> World | None:
        """The place of this process, if this launcher started it; numbers that it does not give are UNKNOWN.

        Raises:
            RendezvousError: the launcher's variables are incomplete or contradict each other.
            ConfigurationError: one of them is not a number.
        """
        return _place(env, self.name, self.needed, self.optional)

    def channel(self, world: World, key: str, config: Config) -> Channel:
        """Where the ranks meet.

        Raises:
            RendezvousError, ConfigurationError: variables are missing, or no process answers there.
        """
        return channels.from_variables(world, key, config)


class Torchrun(Launcher):
    name = "torchrun"
    spreads = True
    needed = ("RANK", "WORLD_SIZE")
    optional: ClassVar = {
        "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE",
    }  # fmt: skip

    def world(self, env: Environ) -> World | None:
        return super().world(env) if "TORCHELASTIC_RUN_ID" in env else None


class Horovodrun(Launcher):
    """CROSS_RANK is no node number: it counts only the hosts that have this local rank."""

    name = "horovodrun"
    spreads = True
    needed = ("HOROVOD_RANK", "HOROVOD_SIZE")
    optional: ClassVar = {"local_rank": "HOROVOD_LOCAL_RANK", "local_size": "HOROVOD_LOCAL_SIZE"}

    def channel(self, world: World, key: str, config: Config) -> Channel:
        return channels.HorovodChannel.from_environment(world, key, config)


class OpenMpi(Launcher):
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
        world = _place(env, self.name, ("PMI_RANK", "PMI_SIZE"), names)
        # Hydra's proxies may be tasks of a step of srun, with as many ranks as there are proxies.
        step = Srun().world(env) if world and "MPI_LOCALRANKID" not in env else None
        return step if step and world and (step.rank, step.size) == (world.rank, world.size) else world


class Srun(Launcher):
    name = "srun"

    def world(self, env: Environ) -> World | None:
        """A step that srun started. A batch shell has SLURM_PROCID too, but no numbered step with tasks of its own."""
        step = env.get("SLURM_STEP_ID", "")
        if not step.isdigit() or int(step) >= 0xFFFFFFF0 or "SLURM_STEP_NUM_TASKS" not in env:
            return None
        world = _place(
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
                "torchrun or mpiexec; for one process set RANK=0 WORLD_SIZE=1"
            )
        if world and 0 <= world.node_rank < len(counts):
            return replace(world, local_size=counts[world.node_rank])
        return world

    def channel(self, world: World, key: str, config: Config) -> Channel:
        return channels.from_slurm(world, key, config)


class Bare(Launcher):
    """Processes that somebody started with RANK and WORLD_SIZE."""

    name = "bare"

    def world(self, env: Environ) -> World | None:
        names = {"local_rank": "LOCAL_RANK"}
        if env.get("LOCAL_RANK"):
            names["local_size"] = "LOCAL_WORLD_SIZE"
        return _place(env, self.name, ("RANK", "WORLD_SIZE"), names)


LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), Horovodrun(), OpenMpi(), Pmi(), Srun(), Bare())
"""Innermost first."""


def detect(environ: Environ | None = None) -> World:
    """The place of this process, by ``environ`` (default: ``os.environ``).

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
            # A job that is larger than what the launcher started was spread by something inside it. Equal or smaller
            # numbers are a shell's leftovers.
            inside = not launcher.spreads and int(env.get("WORLD_SIZE", "0") or 0) > world.size and "RANK" in env
            return (Bare().world(env) if inside else None) or world
    return World(0, 1, 0, 1, 0, 1)


def named(name: str) -> Launcher:
    """The first launcher of that name."""
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


def _number(env: Environ, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigurationError(f"{name}={env[name]!r} must be a whole number") from None


def _place(env: Environ, launcher: str, needed: Sequence[str], optional: Mapping[str, str]) -> World | None:
    """A world from the variables ``needed`` (rank, size) and, where all are there, ``optional`` (field -> variable)."""
    there = [name for name in needed if env.get(name)]
    if not there:
        return None
    missing = [name for name in needed if name not in there]
    if missing:
        raise RendezvousError(
            f"{', '.join(there)} is set but {', '.join(missing)} is not: "
            + ("set both, or neither" if launcher == "bare" else f"start the script by {launcher}, or unset {there[0]}")
        )
    fields = {field: _number(env, name) for field, name in optional.items() if env.get(name)}
    rank, size = (_number(env, name) for name in needed)
    try:
        return World(rank, size, launcher=launcher, **fields)
    except RendezvousError as error:
        told = " ".join(f"{name}={env[name]}" for name in (*needed, *optional.values()) if name in env)
        raise RendezvousError(f"{error}: the environment says {told}") from None


def _is_task() -> bool:
    """Whether Slurm started this process, or what started it, rather than a shell in one of its terminals: tasks that
    srun starts from such a shell inherit its variables, and have no terminal.
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
    """Name, state, parent, group, session, terminal, and so on: proc(5)."""
    head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return [head.partition("(")[2], *tail.split()]
