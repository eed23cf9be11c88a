"""Compares Triton's kernels on a GPU with the CPU, whose bits all devices give: ``hvdbridge doctor --gpu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from hvdbridge.kernels import orthogonal, pack, select, signs
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.codes import Linear
from hvdbridge.kernels.quantise import decode, encode

CONSTANTS = orthogonal.HIGH, orthogonal.LOW, orthogonal.NOTHING


def differences(kernels: ModuleType | Any, device: torch.device) -> str:
    """What ``kernels`` get wrong on ``device``, by name; empty where all bits are the CPU's. Waits for the device."""
    draw = torch.Generator("cpu").manual_seed(0)
    parts = (_codes, _packing, _reaching, _shuffling, _orthonormal)
    wrong = [name for part in parts for name in part(kernels, device, draw)]
    return f"other bits than the CPU's: {', '.join(wrong)}" if wrong else ""


def _codes(kernels: Any, device: torch.device, draw: torch.Generator) -> Iterator[str]:
    for code, width in itertools.product((Linear(127), Linear(7), signs.ScaledSign()), (1024, 16)):
        numel = 4 * width + width // 2 + 1
        x = torch.empty(numel, dtype=torch.float32, device="cpu").normal_(generator=draw)
        x *= torch.empty_like(x).normal_(generator=draw).mul_(8).exp_()
        x[:width] = (x[:width] * 4).round().clamp(-254, 254) / 2  # halves, between two codes
        x[0], x[2 * width : 3 * width], x[-1] = 127.0, 0.0, 1e-40
        blocks, theirs = (Blocks([Part(0, numel)], width, numel, where) for where in ("cpu", device))
        codes, scales = encode(code, x, blocks)
        assert scales is not None, "these codes have them"
        rest = decode(code, codes.unsqueeze(0), scales.unsqueeze(0), blocks, x.clone(), add=-1)
        vector = x.to(device, copy=True)
        found, rates = (torch.zeros_like(t, device=device).unsqueeze(0) for t in (codes, scales))
        kernels.encode(code.fields, vector, theirs, found, rates, True, 0)
        same = torch.equal(found.cpu()[0], codes) and torch.equal(rates.cpu()[0], scales)
        if code.bits == 1:
            words = torch.zeros((1, -(-numel // 32)), dtype=torch.int32, device=device)
            kernels.encode(code.fields, x.to(device), theirs, words, rates, False, 0)
            packed = code.to_wire(words)[0, : code.wire_bytes(numel)]
            same = same and torch.equal(packed.cpu(), code.to_wire(codes)) and torch.equal(rates.cpu()[0], scales)
        two, their_rates = found.expand(2, -1).contiguous(), rates.expand(2, -1).contiguous()
        for add in (None, 1, -1):
            expected = decode(code, two.cpu(), their_rates.cpu(), blocks, x.clone(), add)
            out = x.to(device, copy=True)
            kernels.decode(code.fields, two, their_rates, theirs, out, add or 0)
            same = same and torch.equal(out.cpu(), expected)
        if not (same and torch.equal(vector.cpu(), rest)):
            yield f"{code} of {width}"


def _packing(kernels: Any, device: torch.device, draw: torch.Generator) -> Iterator[str]:
    for bits in range(1, 8):
        some = torch.randint(1 << bits, (8 * 321,), generator=draw, dtype=torch.uint8, device="cpu")
        expected = pack.pack(some, bits)
        packed, back = (torch.zeros_like(t, device=device) for t in (expected, some))
        kernels.squeeze(some.to(device), bits, packed)
        kernels.spread(packed, bits, back)
        if not (torch.equal(packed.cpu(), expected) and torch.equal(back.cpu(), some)):
            yield f"{bits} bits"


def _reaching(kernels: Any, device: torch.device, draw: torch.Generator) -> Iterator[str]:
    for numel in (1, 33, 9_000):  # of the last, several programs
        some = torch.randint(4, (numel,), generator=draw, dtype=torch.int32, device="cpu")
        some -= (some == 3) * torch.iinfo(torch.int32).max  # below zero, as bits
        magnitudes, size = some & 0x7FFFFFFF, (numel + 1) // 2
        for limit in (1, 2, 4):
            reached = torch.cat([(magnitudes > limit).nonzero(), (magnitudes == limit).nonzero()]).view(-1)[:size].int()
            expected = torch.nn.functional.pad(reached, (0, size - len(reached)), value=-1)
            positions = torch.full((size,), -1, dtype=torch.int32, device=device)
            bound = torch.full((1,), limit, dtype=torch.int32, device=device)
            anywhere = torch.cat([some[:1], some]).to(device)[1:]  # for an aligned one there are other kernels
            again = positions.clone()
            kernels.reaching(some.to(device), bound, positions)
            kernels.reaching(anywhere, bound, again)
            if not (torch.equal(positions.cpu(), expected) and torch.equal(again, positions)):
                yield f"{numel} that reach {limit}"


def _shuffling(kernels: Any, device: torch.device, draw: torch.Generator) -> Iterator[str]:
    sizes = torch.tensor([1_000, 3, 2**31 - 1], dtype=torch.int64, device="cpu")
    counts = torch.tensor([700, 3, 20], dtype=torch.int64, device="cpu")
    drawn = torch.randint(2**31 - 1, (2, select.ROUNDS + 1, 3), generator=draw, dtype=torch.int64, device="cpu")
    first, pivots, salts = torch.cumsum(counts, 0) - counts, drawn[0].remainder(sizes), drawn[1]
    pivots[0, 2] = 2**31 - 10
    tables = [select.owners(counts, 723), *(table.int() for table in (sizes, first, pivots, salts))]
    found = kernels.shuffle(*(table.to(device) for table in tables))
    if found is None or not torch.equal(found.cpu(), select.swapped(*tables)):
        yield "a shuffle"


def _orthonormal(kernels: Any, device: torch.device, draw: torch.Generator) -> Iterator[str]:
    for shape, epsilon in (((2, 1, 1), 0.0), ((3, 4, 700), 0.0), ((1, 3, 5_000), 1e-8), ((1, kernels.SIDE, 50), 0.5)):
        columns = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=draw)
        columns[:, 1:2] = 2 * columns[:, :1]  # in the span of the one before
        columns[1:2, 2:3], columns[2:, -1:, -1:] = 0.0, float("nan")
        found = kernels.orthonormal(columns.to(device), epsilon, *CONSTANTS)
        (expected,) = orthogonal.orthonormal([columns], epsilon)
        if found is None or not torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
            yield f"{shape[1]} columns, orthonormal"
