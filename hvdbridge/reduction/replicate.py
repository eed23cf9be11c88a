"""Flows that copy one rank's parameters, buffers and optimizer state to all others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.utils._pytree import tree_map_only

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import Unsupported
from hvdbridge.execution.scheduler import drive
from hvdbridge.policy.collectives import Broadcast, Collective

PIECE_BYTES = 8 << 20
"""Of one message of :func:`broadcast_tensors`. Copying in pieces needs no second model in memory."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], root: int = 0) -> Generator[Collective, Tensor, None]:
    """Copy rank ``root``'s values into ``tensors`` in place, bit by bit: flat messages of a few MiB, of one dtype and
    device each. Of tensor subclasses with inner tensors (quantised weights) those are copied."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        for each in inner_tensors(tensor):
            kinds.setdefault((each.dtype, each.device), []).append(each)
    for group in kinds.values():
        for parts in packed(group, PIECE_BYTES):
            flat = yield Broadcast(torch.cat([part.reshape(-1) for part in parts]), root)
            torch._foreach_copy_(parts, _unflatten_dense_tensors(flat, parts))


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of, without graphs; mostly itself."""
    if type(tensor) is Tensor and not tensor.requires_grad:  # a buffer; they are sent in each step
        yield tensor
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach().as_subclass(Tensor)
        return
    for name in flatten()[0]:
        yield from inner_tensors(getattr(tensor, name))


def packed(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """``tensors``, and slices of those that are larger, in lists of at most ``most`` bytes, a row at least.

    >>> sizes = [[part.numel() for part in parts] for parts in packed([torch.zeros(3), torch.zeros(5, 2)], 16)]
    >>> sizes
    [[3], [4], [4], [2]]
    >>> [len(parts) for parts in packed([torch.zeros(1, 100)], 40)]
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    parts: list[Tensor] = []
    left = most
    for tensor in tensors:
        pieces: Iterable[Tensor] = [tensor]
        if tensor.nbytes > most:
            # By shape alone, since ranks may have other strides
            dim = next((d for d, length in enumerate(tensor.shape) if length > 1), 0)
            pieces = tensor.split(max(1, most * tensor.shape[dim] // tensor.nbytes), dim)
        for part in pieces:
            size = part.nbytes
            if parts and size > left:
                yield parts
                parts, left = [], most
            parts.append(part)
            left -= size
    if parts:
        yield parts


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer, control: Communicator, root: int = 0, left_alone: Iterable[Tensor] = ()
) -> None:
    """Give all ranks rank ``root``'s optimizer state: hyperparameters, moments, step counts.

    ``control`` is a host-side communicator. The state of parameters that are ``left_alone`` stays as it is. Nothing
    changes on ``root``, and groups stay the same objects anywhere.
    An optimizer that shards its state keeps it. Tensors travel as :func:`broadcast_tensors` sends them, so that a state
    on the CPU is not copied as a whole.

    Raises:
        Unsupported: on all ranks: ``state_dict()`` of the one on ``root`` raised something.
    """
    if shards_state(optimizer):
        return
    mine: Any = {}
    tensors: list[Tensor] = []
    problem = None
    if control.rank == root:
        try:
            mine = tree_map_only(Tensor, each_once(partial(placeholder, tensors)), optimizer.state_dict())
        except Exception as error:
            problem = error
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    theirs, said = control.broadcast_object((mine, said), root)
    if said is not None:
        what = f"{type(optimizer).__name__}: its state cannot be copied from rank {root}, whose state_dict() raises"
        raise Unsupported(f"{what} {said}") from problem
    if control.rank != root:
        theirs = tree_map_only(Tensor, each_once(partial(allocated, tensors)), theirs)
    drive(broadcast_tensors(tensors, root), control.execute)
    if control.rank == root:
        return
    groups = list(optimizer.param_groups)
    own = {p: optimizer.state.get(p) for p in left_alone}
    optimizer.load_state_dict(dict(theirs))
    for p, state in own.items():
        optimizer.state.pop(p, None)
        if state is not None:
            optimizer.state[p] = state
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is loaded:  # an optimizer that loads in its own way
            continue
        for name, value in loaded.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):  # torch leaves these where they were
                loaded[name] = value.to(group[name].device)
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups


def shards_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank has another part of its state, as under ZeroRedundancyOptimizer."""
    return hasattr(optimizer, "consolidate_state_dict")


def on_host(value: Any) -> Any:
    """``value`` with the tensors in it on the CPU: pickled, they would ask for the same device on other ranks."""
    return tree_map_only(Tensor, Tensor.cpu, value)


def each_once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``change``, called once for each tensor: one that several entries of a state share stays shared."""
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by id, the tensor, which is held for it, and what took its place

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor, change(tensor)
        return known[id(tensor)][1]

    return changed


def placeholder(tensors: list[Tensor], tensor: Tensor) -> Tensor:
    """What is pickled in the place of a plain tensor, which is appended to ``tensors``: one without values."""
    host = tensor.cpu()
    if type(host) is not Tensor or host.layout != torch.strided or host.is_inference():
        return host
    shape = torch.empty_like(host, device="meta")
    if shape.stride() != host.stride():  # not dense: written to, its elements would be each other's
        return host
    tensors.append(host)
    return shape


def allocated(tensors: list[Tensor], tensor: Tensor) -> Tensor:
    """The counterpart of :func:`placeholder`: memory for the values, which is appended to ``tensors``."""
    if tensor.is_meta:
        tensor = torch.empty_like(tensor, device="cpu")
        tensors.append(tensor)
    return tensor
