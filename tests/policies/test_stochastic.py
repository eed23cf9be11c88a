"""qsgd, natural, terngrad: against their formulas in float64 with the same dice, and by what their papers prove.

Where a formula is followed with the same dice, an element may differ by a step only where ``y + u`` lies within the
rounding of float32 of an integer: y <= 127 is off by 127 * 3 * 2^-24 = 2.3e-5 and y + u is rounded by 2^-18, so at most
one of 30 000 per rounding.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels.blocks import Blocks, Part
from hvdbridge.kernels.codes import Linear, PowerOfTwo
from hvdbridge.kernels.quantise import Code, decode, encode
from hvdbridge.policies import Qsgd, TernGrad, from_spec
from hvdbridge.policies.sharded import _code_plan, sharded_code
from hvdbridge.policies.stochastic import counted
from hvdbridge.policy.bucket import Bucket, Layout, Ranks
from hvdbridge.policy.collectives import AllGather
from policies.codes import (
    Array,
    Quantiser,
    assert_close,
    bound,
    by_blocks,
    gradients,
    linear,
    noise,
    numbers_of,
    shares,
    two_stages,
)

SIZES = [1, 2, 3, 4, 8]
SHAPES = {"w": (50, 70), "empty": (0, 2), "scalar": (), "b": (7,), "long": (9000,), "one": (1,), "even": (2, 1024)}


def weights_of(size: int) -> list[list[float] | None]:
    return [None, [float(r + 1) for r in range(size)], *([[0.0, *map(float, range(1, size))]] if size > 1 else [])]


def same_everywhere(updates: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in updates[0])


def powers(x: Array, u: Array) -> Array:
    """Horvath 2019, definition 2.1: 2^a or 2^(a+1) with a = floor(log2 |x|), up with probability (|x| - 2^a) / 2^a.
    The dice have 23 bits there, and turn up where fraction + u reaches 1."""
    exponent = np.floor(np.log2(np.abs(x), where=x != 0, out=np.full_like(x, -200)))
    low = 2.0**exponent
    up = np.abs(x) / low - 1 + np.floor(u * 2**23) / 2**23 >= 1
    return np.where(x == 0, 0, np.sign(x) * low * np.where(up, 2, 1))


CODED: dict[str, tuple[int, float, Quantiser]] = {
    "qsgd": (512, 1 / 7, linear(7, True)),
    "qsgd:bits=8,norm=l2,block=64": (64, math.sqrt(64) / 127, linear(127, True, "l2")),
    "qsgd:levels=2,norm=l2,block=16": (16, 4 / 2, linear(2, True, "l2")),
    "qsgd:levels=100": (512, 1 / 100, linear(100, True)),
    "qsgd:bits=2": (512, 1.0, linear(1, True)),
}
"""Block, step relative to the largest element of a block (|v| <= sqrt(d) max), formula."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", CODED)
def test_qsgd_is_its_formula(spec: str, size: int) -> None:
    block, step, quantise = CODED[spec]
    for weights in weights_of(size):
        grads = gradients(SHAPES, size, seed=size)
        mine = shares(grads, weights)
        want, _ = two_stages(mine, block, quantise)
        updates = simulate(spec, grads, weights)
        assert same_everywhere(updates)
        # A norm, like a sum, has log2(block) roundings of 2^-24, relative to steps of 1 / levels of it.
        steps = {n: 2 * step * sum(np.abs(m[n]).max(initial=0) for m in mine) + 1e-30 for n in SHAPES}
        assert_close(updates[0], want, steps, block, 1e-3, shifted=1)


@pytest.mark.parametrize("size", SIZES)
def test_natural_is_its_formula(size: int) -> None:
    """Exact where the dice fall alike: what one stage gives are powers of two, and sums of N of them are rounded
    once; the roundings of a share (2^-24) or a sum turn the dice with a probability of 2^-22 each."""
    for weights in weights_of(size):
        grads = gradients(SHAPES, size, seed=size)
        want, _ = two_stages(shares(grads, weights), 1024, powers)
        updates = simulate("natural", grads, weights)
        assert same_everywhere(updates)
        differ = sum(int((updates[0][n].double().numpy().reshape(-1) != want[n]).sum()) for n in SHAPES)
        assert differ <= 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("clip", [None, 2.5, 1.0])
