"""What a policy asks for in one step, without other ranks: flows run on tensors whose answers are made up."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Views, cut_layouts, flatten, join_layouts, number_blocks
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
    """What rank 0 does in one step, in order; arguments as for :func:`bytes_per_step`.

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
    bucket_mb = policy.bucket_mb if bucket_mb is None else bucket_mb
    if size < 1 or bucket_mb <= 0 or (local_size is not None and local_size < 1):
        raise ConfigurationError(f"size={size}, bucket_mb={bucket_mb} and local_size={local_size} must be positive")
    given = {
        name: torch.empty(p.shape, dtype=p.dtype, device=device)
        if isinstance(p, Tensor)
        else torch.empty(torch.Size(p), device=device)
        for name, p in params.items()
    }
    local = min(size if local_size is None else local_size, size)
    nodes = tuple(rank // local for rank in range(size))
    sizes = {"world": size, "node": local, "cross": nodes[-1] + 1}
    policy.check_size(size, sizes["cross"])
    blocks = number_blocks({name: p.shape for name, p in given.items()})
    dtypes = {name: p.dtype for name, p in given.items()}
    state = policy.init(given)

    def clock() -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(start: Callable[[Bucket, State], Flow], layout: Layout, index: int, dtype: torch.dtype) -> Iterator[Any]:
        groups = {group: (0, n) for group, n in sizes.items() if group != "world"}
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        if not flat.is_meta:  # a generator of its own: the user's random numbers stay as they were
            flat.normal_(generator=torch.Generator(flat.device).manual_seed(index))
        bucket = Bucket(
            flat, layout, index, step, size=size, blocks=blocks, groups=groups, nodes=nodes, dtypes=dtypes,
            pool=pool or BufferPool(),
        )  # fmt: skip
        part, answer, spent, behind = _part(state, layout), None, 0.0, False
        since = clock()
        flow = start(bucket, part)
        try:
            while True:
                request = next(flow) if answer is None else flow.send(answer)
                answer = None
                if not isinstance(request, Collective):
                    behind = True
                    continue
                spent += clock() - since
                yield Asked(index, request, sizes[request.group], spent, behind)
                answer, spent = _answer(request, sizes[request.group]), 0.0
                since = clock()
        except StopIteration as end:
            yield Ended(index, layout.numel, spent + clock() - since)
            if isinstance(end.value, Aggregated):
                bucket.pool.give(*_laid_flat(end.value.state))

    widest = functools.reduce(torch.promote_types, (p.dtype for p in given.values()))
    if buckets is None:
        layouts = cut_layouts(given, bucket_mb * 2**20)
    else:
        layouts = [Layout({name: given[name].shape for name in names}) for names in buckets]
    if policy.scope == "step":
        layouts = [join_layouts(layouts)]
        yield from run(policy.aggregate, layouts[0], 0, widest)
    else:
        for index, layout in enumerate(layouts):
            yield from run(policy.aggregate, layout, index, given[layout.names[0]].dtype)
    if policy.due(step):
        whole = Layout({name: p.shape for name, p in given.items()})
        yield from run(policy.after_step, whole, len(layouts), torch.promote_types(widest, torch.float32))


def bytes_per_step(
    policy: Policy,
    params: Mapping[str, Tensor | Sequence[int]],
    size: int,
    step: int = 0,
    bucket_mb: float | None = None,
    local_size: int | None = None,
) -> int:
    """Bytes that rank 0 sends in one step, as :meth:`Collective.bytes_sent` counts them.

    Weights and other control messages are not among them. Other ranks send the same, or less where the last node is
    smaller. Buckets are cut as on Horovod and MPI; under DDP they differ a little, the bytes hardly. What
    :meth:`Policy.after_step` sends is included where it is due.

    Args:
        params: name -> parameter or shape (of float32).
        size: number of ranks.
        step: number of the step, for policies that change in the course of training.
        bucket_mb: size of a bucket in MiB; None: the policy's.
        local_size: ranks per node, in order; None: one node.

    Raises:
        ConfigurationError: an argument is not positive, or the policy is not defined for so many ranks.

    >>> from hvdbridge.policies import from_spec
    >>> [bytes_per_step(from_spec(spec), {"w": (1000, 1000)}, size=4) for spec in ("mean", "bf16")]
    [6000000, 3000000]
    """
    events = dry_run(policy, params, size, step, bucket_mb, local_size)
    return sum(event.request.bytes_sent(event.size) for event in events if isinstance(event, Asked))


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
