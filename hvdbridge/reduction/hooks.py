"""HookSource: gradients from hooks of autograd and our own reducer, for MPI and Horovod.

Rules:

1. ``p.grad`` holds the results when backward returns. An engine callback, queued by the first gradient, waits for them.
2. As in DDP the forward decides whether its backward aggregates, and only the first backward after it does.
3. As in DDP hooks of the user run before a gradient is aggregated, whenever they were registered, and may change it:
   ours are post-hooks of the AccumulateGrad nodes. A user's hook must not remove the gradient.
4. As in DDP a backward that aggregates must produce all gradients; with ``find_unused_parameters``, those of all
   parameters that the loss depends on. Then a used-map is reduced at the end of the step, and a parameter that
   no rank used keeps its previous gradient. With ``static_graph`` the used-map of the first step holds for all steps.
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
from hvdbridge.reduction.autograd import ModuleHook, at_end_of_backward, reachable_leaves
from hvdbridge.reduction.reducer import BucketEntry, Reducer, make_buckets
from hvdbridge.reduction.source import Options, Source


class HookSource(Source):
    """Feeds an :class:`Aggregator` from hooks on the AccumulateGrad nodes of the parameters."""

    def __init__(
        self, model: Module, optimizers: list[Optimizer], params: Mapping[str, Parameter], aggregator: Aggregator,
        options: Options,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizers, params, aggregator, options)
        self._static_used: list[int] | None = None  # static graph: the first step's used-map
        self._output_nodes: list[Any] = []  # with find_unused: output nodes of forwards that this backward has reached
        self.reducer = Reducer(make_buckets(params, options), aggregator)
        self._dropped: list[Tensor] = []  # parameters whose gradients hooks of the user removed before ours ran
        self._module_attributes: dict[str, Any] = {}  # the user's module's __dict__
        self._accumulate_nodes: list[Any] = []
        self._handles: list[Any] = []
        self._hook(params.values())
        if options.wrapper is None:
            self._module_attributes = vars(getattr(model, "_orig_mod", model))  # torch.compile's module sets them there
            self._handles.append(model.register_forward_pre_hook(ModuleHook(self.before_forward)))
            self._handles.append(model.register_forward_hook(ModuleHook(self.after_forward)))
        else:
            options.wrapper.init_wrapper(model)

    def _hook(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            node = get_gradient_edge(parameter).node
            self._accumulate_nodes.append(node)  # autograd drops a node, and its hooks, without a reference to it
            self._handles.append(node.register_hook(partial(self.ready, self.reducer.entries[parameter])))

    def ready(self, entry: BucketEntry, _: Any = (), gradients: Sequence[Tensor | None] = ()) -> None:
        """Hook of an AccumulateGrad node: pass the parameter's gradient to the reducer if this backward aggregates."""
        if entry.parameter.grad is not None:  # as in DDP, an undefined gradient does not count as use
            self.accumulated.append(entry.parameter)
        if not self.backward_aggregates(entry.parameter):
            return
        if entry.parameter.grad is None and any(gradient is not None for gradient in gradients):
            self._dropped.append(entry.parameter)
        self.reducer.arrive(entry)

    def begin_step(self) -> None:
        at_end_of_backward(self._finish)
        self.begin_aggregation()

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
        self._accumulate_nodes.clear()
        self._module_attributes.pop("require_backward_grad_sync", None)

    @property
    def _aggregates(self) -> bool:
        """True if the next forward's backward aggregates; as for DDP the user may set the module's attribute, too."""
        return self.synchronizing and bool(self._module_attributes.get("require_backward_grad_sync", True))

    def before_forward(self) -> None:
        """Forward pre-hook of the model."""
        self.begin_forward(self._aggregates)

    def after_forward(self, output: Any) -> None:
        """Forward hook of the model."""
        if not (self._aggregates and torch.is_grad_enabled()):
            return
        self.backward_expected = True
        if self.find_unused:
            for tensor in self.output_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, *_: Any) -> None:
        """Hook of an output's node, called in backward: record the node for :meth:`_check_complete`."""
        self._output_nodes.append(torch._C._current_autograd_node())

    def _finish(self) -> None:
        """Engine callback at the end of backward: finish the step and write the results into ``p.grad``."""
        try:
            dropped_later = [p for p in self.accumulated if p.grad is None and self.reducer.entries[p].arrived]
            self.check_dropped([*self._dropped, *dict.fromkeys(dropped_later)])
            self._check_complete()
            self.check_unchanged()
            missing = [e.parameter for bucket in self.reducer.unsubmitted for e in bucket.entries if not e.arrived]
            previous = {p: p.grad.clone() for p in missing if p.grad is not None}
            self.reducer.submit_rest()
            pending = self._start_used_map()
            buffers = None if self.aggregator.joining else self.send_buffers()
            self.aggregator.end()
            unused = self._take_used_map(pending)
            self.reducer.write_back(unused)
            with torch.no_grad():
                for parameter, gradient in previous.items():
                    if parameter in unused and parameter.grad is not None:
                        parameter.grad.copy_(gradient)  # p.grad may be a view of the bucket
            self.await_buffers(buffers)
        finally:
            self._reset()

    def _check_complete(self) -> None:
        """Check that this backward produced the gradients that rule 4 requires.

        Raises:
            StepError: some are missing.
        """
        if not (self.static_graph or self.reducer.unsubmitted):
            return
        arrived = {p for p, entry in self.reducer.entries.items() if entry.arrived}
        if self.static_graph:
            self.check_static(arrived)
        elif not self.find_unused or (reachable_leaves(self._output_nodes) & self.names.keys()) - arrived:
            raise self.incomplete_error(arrived)

    def _start_used_map(self) -> Submission[Tensor] | None:
        if not (self.find_unused or (self.static_graph and self._static_used is None)):
            return None
        used = {id(p) for p in self.accumulated}
        flags = torch.tensor([id(p) in used for p in self.reducer.entries], dtype=torch.uint8, device="cpu")
        return self.aggregator.scheduler.submit(Submission(used_map(flags), self.aggregator.control))

    def _take_used_map(self, pending: Submission[Tensor] | None) -> set[Tensor]:
        """Wait for the used-map, and return the parameters that no rank used."""
        used = self._static_used if pending is None else pending.wait().tolist()
        if self.static_graph:
            self._static_used = used
        return set() if used is None else {p for p, flag in zip(self.reducer.entries, used, strict=True) if not flag}

    def _reset(self) -> None:
        self.reducer.reset()
        self._output_nodes.clear()
        self._dropped.clear()
        self.end_step()


def used_map(flags: Tensor) -> Generator[Collective, Tensor, Tensor]:
    """Reduce flags of used parameters over the ranks: uint8 ``[parameters]``, 1 where any rank has a gradient."""
    return (yield AllReduce(flags, "max"))
