"""Collects gradients into flat buckets, submits the buckets in order, and writes the results back.

Rules:

1. Buckets are fixed, in reverse order of registration, as backward produces gradients; one dtype and device each.
2. Buckets are submitted strictly in index order. A bucket that is ready early waits.
3. The end of a step submits incomplete buckets. A parameter without a new gradient counts as the gradient that it
   holds, or as zeros.
4. With ``gradient_as_bucket_view`` results are views of the buckets, as in DDP, and are not copied.
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
from hvdbridge.reduction.aggregator import Aggregator, Piece
from hvdbridge.reduction.parameters import sparse_gradient
from hvdbridge.reduction.source import Options


@dataclass(eq=False)
class BucketEntry:
    """One parameter of a bucket.

    Attributes:
        view: the part of the bucket's buffer that holds the gradient, in the parameter's shape.
        stays: the result is not copied: ``parameter.grad`` becomes :attr:`view`.
        arrived: the gradient of this step is there.
    """

    name: str
    parameter: Parameter
    view: Tensor
    bucket: FlatBucket
    stays: bool
    arrived: bool = False


@dataclass(eq=False)
class FlatBucket(Piece):
    """A bucket: gradients in, and the policy's update of them out.

    Attributes:
        stays: all its entries do.
        missing: how many gradients of this step have not arrived.
        update: what the policy made of the buffer; None until it is delivered.
    """

    entries: list[BucketEntry] = field(default_factory=list)
    stays: bool = True
    missing: int = 0
    update: Tensor | None = None

    def take_update(self) -> None:
        """From now on the buffer holds the update."""
        assert self.update is not None, "the step ended without a failure"
        used_here(self.update)
        if self.update.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(self.update)


def make_buckets(params: Mapping[str, Parameter], options: Options) -> list[FlatBucket]:
    """The flat buckets of :func:`~hvdbridge.policy.bucket.cut_layouts`, with an entry for each parameter."""
    buckets = []
    for layout in cut_layouts(params, options.bucket_bytes):
        first = params[layout.names[0]]
        bucket = FlatBucket(layout, layout.empty(first.dtype, first.device))
        views = Views(layout, bucket.buffer)
        for name, p in ((name, params[name]) for name in layout.names):
            # An optimizer that runs over many parameters at once wants gradients of the parameters' memory layout.
            stays = options.gradient_as_bucket_view and p.is_contiguous()
            bucket.entries.append(BucketEntry(name, p, views[name], bucket, stays))
            bucket.stays &= stays
        bucket.missing = len(bucket.entries)
        buckets.append(bucket)
    return buckets


class Reducer:
    """Carries one step's gradients through an :class:`~hvdbridge.reduction.aggregator.Aggregator`.

    A step is :meth:`begin`, :meth:`arrive` per gradient, :meth:`submit_rest`, ``aggregator.end()``,
    :meth:`write_back`, and, also after a failure, :meth:`reset`.

    Attributes:
        entries: that of each parameter.
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
        self._next = 0  # the first bucket that was not submitted

    @property
    def incomplete(self) -> list[FlatBucket]:
        """The buckets that were not submitted in this step."""
        return self.buckets[self._next :]

    def begin(self) -> None:
        """Start a step.

        Raises:
            WeightError: see :meth:`Aggregator.begin <hvdbridge.reduction.aggregator.Aggregator.begin>`.
        """
        self.running = True
        self.aggregator.begin()

    def arrive(self, entry: BucketEntry) -> None:
        """The gradient of ``entry`` is there. Called once per step for each entry."""
        entry.arrived = True
        entry.bucket.missing -= 1
        if entry.bucket.missing == 0:
            while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                self.submit()

    def submit_rest(self) -> None:
        """Submit every bucket that is incomplete (rule 3)."""
        while self._next < len(self.buckets):
            self.submit()

    @torch.no_grad()
    def submit(self, values: Sequence[Tensor | None] | None = None) -> None:
        """Submit the next bucket with ``values`` in the order of its entries, by default their gradients; None: zeros.
        They are copied in one call instead of one per parameter."""
        bucket = self.buckets[self._next]
        self._next += 1
        views, found = [], []
        for entry, value in zip(bucket.entries, values or map(self.gradient, bucket.entries), strict=True):
            if value is None:
                entry.view.zero_()
            elif value is not entry.view:
                views.append(entry.view)
                found.append(value)
        if views:
            torch._foreach_copy_(views, found)
        self.aggregator.submit(bucket, last=self._next == len(self.buckets))

    def delivered(self, bucket: FlatBucket, update: Tensor | None) -> None:
        """The policy has made ``update`` of ``bucket``; None: it failed."""
        bucket.update = update

    def hand_in(self) -> None:
        """Submit what is missing as what it holds, or zeros."""
        if not self.running:
            self.begin()
        self.submit_rest()

    def finish(self) -> None:
        """Submit what is missing, wait, and write the results into ``p.grad``."""
        try:
            self.hand_in()
            self.aggregator.end()
            self.write_back()
        finally:
            self.reset()

    def gradient(self, entry: BucketEntry) -> Tensor | None:
        """The gradient that ``entry`` contributes, or None for zeros.

        Raises:
            Unsupported: it is sparse.
        """
        gradient = entry.parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise sparse_gradient(f"rank {self.aggregator.communicator.rank}", entry.name)
        return gradient

    @torch.no_grad()
    def write_back(self, unused: Collection[Tensor] = ()) -> None:
        """Write the results into ``p.grad``, but of parameters in ``unused``."""
        for bucket in self.buckets:
            bucket.take_update()
            if bucket.stays and not unused:  # nothing to decide or to copy; of many small parameters this is the cost
                for entry in bucket.entries:
                    entry.parameter.grad = entry.view
                continue
            targets, views = [], []
            for entry in bucket.entries:
                parameter = entry.parameter
                if parameter in unused:
                    continue
                if entry.stays:
                    parameter.grad = entry.view
                else:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    targets.append(parameter.grad)
                    views.append(entry.view)
            if targets:
                torch._foreach_copy_(targets, views)

    def reset(self) -> None:
        """The step is over, or has failed."""
        self.running = False
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.entries)
            bucket.update = None
            for entry in bucket.entries:
                entry.arrived = False
