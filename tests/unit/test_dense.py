"""mean, sum, fp16, bf16 against float64 references written from the formulas.

Tolerances: eps = 2^-24, 2^-11, 2^-8 is half a unit in the last place of float32, fp16, bf16. An N-term sum of
terms t_r rounds at most N + 1 times in float32: error <= (N + 1) eps32 sum|t_r|. A half type adds one rounding of
each term and one of the sum: error <= 2 eps sum|t_r|, plus the spacing below its normal numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdbridge.errors import Unsupported
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.policies import Bf16, Fp16, Mean, from_spec
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter

SIZES = [1, 2, 3, 4, 8]
SHAPES = {"w": (50, 70), "empty": (0,), "scalar": (), "b": (7,), "long": (2049,)}
EPS32 = 2.0**-24
HALF = {"fp16": (2.0**-11, 2.0**-24), "bf16": (2.0**-8, 2.0**-133)}
"""Name -> (relative rounding, smallest spacing)."""

Grads = dict[str, Tensor]


def gradients(size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: (scale * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for n, s in SHAPES.items()}
        for _ in range(size)
    ]


def weights_of(size: int) -> list[list[float] | None]:
    return [None, [float(r + 1) for r in range(size)], [0.1] * size, *([[0.0, *range(1, size)]] if size > 1 else [])]


def reference(grads: list[Grads], weights: list[float] | None, name: str) -> tuple[Tensor, Tensor]:
    """``sum w g / sum w`` in float64, and the sum of the terms' magnitudes."""
    w = weights or [1.0] * len(grads)
    terms = [wr / math.fsum(w) * g[name].double() for wr, g in zip(w, grads, strict=True)]
    return sum(terms, torch.zeros(())), sum((t.abs() for t in terms), torch.zeros(()))


