"""A network as two numbers per kind of collective (alpha-beta model), and how long collectives take on it."""

from __future__ import annotations

import hashlib
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import ConfigurationError
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.startup.world import usable_cores
from hvdbridge.tools.bench.checks import read

SMALL, LARGE = 256, 1 << 23
"""Elements of a probe, float32: one that is all latency, and the most that is sent to find the bandwidth."""
COLLECTIVES: dict[str, Callable[..., Collective]] = {
    kind.__name__: kind for kind in (AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast)
}
ENOUGH = 0.05
"""Seconds that a probe should take beyond its latency."""


@dataclass(frozen=True)
class Line:
    """``seconds = rounds * latency + bytes_sent / bandwidth``; latency in seconds, bandwidth in bytes per second.

    ``latency_cpu`` and ``cpu`` are the parts of both terms in which sending keeps one of the rank's cores busy.
    """

    latency: float
    bandwidth: float
    cpu: float = 0.0
    latency_cpu: float = 0.0


class Load(NamedTuple):
    """What a collective asks of the network: bytes that one rank sends, among ``size`` ranks of its group."""

    kind: str
    group: str
    sent: float
    size: int

    @classmethod
    def of(cls, request: Collective, size: int) -> Load:
        """The load of a request."""
        return cls(request.kind, request.group, request.bytes_sent(size), size)


