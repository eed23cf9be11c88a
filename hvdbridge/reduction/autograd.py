"""Hooks of modules and of autograd that a synchronizer registers, and checks within backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from hvdbridge.errors import Unsupported


class ModuleHook:
    """A forward hook that calls ``method(output)``, or a pre-hook that calls ``method()``, by a weak reference.

    ``copy.deepcopy``, ``AveragedModel`` and ``torch.save`` copy the hooks of a module. A copy of this hook does
    nothing, because the copy of a model belongs to no synchronizer.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, model: Module, args: Any, *output: Any) -> None:
        if (method := self._method()) is not None:
            method(*output)

    def __reduce__(self) -> Any:
        # nullcontext().__exit__ ignores all arguments, and it unpickles where hvdbridge is not installed
        return getattr, (nullcontext(), "__exit__")


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queue ``callback`` for the end of the running backward, which raises the callback's errors.

    Raises:
        Unsupported: see :func:`refuse_reentrant`.
    """
    refuse_reentrant()
    Variable._execution_engine.queue_callback(callback)


def reachable_leaves(nodes: Iterable[Any]) -> set[Tensor]:
    """Return the leaf tensors for which a backward from these ``grad_fn`` nodes computes gradients."""
    visited = set(nodes)
    stack = list(visited)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in visited:
                visited.add(node)
                stack.append(node)
    return {node.variable for node in visited if node.name() == "torch::autograd::AccumulateGrad"}


def refuse_reentrant() -> None:
    """Check, within a hook of autograd, that this backward does not run inside another one.

    Raises:
        Unsupported: it does (reentrant activation checkpointing), so its end is not the end of the step.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise Unsupported(
                "Reentrant activation checkpointing runs a backward inside backward, and gradients would be "
                "aggregated before they are complete. Use checkpoint(..., use_reentrant=False)."
            )
        frame = frame.f_back  # type: ignore[assignment]


def refuse_compiled_autograd() -> None:
    """Check that backwards are not compiled.

    Raises:
        Unsupported: compiled autograd is enabled, which would compile the hooks that aggregate and never run them.
    """
    dynamo = sys.modules.get("torch._dynamo")  # not imported by scripts that compile nothing, and slow to import
    if dynamo is not None and dynamo.config.compiled_autograd:
        raise Unsupported(
            "torch._dynamo.config.compiled_autograd compiles what aggregates gradients within backward (and so does "
            "optimize_ddp='python_reducer', which needs it). Leave it False: torch.compile of the model, or of the "
            "step, compiles forward and backward of the model itself without it."
        )


def inside_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
