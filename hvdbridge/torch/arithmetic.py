"""Arithmetic around the collectives of raw operations: scaling, byte packing, and dtypes that no backend reduces.

Rules:

1. The order is Horovod's: prescale factor, reduction, postscale factor. ONE multiplication applies the postscale
   factor and divides an average. It computes in the tensor's dtype (16-bit floats: float32, integers: float64).
2. Dtypes that no backend reduces are converted: int16 to int32, complex to pairs of reals. bool takes max or min.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES, Communicator
from hvdbridge.policy.collectives import AllGather, AllReduce, ReduceScatter

COLLECTIVE_OPS = {"Sum": "sum", "Average": "sum", "Min": "min", "Max": "max", "Product": "product"}
BOOL_COLLECTIVE_OPS = {"Sum": "max", "Max": "max", "Min": "min", "Product": "min"}
MIN_SQUARED_NORM = 1.4916681462400413e-154
"""The square root of the smallest normal float64. Adasum treats a smaller squared norm as zero."""


def unsupported_reason(dtype: torch.dtype, op: str) -> str:
    """Return why ``op`` cannot reduce tensors of this dtype, or an empty string if it can.

    >>> unsupported_reason(torch.bool, "Average"), unsupported_reason(torch.bfloat16, "Sum")
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
    """Multiply ``tensor`` by ``factor`` in place (rule 1); integer products are rounded towards zero.

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
    """Scale and reduce ``buffer`` over the ranks, by ``op`` and pre- and postscale ``factors``; may overwrite it.

    Returns a contiguous tensor of the same dtype. ``ReduceScatter`` takes ``[size, ...]`` and returns row ``rank``.
    """
    scale_(buffer, factors[0])
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    collective_op = (BOOL_COLLECTIVE_OPS if buffer.dtype == torch.bool else COLLECTIVE_OPS)[op]
    reduced = comm.execute(kind(real.to(torch.int32) if real.dtype == torch.int16 else real, collective_op))
    reduced = torch.view_as_complex(reduced) if buffer.is_complex() else reduced.to(buffer.dtype)
    return scale_(reduced, factors[1] / comm.size if op == "Average" else factors[1])


def reduce_scatter(tensor: Tensor, op: str, factors: tuple[float, float], comm: Communicator) -> Tensor:
    """Return this rank's rows of the reduction. If rows do not divide evenly, the first ranks get one row more."""
    rows, remainder = divmod(tensor.shape[0], comm.size)
    counts = [rows + (rank < remainder) for rank in range(comm.size)]
    padded = tensor.new_zeros(comm.size, rows + (remainder > 0), *tensor.shape[1:])
    for shard, target in zip(tensor.split(counts), padded.unbind(), strict=True):
        target[: shard.shape[0]] = shard
    return all_reduce(padded, op, factors, comm, ReduceScatter)[: counts[comm.rank]].clone()


def adasum(tensor: Tensor, factors: tuple[float, float], comm: Communicator) -> Tensor:
    """Return the Adasum (Maleki 2020) of all ranks' tensors, in pairs: rank xor 1, 2, 4, ... Holds ``size`` tensors."""
    rows = list(comm.execute(AllGather(scale_(tensor, factors[0]))).unbind())
    while len(rows) > 1:
        rows = [_adasum_pair(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return scale_(rows[0].clone(), factors[1])


def _adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """Return ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``, computed in float64, in the dtype of ``a``.

    >>> _adasum_pair(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]))
    tensor([1.2500, 0.7500])
    """
    x, y = a.double(), b.double()
    dot, xx, yy = float((x * y).sum()), float((x * x).sum()), float((y * y).sum())
    left = 1.0 - dot / xx * 0.5 if xx >= MIN_SQUARED_NORM else 1.0
    right = 1.0 - dot / yy * 0.5 if yy >= MIN_SQUARED_NORM else 1.0
    return (left * x + right * y).to(a.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as a flat uint8 tensor: a view, or a copy if ``tensor`` is not contiguous.

    >>> as_bytes(torch.tensor([[1]], dtype=torch.int16))
    tensor([1, 0], dtype=torch.uint8)
    """
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a new tensor of this dtype and shape with a copy of the bytes in ``data`` (uint8)."""
    result = torch.empty(tuple(shape), dtype=dtype, device=data.device)
    as_bytes(result).copy_(data)
    return result
