"""Measure steps of the native way, of hvdbridge and without synchronization, in rotation in one run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import hvdbridge as hb
from hvdbridge.errors import ConfigurationError
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Policy
from hvdbridge.policy.dry_run import Asked, dry_run
from hvdbridge.reduction.parameters import trainable
from hvdbridge.tools.bench.cost import SETTLED_STEP, step_kinds
from hvdbridge.tools.bench.models import Loss
from hvdbridge.tools.bench.models import model as named_model
from hvdbridge.tools.bench.reference import Way, native
from hvdbridge.tools.bench.transport import Network, ranks_per_node

WARM_UP = 5
"""Steps before the counted ones, in which DDP rebuilds its buckets, policies warm up and caches fill."""
REQUEST_PERIOD = 256
"""The longest period of a policy's requests, in steps; so many settled steps contain all of its requests."""


@dataclass(frozen=True)
class Row:
    """The measurement of one policy. Times are medians over steps, in seconds, of the slowest rank in each step.

    If only some steps are :meth:`~hvdbridge.Policy.due`, the medians of due steps and others are averaged by shares.

    Attributes:
        samples: the requested samples per step; None: the model's default.
        step: forward, backward, synchronization and optimizer; or the time until a transfer that overlaps the next
            step is complete, if that is longer.
        compute: a step without synchronization.
        compression: the policy's computation per step.
        communication: time per step in which at least one collective was in flight.
        exposed: the visible time of synchronization: ``step - compute``, and if a rank has less than two cores, minus
            ``compression``; at least 0.
        bytes_sent: per step, by the rank that sends most.
        bucket_mb: the size of hvdbridge's buckets, in MiB.
        cpu, compute_cpu: CPU seconds of a rank's process per step, and per step without synchronization; means over
            ranks.
        native: a step of the native way ``against``; None: it does not support the model, and ``against`` has the
            reason.
        ratio: step / native, of consecutive steps: lower quartile, median, upper quartile.
        limit: step / max(compute + compression, bytes_sent / bandwidth of the groups used). With two cores per rank
            compute and compression are separate terms of the maximum.
        enqueued: computation (CUDA) or collectives (NCCL) were only enqueued, so compression and communication are
            times of the host, and no other attribute depends on them.
    """

    backend: str
    launcher: str
    ranks: int
    model: str
    policy: str
    samples: int | None
    against: str
    parameters: int
    steps: int
    step: float
    compute: float
    compression: float
    communication: float
    exposed: float
    bytes_sent: float
    cpu: float
    compute_cpu: float
    native: float | None
    ratio: tuple[float, float, float] | None
    limit: float
    bucket_mb: float
    enqueued: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sent while a collective was in flight."""
        return self.bytes_sent / self.communication if self.communication else 0.0


def measure(
    model: str,
    policy: str,
    against: str | None,
    network: Network,
    steps: int,
    samples: int | None = None,
    bucket_mb: float | Literal["auto"] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Row:
    """Train ``model`` for ``steps`` steps in each of the three ways, and return the measurement. Collective.

    hvdbridge must be initialized. If a parameter gets no gradient on some rank, ``find_unused_parameters`` is set.

    Raises:
        ConfigurationError: the model is unknown, its loss does not call the module that it is given, the native way
            ``against`` does not support the model, or an error of :func:`check`.
        Unsupported: the backend or the policy does not support the model.
    """
    due, share = _due_steps(policy, steps)
    torch.manual_seed(hb.rank())  # equal gradients on all ranks would favor sparsifying policies
    module, loss = named_model(model, samples)
    ways, name, sync = _ways(module.to(hb.device()), loss, policy, against, bucket_mb)
    try:
        slowest, cpu_seconds, traffic = _train(ways, loss, steps, on_step)
    except ConfigurationError:  # raised on all ranks alike
        sync.close()
        raise
    sync.close()

    def split_by_kind(values: Sequence[float]) -> list[tuple[float, list[float]]]:
        """Split values of hvdbridge's steps by kind, due or not; return (share, values) of each kind."""
        by_kind = [[v for v, is_due in zip(values, due, strict=True) if is_due is kind] for kind in (False, True)]
        return [(weight, subset) for weight, subset in zip((1 - share, share), by_kind, strict=True) if subset]

    def typical(values: Sequence[float]) -> float:
        return sum(weight * statistics.median(subset) for weight, subset in split_by_kind(values))

    step, compute = typical(slowest["ours"]), statistics.median(slowest["alone"])
    compression, communication, sent = map(typical, traffic)
    cpus = _reduce_over_ranks([typical(cpu_seconds["ours"]), statistics.median(cpu_seconds["alone"])], hb.ReduceOp.SUM)
    cpu, compute_cpu = (seconds / hb.size() for seconds in cpus)
    native_step, ratio = None, None
    if "native" in ways:
        ratios = split_by_kind([a / b for a, b in zip(slowest["ours"], slowest["native"], strict=True)])
        low, middle, high = (sum(weight * _quartile(n, subset) for weight, subset in ratios) for n in range(3))
        native_step, ratio = statistics.median(slowest["native"]), (low, middle, high)
    enqueued = hb.device().type == "cuda" or not hb.current().communicator.capabilities.blocks_host
    shared = compression if (network.cores or 2) < 2 and not enqueued else 0.0  # as part of backward's time
    floor = max(compute + shared, 0.0 if enqueued else compression, sent / _bandwidth(policy, module, network))
    numel = sum(p.numel() for p in trainable(module).values())
    return Row(
        hb.backend(), hb.launcher(), hb.size(), model, policy, samples, name, numel,
        steps, step, compute, compression, communication, max(0.0, step - compute - shared), sent, cpu, compute_cpu,
        native_step, ratio, step / floor, sync.bucket_mb, enqueued,
    )  # fmt: skip


