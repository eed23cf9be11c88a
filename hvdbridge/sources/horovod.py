"""Gradients from Horovod's own DistributedOptimizer.

Rules:

1. The optimizer is a real ``hvd.DistributedOptimizer``; three methods are replaced on the instance. Its
   hooks hand each gradient to our reducer, so one negotiation serves a whole bucket.
2. Its bookkeeping (``_handles``, ``_allreduce_delay``) is kept as if each backward were complete, because the reducer
   ends the step when backward returns: ``step()`` and ``zero_grad()`` find nothing outstanding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdbridge.aggregator import Aggregator
from hvdbridge.sources.base import Options
from hvdbridge.sources.hooks import HookSource


class HorovodSource(HookSource):
    """Feeds an :class:`Aggregator` from ``hvd.DistributedOptimizer`` objects (see :func:`wrap_optimizer`)."""

    def __init__(
        self,
        params: Mapping[str, Parameter],
        aggregator: Aggregator,
        options: Options,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        wrapped = list(optimizers)
        owned = {p for optimizer in wrapped for group in optimizer.param_groups for p in group["params"]}
        known = set(params.values())
        others = [p for p in params.values() if p not in owned]
        super().__init__(params, aggregator, options, hooked=others)
        fed: set[Parameter] = set()
        for optimizer in wrapped:
            self._take_over(optimizer, known, fed)

    def _take_over(self, optimizer: Any, known: set[Parameter], fed: set[Parameter]) -> None:
        base: Any = type(optimizer).__mro__[1]  # the user's optimizer class, below Horovod's
        mine = {p for p in optimizer._requires_update if p in known} - fed  # two optimizers may share a parameter
        fed |= mine

        def ready(parameter: Parameter) -> tuple[None, None]:
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
            if parameter in mine:
                self.ready(self._slots[parameter])
            return None, None

        def synchronize() -> None:
            optimizer._handles.clear()
            optimizer._synchronized = True

        def zero_grad(set_to_none: bool = True) -> None:
            optimizer._handles.clear()
            base.zero_grad(optimizer, set_to_none)

        optimizer._allreduce_grad_async = ready
        optimizer.synchronize = synchronize
        optimizer.zero_grad = zero_grad


def wrap_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> torch.optim.Optimizer:
    """A real ``hvd.DistributedOptimizer`` around ``optimizer`` that carries its state and defaults on."""
    import horovod.torch as hvd

    if hasattr(optimizer, "_requires_update"):
        return optimizer
    held = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(names.get(p, f"hvdbridge.outside.{i}"), p) for i, p in enumerate(held)]
    grads: list[Tensor | None] = [p.grad for p in held]
    wrapped: Any = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    if not wrapped._grad_accs:  # at size 1 Horovod registers no hooks, and a lossy or clipping policy would do nothing
        wrapped._register_hooks()
    for p, grad in zip(held, grads, strict=True):
        p.grad = grad  # Horovod may have filled in zeros, which weight decay and momentum would act on
    wrapped.state.update(optimizer.state)
    wrapped.defaults = optimizer.defaults
    return wrapped  # type: ignore[no-any-return]
