"""What a synchronizer makes of the user's model and optimizers, and which it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.reduction.parameters import listed
from hvdbridge.reduction.wrapper import Wrapper

Optimizers = Optimizer | Sequence[Optimizer] | None


def refuse(replaced: Optimizer, optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook of an optimizer that was wrapped, and of what is around it, which has the same hooks."""
    if optimizer is replaced:
        raise StepError("step() of the optimizer that was wrapped. Use sync.optimizer: its gradients are aggregated.")


def refuse_optimizers_within(params: Mapping[str, Tensor]) -> None:
    """
    Raises:
        Unsupported: some of ``params`` have optimizers that step within backward.
    """
    if held := [name for name, p in params.items() if hasattr(p, "_in_backward_optimizers")]:
        raise Unsupported(
            f"{listed(held)}: _apply_optimizer_in_backward makes optimizers step by gradients of this rank alone, "
            "before they are aggregated. Let one optimizer step after backward()."
        )


def refuse_ddp(model: Module) -> None:
    """
    Raises:
        ConfigurationError: a DistributedDataParallel of torch's own is in it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and not isinstance(module, Wrapper):
            raise ConfigurationError(
                f"{name or 'the model'} is a DistributedDataParallel of torch's, which averages gradients by itself. "
                "Give the bare module: ddp.module."
            )


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def like(optimizer: Optimizers, wrapped: list[Optimizer]) -> Any:
    """``wrapped`` in the structure that the user gave."""
    if optimizer is None:
        return None
    return wrapped[0] if isinstance(optimizer, Optimizer) else type(optimizer)(wrapped)  # type: ignore[call-arg]


@contextmanager
def nothing() -> Iterator[None]:
    yield