def _ways(
    module: torch.nn.Module, loss: Loss, policy: str, against: str | None, bucket_mb: float | Literal["auto"] | None
) -> tuple[dict[str, Way], str, hb.GradientSynchronizer]:
    """Return the ways, with a copy of the module each; the native way's name or why it is missing; the synchronizer."""
    name, make_way = native(hb.backend(), against)
    own_module, plain = copy.deepcopy(module), copy.deepcopy(module)
    unused = _has_unused_parameters(plain, loss)  # after the copies: forward may store what cannot be copied
    ways = {}
    try:
        ways["native"] = make_way(module, _optimizer(module), unused)
    except ConfigurationError as error:
        if against is not None:
            raise
        name = f"none: {error}"
    sync = hb.GradientSynchronizer(
        own_module, _optimizer(own_module), policy=policy, bucket_mb=bucket_mb, find_unused_parameters=unused
    )
    ways["ours"] = Way(sync.model, sync.optimizer.zero_grad, sync.optimizer.step, sync.stats)
    alone = _optimizer(plain)
    ways["alone"] = Way(plain, alone.zero_grad, alone.step)
    return ways, name, sync


StepFigures = dict[str, list[float]]
"""Name of a way -> one figure per step."""


def _train(
    ways: dict[str, Way], loss: Loss, steps: int, on_step: Callable[[], None]
) -> tuple[StepFigures, StepFigures, list[list[float]]]:
    """Return seconds per step, of the slowest rank; CPU seconds per step, of this rank; and of hvdbridge's steps the
    compression seconds, communication seconds and bytes, maximum over ranks."""
    seconds: StepFigures = {way: [] for way in ways}
    cpu_seconds: StepFigures = {way: [] for way in ways}
    traffic: list[list[float]] = []
    order = list(ways)
    for step in range(WARM_UP + steps):
        for way in order:
            step_seconds, cpu = _step(ways[way], loss)
            if step >= WARM_UP:
                seconds[way].append(step_seconds)
                cpu_seconds[way].append(cpu)
        if step >= WARM_UP:
            figures = ways["ours"].settle()
            traffic.append([figures[k] for k in ("compression_seconds", "communication_seconds", "bytes_sent")])
        order = [*order[1:], order[0]]
        on_step()
    slowest = {way: _reduce_over_ranks(values, hb.ReduceOp.MAX) for way, values in seconds.items()}
    return slowest, cpu_seconds, [_reduce_over_ranks(values, hb.ReduceOp.MAX) for values in zip(*traffic, strict=True)]


