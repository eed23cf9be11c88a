"""Keyed randomness: against its formula in numpy, and as randomness."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from hvdbridge.kernels import random
from hvdbridge.kernels.random import elements, generator, hashed, hashed_bits, key, uniform
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, number_blocks
from policies.codes import noise, numbers_of

SHAPES = {"a": (3, 700), "empty": (0,), "s": (), "b": (1024,), "c": (1025,)}


def bucket(names: list[str] | None = None, rank: int = 0, size: int = 1, **more: int) -> Bucket:
    layout = Layout({n: SHAPES[n] for n in names or SHAPES}, number_blocks(SHAPES))
    return Bucket(torch.zeros(layout.numel), layout, ranks=Ranks(rank, size), **more)


@pytest.mark.parametrize("private", [False, True])
def test_the_formula(private: bool) -> None:
    mine = bucket(seed=5, step=9, rank=2, size=4)
    numbers = np.concatenate(list(numbers_of(SHAPES).values()))
    assert elements(mine).tolist() == numbers.tolist()
    want = noise(5, 9, "stage", numbers, 2 if private else None)
    assert np.array_equal(uniform(mine, "stage", private).numpy(), want)  # 24 bits: exact in float32


def test_numbers_belong_to_parameters() -> None:
    whole = bucket()
    drawn = uniform(whole, "x")
    for names in (["c", "s"], ["b"], list(reversed(SHAPES))):
        part = bucket(names)
        for name in names:
            start, size = part.layout.offsets[name], part.layout.sizes[name]
            first = whole.layout.offsets[name]
            assert torch.equal(uniform(part, "x")[start : start + size], drawn[first : first + size])


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(-5000, 5000, dtype=torch.int32)
    whole = hashed(numbers, 77)
    monkeypatch.setattr(random, "CHUNK", 999)
    assert torch.equal(hashed(numbers, 77), whole)
    assert torch.equal(hashed(numbers.view(100, 100).t(), 77), whole.view(100, 100).t())
    assert torch.equal(hashed_bits(numbers, 77) * 2.0**-24, whole)
    assert torch.equal(numbers, torch.arange(-5000, 5000, dtype=torch.int32))
    assert hashed(numbers[:0], 77).shape == (0,)


def test_numbers_wrap() -> None:
    """Elements beyond 2^31 (a model of 8 GB in float32) are drawn like all others."""
    layout = Layout({"far": (10,)})
    far = Bucket(torch.zeros(10), layout.of_model({"far": 2**22}, {}))
    assert np.array_equal(uniform(far, "x").numpy(), noise(0, 0, "x", 2**32 + np.arange(10)))
    half = Bucket(torch.zeros(10), Layout({"far": (10,)}, {"far": 2**21 + 1}))
    assert np.array_equal(uniform(half, "x").numpy(), noise(0, 0, "x", 2**31 + 1024 + np.arange(10)))


N = 1 << 17
KEYS = [
    key(seed, step, stage, *rank) for seed in (0, 1) for step in (0, 1) for stage in "ab" for rank in ((), (0,), (1,))
]


def test_uniform() -> None:
    """16 cells, each hit binomially: 6 deviations are missed once in 5e8 cells."""
    for seed in KEYS[:6]:
        counts = torch.histc(hashed(torch.arange(N, dtype=torch.int32), seed), 16, 0, 1)
        assert (counts - N / 16).abs().max() <= 6 * math.sqrt(N / 16 * 15 / 16)


def test_streams_are_independent() -> None:
    """The correlation of two independent uniform streams of N has deviation 1/sqrt(N); so has that of neighbours."""
    numbers = torch.arange(N, dtype=torch.int32)
    drawn = [hashed(numbers, seed).double().sub(0.5).mul(math.sqrt(12)) for seed in KEYS]
    assert len(set(KEYS)) == len(KEYS)
    for a, b in pairwise(drawn):
        assert abs(float((a * b).mean())) <= 6 / math.sqrt(N)
    for lag in (1, 2, 32, 1024):
        for a in drawn[:4]:
            assert abs(float((a[lag:] * a[:-lag]).mean())) <= 6 / math.sqrt(N - lag)


def test_generators_are_keyed() -> None:
    assert torch.equal(torch.rand(4, generator=generator("a", 1)), torch.rand(4, generator=generator("a", 1)))
    assert not torch.equal(torch.rand(4, generator=generator("a", 1)), torch.rand(4, generator=generator("a", 2)))
    assert key("a", "b") != key("ab")
