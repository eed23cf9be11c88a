"""Reducer: collects gradients in flat buckets, submits the buckets in order, and writes the results back.

Rules:

1. Buckets are fixed, of one dtype and device, with parameters in reverse order of registration, as in backward.
2. Buckets are submitted strictly in index order. A bucket that is complete early waits for those before it.
3. The end of a step submits incomplete buckets. A parameter without a new gradient contributes its present ``grad``, or
   zeros.
4. With ``gradient_as_bucket_view`` gradients are views of the buckets, as in DDP, and results are not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.policy.bucket import Views, cut_layouts
from hvdbridge.policy.collectives import used_here
from hvdbridge.reduction.aggregator import Aggregator, SourceBucket
from hvdbridge.reduction.parameters import sparse_gradient
from hvdbridge.reduction.source import Options


@dataclass(eq=False)
class BucketEntry:
    """A parameter in a bucket.

    Attributes:
        view: the part of the bucket's buffer for the gradient, in the parameter's shape.
        as_view: the result is not copied: ``parameter.grad`` becomes :attr:`view`.
        arrived: backward has produced the gradient of this step.
    """

    name: str
    parameter: Parameter
    view: Tensor
    bucket: FlatBucket
    as_view: bool
    arrived: bool = False


@dataclass(eq=False)
class FlatBucket(SourceBucket):
    """A bucket of gradients, which holds the policy's update after the step.

    Attributes:
        as_views: ``as_view`` is True for all entries.
        missing: number of gradients of this step that have not arrived.
        update: the policy's update, flat; None until it is delivered.
    """

    entries: list[BucketEntry] = field(default_factory=list)
    as_views: bool = True
    missing: int = 0
    update: Tensor | None = None

    def take_update(self) -> None:
        """Copy the update into the buffer, unless it is there already."""
        assert self.update is not None, "the step ended without a failure"
        used_here(self.update)
        if self.update.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(self.update)


def make_buckets(params: Mapping[str, Parameter], options: Options) -> list[FlatBucket]:
    """Return the buckets of :func:`~hvdbridge.policy.bucket.cut_layouts`, with an entry for each parameter."""
    buckets = []
    for layout in cut_layouts(params, options.bucket_bytes):
        first = params[layout.names[0]]
        bucket = FlatBucket(layout, layout.empty(first.dtype, first.device))
        views = Views(layout, bucket.buffer)
        for name, p in ((name, params[name]) for name in layout.names):
            # Multi-tensor optimizers are fast only if gradients have the memory layout of their parameters
            as_view = options.gradient_as_bucket_view and p.is_contiguous()
            bucket.entries.append(BucketEntry(name, p, views[name], bucket, as_view))
            bucket.as_views &= as_view
        bucket.missing = len(bucket.entries)
        buckets.append(bucket)
    return buckets


class Reducer:
    """Runs one step's gradients through an :class:`~hvdbridge.reduction.aggregator.Aggregator`.

    A step is :meth:`begin`, :meth:`arrive` for each gradient, :meth:`submit_rest`, ``aggregator.end()``,
    :meth:`write_back`, and :meth:`reset`, which also follows a failure.

    Attributes:
        entries: the entry of each parameter.
        running: a step has begun and not ended.
    """

    def __init__(self, buckets: list[FlatBucket], aggregator: Aggregator) -> None:
        self.aggregator = aggregator
        self.buckets = buckets
        self.entries: dict[Tensor, BucketEntry] = {
            entry.parameter: entry for bucket in buckets for entry in bucket.entries
        }
        for bucket in buckets:
            bucket.deliver = partial(self.delivered, bucket)
        self.running = False
        self._next_index = 0  # index of the next bucket to submit

    @property
    def unsubmitted(self) -> list[FlatBucket]:
        """The buckets that were not submitted in this step, complete or not."""
        return self.buckets[self._next_index :]

    def begin(self) -> None:
        """Start a step.

        Raises:
            WeightError: see :meth:`Aggregator.begin <hvdbridge.reduction.aggregator.Aggregator.begin>`.
        """
        self.running = True
        self.aggregator.begin()

    def arrive(self, entry: BucketEntry) -> None:
        """Count the gradient of ``entry``, and submit buckets that are complete. Called once per step and entry."""
        entry.arrived = True
        entry.bucket.missing -= 1
        if entry.bucket.missing == 0:
            while self._next_index < len(self.buckets) and self.buckets[self._next_index].missing == 0:
                self.submit()

    def submit_rest(self) -> None:
        """Submit all remaining buckets (rule 3)."""
        while self._next_index < len(self.buckets):
            self.submit()

    @torch.no_grad()
    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        """Submit the next bucket with ``values`` in the order of its entries, by default ``p.grad``; None is zeros.

        One call copies them all.
        """
        bucket = self.buckets[self._next_index]
        self._next_index += 1
        views, gradients = [], []
        for entry, value in zip(bucket.entries, values or map(self.gradient, bucket.entries), strict=True):
            if value is None:
                entry.view.zero_()
            elif value is not entry.view:
                views.append(entry.view)
                gradients.append(value)
        if views:
            torch._foreach_copy_(views, gradients)
        self.aggregator.submit(bucket, last=self._next_index == len(self.buckets))

    def delivered(self, bucket: FlatBucket, update: Tensor | None) -> None:
        """Store the policy's update of ``bucket``; None after a failure."""
        bucket.update = update

    def submit_all(self) -> None:
        """Submit all remaining buckets; begin a step if none runs."""
        if not self.running:
            self.begin()
        self.submit_rest()

    def finish(self) -> None:
        """Submit all remaining buckets, wait, and write the results into ``p.grad``."""
        try:
            self.submit_all()
            self.aggregator.end()
            self.write_back()
        finally:
            self.reset()

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        """Return the gradient that ``entry`` contributes, or None for zeros.

        Raises:
            Unsupported: the gradient is sparse.
        """
        gradient = entry.parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise sparse_gradient(f"rank {self.aggregator.communicator.rank}", entry.name)
        return gradient

    @torch.no_grad()
    def write_back(self, unused: Collection[Tensor] = ()) -> None:
        """Write the results into ``p.grad``, except for parameters in ``unused``."""
        for bucket in self.buckets:
            bucket.take_update()
            if bucket.as_views and not unused:  # a short loop, since models may have many small parameters
                for entry in bucket.entries:
                    entry.parameter.grad = entry.view
                continue
            targets, views = [], []
            for entry in bucket.entries:
                parameter = entry.parameter
                if parameter in unused:
                    continue
                if entry.as_view:
                    parameter.grad = entry.view
                else:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    targets.append(parameter.grad)
                    views.append(entry.view)
            if targets:
                torch._foreach_copy_(targets, views)

    def reset(self) -> None:
        """Prepare for the next step, after success or failure."""
        self.running = False
        self._next_index = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.entries)
            bucket.update = None
            for entry in bucket.entries:
                entry.arrived = False