@dataclass(frozen=True)
class Network:
    """What connects the ranks, as seen by collectives.

    Attributes:
        lines: kind of collective -> its line; the kind "" stands for those that are not listed.
        local: the same inside a node, for its group and for a job that is on one node; None: no faster there.
        cross: the same among ranks of one number on all nodes, all numbers at once; None: as ``lines``, for one number.
        local_size: ranks per node that shared the network when it was measured.
        cores: of the machine, for each of its ranks then; None: nobody looked.
    """

    lines: dict[str, Line]
    local: dict[str, Line] | None = None
    cross: dict[str, Line] | None = None
    local_size: int = 1
    cores: float | None = None

    @classmethod
    def given(cls, latency: float, bandwidth: float, local: tuple[float, float] | None = None) -> Network:
        """One line for all kinds: seconds and bytes per second; ``local``: another one inside nodes."""
        return cls({"": Line(latency, bandwidth)}, {"": Line(*local)} if local else None)

    def bandwidth(self, group: str = "world") -> float:
        """Bytes per second that a rank sends at best in a group."""
        lines = {"node": self.local, "cross": self.cross}.get(group) or self.lines
        return max(line.bandwidth for line in lines.values())

    def seconds(self, load: Load, local_size: int = 1) -> float:
        """How long a collective takes where ``local_size`` ranks are on a node.

        Rounds and bytes are those of the algorithm that is the faster one here:

        ==============  ==========================  =======================================
        AllReduce       ring (Patarasu 2009)        2 (N-1) rounds, 2 (N-1)/N of the bytes
        ..              tree (Sanders 2009)         2 log2 N rounds, twice the bytes
        AllToAll        pairwise                    N-1 rounds, (N-1)/N of the bytes
        ReduceScatter   ring                        N-1 rounds, (N-1)/N of the bytes
        AllGather       ring; Bruck (1997)          N-1 or log2 N rounds, N-1 times the bytes
        Broadcast       binomial tree               log2 N rounds, the bytes once per round
        ==============  ==========================  =======================================

        Ranks of one node share its network: where every rank talks to every other, and where all talk to those of their
        own number (the group "cross"), each has its part of it. Of a ring only one rank of a node sends to another one.
        Lines that were measured with several ranks per node have that in them.

        >>> net = Network.given(latency=1e-3, bandwidth=1e9)
        >>> net.seconds(Load("AllReduce", "world", sent=1e9, size=2))
        1.002
        """
        return sum(self._terms(load, local_size))

    def cpu_seconds(self, load: Load, local_size: int = 1) -> float:
        """For how much of :meth:`seconds` a core is busy."""
        line, (waiting, sending) = self._line(load, local_size), self._terms(load, local_size)
        return waiting * line.latency_cpu + sending * line.cpu

    def _terms(self, load: Load, local_size: int) -> tuple[float, float]:
        """Both terms of the line, in seconds."""
        kind, group, sent, size = load
        if size < 2:
            return 0.0, 0.0
        line = self._line(load, local_size)
        sharing = 1 if group == "cross" and self.cross is None else self.local_size  # when the line was measured
        crowded = sent * (1.0 if _inside(load, local_size) else max(1.0, local_size / sharing))
        sent = crowded if group == "cross" else sent
        levels = math.ceil(math.log2(size))
        once = sent * size / (size - 1)  # the bytes of which (N-1)/N are sent in each direction
        options: Sequence[tuple[float, float]] = {  # (rounds, bytes)
            "AllReduce": [(2 * (size - 1), sent), (2 * levels, once)],
            "AllToAll": [(size - 1, crowded)],
            "ReduceScatter": [(size - 1, sent)],
            "AllGather": [(size - 1, sent), (levels, crowded)],
            "Broadcast": [(levels, levels * once)],
        }[kind]
        return min(((rounds * line.latency, amount / line.bandwidth) for rounds, amount in options), key=sum)

    def _line(self, load: Load, local_size: int) -> Line:
        lines = self.lines
        if load.group == "cross":
            lines = self.cross or lines
        elif _inside(load, local_size):
            lines = self.local or lines
        return lines[load.kind if load.kind in lines else ""]

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Network:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            ConfigurationError: a figure is missing or cannot be, or a kind of collective has no line.

        >>> net = Network.given(1e-5, 1e9)
        >>> Network.from_dict({"lines": {"": vars(net.lines[""])}}) == net
        True
        """
        known = {name: value for name, value in saved.items() if value is not None}
        for group in {"lines", "local", "cross"} & set(known):
            known[group] = {
                kind: read(Line, line, f"network.{group}.{kind}") for kind, line in known[group].items()
            }
            if "" not in known[group] and (missing := set(COLLECTIVES) - set(known[group])):
                raise ConfigurationError(f"network.{group} is of no {', '.join(sorted(missing))}")
        return read(cls, known, "network")


def probe(communicator: Communicator, device: torch.device) -> Network:
    """Measure a communicator's network: each kind in each group, small and large, medians. Collective.

    A job of one rank has no network; its lines are those of memory. Groups are measured where there are several nodes,
    with equal numbers of several ranks.
    """
    local_size, size = ranks_per_node(communicator), communicator.size
    groups = {"world": size}
    if local_size > 1 and size == local_size * len(set(communicator.nodes)) > local_size:
        groups |= {"node": local_size, "cross": size // local_size}
    lines = {
        group: {kind: _line(communicator, group, members, kind, device) for kind in COLLECTIVES}
        for group, members in groups.items()
    }
    return Network(
        lines["world"], lines.get("node"), lines.get("cross"), local_size, cores_per_rank(communicator, device)
    )


def _line(communicator: Communicator, group: str, size: int, kind: str, device: torch.device) -> Line:
    """Latency of one kind of collective by a small one, bandwidth by one that grows until it takes ENOUGH."""

    def request(elements: int) -> Collective:
        part = max(1, elements // size)
        shapes = {"AllGather": (part,), "AllToAll": (size, part), "ReduceScatter": (size, part)}
        return COLLECTIVES[kind](torch.ones(shapes.get(kind, (elements,)), device=device), group=group)

    small, small_busy = _median(communicator, request(SMALL), device, 20)  # brief, so easily disturbed
    elements, large, busy = SMALL, small, small_busy
    while elements < LARGE and large < small + ENOUGH:
        elements *= 8
        large, busy = _median(communicator, request(elements), device, 5)
    few, many = (Load.of(request(n), size) for n in (SMALL, elements))
    by_bytes, by_rounds = Network.given(0.0, 1.0), Network.given(1.0, math.inf)
    sent = by_bytes.seconds(many) - by_bytes.seconds(few)  # as the prediction counts them
    rounds = max(1.0, by_rounds.seconds(few))
    longer = max(large - small, 1e-9)
    shares = (max(0.0, busy - small_busy) / longer, small_busy / small)
    return Line(small / rounds, max(sent, 1) / longer, *(min(1.0, share) for share in shares))


def ranks_per_node(communicator: Communicator) -> int:
    """Of the node that has most."""
    return max(map(communicator.nodes.count, communicator.nodes), default=1)


def cores_per_rank(communicator: Communicator, device: torch.device) -> float:
    """Cores that this process may use, for each of the ranks that may use the same; the fewest of any rank. Collective.

    Containers and network namespaces of one kernel are one machine, whatever they call themselves. Ranks whose cores
    overlap in part are taken to share none.
    """
    usable = usable_cores()
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = socket.gethostname()
    digest = hashlib.blake2b(f"{kernel}{usable}".encode(), digest_size=7).digest()
    mine = int.from_bytes(digest, "little")
    everybody = communicator.execute(AllGather(torch.tensor([mine], device=device)))
    share = torch.tensor([len(usable) / int((everybody == mine).sum())], device=device)
    return float(communicator.execute(AllReduce(share, "min")))


def _median(communicator: Communicator, request: Collective, device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of the rank with most: the same on all, so that all go on alike."""

    def slowest(*seconds: float) -> list[float]:
        return communicator.execute(AllReduce(torch.tensor(seconds, device=device), "max")).tolist()

    times = []
    for _ in range(repeats):
        slowest(0.0)  # all are here
        started = (time.perf_counter(), time.process_time())
        if communicator.execute(request).is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    wall, busy = slowest(*(statistics.median(each) for each in zip(*times, strict=True)))
    return wall, busy


def _inside(load: Load, local_size: int) -> bool:
    """Whether all of it stays on a node."""
    return load.group == "node" or (load.group != "cross" and load.size <= local_size)

