"""CUDA's kernels, in Triton: one pass over memory where torch's operations make five to eight.

Rules:

1. The bits are those of the torch operations, so ranks need not agree on who has Triton: additions in the same order,
   divisions and roundings as IEEE 754 has them, nothing contracted (:data:`AS_WRITTEN`).
2. One program handles one block of a code, or so many words, slots or elements as stands below; the work of a matrix
   that is not element by element is one program's.
3. ``hvdbridge doctor --gpu`` compares the bits on the device at hand with the CPU's.
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
from hvdbridge.kernels.native import LINEAR, SIGN, TERNARY, Fields, does_not_work

F = TypeVar("F", bound=Callable[..., Any])
_broken: set[tuple[object, ...]] = set()
"""Functions of this module whose kernels did not compile."""

AS_WRITTEN = {"enable_fp_fusion": False}
SIZES = ("blocks", "messages", "rows", "code_stride", "scale_stride", "count", "room", "parameters", "length",
         "rank")  # fmt: skip
"""Arguments by whose values no kernels of their own are made."""
WORDS = 256
"""That a program packs; slots that it shuffles."""
WIDTH = 1024
"""Elements of a column that it combines."""
HEIGHT, WARPS = 256, 4
"""Words of 32 elements that a program looks through, and by how many warps: of 32 and one, a GPU needs four times as
long to list what was found, since it is the number of programs that takes time."""
SIDE = 16
"""Columns that :func:`orthonormal` takes at most: a square of so many numbers is in a program's registers."""


@triton.jit
def _place(places, blocks):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64)
    start = tl.load(places + at)
    count = tl.load(places + blocks + at)
    row = tl.load(places + 2 * blocks + at)
    code = tl.load(places + 3 * blocks + at)
    scale = tl.load(places + 4 * blocks + at)
    return start, count, row, code, scale


