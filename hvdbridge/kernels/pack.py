"""Packing of small integers, 1 to 8 bits each, into bytes, on CPU and CUDA.

Rules:

1. Codes are uint8 ``0 .. 2**bits - 1`` (or bool). They are packed along the last dimension, the first code lowest.
2. Each row starts at a byte: ``n`` codes take ``ceil(n * bits / 8)`` bytes, whose unused bits are 0.
3. Eight codes, a byte each, are viewed as one 64-bit word, so each operation handles eight. (Little endian throughout.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hvdbridge.kernels.fused import fused

CHUNK = 1 << 18
"""Number of elements that a CPU handles at a time, so that temporaries stay in its cache."""
_WORD_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Number of codes, one per byte -> dtype of an integer that holds them."""


def packed_bytes(n: int, bits: int) -> int:
    """Return the number of bytes of ``n`` packed codes.

    >>> packed_bytes(9, 1), packed_bytes(3, 4), packed_bytes(8, 3)
    (2, 2, 3)
    """
    return -(-n * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes ``[..., n]`` of ``bits`` bits into uint8 ``[..., packed_bytes(n, bits)]``. 8 bits: returns ``codes``.

    Raises:
        ValueError: ``bits`` is not 1 to 8.

    >>> pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8), 3).tolist()
    [209, 88, 31]
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    n = codes.shape[-1]
    if bits == 8:
        return codes
    codes = _padded(codes.view(torch.uint8), -n % 8)
    packed = torch.empty((*codes.shape[:-1], codes.shape[-1] // 8 * bits), dtype=torch.uint8, device=codes.device)
    kernels = fused(codes, packed) if codes.numel() else None
    if codes.numel() and not (kernels and kernels.pack_codes(codes, bits, packed)):
        for words, out in _chunks(codes.view(torch.int64).view(-1), packed.view(-1, bits)):
            _pack_words(words, bits, out)
    return packed[..., : packed_bytes(n, bits)].contiguous()


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """Return the first ``n`` codes of each row, uint8 ``[..., n]``; the inverse of :func:`pack`.

    >>> unpack(torch.tensor([209, 88, 31], dtype=torch.uint8), 8, 3).tolist()
    [1, 2, 3, 4, 5, 6, 7, 0]
    """
    if bits == 8:
        return packed[..., :n]
    word_count = -(-n // 8)
    packed = _padded(packed[..., : packed_bytes(n, bits)], word_count * bits - packed_bytes(n, bits))
    codes = torch.empty((*packed.shape[:-1], word_count * 8), dtype=torch.uint8, device=packed.device)
    kernels = fused(codes, packed) if codes.numel() else None
    if codes.numel() and not (kernels and kernels.unpack_codes(packed, bits, codes)):
        for words_chunk, packed_chunk in _chunks(codes.view(torch.int64).view(-1), packed.view(-1, bits)):
            _unpack_words(packed_chunk, bits, words_chunk)
    return codes[..., :n]


def pack_bits(bits: Tensor) -> Tensor:
    """Pack ``[..., n]`` bool (or uint8 0 and 1) into uint8 ``[..., ceil(n / 8)]``.

    >>> pack_bits(torch.tensor([True, False, False, True, False, False, False, False, True])).tolist()
    [9, 1]
    """
    return pack(bits, 1)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Return the first ``n`` bits of each row, uint8 0 and 1; the inverse of :func:`pack_bits`.

    ``.view(torch.bool)`` of the result does not copy.

    >>> unpack_bits(torch.tensor([9, 1], dtype=torch.uint8), 9).tolist()
    [1, 0, 0, 1, 0, 0, 0, 0, 1]
    """
    return unpack(packed, n, 1)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Append ``count`` zeros to each row, and make the rows contiguous, at an offset that is a multiple of 8 bytes.

    ``pad`` always copies, so it is called only if there are zeros to append.
    """
    rows = (pad(rows, (0, count)) if count else rows).contiguous()
    return rows.clone() if rows.storage_offset() % 8 else rows


def _chunks(words: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split both tensors into chunks that fit into a CPU's cache. On other devices there is one chunk."""
    if words.device.type != "cpu" or words.numel() <= CHUNK // 8:
        return [(words, rows)]
    return list(zip(words.split(CHUNK // 8), rows.split(CHUNK // 8), strict=True))


def _pack_words(words: Tensor, bits: int, out: Tensor) -> None:
    """Pack each word's eight codes, one per byte, into ``bits`` bytes: a row of ``out``."""
    if bits in (1, 2, 4):
        # One product adds code i at bit ``bits * i`` of the top byte of each group. No two codes overlap.
        count = _codes_per_group(bits)
        shift = 8 * (count - 1)
        factor = sum(1 << (shift - (8 - bits) * i) for i in range(count))
        product = words.view(_WORD_DTYPES[count]) * factor
        out.copy_(product.view(torch.uint8).view(-1, bits, count)[..., count - 1])
        return
    # Pairs become contiguous: two codes within 16 bits, then four within 32, then eight within 64.
    for width in (8, 16, 32):
        packed_width = bits * width // 8
        high = (words >> (width - packed_width)).bitwise_and_(_repeated_mask(2 * width, width) << packed_width)
        words = (words & _repeated_mask(2 * width, width)).bitwise_or_(high)
    out.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits])


def _unpack_words(rows: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of :func:`_pack_words`."""
    if bits == 1:
        # Each byte of the word gets all eight bits; the mask leaves its own.
        torch.mul(rows.view(-1).to(torch.int64), 0x0101010101010101, out=out)
        out.bitwise_and_(_signed(0x8040201008040201))
        torch.ne(out.view(torch.uint8), 0, out=out.view(torch.bool))
        return
    count = _codes_per_group(bits)
    if count < 8:
        out.view(_WORD_DTYPES[count]).copy_(rows.view(-1))
    else:
        out.zero_()
        out.view(torch.uint8).view(-1, 8)[:, :bits].copy_(rows)
    for width in (32, 16, 8):
        if width < 8 * count:
            packed_width = bits * width // 8
            high = (out & _signed(_repeated_mask(2 * width, packed_width) << packed_width)) << (width - packed_width)
            out.bitwise_and_(_repeated_mask(2 * width, packed_width)).bitwise_or_(high)


def _codes_per_group(bits: int) -> int:
    """Return the number of codes that fill one byte, or, for other widths, ``bits`` bytes."""
    return {1: 8, 2: 4, 4: 2}.get(bits, 8)


def _repeated_mask(period: int, width: int) -> int:
    """``width`` ones at the bottom of each ``period`` bits of 64, as a signed integer."""
    return _signed(sum(((1 << width) - 1) << shift for shift in range(0, 64, period)))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
