"""The reducer of ``hvd.DistributedOptimizer``: its channel and its steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.errors import CollectiveTimeout, RankFailed
from hvdbridge.policies import label
from hvdbridge.policy.bucket import Layout
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.reducer import BucketEntry, FlatBucket, Reducer, make_buckets
from hvdbridge.reduction.source import Options
from hvdbridge.torch import asynchronous, basics
from hvdbridge.torch.channel import Channel
from hvdbridge.torch.exceptions import DifferentParameters, internal_error
from hvdbridge.torch.optimizer_options import Settings, bucket_mb
from hvdbridge.torch.process_sets import ProcessSet
from hvdbridge.torch.util import split_list
from hvdbridge.training import runtime

Offer = tuple[dict[str, str], dict[str, int], dict[str, str]]
"""One rank's parameters (shape and dtype), sparse gradients (sparse dimensions) and options, each by name."""


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
        self._arrived = list(arrived)
        self._error: Exception | None = None
        self._follows = False  # the step that runs is one of other ranks
        self._densified: list[Parameter] = []  # whose sparse gradient became dense for this step
        self._since: dict[str, float] = {}  # for the timeline: when a gradient arrived
        self._handed_in: dict[Layout, float] = {}  # and when a bucket was submitted
        first, parameter = next(iter(params.items()))
        self._device = parameter.device
        self._ready = torch.cuda.current_stream(self._device).record_event() if parameter.is_cuda else None
        self._bucket_mb = bucket_mb(self.operations, settings.policy, self.operations.members(self.key[0]))
        title = f"DistributedOptimizer {number} (first parameter {first!r})"
        self._pending = self.operations.open(name, self.key[0], title, self._offer(), self._opened)

    def _offer(self) -> Offer:
        shapes = {name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in self.params.items()}
        grads = {} if self._settings.sparse_as_dense else {name: p.grad for name, p in self.params.items()}
        sparse = {name: grad.sparse_dim() for name, grad in grads.items() if grad is not None and grad.is_sparse}
        groups = self._settings.groups
        grouped = groups if isinstance(groups, int) or groups is None else list(map(len, groups))
        options = {"policy=": label(self._settings.policy), "groups=": str(grouped), "MB": f"{self._bucket_mb:g}"}
        return shapes, sparse, options | {"sparse_as_dense=": str(self._settings.sparse_as_dense)}

    def _opened(self, channel: Channel) -> None:
        """Runs on the thread of operations, which must go on: :meth:`wait` raises what fails here."""
        try:
            if difference := differences(channel.offers):
                channel.close()
                raise internal_error(difference, DifferentParameters)
            if self._ready is not None:
                torch.cuda.current_stream().wait_event(self._ready)
            self._build(channel)
            for parameter in self._arrived:
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
        aggregator = Aggregator(self._settings.policy, dense, self._context, weighted=False)
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

    def write_back(self, unused: Collection[Tensor] = ()) -> None:
        if not self._follows:  # the step is one of other ranks
            super().write_back(unused)

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

    def begin(self) -> None:
        self.begun += 1
        self.operations.begins(*self.key, self.begun)
        super().begin()

    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        self._handed_in[self.incomplete[0].layout] = time.monotonic()
        super().submit(values)
        if not self.incomplete:
            self.scheduler.flush()  # this rank may wait late, and other ranks need all rounds of all flows

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        parameter = entry.parameter
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._densified.append(parameter)
        return parameter.grad

    def delivered(self, bucket: FlatBucket, update: Tensor | None) -> None:
        """Write the bucket's rows of the timeline by Horovod's names."""
        super().delivered(bucket, update)
        timeline, handed_in = self.operations.timeline, self._handed_in[bucket.layout]
        if update is None or timeline is None:
            return
        for entry in bucket.entries:
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


def differences(offers: Sequence[Offer]) -> str:
    """What a rank has that rank 0 has not; empty if there is nothing."""
    first = offers[0][0] | offers[0][2]
    for rank, (shapes, _, options) in enumerate(offers):
        theirs = shapes | options
        if names := [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]:
            shown = "; ".join(f"{n!r} is {theirs.get(n, 'missing')}, not {first.get(n, 'there')}" for n in names[:8])
            return (
                f"DistributedOptimizer: rank {rank} differs from rank 0 (numbers in the process set) in {len(names)} "
                f"parameters or options: {shown}. Give all ranks the same model and options."
            )
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
