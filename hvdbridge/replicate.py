"""Flows that copy one rank's parameters, buffers and optimizer state to all others."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hvdbridge.collectives import Broadcast, Collective
from hvdbridge.communicators.base import Communicator


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


def broadcast_optimizer(optimizer: torch.optim.Optimizer, control: Communicator, root: int = 0) -> None:
    """Give all ranks rank ``root``'s optimizer state: hyperparameters, moments, step counts.

    ``control`` is a host-side communicator. Nothing changes on ``root``.
    """
    mine = optimizer.state_dict() if control.rank == root else {}
    theirs: Mapping[str, Any] = control.broadcast_object(mine, root)
    if control.rank != root:
        optimizer.load_state_dict(dict(theirs))
