"""A communication hook of DistributedDataParallel as a policy: on every backend, with as many buckets as there are.

Rules:

1. The hook gets a look-alike of torch's GradBucket, and a ``torch.distributed`` whose collectives are the flow's.
2. A hook that treats each element by itself runs per bucket, while backward goes on. A hook whose result depends on
   what else is in the bucket (a scale, a matrix of all gradients, random numbers drawn in sequence) runs once per
   step, on one bucket of all gradients. The order is that of DDP: registered order in the first step, the reverse of
   it from then on. So the result does not depend on buckets, and is that of DDP with one bucket.
3. A hook's state is its own. The hook changes it in place and keys it as it likes; the user saves it.
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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies.dense import share_of_sum
from hvdbridge.policy.base import Aggregated, Flow, Foreign, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Views, flatten, scale
from hvdbridge.training.fiber import flow_of
from hvdbridge.training.groups import Group
from hvdbridge.training.process_group import FlowGroup, HookWorld

Hook = Callable[[Any, Any], Any]
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

ELEMENTWISE = {f"{HOOKS}.{name}" for name in (
    "default_hooks.allreduce_hook", "default_hooks.fp16_compress_hook", "default_hooks.bf16_compress_hook",
    "debugging_hooks.noop_hook", "post_localSGD_hook.post_localSGD_hook",
)}  # fmt: skip
"""Hooks whose result for an element depends on that element alone."""

WRAPPERS = {
    f"{HOOKS}.default_hooks.{name}.<locals>.{name}_hook" for name in ("fp16_compress_wrapper", "bf16_compress_wrapper")
}
REFUSED = {
    f"{HOOKS}.optimizer_overlap_hooks": "it steps the optimizer inside of DDP's backward",
    f"{HOOKS}.ddp_zero_hook": "it steps a ZeroRedundancyOptimizer inside of DDP's backward",
    f"{HOOKS}.mixed_precision_hooks": "it is DDP's own, for its mixed_precision option",
}


class GradBucket:
    """What a hook sees of a bucket: the methods of torch's GradBucket, which Python cannot construct."""

    def __init__(self, buffer: Tensor, layout: Layout, parameters: list[Tensor], index: int, last: bool) -> None:
        self._buffer, self._layout, self._parameters = buffer, layout, parameters
        self._index, self._last = index, last

    def index(self) -> int:
        """The number of the bucket in this step."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients, flat."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of :meth:`buffer`, each of its parameter's shape."""
        return list(Views(self._layout, self._buffer[: self._layout.numel]).values())

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last bucket of this step."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of :meth:`buffer`."""
        self._buffer = buffer


@dataclass(eq=False)
class _Memory:
    """What belongs to one model.

    Attributes:
        parameters: by name.
        ranks: the groups and the hook's state, by rank and number of ranks.
        spare: a copy of the state before the first step.
    """

    parameters: WeakValueDictionary[str, Tensor] = field(default_factory=WeakValueDictionary)
    ranks: dict[tuple[int, int], tuple[HookWorld, Any]] = field(default_factory=dict)
    spare: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class ForeignHook(Foreign):
    """See :func:`from_comm_hook`."""

    state: Any
    hook: Hook
    scope: Literal["bucket", "step"] = "step"
    _memory: _Memory = field(default_factory=_Memory, init=False)

    deterministic = False
    unequal_weights = True

    def __post_init__(self) -> None:
        self._memory.spare = _copy(self.state)

    def __repr__(self) -> str:
        return f"from_comm_hook({name_of(self.hook)}, scope={self.scope!r})"

    def init(self, params: Mapping[str, Tensor]) -> State:
        self._memory.parameters.update(params)
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout = bucket.layout if self.scope == "bucket" else _as_in_ddp(bucket)
        flat = flatten(bucket.grads, layout)
        if self.scope == "step" and layout is bucket.layout:  # in memory of its own: a hook may resize it
            flat = flat.clone()
        scale(flat, share_of_sum(bucket))
        known = self._memory.parameters
        parameters = [known[name] for name in layout.names if name in known]
        seen = GradBucket(flat, layout, parameters, bucket.index, bucket.last)
        world, mine = self._world(bucket)
        result = yield from flow_of(lambda: world.run(lambda: _call(self.hook, mine, seen)))
        if not isinstance(result, Tensor) or result.numel() != layout.numel:
            what = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise Unsupported(
                f"rank {bucket.rank}: {name_of(self.hook)} gave {what} for a bucket of {layout.numel} elements; "
                "a hook's future has one tensor of the bucket's size"
            )
        result = result.detach().reshape(-1)
        return Aggregated(result if layout is bucket.layout else flatten(Views(layout, result), bucket.layout))

    def _world(self, bucket: Bucket) -> tuple[HookWorld, Any]:
        """The groups and the hook's state of this rank. Several ranks in one process are a simulation: all but the
        first get copies of the state."""
        ranks, key = self._memory.ranks, (bucket.rank, bucket.size)
        if key not in ranks:
            _mend_batched_power()
            owner, _ = next(iter(ranks), key)
            mine = self.state if bucket.rank == owner else _copy(self._memory.spare)
            if isinstance(mine, Unsupported):
                raise mine
            world = HookWorld(FlowGroup(*key))
            ranks[key] = world, mine
        world, mine = ranks[key]
        mine = _adopted(mine, world)  # in each step: a script or a hook may set another group
        if isinstance(mine, PostLocalSGDState) and mine.subgroup is None:  # torch asks CUDA for a host's ranks
            mine.subgroup = FlowGroup(*bucket.place("node"), label="node")
        return world, mine


