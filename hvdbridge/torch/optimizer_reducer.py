"""The reducer of ``hvd.DistributedOptimizer``: its policy, its channel, and its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.errors import CollectiveTimeout, RankFailed
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
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import DifferentParameters, internal_error
from hvdbridge.torch.operations import Channel, Operations
from hvdbridge.torch.process_sets import ProcessSet
from hvdbridge.torch.timeline import Timeline
from hvdbridge.torch.util import split_list
from hvdbridge.training import runtime

OPS = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}
"""Horovod's reductions and ours."""

Offer = tuple[dict[str, str], dict[str, int], list[str]]
"""Shape and dtype of each parameter, the sparse dimensions of sparse gradients, and the options of one rank."""


@dataclass(frozen=True, repr=False)
class Reduction(Policy):
    """What Horovod does to a gradient: compress, scale, reduce, scale, decompress.

    ``Average`` divides after the sum. A compressor of ``hvd.Compression`` gets the whole bucket. Any other class or
    object with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)`` gets each gradient by
    itself.
    """

    op: Any = Average
    compression: Any = Compression.none
    predivide: float = 1.0
    bucket_mb = DDP_MB

    @property
    def rounds(self) -> int | None:
        """One for a compressor of the whole bucket; an object of the user's may remember what it sees."""
        return 1 if self._whole else None

    @property
    def _whole(self) -> bool:
        return self.compression in (Compression.none, Compression.fp16, Compression.bf16)

    def __post_init__(self) -> None:
        """Checks nothing: :func:`DistributedOptimizer` checks these objects of Horovod's API."""

    def __repr__(self) -> str:
        """Ranks compare this text, so it holds no address of an object."""
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
        total = yield AllReduce(sent, OPS[self.op])
        factor = self.predivide / size if self.op == Average else 1.0
        if factor != 1.0:
            total = total.mul_(factor)
        return self.compression.decompress(total, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Settings:
    """Options of an optimizer that must be equal on all ranks."""

    policy: Policy
    groups: int | Sequence[Sequence[Tensor]] | None
    sparse_as_dense: bool


class OptimizerReducer(Reducer):
    """Carries one optimizer's gradients through a policy, among the ranks of a process set, for one session.

    The constructor asks for a channel and does not wait. After :meth:`wait` the reducer takes gradients.

    Args:
        params: by name.
        arrived: parameters whose gradients are complete; the reducer takes these when the channel opens.
        settings: equal on all ranks.
        process_set: the ranks that take part.
        number: tells this process's optimizers apart in messages.
        name: of the channel, the same on all ranks.

    Attributes:
        key: process set and name of the channel.
        params: by name, in rank 0's order.
        sparse: by name, the sparse dimensions of gradients that are sparse on any rank. These travel as raw operations.
        begun: how many steps have begun.
    """

    def __init__(
        self, params: Mapping[str, Parameter], arrived: Iterable[Tensor], settings: Settings, process_set: ProcessSet,
        number: int, name: str,
    ) -> None:  # fmt: skip
        self.operations = basics._current()
        self.key = asynchronous._number(process_set), f"channel.{name}"
        self.params = dict(params)
        self.begun = 0
        self._settings = settings
        self._handed_in = list(arrived)
        self._error: Exception | None = None
        self._follows = False  # the step that runs is one of other ranks
        self._densified: list[Parameter] = []  # whose sparse gradient became dense for this step
        self._since: dict[str, float] = {}  # for the timeline: when a gradient arrived
        first, parameter = next(iter(params.items()))
        self._device = parameter.device
        self._ready = torch.cuda.current_stream(self._device).record_event() if parameter.is_cuda else None
        self._bucket_mb = bucket_mb(self.operations, settings.policy, self.operations.members(self.key[0]))
        title = f"DistributedOptimizer {number} (first parameter {first!r})"
        self._pending = self.operations.open(name, self.key[0], title, self._offer(), self._opened)

    def _offer(self) -> Offer:
        mine, sparse, groups = {}, {}, self._settings.groups
        for name, p in self.params.items():
            mine[name] = f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}"
            if p.grad is not None and p.grad.is_sparse and not self._settings.sparse_as_dense:
                sparse[name] = p.grad.sparse_dim()
        grouped = groups if isinstance(groups, int) or groups is None else list(map(len, groups))
        options = f"sparse_as_dense {self._settings.sparse_as_dense}", f"buckets of {self._bucket_mb:g} MB"
        return mine, sparse, [f"policy {label(self._settings.policy)}", f"groups {grouped}", *options]

    def _opened(self, channel: Channel) -> None:
        """Runs on the thread of operations, which must go on: :meth:`wait` raises what fails here."""
        try:
            if difference := differences(channel.offers):
                channel.close()
                raise internal_error(difference, DifferentParameters)
            if self._ready is not None:
                torch.cuda.current_stream().wait_event(self._ready)
            self._build(channel)
            for parameter in self._handed_in:
                self.gradient_of(parameter)
        except Exception as error:
            self._error = error

    def _build(self, channel: Channel) -> None:
        self.params = {name: self.params[name] for name in channel.offers[0][0]}
        self.sparse = {name: dims for _, found, _ in channel.offers for name, dims in found.items()}
        dense = {name: p for name, p in self.params.items() if name not in self.sparse}
        channels = channel.communicator, channel.control
        self._context = ReductionContext(self.operations.session, channels, self._device, channel.check)
        self.scheduler = self._context.scheduler
        self.operations.on_failure.append(self.scheduler.fail)
        aggregator = Aggregator(self._settings.policy, dense, *channels, self.scheduler, weighted=False)
        super().__init__(self._cut(dense), aggregator)

    def _cut(self, dense: Mapping[str, Parameter]) -> list[FlatBucket]:
        """Buckets of the usual size, or one (per dtype and device) for each group that the user made."""
        groups, options = self._settings.groups, Options(self._bucket_mb, whole=self._settings.policy.scope == "step")
        if groups is None or groups == 0:
            return make_buckets(dense, options)
        if isinstance(groups, int):
            parts = split_list(list(dense), groups)
        else:
            names: dict[Tensor, str] = {p: name for name, p in dense.items()}
            parts = [[names[p] for p in group if p in names] for group in groups]
            grouped = {name for part in parts for name in part}
            parts += [[name] for name in dense if name not in grouped]
        found = []
        for part in filter(None, reversed(parts)):
            found += make_buckets({name: dense[name] for name in part}, replace(options, whole=True))
        return found

    @property
    def stale(self) -> bool:
        """Whether the session has ended, or the channel failed to open."""
        return basics._operations is not self.operations or bool(self._pending.error)

    def wait(self) -> OptimizerReducer:
        """Return this reducer when its channel is open.

        Raises:
            DifferentParameters: ranks have other parameters, or other options.
            HorovodInternalError: a rank is gone, or never opens the channel.
        """
        self.operations.wait(self._pending)
        if self._error is not None:
            raise self._error
        return self

    @property
    def usable(self) -> bool:
        """Whether its session is open, and nothing has failed."""
        return not (self.stale or self.operations.failure or self.scheduler.failure)

    def gradient_of(self, parameter: Tensor) -> None:
        """Take the gradient of ``parameter``, once per step; a sparse one travels by itself."""
        entry = self.entries.get(parameter)
        if entry is None:
            return
        if not self.running:
            self.begin()
        if self.operations.timeline is not None:
            self._since[entry.name] = time.monotonic()
        self.arrive(entry)

    def hand_in(self) -> None:
        """Submit every incomplete bucket; a missing gradient counts as what ``p.grad`` holds, or zeros."""
        if not self.running:
            self.begin()
        self.submit_rest()

    def finish(self) -> None:
        """Hand in, wait, and write the results into ``p.grad``, unless the step is one of other ranks."""
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
            if self.running:  # other ranks have handed this step in
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
        """One step of ``values`` by name in place of gradients; the results are views, valid until the next step."""
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
            self.scheduler.flush()  # this rank may wait late, and other ranks need all rounds of all flows

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
        """Deliver, and write the bucket's rows of the timeline by Horovod's names."""
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


def bucket_mb(operations: Operations, policy: Policy, ranks: Iterable[int]) -> float:
    """``HOROVOD_FUSION_THRESHOLD`` in MiB, or the session's size, or the usual size among these ranks."""
    given = operations.settings.bucket_bytes
    if given is not None:
        return given / 2**20
    world = operations.session.communicator
    nodes = [world.nodes[rank] for rank in ranks] if world.nodes else ()
    usual = usual_bucket_mb(policy, nodes, world.capabilities.blocks_host)
    return operations.session.config.fixed_bucket_mb(usual, "hvdbridge.torch.DistributedOptimizer")


def differences(offers: Sequence[Offer]) -> str:
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


@contextmanager
def internal_errors() -> Iterator[None]:
    """Raise the failure of another rank as the error that Horovod's users catch."""
    try:
        yield
    except Exception as error:
        # A library below reports in its own words that a peer is gone; the monitor knows the cause.
        cause = runtime.current().monitor.cause_of(error)
        if isinstance(cause, (RankFailed, CollectiveTimeout)):
            raise internal_error(str(cause)) from error
        raise
