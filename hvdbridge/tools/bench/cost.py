"""What a step costs: a policy's requests, its computation as measured here, and a network, in closed form.

Rules:

1. A policy's requests come from a dry run at that number of ranks. Beyond :data:`MOST` ranks, what ranks divide has
   parts as large as among MOST ranks that divide so much less; what each rank sends as a whole stays.
2. A policy's computation is measured without other ranks, at the numbers of ranks in :data:`FEW`. Beyond, it grows only
   where what a rank receives grows with the ranks, so that no noise is multiplied.
3. Buckets become ready in the course of backward, in proportion to their elements, and one network carries one bucket
   at a time. So the last answer is there at the largest of ``ready_k + service_k + ... + service_last`` over all
   buckets k (a queue with one server, Lindley 1952).
4. With less than two cores for a rank, what it computes and sends for a bucket delays backward. Nothing ends before the
   cores have done all there is to do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.state_store import BUFFERS, IN_FLIGHT
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.policy.bucket import DDP_MB, cut_layouts
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather, AllToAll, ReduceScatter
from hvdbridge.policy.dry_run import Asked, Ended, dry_run
from hvdbridge.tools.bench.transport import Load, Network

SETTLED = 10_000_000
"""A step after any warm-up."""
FEW = (2, 8, 64)
"""Numbers of ranks at which computation is measured: the first two for which the policy is defined."""
MOST = 256
"""The most ranks of a dry run, which has a row for each."""
MANY, SELDOM = 100, 100_000
"""Steps that are due, after which their share is known; steps among which they are looked for."""
Shapes = Mapping[str, Tensor | Sequence[int]]


def kinds(policy: Policy) -> tuple[dict[bool, int], float]:
    """A settled step that is :meth:`Policy.due` and one that is not, as far as there are any; the former's share.

    What comes more seldom than every SELDOM steps does not come.

    >>> from hvdbridge.policies import from_spec
    >>> round(1 / kinds(from_spec("local_sgd:every=5000"))[1])
    5000
    """
    found: dict[bool, list[int]] = {False: [], True: []}
    for step in range(SETTLED, SETTLED + SELDOM if acts_after_step(policy) else SETTLED + 1):
        found[bool(policy.due(step))].append(step)
        if len(found[True]) > MANY:
            break
    due = found[True]
    periods = len(due) - 1  # from one that is due to another, so that no part of a period is counted
    share = periods / (due[-1] - due[0]) if periods > 0 else float(len(due) > 0 and not found[False])
    return {which: steps[-1] for which, steps in found.items() if steps}, share


def timed(*parts: Callable[[], object], repeats: int = 5) -> list[tuple[float, float]]:
    """Median seconds and CPU seconds of each part; the parts are done in turn, and the first turn does not count."""
    times: list[list[tuple[float, float]]] = [[] for _ in parts]
    for _ in range(repeats + 1):
        for part, own in zip(parts, times, strict=True):
            started, before = time.perf_counter(), time.process_time()
            part()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            own.append((time.perf_counter() - started, time.process_time() - before))
    return [(statistics.median(t for t, _ in own[1:]), statistics.median(t for _, t in own[1:])) for own in times]


def measure_copy(device: torch.device | str) -> float:
    """Seconds per element of a copy of DDP_MB on this machine."""
    source = torch.ones(int(DDP_MB * 2**18), device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source))[0][0] / source.numel()


@dataclass(frozen=True)
class Computation:
    """What a policy computes between its collectives.

    Attributes:
        seconds: (ranks, whether :meth:`Policy.due`) -> seconds of a step.
        received: the same -> bytes of all-gathers' answers.
    """

    seconds: Mapping[tuple[int, bool], float]
    received: Mapping[tuple[int, bool], float]

    def at(self, ranks: int, due: bool, received: float) -> float:
        """Seconds of a step at any number of ranks, where a rank receives so many bytes by all-gathers.

        >>> known = Computation({(2, False): 1.0, (8, False): 4.0}, {(2, False): 20.0, (8, False): 80.0})
        >>> known.at(5, False, 50.0), known.at(20, False, 200.0), known.at(20, False, 80.0)
        (2.5, 10.0, 4.0)
        """
        sizes = sorted(n for n, also in self.seconds if also == due)
        few, many = sizes[0], sizes[-1]
        slope = (self.seconds[many, due] - self.seconds[few, due]) / max(1, many - few)
        if ranks > many and received <= self.received[many, due] * math.sqrt(ranks / many):
            return self.seconds[many, due]
        return max(self.seconds[few, due], self.seconds[few, due] + slope * (max(few, ranks) - few))


def measure_computation(
    policy: Policy,
    params: Shapes,
    bucket_mb: float,
    device: torch.device | str = "cpu",
    local_size: int = 1,
    repeats: int = 3,
) -> Computation:
    """Time a policy's own work on this machine, without other ranks: medians of ``repeats`` steps, after one.

    Raises:
        ConfigurationError: the policy is defined for none of FEW numbers of ranks.
    """
    sizes, refusal = [], None
    for ranks in FEW:
        try:
            policy.check_size(ranks, -(-ranks // local_size))
            sizes.append(ranks)
        except ConfigurationError as error:
            refusal = error
    if not sizes:
        raise ConfigurationError(f"its arithmetic is measured at {FEW} ranks: {refusal}") from refusal
    seconds, received = {}, {}
    for ranks in sizes[:2]:
        for due, step in kinds(policy)[0].items():
            pool, times, gathered = BufferPool(IN_FLIGHT + BUFFERS), [], 0.0
            for _ in range(repeats + 1):
                spent, gathered = 0.0, 0.0
                for event in dry_run(
                    policy, params, ranks, step, bucket_mb, min(local_size, ranks), device, pool=pool
                ):
                    spent += event.seconds
                    if isinstance(event, Asked) and isinstance(event.request, AllGather):
                        gathered += event.request.bytes_sent(event.size)
                times.append(spent)
            seconds[ranks, due], received[ranks, due] = statistics.median(times[1:]), gathered
    return Computation(seconds, received)


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


@dataclass
class _Bucket:
    """A bucket's elements, and its collectives: those that the step waits for, and those that go on behind it."""

    numel: int = 0
    loads: list[Load] = field(default_factory=list)
    behind: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Planner:
    """A job: parameters, computation, network.

    Attributes:
        forward, backward, optimizer: seconds without synchronization.
        copies: seconds in backward's thread that bring gradients into buckets and back.
        cores: cores per rank.
        one_device: the policy computes where backward does, as on CUDA.
        compute_cpu: seconds of one core in forward, backward and the optimizer.
        overhead: seconds of one core that synchronization takes beyond what is measured here; negative where that was
            overrated.
    """

    params: Shapes
    forward: float
    backward: float
    network: Network
    bucket_mb: float = DDP_MB
    local_size: int = 1
    cores: float = 2.0
    optimizer: float = 0.0
    copies: float = 0.0
    compute_cpu: float = 0.0
    overhead: float = 0.0
    one_device: bool = False

    def scaled(self, factor: float) -> Planner:
        """On a machine that takes ``factor`` times as long."""
        mine = ("forward", "backward", "optimizer", "copies", "compute_cpu")
        return replace(self, **{name: factor * getattr(self, name) for name in mine})

    def predict(
        self, spec: str, policy: Policy, ranks: int, computation: Computation, factor: float = 1.0
    ) -> Prediction:
        """One step among ``ranks`` ranks, after any warm-up; what is done only in some steps is spread over all.

        Args:
            factor: the policy computes so many times as long as it was measured.

        Raises:
            ConfigurationError: the policy is not defined for so many ranks.
        """
        steps, due = kinds(policy)
        found = self._one(spec, policy, ranks, computation, factor, steps.get(False, SETTLED))
        if 0 < due < 1:
            extra = vars(self._one(spec, policy, ranks, computation, factor, steps[True]))
            mixed = {name: (1 - due) * value + due * extra[name] for name, value in list(vars(found).items())[2:]}
            found = replace(found, **mixed)
        return found

    def _one(
        self, spec: str, policy: Policy, ranks: int, computation: Computation, factor: float, step: int
    ) -> Prediction:
        local_size = min(self.local_size, ranks)
        buckets, received = self._buckets(policy, ranks, step)
        compression = factor * computation.at(ranks, bool(policy.due(step)), received)
        total = max(1, sum(bucket.numel for bucket in buckets))

        def carried(loads: Sequence[Load], seconds: Callable[[Load, int], float] = self.network.seconds) -> float:
            return sum(seconds(load, local_size) for load in loads)

        every = [load for bucket in buckets for load in (*bucket.loads, *bucket.behind)]
        communication, sending = carried(every), carried(every, self.network.cpu_seconds)
        beside = self.cores >= 2 and not self.one_device  # a core of its own for what the policy computes
        slower = 1 / min(1.0, self.cores)
        ready, delay, waiting = self.forward, 0.0, []
        for bucket in buckets:
            computed = compression * bucket.numel / total
            ready += (self.backward + self.copies) * bucket.numel / total
            travels = carried(bucket.loads)
            if beside:
                own = max(travels, computed)
            else:
                travels += carried(bucket.loads, self.network.cpu_seconds) * (slower - 1)
                own = travels + computed
            if bucket.loads or not bucket.behind:
                waiting.append((ready + delay, own, travels + computed))
            if not beside:
                delay += slower * (computed + carried([*bucket.loads, *bucket.behind], self.network.cpu_seconds))
        end, after = self.forward + self.backward + self.copies + delay * (not waiting), 0.0
        for i, (at, own, last) in enumerate(reversed(waiting)):
            after += last if i == 0 else own
            end = max(end, at + after)
        compute = self.forward + self.backward + self.optimizer
        synchronizing = (compression + self.copies) * min(1.0, self.cores) + sending + self.overhead
        cpu = self.compute_cpu + max(0.0, synchronizing)
        step_seconds = max(end + self.optimizer, communication, cpu / self.cores)
        sent = sum(load.sent for load in every)
        return Prediction(
            spec, ranks, step_seconds, compute, compression, communication, sent, cpu, cpu / self.cores
        )

    def _buckets(self, policy: Policy, ranks: int, step: int) -> tuple[list[_Bucket], float]:
        """The buckets of a step, and the bytes that a rank receives by all-gathers."""
        policy.check_size(ranks, -(-ranks // self.local_size))
        params = {
            name: (p if isinstance(p, Tensor) else torch.empty(tuple(p), device="meta")).to("meta")
            for name, p in self.params.items()
        }
        names = [layout.names for layout in cut_layouts(params, self.bucket_mb * 2**20)]
        size = min(ranks, MOST)
        times = ranks / size

        def run(params: Shapes, size: int) -> list[Asked | Ended]:
            local_size = min(self.local_size, size)
            return list(dry_run(policy, params, size, step, self.bucket_mb, local_size, "meta", names))

        events = half = parts = run(params, size)
        if times > 1:  # each rank's part of what ranks divide: parts have a least size, as blocks have
            half = run(params, size // 2)
            parts = run({name: p.new_empty(max(1, round(p.numel() / times))) for name, p in params.items()}, size)
        asked = list(map(_operation, events))
        if list(map(_operation, half)) != asked:
            raise ConfigurationError(f"what it asks for among {ranks} ranks does not follow from {size}")
        scaled = times > 1 and list(map(_operation, parts)) == asked
        found: dict[int, _Bucket] = {}
        received = 0.0
        for event, few, part in zip(events, half, parts if scaled else events, strict=True):
            bucket = found.setdefault(event.bucket, _Bucket())
            if isinstance(event, Ended):
                bucket.numel = event.numel
                continue
            assert isinstance(part, Asked), "as the event"
            assert isinstance(few, Asked), "as the event"
            many = event.size if event.request.group == "node" else round(event.size * times)
            load = Load.of(event.request, event.size)._replace(size=many)
            if times > 1 and isinstance(event.request, AllGather):
                own = float(event.request.tensor.nbytes)
                if own < 0.75 * few.request.tensor.nbytes:  # a part of what ranks divide
                    own = float(part.request.tensor.nbytes) if scaled else own * event.size / many
                load = load._replace(sent=own * (many - 1))
            elif scaled and isinstance(event.request, AllToAll | ReduceScatter):
                load = load._replace(sent=part.request.tensor.nbytes * times * (many - 1) / many)
            (bucket.behind if event.behind else bucket.loads).append(load)
            received += load.sent * isinstance(event.request, AllGather)
        return [found[index] for index in sorted(found)], received


def _operation(event: Asked | Ended) -> tuple[str, str, torch.dtype] | None:
    return None if isinstance(event, Ended) else (event.request.kind, event.request.group, event.request.tensor.dtype)
