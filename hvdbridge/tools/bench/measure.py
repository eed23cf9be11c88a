"""Steps of the native way, of ours and of no synchronization at all, in turn in one run."""

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
from hvdbridge.tools.bench.cost import SETTLED, kinds
from hvdbridge.tools.bench.models import Loss
from hvdbridge.tools.bench.models import model as named_model
from hvdbridge.tools.bench.reference import Way, native
from hvdbridge.tools.bench.transport import Network, ranks_per_node

WARM_UP = 5
"""Steps that are not counted: DDP rebuilds its buckets, policies warm up, caches fill."""
PERIOD = 256
"""Steps after which a policy has done all that it does now and then."""


@dataclass(frozen=True)
class Row:
    """What one policy came to; times are medians in seconds, of the slowest rank in each step.

    Where only some steps are :meth:`~hvdbridge.Policy.due`, both kinds have their median, and their share in it.

    Attributes:
        samples: as asked for; None: the model's default.
        step: a whole step: forward, backward, synchronization, optimizer; or the transfer that goes on behind it, where
            that takes longer, for the next step waits for it.
        compute: the same without synchronization.
        compression: what the policy computed in a step.
        communication: time in which at least one collective was under way.
        exposed: what synchronization adds to ``compute`` beyond a ``compression`` that shares backward's core: step -
            compute - compression, at least 0. Where a rank has two cores, step - compute.
        bytes_sent: per step, by the rank that sends most.
        bucket_mb: size of a bucket of ours, in MiB.
        cpu, compute_cpu: seconds that a rank's process kept cores busy in a step, and in one without synchronization;
            means over ranks.
        native: the step of the native way that ``against`` names; None: it does not take such a model, and ``against``
            says why.
        ratio: step / native, each step by the native one beside it: lower quartile, median, upper quartile.
        limit: step / max(compute + compression, bytes_sent / the bandwidth of the groups that it goes to); with two
            cores for a rank compute and compression are floors of their own.
        enqueued: what is computed (CUDA) or sent (NCCL) was only enqueued. Then compression and communication are times
            of the host, and count in nothing else.
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
        """Bytes per second that a rank sent while a collective was under way."""
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
    """Train ``model`` for ``steps`` steps in each of the three ways. Collective, in the session that runs.

    Where a parameter gets no gradient on some rank, ours and DDP look for such parameters.

    Raises:
        ConfigurationError: no such model, its loss does not call what it is given, what :func:`check` says, or the
            native way that was named does not take this model.
        Unsupported: our backend, or the policy, does not take this model.
    """
    due, share = _due(policy, steps)
    torch.manual_seed(hb.rank())  # ranks that send the same gradients would flatter what picks some of them
    module, loss = named_model(model, samples)
    ways, name, sync = _ways(module.to(hb.device()), loss, policy, against, bucket_mb)
    try:
        slowest, busy, parts = _train(ways, loss, steps, on_step)
    except ConfigurationError:  # which all ranks come to
        sync.close()
        raise
    sync.close()

    def parted(values: Sequence[float]) -> list[tuple[float, list[float]]]:
        """Values of our steps, those that are due and the others, with their shares."""
        both = [[v for v, is_due in zip(values, due, strict=True) if is_due is which] for which in (False, True)]
        return [(weight, kind) for weight, kind in zip((1 - share, share), both, strict=True) if kind]

    def typical(values: Sequence[float]) -> float:
        return sum(weight * statistics.median(kind) for weight, kind in parted(values))

    step, compute = typical(slowest["ours"]), statistics.median(slowest["alone"])
    compression, communication, sent = map(typical, parts)
    cpus = _over_ranks([typical(busy["ours"]), statistics.median(busy["alone"])], hb.ReduceOp.SUM)
    cpu, compute_cpu = (seconds / hb.size() for seconds in cpus)
    other, ratio = None, None
    if "native" in ways:
        ratios = parted([a / b for a, b in zip(slowest["ours"], slowest["native"], strict=True)])
        low, middle, high = (sum(weight * _quartile(n, kind) for weight, kind in ratios) for n in range(3))
        other, ratio = statistics.median(slowest["native"]), (low, middle, high)
    enqueued = hb.device().type == "cuda" or not hb.current().communicator.capabilities.blocks_host
    beside = compression if (network.cores or 2) < 2 and not enqueued else 0.0  # in the time of backward
    floor = max(compute + beside, 0.0 if enqueued else compression, sent / _bandwidth(policy, module, network))
    numel = sum(p.numel() for p in trainable(module).values())
    return Row(
        hb.backend(), hb.launcher(), hb.size(), model, policy, samples, name, numel,
        steps, step, compute, compression, communication, max(0.0, step - compute - beside), sent, cpu, compute_cpu,
        other, ratio, step / floor, sync.bucket_mb, enqueued,
    )  # fmt: skip


def _ways(
    module: torch.nn.Module, loss: Loss, policy: str, against: str | None, bucket_mb: float | Literal["auto"] | None
) -> tuple[dict[str, Way], str, hb.GradientSynchronizer]:
    """The three ways with a copy of the module each; the native one's name, or why it is missing; our synchronizer."""
    name, make = native(hb.backend(), against)
    mine, plain = copy.deepcopy(module), copy.deepcopy(module)
    unused = _leaves_some_out(plain, loss)  # after the copies: a module may keep what has no copy, an activation
    ways = {}
    try:
        ways["native"] = make(module, _optimizer(module), unused)
    except ConfigurationError as error:
        if against is not None:
            raise
        name = f"none: {error}"
    sync = hb.GradientSynchronizer(
        mine, _optimizer(mine), policy=policy, bucket_mb=bucket_mb, find_unused_parameters=unused
    )
    ways["ours"] = Way(sync.model, sync.optimizer.zero_grad, sync.optimizer.step, sync.stats)
    alone = _optimizer(plain)
    ways["alone"] = Way(plain, alone.zero_grad, alone.step)
    return ways, name, sync


