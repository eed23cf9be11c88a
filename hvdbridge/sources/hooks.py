"""Our own reducer: gradients are gathered by autograd hooks into flat buckets; for MPI and Horovod.

Rules:

1. Buckets are fixed, in reverse order of registration, as backward produces gradients; one dtype and device each.
2. Handed in strictly in index order: a bucket that is ready early waits.
3. The end of backward closes what is incomplete: a parameter without a new gradient counts as the gradient it
   holds, or zeros.
4. Results stand in ``p.grad`` when backward returns: an engine callback, queued by the first gradient, waits.
   With ``gradient_as_bucket_view`` they are views of the buckets, as in DDP, and are not copied.
5. With ``find_unused`` a used-map ends the step: a parameter unused on every rank keeps its old gradient. So does one
   that was frozen since, as no optimizer may move it; without the map all ranks must have frozen it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hvdbridge.aggregator import Aggregator, Piece
from hvdbridge.bucket import Layout, Views, cut_layouts
from hvdbridge.collectives import AllGather, AllReduce, Collective, used_here
from hvdbridge.errors import StepError, Unsupported
from hvdbridge.flows import Pending
from hvdbridge.module_hook import BeforeForward
from hvdbridge.replicate import broadcast_tensors
from hvdbridge.sources.base import Options, Source, at_end_of_backward, refuse_reentrant


@dataclass(eq=False)
class Slot:
    """Where one parameter's gradient goes."""

    name: str
    parameter: Parameter
    view: Tensor
    bucket: FlatBucket
    stays: bool  # the result is not copied: p.grad becomes the view
    arrived: bool = False
    kept: Tensor | None = None  # the gradient to put back if no rank used the parameter


@dataclass(eq=False)
class FlatBucket:
    layout: Layout
    buffer: Tensor
    slots: list[Slot] = field(default_factory=list)
    stays: bool = True  # all its slots do
    missing: int = 0
    update: Tensor | None = None

    def deliver(self, update: Tensor | None) -> None:
        self.update = update


def make_buckets(params: Mapping[str, Parameter], options: Options) -> list[FlatBucket]:
    """The flat buckets of :func:`~hvdbridge.bucket.cut_layouts`, and where in them each gradient goes."""
    buckets = []
    for layout in cut_layouts(params, options.bucket_bytes):
        first = params[layout.names[0]]
        bucket = FlatBucket(layout, layout.empty(first.dtype, first.device))
        views = Views(layout, bucket.buffer)
        for name, p in ((name, params[name]) for name in layout.names):
            # An optimizer that runs over many parameters at once wants gradients that lie in memory as they do.
            stays = options.gradient_as_bucket_view and p.is_contiguous()
            bucket.slots.append(Slot(name, p, views[name], bucket, stays))
            bucket.stays &= stays
        bucket.missing = len(bucket.slots)
        buckets.append(bucket)
    return buckets


