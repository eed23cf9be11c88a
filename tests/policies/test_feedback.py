"""Feedback is one rule: the option of a leaf and the wrapper around it are the same policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from hvdbridge import policies
from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation
from hvdbridge.execution.state_store import leaves, slot_of
from hvdbridge.policies import ErrorFeedback, Partition, from_spec, to_spec
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policy.base import Aggregated, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views
from hvdbridge.policy.collectives import AllReduce

SHAPES = {"conv.weight": (4, 3, 3, 3), "conv.bias": (4,), "scale": ()}
Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Coarse(WithFeedback):
    """Sends multiples of ``step`` and counts its steps: a leaf with state of its own."""

    step: float = 0.5
    ef: bool = True
    slots: ClassVar[Mapping[str, Slot]] = {"count": Slot(), "seen": Slot(local=True)}

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        return {
            "count": {n: torch.zeros(()) for n in params},
            "seen": {n: torch.zeros_like(p) for n, p in params.items()},
        }

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        coarse = flat.div(self.step).round_().mul_(self.step)
        sent = coarse.clone() if bucket.needs_sent else None
        new = {
            "count": {name: state["count"][name] + 1 for name in bucket.layout.names},
            "seen": Views(bucket.layout, flat.clone()),
        }
        return Aggregated((yield AllReduce(coarse)), sent, new)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies._registered, "coarse", Coarse)


def gradients(size: int, seed: int) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_option_is_the_wrapper(size: int) -> None:
    mine, wrapped = Simulation(Coarse(), SHAPES, size), Simulation(ErrorFeedback(Coarse(ef=False)), SHAPES, size)
    weights = [float(r) for r in range(1, size)] + [0.0 if size > 1 else 1.0]
    for step in range(3):
        a, b = (s.step(gradients(size, step), weights) for s in (mine, wrapped))
        assert all(torch.equal(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in SHAPES)
    for x, y in zip(mine.stores, wrapped.stores, strict=True):
        first, second = dict(leaves(x.portable())), dict(leaves(y.portable()))
        assert set(first) == set(second) == {("residual",), ("inner", "count"), ("inner", "seen")}
        assert all(torch.equal(first[path][n], second[path][n]) for path in first for n in SHAPES)
    assert mine.stores[0].portable()["residual"]["conv.weight"].any()


def test_without_it_the_state_is_the_leafs_own() -> None:
    simulation = Simulation(Coarse(ef=False), SHAPES, 2)
    simulation.step(gradients(2, 0))
    assert set(simulation.stores[0].portable()) == {"count", "seen"}
    assert Coarse(ef=False).additive
    assert not Coarse().additive


@pytest.mark.parametrize("policy", [Coarse(), ErrorFeedback(Coarse(ef=False))])
def test_slots_are_found(policy: Policy) -> None:
    assert slot_of(policy, ("residual",)) == Slot(local=True, gradient_units=True, reused=True)
    assert slot_of(policy, ("inner", "seen")) == Slot(local=True)
    assert slot_of(policy, ("inner", "count")) == Slot()
    inside = Partition({"*.bias": policy})  # type: ignore[arg-type]
    assert slot_of(inside, ("*.bias", "residual")).local
    assert slot_of(inside, ("*.bias", "inner", "seen")).local
    assert slot_of(Coarse(ef=False), ("seen",)).local


def test_residuals_follow_the_loss_scale_and_are_shared_out() -> None:
    simulation = Simulation(Coarse(), SHAPES, 2)
    simulation.step(gradients(2, 0))
    stores = [store.portable() for store in simulation.stores]
    simulation.stores[0].rescale(4.0)
    after = simulation.stores[0].portable()
    assert torch.equal(after["residual"]["conv.bias"], stores[0]["residual"]["conv.bias"] * 4)
    assert torch.equal(after["inner"]["count"]["conv.bias"], torch.tensor(1.0))
    alone = Simulation(Coarse(), SHAPES, 1)
    alone.step(gradients(1, 0))
    alone.stores[0].load(stores, 0, 1)
    total = sum(s["residual"]["conv.weight"].double() for s in stores)
    assert torch.equal(alone.stores[0].portable()["residual"]["conv.weight"].double(), total.float().double())


def test_feedback_twice_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot wrap Coarse with its own feedback \(ef=false"):
        ErrorFeedback(Coarse())
    with pytest.raises(ConfigurationError, match="ef=false"):
        from_spec("ef(coarse)")


def test_specs() -> None:
    assert from_spec("coarse") == Coarse()
    assert to_spec(Coarse()) == "coarse"
    assert to_spec(Coarse(0.25, ef=False)) == "coarse:step=0.25,ef=false"
    assert from_spec("coarse:step=0.25,ef=false") == Coarse(0.25, ef=False)
    assert to_spec(from_spec("ef(coarse(ef=false))")) == "ef(coarse(ef=false))"


def test_a_gradient_that_is_not_finite_leaves_the_residual_unharmed() -> None:
    simulation = Simulation(Coarse(), SHAPES, 2)
    simulation.step(gradients(2, 0))
    before = [store.portable()["residual"] for store in simulation.stores]
    grads = gradients(2, 1)
    grads[1]["conv.bias"][2] = math.inf
    updates = simulation.step(grads)
    after = [store.portable()["residual"] for store in simulation.stores]
    assert all(not update["conv.bias"].isfinite().all() for update in updates)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old["conv.bias"], new["conv.bias"])
        assert not torch.equal(old["conv.weight"], new["conv.weight"])
