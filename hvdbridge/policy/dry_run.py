"""Runs a policy's step without other ranks: the answers to its collectives have the right shape, but are not sums."""

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
    """A collective that rank 0 requested.

    Attributes:
        bucket: index of the bucket.
        size: number of ranks that take part.
        seconds: time that the policy computed since its previous collective.
        behind: the flow has delivered its update already (:class:`~hvdbridge.Early`), so that the collective runs
            behind the step.
    """

    bucket: int
    request: Collective
    size: int
    seconds: float
    behind: bool = False


@dataclass(frozen=True)
class Ended:
    """The end of a bucket's flow. The bucket has ``numel`` elements; ``seconds`` is as in :class:`Asked`."""

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
    """Yield rank 0's collectives of one step, and the ends of its flows, in order.

    Flows run one after another, as on a network that takes no time. DDP divides parameters slightly differently into
    buckets. Arguments not listed here are those of :func:`hvdbridge.policies.bytes_per_step`.

    Args:
        device: ``meta``, whose tensors have no values and cost no memory or time; or a real device, where gradients
            are random and ``seconds`` is the time of the policy's arithmetic. There an all-reduce returns the rank's
            own tensor. Other collectives behave as if every rank had sent the same tensor.
        buckets: names of each bucket's parameters, instead of ``bucket_mb``.
        pool: buffer pool for new state and messages, shared by several calls.

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
        if not flat.is_meta:  # an own generator leaves the user's random numbers as they are
            flat.normal_(generator=torch.Generator(flat.device).manual_seed(index))
        layout.of_model(blocks, dtypes)
        bucket = Bucket(flat, layout, index, step, ranks=ranks, pool=pool or BufferPool())
        yield from _run(start, bucket, _part(state, layout))


def _run(start: Callable[[Bucket, State], Flow], bucket: Bucket, state: State) -> Iterator[Asked | Ended]:
    """Run one flow, and answer its requests."""

    def clock() -> float:
        if bucket.buffer.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    index, numel = bucket.index, bucket.layout.numel
    answer, seconds, behind, since = None, 0.0, False, clock()
    flow = start(bucket, state)
    try:
        while True:
            request = next(flow) if answer is None else flow.send(answer)
            answer = None
            if not isinstance(request, Collective):
                behind = True
                continue
            seconds += clock() - since
            _, size = bucket.place(request.group)
            yield Asked(index, request, size, seconds, behind)
            answer, seconds, since = _answer(request, size), 0.0, clock()
    except StopIteration as end:
        yield Ended(index, numel, seconds + clock() - since)
        if isinstance(end.value, Aggregated):
            bucket.pool.give(*_flat_leaves(end.value.state))


def _part(state: State, layout: Layout) -> State:
    """Return one bucket's part of a state, as :meth:`~hvdbridge.execution.state_store.StateStore.part` does."""
    if not isinstance(next(iter(state.values()), None), Tensor):
        return {key: _part(child, layout) for key, child in state.items()}
    leaf = {name: state[name] for name in layout.names if name in state}
    if len({t.dtype for t in leaf.values()}) != 1 or any(t.shape != layout.shapes[n] for n, t in leaf.items()):
        return leaf
    own = layout.part(leaf)
    return Views(own, flatten(leaf, own))


def _flat_leaves(state: Any) -> Iterator[Tensor]:
    """Yield the flat tensors of a state's leaves that are :class:`Views`."""
    if isinstance(state, Views):
        yield state.flat
    elif isinstance(state, Mapping):
        for child in state.values():
            yield from _flat_leaves(child)


def _answer(request: Collective, size: int) -> Tensor:
    """Return the answer as if all ranks had sent the same tensor. An all-reduce returns the tensor without the sum."""
    tensor = request.tensor
    match request:
        case AllGather():
            out = output_of(request, size * tensor.numel())
            rows = tensor.expand(size, *tensor.shape)
            return rows.clone() if out is None else out.view(rows.shape).copy_(rows)
        case AllToAll():
            out = output_of(request, tensor.numel())
            return tensor.clone() if out is None else out.view(tensor.shape).copy_(tensor)
        case ReduceScatter():
            return tensor[0].clone()
        case _:
            return tensor.clone()
