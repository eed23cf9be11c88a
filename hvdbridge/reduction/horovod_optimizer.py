"""Gradients from Horovod's own DistributedOptimizer.

Rules:

1. The optimizer is a real ``hvd.DistributedOptimizer``; methods are replaced on the instance. Its hooks hand each
   gradient to our reducer, so one negotiation serves a whole bucket; what it does not hook, we do. Those that Horovod
   makes itself refuse a gradient that the user's hooks have dropped; an optimizer that comes with them keeps them.
2. Its bookkeeping (``_allreduce_delay``) is kept as if each backward were complete, because the reducer ends the step
   when backward returns: ``step()`` and ``zero_grad()`` find nothing outstanding.
3. Horovod's hooks cannot be taken off. After :meth:`HorovodSource.remove` they lead nowhere: gradients stay local.
4. It shares groups, state and hooks with the user's optimizer, so a scheduler or a hook's handle on that one has its
   effect; other attributes it has as they are when it is made.
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
    """Feeds an :class:`Aggregator` from ``hvd.DistributedOptimizer`` objects (see :func:`wrap_optimizer`). These take
    the place of all optimizers but those that shard their state, of which Horovod cannot make any."""

    def __init__(
        self, model: Module, optimizers: list[torch.optim.Optimizer], params: Mapping[str, Parameter],
        aggregator: Aggregator, options: Options,
    ) -> None:  # fmt: skip
        names = {parameter: name for name, parameter in params.items()}
        wrapped = [each if shards_state(each) else wrap_optimizer(each, names) for each in optimizers]
        self._feeds: list[dict[Parameter, Callable[..., None]]] = []
        super().__init__(model, wrapped, params, aggregator, options)

    def _hook(self, parameters: Iterable[Parameter]) -> None:
        left = dict.fromkeys(parameters)
        for optimizer in self.optimizers:
            held: set[Parameter] = getattr(optimizer, "_requires_update", set())
            share = [p for p in left if p in held]  # two optimizers may hold a parameter
            if hasattr(optimizer, "_requires_update"):
                self._feeds.append({p: partial(self.ready, self.reducer.entries[p]) for p in share})
                take_over(optimizer, self._feeds[-1])
            left = {p: None for p in left if p not in held}
        super()._hook(left)

    def remove(self) -> None:
        super().remove()
        for feeds in self._feeds:
            feeds.clear()


def take_over(optimizer: Any, feeds: Mapping[Parameter, Callable[..., None]]) -> None:
    """Have Horovod's hooks call ``feeds``; what is not or no longer in there is left as it is."""
    base: Any = type(optimizer).__mro__[1]  # the user's optimizer class, below Horovod's

    def ready(parameter: Parameter, *given: Any) -> tuple[None, None]:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        feed = feeds.get(parameter)
        if feed is not None:
            feed(*given)
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
    # Horovod's step() calls this one, and torch would run step hooks in both. A scheduler's wrapper stays.
    vars(optimizer).setdefault("step", base.step.__get__(optimizer))


def wrap_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> torch.optim.Optimizer:
    """A real ``hvd.DistributedOptimizer`` around ``optimizer`` that shares its attributes, hooks and state."""
    import horovod.torch as hvd

    if hasattr(optimizer, "_requires_update"):
        return optimizer
    held = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(names.get(p, f"hvdbridge.outside.{i}"), p) for i, p in enumerate(held)]
    grads: list[Tensor | None] = [p.grad for p in held]
    kind = hvd.optimizer._DistributedOptimizer
    theirs = type(optimizer)
    before, kind._make_hook = kind._make_hook, make_hook
    optimizer.__class__ = type(theirs.__name__, (theirs,), {"__init__": partialmethod(construct, optimizer.defaults)})
    try:
        wrapped: Any = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    finally:
        kind._make_hook = before
        optimizer.__class__ = theirs
    if not wrapped._grad_accs:  # at size 1 Horovod registers no hooks, and a lossy or clipping policy would do nothing
        wrapped._register_hooks()
    for p, grad in zip(held, grads, strict=True):
        p.grad = grad  # Horovod may have filled in zeros, which weight decay and momentum would act on
    mine: Any = optimizer
    if "step" in vars(mine):  # a scheduler's: it would warn, for it never sees a step of the optimizer that it knows
        mine._opt_called = True
    wrapped.__dict__.update({name: value for name, value in vars(mine).items() if name != "step"})
    optimizer.register_load_state_dict_post_hook(partial(share_loaded, WeakSet((optimizer, wrapped))))
    return wrapped  # type: ignore[no-any-return]


def construct(optimizer: Any, defaults: dict[str, Any], params: Any) -> None:
    """In the place of the user's constructor, which Horovod calls with parameters alone, and which may want more."""
    torch.optim.Optimizer.__init__(optimizer, params, defaults)


def make_hook(optimizer: Any, parameter: Parameter) -> Callable[..., None]:
    """In the place of Horovod's."""

    def hook(*given: object) -> None:
        optimizer._allreduce_grad_async(parameter, *given)

    return hook


def share_loaded(optimizers: Iterable[torch.optim.Optimizer], loaded: torch.optim.Optimizer) -> None:
    """After ``load_state_dict()`` of any, which makes new objects: all have these."""
    for optimizer in optimizers:
        optimizer.state, optimizer.param_groups = loaded.state, loaded.param_groups
