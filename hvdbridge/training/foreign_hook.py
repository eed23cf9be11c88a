"""Run a communication hook of DistributedDataParallel as a policy, on every backend and with any number of buckets.

Rules:

1. The hook gets an object with the interface of torch's GradBucket. Its ``torch.distributed`` collectives become
   requests of the policy's flow.
2. An elementwise hook runs per bucket, during backward. A hook whose result depends on other elements of the bucket (a
   scale, a matrix of all gradients, random numbers drawn in sequence) runs once per step, on one bucket of all
   gradients. Their order is that of DDP: registered order in the first step, and its reverse in later steps. So the
   result does not depend on hvdbridge's buckets, and equals that of DDP with one bucket.
3. The hook owns its state, changes it in place, and chooses its keys. The user saves it.
4. Hooks divide by the number of ranks themselves. A rank's gradients are multiplied by the ratio of its weight to the
   mean weight.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies.dense import share_of_sum
from hvdbridge.policy.base import Aggregated, Flow, Foreign, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Views, flatten, scale
from hvdbridge.training.fiber import flow_of
from hvdbridge.training.groups import Group
from hvdbridge.training.process_group import FlowGroup, HookWorld

Hook = Callable[[Any, Any], Any]
MODULE = "torch.distributed.algorithms.ddp_comm_hooks"

ELEMENTWISE_HOOKS = {f"{MODULE}.{name}" for name in (
    "default_hooks.allreduce_hook", "default_hooks.fp16_compress_hook", "default_hooks.bf16_compress_hook",
    "debugging_hooks.noop_hook", "post_localSGD_hook.post_localSGD_hook",
)}  # fmt: skip
"""Hooks whose result for an element depends on that element alone."""

WRAPPER_HOOKS = {
    f"{MODULE}.default_hooks.{name}.<locals>.{name}_hook" for name in ("fp16_compress_wrapper", "bf16_compress_wrapper")
}
REFUSED_MODULES = {
    f"{MODULE}.optimizer_overlap_hooks": "it steps the optimizer inside of DDP's backward",
    f"{MODULE}.ddp_zero_hook": "it steps a ZeroRedundancyOptimizer inside of DDP's backward",
    f"{MODULE}.mixed_precision_hooks": "it is DDP's own, for its mixed_precision option",
}


class GradBucket:
    """A bucket with the methods of ``torch.distributed.GradBucket``, which Python code cannot construct."""

    def __init__(self, buffer: Tensor, layout: Layout, parameters: list[Tensor], index: int, last: bool) -> None:
        self._buffer, self._layout, self._parameters = buffer, layout, parameters
        self._index, self._last = index, last

    def index(self) -> int:
        """Return the index of the bucket in this step."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat gradients."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return views of :meth:`buffer`, each with the shape of its parameter."""
        return list(Views(self._layout, self._buffer[: self._layout.numel]).values())

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of :meth:`gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that :meth:`buffer` returns."""
        self._buffer = buffer


