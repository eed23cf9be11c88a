"""The norm of a whole gradient, with the same bits for any order and addresses of its parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdbridge.kernels.runs import SHORT
from hvdbridge.policy.bucket import Layout, Number

CHUNK = 1 << 15
"""Number of elements that a CPU converts to float64 at a time, so that they stay in a core's cache."""
ALIGNED = 32
"""Alignment in bytes at which a GPU sums a vector in the same order."""


def global_norm(flat: Tensor, layout: Layout) -> Tensor:
    """Return the L2 norm of all parameters as a float64 scalar tensor, in which no square of a float32 overflows.

    Squares are summed per parameter, and these sums in the order of the parameters' names. So neither the order of the
    parameters in ``flat`` nor their addresses change the bits.

    >>> global_norm(torch.tensor([3e30, 0.0, -4e30]), Layout({"b": (2,), "a": (1,)})) / 1e30
    tensor(5.0000, dtype=torch.float64)
    """
    if not layout.numel:
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    if flat.device.type != "cpu":
        parameters = dict(zip(layout.names, flat.split(list(layout.sizes.values())), strict=True))
        ordered = [_aligned(parameters[name]) for name in sorted(parameters) if parameters[name].numel()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(ordered, 2, dtype=torch.float64)))
        return norm
    # torch's norm on a CPU is sequential, so dot products of chunks that stay in its cache are faster.
    order, groups = layout.derive("norm", lambda: _plan(layout))
    squares = torch.zeros(len(layout.names), dtype=torch.float64, device="cpu")
    buffer = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
    for first, last, start, end, lengths in groups:
        for offset in range(start, end, CHUNK):
            chunk = flat[offset : min(offset + CHUNK, end)]
            values = buffer[: chunk.numel()].copy_(chunk)
            if lengths is None:
                squares[first] += torch.dot(values, values)
            else:
                sums = torch.segment_reduce(values.square_(), "sum", lengths=lengths, unsafe=True, initial=0)
                squares[first:last] = sums
    return squares[order].sum().sqrt()


def clip_factor(flat: Tensor, layout: Layout, limit: Number) -> Tensor:
    """Return the factor that clips the norm of ``flat`` to ``limit``: a scalar tensor of its type, at most 1.

    The factor is 1 if the norm is not finite, so that NaN and inf are sent unchanged.
    """
    norm = global_norm(flat, layout)
    # As torch divides a float by a tensor; a limit that is a tensor must give the same bits
    factor = (norm.reciprocal() * limit).clamp(max=1.0)  # a norm of 0 gives inf, then 1
    return torch.where(norm.isfinite(), factor, 1.0).to(flat.dtype)


Group = tuple[int, int, int, int, Tensor | None]


def _plan(layout: Layout) -> tuple[Tensor, list[Group]]:
    """Return the order of the parameters by name, and the groups of parameters to sum together.

    A group is ``(first parameter, end, start offset, end offset, lengths)``. Lengths are None for one long parameter.
    Short ones are grouped up to the size of a chunk, since one operation for each would take longer than its sum.
    """
    order = sorted(range(len(layout.names)), key=layout.names.__getitem__)
    groups: list[Group] = []
    sizes = list(layout.sizes.values())
    first = start = offset = 0
    for number, size in enumerate([*sizes, None]):
        short = size is not None and size <= SHORT
        if first < number and (not short or offset + (size or 0) - start > CHUNK):
            lengths = torch.tensor(sizes[first:number], device="cpu")
            groups.append((first, number, start, offset, lengths))
            first, start = number, offset
        if size is not None and not short:
            groups.append((number, number + 1, offset, offset + size, None))
            first, start = number + 1, offset + size
        offset += size or 0
    return torch.tensor(order, device="cpu"), groups


def _aligned(parameter: Tensor) -> Tensor:
    if parameter.device.type == "meta" or parameter.data_ptr() % ALIGNED == 0:
        return parameter
    return parameter.clone()
