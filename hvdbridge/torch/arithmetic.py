"""Arithmetic of raw operations around their collective: scaling, packing, and types that no library reduces.

Rules:

1. Horovod's order: factors before the reduction, then the reduction, then the factor after it with the division of an
   average in ONE multiplication, in the tensor's own type (float32 for 16-bit floats, float64 for integers).
2. Every type that travels is reduced: int16 in int32, complex numbers as pairs, bool by any and all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES, Communicator
from hvdbridge.policy.collectives import AllGather, AllReduce, ReduceScatter

OPS = {"Sum": "sum", "Average": "sum", "Min": "min", "Max": "max", "Product": "product"}
BOOL_OPS = {"Sum": "max", "Max": "max", "Min": "min", "Product": "min"}
TINY = 1.4916681462400413e-154
"""The square root of the smallest normal float64: below, a squared norm counts as zero."""


def refusal(dtype: torch.dtype, op: str) -> str:
    """Why ``op`` does not reduce tensors of this type; empty if it does.

    >>> refusal(torch.bool, "Average"), refusal(torch.bfloat16, "Sum")
    ('Average has no meaning for torch.bool', '')
    """
    known = (*DTYPES, torch.int16, torch.complex64, torch.complex128)
    if dtype not in known:
        return f"Tensor type {dtype} is not supported: one of {', '.join(map(str, known))} is"
    meaningless = dtype == torch.bool and op in ("Average", "Adasum")
    meaningless |= dtype.is_complex and op not in ("Sum", "Average")
    meaningless |= op == "Adasum" and not dtype.is_floating_point
    return f"{op} has no meaning for {dtype}" if meaningless else ""


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """Multiply in place by rule 1; integers are rounded towards zero.

    >>> scale_(torch.tensor([3, -3]), 0.5)
    tensor([ 1, -1])
    """
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def all_reduce(
    buffer: Tensor, op: str, factors: tuple[float, float], comm: Communicator,
    kind: type[AllReduce | ReduceScatter] = AllReduce,
) -> Tensor:  # fmt: skip
    """``op`` over the ranks, factors included; may work in ``buffer``, and returns contiguous memory."""
    scale_(buffer, factors[0])
    wide = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    ours = (BOOL_OPS if buffer.dtype == torch.bool else OPS)[op]
    answer = comm.execute(kind(wide.to(torch.int32) if wide.dtype == torch.int16 else wide, ours))
    answer = torch.view_as_complex(answer) if buffer.is_complex() else answer.to(buffer.dtype)
    return scale_(answer, factors[1] / comm.size if op == "Average" else factors[1])


def reduce_scatter(tensor: Tensor, op: str, factors: tuple[float, float], comm: Communicator) -> Tensor:
    """This rank's rows of the reduction; where ranks cannot have equally many, earlier ranks have one more."""
    rows, more = divmod(tensor.shape[0], comm.size)
    counts = [rows + (rank < more) for rank in range(comm.size)]
    padded = tensor.new_zeros(comm.size, rows + (more > 0), *tensor.shape[1:])
    for part, target in zip(tensor.split(counts), padded.unbind(), strict=True):
        target[: part.shape[0]] = part
    return all_reduce(padded, op, factors, comm, ReduceScatter)[: counts[comm.rank]].clone()


def adasum(tensor: Tensor, factors: tuple[float, float], comm: Communicator) -> Tensor:
    """Adasum of all ranks' tensors: pairs by rank xor 1, then 2, then 4. Gathers, and so holds, ``size`` tensors."""
    rows = list(comm.execute(AllGather(scale_(tensor, factors[0]))).unbind())
    while len(rows) > 1:
        rows = [_adasum_pair(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return scale_(rows[0].clone(), factors[1])


def _adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """
    >>> _adasum_pair(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor([1.2500, 0.7500])
    """
    x, y = a.double(), b.double()
    dot, xx, yy = float((x * y).sum()), float((x * x).sum()), float((y * y).sum())
    left = 1.0 - dot / xx * 0.5 if xx >= TINY else 1.0
    right = 1.0 - dot / yy * 0.5 if yy >= TINY else 1.0
    return (left * x + right * y).to(a.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, flat; a copy only where it is not contiguous.

    >>> as_bytes(torch.tensor([[1]], dtype=torch.int16))
    tensor([1, 0], dtype=torch.uint8)
    """
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of its own with these bytes."""
    result = torch.empty(tuple(shape), dtype=dtype, device=data.device)
    as_bytes(result).copy_(data)
    return result
