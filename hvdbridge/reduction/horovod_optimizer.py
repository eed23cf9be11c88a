"""HorovodSource: gradients from the hooks of a real ``hvd.DistributedOptimizer``.

Rules:

1. Methods of the optimizer are replaced on the instance. So Horovod's hooks pass each gradient to our reducer, and
   Horovod negotiates once per bucket. Parameters without a hook of Horovod's get one of ours. Hooks of an optimizer
   that we construct detect gradients that the user's hooks removed; those of the user's own do not.
2. Horovod's counters (``_allreduce_delay``) are set as after a complete backward, because the reducer ends the step
   when backward returns. So Horovod's ``step()`` and ``zero_grad()`` find no operation in flight.
3. Horovod's hooks cannot be removed. After :meth:`HorovodSource.remove` they do nothing: gradients stay local.
4. The optimizer shares parameter groups, state and hooks with the user's. So an LR scheduler or a hook's handle of the
   user's optimizer has an effect on both. Other attributes are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, partialmethod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hvdbridge.reduction.aggregator import Aggregator
from hvdbridge.reduction.hooks import HookSource
from hvdbridge.reduction.replicate import shards_state
from hvdbridge.reduction.source import Options


class HorovodSource(HookSource):
    """Feeds an :class:`Aggregator` from ``hvd.DistributedOptimizer`` objects (see :func:`wrap_optimizer`).

    They replace the user's optimizers, except those that shard their state, which Horovod cannot wrap.
    """

    def __init__(
        self, model: Module, optimizers: list[torch.optim.Optimizer], params: Mapping[str, Parameter],
        aggregator: Aggregator, options: Options,
    ) -> None:  # fmt: skip
        names = {parameter: name for name, parameter in params.items()}
        wrapped = [o if shards_state(o) else wrap_optimizer(o, names) for o in optimizers]
        self._callbacks: list[dict[Parameter, Callable[..., None]]] = []
        super().__init__(model, wrapped, params, aggregator, options)

    def _hook(self, parameters: Iterable[Parameter]) -> None:
        remaining = dict.fromkeys(parameters)
        for optimizer in self.optimizers:
            registered: set[Parameter] = getattr(optimizer, "_requires_update", set())
            params = [p for p in remaining if p in registered]  # two optimizers may have the same parameter
            if hasattr(optimizer, "_requires_update"):
                self._callbacks.append({p: partial(self.ready, self.reducer.entries[p]) for p in params})
                redirect_hooks(optimizer, self._callbacks[-1])
            remaining = {p: None for p in remaining if p not in registered}
        super()._hook(remaining)

    def remove(self) -> None:
        super().remove()
        for callbacks in self._callbacks:
            callbacks.clear()


def redirect_hooks(optimizer: Any, callbacks: Mapping[Parameter, Callable[..., None]]) -> None:
    """Make Horovod's hooks call ``callbacks``; for parameters without a callback they do nothing."""
    base: Any = type(optimizer).__mro__[1]  # the user's optimizer class, base of Horovod's

    def on_gradient(parameter: Parameter, *gradients: Any) -> tuple[None, None]:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        callback = callbacks.get(parameter)
        if callback is not None:
            callback(*gradients)
        return None, None

    def synchronize() -> None:
        optimizer._handles.clear()
        optimizer._synchronized = True

    def zero_grad(set_to_none: bool = True) -> None:
        optimizer._handles.clear()
        base.zero_grad(optimizer, set_to_none)

    optimizer._allreduce_grad_async = on_gradient
    optimizer.synchronize = synchronize
    optimizer.zero_grad = zero_grad
    # Horovod's step() calls the user's, and torch would run step hooks in both. An LR scheduler's wrapper stays.
    vars(optimizer).setdefault("step", base.step.__get__(optimizer))


def wrap_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> torch.optim.Optimizer:
    """Return a ``hvd.DistributedOptimizer`` around ``optimizer`` that shares its parameter groups, hooks and state."""
    import horovod.torch as hvd

    if hasattr(optimizer, "_requires_update"):
        return optimizer
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(names.get(p, f"hvdbridge.outside.{i}"), p) for i, p in enumerate(params)]
    grads: list[Tensor | None] = [p.grad for p in params]
    horovod_class = hvd.optimizer._DistributedOptimizer
    base = type(optimizer)
    original, horovod_class._make_hook = horovod_class._make_hook, make_hook
    optimizer.__class__ = type(base.__name__, (base,), {"__init__": partialmethod(base_init, optimizer.defaults)})
    try:
        wrapped: Any = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    finally:
        horovod_class._make_hook = original
        optimizer.__class__ = base
    if not wrapped._grad_accs:  # at size 1 Horovod registers no hooks, but policies may be lossy or clip
        wrapped._register_hooks()
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad  # Horovod may have set zeros, to which weight decay and momentum would apply
    user_optimizer: Any = optimizer
    if "step" in vars(user_optimizer):  # an LR scheduler's wrapper, which would warn that it has seen no step
        user_optimizer._opt_called = True
    wrapped.__dict__.update({name: value for name, value in vars(user_optimizer).items() if name != "step"})
    optimizer.register_load_state_dict_post_hook(partial(share_loaded, WeakSet((optimizer, wrapped))))
    return wrapped  # type: ignore[no-any-return]


def base_init(optimizer: Any, defaults: dict[str, Any], params: Any) -> None:
    """Replace the constructor of the user's class, which may need arguments that Horovod does not pass."""
    torch.optim.Optimizer.__init__(optimizer, params, defaults)


def make_hook(optimizer: Any, parameter: Parameter) -> Callable[..., None]:
    """Replace Horovod's method: return a hook that also passes the accumulated gradients on (rule 1)."""

    def hook(*gradients: object) -> None:
        optimizer._allreduce_grad_async(parameter, *gradients)

    return hook


def share_loaded(optimizers: Iterable[torch.optim.Optimizer], loaded: torch.optim.Optimizer) -> None:
    """Load hook: make all optimizers share the new objects that ``load_state_dict()`` of one created."""
    for optimizer in optimizers:
        optimizer.state, optimizer.param_groups = loaded.state, loaded.param_groups