Figures = dict[str, list[float]]
"""Way -> a figure of each step."""


def _train(
    ways: dict[str, Way], loss: Loss, steps: int, on_step: Callable[[], None]
) -> tuple[Figures, Figures, list[list[float]]]:
    """Each step's seconds, of the slowest rank, and CPU seconds, of this rank; compression, communication and bytes."""
    seconds: Figures = {way: [] for way in ways}
    busy: Figures = {way: [] for way in ways}
    parts: list[list[float]] = []
    order = list(ways)
    for number in range(WARM_UP + steps):
        for way in order:
            spent, cpu = _step(ways[way], loss)
            if number >= WARM_UP:
                seconds[way].append(spent)
                busy[way].append(cpu)
        if number >= WARM_UP:
            figures = ways["ours"].settle()
            parts.append([figures[k] for k in ("compression_seconds", "communication_seconds", "bytes_sent")])
        order = [*order[1:], order[0]]
        on_step()
    slowest = {way: _over_ranks(values, hb.ReduceOp.MAX) for way, values in seconds.items()}
    return slowest, busy, [_over_ranks(part, hb.ReduceOp.MAX) for part in zip(*parts, strict=True)]


def _leaves_some_out(module: torch.nn.Module, loss: Loss) -> bool:
    """Whether a backward on any rank leaves a trainable parameter without a gradient."""
    loss(module).backward()
    found = _over_ranks([any(p.grad is None for p in trainable(module).values())], hb.ReduceOp.MAX)
    module.zero_grad()
    return bool(found[0])


def _bandwidth(policy: str, module: torch.nn.Module, network: Network) -> float:
    """Bytes per second at best of what a policy sends: each byte by the network of its group."""
    chosen, local_size = from_spec(policy), network.local_size
    steps, share = kinds(chosen)
    sent, seconds = 0.0, 0.0
    for due, step in steps.items():
        for event in dry_run(chosen, trainable(module), hb.size(), step, local_size=local_size):
            if isinstance(event, Asked):
                amount = (share if due else 1 - share) * event.request.bytes_sent(event.size)
                sent += amount
                seconds += amount / network.bandwidth(event.request.group)
    return sent / seconds if seconds else network.bandwidth()


def check(policy: str, against: str | None, steps: int) -> None:
    """What :func:`measure` would refuse on all ranks alike.

    Raises:
        ConfigurationError: the policy is not defined for so many ranks, the native way is not this backend's, the
            steps are too few to meet all kinds of the policy's steps, or it still warms up in them.
    """
    chosen = from_spec(policy)
    chosen.check_size(hb.size(), len(set(hb.current().communicator.nodes)) or None)
    native(hb.backend(), against)
    _due(policy, steps)
    for step in (WARM_UP, WARM_UP + steps - 1):
        sent = _asks(chosen, step)
        if all(_asks(chosen, SETTLED + later) != sent for later in range(PERIOD)):
            raise ConfigurationError(
                f"{policy}: in steps {WARM_UP} to {WARM_UP + steps - 1}, which count here, it does not yet send "
                "what it sends in the long run. Give what follows its warm-up."
            )


def _asks(policy: Policy, step: int) -> list[str]:
    """What its flows ask for in a step, for a matrix that any policy finds worth its while."""
    local_size = ranks_per_node(hb.current().communicator)
    events = dry_run(policy, {"weight": (1024, 1024)}, hb.size(), step, local_size=local_size)
    return [event.request.signature() for event in events if isinstance(event, Asked)]


def _due(policy: str, steps: int) -> tuple[list[bool], float]:
    """Which of the counted steps are due, and which share is in the long run."""
    chosen = from_spec(policy)
    share = kinds(chosen)[1]
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
    """Seconds, and CPU seconds of this process."""
    hb.barrier()
    started, before = time.perf_counter(), time.process_time()
    way.zero_grad()
    try:
        value = loss(way.model)
    except AttributeError as error:
        raise ConfigurationError(
            f"{error}. A loss calls the module that it is given, loss(module) = f(module(x)): that may be a wrapper"
        ) from error
    value.backward()
    handed_over = time.perf_counter()
    way.step()
    _catch_up()
    spent = time.perf_counter() - started
    way.settle()
    _catch_up()
    return max(spent, time.perf_counter() - handed_over), time.process_time() - before


def _catch_up() -> None:
    """Wait for this thread's stream, but not for what goes on behind a step on others."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _over_ranks(figures: Sequence[float], op: hb.ReduceOp) -> list[float]:
    """The sum, or the largest, of each figure over all ranks."""
    found = torch.tensor(figures, dtype=torch.float64)
    hb.all_reduce(found, op=op)
    return list(found.tolist())
