"""int8, int4, fp8 against their formulas in float64; and the sharded scheme for codes that they share.

Where a test lets elements differ by a whole step: y = x / scale is below 127 and has three roundings of 2^-24 of itself
in float32, so it lies within 127 * 3 * 2^-24 = 2.3e-5 of its true value, and crosses a border between two integers with
a probability of twice that per rounding. A few crossings in 10 000 elements and 9 roundings are usual.
With the 15 levels of int4 true ties happen, too: half the codes of the largest sum are half that sum. There a share of
5 % may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.codes import Float8, Linear, PowerOfTwo
from hvdbridge.kernels.quantise import Code, decode, encode
from hvdbridge.policies import Fp8, Int4, Int8, from_spec
from hvdbridge.policies.sharded import _code_plan, sharded_code
from hvdbridge.policy.base import Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, Views
from hvdbridge.policy.collectives import AllGather, Collective
from policies.codes import (
    Array,
    Quantiser,
    assert_close,
    bound,
    by_blocks,
    gradients,
    linear,
    noise,
    shares,
    two_stages,
)

SIZES = [1, 2, 3, 4, 8]
SHAPES = {"w": (50, 70), "empty": (0, 2), "scalar": (), "b": (7,), "long": (9000,), "one": (1,), "even": (2, 1024)}
FP8 = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}
"""Bits of fraction, bias of the exponent, largest number (Micikevicius 2022, table 1)."""


def values_of(fmt: str) -> Array:
    """All finite numbers of an 8-bit format that are not negative, from the definition, in ascending order."""
    digits, bias, largest = FP8[fmt]
    codes = range(1 << 7)
    found = []
    for code in codes:
        exponent, fraction = code >> digits, (code & ((1 << digits) - 1)) / (1 << digits)
        found.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return np.array([v for v in found if v <= largest])


def floats(fmt: str, stochastic: bool = False) -> Quantiser:
    table = values_of(fmt)

    def quantise(x: Array, u: Array) -> Array:
        size = np.abs(x).max()
        if size == 0:
            return np.zeros_like(x)
        y = np.minimum(np.abs(x) / size * table[-1], table[-1])
        low = np.clip(np.searchsorted(table, y, side="right") - 1, 0, len(table) - 2)
        share = (y - table[low]) / (table[low + 1] - table[low])
        if stochastic:  # floor(y + u) of the signed number, in units of the spacing; up: away from zero
            up = np.where(x < 0, u < share, share + u >= 1)
        else:
            up = np.where(share == 0.5, low % 2 == 1, share > 0.5)
        return np.sign(x) * table[low + up] * (size / table[-1])

    return quantise


QUANTISERS: dict[str, tuple[int, Quantiser]] = {
    "int8": (1024, linear(127)),
    "int8:block=64": (64, linear(127)),
    "int8:rounding=stochastic": (1024, linear(127, True)),
    "int4:ef=false": (256, linear(7)),
    "int4:ef=false,rounding=stochastic,block=16": (16, linear(7, True)),
    "fp8": (1024, floats("e4m3")),
    "fp8:format=e5m2": (1024, floats("e5m2")),
    "fp8:rounding=stochastic": (1024, floats("e4m3", True)),
    "fp8:format=e5m2,rounding=stochastic,block=128": (128, floats("e5m2", True)),
}


def step_of(spec: str) -> float:
    """The largest step, relative to a block's largest element. (e4m3: 32 / 448, e5m2: 8192 / 57344 = 1 / 7.)"""
    return 1 / 127 if spec.startswith("int8") else 1 / 7


