"""The model of the slow-link measurements: 50 MB of gradients in twelve tensors of 4 MB.

    hvdbridge bench --models benchmarks/layers.py:layers --policies mean int8
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def layers() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return twelve linear layers and a loss; 64 rows take some 100 ms per step on a core of a server."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    x = torch.randn(64, 1024)
    return model, lambda module: module(x).square().mean()
