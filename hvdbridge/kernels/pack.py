"""Small integers side by side in bytes: 1 to 8 bits each, on CPU and CUDA.

Rules:

1. Codes are uint8 ``0 .. 2**bits - 1`` (or bool); they are packed along the last dimension, the first code lowest.
2. Each row starts in a byte of its own: ``n`` codes take ``ceil(n * bits / 8)`` bytes, the spare bits are 0.
3. Eight codes are one 64-bit integer: what is done to them is done to eight at a time. (Little endian throughout.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hvdbridge.kernels.fused import fused

CHUNK = 1 << 18
"""Elements that a CPU handles at a time, so that temporaries stay in its cache."""
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer that holds so many codes, one in each byte."""


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of ``n`` packed codes.

    >>> packed_bytes(9, 1), packed_bytes(3, 4), packed_bytes(8, 3)
    (2, 2, 3)
    """
    return -(-n * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """``[..., n]`` codes of ``bits`` bits -> uint8 ``[..., packed_bytes(n, bits)]``; 8 bits: the same tensor.

    >>> pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8), 3).tolist()
    [209, 88, 31]
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    n = codes.shape[-1]
    if bits == 8:
        return codes
    codes = _longer(codes.view(torch.uint8), -n % 8)
    packed = torch.empty((*codes.shape[:-1], codes.shape[-1] // 8 * bits), dtype=torch.uint8, device=codes.device)
    kernels = fused(codes, packed) if codes.numel() else None
    if codes.numel() and not (kernels and kernels.squeeze(codes, bits, packed)):
        for words, out in _chunks(codes.view(torch.int64).view(-1), packed.view(-1, bits)):
            _squeeze(words, bits, out)
    return packed[..., : packed_bytes(n, bits)].contiguous()


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """The first ``n`` codes of each row, uint8 ``[..., n]``; the inverse of :func:`pack`.

    >>> unpack(torch.tensor([209, 88, 31], dtype=torch.uint8), 8, 3).tolist()
    [1, 2, 3, 4, 5, 6, 7, 0]
    """
    if bits == 8:
        return packed[..., :n]
    words = -(-n // 8)
    packed = _longer(packed[..., : packed_bytes(n, bits)], words * bits - packed_bytes(n, bits))
    codes = torch.empty((*packed.shape[:-1], words * 8), dtype=torch.uint8, device=packed.device)
    kernels = fused(codes, packed) if codes.numel() else None
    if codes.numel() and not (kernels and kernels.spread(packed, bits, codes)):
        for out, some in _chunks(codes.view(torch.int64).view(-1), packed.view(-1, bits)):
            _spread(some, bits, out)
    return codes[..., :n]


def pack_bits(bits: Tensor) -> Tensor:
    """``[..., n]`` bool (or uint8 0 and 1) -> uint8 ``[..., ceil(n / 8)]``.

    >>> pack_bits(torch.tensor([True, False, False, True, False, False, False, False, True])).tolist()
    [9, 1]
    """
    return pack(bits, 1)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The first ``n`` bits of each row, uint8 0 and 1; the inverse of :func:`pack_bits`. ``.view(torch.bool)`` is free.

    >>> unpack_bits(torch.tensor([9, 1], dtype=torch.uint8), 9).tolist()
    [1, 0, 0, 1, 0, 0, 0, 0, 1]
    """
    return unpack(packed, n, 1)


def _longer(rows: Tensor, more: int) -> Tensor:
    """Contiguous and from a word's beginning, with ``more`` zeros behind each row; a copy only where it must be
    (``pad`` always makes one)."""
    rows = (pad(rows, (0, more)) if more else rows).contiguous()
    return rows.clone() if rows.storage_offset() % 8 else rows


def _chunks(words: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Both tensors in pieces that fit into a CPU's cache; whole on other devices."""
    if words.device.type != "cpu" or words.numel() <= CHUNK // 8:
        return [(words, rows)]
    return list(zip(words.split(CHUNK // 8), rows.split(CHUNK // 8), strict=True))


def _squeeze(words: Tensor, bits: int, out: Tensor) -> None:
    """Eight codes a word, one in each byte -> ``bits`` bytes, a row of ``out``."""
    if bits in (1, 2, 4):
        # One product: in the top byte of each group, code i is added at bit ``bits * i``, and no two meet.
        count = _together(bits)
        top = 8 * (count - 1)
        factor = sum(1 << (top - (8 - bits) * i) for i in range(count))
        product = words.view(_WORDS[count]) * factor
        out.copy_(product.view(torch.uint8).view(-1, bits, count)[..., count - 1])
        return
    # Neighbours move together: two codes in 16 bits, four in 32, eight in 64.
    for width in (8, 16, 32):
        kept = bits * width // 8
        high = (words >> (width - kept)).bitwise_and_(_fields(2 * width, width) << kept)
        words = (words & _fields(2 * width, width)).bitwise_or_(high)
    out.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits])


def _spread(rows: Tensor, bits: int, out: Tensor) -> None:
    """The inverse of :func:`_squeeze`."""
    if bits == 1:
        # Every byte of the word gets all eight bits and keeps its own.
        torch.mul(rows.view(-1).to(torch.int64), 0x0101010101010101, out=out)
        out.bitwise_and_(_signed(0x8040201008040201))
        torch.ne(out.view(torch.uint8), 0, out=out.view(torch.bool))
        return
    count = _together(bits)
    if count < 8:
        out.view(_WORDS[count]).copy_(rows.view(-1))
    else:
        out.zero_()
        out.view(torch.uint8).view(-1, 8)[:, :bits].copy_(rows)
    for width in (32, 16, 8):
        if width < 8 * count:
            kept = bits * width // 8
            high = (out & _signed(_fields(2 * width, kept) << kept)) << (width - kept)
            out.bitwise_and_(_fields(2 * width, kept)).bitwise_or_(high)


def _together(bits: int) -> int:
    """How many codes fill a whole byte, or a whole number of bytes."""
    return {1: 8, 2: 4, 4: 2}.get(bits, 8)


def _fields(every: int, width: int) -> int:
    """``width`` ones at the bottom of every ``every`` bits of 64, as a signed integer."""
    return _signed(sum(((1 << width) - 1) << at for at in range(0, 64, every)))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