def test_terngrad_is_its_formula(size: int, clip: float | None) -> None:
    """s = max over ranks of max |g|, clipped to c deviations before; the sum of ternary shares travels back exactly."""
    for weights in weights_of(size):
        grads = gradients(SHAPES, size, seed=size)
        mine = shares(grads, weights)
        numbers = numbers_of(SHAPES)
        updates = simulate(TernGrad(clip), grads, weights)
        assert same_everywhere(updates)
        wrong = 0
        for name in SHAPES:
            limits = [np.abs(m[name]).max(initial=0) for m in mine]
            if clip is not None and numbers[name].size:
                limits = [min(a, clip * math.sqrt((m[name] ** 2).mean())) for a, m in zip(limits, mine, strict=True)]
            scale, total = max(limits), np.zeros(numbers[name].size)
            for rank, (m, limit) in enumerate(zip(mine, limits, strict=True)):
                y = np.clip(m[name], -limit, limit) / scale
                total += np.clip(np.floor(y + noise(0, 0, "to owner", numbers[name], rank)), -1, 1)
            found = updates[0][name].double().numpy().reshape(-1)
            assert np.allclose(found / scale, np.rint(found / scale), atol=1e-4)  # whole multiples of s
            off = np.abs(found / scale - total)
            assert (off < 1.01).all()
            wrong += int((off > 0.5).sum())
        assert wrong <= 3


TRIALS, COUNT = 200, 500


def mean_error(spec: str, grads: list[dict[str, Tensor]], weights: list[float] | None) -> Array:
    total = torch.zeros(COUNT, dtype=torch.float64)
    for seed in range(TRIALS):
        total += Simulation(spec, {"w": (COUNT,)}, len(grads), seed=seed).step(grads, weights)[0]["w"]
    return total.numpy() / TRIALS - sum(s["w"] for s in shares(grads, weights))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spec", ["qsgd", "qsgd:bits=8,norm=l2", "qsgd:bits=2", "natural", "terngrad:clip=none"])
def test_unbiased(spec: str, size: int) -> None:
    """The mean over seeds is the weighted mean within Hoeffding's bound: an element's error is a sum of one centred
    term per rank and one of the owner, independent, each confined to a step."""
    grads, weights = gradients({"w": (COUNT,)}, size, 3), [float(r + 1) for r in range(size)]
    mine = [s["w"] for s in shares(grads, weights)]
    tops = [np.abs(m).max() for m in mine]
    total = np.sum(np.abs(mine), axis=0)
    if spec == "natural":  # a step is a power of two below the element; the first stage's sum is below twice its own
        limit = np.array([bound(COUNT, TRIALS, [*np.abs(mine)[:, i], 2 * total[i]]) for i in range(COUNT)])
    elif spec.startswith("terngrad"):  # a step is s, and the second stage adds nothing
        limit = np.full(COUNT, bound(COUNT, TRIALS, [max(tops)] * size))
    else:  # a block's norm over the levels; in the second stage that of the sum, each element a step higher at most
        policy = from_spec(spec)
        assert isinstance(policy, Qsgd)
        norms = [math.sqrt((m**2).sum()) for m in mine] if policy.norm == "l2" else tops
        steps = [norm / policy.code.levels for norm in norms]
        wider = math.sqrt(COUNT) if policy.norm == "l2" else 1
        limit = np.full(COUNT, bound(COUNT, TRIALS, [*steps, (sum(norms) + wider * sum(steps)) / policy.code.levels]))
    error = mean_error(spec, grads, weights)
    assert (np.abs(error) <= limit).all()
    # Dice of elements are independent, too, so their mean, upwards and away from zero, is closer by sqrt(COUNT).
    for direction in (np.ones(COUNT), np.sign(np.sum(mine, axis=0))):
        assert abs(float((error * direction).mean())) <= math.sqrt((limit**2).mean() / COUNT)


def test_clipping_is_biased() -> None:
    """The control of the test above: what is cut off does not come back."""
    grads = gradients({"w": (COUNT,)}, 1, 3)
    top = float(grads[0]["w"].abs().max())
    assert np.abs(mean_error("terngrad:clip=1.0", grads, None)).max() > bound(COUNT, TRIALS, [top])


def one_block(code: Code, x: Tensor, seed: int) -> Tensor:
    n = x.numel()
    blocks = Blocks([Part(0, n)], 1 << (n - 1).bit_length(), n, "cpu")
    codes, scales = encode(code, x, blocks, seed)
    return decode(code, codes[None], None if scales is None else scales[None], blocks)


