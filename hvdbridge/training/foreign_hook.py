"""A communication hook of DistributedDataParallel as a policy: on every backend, with as many buckets as there are.

Rules:

1. The hook gets a look-alike of torch's GradBucket, and a ``torch.distributed`` whose collectives are the flow's.
2. A hook that treats each element by itself runs per bucket, while backward goes on. One whose result depends on
   what else is in the bucket (a scale, a matrix of all gradients, random numbers drawn in sequence) runs once per
   step, on one bucket of all gradients in the order in which DDP holds them: registered order in the first step,
   the reverse of it from then on. So the result does not depend on buckets, and is that of DDP with one.
3. A hook's state is its own: it changes in place, is keyed as the hook likes, and is the user's to save.
4. Hooks divide by the number of ranks themselves; a weight multiplies what they see by its ratio to the mean weight.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policies.dense import share_of_sum
from hvdbridge.policy.base import Aggregated, Flow, Foreign, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Views, flatten, scale
from hvdbridge.training.fiber import flow_of
from hvdbridge.training.process_group import FlowGroup, HookWorld, inside

Hook = Callable[[Any, Any], Any]
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

ELEMENTWISE = {
    f"{HOOKS}.default_hooks.allreduce_hook", f"{HOOKS}.default_hooks.fp16_compress_hook",
    f"{HOOKS}.default_hooks.bf16_compress_hook", f"{HOOKS}.debugging_hooks.noop_hook",
    f"{HOOKS}.post_localSGD_hook.post_localSGD_hook",
}  # fmt: skip
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
    """What a hook sees of a bucket: the methods of torch's GradBucket, which nobody else can make."""

    def __init__(self, buffer: Tensor, layout: Layout, parameters: list[Tensor], index: int, last: bool) -> None:
        self._buffer = buffer
        self._layout = layout
        self._parameters = parameters
        self._index = index
        self._last = last

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
    """What belongs to one model: its parameters, and the hook's state and groups by rank."""

    parameters: dict[str, ref[Tensor]] = field(default_factory=dict)
    worlds: dict[int, tuple[HookWorld, Any]] = field(default_factory=dict)
    spare: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class ForeignHook(Foreign):
    """See :func:`from_comm_hook`."""

    state: Any
    hook: Hook
    runs: Literal["bucket", "step"]
    _memory: _Memory = field(default_factory=_Memory, init=False)

    deterministic = False
    unequal_weights = True

    def __post_init__(self) -> None:
        self._memory.spare = _copy(self.state)

    @property
    def scope(self) -> Literal["bucket", "step"]:
        return self.runs

    def inners(self) -> Mapping[str, Policy]:
        return {}

    def __repr__(self) -> str:
        return f"from_comm_hook({name_of(self.hook)}, scope={self.runs!r})"

    def init(self, params: Mapping[str, Tensor]) -> State:
        self._memory.parameters.update({name: ref(p) for name, p in params.items()})
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout = bucket.layout if self.runs == "bucket" else _as_in_ddp(bucket)
        flat = bucket.buffer
        if self.runs == "step":  # in memory of its own: a hook may resize it
            flat = flat.clone() if layout is bucket.layout else flatten(bucket.grads, layout)
        scale(flat, share_of_sum(bucket))
        found = [self._memory.parameters.get(name, _nobody)() for name in layout.names]
        parameters = [p for p in found if p is not None]
        world, mine = self._world(bucket)
        seen = GradBucket(flat, layout, parameters, bucket.index, bucket.last)
        if isinstance(mine, PostLocalSGDState) and mine.subgroup is None:  # a host's ranks; torch asks CUDA for them
            mine.subgroup = FlowGroup.named("node", bucket.place("node"))
        _mend_batched_power()
        result = yield from flow_of(lambda: inside(world, lambda: _call(self.hook, _adopted(mine, world), seen)))
        if not isinstance(result, Tensor) or result.numel() != layout.numel:
            what = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise Unsupported(
                f"rank {bucket.rank}: {name_of(self.hook)} gave {what} for a bucket of {layout.numel} elements; "
                "a hook's future has one tensor of the bucket's size"
            )
        result = result.detach().reshape(-1)
        return Aggregated(result if layout is bucket.layout else flatten(Views(layout, result), bucket.layout))

    def _world(self, bucket: Bucket) -> tuple[HookWorld, Any]:
        """The hook's groups and state of this rank; several ranks in one process are a simulation, and get copies."""
        worlds = self._memory.worlds
        known = worlds.get(bucket.rank)
        if known is None or known[0].default_pg.whole != (bucket.rank, bucket.size):
            first = not worlds or known is not None
            if not first and self._memory.spare is _NO_COPY:
                raise Unsupported(f"{self!r}: its state cannot be copied, which a simulation of several ranks needs")
            mine = self.state if first else _copy(self._memory.spare)
            worlds[bucket.rank] = known = HookWorld(FlowGroup(bucket.rank, bucket.size)), mine
        return known


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
    for inner in _chain(hook):
        why = REFUSED.get(getattr(inner, "__module__", ""))
        if why:
            raise Unsupported(f"{name_of(inner)} is no hook for hvdbridge: {why}. Step the optimizer after backward.")
    elementwise = _path(_chain(hook)[-1]) in ELEMENTWISE
    return ForeignHook(state, hook, scope or ("bucket" if elementwise else "step"))


