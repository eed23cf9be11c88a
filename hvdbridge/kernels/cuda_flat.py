"""CUDA's kernels for flat vectors of several parameters, in Triton, by the rules of :mod:`.cuda`.

Kernels are specialized for lengths that are multiples of 16, since loads and stores are wide then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvdbridge.kernels.cuda import SIZES, WIDTH, _launch, _none_if_broken

VALUES = (torch.float32, torch.float16, torch.bfloat16)
"""Supported types of vectors."""


@triton.jit
def _owners(i, ends, parameters, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    # The first parameter whose end is above i, by bisection
    low = i * 0
    high = low + parameters - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        right = tl.load(ends + middle) <= i
        low = tl.where(right & (low < high), middle + 1, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=("parameters",))
def _finite(flat, count, ends, parameters, flags, STEPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(flat + i, mask=i < count, other=0.0).to(tl.float32)
    faulty = (x - x) != 0.0  # inf - inf is NaN
    if tl.sum(faulty.to(tl.int32), 0) > 0:  # rarely
        tl.store(flags + _owners(i, ends, parameters, STEPS), 0, mask=faulty)
        tl.store(flags + parameters, 0)


@triton.jit(do_not_specialize=("parameters",))
def _keep(new, old, count, ends, parameters, flags, out, STEPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < count
    x = tl.load(new + i, mask=mask, other=0.0)
    if tl.load(flags + parameters) == 0:  # rarely
        kept = tl.load(flags + _owners(i, ends, parameters, STEPS), mask=mask, other=0) == 0
        x = tl.where(kept, tl.load(old + i, mask=mask, other=0.0), x)
    tl.store(out + i, x, mask=mask)


@triton.jit(do_not_specialize=("count",))
def _sum_rows(vectors, count, length, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = i < length
    total = tl.load(vectors + i, mask=mask, other=0.0).to(tl.float32)
    start = length.to(tl.int64) * 0
    for _ in range(1, count):
        start += length
        total += tl.load(vectors + start + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + i, total, mask=mask)


@triton.jit
def _bfloat16(x):  # type: ignore[no-untyped-def]
    # Half to even; Triton's interpreter truncates
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=("blocks",))
def _move(  # type: ignore[no-untyped-def]
    target, source, table, blocks, alpha, TO_ROWS: tl.constexpr, ADD: tl.constexpr, WIDTH: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    start, offset = tl.load(table + block), tl.load(table + blocks + block)
    if TO_ROWS:
        source += start
        target += offset
    else:
        source += offset
        target += start
    i = tl.arange(0, WIDTH)
    mask = i < tl.load(table + 2 * blocks + block)
    x = tl.load(source + i, mask=mask, other=0.0).to(tl.float32) * alpha
    if ADD:
        x += tl.load(target + i, mask=mask, other=0.0).to(tl.float32)
    if target.dtype.element_ty == tl.bfloat16:
        tl.store(target + i, _bfloat16(x), mask=mask)
    else:
        tl.store(target + i, x, mask=mask)


@triton.jit
def _magnitude(row, length, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    # The largest one of a row
    i = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for start in range(0, length, WIDTH):
        x = tl.load(row + start + i, mask=i < length - start, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is above inf
    return tl.max(largest, 0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
def _normalize(rows, length, factor, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * length
    largest = _magnitude(rows + first, length, WIDTH)
    unit = tl.where(largest == 0.0, 1.0, largest) * factor
    i = tl.arange(0, WIDTH)
    for start in range(0, length, WIDTH):
        mask = i < length - start
        x = tl.load(rows + first + start + i, mask=mask, other=0.0)
        tl.store(out + first + start + i, tl.div_rn(x, unit), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _restore(new, old, length, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * length
    largest = _magnitude(new + first, length, WIDTH)
    i = tl.arange(0, WIDTH)
    for start in range(0, length, WIDTH):
        mask = i < length - start
        x = tl.load(new + first + start + i, mask=mask, other=0.0)
        y = tl.load(old + first + start + i, mask=mask, other=0.0)
        tl.store(out + first + start + i, tl.where(largest == 0.0, y, x), mask=mask)


@_none_if_broken
def finite(flat: Tensor, ends: Tensor) -> Tensor:
    """Return whether all elements of each parameter are finite, and after that whether all are: uint8 ``[n + 1]``.

    Args:
        flat: one of :data:`VALUES`, contiguous.
        ends: int64 ``[n]``: the element after each parameter's last one.
    """
    flags = torch.ones(len(ends) + 1, dtype=torch.uint8, device=flat.device)
    _launch(_finite, triton.cdiv(flat.numel(), WIDTH), flat, flat.numel(), ends, len(ends), flags, **_sizes(ends))
    return flags


@_none_if_broken
def keep(new: Tensor, old: Tensor, ends: Tensor, flags: Tensor, out: Tensor) -> Tensor:
    """Write ``new`` to ``out``, but ``old`` for parameters whose flag is 0 (:func:`finite`). Equal types and sizes."""
    programs = triton.cdiv(new.numel(), WIDTH)
    _launch(_keep, programs, new, old, new.numel(), ends, len(ends), flags, out, **_sizes(ends))
    return out


@_none_if_broken
def sum_rows(rows: Tensor, out: Tensor) -> Tensor:
    """Write the sum of the rows, added in their order, to ``out``: float32 ``[n]``."""
    length = out.numel()
    _launch(_sum_rows, triton.cdiv(length, WIDTH), rows, len(rows), length, out, WIDTH=WIDTH)
    return out


@_none_if_broken
def move(target: Tensor, source: Tensor, table: Tensor, to_rows: bool, alpha: float = 1.0, add: bool = False) -> bool:
    """Write ``alpha`` times the blocks of ``source`` to ``target``, or add them. Computes in float32.

    Args:
        table: int64 ``[3, blocks]``: each block's start in a vector, its start in rows, and its size, at most 1024.
        to_rows: ``source`` is the vector and ``target`` the rows; else the reverse.
    """
    blocks = table.shape[1]
    _launch(_move, blocks, target, source, table, blocks, alpha, TO_ROWS=to_rows, ADD=add, WIDTH=WIDTH)
    return True


@_none_if_broken
def normalized(rows: Tensor) -> Tensor | None:
    """Return ``rows`` ``[..., length]``, each divided by its largest magnitude (zeros by 1) times sqrt(length)."""
    if rows.dtype != torch.float32:
        return None
    out, length = torch.empty_like(rows), rows.shape[-1]
    _launch(_normalize, rows.numel() // max(1, length), rows, length, math.sqrt(length), out, WIDTH=WIDTH)
    return out


@_none_if_broken
def restored(new: Tensor, old: Tensor) -> Tensor | None:
    """Return ``new`` ``[..., length]`` with each row of zeros replaced by that of ``old``."""
    if new.dtype != torch.float32 or old.dtype != torch.float32:
        return None
    out, length = torch.empty_like(new), new.shape[-1]
    _launch(_restore, new.numel() // max(1, length), new, old, length, out, WIDTH=WIDTH)
    return out


def _sizes(ends: Tensor) -> dict[str, Any]:
    return {"STEPS": len(ends).bit_length(), "WIDTH": WIDTH}
