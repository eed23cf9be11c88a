"""ErrorFeedback, Warmup, Partition: by the invariants that they promise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdbridge.errors import ConfigurationError, WeightError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.policies import Bf16, ErrorFeedback, Fp16, Mean, Partition, Sum, Warmup, bytes_per_step, from_spec
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllReduce

SHAPES = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "fc.weight": (60, 40), "fc.bias": (40,), "scale": ()}
Grads = dict[str, Tensor]


def gradients(size: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()} for _ in range(size)]


@dataclass(frozen=True)
class Top(Policy):
    """Keeps the elements above 1 in magnitude: lossy, additive, contractive."""

    additive = True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        kept = torch.where(flat.abs() >= 0.5, flat, torch.zeros_like(flat))
        sent = kept.clone() if bucket.needs_sent else None
        return Aggregated((yield AllReduce(kept)), sent)


@dataclass(frozen=True)
class Equal(Mean):
    """Refuses unequal weights; needs the whole gradient."""

    unequal_weights = False
    deterministic = False
    scope = "step"


INNERS = [Mean(), Mean(exact=True), Fp16(), Bf16(), Top(), Warmup(Bf16(), 2), Partition((("*.bias", Top()),), Bf16())]


@pytest.mark.parametrize("inner", INNERS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_error_feedback_telescopes(inner: Policy, size: int) -> None:
    """Updates plus final residuals sum to the inputs.

    Each of T steps rounds the corrected gradient, the residual and the sum over ranks in float32; values stay below
    8 in magnitude, N of them per element: error <= T (N + 3) 8 2^-24.
    """
    steps, weights = 6, [float(r + 1) for r in range(size)]
    simulation = Simulation(ErrorFeedback(inner), SHAPES, size)
    inputs = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    outputs = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(steps):
        grads = gradients(size, step)
        updates = simulation.step(grads, weights)
        for name in SHAPES:
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)
            inputs[name] += sum(w / sum(weights) * g[name].double() for w, g in zip(weights, grads, strict=True))
            outputs[name] += updates[0][name].double()
    for name in SHAPES:
        residual = sum(store.portable()["residual"][name].double() for store in simulation.stores)
        assert (inputs[name] - outputs[name] - residual).abs().max() <= steps * (size + 3) * 8 * 2.0**-24


def test_without_feedback_the_error_stays() -> None:
    """The control of the test above: the same policy without feedback is measurably off."""
    total = torch.zeros(SHAPES["fc.weight"])
    for step in range(6):
        grads = gradients(2, step)
        total += simulate(Top(), grads)[0]["fc.weight"] - (grads[0]["fc.weight"] + grads[1]["fc.weight"]) / 2
    assert total.abs().max() > 0.5


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_weight_zero_contributes_nothing_and_keeps_its_residual(inner: Policy) -> None:
    simulation = Simulation(ErrorFeedback(inner), SHAPES, 3)
    simulation.step(gradients(3, 0))
    before = [store.portable()["residual"] for store in simulation.stores]
    grads = gradients(3, 1)
    grads[1] = {n: torch.full(s, math.nan) for n, s in SHAPES.items()}
    updates = simulation.step(grads, [1, 0, 3])
    after = [store.portable()["residual"] for store in simulation.stores]
    for name in SHAPES:
        assert torch.equal(before[1][name], after[1][name])
        assert updates[0][name].isfinite().all()


def test_the_excluded_rank_matters_no_more_than_an_absent_one() -> None:
    three = Simulation(ErrorFeedback(Top()), SHAPES, 3)
    two = Simulation(ErrorFeedback(Top()), SHAPES, 2)
    for step in range(4):
        grads = gradients(3, step)
        a = three.step(grads, [1, 0, 3])
        b = two.step([grads[0], grads[2]], [1, 3])
        assert all(torch.equal(a[0][n], b[0][n]) for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_residuals_of_half_gradients_are_float32(dtype: torch.dtype) -> None:
    params = {n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()}
    simulation = Simulation("ef(bf16)", params, 2)
    for step in range(3):
        updates = simulation.step(gradients(2, step, dtype), [3, 1])
    residual = simulation.stores[0].portable()["residual"]
    assert {t.dtype for t in residual.values()} == {torch.float32}
    assert {t.dtype for t in updates[0].values()} == {dtype}
    # Feedback sees the gradient in float32, so the weights' rounding in the half type is all that it cannot know.
    assert residual["fc.weight"].abs().max() > 0


NOT_ADDITIVE = [Sum(), ErrorFeedback(Mean()), Partition((("a", Sum()),)), Warmup(Mean(), first=Sum())]


@pytest.mark.parametrize("inner", NOT_ADDITIVE, ids=repr)
def test_error_feedback_refuses_what_is_not_additive(inner: Policy) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot wrap {type(inner).__name__}"):
        ErrorFeedback(inner)


def test_warmup_switches_once_and_keeps_both_states() -> None:
    policy = Warmup(then=ErrorFeedback(Bf16()), steps=2, first=ErrorFeedback(Fp16()))
    simulation = Simulation(policy, SHAPES, 2)
    alone = Simulation(ErrorFeedback(Fp16()), SHAPES, 2)
    for step in range(4):
        grads = gradients(2, step)
        updates = simulation.step(grads)
        state = simulation.stores[0].portable()
        if step < 2:
            assert torch.equal(updates[0]["fc.weight"], alone.step(grads)[0]["fc.weight"])
            assert not state["then"]["residual"]["fc.weight"].any()
        assert torch.equal(state["first"]["residual"]["fc.weight"], alone.stores[0].portable()["residual"]["fc.weight"])
    assert state["then"]["residual"]["fc.weight"].any()


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("*.bias", {"conv.bias", "fc.bias"}),
        ("conv.*", {"conv.weight", "conv.bias"}),
        ("[cs]*", {"conv.weight", "conv.bias", "scale"}),
        ("scale", {"scale"}),
        ("<40", {"conv.bias", "scale"}),
        ("<=40", {"conv.bias", "fc.bias", "scale"}),
        (">108", {"fc.weight"}),
        (">=108", {"fc.weight", "conv.weight"}),
        ("0d", {"scale"}),
        ("1d", {"conv.bias", "fc.bias"}),
        (">=2d", {"conv.weight", "fc.weight"}),
        ("<2d", {"conv.bias", "fc.bias", "scale"}),
        ("float32", set(SHAPES)),
        ("bfloat16", set()),
        ("nothing", set()),
    ],
)
def test_rules_of_a_partition(rule: str, names: set[str]) -> None:
    policy = Partition(((rule, Sum()),))
    grads = gradients(2, 0)
    updates = simulate(policy, grads)[0]
    for name in SHAPES:
        total = grads[0][name] + grads[1][name]
        assert torch.equal(updates[name], total if name in names else total / 2)


def test_the_first_rule_wins_and_types_are_those_of_the_gradient() -> None:
    params = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(3)}
    policy = ErrorFeedback(Partition({"bfloat16": Mean(), "*": Top(), "b": Mean()}))  # type: ignore[arg-type]
    assert isinstance(policy.inner, Partition)
    assert policy.inner.rules[0] == ("bfloat16", Mean())
    grads = [{n: torch.full_like(p, 0.1) for n, p in params.items()}]
    updates = simulate(policy, grads)[0]
    assert updates["a"].float().allclose(torch.tensor(0.1), rtol=0.01)  # though feedback made it float32
    assert not updates["b"].any()


MIXED = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3), "c": torch.ones(3, dtype=torch.float16)}


@pytest.mark.parametrize("around", ["", "clip", "local_sgd", "diloco"])
def test_a_partition_by_type_of_parameters_that_come_together(around: str) -> None:
    """Joined for a policy of scope "step", and after the optimizer's step, they are widened; rules see their types."""
    spec = "partition(bfloat16=sum, float16=clip(ef(bf16), norm=100.0), rest=clip(ef(mean), norm=100.0))"
    for size in (1, 2):
        text = {"": spec, "clip": f"clip({spec}, norm=1000.0)"}.get(around, f"{around}(every=1, inner={spec})")
        simulation = Simulation(text, MIXED, size)
        updates = simulation.step([MIXED] * size)
        moved = simulation.after_step([{n: p * 2 for n, p in MIXED.items()}] * size)
        if around in ("", "clip"):
            assert {n: float(u[0]) for n, u in updates[0].items()} == {"a": float(size), "b": 1.0, "c": 1.0}
        elif around == "local_sgd":  # from 1, by the inner policy of 2 - 1
            assert {n: float(p[0]) for n, p in moved[0].items()} == {"a": 1.0 + size, "b": 2.0, "c": 2.0}
        assert bytes_per_step(simulation.policy, MIXED, size) == simulation.bytes_sent[0]