def same_on_all_ranks(updates: list[Grads]) -> bool:
    return all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in updates[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", ["mean", "mean:exact=true", "sum"])
def test_mean_and_sum(spec: str, size: int) -> None:
    grads = gradients(size)
    for weights in weights_of(size):
        updates = simulate(spec, grads, weights)
        assert same_on_all_ranks(updates)
        for name in SHAPES:
            expected, magnitude = reference(grads, weights, name)
            factor = size if spec == "sum" else 1
            assert (updates[0][name] - factor * expected).abs().le(factor * (size + 2) * EPS32 * magnitude).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", ["fp16", "bf16", "fp16(mean:exact=true)", "bf16(mean:exact=true)"])
def test_half_types(spec: str, size: int) -> None:
    grads = gradients(size)
    eps, spacing = HALF[spec[:4]]
    for weights in weights_of(size):
        updates = simulate(spec, grads, weights)
        assert same_on_all_ranks(updates)
        for name in SHAPES:
            expected, magnitude = reference(grads, weights, name)
            limit = (2 * eps + eps**2 + (size + 2) * EPS32) * magnitude + (size + 1) * spacing
            assert (updates[0][name] - expected).abs().le(limit).all()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_fp16_sends_exactly_what_the_contract_says(size: int) -> None:
    """``g w/sum(w) 2^round(log2 N)`` in fp16, added in float32 in rank order, the sum in fp16; bit by bit."""
    grads, weights = gradients(size, seed=1), [float(r + 1) for r in range(size)]
    power = 2.0 ** round(math.log2(size))
    total = torch.zeros(SHAPES["w"])
    for g, w in zip(grads, weights, strict=True):
        total += (g["w"] * (w / sum(weights)) * power).half().float()
    assert torch.equal(simulate("fp16", grads, weights)[0]["w"], (total / power).half().float())


def test_small_gradients_survive_fp16_at_many_ranks() -> None:
    size = 256
    grads = [{"w": torch.full((1000,), 1e-5)} for _ in range(size)]
    assert (simulate("fp16", grads)[0]["w"] / 1e-5 - 1).abs().max() < 2.0**-7  # spacing 2^-24 at 1e-5, twice
    naive = (grads[0]["w"] / size).half()
    assert (naive.float() * size / 1e-5 - 1).abs().max() > 0.5  # what is lost without the power


@pytest.mark.parametrize("size", SIZES)
def test_mean_is_plain_ddp_at_equal_weights(size: int) -> None:
    grads = gradients(size)
    flat = [torch.cat([g[n].reshape(-1) for n in SHAPES]) * (1 / size) for g in grads]
    expected = flat[0].clone()
    for other in flat[1:]:
        expected += other
    assert torch.equal(torch.cat([t.reshape(-1) for t in simulate("mean", grads)[0].values()]), expected)


def test_equal_weights_give_the_plain_sum() -> None:
    grads = gradients(3)
    for weights in (None, [0.1] * 3, [7.0] * 3):
        assert torch.equal(simulate("sum", grads, weights)[0]["w"], grads[0]["w"] + grads[1]["w"] + grads[2]["w"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["mean", "mean:exact=true", "sum", "fp16", "bf16", "ef(bf16)", "fp16(sum)"])
def test_other_types_of_gradients(spec: str, dtype: torch.dtype) -> None:
    grads = gradients(3, dtype)
    factor = 3 if "sum" in spec else 1
    eps = max([torch.finfo(dtype).eps, *(4 * eps for name, (eps, _) in HALF.items() if name in spec)])
    updates = simulate(spec, grads, [1, 2, 3])
    assert same_on_all_ranks(updates)
    for name in SHAPES:
        expected, magnitude = reference(grads, [1, 2, 3], name)
        assert updates[0][name].dtype == dtype
        assert (updates[0][name].double() - factor * expected).abs().le(4 * factor * eps * magnitude + 1e-6).all()


def test_exact_mean_of_float64_stays_float64() -> None:
    grads = gradients(3, torch.float64)
    expected, magnitude = reference(grads, None, "w")
    assert (simulate("mean:exact=true", grads)[0]["w"] - expected).abs().le(5 * 2.0**-53 * magnitude).all()


SPLITS = [["w", "empty", "scalar", "b", "long"]], [["long"], ["b", "w"], ["scalar", "empty"]], [[n] for n in SHAPES]
EXACT = ["mean:exact=true", "fp16", "bf16", "ef(fp16)", "ef(bf16)", "ef(mean:exact=true)", "partition(1d=ef(bf16))"]


@pytest.mark.parametrize("spec", [*EXACT, "mean", "sum", "fp16(sum)"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_bucket_boundaries_do_not_matter(spec: str, size: int) -> None:
    """Sharded schemes: to the bit at any N, error feedback's residuals included. Simulation's own all-reduce
    adds in rank order, so here even the float all-reduce is exact."""
    runs = []
    for buckets in SPLITS:
        simulation = Simulation(spec, SHAPES, size, buckets=buckets)
        for step in range(3):
            updates = simulation.step(gradients(size, seed=step), [float(r + 1) for r in range(size)])
        runs.append((updates, [store.portable() for store in simulation.stores]))
    for updates, states in runs[1:]:
        assert all(torch.equal(updates[0][n], runs[0][0][0][n]) for n in SHAPES)
        assert str(states) == str(runs[0][1])


@pytest.mark.parametrize("spec", ["mean", "mean:exact=true", "sum", "fp16", "bf16", "fp16(sum)", "ef(bf16)"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_travels_unless_its_rank_has_weight_zero(spec: str, bad: float) -> None:
    grads = gradients(3)
    grads[1]["long"][2000] = bad
    for updates in (simulate(spec, grads), simulate(spec, grads, [1, 2, 1])):
        for mine in updates:
            assert not mine["long"][2000].isfinite()
            assert mine["long"][:2000].isfinite().all()
            assert mine["w"].isfinite().all()
    excluded = simulate(spec, grads, [1, 0, 3])
    assert all(t.isfinite().all() for mine in excluded for t in mine.values())


@pytest.mark.parametrize("spec", ["mean", "mean:exact=true", "bf16"])
@pytest.mark.parametrize("value", [1e30, 1e-42, 0.0, -0.0])
def test_huge_denormal_and_zero(spec: str, value: float) -> None:
    grads = [{"w": torch.full((5,), value)} for _ in range(3)]
    spacing = HALF["bf16"][1] if spec == "bf16" else 2.0**-149
    assert torch.allclose(simulate(spec, grads)[0]["w"], grads[0]["w"], rtol=2.0**-7, atol=4 * spacing)


@pytest.mark.parametrize(("spec", "bytes_per_element"), [("mean", 4), ("mean:exact=true", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_on_the_wire(spec: str, bytes_per_element: int) -> None:
    simulation = Simulation(spec, {"w": (4096,)}, 4)
    simulation.step([{} for _ in range(4)])
    assert simulation.bytes_sent == [2 * 3 * 4096 * bytes_per_element // 4] * 4


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["mean:exact=true", "fp16", "bf16"]),
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5), min_size=1, max_size=5),
    st.data(),
)
def test_any_values_and_weights(spec: str, rows: list[list[float]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(rows), max_size=len(rows)))
    grads = [{"w": torch.tensor(row)} for row in rows]
    expected, magnitude = reference(grads, weights, "w")
    eps, spacing = HALF.get(spec, (0.0, 0.0))
    limit = (2 * eps + eps**2 + (len(rows) + 2) * EPS32) * magnitude + (len(rows) + 1) * (spacing + 2.0**-148)
    updates = simulate(spec, grads, weights)
    assert same_on_all_ranks(updates)
    assert (updates[0]["w"] - expected).abs().le(limit).all()


@dataclass(frozen=True)
class Asks(Policy):
    """Issues every kind of request; returns what came back, as it came."""

    weigh: bool = True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self.weigh:
            bucket.weighted()
        x = torch.arange(1.0, 9.0).view(4, 2)[: bucket.size] / 3 + bucket.rank
        group = (yield AllReduce(x.clone(), group="node")) + (yield AllReduce(x.clone(), group="cross"))
        answers = [
            (yield AllReduce(x.clone())), (yield AllReduce(x.clone(), "max")), (yield AllGather(x.clone())),
            (yield AllToAll(x.clone())), (yield ReduceScatter(x.clone())), (yield Broadcast(x.clone(), 1)),
            (yield AllReduce(x.double())), (yield AllGather(torch.tensor([bucket.rank, 300]))), group,
        ]  # fmt: skip
        self.seen.append(answers)
        return Aggregated(bucket.buffer.zero_())

    @property
    def seen(self) -> list[list[Tensor]]:
        return SEEN


SEEN: list[list[Tensor]] = []


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("half", [Fp16, Bf16])
def test_the_wrapper_casts_what_travels_and_nothing_else(half: type[Fp16 | Bf16], weigh: bool) -> None:
    runs, sent = [], []
    for policy in (Asks(weigh), half(Asks(weigh))):
        SEEN.clear()
        simulation = Simulation(policy, {"w": (2,)}, 4, local_size=2)
        simulation.step([{} for _ in range(4)])
        runs.append([list(answers) for answers in SEEN])
        sent.append(simulation.bytes_sent[0])
    eps = HALF["fp16" if half is Fp16 else "bf16"][0]
    for plain, halved in zip(*runs, strict=True):
        for i, (a, b) in enumerate(zip(plain, halved, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            if i in (1, 6, 7):  # max, float64 in a float32 bucket, integers: as they are
                assert torch.equal(a, b)
            else:
                assert torch.allclose(a, b, rtol=3 * eps, atol=0)
                assert not torch.equal(a, b)
    assert sent[1] < 0.75 * sent[0]


def test_a_group_of_unknown_size_is_refused() -> None:
    @dataclass(frozen=True)
    class Lost(Policy):
        def aggregate(self, bucket: Bucket, state: State) -> Flow:
            return Aggregated((yield AllReduce(bucket.buffer, group="rack")))

    with pytest.raises(Unsupported, match="'rack'"):
        simulate(Fp16(Lost()), gradients(2))


def test_the_answer_of_a_failed_request_is_thrown_into_the_inner_flow() -> None:
    @dataclass(frozen=True)
    class Catches(Policy):
        def aggregate(self, bucket: Bucket, state: State) -> Flow:
            try:
                yield AllReduce(bucket.buffer)
            except ZeroDivisionError:
                return Aggregated(bucket.buffer)
            raise AssertionError

    flow = Fp16(Catches()).aggregate(Bucket(torch.ones(2), Layout({"w": (2,)})), {"inner": {}})
    next(flow)
    with pytest.raises(StopIteration):
        flow.throw(ZeroDivisionError())


@pytest.mark.parametrize("spec", ["mean", "mean:exact=true", "fp16", "bf16", "fp16(mean:exact=true)"])
def test_what_they_say_they_are(spec: str) -> None:
    policy = from_spec(spec)
    assert (policy.additive, policy.deterministic, policy.unequal_weights, policy.scope) == (True, True, True, "bucket")
    assert not from_spec("sum").additive
    assert Mean() == Mean(False)