def name_of(hook: Any) -> str:
    """What a hook is called, wrappers of torch included.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
    >>> name_of(fp16_compress_wrapper(allreduce_hook))
    'fp16_compress_wrapper(allreduce_hook)'
    """
    *outer, last = _chain(hook)
    shown: str = getattr(last, "__qualname__", type(last).__qualname__)
    for wrapper in reversed(outer):
        if not isinstance(wrapper, functools.partial):
            shown = f"{wrapper.__qualname__.partition('.')[0]}({shown})"
    return shown


def _path(hook: Any) -> str:
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"


def _chain(hook: Any) -> list[Any]:
    """The hook, and what torch's wrappers and :class:`functools.partial` have inside."""
    chain = [hook]
    while True:
        last = chain[-1]
        if isinstance(last, functools.partial):
            chain.append(last.func)
        elif _path(last) in WRAPPERS:
            chain.append(inspect.getclosurevars(last).nonlocals["hook"])
        else:
            return chain


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
    """Let torch's batched PowerSGD run in our hooks: in torch 2.13 it hands matrices to a function that takes stacks.

    That function is tried first, so nothing changes where torch is mended; nor for hooks that torch itself runs.
    """
    original = getattr(power_hooks, "_orthogonalize", None)
    if original is None:
        return

    @functools.wraps(original)
    def orthogonalize(matrices: Tensor, *args: Any, **options: Any) -> None:
        try:
            original(matrices, *args, **options)
        except AssertionError:
            if matrices.dim() != 2 or not isinstance(dist.group.WORLD, FlowGroup):
                raise
            original(matrices.unsqueeze(0), *args, **options)  # a view: it works in place

    power_hooks._orthogonalize = orthogonalize


def _as_in_ddp(bucket: Bucket) -> Layout:
    """The bucket's parameters in the order of rule 2."""
    layout, blocks, first = bucket.layout, bucket.layout.blocks, bucket.step == 0

    def make() -> Layout:
        names = sorted(layout.names, key=lambda name: blocks[name])
        names = names if first else names[::-1]
        return layout if tuple(names) == layout.names else Layout({name: layout.shapes[name] for name in names})

    return layout.derive(("as in DDP", first), make)


# -- The hook's state -------------------------------------------------------------------------------------------------

_NO_COPY = object()


def _nobody() -> None:
    return None


def _copy(state: Any) -> Any:
    """A state of its own for another rank; torch's PowerSGDState copies itself only where a default group is."""
    try:
        if not hasattr(state, "process_group"):
            return copy.deepcopy(state)
        new = object.__new__(type(state))
        for name in _attributes(state):
            if hasattr(state, name):
                value = getattr(state, name)
                setattr(new, name, value if isinstance(value, dist.ProcessGroup) else copy.deepcopy(value))
        return new
    except Exception:  # whatever a state may hold; only simulations need the copy, and say so
        return _NO_COPY


def _attributes(state: Any) -> set[str]:
    slots = (name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ()))
    return {*getattr(state, "__dict__", ()), *slots}


def _adopted(state: Any, world: HookWorld) -> Any:
    """``state`` with groups of ours in the place of others: itself, or its attributes."""
    if (group := _stand_in(state, world)) is not None:
        return group
    for name in _attributes(state):
        if (group := _stand_in(getattr(state, name, None), world)) is not None:
            setattr(state, name, group)
    return state


def _stand_in(value: Any, world: HookWorld) -> FlowGroup | None:
    if isinstance(value, FlowGroup):
        return None
    if isinstance(value, dist.ProcessGroup):
        ranks = _ranks_of(value)
    elif hasattr(value, "ranks") and hasattr(value, "communicator"):  # hvdbridge.new_group()
        ranks = list(value.ranks)
    else:
        return None
    whole = world.default_pg
    if len(ranks) == whole.size():
        return whole
    if whole.whole[0] not in ranks or max(ranks) >= whole.size():
        raise ConfigurationError(
            f"rank {whole.rank()}: the hook's state holds a group of the ranks {ranks}, which this rank is not in"
        )
    return next((g for g in world.pg_map if g.ranks == ranks), None) or world.add(FlowGroup(*whole.whole, ranks))


def _ranks_of(group: Any) -> list[int]:
    """The ranks of a group of ``torch.distributed``, read from its own books: this thread sees others."""
    from torch.distributed.distributed_c10d import _pg_group_ranks

    if group not in _pg_group_ranks:
        raise ConfigurationError(f"the hook's state holds {group!r}, which torch.distributed does not know any more")
    return sorted(_pg_group_ranks[group], key=_pg_group_ranks[group].__getitem__)
