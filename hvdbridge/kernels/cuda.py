"""CUDA's kernels, in Triton. Each makes one pass over memory where torch's operations make five to eight.

Rules:

1. Kernels give the bits of the torch operations, so some ranks may lack Triton. They add in the same order, divide and
   round as in IEEE 754, and fuse no multiplication with an addition (:data:`AS_WRITTEN`).
2. One program handles one block of a code, or as many words, slots or elements as the constants below say. Operations
   on a matrix that are not element-wise are done by one program per matrix.
3. ``hvdbridge doctor --gpu`` compares the kernels' bits with the CPU's on the GPU in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.native import LINEAR, SIGN, TERNARY, Fields, report_unavailable
from hvdbridge.kernels.random import Seed
from hvdbridge.policy.capture import in_capture

F = TypeVar("F", bound=Callable[..., Any])
_broken: set[tuple[object, ...]] = set()
"""``(function, kind of code, device)`` of the kernels that did not compile."""

AS_WRITTEN = {"enable_fp_fusion": False}
SIZES = ("blocks", "messages", "rows", "code_stride", "scale_stride", "count", "capacity", "parameters", "length",
         "rank")  # fmt: skip
"""Arguments whose values Triton must not specialize a kernel for."""
WORDS = 256
"""Number of words that a program packs or unpacks, and of slots that it shuffles."""
WIDTH = 1024
"""Number of elements of each column that a program combines."""
SIDE = 16
"""Largest number of columns that :func:`orthonormal` supports, as a program holds a square matrix of that size in
registers."""


@triton.jit
def _load_block(block_table, blocks):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    start = tl.load(block_table + block)
    count = tl.load(block_table + blocks + block)
    row = tl.load(block_table + 2 * blocks + block)
    code = tl.load(block_table + 3 * blocks + block)
    scale = tl.load(block_table + 4 * blocks + block)
    return start, count, row, code, scale


@triton.jit
def _store_scale(scales, row, scale_stride, slot, scale, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    # A message's scales may begin at any byte
    if BYTES:
        bits = scale.to(tl.int32, bitcast=True)
        for k in tl.static_range(4):
            tl.store(scales + row * scale_stride + 4 * slot + k, ((bits >> (8 * k)) & 255).to(tl.uint8))
    else:
        tl.store(scales + row * scale_stride + slot, scale)


@triton.jit
def _load_scale(scales, row, scale_stride, slot, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    if BYTES:
        bits = tl.load(scales + row * scale_stride + 4 * slot).to(tl.int32)
        for k in tl.static_range(1, 4):
            bits = bits | (tl.load(scales + row * scale_stride + 4 * slot + k).to(tl.int32) << (8 * k))
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + row * scale_stride + slot)
    return scale


@triton.jit(do_not_specialize=SIZES)
def _linear_encode(  # type: ignore[no-untyped-def]
    vector, block_table, blocks, levels, codes, code_stride, scales, scale_stride,
    OFFSET: tl.constexpr, MASK: tl.constexpr, KEEP_REST: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _load_block(block_table, blocks)
    i = tl.arange(0, WIDTH)
    mask = i < count
    x = tl.load(vector + start + i, mask=mask, other=0.0)
    # Compared as integers, NaN is above inf, and inf above all finite numbers
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, levels)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    _store_scale(scales, row, scale_stride, slot, scale, BYTES)
    y = x * tl.div_rn(1.0, scale)
    floor = tl.floor(y)
    fraction = y - floor
    level = floor.to(tl.int32)
    up = (fraction > 0.5) | ((fraction == 0.5) & ((level & 1) == 1))  # half to even
    level = tl.where(up, level + 1, level)
    tl.store(codes + row * code_stride + code + i, ((level + OFFSET) & MASK).to(tl.uint8), mask=mask)
    if KEEP_REST:
        tl.store(vector + start + i, x - level.to(tl.float32) * scale, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _decode(  # type: ignore[no-untyped-def]
    vector, block_table, blocks, messages, rows, codes, code_stride, scales, scale_stride,
    SIGNS: tl.constexpr, OFFSET: tl.constexpr, ADD: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _load_block(block_table, blocks)
    i = tl.arange(0, WIDTH)
    mask = i < count
    total = tl.zeros([WIDTH], tl.float32)
    if ADD != 0:
        total = tl.load(vector + start + i, mask=mask, other=0.0)
    for message in range(messages):
        message_row = message * rows + row
        scale = _load_scale(scales, message_row, scale_stride, slot, BYTES)
        if SIGNS and BYTES:  # a message's signs are packed
            byte = tl.load(codes + message_row * code_stride + ((code + i) >> 3), mask=mask, other=0)
            stored = (byte.to(tl.int32) >> ((code + i) & 7).to(tl.int32)) & 1
        else:
            stored = tl.load(codes + message_row * code_stride + code + i, mask=mask, other=0)
        if SIGNS:
            value = (stored.to(tl.float32) - 0.5) * (2.0 * scale)
        else:
            level = stored.to(tl.int8, bitcast=True).to(tl.int32) if OFFSET == 0 else stored.to(tl.int32) - OFFSET
            value = level.to(tl.float32) * scale
        if ADD == 0:
            total = tl.where(message == 0, value, total + value)  # 0 + -0 would be +0
        elif ADD == 1:
            total = total + value
        else:
            total = total - value
    tl.store(vector + start + i, total, mask=mask)


@triton.jit
def _or_bits(words, first, bit, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    # Blocks may begin or end within a word, so two programs may write to one word
    WORD_BITS: tl.constexpr = min(WIDTH, 32)
    shifted = tl.reshape(bit.to(tl.int32), (WIDTH // WORD_BITS, WORD_BITS)) << tl.arange(0, WORD_BITS)[None, :]
    word = tl.sum(shifted, 1).to(tl.uint32, bitcast=True)
    position = first + WORD_BITS * tl.arange(0, WIDTH // WORD_BITS)
    shift = (position & 31).to(tl.uint32)
    low = word << shift
    high = (word >> 1) >> (31 - shift)
    tl.atomic_or(words + (position >> 5), low.to(tl.int32, bitcast=True), mask=low != 0, sem="relaxed")
    tl.atomic_or(words + (position >> 5) + 1, high.to(tl.int32, bitcast=True), mask=high != 0, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _sign_encode(  # type: ignore[no-untyped-def]
    vector, block_table, blocks, codes, code_stride, scales, scale_stride,
    KEEP_REST: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _load_block(block_table, blocks)
    i = tl.arange(0, WIDTH)
    mask = i < count
    x = tl.load(vector + start + i, mask=mask, other=0.0)
    partial = tl.abs(x)
    for k in tl.static_range(HALVINGS):  # in the order of quantise.row_sums
        partial = tl.sum(tl.reshape(partial, (2, WIDTH >> (k + 1))), 0)
    scale = tl.div_rn(tl.sum(partial, 0), count.to(tl.float32))
    _store_scale(scales, row, scale_stride, slot, scale, BYTES)
    bit = x >= 0.0
    if PACK:
        _or_bits(codes + row * code_stride, code, bit & mask, WIDTH)
    else:
        tl.store(codes + row * code_stride + code + i, bit.to(tl.uint8), mask=mask)
    if KEEP_REST:
        tl.store(vector + start + i, x - (bit.to(tl.float32) - 0.5) * (2.0 * scale), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _pack_codes(words, count, out, BITS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = i < count
    word = tl.load(words + i, mask=mask, other=0)
    packed = word & ((1 << BITS) - 1)
    for k in tl.static_range(1, 8):
        packed = packed | (((word >> (8 * k)) & ((1 << BITS) - 1)) << (BITS * k))
    for k in tl.static_range(BITS):
        tl.store(out + i * BITS + k, ((packed >> (8 * k)) & 255).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _unpack_codes(packed, count, words, BITS: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = i < count
    bits = tl.load(packed + i * BITS, mask=mask, other=0).to(tl.int64)
    for k in tl.static_range(1, BITS):
        bits = bits | (tl.load(packed + i * BITS + k, mask=mask, other=0).to(tl.int64) << (8 * k))
    word = bits & ((1 << BITS) - 1)
    for k in tl.static_range(1, 8):
        word = word | (((bits >> (BITS * k)) & ((1 << BITS) - 1)) << (8 * k))
    tl.store(words + i, word, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _shuffle(  # type: ignore[no-untyped-def]
    owner, count, sizes, first, pivots, salts, parameters, out, ROUNDS: tl.constexpr, WORDS: tl.constexpr
):
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = i < count
    parameter = tl.load(owner + i, mask=mask, other=0)
    size = tl.load(sizes + parameter)
    x = i - tl.load(first + parameter) - size + tl.load(pivots + parameter)  # in this order no int32 overflows
    x += (x >> 31) & size
    for _ in range(ROUNDS):
        parameter += parameters
        other = tl.load(pivots + parameter) - x
        other += (other >> 31) & size
        swap = (tl.maximum(x, other) + tl.load(salts + parameter)) * -1640531535
        swap = (swap ^ (swap >> 15)) * -2048144789
        x = tl.where(swap < 0, other, x)
    tl.store(out + i, x, mask=mask)


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    return (x + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2**52: half to even


@triton.jit(do_not_specialize=SIZES)
def _halves(  # type: ignore[no-untyped-def]
    matrices, rank, length, halves, units, HIGH: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr
):
    column = tl.program_id(0).to(tl.int64)
    row, low_offset = matrices + column * length, rank.to(tl.int64) * length
    out = halves + ((column // rank) * 2 * rank + column % rank) * length
    i = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.int32)
    for start in range(0, length, WIDTH):
        x = tl.load(row + start + i, mask=i < length - start, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is above inf
    unit = tl.max(largest, 0).to(tl.float32, bitcast=True).to(tl.float64)
    unit = tl.where(unit == 0, 1.0, unit)
    tl.store(units + column, unit)
    for start in range(0, length, WIDTH):
        mask = i < length - start
        x = tl.load(row + start + i, mask=mask, other=0.0).to(tl.float64) / (unit / HIGH)
        high = _rounded(x)
        tl.store(out + start + i, high, mask=mask)
        tl.store(out + low_offset + start + i, _rounded((x - high) * LOW), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _gram_schmidt(  # type: ignore[no-untyped-def]
    products, rank, units, epsilons, changes, SIDE: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    TOLERANCE: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIDE)
    i, j = index[:, None], index[None, :]
    mask = (i < rank) & (j < rank)
    high_rows = products + matrix * 4 * rank * rank + i * 2 * rank + j
    low_rows = high_rows + 2 * rank * rank
    mixed = tl.load(high_rows + rank, mask=mask, other=0.0) + tl.load(low_rows, mask=mask, other=0.0)
    low = tl.load(low_rows + rank, mask=mask, other=0.0)
    gram = (tl.load(high_rows, mask=mask, other=0.0) + (mixed + low / LOW) / LOW) / (HIGH * HIGH)
    change = (i == j).to(tl.float64)
    first = tl.sum(tl.where(i == j, gram, 0.0), 0)
    unit = tl.load(units + matrix * rank + index, mask=index < rank, other=1.0)
    epsilon = tl.load(epsilons)
    for k in range(rank):  # sums over one nonzero element select it
        square = tl.sum(tl.sum(tl.where((i == k) & (j == k), gram, 0.0), 0), 0)
        dependent = square <= TOLERANCE * TOLERANCE * tl.sum(tl.where(index == k, first, 0.0), 0)
        length = tl.sqrt(tl.where(dependent, 1.0, square))
        scale = tl.sum(tl.where(index == k, unit, 0.0), 0)
        factor = tl.where(epsilon > 0, scale / (scale * length + epsilon), 1.0 / length)
        factor = tl.where(dependent, 0.0, factor)
        gram = tl.where(i == k, gram * factor, gram)
        gram = tl.where(j == k, gram * factor, gram)
        change = tl.where(j == k, change * factor, change)
        projections = tl.sum(tl.where(i == k, gram, 0.0), 0)
        correction = 2.0 - tl.sum(tl.where(index == k, projections, 0.0), 0)
        column = tl.sum(tl.where(j == k, change, 0.0), 1)
        change = tl.where(j > k, change - column[:, None] * projections[None, :], change)
        gram = tl.where((i > k) & (j > k), gram - correction * (projections[:, None] * projections[None, :]), gram)
    tl.store(changes + matrix * rank * rank + i * rank + j, change, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _combine(  # type: ignore[no-untyped-def]
    halves, rank, length, changes, blocks, out, HIGH: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr
):
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i = block * WIDTH + tl.arange(0, WIDTH)
    mask, low_offset = i < length, rank.to(tl.int64) * length
    for j in range(rank):
        total = tl.zeros([WIDTH], tl.float64)
        for k in range(j + 1):
            row = halves + (matrix * 2 * rank + k) * length + i
            high, low = tl.load(row, mask=mask, other=0.0), tl.load(row + low_offset, mask=mask, other=0.0)
            term = tl.load(changes + (matrix * rank + k) * rank + j) * ((high + low / LOW) / HIGH)
            total = tl.where(k == 0, term, total + term)
        tl.store(out + (matrix * rank + j) * length + i, total.to(tl.float32), mask=mask)


def _none_if_broken(function: F) -> F:
    """Make a function return None, after one warning, if its kernel does not compile. Callers then use torch instead.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``.
    """

    @wraps(function)
    def attempt(*arguments: Any) -> Any:
        kind = arguments[0].get("kind") if isinstance(arguments[0], Mapping) else None
        device = next((argument.device for argument in arguments if isinstance(argument, Tensor)), None)
        key = function.__name__, kind, device
        if key in _broken:
            return None
        try:
            return function(*arguments)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton and the C compiler that it runs may raise anything
            # The device is unusable, is full, or takes no module now
            if "CUDA error" in str(error) or "out of memory" in str(error) or in_capture():
                raise
            if not any(name == function.__name__ for name, *_ in _broken):
                report_unavailable(f"Triton's kernel {function.__name__}", "Triton and a C compiler", error)
            _broken.add(key)
            return None

    return cast(F, attempt)


@_none_if_broken
def encode(
    fields: Fields, flat: Tensor, blocks: Blocks, codes: Tensor, scales: Tensor, keep_rest: bool, seed: Seed
) -> bool | None:
    """See :meth:`NativeKernels.encode <hvdbridge.kernels.fused.NativeKernels.encode>`.

    Supports signs, and linear codes by the largest magnitude, rounded to the nearest. If ``codes`` is int32, it must
    hold zeros, and takes 32 signs per word. If ``scales`` is uint8, it takes their bytes.
    """
    kind = fields.get("kind")
    if not blocks.fits_kernels or kind not in (LINEAR, SIGN) or fields.get("l2") or fields.get("random"):
        return None
    inputs = flat, blocks.sorted_table, blocks.count
    outputs = codes, codes.stride(0), scales, scales.stride(0)
    constants: dict[str, Any] = {"KEEP_REST": keep_rest, "BYTES": scales.dtype == torch.uint8, "WIDTH": blocks.width}
    if kind == LINEAR:
        constants |= {"OFFSET": fields["offset"], "MASK": fields["mask"]}
        _launch(_linear_encode, blocks.count, *inputs, float(fields["levels"]), *outputs, **constants)
    else:
        constants |= {"HALVINGS": blocks.width.bit_length() - 1, "PACK": codes.dtype == torch.int32}
        _launch(_sign_encode, blocks.count, *inputs, *outputs, **constants, num_warps=1)  # halving needs no barrier
    return True


@_none_if_broken
def decode(fields: Fields, codes: Tensor, scales: Tensor, blocks: Blocks, out: Tensor, add: int) -> bool | None:
    """See :meth:`NativeKernels.decode <hvdbridge.kernels.fused.NativeKernels.decode>`.

    If ``scales`` is uint8, both are those of messages: bytes of scales, and eight signs per byte.
    """
    kind = fields.get("kind")
    if not blocks.fits_kernels or kind not in (LINEAR, TERNARY, SIGN):
        return None
    _launch(
        _decode, blocks.count, out, blocks.sorted_table, blocks.count, codes.shape[0] // blocks.rows, blocks.rows,
        codes, codes.stride(0), scales, scales.stride(0), SIGNS=kind == SIGN, OFFSET=fields.get("offset", 0), ADD=add,
        BYTES=scales.dtype == torch.uint8, WIDTH=blocks.width,
    )  # fmt: skip
    return True


@_none_if_broken
def pack_codes(codes: Tensor, bits: int, packed: Tensor) -> bool:
    """Pack groups of eight codes, a byte each, into ``bits`` bytes each of ``packed``."""
    words = codes.view(torch.int64).view(-1)
    programs = triton.cdiv(words.numel(), WORDS)
    _launch(_pack_codes, programs, words, words.numel(), packed, BITS=bits, WORDS=WORDS)
    return True


@_none_if_broken
def unpack_codes(packed: Tensor, bits: int, codes: Tensor) -> bool:
    """The inverse of :func:`pack_codes`."""
    words = codes.view(torch.int64).view(-1)
    programs = triton.cdiv(words.numel(), WORDS)
    _launch(_unpack_codes, programs, packed, words.numel(), words, BITS=bits, WORDS=WORDS)
    return True


@_none_if_broken
def shuffle(owner: Tensor, sizes: Tensor, first: Tensor, pivots: Tensor, salts: Tensor) -> Tensor:
    """See :func:`~hvdbridge.kernels.shuffle.permuted`."""
    out = torch.empty(owner.numel(), dtype=torch.int32, device=owner.device)
    _launch(
        _shuffle, triton.cdiv(owner.numel(), WORDS), owner, owner.numel(), sizes, first, pivots, salts, len(sizes),
        out, ROUNDS=len(pivots) - 1, WORDS=WORDS,
    )  # fmt: skip
    return out


@_none_if_broken
def orthonormal(batch: Tensor, epsilon: float, high: float, low: float, tolerance: float) -> Tensor:
    """See :func:`~hvdbridge.kernels.orthogonal.orthonormal`, whose module has the constants. Supports float32 only."""
    count, rank, length = batch.shape
    options: dict[str, Any] = {"dtype": torch.float64, "device": batch.device}
    halves = torch.empty((count, 2 * rank, length), **options)
    units, changes = torch.empty((count, rank), **options), torch.empty((count, rank, rank), **options)
    epsilons = torch.full((1,), epsilon, **options)  # Triton passes Python floats as float32
    out, blocks = torch.empty_like(batch), triton.cdiv(length, WIDTH)
    scales = {"HIGH": high, "LOW": low}
    _launch(_halves, count * rank, batch, rank, length, halves, units, **scales, WIDTH=4 * WIDTH, num_warps=8)
    products = torch.bmm(halves, halves.mT)
    _launch(_gram_schmidt, count, products, rank, units, epsilons, changes, **scales, SIDE=SIDE, TOLERANCE=tolerance)
    _launch(_combine, count * blocks, halves, rank, length, changes, blocks, out, **scales, WIDTH=WIDTH)
    return out


def _launch(kernel: Any, programs: int, first: Tensor, *arguments: object, **constants: object) -> None:
    """Run ``kernel`` on the device and the current stream of ``first``, its first argument."""
    if programs:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[(programs,)](first, *arguments, **constants, **AS_WRITTEN)