class HookSource(Source):
    """Feeds an :class:`Aggregator` from ``register_post_accumulate_grad_hook``."""

    def __init__(
        self,
        params: Mapping[str, Parameter],
        aggregator: Aggregator,
        options: Options,
        hooked: Iterable[Parameter] | None = None,
    ) -> None:
        super().__init__(aggregator)
        self.find_unused = options.find_unused_parameters
        self.buckets = make_buckets(params, options)
        self._slots = {slot.parameter: slot for bucket in self.buckets for slot in bucket.slots}
        self._next = 0
        self._frozen: set[Tensor] = set()
        self._backward = -1
        self._buffers: list[Mapping[str, Tensor | None]] = []  # each module's own, which may be given new ones
        self.root = 0  # whose buffers count
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self.ready, self._slots[p]))
            for p in (params.values() if hooked is None else hooked)
        ]

    def ready(self, slot: Slot, _: Tensor | None = None) -> None:
        """A gradient has arrived (called by autograd, once per parameter and backward)."""
        self.touched.append(slot.parameter)
        if not self.synchronizing:
            return
        backward = torch._C._current_graph_task_id()
        if not self.running:
            at_end_of_backward(self._finish)
            self._backward = backward
            self.begin()
        elif backward != self._backward:
            refuse_reentrant()
            raise StepError(
                f"rank {self.aggregator.communicator.rank}: a backward began before the end of another. Either an "
                "exception left that one when some gradients had been sent, and other ranks wait for the rest: end the "
                "job. Or a Function calls backward() within its own, whose gradients are not complete by then."
            )
        slot.arrived = True
        slot.bucket.missing -= 1
        if slot.bucket.missing == 0:
            self._advance()

    @contextmanager
    def join(self) -> Iterator[None]:
        yield
        self.aggregator.catch_up()
        self.aggregator.joined = True
        while self._announce():
            self._shadow()

    def _shadow(self) -> None:
        """Take part in one step with weight 0, so it does not matter what the buckets hold."""
        self.begin()
        self._close()
        buffers = self._send_buffers()
        self.aggregator.end()
        self._await(buffers)
        self._reset()
        self.aggregator.catch_up()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def broadcast_buffers(self, model: Module, wanted: bool) -> None:
        """At the end of each step give all ranks the buffers of the first rank with data.

        What a forward sees is what DDP, which sends them at the beginning of the next one, lets it see; but no
        forward starts a collective, so one rank may evaluate alone: the module is the user's own.
        """
        self._buffers = [module._buffers for module in model.modules()] if wanted else []
        self._handles.append(model.register_forward_pre_hook(BeforeForward(self._before_forward)))

    def _before_forward(self) -> None:
        if self.aggregator.joining and torch.is_grad_enabled() and self.synchronizing:
            self._announce()

    def _send_buffers(self) -> Pending[None] | None:
        """They go before ``end()``, which may start what runs on in the background: nobody waits for that here."""
        found = {id(buffer): buffer for own in self._buffers for buffer in own.values() if buffer is not None}
        if not found:
            return None
        aggregator = self.aggregator
        return aggregator.driver.submit(Pending(broadcast_tensors(found.values(), self.root), aggregator.communicator))

    def _await(self, buffers: Pending[None] | None) -> None:
        if buffers is not None:
            buffers.wait()
            self.aggregator.driver.order()  # the next forward reads them

    def _announce(self) -> bool:
        """Within ``join()``: tell who still has data; False when nobody has. Called by every rank alike."""
        aggregator = self.aggregator
        rows = aggregator.driver.run(gather_flag(not aggregator.joined), aggregator.control)
        active = [rank for rank, flag in enumerate(rows) if flag]
        if active:
            self.root = active[0]
        return bool(active)

    def run(self) -> None:
        """One step without a backward: aggregate what stands in ``p.grad`` now."""
        self.begin()
        self._finish()

    def _advance(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            self._fill(bucket)
            piece = Piece(bucket.layout, bucket.buffer, bucket.deliver)
            self.aggregator.submit(piece, last=self._next == len(self.buckets))

    @torch.no_grad()
    def _fill(self, bucket: FlatBucket) -> None:
        """Copy the gradients in, all at once: one call instead of one per parameter."""
        views, grads = [], []
        for slot in bucket.slots:
            grad = slot.parameter.grad
            if grad is None:
                slot.view.zero_()
                continue
            if grad.is_sparse:
                raise Unsupported(
                    f"rank {self.aggregator.communicator.rank}: parameter {slot.name!r} has a sparse gradient, which "
                    "no policy takes. Use sparse=False in its Embedding."
                )
            if not slot.arrived and (self.find_unused or slot.parameter in self._frozen):
                slot.kept = grad.clone()
            if grad is not slot.view:
                views.append(slot.view)
                grads.append(grad)
        if views:
            torch._foreach_copy_(views, grads)

    def _close(self) -> Pending[Tensor] | None:
        """Hand in what is incomplete, and start the used-map."""
        incomplete = self.buckets[self._next :]
        if incomplete:  # else nothing is frozen; of many small parameters looking at each is a cost
            missing = {slot.parameter for bucket in incomplete for slot in bucket.slots}.difference(self.touched)
            self._frozen = {parameter for parameter in missing if not parameter.requires_grad}
        for bucket in incomplete:
            bucket.missing = 0
        self._advance()
        if not self.find_unused:
            return None
        used = {id(p) for p in self.touched}
        flags = torch.tensor([id(slot.parameter) in used for slot in self._slots.values()], dtype=torch.uint8)
        control = self.aggregator.control
        return self.aggregator.driver.submit(Pending(used_map(flags), control))

    def _finish(self) -> None:
        try:
            pending = self._close()
            buffers = self._send_buffers()
            self.aggregator.end()
            used = None if pending is None else pending.wait().tolist()
            self._write_back(used)
            self._await(buffers)
        finally:
            self._reset()

    @torch.no_grad()
    def _write_back(self, used: list[int] | None) -> None:
        # With a used-map what one rank has frozen and another uses is written on both
        unused = self._frozen if used is None else {p for p, flag in zip(self._slots, used, strict=True) if not flag}
        for bucket in self.buckets:
            assert bucket.update is not None
            used_here(bucket.update)
            if bucket.update.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(bucket.update)
            if bucket.stays and not unused:  # nothing to decide or to copy; of many small parameters this is the cost
                for slot in bucket.slots:
                    slot.parameter.grad = slot.view
                continue
            targets, views = [], []
            for slot in bucket.slots:
                parameter = slot.parameter
                if parameter in unused:
                    if parameter.grad is not None and slot.kept is not None:
                        parameter.grad.copy_(slot.kept)
                elif slot.stays:
                    parameter.grad = slot.view
                else:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    targets.append(parameter.grad)
                    views.append(slot.view)
            if targets:
                torch._foreach_copy_(targets, views)

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            bucket.update = None
            for slot in bucket.slots:
                slot.arrived = False
                slot.kept = None
        self._next = 0
        self._frozen = set()
        self.finished()


def gather_flag(flag: bool) -> Generator[Collective, Tensor, list[int]]:
    """Every rank's flag, in rank order."""
    rows = yield AllGather(torch.tensor([flag], dtype=torch.uint8))
    return rows.flatten().tolist()


def used_map(flags: Tensor) -> Generator[Collective, Tensor, Tensor]:
    """Which parameters got a gradient on any rank: uint8, 1 where used."""
    return (yield AllReduce(flags, "max"))
