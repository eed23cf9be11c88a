"""Gradients from autograd's hooks, through our own reducer; for MPI and Horovod.

Rules:

1. Results are in ``p.grad`` when backward returns: an engine callback, queued by the first gradient, waits.
2. As in DDP the forward decides whether its backward aggregates, and one backward follows it that does.
3. As in DDP hooks of the user see and may change a gradient before it is aggregated, whenever they were registered:
   ours are behind the nodes that accumulate. They must not drop it.
4. As in DDP every parameter gets a gradient in a backward that aggregates, or, with ``find_unused_parameters``, every
   one that the loss depends on. Then a used-map ends the step: a parameter that no rank used keeps its old gradient.
   With ``static_graph`` the first step's map counts for all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hvdbridge.execution.flow import Submission
from hvdbridge.policy.collectives import AllReduce, Collective
from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.autograd import ModuleHook, at_end_of_backward, reached
from hvdbridge.reduction.reducer import BucketEntry, Reducer, make_buckets
from hvdbridge.reduction.source import Options, Source


class HookSource(Source):
    """Feeds an :class:`Aggregator` by hooks of autograd."""

    def __init__(
        self, model: Module, optimizers: list[Optimizer], params: Mapping[str, Parameter], aggregator: Aggregator,
        options: Options,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizers, params, aggregator, options)
        self._static_used: list[int] | None = None  # the first step's map
        self._roots: list[Any] = []  # with find_unused: the nodes of the forward's outputs that this backward passed
        self.reducer = Reducer(make_buckets(params, options), aggregator)
        self._dropped: list[Tensor] = []  # whose gradients hooks of the user had dropped when they arrived
        self._attributes: dict[str, Any] = {}  # of the user's module
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._hook(params.values())
        if options.wrapper is None:
            self._attributes = vars(getattr(model, "_orig_mod", model))  # where torch.compile's module sets them
            self._handles.append(model.register_forward_pre_hook(ModuleHook(self.before_forward)))
            self._handles.append(model.register_forward_hook(ModuleHook(self.after_forward)))
        else:
            options.wrapper.adopt(model)

    def _hook(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            node = get_gradient_edge(parameter).node
            self._nodes.append(node)  # a node that nobody holds loses its hooks
            self._handles.append(node.register_hook(partial(self.ready, self.reducer.entries[parameter])))

    def ready(self, entry: BucketEntry, _: Any = (), given: Sequence[Tensor | None] = ()) -> None:
        """A gradient has arrived (called by autograd, once per parameter and backward, with what it added)."""
        if entry.parameter.grad is not None:  # as for DDP an undefined one does not count as use
            self.touched.append(entry.parameter)
        if not self.takes(entry.parameter):
            return
        if entry.parameter.grad is None and any(gradient is not None for gradient in given):
            self._dropped.append(entry.parameter)
        self.reducer.arrive(entry)

    def begin_step(self) -> None:
        at_end_of_backward(self._finish)
        self.begin()

    def shadow(self) -> None:
        self.reducer.submit_rest()
        used = self._start_used_map()
        self.aggregator.end()
        self._take_used_map(used)
        self._reset()

    def remove(self) -> None:
        self.stop()
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        self._attributes.pop("require_backward_grad_sync", None)

    @property
    def _aggregates(self) -> bool:
        """Whether the backward of a forward does; the user may say so on the module, too, as on a DDP."""
        return self.synchronizing and bool(self._attributes.get("require_backward_grad_sync", True))

    def before_forward(self) -> None:
        """A forward of the model begins."""
        self.open_forward(self._aggregates)

    def after_forward(self, output: Any) -> None:
        """A forward of the model has returned ``output``."""
        if not (self._aggregates and torch.is_grad_enabled()):
            return
        self.expected = True
        if self.find_unused:
            for tensor in self.outputs(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_hook(self._passed)

    def _passed(self, *_: Any) -> None:
        """Called by autograd at the node of an output of a forward that aggregates."""
        self._roots.append(torch._C._current_autograd_node())

    def _finish(self) -> None:
        """All gradients of this backward are there."""
        try:
            later = [p for p in self.touched if p.grad is None and self.reducer.entries[p].arrived]
            self.check_kept([*self._dropped, *dict.fromkeys(later)])
            self._check_complete()
            self.check_unchanged()
            missing = [e.parameter for bucket in self.reducer.incomplete for e in bucket.entries if not e.arrived]
            kept = {p: p.grad.clone() for p in missing if p.grad is not None}
            self.reducer.submit_rest()
            pending = self._start_used_map()
            buffers = None if self.aggregator.joining else self.send_buffers()
            self.aggregator.end()
            unused = self._take_used_map(pending)
            self.reducer.write_back(unused)
            with torch.no_grad():
                for parameter, gradient in kept.items():
                    if parameter in unused and parameter.grad is not None:
                        parameter.grad.copy_(gradient)  # it may be a view of the bucket
            self.await_buffers(buffers)
        finally:
            self._reset()

    def _check_complete(self) -> None:
        """
        Raises:
            StepError: some parameters got no gradient although all, or those of the first step, must.
        """
        if not (self.static_graph or self.reducer.incomplete):
            return
        arrived = {p for p, entry in self.reducer.entries.items() if entry.arrived}
        if self.static_graph:
            self.check_static(arrived)
        elif not self.find_unused or (reached(self._roots) & self.names.keys()) - arrived:
            raise self.incomplete(arrived)

    def _start_used_map(self) -> Submission[Tensor] | None:
        if not (self.find_unused or (self.static_graph and self._static_used is None)):
            return None
        used = {id(p) for p in self.touched}
        flags = torch.tensor([id(p) in used for p in self.reducer.entries], dtype=torch.uint8, device="cpu")
        return self.aggregator.scheduler.submit(Submission(used_map(flags), self.aggregator.control))

    def _take_used_map(self, pending: Submission[Tensor] | None) -> set[Tensor]:
        """The parameters that no rank used."""
        used = self._static_used if pending is None else pending.wait().tolist()
        if self.static_graph:
            self._static_used = used
        return set() if used is None else {p for p, flag in zip(self.reducer.entries, used, strict=True) if not flag}

    def _reset(self) -> None:
        self.reducer.reset()
        self._roots.clear()
        self._dropped.clear()
        self.finished()


def used_map(flags: Tensor) -> Generator[Collective, Tensor, Tensor]:
    """Which parameters got a gradient on any rank: uint8, 1 where used."""
    return (yield AllReduce(flags, "max"))
