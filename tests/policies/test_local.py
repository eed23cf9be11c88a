"""Local SGD, post-local SGD, DiLoCo: against their formulas in float64, and against torch's own parts."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.execution.simulation import Simulation
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import anchored

SHAPES = {"conv.weight": (4, 3, 3), "fc.weight": (20, 30), "fc.bias": (20,), "empty": (0, 2), "scale": ()}
RATE = 0.125
Arrays = dict[str, np.ndarray]
Grads = dict[str, Tensor]


def numbers(seed: int, scale: float = 1.0) -> Grads:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def start() -> Grads:
    return numbers(99)


def wide(tensors: Grads) -> Arrays:
    return {name: tensor.double().numpy().copy() for name, tensor in tensors.items()}


class Training:
    """Ranks that each take steps of plain gradient descent on gradients that do not depend on the parameters."""

    def __init__(self, spec: str, size: int, **options: Any) -> None:
        self.size = size
        self.simulation = Simulation(spec, start(), size, **options)
        self.params = [start() for _ in range(size)]

    def step(self, weights: Sequence[float] | None = None) -> None:
        step = self.simulation.steps
        grads = [numbers(100 * step + rank) for rank in range(self.size)]
        updates = self.simulation.step(grads, weights)
        moved = [
            {name: p - RATE * update[name] for name, p in mine.items()}
            for mine, update in zip(self.params, updates, strict=True)
        ]
        self.params = self.simulation.after_step(moved)

    def close(self, want: Sequence[Arrays], roundings: int) -> None:
        """Values are below 16: each rounding of float32 is off by at most 2^-24 * 16."""
        for mine, theirs in zip(self.params, want, strict=True):
            for name in SHAPES:
                assert np.abs(mine[name].double().numpy() - theirs[name]).max(initial=0.0) <= roundings * 2.0**-20


def mean(values: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """What is excluded does not even enter as NaN times zero."""
    shares = [w / sum(weights) for w in weights]
    return {
        name: sum((s * v[name] for s, v in zip(shares, values, strict=True) if s > 0), np.zeros(shape))
        for name, shape in SHAPES.items()
    }


def descend(values: list[Arrays], step: int, combine: Callable[[list[Arrays]], list[Arrays]] = lambda g: g) -> None:
    grads = combine([wide(numbers(100 * step + rank)) for rank in range(len(values))])
    for value, grad in zip(values, grads, strict=True):
        for name in value:
            value[name] = value[name] - RATE * grad[name]


def weights_of(step: int, size: int) -> list[float] | None:
    return None if step % 2 else [float(1 + (rank + step) % 3) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd(size: int, every: int) -> None:
    training, values = Training(f"local_sgd:every={every}", size), [wide(start()) for _ in range(size)]
    for step in range(7):
        weights = weights_of(step, size)
        training.step(weights)
        descend(values, step)
        if (step + 1) % every == 0:
            values = [dict(mean(values, weights or [1.0] * size)) for _ in values]
            assert all(torch.equal(p[n], training.params[0][n]) for p in training.params for n in SHAPES)
        training.close(values, (step + 1) * (size + 4))


def test_bytes_are_those_of_one_mean_per_period() -> None:
    training, dense = Training("local_sgd:every=4", 3), Simulation("mean", start(), 3)
    dense.step([{}] * 3)
    sent = []
    for _ in range(8):
        training.step()
        sent.append(training.simulation.bytes_sent[1])
    assert np.diff([0, *sent]).tolist() == [0, 0, 0, dense.bytes_sent[1]] * 2


def test_a_rank_of_weight_zero_gets_the_others_average() -> None:
    for spec in ("local_sgd:every=2", "local_sgd(every=2, inner=ef(bf16))", "diloco(every=2, lr=1.0, momentum=0.0)"):
        training, alone = Training(spec, 3), Training(spec, 2)
        for weights in ([1.0, 3.0, 2.0], [1.0, 3.0, 0.0]):
            if not weights[-1]:
                training.params[2] = {name: torch.full_like(p, math.nan) for name, p in training.params[2].items()}
            training.step(weights)
            alone.step(weights[:2])
        for name in SHAPES:
            assert all(torch.equal(mine[name], alone.params[0][name]) for mine in training.params), (spec, name)
        training.step()
        assert all(p.isfinite().all() for mine in training.params for p in mine.values())


def test_a_non_finite_parameter_travels_with_the_average() -> None:
    for spec in ("local_sgd:every=1", "local_sgd(every=1, inner=bf16)", "diloco:every=1"):
        training = Training(spec, 2)
        training.params[1]["fc.bias"][2] = math.inf
        training.step()
        for mine in training.params:
            assert not mine["fc.bias"][2].isfinite()
            assert mine["fc.weight"].isfinite().all()


@pytest.mark.parametrize("inner", ["bf16", "fp16", "ef(bf16)"])
def test_a_lossy_inner_policy_rounds_differences_not_parameters(inner: str) -> None:
    """Differences between two averages are below 3 * RATE * 5 < 2 in magnitude: to bf16, 2^-8 of that, on the way
    there and back. Parameters of 1000, sent as they are, would be off by 2."""
    training, exact = Training(f"local_sgd(every=3, inner={inner})", 2), Training("local_sgd:every=3", 2)
    for each in (training, exact):
        each.params = [{name: p + 1000.0 for name, p in mine.items()} for mine in each.params]
    training.simulation = Simulation(f"local_sgd(every=3, inner={inner})", training.params[0], 2)
    for step in range(6):
        training.step()
        exact.step()
        if step == 2:
            for name in SHAPES:
                assert torch.equal(training.params[0][name], training.params[1][name])
                error = (training.params[0][name] - exact.params[0][name]).abs()
                assert bool((error <= 2 * 2 * 2.0**-8 + 2.0**-13).all())  # and one rounding of a number near 1000
    off = max(float((training.params[0][n] - exact.params[0][n]).abs().max()) for n in SHAPES if 0 not in SHAPES[n])
    assert 0 < off < 0.04


def test_the_wire_is_the_inner_policys() -> None:
    half, whole = Training("local_sgd(every=1, inner=bf16)", 2), Training("local_sgd:every=1", 2)
    for each in (half, whole):
        each.step()
    assert half.simulation.bytes_sent[0] == pytest.approx(whole.simulation.bytes_sent[0] / 2, rel=0.01)


# Post-local SGD


@pytest.mark.parametrize(("start_at", "every"), [(0, 2), (3, 2), (2, 5)])  # torch warns of every=1
def test_averages_come_when_those_of_torchs_averager_do(
    start_at: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[int] = []
    monkeypatch.setattr(
        averagers.utils, "average_parameters_or_parameter_groups", lambda params, group: due.append(averager.step)
    )
    averager = averagers.PeriodicModelAverager(every, start_at, process_group=object())  # type: ignore[arg-type]
    for _ in range(15):
        averager.average_parameters([])
    policy = from_spec(f"post_local_sgd:start={start_at},every={every}")
    assert [step for step in range(15) if policy.due(step)] == due


@pytest.mark.parametrize(("size", "local_size"), [(4, 2), (5, 2), (3, None)])
@pytest.mark.parametrize("group", ["none", "node", "world"])
def test_post_local_sgd(size: int, local_size: int | None, group: str) -> None:
    training = Training(f"post_local_sgd:start=2,every=3,group={group}", size, local_size=local_size)
    values = [wide(start()) for _ in range(size)]
    node_of = [rank // (local_size or size) for rank in range(size)]
    for step in range(7):
        weights = weights_of(step, size)
        given = weights or [1.0] * size

        def combine(grads: list[Arrays], step: int = step, given: list[float] = given) -> list[Arrays]:
            if step < 2 or group == "world":
                return [mean(grads, given)] * size
            if group == "none":
                return grads
            return [
                mean(grads, [w if node == node_of[rank] else 0.0 for w, node in zip(given, node_of, strict=True)])
                for rank in range(size)
            ]

        training.step(weights)
        descend(values, step, combine)
        if step in (2, 5):
            values = [dict(mean(values, given)) for _ in values]
        training.close(values, (step + 1) * (size + 4))


def test_gradients_of_a_node_without_weight_are_zeros() -> None:
    training = Training("post_local_sgd:start=0,every=100", 4, local_size=2)
    before = training.params[0]
    grads = [numbers(rank) for rank in range(4)]
    grads[3]["fc.bias"][0] = math.nan
    updates = training.simulation.step(grads, [1, 3, 0, 0])
    assert not any(u.any() for mine in updates[2:] for u in mine.values())
    assert torch.allclose(updates[0]["fc.bias"], (grads[0]["fc.bias"] + 3 * grads[1]["fc.bias"]) / 4)
    assert before.keys() == updates[0].keys()


def test_until_the_start_gradients_have_the_bits_of_mean() -> None:
    local, dense = Simulation("post_local_sgd:start=2", start(), 3), Simulation("mean", start(), 3)
    for step in range(2):
        grads = [numbers(10 * step + rank) for rank in range(3)]
        a, b = local.step(grads, [1, 2, 3]), dense.step(grads, [1, 2, 3])
        assert all(torch.equal(a[0][n], b[0][n]) for n in SHAPES)
    assert local.bytes_sent == dense.bytes_sent


# DiLoCo


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_diloco(size: int) -> None:
    """lr and momentum multiply errors by at most (1 + 0.9) 0.7 and what they add up to, 10 times."""
    training, values = Training("diloco:every=2,lr=0.7,momentum=0.9", size), [wide(start()) for _ in range(size)]
    anchor, momentum = wide(start()), {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(8):
        weights = weights_of(step, size)
        training.step(weights)
        descend(values, step)
        if step % 2:
            average = mean(values, weights or [1.0] * size)
            for name in SHAPES:
                change = anchor[name] - average[name]
                momentum[name] = 0.9 * momentum[name] + change
                anchor[name] = anchor[name] - 0.7 * (change + 0.9 * momentum[name])
            values = [dict(anchor) for _ in values]
        training.close(values, 20 * (step + 1) * (size + 4))


def test_the_outer_optimizer_has_the_bits_of_torchs() -> None:
    training = Training("diloco:every=1,lr=0.7,momentum=0.9", 2)
    outer = [torch.nn.Parameter(p.clone()) for p in start().values()]
    sgd = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    params = [start(), start()]
    for step in range(5):
        training.step()
        for rank in range(2):
            grads = numbers(100 * step + rank)
            params[rank] = {name: p - RATE * grads[name] for name, p in params[rank].items()}
        for name, p in zip(SHAPES, outer, strict=True):
            p.grad = sum(0.5 * (p.detach() - mine[name]) for mine in params)  # type: ignore[assignment]
        sgd.step()
        params = [{name: p.detach().clone() for name, p in zip(SHAPES, outer, strict=True)} for _ in range(2)]
        for name in SHAPES:
            assert all(torch.equal(mine[name], params[0][name]) for mine in training.params)


def test_half_parameters_have_a_float32_anchor() -> None:
    params = {name: p.to(torch.bfloat16) for name, p in start().items()}
    simulation = Simulation("diloco(every=1, lr=0.01)", params, 2)
    grads = [{name: torch.ones_like(p) for name, p in params.items()}] * 2
    mine = [params, params]
    for _ in range(20):
        simulation.step(grads)
        # Steps of 2^-12 are lost in bfloat16 numbers near 1; the anchor adds up what is left of larger ones.
        mine = simulation.after_step([{name: p - 0.125 for name, p in each.items()} for each in mine])
    state = simulation.stores[0].portable()
    assert {t.dtype for t in (*state["anchor"].values(), *state["momentum"].values())} == {torch.float32}
    assert {t.dtype for t in mine[0].values()} == {torch.bfloat16}
    for name, p in mine[0].items():
        assert torch.equal(p, state["anchor"][name].to(torch.bfloat16))


def test_the_anchor_is_a_copy_of_the_parameters_at_the_start() -> None:
    params = start()
    simulation = Simulation("diloco", params, 2)
    for p in params.values():
        p.add_(1.0)
    assert all(torch.equal(simulation.stores[0].portable()["anchor"][n], p) for n, p in start().items())
    assert simulation.stores[0].nbytes == 2 * 4 * sum(p.numel() for p in params.values())


# Switching


SWITCHES = [
    "post_local_sgd(start=3, every=2, inner=topk(ratio=0.01))",
    "post_local_sgd(start=3, every=2, inner=int8)",
    "warmup(steps=3, then=local_sgd(every=2, inner=topk(ratio=0.01)))",
    "warmup(steps=3, then=diloco(every=2))",
    "warmup(steps=3, then=adasum_delta)",
    "warmup(steps=3, then=partition(*.weight=diloco(every=2), scale=mean, rest=local_sgd(every=2, inner=bf16)))",
    "warmup(steps=2, then=warmup(steps=3, then=clip(diloco(every=2))))",
    "hierarchical(warmup(steps=3, then=diloco(every=2)))",
    "warmup(steps=3, first=local_sgd(every=2, inner=bf16), then=diloco(every=2))",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SWITCHES)
def test_a_switch_throws_nothing_away(spec: str, dtype: torch.dtype) -> None:
    """Replicas that are equal at the switch and stand still after it stay where they are, however little of a
    difference the inner policy sends. Equal ones at two ranks are averaged exactly."""
    simulation = Simulation(spec, {name: p.to(dtype) for name, p in start().items()}, 2, local_size=1)
    params = [{name: p.to(dtype) for name, p in start().items()} for _ in range(2)]
    for step in range(8):
        grads = {name: (g if step < 3 else torch.zeros_like(g)).to(dtype) for name, g in numbers(step).items()}
        updates = simulation.step([grads, grads])
        params = [{n: p - u[n] for n, p in mine.items()} for mine, u in zip(params, updates, strict=True)]
        if step == 2:
            learned = params[0]
        params = simulation.after_step(params)
        assert all(torch.equal(params[0][n], params[1][n]) for n in SHAPES)
    assert not torch.equal(learned["fc.weight"], start()["fc.weight"].to(dtype))
    assert all(torch.equal(params[0][name], learned[name]) for name in SHAPES)


@pytest.mark.parametrize(
    "spec",
    [
        "post_local_sgd(start=3, every=2, inner=topk(ratio=0.01), group=none)",
        "warmup(steps=3, first=local_sgd(every=8), then=diloco(every=2))",
        "clip(warmup(steps=3, first=noop, then=mean), norm=1e9)",
    ],
)
def test_a_switch_happens_though_its_step_is_skipped(spec: str) -> None:
    simulation = Simulation(spec, start(), 2)
    drifts = "first" in spec
    params = [start(), start()]
    for step in range(6):
        grads = [
            {n: g if step < 2 else torch.zeros_like(g) for n, g in numbers(step + k * drifts).items()} for k in (0, 4)
        ]
        updates = simulation.step(grads, [0.0, 0.0] if step == 2 else [1.0, 3.0])
        params = [{n: p - u[n] for n, p in mine.items()} for mine, u in zip(params, updates, strict=True)]
        if step == 2:
            want = {n: (params[0][n] * 0.5 + params[1][n] * 0.5) for n in SHAPES}
            assert drifts != torch.equal(params[0]["fc.bias"], params[1]["fc.bias"])
        params = simulation.after_step(params)
    # Two equal numbers, weighted by 1/4 and 3/4, are averaged to themselves or, for diloco, may round once.
    for mine in params:
        assert all(torch.allclose(mine[n], want[n], rtol=2.0**-23, atol=0.0) for n in SHAPES)


def test_an_exact_average_needs_no_anchor() -> None:
    for spec in ("post_local_sgd(start=3, every=2)", "warmup(steps=3, then=local_sgd(every=4))"):
        assert not anchored(from_spec(spec))
        assert not from_spec(spec).due(2)
        assert Simulation(spec, start(), 2).stores[0].nbytes == 0
    assert from_spec("post_local_sgd(start=3, every=2, inner=bf16)").due(2)


@pytest.mark.parametrize("first", ["local_sgd:every=4", "noop", "partition(fc.*=noop, rest=mean)"])
@pytest.mark.parametrize("weights", [None, [3.0, 0.0, 1.0]])
def test_after_a_drifting_warmup_replicas_are_the_same(first: str, weights: list[float] | None) -> None:
    """At the switch they become their mean, of three numbers below 16; from there on updates are equal."""
    training = Training(f"warmup(steps=3, first={first}, then=mean)", 3)
    assert [step for step in range(9) if training.simulation.policy.due(step)] == [2]
    control = Training(first, 3)
    for step in range(6):
        training.step(weights)
        if step < 3:
            control.step(weights)
        alike = [all(torch.equal(p[n], training.params[0][n]) for p in training.params) for n in SHAPES if n != "empty"]
        assert all(alike) == (step >= 2)
        if step == 2:
            want = mean([wide(p) for p in control.params], weights or [1.0] * 3)
            training.close([want] * 3, 4)


# All


@pytest.mark.parametrize("spec", ["local_sgd(every=2, inner=ef(bf16))", "diloco(every=2, inner=ef(fp16))"])
def test_resumed_between_averages(spec: str) -> None:
    """With every rank's parameters and state a run goes on bit by bit, between averages as well."""
    whole = Training(spec, 3)
    for _ in range(3):
        whole.step()
    file = io.BytesIO()
    torch.save(([store.portable() for store in whole.simulation.stores], whole.params), file)
    file.seek(0)
    part = Training(spec, 3)
    states, part.params = torch.load(file, weights_only=True)
    part.simulation.steps = whole.simulation.steps
    for rank, store in enumerate(part.simulation.stores):
        store.load(states, rank, 3)
    for _ in range(3):
        whole.step()
        part.step()
    assert all(torch.equal(a[n], b[n]) for a, b in zip(whole.params, part.params, strict=True) for n in SHAPES)