def _has_unused_parameters(module: torch.nn.Module, loss: Loss) -> bool:
    """Return whether a backward leaves a trainable parameter without a gradient, on any rank. Collective."""
    loss(module).backward()
    unused = _reduce_over_ranks([any(p.grad is None for p in trainable(module).values())], hb.ReduceOp.MAX)
    module.zero_grad()
    return bool(unused[0])


def _bandwidth(policy: str, module: torch.nn.Module, network: Network) -> float:
    """Return the best bytes per second for a policy's traffic, with the bandwidth of each collective's group."""
    chosen, local_size = from_spec(policy), network.local_size
    steps, share = step_kinds(chosen)
    sent, seconds = 0.0, 0.0
    for due, step in steps.items():
        for event in dry_run(chosen, trainable(module), hb.size(), step, local_size=local_size):
            if isinstance(event, Asked):
                nbytes = (share if due else 1 - share) * event.request.bytes_sent(event.size)
                sent += nbytes
                seconds += nbytes / network.bandwidth(event.request.group)
    return sent / seconds if seconds else network.bandwidth()


def check(policy: str, against: str | None, steps: int) -> None:
    """Check, with equal results on all ranks, that :func:`measure` can measure the policy.

    Raises:
        ConfigurationError: the policy is not defined for this number of ranks, the native way needs another backend,
            the steps do not contain both due and other steps, or the policy still warms up in them.
    """
    chosen = from_spec(policy)
    chosen.check_size(hb.size(), len(set(hb.current().communicator.nodes)) or None)
    native(hb.backend(), against)
    _due_steps(policy, steps)
    for step in (WARM_UP, WARM_UP + steps - 1):
        signatures = _request_signatures(chosen, step)
        if all(_request_signatures(chosen, SETTLED_STEP + offset) != signatures for offset in range(REQUEST_PERIOD)):
            raise ConfigurationError(
                f"{policy}: in steps {WARM_UP} to {WARM_UP + steps - 1}, which count here, it does not yet send "
                "what it sends in the long run. Give what follows its warm-up."
            )


def _request_signatures(policy: Policy, step: int) -> list[str]:
    """Return the signatures of a policy's requests in a step, for a matrix that is large enough for any policy."""
    local_size = ranks_per_node(hb.current().communicator)
    events = dry_run(policy, {"weight": (1024, 1024)}, hb.size(), step, local_size=local_size)
    return [event.request.signature() for event in events if isinstance(event, Asked)]


def _due_steps(policy: str, steps: int) -> tuple[list[bool], float]:
    """Return which counted steps are due, and the long-run share of due steps; none and 0 if all are of one kind."""
    chosen = from_spec(policy)
    share = step_kinds(chosen)[1]
    due = [bool(chosen.due(WARM_UP + step)) for step in range(steps)]
    if 0 < share < 1 and len(set(due)) < 2:
        raise ConfigurationError(
            f"{policy}: {share:.3g} of its steps end with another transfer, and steps {WARM_UP} to "
            f"{WARM_UP + steps - 1}, which count here, are of one kind. Raise --steps."
        )
    return (due if 0 < share < 1 else [False] * steps), (share if 0 < share < 1 else 0.0)


def _quartile(number: int, values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[number] if len(values) > 1 else values[0]


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-6)


def _step(way: Way, loss: Loss) -> tuple[float, float]:
    """Run a step, and return its seconds and the CPU seconds of this process."""
    hb.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    way.zero_grad()
    try:
        value = loss(way.model)
    except AttributeError as error:
        raise ConfigurationError(
            f"{error}. A loss calls the module that it is given, loss(module) = f(module(x)): that may be a wrapper"
        ) from error
    value.backward()
    after_backward = time.perf_counter()
    way.step()
    _synchronize_stream()
    step_seconds = time.perf_counter() - start
    way.settle()
    _synchronize_stream()
    return max(step_seconds, time.perf_counter() - after_backward), time.process_time() - cpu_start


def _synchronize_stream() -> None:
    """Wait for the current CUDA stream, but not for transfers on other streams that overlap the next step."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _reduce_over_ranks(figures: Sequence[float], op: hb.ReduceOp) -> list[float]:
    """Reduce each figure over all ranks by ``op``. Collective."""
    reduced = torch.tensor(figures, dtype=torch.float64)
    hb.all_reduce(reduced, op=op)
    return list(reduced.tolist())
