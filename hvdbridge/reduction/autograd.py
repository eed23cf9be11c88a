"""Hooks of modules and of autograd: what they call, and when."""

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
    """A forward hook (pre-hook) that calls ``method(output)`` (``method()``), and does not keep its object alive.

    Modules carry their hooks into ``copy.deepcopy``, ``AveragedModel`` and ``torch.save``. A copy of this one does
    nothing: the copy of a model belongs to no synchronizer, whose threads and sockets cannot be copied, either.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, model: Module, args: Any, *output: Any) -> None:
        if (method := self._method()) is not None:
            method(*output)

    def __reduce__(self) -> Any:
        # This takes any arguments and returns None, and what is saved loads where hvdbridge is not installed
        return getattr, (nullcontext(), "__exit__")


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call ``callback`` when the running backward is complete; its errors leave backward().

    Raises:
        Unsupported: see :func:`refuse_reentrant`.
    """
    refuse_reentrant()
    Variable._execution_engine.queue_callback(callback)


def reached(nodes: Iterable[Any]) -> set[Tensor]:
    """The leaf tensors that a backward from these ``grad_fn`` nodes would give gradients."""
    found = set(nodes)
    open_ones = list(found)
    while open_ones:
        for node, _ in open_ones.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                open_ones.append(node)
    return {node.variable for node in found if node.name() == "torch::autograd::AccumulateGrad"}


def refuse_reentrant() -> None:
    """Called in an autograd hook.

    Raises:
        Unsupported: this backward runs inside another one (reentrant activation checkpointing), so its end is
            not the end of the step.
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
    """
    Raises:
        Unsupported: backwards are compiled, and with them the hooks that aggregate, of which nothing is left then.
    """
    dynamo = sys.modules.get("torch._dynamo")  # a script that compiles nothing has not imported it
    if dynamo is not None and dynamo.config.compiled_autograd:
        raise Unsupported(
            "torch._dynamo.config.compiled_autograd compiles what aggregates gradients within backward (and so does "
            "optimize_ddp='python_reducer', which needs it). Leave it False: torch.compile of the model, or of the "
            "step, compiles forward and backward of the model itself without it."
        )


def inside_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
