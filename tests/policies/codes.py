"""What the tests of quantised policies share, written from formulas in float64 numpy and plain integers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Grads = dict[str, Tensor]
Quantiser = Callable[[Array, Array], Array]
"""(elements of a block, a number in [0, 1) for each) -> what they become."""

OWNED = 1024
"""Elements of a block of the sharded scheme, by which elements are numbered."""


def noise(seed: int, step: int, stage: str, numbers: NDArray[np.int64], rank: int | None = None) -> Array:
    """The number in [0, 1) of each element: two rounds of a finalizer of 32 bits, keyed by a blake2b hash."""
    parts = [seed, step, stage] + ([] if rank is None else [rank])
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little") >> 1
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint32) + np.uint32(key & 0xFFFFFFFF)
        for word in (0, (key >> 32) & 0xFFFFFFFF):
            x = x ^ np.uint32(word)
            x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
            x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
            x = x ^ (x >> np.uint32(15))
    return (x >> np.uint32(8)).astype(np.float64) / 2.0**24


def numbers_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.int64]]:
    """The number of each element: every parameter starts a new owned block."""
    found, block = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        found[name] = block * OWNED + np.arange(size)
        block += -(-size // OWNED)
    return found


def shares(grads: Sequence[Grads], weights: Sequence[float] | None) -> list[dict[str, Array]]:
    """``w_r / sum(w) g_r``, flat."""
    w = list(weights) if weights is not None else [1.0] * len(grads)
    return [
        {name: share / math.fsum(w) * g.double().numpy().reshape(-1) for name, g in mine.items()}
        for share, mine in zip(w, grads, strict=True)
    ]


def by_blocks(x: Array, u: Array, block: int, quantise: Quantiser) -> Array:
    """``quantise`` block by block."""
    parts = [quantise(x[i : i + block], u[i : i + block]) for i in range(0, len(x), block)]
    return np.concatenate([*parts, np.empty(0)])


def two_stages(
    mine: Sequence[Mapping[str, Array]], block: int, quantise: Quantiser, seed: int = 0, step: int = 0
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """The sharded scheme: the quantised sum of all quantised shares, and those shares."""
    numbers = numbers_of({name: x.shape for name, x in mine[0].items()})
    sent = [
        {n: by_blocks(x, noise(seed, step, "to owner", numbers[n], rank), block, quantise) for n, x in share.items()}
        for rank, share in enumerate(mine)
    ]
    update = {
        n: by_blocks(sum(s[n] for s in sent), noise(seed, step, "back", numbers[n]), block, quantise) for n in numbers
    }
    return update, sent


def linear(levels: int, stochastic: bool = False, norm: str = "max") -> Quantiser:
    """``levels`` steps to either side of zero, up to the block's norm."""

    def quantise(x: Array, u: Array) -> Array:
        size = np.abs(x).max() if norm == "max" else np.sqrt((x**2).sum())
        if size == 0:
            return np.zeros_like(x)
        y = x / size * levels
        return (np.floor(y + u) if stochastic else np.rint(y)) * (size / levels)

    return quantise


def assert_close(
    got: Mapping[str, Tensor],
    want: Mapping[str, Array],
    steps: Mapping[str, float],
    block: int,
    flips: float = 5e-4,
    shifted: int = 1,
    rounding: float = 1e-4,
) -> None:
    """Equal to ``rounding`` times the step, but for a share ``flips`` (and one more) of a block's elements that are off
    by a whole step or two: those whose value in float32 lies on the other side of the border between two quanta.
    Where that is the largest element of a sum, all its block gets another scale: so many blocks may be ``shifted``."""
    bad = []
    for name, expected in want.items():
        off = np.abs(got[name].double().numpy().reshape(-1) - expected) / steps[name]
        assert (off <= 2 + rounding).all(), f"{name}: off by {off.max()} steps"
        for i in range(0, off.size, block):
            part = off[i : i + block]
            if (part > rounding).sum() > flips * part.size + 1:
                bad.append(f"{name}[{i}:{i + block}]: {(part > rounding).sum()} of {part.size}")
    assert len(bad) <= shifted, f"elements that differ: {', '.join(bad)}"


def gradients(shapes: Mapping[str, Sequence[int]], size: int, seed: int, scale: float = 1.0) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: scale * torch.randn(tuple(s), generator=generator) for n, s in shapes.items()} for _ in range(size)]


def bound(count: int, trials: int, ranges: Sequence[float], failure: float = 1e-9) -> float:
    """Hoeffding: the means over ``trials`` of ``count`` sums of independent, centred terms, each term confined to an
    interval of the given length, all stay within this of zero, but for a probability of ``failure``."""
    return math.sqrt(sum(r * r for r in ranges) * math.log(2 * count / failure) / (2 * trials))