@dataclass(eq=False)
class _ModelState:
    """Mutable data of one hook and the model that it serves.

    Attributes:
        parameters: the model's parameters by name, as weak references.
        ranks: (rank, number of ranks) -> the groups and the hook's state of that rank.
        initial_state: a copy of the hook's state before the first step, or the error of the attempt to copy it.
    """

    parameters: WeakValueDictionary[str, Tensor] = field(default_factory=WeakValueDictionary)
    ranks: dict[tuple[int, int], tuple[HookWorld, Any]] = field(default_factory=dict)
    initial_state: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class ForeignHook(Foreign):
    """A policy that runs a DDP communication hook; see :func:`from_comm_hook`."""

    state: Any
    hook: Hook
    scope: Literal["bucket", "step"] = "step"
    _model_state: _ModelState = field(default_factory=_ModelState, init=False)

    deterministic = False
    unequal_weights = True

    def __post_init__(self) -> None:
        self._model_state.initial_state = _copy(self.state)

    def __repr__(self) -> str:
        return f"from_comm_hook({name_of(self.hook)}, scope={self.scope!r})"

    def init(self, params: Mapping[str, Tensor]) -> State:
        self._model_state.parameters.update(params)
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout = bucket.layout if self.scope == "bucket" else _ddp_layout(bucket)
        flat = flatten(bucket.grads, layout)
        if self.scope == "step" and layout is bucket.layout:  # a copy, because a hook may resize its buffer
            flat = flat.clone()
        scale(flat, share_of_sum(bucket))
        registered = self._model_state.parameters
        parameters = [registered[name] for name in layout.names if name in registered]
        grad_bucket = GradBucket(flat, layout, parameters, bucket.index, bucket.last)
        world, hook_state = self._world_and_state(bucket)
        result = yield from flow_of(lambda: world.run(lambda: _call_hook(self.hook, hook_state, grad_bucket)))
        if not isinstance(result, Tensor) or result.numel() != layout.numel:
            what = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise Unsupported(
                f"rank {bucket.rank}: {name_of(self.hook)} gave {what} for a bucket of {layout.numel} elements; "
                "a hook's future has one tensor of the bucket's size"
            )
        result = result.detach().reshape(-1)
        return Aggregated(result if layout is bucket.layout else flatten(Views(layout, result), bucket.layout))

    def _world_and_state(self, bucket: Bucket) -> tuple[HookWorld, Any]:
        """Return the groups and the hook's state of this rank. In a simulation one process has several ranks; all but
        the first use copies of the state."""
        ranks, key = self._model_state.ranks, (bucket.rank, bucket.size)
        if key not in ranks:
            _patch_batched_powersgd()
            first, _ = next(iter(ranks), key)
            hook_state = self.state if bucket.rank == first else _copy(self._model_state.initial_state)
            if isinstance(hook_state, Unsupported):
                raise hook_state
            world = HookWorld(FlowGroup(*key))
            ranks[key] = world, hook_state
        world, hook_state = ranks[key]
        hook_state = _replace_groups(hook_state, world)  # in each step, as a script or a hook may set another group
        if isinstance(hook_state, PostLocalSGDState) and hook_state.subgroup is None:  # torch counts CUDA devices
            hook_state.subgroup = FlowGroup(*bucket.place("node"), label="node")
        return world, hook_state


def from_comm_hook(state: Any, hook: Hook, scope: Literal["bucket", "step"] | None = None) -> Policy:
    """Return a policy that runs ``hook(state, bucket)``, a DDP communication hook, on every backend.

    hvdbridge executes the hook's collectives, with ``group=None`` or any group. So the hook also runs under MPI and
    Horovod, where ``torch.distributed`` need not be initialized. Collectives complete within the call that starts them
    (also with ``async_op=True``), in program order, so hooks of several rounds work with any number of buckets.

    Args:
        state: passed to the hook. Process groups in it, of ``torch`` or :func:`hvdbridge.new_group`, are replaced by
            hvdbridge's before each call. One state serves one model.
        hook: ``hook(state, bucket) -> Future`` of one flat tensor of the bucket's size.
        scope: ``"bucket"``: call the hook per bucket during backward, as DDP does; ``"step"``: once per step, with one
            bucket of all gradients. None: ``"bucket"`` for torch's own elementwise hooks, otherwise ``"step"``.

    Raises:
        Unsupported: the hook steps an optimizer itself.
        ConfigurationError: ``hook`` is not callable, or ``scope`` is unknown.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    >>> from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    >>> from_comm_hook(None, fp16_compress_hook).scope
    'bucket'
    >>> from_comm_hook(PowerSGDState(None), powerSGD_hook).scope
    'step'
    """
    if not callable(hook):
        raise ConfigurationError(f"hook={hook!r} cannot be called; pass from_comm_hook(state, hook), in this order")
    if scope not in (None, "bucket", "step"):
        raise ConfigurationError(f"scope={scope!r} must be 'bucket', 'step' or None")
    inner = wrapped = hook
    while wrapped is not None:
        inner, wrapped = wrapped, _wrapped_hook(wrapped)
        if why := REFUSED_MODULES.get(getattr(inner, "__module__", "")):
            raise Unsupported(f"{name_of(inner)} is no hook for hvdbridge: {why}. Step the optimizer after backward.")
    return ForeignHook(state, hook, scope or ("bucket" if _qualified_name(inner) in ELEMENTWISE_HOOKS else "step"))


def name_of(hook: Any) -> str:
    """Return the name of a hook, including torch's wrappers around it.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
    >>> name_of(fp16_compress_wrapper(allreduce_hook))
    'fp16_compress_wrapper(allreduce_hook)'
    """
    wrapped = _wrapped_hook(hook)
    if wrapped is None:
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    outer = "" if isinstance(hook, functools.partial) else hook.__qualname__.partition(".")[0]
    return f"{outer}({name_of(wrapped)})" if outer else name_of(wrapped)


