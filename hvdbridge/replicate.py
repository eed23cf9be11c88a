"""Flows that copy one rank's parameters, buffers and optimizer state to all others."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor

from hvdbridge.collectives import Broadcast, Collective
from hvdbridge.communicators.base import Communicator
from hvdbridge.errors import Unsupported


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], root: int = 0) -> Generator[Collective, Tensor, None]:
    """Copy rank ``root``'s values into ``tensors`` in place: one flat message per dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in kinds.values():
        flat = yield Broadcast(torch.cat([tensor.reshape(-1) for tensor in group]), root)
        for tensor, piece in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer, control: Communicator, root: int = 0, left_alone: Iterable[Tensor] = ()
) -> None:
    """Give all ranks rank ``root``'s optimizer state: hyperparameters, moments, step counts.

    ``control`` is a host-side communicator. The state of parameters that are ``left_alone`` stays as it is. Nothing
    changes on ``root``, and groups stay the same objects anywhere.
    An optimizer that shards its state keeps it.

    Raises:
        Unsupported: on all ranks: ``state_dict()`` of the one on ``root`` raised something.
    """
    if shards_state(optimizer):
        return
    mine: Any = {}
    problem = None
    if control.rank == root:
        try:
            mine = on_host(optimizer.state_dict())
        except Exception as error:
            problem = error
    said = None if problem is None else f"{type(problem).__name__}: {problem}"
    theirs, said = control.broadcast_object((mine, said), root)
    if said is not None:
        what = f"{type(optimizer).__name__}: its state cannot be copied from rank {root}, whose state_dict() raises"
        raise Unsupported(f"{what} {said}") from problem
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
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_host(child) for key, child in value.items()}
    return type(value)(map(on_host, value)) if type(value) in (list, tuple) else value
