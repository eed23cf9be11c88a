"""Randomness by key: the same numbers wherever bucket boundaries lie, whatever runs first, on CPU and on CUDA.

Rules:

1. Nothing is drawn in sequence. A number is a hash of (seed, step, stage, element), private ones of the rank, too.
2. An element's number is ``first block of its parameter * BLOCK + offset``: it belongs to the parameter, not the bucket.
3. Integers are 32 bits wide and wrap, so two elements share their numbers only in models of more than 2**32.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hvdbridge.bucket import BLOCK, Bucket, number_blocks


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
    parts = (bucket.seed, bucket.step, stage, *((bucket.rank,) if private else ()))
    return hashed(elements(bucket), key(*parts))


def elements(bucket: Bucket) -> Tensor:
    """int32, ``[bucket.layout.numel]``: the model-wide number of each element."""
    layout, device = bucket.layout, bucket.buffer.device
    first = bucket.blocks or layout.derive("blocks", lambda: number_blocks(layout.shapes))

    def make() -> Tensor:
        rows = [torch.arange(size) + first[name] * BLOCK for name, size in layout.sizes.items()]
        return torch.cat(rows or [torch.empty(0, dtype=torch.int64)]).to(device, torch.int32)

    return layout.derive(("elements", device, tuple(first[name] for name in layout.names)), make)


def hashed(numbers: Tensor, seed: int) -> Tensor:
    """float32 in [0, 1) from int32 ``numbers`` and 63 bits of ``seed``; two rounds of a 32-bit finalizer.

    >>> hashed(torch.arange(100_000, dtype=torch.int32), 1).mean().sub(0.5).abs() < 4 * (1 / 12 / 100_000) ** 0.5
    tensor(True)
    """
    x = _mix(numbers + _signed(seed))
    x = _mix(x.bitwise_xor_(_signed(seed >> 32)))
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - (1 << 32))):
        x = (x ^ _shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 15))


def _shifted(x: Tensor, by: int) -> Tensor:
    """The logical right shift, which torch has for unsigned types only in part."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
