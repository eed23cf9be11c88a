"""CUDA's kernels that list the elements of large magnitude, in Triton, by the rules of :mod:`.cuda`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvdbridge.kernels.candidates import BLOCK
from hvdbridge.kernels.cuda import _launch, _none_if_broken

HEIGHT, WARPS = BLOCK // 32, 4
"""Words of 32 elements in a program's block, and its warps. Programs of 32 words and one warp are slower, as the number
of programs decides how long listing the positions takes."""


@triton.jit
def _popcount(word):  # type: ignore[no-untyped-def]
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 63


@triton.jit(do_not_specialize=("blocks",))
def _threshold_bits(  # type: ignore[no-untyped-def]
    bits, table, blocks, limits, bitmaps, counts, HEIGHT: tl.constexpr, ALIGNED: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    bound = tl.load(limits + tl.load(table + block))
    start = tl.load(table + blocks + block)
    count = tl.load(table + 2 * blocks + block)
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    row = tl.arange(0, HEIGHT)
    bit = tl.arange(0, 32)[None, :]
    i = row[:, None] * 32 + bit
    if count == HEIGHT * 32:  # without a mask, a load reads four elements
        x = tl.load(bits + start + i)
    else:
        x = tl.load(bits + start + i, mask=i < count, other=0)
    x = x & 0x7FFFFFFF
    bitmap = tl.sum((x > bound).to(tl.int32) << bit, 1)
    tl.store(bitmaps + block * HEIGHT + row, bitmap)
    tl.store(counts + block, tl.sum(_popcount(bitmap), 0))
    equal = (x == bound).to(tl.int32)
    equal_count = tl.sum(tl.sum(equal, 1), 0)
    tl.store(counts + blocks + block, equal_count)
    if equal_count > 0:  # rarely
        tl.store(bitmaps + (blocks + block) * HEIGHT + row, tl.sum(equal << bit, 1))


@triton.jit
def _list_block(bitmaps, index, slot, position, out, size, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, HEIGHT)
    bitmap = tl.load(bitmaps + index * HEIGHT + row)
    counts = _popcount(bitmap)
    slot = slot + tl.cumsum(counts, 0) - counts
    first = position + row * 32
    for _ in range(tl.max(counts, 0)):  # each iteration removes every bitmap's lowest bit
        lowest = bitmap & -bitmap
        bit = _popcount(lowest - 1)
        tl.store(out + slot, (first + bit).to(tl.int32), mask=(bitmap != 0) & (slot < size))
        bitmap = bitmap & (bitmap - 1)
        slot += 1


@triton.jit(do_not_specialize=("blocks", "parts"))
def _list(  # type: ignore[no-untyped-def]
    bitmaps, table, blocks, part_table, parts, counts, ends, positions, HEIGHT: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    part, start = tl.load(table + block), tl.load(table + blocks + block)
    first = tl.load(part_table + part)
    last = tl.load(part_table + parts + part)
    out = positions + tl.load(part_table + 2 * parts + part)
    size = tl.load(part_table + 3 * parts + part)
    larger, equal = tl.load(counts + block), tl.load(counts + blocks + block)
    before = tl.load(ends + first) - tl.load(counts + first)  # in earlier parts
    _list_block(bitmaps, block, tl.load(ends + block) - larger - before, start, out, size, HEIGHT)
    if equal > 0:
        slot = tl.load(ends + last) - before  # the larger ones of the part come first
        slot += tl.load(ends + blocks + block) - equal
        slot -= tl.load(ends + blocks + first) - tl.load(counts + blocks + first)
        _list_block(bitmaps, blocks + block, slot, start, out, size, HEIGHT)


@_none_if_broken
def threshold_positions(
    bits: Tensor, limits: Tensor, table: Tensor, part_table: Tensor, positions: Tensor, aligned: bool
) -> bool:
    """Write to ``positions`` where magnitudes reach the limit of their part, without reading the vector twice.

    The first kernel writes a bit per element that is larger, and one per element that is equal; the second lists them.

    Args:
        bits: bits of float32 numbers, int32 ``[n]``, contiguous.
        limits: int32 ``[parts]``, positive: the bits of a magnitude.
        table: int64 ``[3, blocks]``: part, start and number of elements of each block, at most ``BLOCK``.
        part_table: int64 ``[4, parts]``: first and last block of each part, its offset in ``positions``, its capacity.
        positions: int32, all -1. Receives for each part the positions of larger elements, ascending, then those of
            equal elements, until its capacity is reached.
        aligned: all starts are multiples of 4.
    """
    blocks, parts = table.shape[1], part_table.shape[1]
    bitmaps = torch.empty((2, blocks, HEIGHT), dtype=torch.int32, device=bits.device)
    counts = torch.empty(2 * blocks, dtype=torch.int32, device=bits.device)
    constants = {"HEIGHT": HEIGHT, "num_warps": WARPS}
    _launch(_threshold_bits, blocks, bits, table, blocks, limits, bitmaps, counts, ALIGNED=aligned, **constants)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    _launch(_list, blocks, bitmaps, table, blocks, part_table, parts, counts, ends, positions, **constants)
    return True