def from_comm_hook(state: Any, hook: Hook, scope: Literal["bucket", "step"] | None = None) -> Policy:
    """A policy that runs ``hook(state, bucket)``, a communication hook of DistributedDataParallel, on every backend.

    Its collectives, with ``group=None`` or any group, travel through hvdbridge, under MPI and Horovod as well, where
    ``torch.distributed`` need not be started. Collectives end within the call that starts them (``async_op=True``
    too), in the order of the hook's lines, so hooks of several rounds work with any number of buckets.

    Args:
        state: handed to the hook. Process groups in it, ``torch``'s or :func:`hvdbridge.new_group`'s, are replaced by
            ours in the first step. One state serves one model.
        hook: ``hook(state, bucket) -> Future`` of one flat tensor.
        scope: ``"bucket"``: called per bucket while backward runs, as in DDP; ``"step"``: once per step, with one
            bucket of all gradients. None: ``"bucket"`` for hooks of torch that treat each element by itself, else
            ``"step"``.

    Raises:
        Unsupported: the hook steps an optimizer of its own.
        ConfigurationError: ``hook`` cannot be called, or no such scope.

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
    last = inner = hook
    while inner is not None:
        last, inner = inner, _inner(inner)
        if why := REFUSED.get(getattr(last, "__module__", "")):
            raise Unsupported(f"{name_of(last)} is no hook for hvdbridge: {why}. Step the optimizer after backward.")
    return ForeignHook(state, hook, scope or ("bucket" if _path(last) in ELEMENTWISE else "step"))


def name_of(hook: Any) -> str:
    """What a hook is called, wrappers of torch included.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
    >>> name_of(fp16_compress_wrapper(allreduce_hook))
    'fp16_compress_wrapper(allreduce_hook)'
    """
    inner = _inner(hook)
    if inner is None:
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    outer = "" if isinstance(hook, functools.partial) else hook.__qualname__.partition(".")[0]
    return f"{outer}({name_of(inner)})" if outer else name_of(inner)


def _path(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"


def _inner(hook: Any) -> Any:
    """The hook that one of torch's wrappers, or a :class:`functools.partial`, has inside; None: ``hook`` is neither."""
    if isinstance(hook, functools.partial):
        return hook.func
    return inspect.getclosurevars(hook).nonlocals["hook"] if _path(hook) in WRAPPERS else None


def _call(hook: Hook, state: Any, bucket: GradBucket) -> Any:
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
def _mend_batched_power() -> None:
    """Let torch's batched PowerSGD run in our hooks: torch 2.13 hands matrices to a function that takes stacks of them.

    Nothing changes for hooks that torch itself runs.
    """
    original: Any = power_hooks._orthogonalize

    @functools.wraps(original)
    def orthogonalize(matrices: Tensor, *args: Any, **options: Any) -> None:
        alone = matrices.dim() == 2 and isinstance(dist.group.WORLD, FlowGroup)
        original(matrices.unsqueeze(0) if alone else matrices, *args, **options)  # a view: it works in place

    power_hooks._orthogonalize = orthogonalize


def _as_in_ddp(bucket: Bucket) -> Layout:
    """The bucket's parameters in the order of rule 2."""
    layout, blocks, later = bucket.layout, bucket.layout.blocks, bucket.step > 0

    def make() -> Layout:
        names = sorted(layout.names, key=blocks.__getitem__, reverse=later)
        return layout if tuple(names) == layout.names else Layout({name: layout.shapes[name] for name in names})

    return layout.derive(("as in DDP", later), make)


# -- The hook's state -------------------------------------------------------------------------------------------------


def _copy(state: Any) -> Any:
    """A state of its own for another rank, or the error where there is none. torch's PowerSGDState copies itself only
    where a default group is."""
    try:
        if not hasattr(state, "process_group"):
            return copy.deepcopy(state)
        new = object.__new__(type(state))
        for name in _attributes(state):
            value = getattr(state, name)
            setattr(new, name, value if isinstance(value, dist.ProcessGroup) else copy.deepcopy(value))
        return new
    except Exception as error:  # whatever a state may hold
        return Unsupported(
            f"from_comm_hook: the state of type {type(state).__name__} cannot be copied ({error}), which a simulation "
            "of several ranks needs"
        )


def _attributes(state: Any) -> set[str]:
    slots = (name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ()))
    return {name for name in (*getattr(state, "__dict__", ()), *slots) if hasattr(state, name)}


def _adopted(state: Any, world: HookWorld) -> Any:
    """``state`` with groups of ours in the place of others: itself, or its attributes."""
    if (group := _stand_in(state, world)) is not None:
        return group
    for name in _attributes(state):
        if (group := _stand_in(getattr(state, name), world)) is not None:
            setattr(state, name, group)
    return state


def _stand_in(value: Any, world: HookWorld) -> FlowGroup | None:
    """The group of ours for a group of torch's or of :func:`hvdbridge.new_group`; None for anything else."""
    if not isinstance(value, dist.ProcessGroup | Group) or isinstance(value, FlowGroup):
        return None
    ranks = list(value.ranks) if isinstance(value, Group) else dist.get_process_group_ranks(value)
    rank, size = world.group.whole
    if len(ranks) == size:
        return world.group
    if rank not in ranks or max(ranks) >= size:
        raise ConfigurationError(
            f"rank {rank}: the hook's state holds a group of the ranks {ranks}, which this rank is not in"
        )
    return world.add(FlowGroup(rank, size, ranks))
