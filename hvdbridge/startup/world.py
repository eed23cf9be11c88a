"""Rank, size and node of a process in its job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hvdbridge.errors import RendezvousError

UNKNOWN = -1
"""Value of a number that the launcher does not set. :meth:`World.completed` fills it in after an exchange."""


@dataclass(frozen=True)
class World:
    """Rank, size and node of this process.

    Attributes:
        rank, size: rank of this process in the job, and number of ranks.
        local_rank, local_size: rank of this process on its host, and number of ranks there, as the launcher counts.
        node_rank, num_nodes: number of the host, and number of hosts.
        launcher: ``torchrun``, ``horovodrun``, ``mpiexec``, ``srun``, ``bare`` (variables or arguments), ``none``.

    Raises:
        RendezvousError: the numbers contradict each other.
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

    def completed(self, hosts: Sequence[str]) -> World:
        """Return a copy without :data:`UNKNOWN` numbers, counted from ``hosts``, the host of every rank in rank order.

        If one number of a pair (rank and count) is unknown, both are counted.

        >>> World(2, 3).completed(["a", "b", "b"])
        World(rank=2, size=3, local_rank=1, local_size=2, node_rank=1, num_nodes=2, launcher='none')
        """
        host = hosts[self.rank]
        distinct = list(dict.fromkeys(hosts))
        counted: dict[str, int] = {
            "local_rank": list(hosts[: self.rank]).count(host),
            "local_size": list(hosts).count(host),
            "node_rank": distinct.index(host),
            "num_nodes": len(distinct),
        }
        numbers = asdict(self)
        for pair in (("local_rank", "local_size"), ("node_rank", "num_nodes")):
            if UNKNOWN in (numbers[pair[0]], numbers[pair[1]]):
                numbers |= {name: counted[name] for name in pair}
        return World(**numbers)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each host, from Slurm's compact notation.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    matches = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in matches for _ in range(int(times or 1))]


def first_host(nodelist: str) -> str:
    """Return the first name of a list of hosts in Slurm's compact notation.

    >>> first_host("gpu[03-05,9],cpu1"), first_host("login"), first_host("r[1-2]n[07,9]-ib")
    ('gpu03', 'login', 'r1n07-ib')
    """
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head.group() if head else nodelist)


def usable_cores() -> list[int]:
    """Return the CPU cores on which this process may run, which containers, Slurm and taskset limit."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
