"""The norm of a whole gradient, the same wherever its parameters lie."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdbridge.bucket import Layout

CHUNK = 1 << 17
"""Elements that are worked on at a time: what a core's cache holds in float64."""


def global_norm(flat: Tensor, layout: Layout) -> Tensor:
    """The L2 norm of all parameters, float64 without dimensions; added in the order of their names.

    >>> global_norm(torch.tensor([3.0, 0.0, -4.0]), Layout({"a": (2,), "b": (1,)}))
    tensor(5., dtype=torch.float64)
    """
    parts = dict(zip(layout.names, torch.split(flat, list(layout.sizes.values())), strict=True))
    squares = []
    for name in sorted(parts):
        for chunk in torch.split(parts[name], CHUNK):
            wide = chunk.to(torch.float64)
            squares.append(torch.dot(wide, wide))
    return torch.stack(squares).sum().sqrt() if squares else flat.new_zeros((), dtype=torch.float64)