@triton.jit(do_not_specialize=SIZES)
def _linear_encode(  # type: ignore[no-untyped-def]
    vector, places, blocks, levels, codes, code_stride, scales, scale_stride,
    OFFSET: tl.constexpr, MASK: tl.constexpr, KEEP_REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _place(places, blocks)
    i = tl.arange(0, WIDTH)
    inside = i < count
    x = tl.load(vector + start + i, mask=inside, other=0.0)
    # As integers NaN is above inf, and inf above all numbers
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, levels)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    tl.store(scales + row * scale_stride + slot, scale)
    y = x * tl.div_rn(1.0, scale)
    below = tl.floor(y)
    above = y - below
    whole = below.to(tl.int32)
    up = (above > 0.5) | ((above == 0.5) & ((whole & 1) == 1))  # half to even
    whole = tl.where(up, whole + 1, whole)
    tl.store(codes + row * code_stride + code + i, ((whole + OFFSET) & MASK).to(tl.uint8), mask=inside)
    if KEEP_REST:
        tl.store(vector + start + i, x - whole.to(tl.float32) * scale, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _decode(  # type: ignore[no-untyped-def]
    vector, places, blocks, messages, rows, codes, code_stride, scales, scale_stride,
    SIGNS: tl.constexpr, OFFSET: tl.constexpr, ADD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _place(places, blocks)
    i = tl.arange(0, WIDTH)
    inside = i < count
    total = tl.zeros([WIDTH], tl.float32)
    if ADD != 0:
        total = tl.load(vector + start + i, mask=inside, other=0.0)
    for message in range(messages):
        at = message * rows + row
        given = tl.load(codes + at * code_stride + code + i, mask=inside, other=0)
        scale = tl.load(scales + at * scale_stride + slot)
        if SIGNS:
            part = (given.to(tl.float32) - 0.5) * (2.0 * scale)
        else:
            whole = given.to(tl.int8, bitcast=True).to(tl.int32) if OFFSET == 0 else given.to(tl.int32) - OFFSET
            part = whole.to(tl.float32) * scale
        if ADD == 0:
            total = tl.where(message == 0, part, total + part)  # a first -0 stays one
        elif ADD == 1:
            total = total + part
        else:
            total = total - part
    tl.store(vector + start + i, total, mask=inside)


@triton.jit
def _or_bits(words, first, bit, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    # A block need not begin or end with a word, so neighbours may share one
    EACH: tl.constexpr = min(WIDTH, 32)
    each = tl.reshape(bit.to(tl.int32), (WIDTH // EACH, EACH)) << tl.arange(0, EACH)[None, :]
    word = tl.sum(each, 1).to(tl.uint32, bitcast=True)
    at = first + EACH * tl.arange(0, WIDTH // EACH)
    shift = (at & 31).to(tl.uint32)
    low = word << shift
    high = (word >> 1) >> (31 - shift)
    tl.atomic_or(words + (at >> 5), low.to(tl.int32, bitcast=True), mask=low != 0, sem="relaxed")
    tl.atomic_or(words + (at >> 5) + 1, high.to(tl.int32, bitcast=True), mask=high != 0, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def _sign_encode(  # type: ignore[no-untyped-def]
    vector, places, blocks, codes, code_stride, scales, scale_stride,
    KEEP_REST: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    start, count, row, code, slot = _place(places, blocks)
    i = tl.arange(0, WIDTH)
    inside = i < count
    x = tl.load(vector + start + i, mask=inside, other=0.0)
    part = tl.abs(x)
    for k in tl.static_range(HALVINGS):  # quantise.row_sums
        part = tl.sum(tl.reshape(part, (2, WIDTH >> (k + 1))), 0)
    scale = tl.div_rn(tl.sum(part, 0), count.to(tl.float32))
    tl.store(scales + row * scale_stride + slot, scale)
    bit = x >= 0.0
    if PACK:
        _or_bits(codes + row * code_stride, code, bit & inside, WIDTH)
    else:
        tl.store(codes + row * code_stride + code + i, bit.to(tl.uint8), mask=inside)
    if KEEP_REST:
        tl.store(vector + start + i, x - (bit.to(tl.float32) - 0.5) * (2.0 * scale), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _squeeze(words, count, out, BITS: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    inside = i < count
    word = tl.load(words + i, mask=inside, other=0)
    packed = word & ((1 << BITS) - 1)
    for k in tl.static_range(1, 8):
        packed = packed | (((word >> (8 * k)) & ((1 << BITS) - 1)) << (BITS * k))
    for k in tl.static_range(BITS):
        tl.store(out + i * BITS + k, ((packed >> (8 * k)) & 255).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _spread(packed, count, words, BITS: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * EACH + tl.arange(0, EACH)
    inside = i < count
    bits = tl.load(packed + i * BITS, mask=inside, other=0).to(tl.int64)
    for k in tl.static_range(1, BITS):
        bits = bits | (tl.load(packed + i * BITS + k, mask=inside, other=0).to(tl.int64) << (8 * k))
    word = bits & ((1 << BITS) - 1)
    for k in tl.static_range(1, 8):
        word = word | (((bits >> (BITS * k)) & ((1 << BITS) - 1)) << (8 * k))
    tl.store(words + i, word, mask=inside)


@triton.jit
def _ones(word):  # type: ignore[no-untyped-def]
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 63


@triton.jit(do_not_specialize=SIZES)
def _mark(bits, count, limit, words, counts, blocks, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64)
    row, bound = tl.arange(0, HEIGHT), tl.load(limit)
    bit = tl.arange(0, 32)[None, :]
    first = at * HEIGHT * 32
    i = row[:, None] * 32 + bit
    if first + HEIGHT * 32 <= count:  # without a mask, four elements are one load
        x = tl.load(bits + first + i)
    else:
        x = tl.load(bits + first + i, mask=i < count - first, other=0)
    x = x & 0x7FFFFFFF
    word = tl.sum((x > bound).to(tl.int32) << bit, 1)
    tl.store(words + at * HEIGHT + row, word)
    tl.store(counts + at, tl.sum(_ones(word), 0))
    equal = (x == bound).to(tl.int32)
    number = tl.sum(tl.sum(equal, 1), 0)
    tl.store(counts + blocks + at, number)
    if number > 0:  # which is rare
        tl.store(words + (blocks + at) * HEIGHT + row, tl.sum(equal << bit, 1))


@triton.jit
def _put(words, ends, at, number, block, positions, room, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, HEIGHT)
    word = tl.load(words + at * HEIGHT + row)
    each = _ones(word)
    slot = tl.load(ends + at) - number + tl.cumsum(each, 0) - each
    place = block * HEIGHT * 32 + row * 32
    for _ in range(tl.max(each, 0)):  # each word's lowest bit that is left
        lowest = word & -word
        bit = _ones(lowest - 1)
        tl.store(positions + slot, (place + bit).to(tl.int32), mask=(word != 0) & (slot < room))
        word = word & (word - 1)
        slot += 1


@triton.jit(do_not_specialize=SIZES)
def _list(words, counts, ends, blocks, positions, room, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64)
    larger, equal = tl.load(counts + block), tl.load(counts + blocks + block)
    _put(words, ends, block, larger, block, positions, room, HEIGHT)
    if equal > 0:
        _put(words, ends, blocks + block, equal, block, positions, room, HEIGHT)


@triton.jit(do_not_specialize=SIZES)
def _shuffle(  # type: ignore[no-untyped-def]
    owner, count, sizes, first, pivots, salts, parameters, out, ROUNDS: tl.constexpr, EACH: tl.constexpr
):
    i = tl.program_id(0) * EACH + tl.arange(0, EACH)
    inside = i < count
    own = tl.load(owner + i, mask=inside, other=0)
    size = tl.load(sizes + own)
    x = i - tl.load(first + own) - size + tl.load(pivots + own)  # in this order never more than an int32 holds
    x += (x >> 31) & size
    for _ in range(ROUNDS):
        own += parameters
        other = tl.load(pivots + own) - x
        other += (other >> 31) & size
        swap = (tl.maximum(x, other) + tl.load(salts + own)) * -1640531535
        swap = (swap ^ (swap >> 15)) * -2048144789
        x = tl.where(swap < 0, other, x)
    tl.store(out + i, x, mask=inside)


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    return (x + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2**52: half to even


@triton.jit(do_not_specialize=SIZES)
def _halves(  # type: ignore[no-untyped-def]
    matrices, rank, length, halves, units, HIGH: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row, below = matrices + at * length, rank.to(tl.int64) * length
    out = halves + ((at // rank) * 2 * rank + at % rank) * length
    i = tl.arange(0, WIDTH)
    top = tl.zeros([WIDTH], tl.int32)
    for start in range(0, length, WIDTH):
        x = tl.load(row + start + i, mask=i < length - start, other=0.0)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is above inf
    unit = tl.max(top, 0).to(tl.float32, bitcast=True).to(tl.float64)
    unit = tl.where(unit == 0, 1.0, unit)
    tl.store(units + at, unit)
    for start in range(0, length, WIDTH):
        inside = i < length - start
        x = tl.load(row + start + i, mask=inside, other=0.0).to(tl.float64) / (unit / HIGH)
        high = _rounded(x)
        tl.store(out + start + i, high, mask=inside)
        tl.store(out + below + start + i, _rounded((x - high) * LOW), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _gram_schmidt(  # type: ignore[no-untyped-def]
    products, rank, units, epsilons, changes, SIDE: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr,
    NOTHING: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, SIDE)
    i, j = line[:, None], line[None, :]
    inside = (i < rank) & (j < rank)
    upper = products + at * 4 * rank * rank + i * 2 * rank + j
    under = upper + 2 * rank * rank
    mixed = tl.load(upper + rank, mask=inside, other=0.0) + tl.load(under, mask=inside, other=0.0)
    low = tl.load(under + rank, mask=inside, other=0.0)
    gram = (tl.load(upper, mask=inside, other=0.0) + (mixed + low / LOW) / LOW) / (HIGH * HIGH)
    change = (i == j).to(tl.float64)
    first = tl.sum(tl.where(i == j, gram, 0.0), 0)
    unit = tl.load(units + at * rank + line, mask=line < rank, other=1.0)
    epsilon = tl.load(epsilons)
    for k in range(rank):  # what a sum picks is the only one that is not zero
        square = tl.sum(tl.sum(tl.where((i == k) & (j == k), gram, 0.0), 0), 0)
        lost = square <= NOTHING * NOTHING * tl.sum(tl.where(line == k, first, 0.0), 0)
        length = tl.sqrt(tl.where(lost, 1.0, square))
        scale = tl.sum(tl.where(line == k, unit, 0.0), 0)
        factor = tl.where(epsilon > 0, scale / (scale * length + epsilon), 1.0 / length)
        factor = tl.where(lost, 0.0, factor)
        gram = tl.where(i == k, gram * factor, gram)
        gram = tl.where(j == k, gram * factor, gram)
        change = tl.where(j == k, change * factor, change)
        along = tl.sum(tl.where(i == k, gram, 0.0), 0)
        one = 2.0 - tl.sum(tl.where(line == k, along, 0.0), 0)
        column = tl.sum(tl.where(j == k, change, 0.0), 1)
        change = tl.where(j > k, change - column[:, None] * along[None, :], change)
        gram = tl.where((i > k) & (j > k), gram - one * (along[:, None] * along[None, :]), gram)
    tl.store(changes + at * rank * rank + i * rank + j, change, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _combine(  # type: ignore[no-untyped-def]
    halves, rank, length, changes, blocks, out, HIGH: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr
):
    at, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i = block * WIDTH + tl.arange(0, WIDTH)
    inside, below = i < length, rank.to(tl.int64) * length
    for j in range(rank):
        made = tl.zeros([WIDTH], tl.float64)
        for k in range(j + 1):
            row = halves + (at * 2 * rank + k) * length + i
            high, low = tl.load(row, mask=inside, other=0.0), tl.load(row + below, mask=inside, other=0.0)
            part = tl.load(changes + (at * rank + k) * rank + j) * ((high + low / LOW) / HIGH)
            made = tl.where(k == 0, part, made + part)
        tl.store(out + (at * rank + j) * length + i, made.to(tl.float32), mask=inside)


def _or_torch(function: F) -> F:
    """Return None for a kernel that does not compile, after one warning: torch's operations do the work.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``.
    """

    @wraps(function)
    def attempt(*arguments: Any) -> Any:
        kind = arguments[0].get("kind") if isinstance(arguments[0], Mapping) else None
        device = next((each.device for each in arguments if isinstance(each, Tensor)), None)
        key = function.__name__, kind, device
        if key in _broken:
            return None
        try:
            return function(*arguments)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler of kernels, and of C below it, may raise
            if "CUDA error" in str(error):  # of work before: the device is lost
                raise
            if not any(name == function.__name__ for name, *_ in _broken):
                does_not_work(f"Triton's kernel {function.__name__}", "Triton and a C compiler", error)
            _broken.add(key)
            return None

    return cast(F, attempt)


@_or_torch
def encode(
    fields: Fields, flat: Tensor, blocks: Blocks, codes: Tensor, scales: Tensor, keep_rest: bool, seed: int
) -> bool | None:
    """See :class:`~hvdbridge.kernels.fused.InC`. int32 ``codes``: zeros that take 32 signs a word."""
    kind = fields.get("kind")
    if not blocks.fit or kind not in (LINEAR, SIGN) or fields.get("l2") or fields.get("random"):
        return None
    given = flat, blocks.columns, blocks.count
    stored = codes, codes.stride(0), scales, scales.stride(0)
    shape: dict[str, Any] = {"KEEP_REST": keep_rest, "WIDTH": blocks.width}
    if kind == LINEAR:
        shape |= {"OFFSET": fields["offset"], "MASK": fields["mask"]}
        _launch(_linear_encode, blocks.count, *given, float(fields["levels"]), *stored, **shape)
    else:
        shape |= {"HALVINGS": blocks.width.bit_length() - 1, "PACK": codes.dtype == torch.int32}
        _launch(_sign_encode, blocks.count, *given, *stored, **shape, num_warps=1)  # of 4 each halving waits for others
    return True


@_or_torch
def decode(fields: Fields, codes: Tensor, scales: Tensor, blocks: Blocks, out: Tensor, add: int) -> bool | None:
    kind = fields.get("kind")
    if not blocks.fit or kind not in (LINEAR, TERNARY, SIGN):
        return None
    _launch(
        _decode, blocks.count, out, blocks.columns, blocks.count, codes.shape[0] // blocks.rows, blocks.rows,
        codes, codes.stride(0), scales, scales.stride(0), SIGNS=kind == SIGN, OFFSET=fields.get("offset", 0), ADD=add,
        WIDTH=blocks.width,
    )  # fmt: skip
    return True


@_or_torch
def squeeze(codes: Tensor, bits: int, packed: Tensor) -> bool:
    words = codes.view(torch.int64).view(-1)
    programs = triton.cdiv(words.numel(), WORDS)
    _launch(_squeeze, programs, words, words.numel(), packed, BITS=bits, EACH=WORDS)
    return True


@_or_torch
def spread(packed: Tensor, bits: int, codes: Tensor) -> bool:
    words = codes.view(torch.int64).view(-1)
    programs = triton.cdiv(words.numel(), WORDS)
    _launch(_spread, programs, packed, words.numel(), words, BITS=bits, EACH=WORDS)
    return True


@_or_torch
def reaching(bits: Tensor, limit: Tensor, positions: Tensor) -> bool:
    """Where magnitudes reach a limit. The kernels read twice only a bit for each element that is larger, and one for
    each that is equal.

    Args:
        bits: of float32 numbers, int32 ``[n]``, contiguous.
        limit: int32 ``[1]``, above 0: the bits of a magnitude.
        positions: int32, all -1: takes those of the larger ones, ascending, and behind them of the equal ones, as far
            as there is room.
    """
    blocks = triton.cdiv(bits.numel(), 32 * HEIGHT)
    words = torch.empty((2, blocks, HEIGHT), dtype=torch.int32, device=bits.device)
    counts = torch.empty(2 * blocks, dtype=torch.int32, device=bits.device)
    shape = {"HEIGHT": HEIGHT, "num_warps": WARPS}
    _launch(_mark, blocks, bits, bits.numel(), limit, words, counts, blocks, **shape)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    _launch(_list, blocks, words, counts, ends, blocks, positions, positions.numel(), **shape)
    return True


@_or_torch
def shuffle(owner: Tensor, sizes: Tensor, first: Tensor, pivots: Tensor, salts: Tensor) -> Tensor:
    """:func:`~hvdbridge.kernels.select.swapped`."""
    out = torch.empty(owner.numel(), dtype=torch.int32, device=owner.device)
    _launch(
        _shuffle, triton.cdiv(owner.numel(), WORDS), owner, owner.numel(), sizes, first, pivots, salts, len(sizes),
        out, ROUNDS=len(pivots) - 1, EACH=WORDS,
    )  # fmt: skip
    return out


@_or_torch
def orthonormal(batch: Tensor, epsilon: float, high: float, low: float, nothing: float) -> Tensor:
    """:func:`~hvdbridge.kernels.orthogonal.orthonormal` of float32, with that module's constants."""
    count, rank, length = batch.shape
    wide: dict[str, Any] = {"dtype": torch.float64, "device": batch.device}
    halves = torch.empty((count, 2 * rank, length), **wide)
    units, changes = torch.empty((count, rank), **wide), torch.empty((count, rank, rank), **wide)
    epsilons = torch.full((1,), epsilon, **wide)  # as a number it would come as float32
    out, blocks = torch.empty_like(batch), triton.cdiv(length, WIDTH)
    steps = {"HIGH": high, "LOW": low}
    _launch(_halves, count * rank, batch, rank, length, halves, units, **steps, WIDTH=4 * WIDTH, num_warps=8)
    products = torch.bmm(halves, halves.mT)
    _launch(_gram_schmidt, count, products, rank, units, epsilons, changes, **steps, SIDE=SIDE, NOTHING=nothing)
    _launch(_combine, count * blocks, halves, rank, length, changes, blocks, out, **steps, WIDTH=WIDTH)
    return out


def _launch(kernel: Any, programs: int, first: Tensor, *arguments: object, **constants: object) -> None:
    """On the device and the current stream of ``first``."""
    if programs:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[(programs,)](first, *arguments, **constants, **AS_WRITTEN)
