"""Inputs of each rank to a collective, which all ranks can compute, and checks of the answer without communication.

Integers are reduced exactly, as Python's, and then wrapped into the dtype; floats are reduced with 80 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES

SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (5, 3), (2051,))
"""Scalar, empty and odd sizes; 2,051 elements of 2 bytes or more exceed the path for small messages."""

LAYOUTS = ("transposed", "strided", "expanded", "channels_last", "requires_grad")
OPS = ("sum", "product", "min", "max")
BITS = {torch.int8: 8, torch.uint8: 8, torch.int32: 32, torch.int64: 64}


def values(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a rank's tensor: the whole range of an integer dtype, or floats of both signs around magnitude 1."""
    rng = np.random.default_rng([rank, *map(ord, str(dtype)), *shape])
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.random(shape) < 0.7))
    if dtype in BITS:
        info = torch.iinfo(dtype)
        numbers = rng.integers(info.min, info.max, shape, dtype=str(dtype).removeprefix("torch."), endpoint=True)
        return torch.from_numpy(np.asarray(numbers))
    numbers = rng.uniform(0.25, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
    return torch.from_numpy(np.asarray(numbers)).to(dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the values of a 4-d ``tensor`` in another memory layout."""
    if layout == "transposed":
        return tensor.transpose(1, 3).contiguous().transpose(1, 3)
    if layout == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "requires_grad":
        return tensor.clone().requires_grad_(tensor.is_floating_point())
    assert layout == "expanded", layout
    return tensor[:, :1].clone().expand(tensor.shape)


def cases(size: int, rows: int | None = None) -> Iterator[tuple[torch.dtype, tuple[int, ...], str]]:
    """Yield (dtype, shape, layout) of every kind; ``rows`` is the first dimension that the collective requires.

    Two ranks test all dtypes. Three ranks test four: a float that the libraries add, one that hvdbridge adds, int64 and
    bool. Four ranks test groups, with a single dtype.
    """
    prefix = () if rows is None else (rows,)
    subset = {3: (torch.float32, torch.bfloat16, torch.int64, torch.bool), 4: (torch.float32,)}
    for dtype in subset.get(size, DTYPES):
        for shape in SHAPES:
            yield dtype, (*prefix, *shape), "contiguous"
        for layout in LAYOUTS:
            yield dtype, (rows or 2, 3, 5, 4), layout


def input_of(rank: int, dtype: torch.dtype, shape: Sequence[int], layout: str) -> Tensor:
    tensor = values(rank, shape, dtype)
    return tensor if layout == "contiguous" else laid_out(tensor, layout)


def ops(dtype: torch.dtype, layout: str = "contiguous") -> Sequence[str]:
    """Return the reductions to test: all that ``dtype`` has, or a single one for a layout that is not contiguous."""
    if layout != "contiguous":
        return ("max",) if dtype == torch.bool else ("sum",)
    return ("min", "max") if dtype == torch.bool else OPS


def reduction_error(answer: Tensor, inputs: Sequence[Tensor], op: str) -> str:
    """Return why ``answer`` is not the reduction of ``inputs``; "" if it is.

    The tolerance: a sum of N floats in any order, with unit roundoff u, is off by at most ``(N-1) u/(1 - (N-1) u)``
    times the sum of their magnitudes, and a product by at most that fraction of itself (Higham 2002, 3.1 and 4.2).
    The result for two operands is rounded once, and must be exact.
    """
    first = inputs[0]
    if answer.dtype != first.dtype or answer.shape != first.shape:
        return f"answered {answer.dtype} {list(answer.shape)} to {first.dtype} {list(first.shape)}"
    if op in ("min", "max") or len(inputs) == 1:
        expected = first.clone()
        for other in inputs[1:]:
            expected = torch.minimum(expected, other) if op == "min" else torch.maximum(expected, other)
        return difference(answer, expected, 0.0)
    if first.dtype in BITS:
        return difference(answer, _wrapped(inputs, op), 0.0)
    if len(inputs) == 2:
        return difference(answer, inputs[0] + inputs[1] if op == "sum" else inputs[0] * inputs[1], 0.0)
    wide = np.stack([t.detach().to(torch.float64).numpy().astype(np.longdouble) for t in inputs])
    exact = wide.sum(0) if op == "sum" else wide.prod(0)
    magnitude = np.abs(wide).sum(0) if op == "sum" else np.abs(exact)
    unit = (len(inputs) - 1) * torch.finfo(first.dtype).eps / 2
    error = np.abs(answer.to(torch.float64).numpy().astype(np.longdouble) - exact)
    worst = float((error - magnitude * (unit / (1 - unit))).max(initial=-math.inf))
    return "" if worst <= 0 else f"off by {worst:.3g} more than {len(inputs) - 1} roundings explain"


def _wrapped(inputs: Sequence[Tensor], op: str) -> Tensor:
    total = np.array(inputs[0].tolist(), dtype=object)
    for other in inputs[1:]:
        more = np.array(other.tolist(), dtype=object)
        total = total + more if op == "sum" else total * more
    bits = BITS[inputs[0].dtype]
    low = torch.iinfo(inputs[0].dtype).min
    numbers = [(int(x) - low) % (1 << bits) + low for x in np.ravel(total)]
    return torch.tensor(numbers, dtype=inputs[0].dtype).view(inputs[0].shape)


def difference(answer: Tensor, expected: Tensor, allowed: float) -> str:
    """Return where two tensors differ by more than ``allowed``, or "" if nowhere; NaN equals NaN."""
    answer, expected = answer.detach(), expected.detach()
    if answer.dtype != expected.dtype or answer.shape != expected.shape:
        return f"got {answer.dtype} {list(answer.shape)}, expected {expected.dtype} {list(expected.shape)}"
    a, e = answer.reshape(-1), expected.reshape(-1)
    wrong = (
        ~torch.isclose(a.double(), e.double(), rtol=0.0, atol=allowed, equal_nan=True)
        if a.is_floating_point()
        else a != e
    )
    if not wrong.any():
        return ""
    i = int(wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {a.numel()} elements differ, the first at {i}: got {a[i]}, expected {e[i]}"


def bits(tensor: Tensor) -> bytes:
    numbers = tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return numbers.numpy().tobytes()
