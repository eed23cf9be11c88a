"""The reducer of hvd.DistributedOptimizer: its policy, its channel, and its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.policies import label
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, State
from hvdbridge.policy.bucket import DDP_MB, Bucket
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.reduction.aggregator import Aggregator, Deliver
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.reducer import BucketEntry, FlatBucket, Reducer, make_buckets
from hvdbridge.reduction.source import Options, usual_bucket_mb
from hvdbridge.torch import asynchronous, basics
from hvdbridge.torch.basics import Average, Max, Min, Product, Sum
from hvdbridge.torch.channel import Channel
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import DifferentParameters, internal_error
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.process_sets import ProcessSet
from hvdbridge.torch.timeline import Timeline
from hvdbridge.torch.util import split_list

OPS = ((Average, "sum"), (Sum, "sum"), (Min, "min"), (Max, "max"), (Product, "product"))
"""Horovod's reductions and ours."""


@dataclass(frozen=True, repr=False)
class Reduction(Policy):
    """What Horovod does to a gradient: compress, scale, reduce, scale, decompress.

    ``Average`` divides after the sum. A compressor that works element by element is given the whole bucket, any other
    class or object with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)`` each gradient by
    itself.
    """

    op: Any = Average
    compression: Any = Compression.none
    predivide: float = 1.0
    bucket_mb = DDP_MB

    @property
    def rounds(self) -> int | None:
        """One for a compressor that takes the whole bucket; an object of the user's may remember what it sees."""
        return 1 if self._whole else None

    @property
    def _whole(self) -> bool:
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def __post_init__(self) -> None:
        """Its options are objects of Horovod's API: :func:`DistributedOptimizer` checks them."""

    def __repr__(self) -> str:
        """By this ranks compare: without the addresses of objects."""
        compression = getattr(self.compression, "__qualname__", type(self.compression).__qualname__)
        return f"Reduction(op={self.op}, compression={compression}, predivide={self.predivide})"

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self._whole:
            return Aggregated((yield from self._reduce(bucket.buffer, bucket.size)))
        parts = []
        for gradient in bucket.grads.values():
            parts.append((yield from self._reduce(gradient, bucket.size)).reshape(-1))
        return Aggregated(torch.cat(parts))

    def _reduce(self, tensor: Tensor, size: int) -> Exchange:
        sent, context = self.compression.compress(tensor)
        if self.predivide != 1.0:
            sent = sent * (1.0 / self.predivide)
        total = yield AllReduce(sent, next(name for op, name in OPS if op == self.op))
        factor = self.predivide / size if self.op == Average else 1.0
        if factor != 1.0:
            total = total.mul_(factor)
        return self.compression.decompress(total, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Settings:
    """What ranks must agree on, besides the parameters."""

    policy: Policy
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool

    def lines(self) -> list[str]:
        grouped = self.groups if isinstance(self.groups, int) or self.groups is None else list(map(len, self.groups))
        return [f"policy {label(self.policy)}", f"groups {grouped}", f"sparse_as_dense {self.sparse_as_dense}"]


class Opening:
    """A channel for one optimizer, and a reducer on it, that is being opened; the constructor does not wait.

    Attributes:
        arrived: the parameters whose gradients are there: they are handed in at once.
        key: process set and name of the channel, the same on all ranks.
        bucket_mb: the size of a bucket in MiB.
    """

    def __init__(
        self, params: Mapping[str, Parameter], arrived: Iterable[Tensor], settings: Settings, process_set: ProcessSet,
        name: str, number: int,
    ) -> None:  # fmt: skip
        self.params = params
        self.arrived = list(arrived)
        self.settings = settings
        self.operations = basics._current()
        self._reducer: OptimizerReducer | None = None
        self._error: Exception | None = None
        first = next(iter(params.values()))
        self._ready = torch.cuda.current_stream(first.device).record_event() if first.is_cuda else None
        title = f"DistributedOptimizer {number} (first parameter {next(iter(params))!r})"
        self.key = asynchronous._number(process_set), f"channel.{name}"
        self.bucket_mb = bucket_mb(self.operations, settings.policy, self.operations.members(self.key[0]))
        self._pending = self.operations.open(name, self.key[0], title, self._offer(), self._opened)

    def _offer(self) -> tuple[dict[str, str], dict[str, int], list[str]]:
        """What ranks compare; and the number of sparse dimensions of what is sparse on this one."""
        mine = {name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in self.params.items()}
        sparse = {}
        for name, p in self.params.items():
            if p.grad is not None and p.grad.is_sparse and not self.settings.sparse_as_dense:
                sparse[name] = p.grad.sparse_dim()
        return mine, sparse, [*self.settings.lines(), f"buckets of {self.bucket_mb:g} MB"]

    @property
    def stale(self) -> bool:
        """Of a session that is over, or failed."""
        return basics._operations is not self.operations or bool(self._pending.error)

    def _opened(self, channel: Channel) -> None:
        """On the thread of operations, which must go on: what goes wrong here is told to who waits."""
        try:
            difference = differences(channel.offers)
            if difference:
                channel.close()
                raise internal_error(difference, DifferentParameters)
            if self._ready is not None:
                torch.cuda.current_stream().wait_event(self._ready)
            self._reducer = OptimizerReducer(self, channel)
            for parameter in self.arrived:
                self._reducer.gradient_of(parameter)
        except Exception as error:
            self._error = error

    def wait(self) -> OptimizerReducer:
        """What was opened.

        Raises:
            DifferentParameters: ranks have other parameters, or other options.
            HorovodInternalError: a rank is gone, or never opens it.
        """
        self.operations.wait(self._pending)
        if self._error is not None:
            raise self._error
        assert self._reducer is not None, "it is open"
        return self._reducer


def bucket_mb(operations: Operations, policy: Policy, ranks: Iterable[int]) -> float:
    """``HOROVOD_FUSION_THRESHOLD`` in MiB, or the session's size, or what is usual among these ranks."""
    given = operations.settings.bucket_bytes
    if given is not None:
        return given / 2**20
    world = operations.session.communicator
    nodes = [world.nodes[rank] for rank in ranks] if world.nodes else ()
    usual = usual_bucket_mb(policy, nodes, world.capabilities.blocks_host)
    return operations.session.config.fixed_bucket_mb(usual, "hvdbridge.torch.DistributedOptimizer")


def differences(offers: Sequence[tuple[dict[str, str], dict[str, int], list[str]]]) -> str:
    """What a rank has that rank 0 has not; empty if there is nothing."""
    first, _, lines = offers[0]
    for rank, (theirs, _, their_lines) in enumerate(offers):
        where = f"DistributedOptimizer: rank {rank} differs from rank 0 (numbers in the process set)"
        if theirs != first:
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            shown = "; ".join(f"{n!r} is {theirs.get(n, 'missing')}, not {first.get(n, 'there')}" for n in names[:8])
            return f"{where} in {len(names)} parameters: {shown}. Give all ranks the same model."
        if their_lines != lines:
            return f"{where}: it has {their_lines}, rank 0 {lines}"
    return ""


class OptimizerReducer(Reducer):
    """Carries one optimizer's gradients through a policy, among the ranks of a process set, for one session.

    Attributes:
        sparse: the number of sparse dimensions of gradients that are; these travel as raw operations.
        begun: how many steps have begun.
    """

    def __init__(self, opening: Opening, channel: Channel) -> None:
        settings, params = opening.settings, opening.params
        self.operations: Operations = opening.operations
        self.key = opening.key
        self.names = list(channel.offers[0][0])  # in rank 0's order
        self.sparse = {name: dims for _, found, _ in channel.offers for name, dims in found.items()}  # on any rank
        self.params = {name: params[name] for name in self.names}
        self.dense = {name: p for name, p in self.params.items() if name not in self.sparse}
        channels = channel.communicator, channel.control
        device = next(iter(params.values())).device
        self._context = ReductionContext(self.operations.session, channels, device, channel.check)
        self.scheduler = self._context.scheduler
        self.operations.on_failure.append(self.scheduler.fail)
        aggregator = Aggregator(settings.policy, self.dense, *channels, self.scheduler, weighted=False)
        options = Options(opening.bucket_mb, whole=settings.policy.scope == "step")
        super().__init__(self._cut(settings, options), aggregator)
        self.begun = 0
        self._follows = False  # the step that runs is one of other ranks
        self._densified: list[Parameter] = []  # whose sparse gradient became dense for this step
        self._since: dict[str, float] = {}  # for the timeline: when a gradient arrived

    def _cut(self, settings: Settings, options: Options) -> list[FlatBucket]:
        """Buckets of the usual size, or one (per type and device) for each group that the user made."""
        if settings.groups is None or settings.groups == 0:
            return make_buckets(self.dense, options)
        names: dict[Tensor, str] = {p: name for name, p in self.dense.items()}
        if isinstance(settings.groups, int):
            parts = split_list(list(self.dense), settings.groups)
        else:
            parts = [[names[p] for p in group if p in names] for group in settings.groups]
            grouped = {name for part in parts for name in part}
            parts += [[name] for name in self.dense if name not in grouped]
        whole = replace(options, whole=True)
        found = []
        for part in reversed([part for part in parts if part]):
            found += make_buckets({name: self.dense[name] for name in part}, whole)
        return found

    @property
    def usable(self) -> bool:
        """Its session is open, and nothing has failed."""
        operations = self.operations
        return operations is basics._operations and not operations.failure and self.scheduler.failure is None

    def gradient_of(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is there. Called once per step for each."""
        entry = self.entries.get(parameter)
        if entry is None:
            return  # sparse
        if not self.running:
            self.begin()
        if self.operations.timeline is not None:
            self._since[entry.name] = time.monotonic()
        self.arrive(entry)

    def hand_in(self) -> None:
        """Submit what is missing as what it holds, or zeros."""
        if not self.running:
            self.begin()
        self.submit_rest()

    def finish(self) -> None:
        """Submit what is missing; wait; write the results into ``p.grad``, unless the step is one of other ranks."""
        try:
            self.hand_in()
            self.aggregator.end()
            if not self._follows:
                self.write_back()
        finally:
            self.reset()

    def follow(self, step: int) -> None:
        """Take part with zeros in the steps up to number ``step``; does not wait for the last."""
        while self.begun < step:
            if self.running:  # others are beyond it, so it is complete, or will be
                self.finish()
            self.begin()
            self._follows = True
            for bucket in self.buckets:
                self.submit([None] * len(bucket.entries))

    def end_following(self) -> None:
        """Wait for what :meth:`follow` began."""
        if self._follows:
            self.finish()

    def combine(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``values`` by name through the policy: one step without gradients. Views that live until the next."""
        self.begin()
        try:
            for bucket in self.buckets:
                self.submit([values[entry.name] for entry in bucket.entries])
            self.aggregator.end()
            for bucket in self.buckets:
                bucket.take_update()
            return {entry.name: entry.view for entry in self.entries.values()}
        finally:
            self.reset()

    def begin(self) -> None:
        self.begun += 1
        self.operations.begins(*self.key, self.begun)
        super().begin()

    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        super().submit(values)
        if not self.incomplete:
            self.scheduler.flush()  # nobody may wait for it for long; other ranks need all rounds of all flows

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        parameter = entry.parameter
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._densified.append(parameter)
        return parameter.grad

    def delivery(self, bucket: FlatBucket) -> Deliver:
        timeline = self.operations.timeline
        return bucket.deliver if timeline is None else partial(self._trace, timeline, bucket, time.monotonic())

    def _trace(self, timeline: Timeline, bucket: FlatBucket, handed_in: float, update: Tensor | None) -> None:
        """A bucket is through: rows of the timeline, called as Horovod calls them."""
        bucket.deliver(update)
        for entry in bucket.entries if update is not None else ():
            name = f"allreduce.{entry.name}"
            timeline.queued(name, self._since.get(entry.name, handed_in), handed_in)
            timeline.executed(name, "allreduce", handed_in, {"fused": len(bucket.entries)})

    def reset(self) -> None:
        super().reset()
        self._follows = False
        self._since.clear()
        for parameter in self._densified:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()  # in all dimensions, as Horovod's
        self._densified.clear()

    def close(self) -> None:
        """Free the channel; harmless when repeated."""
        if not self._context.closed:
            self.operations.on_failure.remove(self.scheduler.fail)
        self._context.close()
