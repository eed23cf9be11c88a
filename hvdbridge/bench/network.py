"""A network as two numbers per kind of collective (alpha-beta model), and how long collectives take on it."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hvdbridge.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.communicators.base import Communicator
from hvdbridge.errors import ConfigurationError

SMALL, LARGE = 256, 1 << 23
"""Elements of a probe, float32: one that is all latency, and the most that is sent to find the bandwidth."""
KINDS = ("AllReduce", "AllGather", "AllToAll", "ReduceScatter", "Broadcast")
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
        local: the same inside a node; None: no faster there.
        local_size: ranks per node that shared the network when it was measured.
        cores: of the machine, for each of its ranks then; None: nobody looked.
    """

    lines: dict[str, Line]
    local: dict[str, Line] | None = None
    local_size: int = 1
    cores: float | None = None

    @classmethod
    def given(cls, latency: float, bandwidth: float, local: tuple[float, float] | None = None) -> Network:
        """One line for all kinds: seconds and bytes per second.

        Raises:
            ConfigurationError: negative latency, or a bandwidth that is not positive.
        """
        for seconds, rate in [(latency, bandwidth), *([local] if local else [])]:
            if not (seconds >= 0 and rate > 0 and math.isfinite(seconds)):
                raise ConfigurationError(f"latency={seconds} s must not be negative, bandwidth={rate} B/s positive")
        return cls({"": Line(latency, bandwidth)}, {"": Line(*local)} if local else None)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends at best."""
        return max(line.bandwidth for line in self.lines.values())

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

        Ranks of one node share its network: where every rank talks to every other, each has its part of it. Lines that
        were measured with several ranks per node have that in them.

        >>> net = Network.given(latency=1e-3, bandwidth=1e9)
        >>> net.seconds(Load("AllReduce", "world", sent=1e9, size=2))
        1.002
        """
        return sum(self._terms(load, local_size))

    def cpu_seconds(self, load: Load, local_size: int = 1) -> float:
        """For how much of :meth:`seconds` a core is busy."""
        line, (waiting, sending) = self._line(load), self._terms(load, local_size)
        return waiting * line.latency_cpu + sending * line.cpu

    def _terms(self, load: Load, local_size: int) -> tuple[float, float]:
        """Both terms of the line, in seconds."""
        kind, group, sent, size = load
        if size < 2:
            return 0.0, 0.0
        inside, line = group == "node" and self.local is not None, self._line(load)
        share = 1.0 if inside or group == "cross" else max(1.0, local_size / self.local_size)
        levels = math.ceil(math.log2(size))
        once = sent * size / (size - 1)  # the bytes of which (N-1)/N are sent in each direction
        options: Sequence[tuple[float, float]] = {  # (rounds, bytes)
            "AllReduce": [(2 * (size - 1), sent), (2 * levels, once)],
            "AllToAll": [(size - 1, sent * share)],
            "ReduceScatter": [(size - 1, sent)],
            "AllGather": [(size - 1, sent), (levels, sent * share)],
            "Broadcast": [(levels, levels * once)],
        }[kind]
        return min(((rounds * line.latency, amount / line.bandwidth) for rounds, amount in options), key=sum)

    def _line(self, load: Load) -> Line:
        lines = self.local if load.group == "node" and self.local is not None else self.lines
        return lines[load.kind if load.kind in lines else ""]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Network:
        """The inverse of :meth:`to_dict`.

        >>> net = Network.given(1e-5, 1e9)
        >>> Network.from_dict(net.to_dict()) == net
        True
        """
        lines, local = saved["lines"], saved.get("local")
        return cls(
            {kind: Line(**line) for kind, line in lines.items()},
            None if local is None else {kind: Line(**line) for kind, line in local.items()},
            saved.get("local_size", 1),
            saved.get("cores"),
        )


def probe(communicator: Communicator, device: torch.device, repeats: int = 5, kinds: Iterable[str] = KINDS) -> Network:
    """Measure a communicator's network: each kind, small and large, medians. Collective.

    The large one grows until it takes ENOUGH. A job of one rank has no network; its lines are those of memory.
    """
    size = communicator.size
    make: dict[str, Callable[[int], Collective]] = {
        "AllReduce": lambda n: AllReduce(torch.ones(n, device=device)),
        "AllGather": lambda n: AllGather(torch.ones(max(1, n // size), device=device)),
        "AllToAll": lambda n: AllToAll(torch.ones(size, max(1, n // size), device=device)),
        "ReduceScatter": lambda n: ReduceScatter(torch.ones(size, max(1, n // size), device=device)),
        "Broadcast": lambda n: Broadcast(torch.ones(n, device=device)),
    }
    lines, unit = {}, Network.given(0.0, 1.0)
    for kind in sorted(kinds):
        small, small_busy = _median(communicator, make[kind](SMALL), device, 4 * repeats)  # brief, so easily disturbed
        elements, large, busy = SMALL, small, small_busy
        while elements < LARGE and large < small + ENOUGH:
            elements *= 8
            large, busy = _median(communicator, make[kind](elements), device, repeats)
        rounds = _rounds(kind, size)
        loads = [Load.of(make[kind](n), size) for n in (SMALL, elements)]
        sent = unit.seconds(loads[1]) - unit.seconds(loads[0])  # as the prediction counts them
        longer = max(large - small, 1e-9)
        shares = (max(0.0, busy - small_busy) / longer, small_busy / small)
        lines[kind] = Line(small / rounds, max(sent, 1) / longer, *(min(1.0, share) for share in shares))
    return Network(lines, local_size=ranks_per_node(communicator), cores=cores_per_rank(communicator, device))


def ranks_per_node(communicator: Communicator) -> int:
    """Of the node that has most."""
    return max(map(communicator.nodes.count, communicator.nodes), default=1)


def cores_per_rank(communicator: Communicator, device: torch.device) -> float:
    """Cores that this process may use, for each of the ranks that may use the same; the fewest of any rank. Collective.

    Containers and network namespaces of one kernel are one machine, whatever they call themselves. Ranks whose cores
    overlap in part are taken to share none.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
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


def _rounds(kind: str, size: int) -> int:
    levels = max(1, math.ceil(math.log2(size)))
    return {"AllReduce": 2 * levels, "AllGather": levels, "Broadcast": levels}.get(kind, max(1, size - 1))
