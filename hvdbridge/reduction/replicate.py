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

MESSAGE_BYTES = 8 << 20
"""Size of one message of :func:`broadcast_tensors`, which bounds the additional memory."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], root: int = 0) -> Generator[Collective, Tensor, None]:
    """Copy rank ``root``'s values into ``tensors`` in place, bit for bit.

    A message is flat, of one dtype and device, and :data:`MESSAGE_BYTES` long. Tensor subclasses with inner tensors
    (quantised weights) are copied by these.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        for inner in inner_tensors(tensor):
            kinds.setdefault((inner.dtype, inner.device), []).append(inner)
    for group in kinds.values():
        for parts in message_parts(group, MESSAGE_BYTES):
            flat = yield Broadcast(torch.cat([part.reshape(-1) for part in parts]), root)
            torch._foreach_copy_(parts, _unflatten_dense_tensors(flat, parts))


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors, detached, of which a tensor consists; usually the tensor itself."""
    if type(tensor) is Tensor and not tensor.requires_grad:  # fast path for buffers, which every step sends
        yield tensor
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach().as_subclass(Tensor)
        return
    for name in flatten()[0]:
        yield from inner_tensors(getattr(tensor, name))


def message_parts(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield ``tensors`` in lists of at most ``limit`` bytes; larger tensors are sliced, into single rows at least.

    >>> sizes = [[part.numel() for part in parts] for parts in message_parts([torch.zeros(3), torch.zeros(5, 2)], 16)]
    >>> sizes
    [[3], [4], [4], [2]]
    >>> [len(parts) for parts in message_parts([torch.zeros(1, 100)], 40)]
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """
    parts: list[Tensor] = []
    bytes_left = limit
    for tensor in tensors:
        slices: Iterable[Tensor] = [tensor]
        if tensor.nbytes > limit:
            # Slices depend on the shape alone, since strides may differ between ranks
            dim = next((d for d, length in enumerate(tensor.shape) if length > 1), 0)
            slices = tensor.split(max(1, limit * tensor.shape[dim] // tensor.nbytes), dim)
        for part in slices:
            size = part.nbytes
            if parts and size > bytes_left:
                yield parts
                parts, bytes_left = [], limit
            parts.append(part)
            bytes_left -= size
    if parts:
        yield parts


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer, control: Communicator, root: int = 0, ignored: Iterable[Tensor] = ()
) -> None:
    """Copy rank ``root``'s optimizer state to all ranks: hyperparameters, moments, step counts. Collective.

    ``root`` itself changes nothing. On other ranks parameter groups stay the same objects, and parameters in
    ``ignored`` keep their state. Optimizers that shard their state are skipped. Tensors are sent as by
    :func:`broadcast_tensors`, so that no rank needs memory for a second copy of the state. ``control`` is a host-side
    communicator.

    Raises:
        Unsupported: on all ranks, if the optimizer's ``state_dict()`` raised an error on ``root``.
    """
    if shards_state(optimizer):
        return
    state: Any = {}
    tensors: list[Tensor] = []
    problem = None
    if control.rank == root:
        try:
            state = tree_map_only(Tensor, each_once(partial(placeholder, tensors)), optimizer.state_dict())
        except Exception as error:
            problem = error
    failure = None if problem is None else f"{type(problem).__name__}: {problem}"
    state, failure = control.broadcast_object((state, failure), root)
    if failure is not None:
        what = f"{type(optimizer).__name__}: its state cannot be copied from rank {root}, whose state_dict() raises"
        raise Unsupported(f"{what} {failure}") from problem
    if control.rank != root:
        state = tree_map_only(Tensor, each_once(partial(allocated, tensors)), state)
    drive(broadcast_tensors(tensors, root), control.execute)
    if control.rank == root:
        return
    groups = list(optimizer.param_groups)
    ignored_state = {p: optimizer.state.get(p) for p in ignored}
    optimizer.load_state_dict(dict(state))
    for p, previous in ignored_state.items():
        optimizer.state.pop(p, None)
        if previous is not None:
            optimizer.state[p] = previous
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is loaded:  # this optimizer loads in place
            continue
        for name, value in loaded.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):  # torch does not move these
                loaded[name] = value.to(group[name].device)
        group.clear()
        group.update(loaded)
    optimizer.param_groups[:] = groups


def shards_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each rank has a part of the optimizer's state, as under ZeroRedundancyOptimizer."""
    return hasattr(optimizer, "consolidate_state_dict")


def on_host(value: Any) -> Any:
    """Return ``value`` with all tensors on the CPU: a pickled CUDA tensor needs the same device on the other rank."""
    return tree_map_only(Tensor, Tensor.cpu, value)


def each_once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``change`` with its results cached by tensor: a tensor that a state contains twice stays shared."""
    replacements: dict[int, tuple[Tensor, Tensor]] = {}  # id -> tensor, referenced to keep the id valid, and result

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            replacements[id(tensor)] = tensor, change(tensor)
        return replacements[id(tensor)][1]

    return once


def placeholder(tensors: list[Tensor], tensor: Tensor) -> Tensor:
    """Append a plain tensor to ``tensors`` and return a meta tensor to pickle instead; return others on the CPU."""
    host = tensor.cpu()
    if type(host) is not Tensor or host.layout != torch.strided or host.is_inference():
        return host
    shape = torch.empty_like(host, device="meta")
    if shape.stride() != host.stride():  # not dense: elements may overlap, and copies into them too
        return host
    tensors.append(host)
    return shape


def allocated(tensors: list[Tensor], tensor: Tensor) -> Tensor:
    """Return memory for the values of a :func:`placeholder`, and append it to ``tensors``."""
    if tensor.is_meta:
        tensor = torch.empty_like(tensor, device="cpu")
        tensors.append(tensor)
    return tensor