@pytest.mark.parametrize(("levels", "count"), [(1, 64), (4, 64), (16, 64), (127, 1024)])
def test_variance_of_qsgd(levels: int, count: int) -> None:
    """Lemma 3.1: E|Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2. The mean over trials of a sum of independent
    elements' squares; it is below the bound by far, or at it for the worst v (half a step everywhere): 5 % are let."""
    generator = torch.Generator().manual_seed(levels)
    worst = torch.full((count,), 0.5 / levels)
    worst[0] = math.sqrt(max(1 - float(worst[1:].square().sum()), 0.1))
    for x in (torch.randn(count, generator=generator), worst):
        error = sum(
            float((one_block(Linear(levels, "stochastic", "l2"), x, seed) - x).square().sum()) for seed in range(400)
        )
        limit = min(count / levels**2, math.sqrt(count) / levels) * float(x.square().sum())
        assert error / 400 <= 1.05 * limit
    assert error / 400 >= 0.05 * limit  # and the worst is not far away: the bound is tight to a constant


def test_variance_of_natural_compression() -> None:
    """Theorem 2.4: E(C(x) - x)^2 <= x^2 / 8, with equality at x = 4/3 of a power of two."""
    x = torch.cat([torch.full((4000,), 4 / 3), torch.linspace(1, 2, 4000)])
    squares = (one_block(PowerOfTwo(), x, 1) - x).square() / x.square()
    # At 4/3 the squares are 1/16 and 1/4 with probabilities 2/3 and 1/3: deviation 0.09, of a mean of 4000, 0.0014.
    assert abs(float(squares[:4000].mean()) - 1 / 8) <= 6 * 0.0014
    assert float(squares[4000:].mean()) <= 1 / 8


def test_variance_of_terngrad() -> None:
    """E(s b sign(g))^2 = s |g|, so the variance is s |g| - g^2 (section 3.2). The sum over elements of squares that
    are 0 or s^2 deviates by less than s^2 sqrt(n) / 2."""
    x = torch.linspace(-1, 1, 9001)
    second = float(simulate("terngrad:clip=none", [{"w": x}])[0]["w"].double().square().sum())
    assert abs(second - float(x.abs().double().sum())) <= 6 * math.sqrt(9001) / 2


def variance_at_the_owner(code: Code, x: Tensor, size: int) -> float:
    """Of the sum of ``size`` equal shares of x, as rank 0 decodes it; x is one block, which rank 0 owns."""
    total = 0.0
    for seed in range(4):
        buckets = [
            Bucket(x / size, Layout({"w": x.shape}), seed=seed, ranks=Ranks(r, size), scaled=True) for r in range(size)
        ]
        to_owner = torch.stack([next(sharded_code(b, code)).tensor[0] for b in buckets])
        plan = _code_plan(buckets[0], 1024)
        total += float((plan.own_shard.decode(code, to_owner, torch.empty(x.shape)) - x).square().sum())
    return total


@pytest.mark.parametrize("code", [Linear(7, "stochastic"), Linear(127, "stochastic", "l2"), PowerOfTwo()], ids=repr)
def test_ranks_do_not_share_their_dice(code: Code) -> None:
    """Equal gradients on all ranks: errors average out, to 1/8 of the variance at 8 ranks; with shared dice all of it
    would stay. A variance measured on 4 times 1000 elements is off by some 3 %, here 25 % are let."""
    x = torch.linspace(-1, 1, 1000)
    assert 0.75 / 8 <= variance_at_the_owner(code, x, 8) / variance_at_the_owner(code, x, 1) <= 1.25 / 8


def test_ranks_of_terngrad_do_not_share_their_dice() -> None:
    x = torch.linspace(-1, 1, 9000)

    def variance(size: int) -> float:
        update = simulate("terngrad:clip=none", [{"w": x}] * size)[0]["w"]
        return float((update - x).square().mean())

    assert 0.8 / 8 <= variance(8) / variance(1) <= 1.2 / 8


def test_steps_and_seeds_throw_other_dice() -> None:
    x = torch.linspace(-1, 1, 1000)
    for spec in ("qsgd", "natural", "terngrad"):
        simulation = Simulation(spec, {"w": (1000,)}, 2)
        first, second = (simulation.step([{"w": x}] * 2)[0]["w"] for _ in range(2))
        again = Simulation(spec, {"w": (1000,)}, 2).step([{"w": x}] * 2)[0]["w"]
        other = Simulation(spec, {"w": (1000,)}, 2, seed=1).step([{"w": x}] * 2)[0]["w"]
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert not torch.equal(first, other)


