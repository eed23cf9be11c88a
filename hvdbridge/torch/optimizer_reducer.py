"""The reducer of ``hvd.DistributedOptimizer``: opens a channel, and reduces an optimizer's gradients in it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.errors import CollectiveTimeout, RankFailed
from hvdbridge.execution.state_store import OnResize
from hvdbridge.policies import label
from hvdbridge.policy.bucket import Layout
from hvdbridge.reduction import checkpoint
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.reduction.reducer import BucketEntry, FlatBucket, Reducer, make_buckets
from hvdbridge.reduction.source import Options
from hvdbridge.torch import asynchronous, basics
from hvdbridge.torch.channel import OptimizerChannel
from hvdbridge.torch.exceptions import DifferentParameters, internal_error
from hvdbridge.torch.optimizer_options import Settings, bucket_mb
from hvdbridge.torch.process_sets import ProcessSet
from hvdbridge.torch.util import split_list
from hvdbridge.training import runtime

MemberInfo = tuple[dict[str, str], dict[str, int], dict[str, str]]
"""One rank's parameters (shape and dtype), sparse gradients (number of sparse dimensions) and options, by name."""


class OptimizerReducer(Reducer):
    """Aggregates one optimizer's gradients by a policy, over the ranks of a process set, for one session.

    The constructor starts to open a channel, and does not wait. After :meth:`wait` the reducer takes gradients.

    Args:
        params: parameters by name.
        arrived: parameters whose gradients are complete; the reducer takes these when the channel opens.
        settings: equal on all ranks.
        process_set: the ranks that take part.
        number: number of the optimizer in reports.
        name: name of the channel, equal on all ranks.
        loaded: a saved state of the policy, and what to do if it is of another number of ranks.

    Attributes:
        key: process set and name of the channel's operation.
        params: parameters by name, in rank 0's order.
        sparse: number of sparse dimensions by name, of gradients that are sparse on any rank. The optimizer reduces
            these by raw operations.
        begun: number of steps that have begun.
    """

    def __init__(
        self, params: Mapping[str, Parameter], arrived: Iterable[Tensor], settings: Settings, process_set: ProcessSet,
        number: int, name: str, loaded: tuple[Mapping[str, Any], OnResize] | None = None,
    ) -> None:  # fmt: skip
        self.operations = basics._current()
        self.key = asynchronous._process_set_id(process_set), f"channel.{name}"
        self.params = dict(params)
        self.begun = 0
        self._settings = settings
        self._arrived = list(arrived)
        self._loaded = loaded
        self._error: Exception | None = None
        self._is_following = False  # whether this rank contributes zeros to the present step
        self._densified: list[Parameter] = []  # whose sparse gradients this step made dense
        self._arrived_at: dict[str, float] = {}  # for the timeline: when a parameter's gradient arrived
        self._submitted_at: dict[Layout, float] = {}  # for the timeline: when a bucket was submitted
        first, parameter = next(iter(params.items()))
        self._device = parameter.device
        self._ready = torch.cuda.current_stream(self._device).record_event() if parameter.is_cuda else None
        self._bucket_mb = bucket_mb(self.operations, settings.policy, self.operations.members(self.key[0]))
        title = f"DistributedOptimizer {number} (first parameter {first!r})"
        self._pending = self.operations.open_channel(name, self.key[0], title, self._member_info(), self._on_open)

    def _member_info(self) -> MemberInfo:
        """Return what the ranks compare and exchange when the channel opens."""
        shapes = {name: f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for name, p in self.params.items()}
        grads = {} if self._settings.sparse_as_dense else {name: p.grad for name, p in self.params.items()}
        sparse = {name: grad.sparse_dim() for name, grad in grads.items() if grad is not None and grad.is_sparse}
        groups = self._settings.groups
        group_sizes = groups if isinstance(groups, int) or groups is None else list(map(len, groups))
        options = {"policy=": label(self._settings.policy), "groups=": str(group_sizes), "MB": f"{self._bucket_mb:g}"}
        return shapes, sparse, options | {"sparse_as_dense=": str(self._settings.sparse_as_dense)}

    def _on_open(self, channel: OptimizerChannel) -> None:
        """Handle the open channel, on the operations thread. :meth:`wait` raises the errors that occur here."""
        try:
            if difference := differences(channel.member_infos):
                channel.close()
                raise internal_error(difference, DifferentParameters)
            if self._ready is not None:
                torch.cuda.current_stream().wait_event(self._ready)
            self._initialize(channel)
            for parameter in self._arrived:
                self.gradient_of(parameter)
        except Exception as error:
            self._error = error

    def _initialize(self, channel: OptimizerChannel) -> None:
        """Create the scheduler, the aggregator and the buckets."""
        self.params = {name: self.params[name] for name in channel.member_infos[0][0]}
        self.sparse = {name: dims for _, sparse, _ in channel.member_infos for name, dims in sparse.items()}
        dense = {name: p for name, p in self.params.items() if name not in self.sparse}
        communicators = channel.communicator, channel.control
        self._context = ReductionContext(self.operations.session, communicators, self._device, channel.check)
        self.scheduler = self._context.scheduler
        self.operations.on_failure.append(self.scheduler.fail)
        aggregator = Aggregator(self._settings.policy, dense, self._context, weighted=False)
        if self._loaded is not None:
            checkpoint.load_state_dict(aggregator, *self._loaded)
            self._loaded = None
        super().__init__(self._make_buckets(dense), aggregator)

    def _make_buckets(self, dense: Mapping[str, Parameter]) -> list[FlatBucket]:
        """Make buckets of the usual size, or one (per dtype and device) for each of the user's groups."""
        single_bucket = self._settings.policy.scope == "step"
        groups, options = self._settings.groups, Options(self._bucket_mb, single_bucket=single_bucket)
        if groups is None or groups == 0:
            return make_buckets(dense, options)
        if isinstance(groups, int):
            grouped_names = split_list(list(dense), groups)
        else:
            names: dict[Tensor, str] = {p: name for name, p in dense.items()}
            grouped_names = [[names[p] for p in group if p in names] for group in groups]
            grouped = {name for group in grouped_names for name in group}
            grouped_names += [[name] for name in dense if name not in grouped]
        buckets = []
        for group in filter(None, reversed(grouped_names)):
            buckets += make_buckets({name: dense[name] for name in group}, replace(options, single_bucket=True))
        return buckets

    @property
    def stale(self) -> bool:
        """Whether the session has ended, or the channel failed to open."""
        return basics._operations is not self.operations or bool(self._pending.error)

    def wait(self) -> OptimizerReducer:
        """Wait until the channel is open, and return this reducer.

        Raises:
            DifferentParameters: parameters or options differ between ranks.
            HorovodInternalError: a rank is lost, or does not open the channel in time.
        """
        self.operations.wait(self._pending)
        if self._error is not None:
            raise self._error
        return self

    @property
    def usable(self) -> bool:
        """Whether the session is open, and neither the operations nor this reducer's scheduler have failed."""
        return not (self.stale or self.operations.failure or self.scheduler.failure)

    def gradient_of(self, parameter: Tensor) -> None:
        """Take the gradient of ``parameter``, once per step. No effect if :attr:`sparse` has the parameter."""
        entry = self.entries.get(parameter)
        if entry is None:
            return
        if not self.running:
            self.begin()
        if self.operations.timeline is not None:
            self._arrived_at[entry.name] = time.monotonic()
        self.arrive(entry)

    def write_back(self, unused: Collection[Tensor] = ()) -> None:
        if not self._is_following:  # a joined rank keeps its gradients
            super().write_back(unused)

    def follow(self, step: int) -> None:
        """Contribute zeros to the steps up to number ``step``; does not wait for the last one."""
        while self.begun < step:
            if self.running:  # the other ranks have submitted this step
                self.finish()
            self.begin()
            self._is_following = True
            for bucket in self.buckets:
                self.submit([None] * len(bucket.entries))

    def end_following(self) -> None:
        """Wait for the step that :meth:`follow` began."""
        if self._is_following:
            self.finish()

    def begin(self) -> None:
        self.begun += 1
        self.operations.record_step(*self.key, self.begun)
        super().begin()

    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        self._submitted_at[self.unsubmitted[0].layout] = time.monotonic()
        super().submit(values)
        if not self.unsubmitted:
            self.scheduler.flush()  # other ranks need all rounds of all flows, and this rank may wait much later

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        parameter = entry.parameter
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._densified.append(parameter)
        return parameter.grad

    def delivered(self, bucket: FlatBucket, update: Tensor | None) -> None:
        """Store the update, and write the bucket's gradients to the timeline by Horovod's names."""
        super().delivered(bucket, update)
        timeline, submitted_at = self.operations.timeline, self._submitted_at[bucket.layout]
        if update is None or timeline is None:
            return
        for entry in bucket.entries:
            name = f"allreduce.{entry.name}"
            timeline.queued(name, self._arrived_at.get(entry.name, submitted_at), submitted_at)
            timeline.executed(name, "allreduce", submitted_at, {"fused": len(bucket.entries)})

    def reset(self) -> None:
        super().reset()
        self._is_following = False
        self._arrived_at.clear()
        for parameter in self._densified:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()  # with all dimensions sparse, as in Horovod
        self._densified.clear()

    def close(self) -> None:
        """Close the channel. Harmless when repeated."""
        if not self._context.closed:
            self.operations.on_failure.remove(self.scheduler.fail)
        self._context.close()


def differences(member_infos: Sequence[MemberInfo]) -> str:
    """Return an error text about the first rank that differs from rank 0, or an empty string."""
    first = member_infos[0][0] | member_infos[0][2]
    for rank, (shapes, _, options) in enumerate(member_infos):
        other = shapes | options
        if names := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            shown = "; ".join(f"{n!r} is {other.get(n, 'missing')}, not {first.get(n, 'there')}" for n in names[:8])
            return (
                f"DistributedOptimizer: rank {rank} differs from rank 0 (numbers in the process set) in {len(names)} "
                f"parameters or options: {shown}. Give all ranks the same model and options."
            )
    return ""


@contextmanager
def internal_errors() -> Iterator[None]:
    """Convert another rank's failure into HorovodInternalError, which Horovod's users catch."""
    try:
        yield
    except Exception as error:
        # The backend's error only states that a connection ended; the monitor knows the cause.
        cause = runtime.current().monitor.cause_of(error)
        if isinstance(cause, (RankFailed, CollectiveTimeout)):
            raise internal_error(str(cause)) from error
        raise