def weights_of(size: int) -> list[list[float] | None]:
    return [None, [float(r + 1) for r in range(size)], *([[0.0, *map(float, range(1, size))]] if size > 1 else [])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", QUANTISERS)
def test_the_formula(spec: str, size: int) -> None:
    block, quantise = QUANTISERS[spec]
    for weights in weights_of(size):
        grads = gradients(SHAPES, size, seed=size)
        mine = shares(grads, weights)
        want, _ = two_stages(mine, block, quantise)
        updates = simulate(spec, grads, weights)
        assert all(torch.equal(u[n], updates[0][n]) for u in updates for n in SHAPES)
        largest = {n: 2 * sum(np.abs(m[n]).max(initial=0) for m in mine) + 1e-30 for n in SHAPES}
        steps = {n: step_of(spec) * top for n, top in largest.items()}
        assert_close(updates[0], want, steps, block, 0.05 if spec.startswith("int4") else 5e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_error_feedback_over_steps(size: int) -> None:
    """int4 by default: e' = p - sent(p), where the owner's second error is its own (block j is rank j mod N's).

    A crossing shifts a residual by a step of a rank, which comes back in the next step: more elements may differ."""
    quantise = linear(7)
    simulation = Simulation("int4", SHAPES, size)
    residual = [{n: np.zeros(math.prod(s)) for n, s in SHAPES.items()} for _ in range(size)]
    first, count = {}, 0
    for name, shape in SHAPES.items():
        first[name] = count
        count += -(-math.prod(shape) // 1024)
    for step in range(4):
        grads = gradients(SHAPES, size, seed=step)
        weights = [float(r + 1) for r in range(size)]
        mine = [{n: share[n] + e[n] for n in SHAPES} for share, e in zip(shares(grads, weights), residual, strict=True)]
        want, sent = two_stages(mine, 256, quantise)
        for name, shape in SHAPES.items():
            error = want[name] - sum(s[name] for s in sent)
            for i in range(0, math.prod(shape), 1024):
                sent[(first[name] + i // 1024) % size][name][i : i + 1024] += error[i : i + 1024]
        residual = [{n: p[n] - s[n] for n in SHAPES} for p, s in zip(mine, sent, strict=True)]
        update = simulation.step(grads, weights)[0]
        steps = {n: 2 / 7 * sum(np.abs(m[n]).max(initial=0) for m in mine) + 1e-30 for n in SHAPES}
        assert_close(update, want, steps, 256, 0.05, shifted=2)
        for rank, store in enumerate(simulation.stores):
            found = store.portable()["residual"]
            assert_close(found, residual[rank], steps, 256, 0.05, shifted=2)


@pytest.mark.parametrize("fmt", FP8)
def test_every_number_of_the_format_travels(fmt: str) -> None:
    """A block of the format's own numbers comes back as it is, and whatever lies between comes back as a neighbour."""
    table = torch.tensor(values_of(fmt))
    x = torch.cat([table, -table]).float()
    assert torch.equal(simulate(f"fp8:format={fmt}", [{"w": x}])[0]["w"], x)


SHAPE_SPECS = ["int8", "int4", "int4:ef=false", "fp8:format=e5m2", "int8:rounding=stochastic,block=32"]


@pytest.mark.parametrize("spec", SHAPE_SPECS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_bucket_boundaries_do_not_matter(spec: str, size: int) -> None:
    """To the bit at any number of ranks, residuals included: what is added is added by one owner in rank order."""
    splits = [[list(SHAPES)], [["even", "b"], ["long", "scalar", "w"], ["one", "empty"]], [[n] for n in SHAPES]]
    runs = []
    for buckets in splits:
        simulation = Simulation(spec, SHAPES, size, buckets=buckets)
        for step in range(3):
            updates = simulation.step(gradients(SHAPES, size, step), [float(r + 1) for r in range(size)])
        runs.append((updates[0], [store.portable() for store in simulation.stores]))
    for update, states in runs[1:]:
        assert all(torch.equal(update[n], runs[0][0][n]) for n in SHAPES)
        assert str(states) == str(runs[0][1])


@pytest.mark.parametrize("spec", ["int8", "int4:block=1024", "fp8", "fp8:format=e5m2", "fp8:rounding=stochastic"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_non_finite_element_comes_back_non_finite(spec: str, bad: float) -> None:
    grads = gradients(SHAPES, 3, 0)
    grads[1]["long"][2000] = bad
    for updates in (simulate(spec, grads), simulate(spec, grads, [1, 2, 1])):
        for mine in updates:
            finite = mine["long"].isfinite()
            assert not finite[1024:2048].any()
            assert finite[:1024].all()
            assert finite[2048:].all()
            assert all(mine[n].isfinite().all() for n in SHAPES if n != "long")
    excluded = simulate(spec, grads, [1, 0, 3])
    assert all(t.isfinite().all() for mine in excluded for t in mine.values())


@pytest.mark.parametrize("spec", QUANTISERS)
def test_huge_and_tiny_blocks(spec: str) -> None:
    """Relative to a block's largest element the error is what it always is; but no step is below 2^-126."""
    step = step_of(spec)
    for value in (3e38, 1e30, 1e-30, 1e-36, 1e-38, 1e-42, 0.0):
        x = value * torch.linspace(-1, 1, 1000)
        update = simulate(spec, [{"w": x}, {"w": x}])[0]["w"]
        assert ((update.double() - x.double()).abs() <= 2.01 * (step * value + 2.0**-126)).all()
        assert value != 0.0 or not update.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["int8", "int4", "fp8"])
def test_other_types(spec: str, dtype: torch.dtype) -> None:
    """The coarser of code and type decides: at most half a step in either stage, and the type's own rounding."""
    grads = [{n: g.to(dtype) for n, g in mine.items()} for mine in gradients(SHAPES, 3, 0)]
    updates = simulate(spec, grads, [1, 2, 3])
    for name, want in {n: sum(s[n] for s in shares(grads, [1, 2, 3])) for n in SHAPES}.items():
        assert updates[0][name].dtype == dtype
        top = max((float(g[name].abs().max()) for g in grads if g[name].numel()), default=0.0)
        off = np.abs(updates[0][name].double().numpy().reshape(-1) - want)
        assert (off <= (1.01 * step_of(spec) + 4 * torch.finfo(dtype).eps) * top).all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([127, 7, 1]), st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16))
def test_rounding_to_the_nearest_contracts(levels: int, values: list[float]) -> None:
    """|x - Q(x)|^2 <= (1 - 1/d) |x|^2: zero is a level, so no element errs by more than itself, and the largest is
    exact (to its rounding in float32). And none errs by more than half a step."""
    x = torch.tensor(values)
    blocks = Blocks([Part(0, len(values))], 16, len(values), "cpu")
    codes, scales = encode(Linear(levels), x, blocks)
    assert scales is not None
    error = x.double() - decode(Linear(levels), codes[None], scales[None], blocks)
    assert error.square().sum() <= (1 - 1 / len(values) + 1e-5) * x.double().square().sum() + 2.0**-252
    assert error.abs().max() <= x.double().abs().max() * (0.5 / levels + 1e-6) + 2.0**-127


STOCHASTIC = ["int8:rounding=stochastic", "int4:rounding=stochastic,ef=false", "fp8:rounding=stochastic"]


@pytest.mark.parametrize("spec", STOCHASTIC)
@pytest.mark.parametrize("size", [1, 3])
def test_stochastic_rounding_is_unbiased(spec: str, size: int) -> None:
    """The mean over seeds is the weighted mean, within Hoeffding's bound: the error of each element is a sum of one
    centred term per rank and one of the owner, each confined to a step."""
    count, trials = 500, 200
    grads = gradients({"w": (count,)}, size, 3)
    weights = [float(r + 1) for r in range(size)]
    mine = [s["w"] for s in shares(grads, weights)]
    exact = sum(mine)

    def off(text: str) -> Tensor:
        total = torch.zeros(count, dtype=torch.float64)
        for seed in range(trials):
            total += Simulation(text, {"w": (count,)}, size, seed=seed).step(grads, weights)[0]["w"]
        return total / trials - torch.tensor(exact)

    steps = [step_of(spec) * np.abs(m).max() for m in mine]
    ranges = [*steps, step_of(spec) * (np.abs(exact).max() + sum(steps))]
    limit = bound(count, trials, ranges)
    error = off(spec)
    assert error.abs().max() <= limit
    # Dice of elements are independent, too, so their mean, upwards and away from zero, is closer by sqrt(count).
    for direction in (torch.ones(count), torch.tensor(exact).sign()):
        assert abs(float((error * direction).mean())) <= limit / math.sqrt(count)
    if spec.startswith("int"):
        trials = 1  # the control: what rounds to the nearest stays off by up to half a step
        assert off(spec.replace("stochastic", "nearest")).abs().max() > limit


@pytest.mark.parametrize("spec", STOCHASTIC)
def test_ranks_do_not_share_their_dice(spec: str) -> None:
    """Equal gradients on all ranks: the errors of the first stage are independent and average out.

    Their mean over 8 ranks has 1/8 of the variance of one; with shared dice it would have all of it. A variance
    measured over 4 times 1000 elements is off by some 3 % (fourth moment of a rounding error <= 3), here 25 % are let.
    """
    x, policy = torch.linspace(-1, 1, 1000), from_spec(spec)
    assert isinstance(policy, Int8 | Int4 | Fp8)

    def variance(size: int) -> float:
        total = 0.0
        for seed in range(4):
            buckets = [
                Bucket(x / size, Layout({"w": (1000,)}), seed=seed, ranks=Ranks(r, size), scaled=True)
                for r in range(size)
            ]
            to_owner = torch.stack([next(policy.aggregate(bucket, {})).tensor[0] for bucket in buckets])
            plan = _code_plan(buckets[0], policy.block)
            total += float((plan.own_shard.decode(policy.code, to_owner, torch.empty(1000)) - x).square().sum())
        return total

    assert 0.75 / 8 <= variance(8) / variance(1) <= 1.25 / 8


@pytest.mark.parametrize(
    ("spec", "bits", "block"), [("int8", 8, 1024), ("int4", 4, 256), ("fp8", 8, 1024), ("int4:block=64", 4, 64)]
)
def test_bytes_on_the_wire(spec: str, bits: int, block: int) -> None:
    """4 owners of 4096 elements each: per stage, codes and scales of three of four shards."""
    simulation = Simulation(spec, {"w": (16384,)}, 4)
    simulation.step([{} for _ in range(4)])
    shard = 4096 * bits // 8 + 4096 // block * 4
    assert simulation.bytes_sent == [2 * 3 * shard] * 4


def test_requests_do_not_depend_on_values_and_meta_tensors_predict_them() -> None:
    for spec in [*QUANTISERS, "int4"]:
        policy = from_spec(spec)
        layout = Layout(SHAPES)
        signatures = []
        for device, fill in (("meta", 0.0), ("cpu", 0.0), ("cpu", math.nan)):
            params = {n: torch.empty(s, device=device) for n, s in SHAPES.items()}
            bucket = Bucket(torch.full((layout.numel,), fill, device=device), layout, ranks=Ranks(1, 4))
            flow = policy.aggregate(bucket, _views(policy.init(params), layout))
            signatures.append([request.signature() for request in _answered(flow)])
        assert len({str(s) for s in signatures}) == 1
        assert len(signatures[0]) == 2


def _views(state: State, layout: Layout) -> State:
    if "residual" not in state:
        return state
    return {"residual": Views(layout, torch.cat([t.reshape(-1) for t in state["residual"].values()])), "inner": {}}


def _answered(flow: Flow) -> Iterator[Collective]:
    """The requests of a flow, each answered as if all ranks were this one."""
    request = next(flow)
    while True:
        yield request
        tensor = request.tensor
        try:
            request = flow.send(torch.stack([tensor] * 4) if isinstance(request, AllGather) else tensor)
        except StopIteration:
            return


@pytest.mark.parametrize(
    "make",
    [lambda: Int8(block=1000), lambda: Int4(block=8), lambda: Fp8(block=2048), lambda: from_spec("int8:block=48")],
)
def test_impossible_blocks(make: object) -> None:
    with pytest.raises(ConfigurationError, match="power of two from 16 to 1024"):
        make()  # type: ignore[operator]


def test_bad_options() -> None:
    with pytest.raises(ConfigurationError, match="rounding='up' must be one of 'nearest', 'stochastic'"):
        Int8(rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="format='e3m4' must be one of"):
        Fp8(format="e3m4")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cannot wrap Int4"):
        from_spec("ef(int4)")


def test_what_they_say_they_are() -> None:
    assert from_spec("int8").deterministic
    assert not from_spec("int8:rounding=stochastic").deterministic
    assert (from_spec("int8").additive, from_spec("fp8").additive, from_spec("int4").additive) == (True, True, False)
    assert from_spec("int4:ef=false").additive
    # Off the wire: half the bytes of int8 at a sixteenth of its precision, and feedback makes up for it.
    grads = gradients({"w": (4096,)}, 2, 0)
    exact = (grads[0]["w"] + grads[1]["w"]) / 2
    sums = {spec: torch.zeros(4096) for spec in ("int4", "int4:ef=false")}
    for spec, total in sums.items():
        simulation = Simulation(spec, {"w": (4096,)}, 2)
        for _ in range(20):
            total += simulation.step(grads)[0]["w"]
    errors = {spec: float((total / 20 - exact).norm()) for spec, total in sums.items()}
    assert errors["int4"] < 0.2 * errors["int4:ef=false"]


# Codes and blocks by themselves.

CODES: list[Code] = [Linear(127), Linear(7), Linear(1, "stochastic"), Linear(300), Linear(70, norm="l2"),
                     Float8("e4m3", "stochastic"), Float8("e5m2"), PowerOfTwo()]  # fmt: skip


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("chunk", [16, 48, 10_000])
def test_a_block_does_not_know_where_it_lies(code: Code, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks are a matrix: each block is coded as if it were alone."""
    monkeypatch.setattr("hvdbridge.kernels.blocks.CHUNK", chunk)
    lengths = [16, 16, 16, 16, 16, 3, 16, 16, 5, 1, 16, 16, 16, 16, 16, 16, 9, 16]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    numel = sum(lengths)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    parts = [Part(at, length, 1024 * i) for i, (at, length) in enumerate(zip(starts, lengths, strict=True))]
    together = Blocks(parts, 16, numel + 5, "cpu")
    codes, scales = encode(code, torch.cat([x, torch.ones(5)]), together, 77)
    assert not codes[numel:].any()
    rows = None if scales is None else torch.stack([scales, scales])
    back = decode(code, torch.stack([codes, codes]), rows, together)
    assert not back[numel:].any()
    for i, (start, length, number, *_) in enumerate(parts):
        alone = Blocks([Part(0, length, number)], 16, length, "cpu")
        theirs, scale = encode(code, x[start : start + length], alone, 77)
        assert torch.equal(codes[start : start + length], theirs)
        assert scales is None or (scale is not None and torch.equal(scales[i : i + 1], scale))
        once = decode(code, theirs[None], None if scale is None else scale[None], alone)
        assert torch.equal(back[start : start + length], once + once)


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_codes_travel(code: Code) -> None:
    x = torch.randn(3 * 37, generator=torch.Generator().manual_seed(1))
    blocks = Blocks([Part(0, 111)], 128, 111, "cpu")
    codes = encode(code, x, blocks)[0].view(3, 37)
    wire = code.to_wire(codes)
    assert wire.dtype == torch.uint8
    assert wire.shape == (3, code.wire_bytes(37))
    assert torch.equal(code.from_wire(wire, 37), codes)


def test_no_blocks_at_all() -> None:
    for numel in (0, 3):
        blocks = Blocks([], 16, numel, "cpu")
        codes, scales = encode(Linear(7), torch.ones(numel), blocks)
        assert (codes.tolist(), scales.tolist() if scales is not None else None) == ([0] * numel, [])
        assert decode(Linear(7), codes[None], torch.empty(1, 0), blocks).tolist() == [0.0] * numel
    for size in (1, 3):
        assert simulate("int8", [{"w": torch.empty(0)}] * size)[0]["w"].shape == (0,)


@dataclass(frozen=True)
class Carrying(Policy):
    """Feedback of the server's own, as DoubleSqueeze has it: the owner keeps what the second stage missed."""

    additive = True

    def init(self, params: dict[str, Tensor]) -> State:  # type: ignore[override]
        return {"server": {n: torch.zeros(p.shape) for n, p in params.items()}}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        carry = state["server"].flat
        coded = yield from sharded_code(bucket, Linear(127), 64, carry, Linear(1))
        assert coded.error is not None
        return replace(coded.aggregated, state={"server": Views(bucket.layout, coded.error)})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_server_can_carry_its_error(size: int) -> None:
    """Updates plus what the servers still carry are what they were sent: after T steps only the first stage's
    errors remain, T (1/254 + roundings) of the largest share, though the second stage has three levels."""
    simulation = Simulation(Carrying(), SHAPES, size)
    balance = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(5):
        grads = gradients(SHAPES, size, step)
        updates = simulation.step(grads)
        for name in SHAPES:
            balance[name] += sum(g[name].double() for g in grads) / size - updates[0][name].double()
    for name in SHAPES:
        carried = sum(store.portable()["server"][name].double() for store in simulation.stores)
        assert ((balance[name] - carried).abs() <= 5 * 5 / 250).all()  # elements stay below 5
    owners = [store.portable()["server"]["long"].view(-1)[:1024].any() for store in simulation.stores]
    assert sum(map(bool, owners)) == 1  # one rank owns the first block, and nobody else carries for it


def test_the_reference_is_stochastic_rounding() -> None:
    """The tests' own quantisers: what they stand for, on numbers that can be checked by hand."""
    x, u = np.array([1.0, 0.3, -0.3, 0.0]), np.array([0.5, 0.8, 0.2, 0.9])
    assert by_blocks(x, u, 4, linear(1)).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert by_blocks(x, u, 4, linear(1, True)).tolist() == [1.0, 1.0, -1.0, 0.0]
    assert by_blocks(x, u, 2, linear(1, True)).tolist() == [1.0, 1.0, -0.3, 0.0]
    assert values_of("e4m3")[[0, 1, 8, -1]].tolist() == [0.0, 2.0**-9, 2.0**-6, 448.0]
    assert values_of("e5m2")[[0, 1, 4, -1]].tolist() == [0.0, 2.0**-16, 2.0**-14, 57344.0]
    assert len(noise(0, 0, "x", np.arange(3))) == 3
