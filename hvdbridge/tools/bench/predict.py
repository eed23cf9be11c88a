"""A step's time, predicted: what a policy asks for and computes, on a network, beside a backward.

Rules:

1. What a policy asks for comes from a dry run at that number of ranks, what it computes from a dry run with real
   tensors at a few: what grows with the ranks grows linearly (a sparse all-gather is decoded rank by rank), so a
   line is enough.
2. Buckets become ready while backward runs, in proportion to their elements. One network carries one collective at
   a time; the policy's arithmetic has a core of its own, or shares that of backward, and so does what sending takes
   of a core. Where ranks outnumber cores, all that was measured while they computed alike has their turns in it;
   sending was measured while nobody did.
3. Nothing ends before the cores have done all there is to do, whoever waits for whom meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policy.base import Policy
from hvdbridge.policy.bucket import DDP_MB, cut_layouts
from hvdbridge.policy.collectives import AllGather, AllReduce, Broadcast
from hvdbridge.policy.dry_run import Asked, Ended, dry_run
from hvdbridge.tools.bench.computing import SETTLED, Arithmetic, Shapes, kinds, received
from hvdbridge.tools.bench.transport import Load, Network

MOST = 256
"""Beyond so many ranks requests are extrapolated: a dry run has a row for each rank."""


Leg = tuple[str, float, float]  # where, seconds, and seconds in which it keeps a core busy elsewhere


@dataclass
class Bucket:
    """One bucket's way: seconds of computing and what is sent then, ..., and a last computation.

    Attributes:
        within: how many of ``legs`` the update waits for; the others go on behind the step, and its end does.
    """

    numel: int = 0
    legs: list[tuple[float, Load]] = field(default_factory=list)
    tail: float = 0.0
    within: int = 0


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of one step of one rank; the fields are those of :class:`~hvdbridge.tools.bench.measure.Row`.

    Attributes:
        working: seconds that the cores need for all that is computed and sent.
    """

    policy: str
    ranks: int
    step: float
    compute: float
    compression: float
    communication: float
    bytes_sent: float
    cpu: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class Planner:
    """A job: parameters, computation, network.

    Attributes:
        forward, backward, optimizer: seconds without synchronization; the last comes when all has arrived.
        cores: cores per rank; with less than two, a policy computes in the time of backward.
        one_device: the policy computes where backward does, as on CUDA.
        compute_cpu: seconds of one core in forward, backward and the optimizer.
        overhead: seconds of one core that synchronization takes beyond arithmetic, sending and copies: hooks, Python;
            negative where those were overrated.
        pack, unpack: seconds per element, in backward's thread, to bring gradients into buckets and back.
    """

    params: Shapes
    forward: float
    backward: float
    network: Network
    bucket_mb: float = DDP_MB
    local_size: int = 1
    cores: float = 2.0
    pack: float = 0.0
    unpack: float = 0.0
    optimizer: float = 0.0
    compute_cpu: float = 0.0
    overhead: float = 0.0
    one_device: bool = False

    def scaled(self, factor: float) -> Planner:
        """On a machine that takes ``factor`` times as long."""
        mine = ("forward", "backward", "optimizer", "pack", "unpack", "compute_cpu")
        return replace(self, **{name: factor * getattr(self, name) for name in mine})

    def predict(self, spec: str, policy: Policy, ranks: int, arithmetic: Arithmetic) -> Prediction:
        """One step among ``ranks`` ranks, after any warm-up; what is done only in some steps is spread over all."""
        steps, due = kinds(policy)
        found = self._one(spec, policy, ranks, arithmetic, steps.get(False, SETTLED))
        if 0 < due < 1:
            extra = self._one(spec, policy, ranks, arithmetic, steps[True])
            mixed = {
                name: (1 - due) * getattr(found, name) + due * getattr(extra, name)
                for name in ("step", "compression", "communication", "bytes_sent", "cpu", "working")
            }
            found = replace(found, **mixed)
        return found

    def _one(self, spec: str, policy: Policy, ranks: int, arithmetic: Arithmetic, step: int) -> Prediction:
        local_size = min(self.local_size, ranks)
        buckets = self._buckets(policy, ranks, arithmetic, step)
        legs = [leg for bucket in buckets for leg in bucket.legs]
        sent = sum(load.sent for _, load in legs)
        compression = sum(bucket.tail for bucket in buckets) + sum(seconds for seconds, _ in legs)
        carried = sum(self.network.seconds(load, local_size) for _, load in legs)
        sending = sum(self.network.cpu_seconds(load, local_size) for _, load in legs)
        copies = (self.pack + self.unpack) * sum(bucket.numel for bucket in buckets)
        synchronizing = (compression + copies) * min(1.0, self.cores) + sending + self.overhead
        cpu = self.compute_cpu + max(0.0, synchronizing)
        compute, working = self.forward + self.backward + self.optimizer, cpu / self.cores
        step_end, behind = self._simulate(buckets, local_size)
        seconds = max(step_end + self.optimizer, behind, working)
        return Prediction(spec, ranks, seconds, compute, compression, carried, sent, cpu, working)

    def _buckets(self, policy: Policy, ranks: int, arithmetic: Arithmetic, step: int) -> list[Bucket]:
        found: dict[int, Bucket] = {}
        events, loads, answers = self._asked(policy, ranks, step)
        seconds = arithmetic.at(ranks, policy.due(step), answers)
        for spent, event, load in zip(seconds, events, loads, strict=True):
            bucket = found.setdefault(event.bucket, Bucket())
            if load is not None:
                bucket.legs.append((spent, load))
                bucket.within += isinstance(event, Asked) and not event.behind
            elif isinstance(event, Ended):
                bucket.numel, bucket.tail = event.numel, spent
        return [found[index] for index in sorted(found)]

    def _asked(
        self, policy: Policy, ranks: int, step: int
    ) -> tuple[Sequence[Asked | Ended], list[Load | None], list[float]]:
        """A dry run, the load of each collective, and what :func:`received` says.

        Beyond MOST ranks what grew with them grows on. Of what they divide, each has a part as large as among MOST
        ranks that divide so much less: parts have a least size, as blocks have, and are rounded up.
        """
        if ranks <= MOST:
            events = self._run(policy, ranks, step)
            loads = [Load.of(event.request, event.size) if isinstance(event, Asked) else None for event in events]
            return events, loads, received(events)
        policy.check_size(ranks, -(-ranks // self.local_size))
        half, events = self._run(policy, MOST // 2, step), self._run(policy, MOST, step)
        scaled = self._run(policy, MOST, step, MOST / ranks)
        if list(map(_operation, half)) != list(map(_operation, events)):
            raise ConfigurationError(f"what it asks for among {ranks} ranks does not follow from {MOST}")
        known, times = received(events), ranks / MOST
        before = received(half)
        further = (ranks - MOST) / (MOST - MOST // 2)
        answers = [many + (many - few) * further for few, many in zip(before, known, strict=True)]
        if list(map(_operation, scaled)) == list(map(_operation, events)):
            parts = received(scaled)
            for i, (event, less, more) in enumerate(zip(events, before[1:], known[1:], strict=False), 1):
                whole = isinstance(event, Asked) and isinstance(event.request, AllReduce | Broadcast)
                if more < 1.5 * less and not whole:
                    answers[i] = times * parts[i]
        loads = []
        for i, (few, many) in enumerate(zip(half, events, strict=True)):
            if not (isinstance(few, Asked) and isinstance(many, Asked)):
                loads.append(None)
                continue
            size = many.size if few.size == many.size else round(many.size * times)
            load, grown = Load.of(many.request, size), answers[i + 1] / max(1.0, known[i + 1])
            if isinstance(many.request, AllGather):  # a rank's part of the answer
                grown *= many.size / size
            loads.append(load._replace(sent=load.sent * grown))
        return events, loads, answers

    def _run(self, policy: Policy, ranks: int, step: int, part: float = 1.0) -> list[Asked | Ended]:
        """A dry run with the same buckets, of parameters of which there is only a ``part``."""
        params = {
            name: (p if isinstance(p, Tensor) else torch.empty(tuple(p), device="meta")).to("meta")
            for name, p in self.params.items()
        }
        names = [layout.names for layout in cut_layouts(params, self.bucket_mb * 2**20)]
        if part < 1:
            params = {name: p.new_empty(max(1, round(part * p.numel()))) for name, p in params.items()}
        local_size = min(self.local_size, ranks)
        return list(dry_run(policy, params, ranks, step, self.bucket_mb, local_size, "meta", names))

    def _simulate(self, buckets: Sequence[Bucket], local_size: int) -> tuple[float, float]:
        """Event by event: whoever is ready first is served first, on the cores and on the network. The end of what the
        optimizer waits for; and how long what goes on behind the step takes, from the end of backward: it starts
        behind the last bucket, and the next step's first waits for it."""
        total = max(1, sum(bucket.numel for bucket in buckets))
        core = "backward" if self.cores < 2 or self.one_device else "policy"
        free = {"backward": self.forward, "policy": 0.0, "network": 0.0}  # from when on
        waiting: list[tuple[float, int, Leg, Callable[[float], None]]] = []
        order = itertools.count()
        behind: list[list[Leg]] = []

        def then(at: float, leg: Leg, go_on: Callable[[float], None]) -> None:
            heapq.heappush(waiting, (at, next(order), leg, go_on))

        def travel(at: float, legs: Sequence[Leg]) -> None:
            if legs:
                then(at, legs[0], lambda end: travel(end, legs[1:]))

        def produce(at: float, rest: Sequence[Bucket]) -> None:
            """Backward goes on to the next bucket's gradients."""
            if rest:
                bucket, seconds = rest[0], (self.backward / total + self.pack) * rest[0].numel
                legs: list[Leg] = []
                for spent, load in bucket.legs:
                    busy = self.network.cpu_seconds(load, local_size) / min(1, self.cores) if self.cores < 2 else 0.0
                    legs += [(core, spent, 0.0), ("network", self.network.seconds(load, local_size), busy)]
                legs.append((core, bucket.tail, 0.0))
                within = len(legs)
                if bucket.within < len(bucket.legs):
                    within = 2 * bucket.within
                    behind.append(legs[within:])
                legs = [*legs[:within], ("backward", self.unpack * bucket.numel, 0.0)]

                def ready(end: float) -> None:
                    travel(end, legs)
                    produce(end, rest[1:])

                then(at, ("backward", seconds, 0.0), ready)

        def run() -> float:
            while waiting:
                at, _, (where, seconds, busy), go_on = heapq.heappop(waiting)
                begin = max(at, free[where])
                free[where] = begin + seconds
                if begin <= free["backward"]:  # whatever the core does then takes so much longer
                    free["backward"] += busy
                go_on(free[where])
            return max(free.values())

        produce(self.forward, buckets)
        end = max(run(), self.forward + self.backward)
        for legs in behind:
            travel(self.forward + self.backward, legs)
        return end, (run() - self.forward - self.backward if behind else 0.0)


def _operation(event: Asked | Ended) -> tuple[str, str, torch.dtype | None]:
    if isinstance(event, Ended):
        return "", "", None
    return event.request.kind, event.request.group, event.request.tensor.dtype
