"""A network as an alpha-beta model per kind of collective: its measurement, and the predicted time of collectives."""

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

MIN_ELEMENTS, MAX_ELEMENTS = 256, 1 << 23
"""Elements, float32, of the probe that measures latency, and of the largest one that measures bandwidth."""
COLLECTIVES: dict[str, Callable[..., Collective]] = {
    kind.__name__: kind for kind in (AllReduce, AllGather, AllToAll, ReduceScatter, Broadcast)
}
MIN_TRANSFER_SECONDS = 0.05
"""Seconds beyond the latency after which a bandwidth probe is large enough."""


@dataclass(frozen=True)
class AlphaBeta:
    """The model ``seconds = rounds * latency + bytes_sent / bandwidth``; latency in seconds, bandwidth in bytes/s.

    ``latency_cpu`` and ``cpu`` are the fractions of the two terms in which one core of the rank is busy.
    """

    latency: float
    bandwidth: float
    cpu: float = 0.0
    latency_cpu: float = 0.0


class Load(NamedTuple):
    """A collective's load on the network: its kind, its group of ``size`` ranks, and the bytes that each rank sends."""

    kind: str
    group: str
    sent: float
    size: int

    @classmethod
    def of(cls, request: Collective, size: int) -> Load:
        """Return the load of a request among ``size`` ranks."""
        return cls(request.kind, request.group, request.bytes_sent(size), size)


@dataclass(frozen=True)
class Network:
    """The network between the ranks, by the times of collectives.

    Attributes:
        lines: kind of collective -> its alpha-beta model; the kind "" stands for kinds that are not listed.
        local: the same within a node, for the group "node" and for jobs on one node; None: as ``lines``.
        cross: the same for the group "cross", measured with all such groups at once; None: as ``lines``, for one group.
        local_size: ranks per node that shared the network during the measurement.
        cores: cores per rank of the machine during the measurement; None: not measured.
    """

    lines: dict[str, AlphaBeta]
    local: dict[str, AlphaBeta] | None = None
    cross: dict[str, AlphaBeta] | None = None
    local_size: int = 1
    cores: float | None = None

    @classmethod
    def given(cls, latency: float, bandwidth: float, local: tuple[float, float] | None = None) -> Network:
        """Make a network with one latency (s) and bandwidth (bytes/s) for all kinds; ``local``: both within nodes."""
        return cls({"": AlphaBeta(latency, bandwidth)}, {"": AlphaBeta(*local)} if local else None)

    def bandwidth(self, group: str = "world") -> float:
        """Return the bytes per second that a rank sends in a group, for the fastest kind of collective."""
        lines = {"node": self.local, "cross": self.cross}.get(group) or self.lines
        return max(model.bandwidth for model in lines.values())

    def seconds(self, load: Load, local_size: int = 1) -> float:
        """Return the seconds of a collective, with ``local_size`` ranks per node.

        Rounds and bytes are those of the faster algorithm:

        ==============  ==========================  =======================================
        AllReduce       ring (Patarasu 2009)        2 (N-1) rounds, 2 (N-1)/N of the bytes
        ..              tree (Sanders 2009)         2 log2 N rounds, twice the bytes
        AllToAll        pairwise                    N-1 rounds, (N-1)/N of the bytes
        ReduceScatter   ring                        N-1 rounds, (N-1)/N of the bytes
        AllGather       ring; Bruck (1997)          N-1 or log2 N rounds, N-1 times the bytes
        Broadcast       binomial tree               log2 N rounds, the bytes once per round
        ==============  ==========================  =======================================

        The ranks of a node share its network in collectives with traffic between all pairs, and in the group "cross".
        In a ring, only one rank per node sends to another node. A measurement with several ranks per node includes
        such sharing, so its bandwidth is corrected only by the ratio of ranks per node.

        >>> net = Network.given(latency=1e-3, bandwidth=1e9)
        >>> net.seconds(Load("AllReduce", "world", sent=1e9, size=2))
        1.002
        """
        return sum(self._term_seconds(load, local_size))

    def cpu_seconds(self, load: Load, local_size: int = 1) -> float:
        """Return the part of :meth:`seconds` in which a core of the rank is busy."""
        model, (latency, transfer) = self._model_of(load, local_size), self._term_seconds(load, local_size)
        return latency * model.latency_cpu + transfer * model.cpu

    def _term_seconds(self, load: Load, local_size: int) -> tuple[float, float]:
        """Return both terms of the alpha-beta model, in seconds."""
        kind, group, sent, size = load
        if size < 2:
            return 0.0, 0.0
        model = self._model_of(load, local_size)
        sharers = 1 if group == "cross" and self.cross is None else self.local_size  # ranks per node when measured
        shared_sent = sent * (1.0 if _within_node(load, local_size) else max(1.0, local_size / sharers))
        sent = shared_sent if group == "cross" else sent
        tree_rounds = math.ceil(math.log2(size))
        tensor_bytes = sent * size / (size - 1)  # the size of the tensor, of which a rank sends (N-1)/N
        algorithms: Sequence[tuple[float, float]] = {  # (rounds, bytes)
            "AllReduce": [(2 * (size - 1), sent), (2 * tree_rounds, tensor_bytes)],
            "AllToAll": [(size - 1, shared_sent)],
            "ReduceScatter": [(size - 1, sent)],
            "AllGather": [(size - 1, sent), (tree_rounds, shared_sent)],
            "Broadcast": [(tree_rounds, tree_rounds * tensor_bytes)],
        }[kind]
        return min(((rounds * model.latency, nbytes / model.bandwidth) for rounds, nbytes in algorithms), key=sum)

    def _model_of(self, load: Load, local_size: int) -> AlphaBeta:
        lines = self.lines
        if load.group == "cross":
            lines = self.cross or lines
        elif _within_node(load, local_size):
            lines = self.local or lines
        return lines[load.kind if load.kind in lines else ""]

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Network:
        """Make a network from the dict that ``dataclasses.asdict`` made of one.

        Raises:
            ConfigurationError: a value is missing or out of range, or a kind of collective is missing.

        >>> net = Network.given(1e-5, 1e9)
        >>> Network.from_dict({"lines": {"": vars(net.lines[""])}}) == net
        True
        """
        values = {name: value for name, value in saved.items() if value is not None}
        for group in {"lines", "local", "cross"} & set(values):
            values[group] = {
                kind: read(AlphaBeta, model, f"network.{group}.{kind}") for kind, model in values[group].items()
            }
            if "" not in values[group] and (missing := set(COLLECTIVES) - set(values[group])):
                raise ConfigurationError(f"network.{group} is of no {', '.join(sorted(missing))}")
        return read(cls, values, "network")


