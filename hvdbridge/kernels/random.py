"""Random numbers by key: the same for any bucket boundaries and order of execution, on CPU and on CUDA.

Rules:

1. No numbers are drawn in sequence. A number is a hash of (seed, step, stage, element), private ones also of the rank.
2. An element's index is ``first block of its parameter * BLOCK + offset in the parameter``: it does not depend on the
   bucket.
3. Indices are 32 bits wide and wrap around, so elements share numbers only in models of more than 2**32 elements.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from hvdbridge.kernels.native import compiled
from hvdbridge.policy.bucket import BLOCK, Bucket


def key(*parts: object) -> int:
    """Hash ``parts`` to 63 bits, equal in every process. Parts are identified by their ``str``.

    >>> key(0, 1, "noise") == key(0, 1, "noise"), key(0, 1, "noise") == key(0, 1, "sign")
    (True, False)
    """
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator for few numbers (an initial matrix, an index set): draw on the CPU, then move.

    >>> torch.equal(torch.rand(3, generator=generator(7, "w")), torch.rand(3, generator=generator(7, "w")))
    True
    """
    return torch.Generator().manual_seed(key(*parts))


def uniform(bucket: Bucket, stage: str, private: bool = False) -> Tensor:
    """Return one number per element of ``bucket``: float32 in [0, 1), multiples of 2**-24.

    Args:
        stage: distinguishes the draws of one step (``"to owner"``, ``"back"``).
        private: whether each rank gets different numbers.
    """
    return hashed(elements(bucket), seed_of(bucket, stage, private))


def seed_of(bucket: Bucket, stage: str, private: bool = False) -> Seed:
    """Return the seed that :func:`uniform` passes to :func:`hashed`."""
    seed, rank = bucket.seed, (bucket.rank,) if private else ()
    return bucket.integers(lambda step: [key(seed, step, stage, *rank)])[0]


def elements(bucket: Bucket) -> Tensor:
    """Return the model-wide index of each element: int32 ``[bucket.layout.numel]``."""
    layout, first = bucket.layout, bucket.layout.blocks
    numbers = torch.arange(layout.numel, dtype=torch.int32, device=bucket.buffer.device)
    # int32 wraps around, so shifts are reduced modulo 2**32.
    shifts = [_signed(first[name] * BLOCK - layout.offsets[name]) for name in layout.names]
    if shifts:
        torch._foreach_add_(numbers.split(list(layout.sizes.values())), shifts)
    return numbers


CHUNK = 1 << 16
"""Number of elements that a CPU hashes at a time: two int32 chunks of that size fit into its cache."""


Seed = int | Tensor
"""63 bits, or an int64 tensor of shape ``[]`` with them (:meth:`Bucket.integers`)."""


def hashed(numbers: Tensor, seed: Seed) -> Tensor:
    """Hash int32 ``numbers`` and 63 bits of ``seed`` to float32 in [0, 1); two rounds of a 32-bit finalizer.

    >>> hashed(torch.arange(100_000, dtype=torch.int32), 1).mean().sub(0.5).abs() < 4 * (1 / 12 / 100_000) ** 0.5
    tensor(True)
    """
    out = torch.empty_like(numbers, dtype=torch.float32, memory_format=torch.contiguous_format)
    size = CHUNK if numbers.device.type == "cpu" else max(1, numbers.numel())
    for chunk, out_chunk in zip(numbers.reshape(-1).split(size), out.view(-1).split(size), strict=True):
        out_chunk.copy_(hashed_bits(chunk, seed)).mul_(2.0**-24)
    return out


def hashed_bits(numbers: Tensor, seed: Seed) -> Tensor:
    """Like :func:`hashed`, but int32 in ``[0, 2**24)``, and not in chunks: for callers that use chunks themselves.

    >>> numbers = torch.arange(3, dtype=torch.int32)
    >>> torch.equal(hashed_bits(numbers, 5) * 2.0**-24, hashed(numbers, 5))
    True
    """
    if numbers.dtype == torch.int32 and isinstance(seed, int) and (native := compiled(numbers)):
        out = torch.empty_like(numbers)
        native.hash_bits(numbers.data_ptr(), numbers.numel(), seed & 0xFFFFFFFF, seed >> 32, out.data_ptr())
        return out
    low, high = halves(seed)
    x, buffer = numbers + low, torch.empty_like(numbers)
    _mix_(x, buffer)
    _mix_(x.bitwise_xor_(high), buffer)
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)


def halves(seed: Seed) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Return the lower and the upper 32 bits of a seed as signed numbers; of a tensor, as int32 tensors ``[]``."""
    if isinstance(seed, Tensor):
        low, high = seed.view(1).view(torch.int32)
        return low, high
    return _signed(seed), _signed(seed >> 32)


def _mix_(x: Tensor, buffer: Tensor) -> None:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97 - (1 << 32)), (15, 1)):
        # torch supports few operations on unsigned types, so the mask makes the shift a logical one.
        torch.bitwise_right_shift(x, shift, out=buffer).bitwise_and_((1 << (32 - shift)) - 1)
        x.bitwise_xor_(buffer)
        if factor != 1:
            x.mul_(factor)


def _signed(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