def test_parts_may_act_after_the_step_by_type() -> None:
    simulation = Simulation("partition(bfloat16=mean, rest=local_sgd(every=1, inner=ef(bf16)))", MIXED, 2)
    simulation.step([MIXED] * 2)
    moved = simulation.after_step([{n: p * k for n, p in MIXED.items()} for k in (2, 4)])
    assert [{n: float(p[0]) for n, p in mine.items()} for mine in moved] == [
        {"a": 2.0, "b": 3.0, "c": 3.0},
        {"a": 4.0, "b": 3.0, "c": 3.0},
    ]


@pytest.mark.parametrize(
    "inner",
    [
        "mean(exact=true)", "partition(w=mean(exact=true), rest=mean)", "partition(w=mean, rest=mean(exact=true))",
        "warmup(steps=0, then=partition(w=mean(exact=true), rest=mean))", "clip(partition(w=mean(exact=true)))",
    ],
)  # fmt: skip
def test_small_shares_of_a_mean_are_lifted_in_any_part_of_a_bucket(inner: str) -> None:
    """At 8 ranks a share of 1e-7 is below half of fp16's smallest number 6e-8; lifted it is 1e-7, off by half of it."""
    grads = [{"w": torch.full((4,), 1e-7), "v": torch.full((4,), 1e-7)}] * 8
    for update in simulate(f"fp16({inner})", grads):
        for name in ("w", "v"):
            assert bool(((update[name] - 1e-7).abs() <= 2.0**-25 + 1e-12).all()), name