def probe(communicator: Communicator, device: torch.device) -> Network:
    """Measure each kind of collective in each group, with small and large tensors; medians. Collective.

    With one rank the times are those of memory. The groups "node" and "cross" are measured if there are several nodes,
    all with the same number of ranks, more than one.
    """
    local_size, size = ranks_per_node(communicator), communicator.size
    groups = {"world": size}
    if local_size > 1 and size == local_size * len(set(communicator.nodes)) > local_size:
        groups |= {"node": local_size, "cross": size // local_size}
    lines = {
        group: {kind: _measure_kind(communicator, group, members, kind, device) for kind in COLLECTIVES}
        for group, members in groups.items()
    }
    return Network(
        lines["world"], lines.get("node"), lines.get("cross"), local_size, cores_per_rank(communicator, device)
    )


def _measure_kind(communicator: Communicator, group: str, size: int, kind: str, device: torch.device) -> AlphaBeta:
    """Measure latency with a small tensor, bandwidth with one that grows until it takes MIN_TRANSFER_SECONDS."""

    def request(elements: int) -> Collective:
        part = max(1, elements // size)
        shapes = {"AllGather": (part,), "AllToAll": (size, part), "ReduceScatter": (size, part)}
        return COLLECTIVES[kind](torch.ones(shapes.get(kind, (elements,)), device=device), group=group)

    small, small_busy = _median(communicator, request(MIN_ELEMENTS), device, 20)  # more repeats, as it is noisy
    elements, large, busy = MIN_ELEMENTS, small, small_busy
    while elements < MAX_ELEMENTS and large < small + MIN_TRANSFER_SECONDS:
        elements *= 8
        large, busy = _median(communicator, request(elements), device, 5)
    small_load, large_load = (Load.of(request(n), size) for n in (MIN_ELEMENTS, elements))
    by_bytes, by_rounds = Network.given(0.0, 1.0), Network.given(1.0, math.inf)
    sent = by_bytes.seconds(large_load) - by_bytes.seconds(small_load)  # counted as in predictions
    rounds = max(1.0, by_rounds.seconds(small_load))
    extra_seconds = max(large - small, 1e-9)
    shares = (max(0.0, busy - small_busy) / extra_seconds, small_busy / small)
    return AlphaBeta(small / rounds, max(sent, 1) / extra_seconds, *(min(1.0, share) for share in shares))


def ranks_per_node(communicator: Communicator) -> int:
    """Return the largest number of ranks on a node."""
    return max(map(communicator.nodes.count, communicator.nodes), default=1)


def cores_per_rank(communicator: Communicator, device: torch.device) -> float:
    """Return the cores that a rank may use, divided by the ranks that may use the same cores; minimum over ranks.

    Collective. Containers and network namespaces are one machine if they run on one kernel, whatever their host names.
    Ranks whose sets of cores overlap partially are assumed to share none.
    """
    usable = usable_cores()
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = socket.gethostname()
    digest = hashlib.blake2b(f"{kernel}{usable}".encode(), digest_size=7).digest()
    fingerprint = int.from_bytes(digest, "little")
    fingerprints = communicator.execute(AllGather(torch.tensor([fingerprint], device=device)))
    share = torch.tensor([len(usable) / int((fingerprints == fingerprint).sum())], device=device)
    return float(communicator.execute(AllReduce(share, "min")))


def _median(communicator: Communicator, request: Collective, device: torch.device, repeats: int) -> tuple[float, float]:
    """Return median seconds and CPU seconds, maximum over ranks: equal values make all ranks take the same branches."""

    def max_over_ranks(*seconds: float) -> list[float]:
        return communicator.execute(AllReduce(torch.tensor(seconds, device=device), "max")).tolist()

    times = []
    for _ in range(repeats):
        max_over_ranks(0.0)  # a barrier
        start = (time.perf_counter(), time.process_time())
        if communicator.execute(request).is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    wall, busy = max_over_ranks(*(statistics.median(samples) for samples in zip(*times, strict=True)))
    return wall, busy


def _within_node(load: Load, local_size: int) -> bool:
    """Return whether all ranks of the load's group are on one node."""
    return load.group == "node" or (load.group != "cross" and load.size <= local_size)
