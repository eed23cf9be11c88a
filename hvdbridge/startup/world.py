"""Rank, size and place of a process among all of its job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hvdbridge.errors import RendezvousError

UNKNOWN = -1
"""A number that the launcher does not give, until :meth:`World.completed` fills it from an exchange."""


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