def test_a_raw_gradient_beside_a_lifted_share_is_not_lifted() -> None:
    """20000 fits into fp16, 8 times that does not."""
    grads = [{"w": torch.full((4,), 1e-7), "v": torch.full((4,), 2e4)}] * 8
    for spec in (
        "fp16(partition(w=mean(exact=true), rest=median))",
        "fp16(partition(v=median, rest=mean(exact=true)))",
    ):
        update = simulate(spec, grads)[0]
        assert torch.equal(update["v"], grads[0]["v"])
        assert update["w"].all()


def test_small_shares_that_wait_are_lifted() -> None:
    simulation = Simulation("fp16(delayed(mean(exact=true)))", {"w": (4,)}, 8)
    for _ in range(2):
        update = simulation.step([{"w": torch.full((4,), 1e-7)}] * 8)[0]
    assert update["w"].all()


def test_state_of_a_partition_is_keyed_by_rule() -> None:
    simulation = Simulation("ef(partition(*.bias=mean, rest=bf16))", SHAPES, 2)
    assert set(simulation.stores[0].portable()) == {"residual", "inner"}
    simulation = Simulation("partition(*.bias=ef(bf16), 1d=ef(fp16), rest=ef(mean))", SHAPES, 2)
    simulation.step(gradients(2, 0))
    state = simulation.stores[0].portable()
    assert set(state["*.bias"]["residual"]) == {"conv.bias", "fc.bias"}
    assert state["1d"]["residual"] == {}
    assert set(state["rest"]["residual"]) == {"conv.weight", "fc.weight", "scale"}
    assert state["*.bias"]["residual"]["fc.bias"].any()


@settings(max_examples=40, deadline=None)
@given(st.permutations(list(SHAPES)), st.lists(st.sampled_from(["*.bias", "<1000", ">=2d", "fc.*", "0d"]), unique=True))
def test_a_partition_is_its_parts(order: list[str], rules: list[str]) -> None:
    choices = [Bf16(), Fp16(), Sum(), Mean(exact=True), Top()]
    policy = Partition(tuple(zip(rules, choices, strict=False)), rest=ErrorFeedback(Bf16()))
    grads = [{n: g[n] for n in order} for g in gradients(2, 0)]
    whole = simulate(policy, grads, [1, 2])[0]
    for name in SHAPES:
        rule = policy.rule_of(name, torch.Size(SHAPES[name]), torch.float32)
        part = simulate(policy.inners()[rule], [{name: g[name]} for g in grads], [1, 2])[0]
        assert torch.equal(whole[name], part[name])


def test_bad_partitions() -> None:
    for rules in ((("rest", Mean()),), (("a", Mean()), ("a", Sum())), (("<x", Mean()),), (("", Mean()),)):
        with pytest.raises(ConfigurationError, match="Partition: rule"):
            Partition(rules)
    with pytest.raises(ConfigurationError, match="needs a policy"):
        Partition((("a", "mean"),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy", [Fp16(Equal()), ErrorFeedback(Equal()), Warmup(Mean(), first=Equal()), Partition((("x", Equal()),))]
)
def test_wrappers_are_what_their_inners_are(policy: Policy) -> None:
    assert (policy.scope, policy.deterministic, policy.unequal_weights) == ("step", False, False)
    grads = gradients(3, 0)
    with pytest.raises(WeightError, match="unequal weights no meaning"):
        simulate(policy, grads, [1, 2, 1])
    simulate(policy, grads, [2, 2, 0])


def test_wrappers_are_values() -> None:
    text = "warmup(steps=3, then=partition(a=ef(bf16), rest=fp16(sum)))"
    assert from_spec(text) == from_spec(text)
    assert len({from_spec(text), from_spec(text), from_spec("warmup(steps=4, then=mean)")}) == 2
