"""What a synchronizer makes of the user's model and optimizers, and which it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.reduction.parameters import listed, refuse_meta, refuse_sharded
from hvdbridge.reduction.source import refuse_compiled_autograd
from hvdbridge.reduction.wrapper import Wrapper

Optimizers = Optimizer | Sequence[Optimizer] | None


def refuse(replaced: Optimizer, optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook of an optimizer that was wrapped, and of what is around it, which has the same hooks."""
    if optimizer is replaced:
        raise StepError("step() of the optimizer that was wrapped. Use sync.optimizer: its gradients are aggregated.")


def refuse_model(model: Module, params: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """
    Args:
        params: what is to be aggregated.
        tensors: the parameters and buffers that are to be synchronized.

    Raises:
        ConfigurationError: a DistributedDataParallel of torch's own is in the model.
        Unsupported: tensors are sharded or without values, some of ``params`` have optimizers that step within
            backward, or backwards are compiled.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not isinstance(module, Wrapper):
            raise ConfigurationError(
                f"{name or 'the model'} is a DistributedDataParallel of torch's, which averages gradients by itself. "
                "Give the bare module: ddp.module."
            )
    refuse_compiled_autograd()
    refuse_sharded(tensors)
    refuse_meta(tensors)
    if held := [name for name, p in params.items() if hasattr(p, "_in_backward_optimizers")]:
        raise Unsupported(
            f"{listed(held)}: _apply_optimizer_in_backward makes optimizers step by gradients of this rank alone, "
            "before they are aggregated. Let one optimizer step after backward()."
        )


def frozen(tensor: Tensor) -> bool:
    """Whether it is a parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def like(optimizer: Optimizers, wrapped: list[Optimizer]) -> Any:
    """``wrapped`` in the structure that the user gave."""
    if optimizer is None:
        return None
    return wrapped[0] if isinstance(optimizer, Optimizer) else type(optimizer)(wrapped)  # type: ignore[call-arg]
