"""Who am I: rank, size and place of this process, read from what its launcher left in the environment.

Rules:

1. The innermost launcher wins: torchrun inside mpiexec is torchrun, mpiexec inside srun is mpiexec.
2. Variables that merely leaked are no launcher: SLURM_* in a batch shell, MASTER_ADDR alone.
3. A launcher is taken at its word or refused: half a set of variables, or numbers that contradict each other,
   is an error that names the variables. Nothing degrades into a world of one.
4. What the launcher does not tell is :data:`UNKNOWN` until :meth:`World.completed` fills it from an exchange.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hvdbridge.errors import ConfigurationError, RendezvousError

UNKNOWN = -1
Environ = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """The place of this process among all.

    Attributes:
        rank, size: among all processes of the job.
        local_rank, local_size: among those of this host, as its launcher counts them.
        node_rank, num_nodes: which host, of how many.
        launcher: ``torchrun``, ``horovodrun``, ``mpiexec``, ``srun``, ``bare`` (variables or arguments), ``none``.

    Raises:
        RendezvousError: numbers that contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = UNKNOWN
    local_size: int = UNKNOWN
    node_rank: int = UNKNOWN
    num_nodes: int = UNKNOWN
    launcher: str = "none"

    def __post_init__(self) -> None:
        pairs = (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "num_nodes"))
        for index, count in pairs:
            i, n = getattr(self, index), getattr(self, count)
            if i == UNKNOWN or n == UNKNOWN:
                continue
            if not 0 <= i < n:
                raise RendezvousError(f"{index}={i} is not in the range 0 to {count}-1 = {n - 1} ({self.launcher})")
        if self.local_size > self.size or self.num_nodes > self.size:
            raise RendezvousError(
                f"local_size={self.local_size} and num_nodes={self.num_nodes} cannot exceed "
                f"size={self.size} ({self.launcher})"
            )

    @classmethod
    def from_environment(cls, environ: Environ | None = None) -> World:
        """Read ``environ`` (default: ``os.environ``); places that it does not tell are :data:`UNKNOWN`.

        Raises:
            RendezvousError: a launcher's variables are incomplete or contradict each other.
            ConfigurationError: one of them is not a number.

        >>> World.from_environment({"RANK": "1", "WORLD_SIZE": "2"}).launcher
        'bare'
        >>> World.from_environment({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
        1
        >>> World.from_environment({"WORLD_SIZE": "2"})
        Traceback (most recent call last):
        hvdbridge.errors.RendezvousError: WORLD_SIZE is set but RANK is not: set both, or neither
        """
        env = os.environ if environ is None else environ
        started = next((world for read in _LAUNCHERS if (world := read(env)) is not None), None)
        if started is not None and started.launcher in ("torchrun", "horovodrun"):
            return started
        if started is None:
            return _bare(env) or cls(0, 1, 0, 1, 0, 1)
        # A job that is larger than what the launcher started was spread by something inside it (mp.spawn
        # under `srun --ntasks-per-node=1`). Equal or smaller numbers are a shell's leftovers.
        if int(env.get("WORLD_SIZE", "0") or 0) > started.size and "RANK" in env:
            return _bare(env) or started
        return started

    def completed(self, hosts: Sequence[str]) -> World:
        """Fill what is :data:`UNKNOWN` from the name of every rank's host, in rank order.

        >>> World(2, 3).completed(["a", "b", "b"])
        World(rank=2, size=3, local_rank=1, local_size=2, node_rank=1, num_nodes=2, launcher='none')
        """
        mine = hosts[self.rank]
        distinct = list(dict.fromkeys(hosts))
        found: dict[str, int] = {
            "local_rank": list(hosts[: self.rank]).count(mine),
            "local_size": list(hosts).count(mine),
            "node_rank": distinct.index(mine),
            "num_nodes": len(distinct),
        }
        told = asdict(self)
        for pair in (("local_rank", "local_size"), ("node_rank", "num_nodes")):
            if UNKNOWN in (told[pair[0]], told[pair[1]]):
                told |= {name: found[name] for name in pair}
        return World(**told)


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


def _torchrun(env: Environ) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    names = {
        "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE",
    }  # fmt: skip
    return _place(env, "torchrun", ("RANK", "WORLD_SIZE"), names)


def _horovodrun(env: Environ) -> World | None:
    """CROSS_RANK is no node number: it counts only the hosts that have this local rank."""
    names = {"local_rank": "HOROVOD_LOCAL_RANK", "local_size": "HOROVOD_LOCAL_SIZE"}
    return _place(env, "horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE"), names)


def _open_mpi(env: Environ) -> World | None:
    names = {"local_rank": "OMPI_COMM_WORLD_LOCAL_RANK", "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE"}
    return _place(env, "mpiexec", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), names)


def _pmi(env: Environ) -> World | None:
    """MPICH, Intel MPI, MVAPICH and Cray; `srun --mpi=pmi2` sets the same variables."""
    names = {"local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
    if "MPI_LOCALRANKID" not in env:
        names = {"local_rank": "PMI_LOCAL_RANK", "local_size": "PMI_LOCAL_SIZE"}
    world = _place(env, "mpiexec", ("PMI_RANK", "PMI_SIZE"), names)
    # Hydra's proxies may be tasks of a step of srun, with as many ranks as there are proxies.
    step = _slurm(env) if world and "MPI_LOCALRANKID" not in env else None
    return step if step and world and (step.rank, step.size) == (world.rank, world.size) else world


def _slurm(env: Environ) -> World | None:
    """A step that srun started. A batch shell has SLURM_PROCID too, but no numbered step with tasks of its own."""
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= 0xFFFFFFF0 or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    world = _place(
        env, "srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
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


def _is_task() -> bool:
    """Whether Slurm started this process, or what started it, rather than a shell in one of its terminals: tasks that
    srun starts from such a shell inherit its variables, and have no terminal.
    """
    try:
        parent, in_terminal = os.getppid(), _stat("self")[4] != "0"
        if _name(parent) == "slurmstepd":
            return True
        while parent > 1 and _name(parent) != "slurmstepd":
            parent = int(_stat(str(parent))[1])
        return parent > 1 and not in_terminal
    except OSError:
        return True


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _stat(pid: str) -> list[str]:
    """State, parent, group, session, terminal, and so on: proc(5), behind the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _bare(env: Environ) -> World | None:
    names = {"local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
    if not (env.get("LOCAL_RANK") and env.get("LOCAL_WORLD_SIZE")):
        names = {"local_rank": "LOCAL_RANK"}
    return _place(env, "bare", ("RANK", "WORLD_SIZE"), names)


_LAUNCHERS: tuple[Callable[[Environ], World | None], ...] = (_torchrun, _horovodrun, _open_mpi, _pmi, _slurm)
"""Innermost first."""


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of the number of tasks on each host.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def first_host(nodelist: str) -> str:
    """The first name in Slurm's short form of a list of hosts.

    >>> first_host("gpu[03-05,9],cpu1"), first_host("login"), first_host("r[1-2]n[07,9]-ib")
    ('gpu03', 'login', 'r1n07-ib')
    """
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head.group() if head else nodelist)


def usable_cores() -> list[int]:
    """The cores on which this process may run: containers, Slurm and taskset leave it a part of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
