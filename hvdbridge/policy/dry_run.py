"""What a policy asks for in one step, without other ranks: flows run on tensors whose answers are made up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, Views, cut_layouts, flatten, join_layouts, number_blocks
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather, AllToAll, Collective, ReduceScatter, output_of


@dataclass(frozen=True)
class Asked:
    """A collective that rank 0 asked for.

    Attributes:
        bucket: number of its bucket.
        size: how many ranks take part in it.
        seconds: what the policy computed before it, since the collective before.
        behind: the bucket's update is delivered, and this goes on behind the step
            (:class:`~hvdbridge.Early`).
    """

    bucket: int
    request: Collective
    size: int
    seconds: float
    behind: bool = False


@dataclass(frozen=True)
class Ended:
    """A bucket's flow came to its end; ``seconds`` as in :class:`Asked`, ``numel`` elements."""

    bucket: int
    numel: int
    seconds: float


def dry_run(
    policy: Policy,
    params: Mapping[str, Tensor | Sequence[int]],
    size: int,
    step: int = 0,
    bucket_mb: float | None = None,
    local_size: int | None = None,
    device: torch.device | str = "meta",
    buckets: Sequence[Sequence[str]] | None = None,
    pool: BufferPool | None = None,
) -> Iterator[Asked | Ended]:
    """What rank 0 does in one step, in order; arguments as for :func:`hvdbridge.policies.bytes_per_step`.

    Buckets follow each other, as they would on a network that takes no time; under DDP they are cut a little
    differently.

    Args:
        device: ``meta``, whose tensors have no values and take no memory and no time; or a real one, where gradients
            are random and ``seconds`` is what the policy's arithmetic takes. There an all-reduce answers with the
            rank's own tensor, and the others as if every rank had sent what this one did.
        buckets: instead of ``bucket_mb``: the names of each bucket's parameters.
        pool: for new state and messages, from one call to the next.

    Raises:
        ConfigurationError: an argument is not positive, or the policy is not defined for so many ranks.

    >>> from hvdbridge.policies import from_spec
    >>> asked = dry_run(from_spec("mean"), {"w": (1024,)}, size=4)
    >>> [one.request.signature() for one in asked if isinstance(one, Asked)]
    ['AllReduce[1024] float32 op=sum group=world']
    """
    if bucket_mb is None:
        bucket_mb = import_module("hvdbridge.policies.dense").bucket_mb(policy)
    if size < 1 or bucket_mb <= 0 or (local_size is not None and local_size < 1):
        raise ConfigurationError(f"size={size}, bucket_mb={bucket_mb} and local_size={local_size} must be positive")
    given = {
        name: torch.empty(torch.Size(getattr(p, "shape", p)), dtype=getattr(p, "dtype", None), device=device)
        for name, p in params.items()
    }
    nodes = tuple(rank // (local_size or size) for rank in range(size))
    sizes = {"node": min(local_size or size, size), "cross": nodes[-1] + 1}
    ranks = Ranks(0, size, None, {group: (0, n) for group, n in sizes.items()}, nodes)
    policy.check_size(size, sizes["cross"])
    layouts = cut_layouts(given, bucket_mb * 2**20)
    if buckets is not None:
        layouts = [Layout({name: given[name].shape for name in names}) for names in buckets]
    if policy.scope == "step":
        layouts = [join_layouts(layouts)]
    flows = [(policy.aggregate, layout) for layout in layouts]
    if policy.due(step):
        flows.append((policy.after_step, Layout({name: p.shape for name, p in given.items()})))
    blocks = number_blocks({name: p.shape for name, p in given.items()})
    dtypes, state = {name: p.dtype for name, p in given.items()}, policy.init(given)
    for index, (start, layout) in enumerate(flows):
        dtype = functools.reduce(torch.promote_types, (dtypes[name] for name in layout.names))
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        if start == policy.after_step:
            flat = flat.to(torch.promote_types(dtype, torch.float32))
        if not flat.is_meta:  # a generator of its own: the user's random numbers stay as they were
            flat.normal_(generator=torch.Generator(flat.device).manual_seed(index))
        layout.of_model(blocks, dtypes)
        bucket = Bucket(flat, layout, index, step, ranks=ranks, pool=pool or BufferPool())
        yield from _run(start, bucket, _part(state, layout))


def _run(start: Callable[[Bucket, State], Flow], bucket: Bucket, state: State) -> Iterator[Asked | Ended]:
    """Run one flow, and answer what it asks for."""

    def clock() -> float:
        if bucket.buffer.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    index, numel = bucket.index, bucket.layout.numel
    answer, spent, behind, since = None, 0.0, False, clock()
    flow = start(bucket, state)
    try:
        while True:
            request = next(flow) if answer is None else flow.send(answer)
            answer = None
            if not isinstance(request, Collective):
                behind = True
                continue
            spent += clock() - since
            _, size = bucket.place(request.group)
            yield Asked(index, request, size, spent, behind)
            answer, spent, since = _answer(request, size), 0.0, clock()
    except StopIteration as end:
        yield Ended(index, numel, spent + clock() - since)
        if isinstance(end.value, Aggregated):
            bucket.pool.give(*_laid_flat(end.value.state))


def _part(state: State, layout: Layout) -> State:
    """The part of a tree of state for one bucket, as :class:`~hvdbridge.execution.state_store.StateStore` lays it."""
    if not isinstance(next(iter(state.values()), None), Tensor):
        return {key: _part(child, layout) for key, child in state.items()}
    leaf = {name: state[name] for name in layout.names if name in state}
    if len({t.dtype for t in leaf.values()}) != 1 or any(t.shape != layout.shapes[n] for n, t in leaf.items()):
        return leaf
    own = layout.part(leaf)
    return Views(own, flatten(leaf, own))


def _laid_flat(state: Any) -> Iterator[Tensor]:
    """The tensors of a tree whose leaves are laid flat."""
    if isinstance(state, Views):
        yield state.flat
    elif isinstance(state, Mapping):
        for child in state.values():
            yield from _laid_flat(child)


def _answer(request: Collective, size: int) -> Tensor:
    """What ranks that all sent the same would receive; an all-reduce's sum is not done."""
    tensor = request.tensor
    match request:
        case AllGather():
            out = output_of(request, size * tensor.numel())
            every = tensor.expand(size, *tensor.shape)
            return every.clone() if out is None else out.view(every.shape).copy_(every)
        case AllToAll():
            out = output_of(request, tensor.numel())
            return tensor.clone() if out is None else out.view(tensor.shape).copy_(tensor)
        case ReduceScatter():
            return tensor[0].clone()
        case _:
            return tensor.clone()