ALL = ["qsgd", "qsgd:bits=8,norm=l2,block=64", "natural", "terngrad", "ef(qsgd)", "ef(terngrad)"]


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_bucket_boundaries_do_not_matter(spec: str, size: int) -> None:
    """To the bit at any number of ranks: dice belong to elements."""
    splits = [[list(SHAPES)], [["even", "b"], ["long", "scalar", "w"], ["one", "empty"]], [[n] for n in SHAPES]]
    runs = []
    for buckets in splits:
        simulation = Simulation(spec, SHAPES, size, buckets=buckets)
        for step in range(2):
            updates = simulation.step(gradients(SHAPES, size, step), [float(r + 1) for r in range(size)])
        runs.append((updates[0], [store.portable() for store in simulation.stores]))
    for update, states in runs[1:]:
        assert all(torch.equal(update[n], runs[0][0][n]) for n in SHAPES)
        assert str(states) == str(runs[0][1])


@pytest.mark.parametrize(("spec", "hit"), [("qsgd", (1536, 2048)), ("natural", (2000, 2001)), ("terngrad", (0, 9000))])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_how_far_a_non_finite_element_reaches(spec: str, hit: tuple[int, int], bad: float) -> None:
    grads = gradients(SHAPES, 3, 0)
    grads[1]["long"][2000] = bad
    for updates in (simulate(spec, grads), simulate(spec, grads, [1, 2, 1])):
        for mine in updates:
            finite = mine["long"].isfinite()
            assert not finite[hit[0] : hit[1]].any()
            assert finite[: hit[0]].all()
            assert finite[hit[1] :].all()
            assert all(mine[n].isfinite().all() for n in SHAPES if n != "long")
    excluded = simulate(spec, grads, [1, 0, 3])
    assert all(t.isfinite().all() for mine in excluded for t in mine.values())


@pytest.mark.parametrize("value", [1e37, 1e30, 1e-30, 1e-38, 1e-42, 0.0])
@pytest.mark.parametrize("spec", ["qsgd", "qsgd:bits=8,norm=l2,block=16", "natural", "terngrad", "terngrad:clip=none"])
def test_huge_tiny_and_zero(spec: str, value: float) -> None:
    """Finite, and off by no more than two steps: that of the largest, or of 2^-126. (Beyond 1e37 a 2-norm of 16, or
    a sum of powers of two, may be beyond float32.)"""
    x = value * torch.linspace(-1, 1, 1000)
    for update in simulate(spec, [{"w": x}, {"w": x}]):
        assert update["w"].isfinite().all()
        assert ((update["w"].double() - x.double()).abs() <= 2 * (value + 2.0**-126)).all()
        assert value != 0.0 or not update["w"].any()


def test_natural_has_no_power_above_the_largest() -> None:
    x = torch.tensor([3.4e38, -3.4e38, 1.7e38])
    assert simulate("natural", [{"w": x}])[0]["w"].tolist()[:2] == [2.0**127, -(2.0**127)]
    below = torch.tensor([2.0**-127] * 1000)
    found = simulate("natural", [{"w": below}])[0]["w"]
    assert set(found.tolist()) == {0.0, 2.0**-126}
    assert abs(float((found > 0).float().mean()) - 0.5) <= 6 * 0.5 / math.sqrt(1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["qsgd", "natural", "terngrad"])
def test_other_types(spec: str, dtype: torch.dtype) -> None:
    grads = [{n: g.to(dtype) for n, g in mine.items()} for mine in gradients(SHAPES, 2, 0)]
    wide = simulate(spec, [{n: g.float() for n, g in mine.items()} for mine in grads])
    found = simulate(spec, grads)
    assert same_everywhere(found)
    for name in SHAPES:  # halving is exact in all these types, so the dice fall alike
        assert torch.equal(found[0][name], wide[0][name].to(dtype))


