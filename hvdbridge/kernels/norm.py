"""The norm of a whole gradient, the same wherever its parameters lie."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdbridge.kernels.runs import SHORT
from hvdbridge.policy.bucket import Layout

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
    if not layout.numel:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.device.type != "cpu":
        parts = dict(zip(layout.names, flat.split(list(layout.sizes.values())), strict=True))
        ordered = [_aligned(parts[name]) for name in sorted(parts) if parts[name].numel()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(ordered, 2, dtype=torch.float64)))
        return norm
    # A CPU makes a norm one number after the other; pieces that stay in its cache are seven times as fast.
    order, groups = layout.derive("norm", lambda: _plan(layout))
    squares = torch.zeros(len(layout.names), dtype=torch.float64, device="cpu")
    spare = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
    for first, last, start, end, lengths in groups:
        for at in range(start, end, CHUNK):
            some = flat[at : min(at + CHUNK, end)]
            wide = spare[: some.numel()].copy_(some)
            if lengths is None:
                squares[first] += torch.dot(wide, wide)
            else:
                found = torch.segment_reduce(wide.square_(), "sum", lengths=lengths, unsafe=True, initial=0)
                squares[first:last] = found
    return squares[order].sum().sqrt()


def clip_factor(flat: Tensor, layout: Layout, limit: float) -> Tensor:
    """What takes the norm to ``limit``, in the type of ``flat``: at most 1, and 1 where the norm is not finite, so that
    NaN and inf travel as they are."""
    norm = global_norm(flat, layout)
    factor = (limit / norm).clamp(max=1.0)  # a norm of 0 gives inf, and 1
    return torch.where(norm.isfinite(), factor, 1.0).to(flat.dtype)


Group = tuple[int, int, int, int, Tensor | None]


def _plan(layout: Layout) -> tuple[Tensor, list[Group]]:
    """The order of names; and parameters from a first to a last and where they lie from and to: one that is long, or
    with their lengths as many short ones as fit into a chunk, since an operation for each takes longer than its sum."""
    order = sorted(range(len(layout.names)), key=layout.names.__getitem__)
    groups: list[Group] = []
    sizes = list(layout.sizes.values())
    first = start = at = 0
    for number, size in enumerate([*sizes, None]):
        short = size is not None and size <= SHORT
        if first < number and (not short or at + (size or 0) - start > CHUNK):
            lengths = torch.tensor(sizes[first:number], device="cpu")
            groups.append((first, number, start, at, lengths))
            first, start = number, at
        if size is not None and not short:
            groups.append((number, number + 1, at, at + size, None))
            first, start = number + 1, at + size
        at += size or 0
    return torch.tensor(order, device="cpu"), groups


def _aligned(part: Tensor) -> Tensor:
    if part.device.type == "meta" or part.data_ptr() % ALIGNED == 0:
        return part
    return part.clone()
