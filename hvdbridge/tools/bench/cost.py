"""A closed-form model of a step's time, from a policy's requests, its measured computation, and a network.

Rules:

1. A policy's requests come from a dry run at the predicted number of ranks, up to :data:`MAX_DRY_RUN_RANKS`. For more
   ranks, the size of a shard comes from a dry run of MAX_DRY_RUN_RANKS ranks with proportionally smaller parameters;
   the size of a message that does not depend on the number of ranks comes from one with full parameters.
2. A policy's computation is measured without other ranks, at the numbers of ranks in :data:`MEASURED_SIZES`. For more
   ranks it is extrapolated only if the bytes that a rank receives grow with the ranks, so that noise is not amplified.
3. Buckets become ready during backward, in proportion to their elements, and the network serves one bucket at a time.
   So the last result arrives at the largest of ``ready_k + service_k + ... + service_last`` over all buckets k (a
   queue with one server, Lindley 1952).
4. With less than two cores per rank, computing and sending a bucket delays backward, while the network serves earlier
   buckets. Computing takes as long as measured, on cores that were shared as they will be; sending takes longer with
   less than one core per rank. A step takes at least the CPU time of all its work, divided by the cores.
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
from hvdbridge.execution.scheduler import ACROSS_NODES
from hvdbridge.execution.state_store import BUFFERS
from hvdbridge.policy.base import Policy, acts_after_step
from hvdbridge.policy.bucket import DDP_MB, cut_layouts
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather, AllToAll, ReduceScatter
from hvdbridge.policy.dry_run import Asked, Ended, dry_run
from hvdbridge.tools.bench.transport import Load, Network

SETTLED_STEP = 10_000_000
"""A step number after the warm-up of any policy."""
MEASURED_SIZES = (2, 8, 64)
"""Numbers of ranks at which computation may be measured; the first two for which the policy is defined are used."""
MAX_DRY_RUN_RANKS = 256
"""The largest number of ranks of a dry run, whose tensors have a row per rank."""
ENOUGH_DUE_STEPS, MAX_PERIOD = 100, 100_000
"""Due steps after which their share is known; number of steps that are searched for due ones."""
Shapes = Mapping[str, Tensor | Sequence[int]]


def step_kinds(policy: Policy) -> tuple[dict[bool, int], float]:
    """Return a settled step of each kind that exists, by :meth:`Policy.due`, and the share of steps that are due.

    Steps that are due less often than every MAX_PERIOD steps are ignored.

    >>> from hvdbridge.policies import from_spec
    >>> round(1 / step_kinds(from_spec("local_sgd:every=5000"))[1])
    5000
    """
    by_kind: dict[bool, list[int]] = {False: [], True: []}
    for step in range(SETTLED_STEP, SETTLED_STEP + MAX_PERIOD if acts_after_step(policy) else SETTLED_STEP + 1):
        by_kind[bool(policy.due(step))].append(step)
        if len(by_kind[True]) > ENOUGH_DUE_STEPS:
            break
    due = by_kind[True]
    periods = len(due) - 1  # between due steps, so that only whole periods count
    share = periods / (due[-1] - due[0]) if periods > 0 else float(len(due) > 0 and not by_kind[False])
    return {kind: steps[-1] for kind, steps in by_kind.items() if steps}, share


def time_rounds(*functions: Callable[[], object], repeats: int = 5) -> list[list[tuple[float, float]]]:
    """Run functions in rotation; return each function's seconds and CPU seconds per round, without a first round."""
    times: list[list[tuple[float, float]]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, runs in zip(functions, times, strict=True):
            start, cpu_start = time.perf_counter(), time.process_time()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            runs.append((time.perf_counter() - start, time.process_time() - cpu_start))
    return [runs[1:] for runs in times]


def medians(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median seconds and the median CPU seconds of a function's runs."""
    return statistics.median(t for t, _ in runs), statistics.median(t for _, t in runs)


def measure_copy(device: torch.device | str) -> float:
    """Measure a copy of DDP_MB MiB of float32 on ``device``, and return seconds per element."""
    source = torch.ones(int(DDP_MB * 2**18), device=device)
    target = torch.empty_like(source)
    return medians(time_rounds(lambda: target.copy_(source))[0])[0] / source.numel()


@dataclass(frozen=True)
class Computation:
    """The measured time that a policy computes between its collectives.

    Attributes:
        seconds: (ranks, whether the step is :meth:`Policy.due`) -> seconds per step.
        received: the same keys -> bytes that a rank receives by all-gathers per step.
    """

    seconds: Mapping[tuple[int, bool], float]
    received: Mapping[tuple[int, bool], float]

    def at(self, ranks: int, due: bool, received: float) -> float:
        """Interpolate or extrapolate the seconds of a step with ``received`` bytes of all-gathers per rank (rule 2).

        >>> known = Computation({(2, False): 1.0, (8, False): 4.0}, {(2, False): 20.0, (8, False): 80.0})
        >>> known.at(5, False, 50.0), known.at(20, False, 200.0), known.at(20, False, 80.0)
        (2.5, 10.0, 4.0)
        """
        sizes = sorted(n for n, is_due in self.seconds if is_due == due)
        smallest, largest = sizes[0], sizes[-1]
        slope = (self.seconds[largest, due] - self.seconds[smallest, due]) / max(1, largest - smallest)
        if ranks > largest and received <= self.received[largest, due] * math.sqrt(ranks / largest):
            return self.seconds[largest, due]
        return max(self.seconds[smallest, due], self.seconds[smallest, due] + slope * (max(smallest, ranks) - smallest))


def measure_computation(
    policy: Policy,
    params: Shapes,
    bucket_mb: float,
    device: torch.device | str = "cpu",
    local_size: int = 1,
    repeats: int = 3,
) -> Computation:
    """Measure a policy's computation on this machine, without other ranks; medians of ``repeats`` steps after one more.

    Raises:
        ConfigurationError: the policy is defined for none of the MEASURED_SIZES.
    """
    sizes, refusal = [], None
    for ranks in MEASURED_SIZES:
        try:
            policy.check_size(ranks, -(-ranks // local_size))
            sizes.append(ranks)
        except ConfigurationError as error:
            refusal = error
    if not sizes:
        raise ConfigurationError(f"its arithmetic is measured at {MEASURED_SIZES} ranks: {refusal}") from refusal
    seconds, received = {}, {}
    for ranks in sizes[:2]:
        for due, step in step_kinds(policy)[0].items():
            pool, times, gathered = BufferPool(ACROSS_NODES + BUFFERS), [], 0.0
            for _ in range(repeats + 1):
                seconds_spent, gathered = 0.0, 0.0
                for event in dry_run(policy, params, ranks, step, bucket_mb, min(local_size, ranks), device, pool=pool):
                    seconds_spent += event.seconds
                    if isinstance(event, Asked) and isinstance(event.request, AllGather):
                        gathered += event.request.bytes_sent(event.size)
                times.append(seconds_spent)
            seconds[ranks, due], received[ranks, due] = statistics.median(times[1:]), gathered
    return Computation(seconds, received)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of a step of one rank, as in :class:`~hvdbridge.tools.bench.measure.Row`.

    Attributes:
        working: seconds that the rank's cores need for all computation and sending; a lower bound of ``step``.
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
    """A bucket's number of elements, and its collectives' loads; the step does not wait for those in ``behind``."""

    numel: int = 0
    loads: list[Load] = field(default_factory=list)
    behind: list[Load] = field(default_factory=list)


@dataclass(frozen=True)
class Planner:
    """A job's parameters, computation and network, from which the time of a step is predicted.

    Attributes:
        params: tensors or shapes by name.
        forward, backward, optimizer: seconds per step without synchronization.
        copies: seconds per step in which backward's thread copies gradients into buckets and back.
        cores: cores per rank.
        one_device: the policy computes on backward's device, as on CUDA.
        compute_cpu: CPU seconds of forward, backward and the optimizer.
        overhead: CPU seconds of synchronization beyond the model's; negative if the model overestimates them.
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
        """Return the same job on a machine whose computation takes ``factor`` times as long."""
        names = ("forward", "backward", "optimizer", "copies", "compute_cpu")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def predict(
        self, spec: str, policy: Policy, ranks: int, computation: Computation, factor: float = 1.0
    ) -> Prediction:
        """Predict a step among ``ranks`` ranks after any warm-up: the mean of due steps and others, by their shares.

        Args:
            factor: multiplies the measured time of the policy's computation.

        Raises:
            ConfigurationError: the policy is not defined for this number of ranks.
        """
        steps, due = step_kinds(policy)
        prediction = self._predict_step(spec, policy, ranks, computation, factor, steps.get(False, SETTLED_STEP))
        if 0 < due < 1:
            if_due = vars(self._predict_step(spec, policy, ranks, computation, factor, steps[True]))
            mean = {name: (1 - due) * value + due * if_due[name] for name, value in list(vars(prediction).items())[2:]}
            prediction = replace(prediction, **mean)
        return prediction

    def _predict_step(
        self, spec: str, policy: Policy, ranks: int, computation: Computation, factor: float, step: int
    ) -> Prediction:
        """Predict a step of one kind, as a queue of buckets with one server (rules 3 and 4)."""
        local_size = min(self.local_size, ranks)
        buckets, received = self._buckets(policy, ranks, step)
        compression = factor * computation.at(ranks, bool(policy.due(step)), received)
        elements = max(1, sum(bucket.numel for bucket in buckets))

        def total(loads: Sequence[Load], seconds: Callable[[Load, int], float] = self.network.seconds) -> float:
            return sum(seconds(load, local_size) for load in loads)

        loads = [load for bucket in buckets for load in (*bucket.loads, *bucket.behind)]
        communication, sending = total(loads), total(loads, self.network.cpu_seconds)
        own_core = self.cores >= 2 and not self.one_device  # the policy computes on a core of its own
        slowdown = 1 / min(1.0, self.cores)
        ready, delay, queue = self.forward, 0.0, []
        for bucket in buckets:
            computing = compression * bucket.numel / elements
            ready += (self.backward + self.copies) * bucket.numel / elements
            transfer, handling = total(bucket.loads), total(bucket.loads, self.network.cpu_seconds)
            if own_core:
                service, last_service = max(transfer, computing), transfer + computing
            else:
                delay += computing
                service = last_service = transfer + (slowdown - 1) * handling
            if bucket.loads or not bucket.behind:
                queue.append((ready + delay, service, last_service))
            if not own_core:
                delay += slowdown * total([*bucket.loads, *bucket.behind], self.network.cpu_seconds)
        end, remaining = self.forward + self.backward + self.copies + delay * (not queue), 0.0
        for i, (ready_at, service, last_service) in enumerate(reversed(queue)):
            remaining += last_service if i == 0 else service
            end = max(end, ready_at + remaining)
        compute = self.forward + self.backward + self.optimizer
        synchronizing = (compression + self.copies) * min(1.0, self.cores) + sending + self.overhead
        cpu = self.compute_cpu + max(0.0, synchronizing)
        step_seconds = max(end + self.optimizer, communication, cpu / self.cores)
        sent = sum(load.sent for load in loads)
        return Prediction(spec, ranks, step_seconds, compute, compression, communication, sent, cpu, cpu / self.cores)

    def _buckets(self, policy: Policy, ranks: int, step: int) -> tuple[list[_Bucket], float]:
        """Return the buckets of a step, and the bytes that a rank receives by all-gathers in it."""
        policy.check_size(ranks, -(-ranks // self.local_size))
        params = {
            name: (p if isinstance(p, Tensor) else torch.empty(tuple(p), device="meta")).to("meta")
            for name, p in self.params.items()
        }
        names = [layout.names for layout in cut_layouts(params, self.bucket_mb * 2**20)]
        size = min(ranks, MAX_DRY_RUN_RANKS)
        ratio = ranks / size

        def simulate(params: Shapes, size: int) -> list[Asked | Ended]:
            local_size = min(self.local_size, size)
            return list(dry_run(policy, params, size, step, self.bucket_mb, local_size, "meta", names))

        events = halved = shards = simulate(params, size)
        if ratio > 1:  # smaller parameters give the size of shards, which has a minimum, such as a block
            halved = simulate(params, size // 2)
            shards = simulate({name: p.new_empty(max(1, round(p.numel() / ratio))) for name, p in params.items()}, size)
        operations = list(map(_operation_of, events))
        if list(map(_operation_of, halved)) != operations:
            raise ConfigurationError(f"what it asks for among {ranks} ranks does not follow from {size}")
        comparable = ratio > 1 and list(map(_operation_of, shards)) == operations
        buckets: dict[int, _Bucket] = {}
        received = 0.0
        for event, half_event, shard in zip(events, halved, shards if comparable else events, strict=True):
            bucket = buckets.setdefault(event.bucket, _Bucket())
            if isinstance(event, Ended):
                bucket.numel = event.numel
                continue
            assert isinstance(shard, Asked), "as the event"
            assert isinstance(half_event, Asked), "as the event"
            members = event.size if event.request.group == "node" else round(event.size * ratio)
            load = Load.of(event.request, event.size)._replace(size=members)
            if ratio > 1 and isinstance(event.request, AllGather):
                message = float(event.request.tensor.nbytes)
                if message < 0.75 * half_event.request.tensor.nbytes:  # a shard, which shrinks with more ranks
                    message = float(shard.request.tensor.nbytes) if comparable else message * event.size / members
                load = load._replace(sent=message * (members - 1))
            elif comparable and isinstance(event.request, AllToAll | ReduceScatter):
                load = load._replace(sent=shard.request.tensor.nbytes * ratio * (members - 1) / members)
            (bucket.behind if event.behind else bucket.loads).append(load)
            received += load.sent * isinstance(event.request, AllGather)
        return [buckets[index] for index in sorted(buckets)], received


def _operation_of(event: Asked | Ended) -> tuple[str, str, torch.dtype] | None:
    return None if isinstance(event, Ended) else (event.request.kind, event.request.group, event.request.tensor.dtype)