def _qualified_name(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"


def _wrapped_hook(hook: Any) -> Any:
    """Return the hook inside one of torch's wrappers or a :class:`functools.partial`; None for any other hook."""
    if isinstance(hook, functools.partial):
        return hook.func
    return inspect.getclosurevars(hook).nonlocals["hook"] if _qualified_name(hook) in WRAPPER_HOOKS else None


def _call_hook(hook: Hook, state: Any, bucket: GradBucket) -> Any:
    future = hook(state, bucket)
    if not hasattr(future, "wait"):
        raise Unsupported(f"{name_of(hook)} returned {type(future).__name__}; a hook returns a torch.futures.Future")
    if not future.done():
        raise Unsupported(
            f"{name_of(hook)} returned a future that is not complete although its collectives are. "
            "Derive it from theirs, by then(), or complete it before the hook returns."
        )
    value = future.wait()
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


@functools.cache
def _patch_batched_powersgd() -> None:
    """Patch torch's batched PowerSGD, which in torch 2.13 passes one matrix to a function for a batch of matrices.

    The patch has an effect in hvdbridge's hooks alone.
    """
    original: Any = powersgd_hooks._orthogonalize

    @functools.wraps(original)
    def orthogonalize(matrices: Tensor, *args: Any, **options: Any) -> None:
        unbatched = matrices.dim() == 2 and isinstance(dist.group.WORLD, FlowGroup)
        original(matrices.unsqueeze(0) if unbatched else matrices, *args, **options)  # in place, through a view

    powersgd_hooks._orthogonalize = orthogonalize


def _ddp_layout(bucket: Bucket) -> Layout:
    """Return the layout of the bucket's parameters in DDP's order (rule 2)."""
    layout, blocks, reverse = bucket.layout, bucket.layout.blocks, bucket.step > 0

    def make() -> Layout:
        names = sorted(layout.names, key=blocks.__getitem__, reverse=reverse)
        return layout if tuple(names) == layout.names else Layout({name: layout.shapes[name] for name in names})

    return layout.derive(("as in DDP", reverse), make)


# -- The hook's state -------------------------------------------------------------------------------------------------


def _copy(state: Any) -> Any:
    """Copy a hook's state for another rank; return the error if it cannot be copied. Attributes are copied one by one,
    because torch's PowerSGDState supports copying only with an initialized default group."""
    try:
        if not hasattr(state, "process_group"):
            return copy.deepcopy(state)
        new = object.__new__(type(state))
        for name in _attribute_names(state):
            value = getattr(state, name)
            setattr(new, name, value if isinstance(value, dist.ProcessGroup) else copy.deepcopy(value))
        return new
    except Exception as error:  # copying may fail in any way, as the state is the user's
        return Unsupported(
            f"from_comm_hook: the state of type {type(state).__name__} cannot be copied ({error}), which a simulation "
            "of several ranks needs"
        )


def _attribute_names(state: Any) -> set[str]:
    slots = (name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ()))
    return {name for name in (*getattr(state, "__dict__", ()), *slots) if hasattr(state, name)}


def _replace_groups(state: Any, world: HookWorld) -> Any:
    """Return ``state`` with process groups replaced by :class:`FlowGroup`: the state itself, or its attributes."""
    if (group := _flow_group_of(state, world)) is not None:
        return group
    for name in _attribute_names(state):
        if (group := _flow_group_of(getattr(state, name), world)) is not None:
            setattr(state, name, group)
    return state


def _flow_group_of(value: Any, world: HookWorld) -> FlowGroup | None:
    """Return the :class:`FlowGroup` for a group of torch or :func:`hvdbridge.new_group`; None for any other value."""
    if not isinstance(value, dist.ProcessGroup | Group) or isinstance(value, FlowGroup):
        return None
    ranks = list(value.ranks) if isinstance(value, Group) else dist.get_process_group_ranks(value)
    rank, size = world.group.rank_and_size
    if len(ranks) == size:
        return world.group
    if rank not in ranks or max(ranks) >= size:
        raise ConfigurationError(
            f"rank {rank}: the hook's state holds a group of the ranks {ranks}, which this rank is not in"
        )
    return world.add(FlowGroup(rank, size, ranks))
