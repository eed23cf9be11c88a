"""Randomness by key: the same numbers wherever bucket boundaries lie, whatever runs first, on CPU and on CUDA.

Rules:

1. Nothing is drawn in sequence. A number is a hash of (seed, step, stage, element), private ones of the rank, too.
2. An element's number is ``first block of its parameter * BLOCK + offset``: the parameter's own, not the bucket's.
3. Integers are 32 bits wide and wrap, so two elements share their numbers only in models of more than 2**32.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hvdbridge.kernels.native import compiled
from hvdbridge.policy.bucket import BLOCK, Bucket


def key(*parts: object) -> int:
    """63 bits that stand for ``parts`` (anything whose ``str`` says what it is), equal in every process.

    >>> key(0, 1, "noise") == key(0, 1, "noise"), key(0, 1, "noise") == key(0, 1, "sign")
    (True, False)
    """
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator for few numbers (a start matrix, an index set): draw on the CPU, then move.

    >>> torch.equal(torch.rand(3, generator=generator(7, "w")), torch.rand(3, generator=generator(7, "w")))
    True
    """
    return torch.Generator().manual_seed(key(*parts))


def uniform(bucket: Bucket, stage: str, private: bool = False) -> Tensor:
    """One number per element of ``bucket``: float32 in [0, 1), multiples of 2**-24.

    Args:
        stage: tells the draws of one step apart (``"to owner"``, ``"back"``).
        private: another one on each rank.
    """
    return hashed(elements(bucket), seed_of(bucket, stage, private))


def seed_of(bucket: Bucket, stage: str, private: bool = False) -> int:
    """The seed that :func:`uniform` gives :func:`hashed`."""
    return key(bucket.seed, bucket.step, stage, *((bucket.rank,) if private else ()))


def elements(bucket: Bucket) -> Tensor:
    """int32, ``[bucket.layout.numel]``: the model-wide number of each element."""
    layout, first = bucket.layout, bucket.layout.blocks
    numbers = torch.arange(layout.numel, dtype=torch.int32, device=bucket.buffer.device)
    # Integers wrap: a shift is wanted only modulo 2**32.
    shifts = [_signed(first[name] * BLOCK - layout.offsets[name]) for name in layout.names]
    if shifts:
        torch._foreach_add_(numbers.split(list(layout.sizes.values())), shifts)
    return numbers


CHUNK = 1 << 16
"""Elements that a CPU hashes at a time: two such pieces of int32 stay in its cache."""


def hashed(numbers: Tensor, seed: int) -> Tensor:
    """float32 in [0, 1) from int32 ``numbers`` and 63 bits of ``seed``; two rounds of a 32-bit finalizer.

    >>> hashed(torch.arange(100_000, dtype=torch.int32), 1).mean().sub(0.5).abs() < 4 * (1 / 12 / 100_000) ** 0.5
    tensor(True)
    """
    out = torch.empty_like(numbers, dtype=torch.float32, memory_format=torch.contiguous_format)
    size = CHUNK if numbers.device.type == "cpu" else max(1, numbers.numel())
    for some, result in zip(numbers.reshape(-1).split(size), out.view(-1).split(size), strict=True):
        result.copy_(hashed_bits(some, seed)).mul_(2.0**-24)
    return out


def hashed_bits(numbers: Tensor, seed: int) -> Tensor:
    """The same as integers, int32 in ``[0, 2**24)``, in one piece: for loops that are in a CPU's cache already.

    >>> numbers = torch.arange(3, dtype=torch.int32)
    >>> torch.equal(hashed_bits(numbers, 5) * 2.0**-24, hashed(numbers, 5))
    True
    """
    if numbers.dtype == torch.int32 and (native := compiled(numbers)):
        out = torch.empty_like(numbers)
        native.hash_bits(numbers.data_ptr(), numbers.numel(), seed & 0xFFFFFFFF, seed >> 32, out.data_ptr())
        return out
    x, spare = numbers + _signed(seed), torch.empty_like(numbers)
    _mix_(x, spare)
    _mix_(x.bitwise_xor_(_signed(seed >> 32)), spare)
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)


def _mix_(x: Tensor, spare: Tensor) -> None:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - (1 << 32)), (15, 1)):
        # torch has the logical right shift for unsigned types only in part.
        torch.bitwise_right_shift(x, shift, out=spare).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(spare)
        if factor != 1:
            x.mul_(factor)


def _signed(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