def test_residuals_of_parameters_do_not_follow_the_loss_scale() -> None:
    training = Training("local_sgd(every=1, inner=ef(bf16))", 2)
    training.step()
    store = training.simulation.stores[0]
    before = store.portable()["inner"]["residual"]
    assert before["fc.weight"].any()
    store.rescale(4.0)
    assert all(torch.equal(before[n], t) for n, t in store.portable()["inner"]["residual"].items())


def test_bad_options() -> None:
    for spec, message in (
        ("local_sgd:every=0", "every=0 must be >= 1"),
        ("post_local_sgd:start=-1", "start=-1 must be >= 0"),
        ("post_local_sgd:group=rack", "must be one of 'none', 'node', 'world'"),
        ("diloco:lr=0", "lr=0.0 must be > 0"),
        ("diloco:momentum=1", r"momentum=1.0 must be >= 0 and < 1"),
        ("local_sgd(inner=noop)", "inner=Noop averages nothing"),
        ("diloco(inner=local_sgd)", "inner=LocalSgd averages nothing"),
        ("ef(local_sgd)", "cannot wrap LocalSgd"),
        ("local_sgd(inner=delayed)", "LocalSgd: inner=Delayed is a step late"),
        ("diloco(inner=clip(delayed))", "DiLoCo: inner=Clip is a step late"),
        ("fp16(local_sgd)", r"Fp16 cannot wrap LocalSgd, .*local_sgd\(inner=fp16\)"),
        ("bf16(partition(a=mean, rest=diloco))", "Bf16 cannot wrap Partition"),
        ("fp16(warmup(first=noop, then=mean))", "Fp16 cannot wrap Warmup"),
        ("fp16(adasum_delta)", "Fp16 cannot wrap AdasumDelta"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            from_spec(spec)


def test_a_node_must_be_known() -> None:
    from hvdbridge.policy.bucket import Bucket, Layout, Ranks

    bucket = Bucket(torch.ones(2), Layout({"w": (2,)}), ranks=Ranks(0, 2))
    flow = from_spec("post_local_sgd:start=0").aggregate(bucket, {})
    with pytest.raises(Unsupported, match="group 'node' is not known"):
        next(flow)
