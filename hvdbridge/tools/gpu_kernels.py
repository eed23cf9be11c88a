"""Check that Triton's kernels give exactly the CPU's bits, as every device must: ``hvdbridge doctor --gpu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from hvdbridge.kernels import candidates, orthogonal, pack, select, shuffle, signs
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.codes import Linear
from hvdbridge.kernels.quantise import decode, encode
from hvdbridge.policies import low_rank
from hvdbridge.policies.shards import BlockShards, sum_rows
from hvdbridge.policy.bucket import Layout

CONSTANTS = orthogonal.HIGH, orthogonal.LOW, orthogonal.TOLERANCE


def differences(device: torch.device, replaced: Mapping[str, Any] | None = None) -> str:
    """Name the cases in which kernels on ``device`` give other bits than the CPU; "" if none. Synchronizes.

    Args:
        replaced: functions that take the place of kernels of these names.
    """
    from hvdbridge.kernels import cuda, cuda_flat, cuda_select

    kernels = SimpleNamespace(**vars(cuda) | vars(cuda_flat) | vars(cuda_select) | dict(replaced or {}))
    rng = torch.Generator("cpu").manual_seed(0)
    checks = (_codes, _packing, _reaching, _shuffling, _orthonormal, _flat, _rows, _moving, _searching)
    failed = [name for check in checks for name in check(kernels, device, rng)]
    return f"other bits than the CPU's: {', '.join(failed)}" if failed else ""


def _codes(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    for code, width in itertools.product((Linear(127), Linear(7), signs.ScaledSign()), (1024, 16)):
        numel = 4 * width + width // 2 + 1
        x = torch.empty(numel, dtype=torch.float32, device="cpu").normal_(generator=rng)
        x *= torch.empty_like(x).normal_(generator=rng).mul_(8).exp_()
        x[:width] = (x[:width] * 4).round().clamp(-254, 254) / 2  # ties between two codes
        x[0], x[2 * width : 3 * width], x[-1] = 127.0, 0.0, 1e-40
        blocks, device_blocks = (Blocks([Part(0, numel)], width, numel, where) for where in ("cpu", device))
        codes, scales = encode(code, x, blocks)
        assert scales is not None, "these codes have scales"
        expected_residual = decode(code, codes.unsqueeze(0), scales.unsqueeze(0), blocks, x.clone(), add=-1)
        residual = x.to(device, copy=True)
        got_codes, got_scales = (torch.zeros_like(t, device=device).unsqueeze(0) for t in (codes, scales))
        kernels.encode(code.fields, residual, device_blocks, got_codes, got_scales, True, 0)
        same = torch.equal(got_codes.cpu()[0], codes) and torch.equal(got_scales.cpu()[0], scales)
        if code.bits == 1:
            words = torch.zeros((1, -(-numel // 32)), dtype=torch.int32, device=device)
            kernels.encode(code.fields, x.to(device), device_blocks, words, got_scales, False, 0)
            got_bytes = torch.zeros((1, 4 * blocks.count), dtype=torch.uint8, device=device)
            kernels.encode(code.fields, x.to(device), device_blocks, words.zero_(), got_bytes, False, 0)
            same = same and torch.equal(got_bytes.cpu()[0], scales.view(torch.uint8))
            packed = words.view(torch.uint8)[0, : code.wire_bytes(numel)]
            same = same and torch.equal(packed.cpu(), code.to_wire(codes)) and torch.equal(got_scales.cpu()[0], scales)
        message = torch.zeros((1, 3 + 4 * blocks.count + numel), dtype=torch.uint8, device=device)
        scale_bytes, code_bytes = message[:, 3 : 3 + 4 * blocks.count], message[:, 3 + 4 * blocks.count :]  # unaligned
        if code.bits in (1, 8):
            if code.bits == 8:
                kernels.encode(code.fields, x.to(device), device_blocks, code_bytes, scale_bytes, False, 0)
            else:
                scale_bytes.copy_(scales.view(torch.uint8))
                code_bytes[:, : code.wire_bytes(numel)] = code.to_wire(codes).to(device)
            out = torch.empty(numel, dtype=torch.float32, device=device)
            kernels.decode(code.fields, code_bytes, scale_bytes, device_blocks, out, 0)
            expected = decode(code, codes.unsqueeze(0), scales.unsqueeze(0), blocks)
            same = same and torch.equal(scale_bytes.cpu()[0], scales.view(torch.uint8))
            same = same and torch.equal(out.cpu(), expected)
        two_codes, two_scales = got_codes.expand(2, -1).contiguous(), got_scales.expand(2, -1).contiguous()
        for add in (None, 1, -1):
            expected = decode(code, two_codes.cpu(), two_scales.cpu(), blocks, x.clone(), add)
            out = x.to(device, copy=True)
            kernels.decode(code.fields, two_codes, two_scales, device_blocks, out, add or 0)
            same = same and torch.equal(out.cpu(), expected)
        if not (same and torch.equal(residual.cpu(), expected_residual)):
            yield f"{code} of {width}"


def _packing(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    for bits in range(1, 8):
        codes = torch.randint(1 << bits, (8 * 321,), generator=rng, dtype=torch.uint8, device="cpu")
        expected = pack.pack(codes, bits)
        packed, unpacked = (torch.zeros_like(t, device=device) for t in (expected, codes))
        kernels.pack_codes(codes.to(device), bits, packed)
        kernels.unpack_codes(packed, bits, unpacked)
        if not (torch.equal(packed.cpu(), expected) and torch.equal(unpacked.cpu(), codes)):
            yield f"{bits} bits"


def _reaching(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    from hvdbridge.kernels.candidates import Blocks as Searched

    sizes = [4, 36, 9_000, 20_000]  # the last two take several programs
    capacities = [(size + 1) // 2 for size in sizes]
    values = torch.randint(4, (sum(sizes) + 1,), generator=rng, dtype=torch.int32, device="cpu")
    values -= (values == 3) * torch.iinfo(torch.int32).max  # sets the sign bit
    for shift, limits in itertools.product((0, 1), ([1, 2, 4, 1], [2, 1, 1, 4])):  # unaligned parts have other kernels
        starts = [shift + start for start in itertools.accumulate(sizes[:-1], initial=0)]
        expected = []
        for start, size, capacity, limit in zip(starts, sizes, capacities, limits, strict=True):
            part = values[start : start + size] & 0x7FFFFFFF
            reached = torch.cat([(part > limit).nonzero(), (part == limit).nonzero()]).view(-1)[:capacity] + start
            expected.append(torch.nn.functional.pad(reached, (0, capacity - len(reached)), value=-1))
        bounds = torch.tensor(limits, dtype=torch.int32, device=device)
        found = Searched(starts, sizes, capacities, device).positions(kernels, values.to(device), bounds)
        if found is None or not torch.equal(found.cpu(), torch.cat(expected).int()):
            yield f"those that reach {limits}"


def _shuffling(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    sizes = torch.tensor([1_000, 3, 2**31 - 1], dtype=torch.int64, device="cpu")
    counts = torch.tensor([700, 3, 20], dtype=torch.int64, device="cpu")
    draws = torch.randint(2**31 - 1, (2, shuffle.ROUNDS + 1, 3), generator=rng, dtype=torch.int64, device="cpu")
    first, pivots, salts = torch.cumsum(counts, 0) - counts, draws[0].remainder(sizes), draws[1]
    pivots[0, 2] = 2**31 - 10
    tables = [select.owners(counts, 723), *(table.int() for table in (sizes, first, pivots, salts))]
    result = kernels.shuffle(*(table.to(device) for table in tables))
    if result is None or not torch.equal(result.cpu(), shuffle.permuted(*tables)):
        yield "a shuffle"


def _orthonormal(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    for shape, epsilon in (((2, 1, 1), 0.0), ((3, 4, 700), 0.0), ((1, 3, 5_000), 1e-8), ((1, kernels.SIDE, 50), 0.5)):
        columns = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=rng)
        columns[:, 1:2] = 2 * columns[:, :1]  # linearly dependent on the first column
        columns[1:2, 2:3], columns[2:, -1:, -1:] = 0.0, float("nan")
        result = kernels.orthonormal(columns.to(device), epsilon, *CONSTANTS)
        (expected,) = orthogonal.orthonormal([columns], epsilon)
        if result is None or not torch.equal(result.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
            yield f"{shape[1]} columns, orthonormal"


def _flat(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    layout = Layout({"w": (3_000,), "none": (0,), "v": (1,), "u": (1_100,)})
    ends = layout.bounds(torch.device("cpu"))[1].to(device)
    for dtype, faulty in itertools.product(kernels.VALUES, ([], [2_999], [0, 3_000], [3_001, 4_100])):
        rows = torch.empty((5, layout.numel), dtype=torch.float32, device="cpu").normal_(generator=rng).to(dtype)
        update = rows[0].clone()
        update[faulty] = float("nan") if dtype == torch.float32 else float("inf")
        flags = kernels.finite(update.to(device), ends)
        finite = layout.finite(update)
        expected = torch.where(layout.spread(finite), rows[1], rows[2])
        out = rows[2].to(device, copy=True)
        flags = flags if flags is None else flags.view(torch.bool)
        kept = None if flags is None else kernels.keep(rows[1].to(device), out, ends, flags, out)
        total = kernels.sum_rows(rows.to(device), torch.empty(layout.numel, dtype=torch.float32, device=device))
        same = flags is not None and flags.tolist() == [*finite.tolist(), finite.all().item()]
        same = same and kept is not None and torch.equal(kept.cpu(), expected)
        if not (same and total is not None and torch.equal(total.cpu(), sum_rows(rows))):
            yield f"flat {dtype}, {len(faulty)} not finite"


def _rows(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    for length in (1, 5, 3_000):
        new, old = torch.empty((2, 4, 2, length), dtype=torch.float32, device="cpu").normal_(generator=rng)
        new[0], new[1, 0, -1] = 0.0, float("nan")
        found = kernels.normalized(new.to(device)), kernels.restored(new.to(device), old.to(device))
        for result, expected in zip(found, (low_rank.normalized(new), low_rank.restored(new, old)), strict=True):
            if result is None or not torch.equal(result.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
                yield f"rows of {length}"


def _moving(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    layout = Layout({"a": (5_000,), "b": (3,), "c": (2_048,)})
    shards = BlockShards(layout, layout.blocks, 2)
    for rank, wire in itertools.product((None, 1), kernels.VALUES):
        flat = torch.empty(layout.numel, dtype=torch.float32, device="cpu").normal_(generator=rng)
        table = torch.tensor(shards._blocks(rank), dtype=torch.int64, device=device)
        whole = shards.pack(flat, wire, 0.5)
        expected = whole if rank is None else shards.owned(flat, rank).mul_(0.5).to(wire)
        rows = torch.zeros(expected.shape, dtype=wire, device=device)
        same = kernels.move(rows, flat.to(device), table, True, 0.5) and torch.equal(rows.cpu(), expected)
        back = flat.to(device, copy=True)
        same = same and kernels.move(back, rows, table, False, -2.0, True)
        rest = flat.clone()
        if rank is None:
            shards.subtract(rest, whole, 0.5)
        else:
            shards.add_owned(rest, rank, expected.to(torch.float32).mul_(-2.0))
        if not (same and torch.equal(back.cpu(), rest)):
            yield f"blocks of {rank} as {wire}"


def _searching(kernels: Any, device: torch.device, rng: torch.Generator) -> Iterator[str]:
    sizes, counts = {"a": 60_001, "b": 90_000, "c": 34_000}, {"a": 400, "b": 900, "c": 1}
    layout = Layout({name: (size,) for name, size in sizes.items()})
    plan = select.Plan.of(layout, counts, torch.device("cpu"))
    x = torch.empty(layout.numel, dtype=torch.float32, device="cpu").normal_(generator=rng)
    bits, mask = select._bits(x)
    expected = [select._largest_on_cpu(bits, plan, mask)[0][p.slot : p.slot + p.count] for p in plan.large]
    search = candidates.Search(plan.large, device)
    found = search.largest(bits.to(device), mask, kernels)
    parts = [] if found is None else found[1].cpu().split([part.count for part in search.parts])
    by_start = {part.start: indices.sort().values for part, indices in zip(search.parts, parts, strict=False)}
    for part, indices in zip(plan.large, expected, strict=True):
        if part.start not in by_start or not torch.equal(by_start[part.start].long(), indices.sort().values):
            yield f"the largest {part.count} of {part.size}"