BYTES = {
    "qsgd": (4096 // 2 + 4096 // 512 * 4) * 2,
    "qsgd:levels=4": (4096 * 4 // 8 + 32) * 2,  # 9 levels: 4 bits
    "qsgd:bits=3": (4096 * 3 // 8 + 32) * 2,
    "qsgd:levels=64": (4096 + 32) * 2,  # 129 levels: 8 bits
    "natural": (4096 + 512) * 2,
    "terngrad": 4096 * 2 // 8 + 4096 * 4 // 8 + 4 * 1,  # and a scale, of one parameter, to each of three others
}


@pytest.mark.parametrize("spec", BYTES)
def test_bytes_on_the_wire(spec: str) -> None:
    simulation = Simulation(spec, {"w": (16384,)}, 4)
    simulation.step([{} for _ in range(4)])
    assert simulation.bytes_sent == [3 * BYTES[spec]] * 4


@pytest.mark.parametrize(("size", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (8, 5), (64, 8), (127, 8), (130, 16)])
def test_terngrad_counts_any_number_of_ranks(size: int, bits: int) -> None:
    """All ranks say 1, which is the largest sum there is; then -1, the smallest."""
    simulation = Simulation("terngrad", {"w": (64,)}, size)
    for sign in (1.0, -1.0):
        before = simulation.bytes_sent[0]
        updates = simulation.step([{"w": torch.full((64,), sign)}] * size)
        # s is float32(1 / N), and N times it is rounded once more: 2^-24 each.
        assert torch.allclose(updates[0]["w"], torch.full((64,), sign), rtol=2.0**-22)
        per_owner = -(-64 // size)
        sent = (size - 1) * (4 + -(-per_owner * 2 // 8) + -(-per_owner * bits // 8))
        assert simulation.bytes_sent[0] - before == sent


@pytest.mark.parametrize("spec", ALL[:4])
def test_meta_tensors_predict_the_requests(spec: str) -> None:
    layout, signatures = Layout(SHAPES), []
    for device, fill in (("meta", 0.0), ("cpu", 0.0), ("cpu", math.nan)):
        bucket = Bucket(torch.full((layout.numel,), fill, device=device), layout, ranks=Ranks(1, 4), needs_sent=True)
        flow, found = from_spec(spec).aggregate(bucket, {}), []
        request = next(flow)
        for _ in range(3 if spec == "terngrad" else 2):
            found.append(request.signature())
            answer = torch.stack([request.tensor] * 4) if isinstance(request, AllGather) else request.tensor
            try:
                request = flow.send(answer)
            except StopIteration as end:
                found.append(str((end.value.update.shape, end.value.rest.shape)))
        signatures.append(found)
    assert signatures[0] == signatures[1] == signatures[2]


def test_no_parameters_with_elements() -> None:
    for spec in ("qsgd", "natural", "terngrad"):
        for size in (1, 3):
            assert simulate(spec, [{"w": torch.empty(0, 2)}] * size)[0]["w"].shape == (0, 2)


def test_bad_options() -> None:
    for text in ("qsgd:levels=0", "qsgd:levels=128", "qsgd:bits=1", "qsgd:bits=9", "terngrad:clip=0.0"):
        with pytest.raises(ConfigurationError, match="must be"):
            from_spec(text)
    with pytest.raises(ConfigurationError, match="levels=7 and bits=4 say the same"):
        Qsgd(levels=7, bits=4)
    with pytest.raises(ConfigurationError, match="power of two from 16 to 1024"):
        Qsgd(block=100)
    assert Qsgd(bits=4).code == Qsgd(levels=7).code == Qsgd().code


def test_what_they_say_they_are() -> None:
    for spec in ("qsgd", "natural", "terngrad"):
        policy = from_spec(spec)
        assert (policy.additive, policy.deterministic, policy.unequal_weights, policy.scope) == (
            True, False, True, "bucket",
        )  # fmt: skip


def test_the_reference_by_hand() -> None:
    x, u = np.array([3.0, -3.0, 0.75, 0.0, 4.0]), np.array([0.6, 0.4, 0.4, 0.9, 0.999])
    assert by_blocks(x, u, 8, powers).tolist() == [4.0, -2.0, 0.5, 0.0, 4.0]


@pytest.mark.parametrize("size", [1, 2, 31, 63, 64, 127, 128, 300])
def test_votes_are_counted_as_codes_of_their_sum(size: int) -> None:
    """All that fall within a byte, a byte with a sign, and more: each form of code has its limit of ranks."""
    votes = torch.randint(0, 3, (size, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    votes[:, 0], votes[:, 1] = 0, 2
    code, signs = Linear(size), votes.to(torch.int64) - 1
    codes = counted(votes.clone(), code)
    assert codes.dtype == code.dtype
    assert torch.equal(code.read(codes, torch.empty(64, dtype=torch.int64)), signs.sum(0))
