"""Deep Gradient Compression against its formulas, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, SpecError
from hvdbridge.execution.simulation import Simulation
from hvdbridge.execution.state_store import slot_of
from hvdbridge.policies import ErrorFeedback, from_spec
from hvdbridge.policies.dgc import Dgc

SHAPES = {"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "fc.weight": (60, 40), "scale": ()}
Grads = dict[str, Tensor]


def gradients(size: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}
        for _ in range(size)
    ]


class Reference:
    """The paper's algorithm, with this package's weights and one ratio per step."""

    def __init__(self, size: int, momentum: float, nesterov: bool = False, clip: float | None = None) -> None:
        self.size, self.momentum, self.nesterov, self.clip = size, momentum, nesterov, clip
        self.u = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(size)]
        self.v = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(size)]

    def step(self, grads: list[Grads], weights: list[float], ratio: float) -> dict[str, np.ndarray]:
        total = {n: np.zeros(s) for n, s in SHAPES.items()}
        for rank in range(self.size):
            if weights[rank] == 0:
                continue
            mine = {n: g.numpy() for n, g in grads[rank].items()}
            if self.clip is not None:
                norm = math.sqrt(sum((g**2).sum() for g in mine.values()))
                limit = self.clip / math.sqrt(sum(w > 0 for w in weights))
                mine = {n: g * min(1.0, limit / norm) for n, g in mine.items()}
            for name, g in mine.items():
                g = g * weights[rank] / sum(weights)
                u, v = self.u[rank][name], self.v[rank][name]
                if self.nesterov:
                    u = self.momentum * (u + g)
                    v = v + u + g
                else:
                    u = self.momentum * u + g
                    v = v + u
                flat = np.abs(v).reshape(-1)
                chosen = np.zeros(flat.size, bool)
                chosen[np.argsort(-flat)[: math.ceil(ratio * flat.size)]] = True
                chosen = chosen.reshape(v.shape)
                total[name] += np.where(chosen, v, 0)
                self.u[rank][name] = np.where(chosen, 0, u)
                self.v[rank][name] = np.where(chosen, 0, v)
        return total


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ("", {}),
        (",nesterov=true", {"nesterov": True}),
        (",clip=5", {"clip": 5.0}),
        (",clip=1000", {"clip": 1000.0}),
    ],
)
def test_against_the_formula(size: int, options: str, reference: dict[str, float]) -> None:
    """5 steps; u and v stay below 64, each step rounds them and the sum N + 8 times by 2^-53 of that; the norm of
    2737 elements adds 2737 2^-53 of it to the factor of a clipped gradient (below 8): all below 1e-10."""
    weights = [float(r % 3 + 1) for r in range(size)]
    simulation = Simulation(f"dgc:ratio=0.02,momentum=0.8{options}", SHAPES, size)
    expected = Reference(size, 0.8, **reference)  # type: ignore[arg-type]
    for step in range(5):
        grads = gradients(size, step)
        updates = simulation.step(grads, weights)
        wanted = expected.step(grads, weights, 0.02)
        for name in SHAPES:
            assert np.abs(updates[0][name].numpy() - wanted[name]).max() < 1e-10
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)
    for rank, store in enumerate(simulation.stores):
        state = store.portable()
        for name in SHAPES:
            assert np.abs(state["momentum"][name].numpy() - expected.u[rank][name]).max() < 1e-10
            assert np.abs(state["accumulated"][name].numpy() - expected.v[rank][name]).max() < 1e-10


def test_clipping_matters_only_where_the_norm_is_above_the_limit() -> None:
    grads = gradients(2, 0)
    free, loose, tight = (Simulation(f"dgc:ratio=0.02{o}", SHAPES, 2) for o in ("", ",clip=1e6", ",clip=1.0"))
    a, b, c = (s.step(grads)[0] for s in (free, loose, tight))
    assert all(torch.equal(a[n], b[n]) for n in SHAPES)
    assert c["fc.weight"].norm() < 0.1 * a["fc.weight"].norm()


def test_the_ratio_falls_in_stages() -> None:
    policy = Dgc(0.001, warmup=400)
    assert [policy.ratio_at(s) for s in (0, 99, 100, 200, 300, 399, 400)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001,
    ]  # fmt: skip
    assert [Dgc(0.5, warmup=2).ratio_at(s) for s in (0, 1, 2)] == [0.5] * 3
    simulation = Simulation("dgc:ratio=0.01,warmup=3", {"w": (100_000,)}, 1)
    generator = torch.Generator().manual_seed(0)
    sent = [
        int((simulation.step([{"w": torch.randn(100_000, generator=generator)}])[0]["w"] != 0).sum()) for _ in range(4)
    ]
    assert sent == [25000, 6250, 1563, 1000]


def test_a_rank_of_weight_zero_sends_nothing_and_keeps_its_state() -> None:
    simulation, expected = Simulation("dgc:ratio=0.02,momentum=0.8", SHAPES, 3), Reference(3, 0.8)
    for step, weights in enumerate([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0], [1.0, 3.0, 1.0]]):
        grads = gradients(3, step)
        if weights[1] == 0:
            grads[1] = {n: torch.full_like(t, math.nan) for n, t in grads[1].items()}
        updates = simulation.step(grads, weights)
        wanted = expected.step(grads, weights, 0.02)
        assert all(np.abs(updates[2][n].numpy() - wanted[n]).max() < 1e-10 for n in SHAPES)


@pytest.mark.parametrize("clip", ["", ",clip=1"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_travels_and_does_no_harm(bad: float, clip: str) -> None:
    simulation = Simulation(f"dgc:ratio=0.02{clip}", SHAPES, 2)
    simulation.step(gradients(2, 0))
    before = [store.portable() for store in simulation.stores]
    grads = gradients(2, 1)
    grads[1]["fc.weight"][3, 3] = bad
    updates = simulation.step(grads)
    assert all(not mine["fc.weight"].isfinite().all() for mine in updates)
    for old, store in zip(before, simulation.stores, strict=True):
        for slot in ("momentum", "accumulated"):
            assert torch.equal(old[slot]["fc.weight"], store.portable()[slot]["fc.weight"])
    assert all(t.isfinite().all() for t in simulation.step(gradients(2, 2))[0].values())


def test_boundaries_do_not_matter_even_for_the_norm() -> None:
    names = list(SHAPES)
    for spec in ("dgc:ratio=0.02", "dgc:ratio=0.02,clip=3"):
        one, other = Simulation(spec, SHAPES, 2), Simulation(spec, SHAPES, 2, buckets=[names[:1], names[1:]])
        for step in range(3):
            a, b = (s.step(gradients(2, step), [1, 3])[0] for s in (one, other))
            assert all(torch.equal(a[n], b[n]) for n in SHAPES)


def test_empty_slots_clear_nothing() -> None:
    """Element 0 is small and not sent; the slots of a sparse gradient that stay empty point at it."""
    g = torch.zeros(1000)
    g[0], g[500] = 0.5, 2.0
    simulation = Simulation("dgc:ratio=0.5,momentum=0.9", {"w": (1000,)}, 1)
    assert torch.equal(simulation.step([{"w": g}])[0]["w"], g)
    simulation = Simulation("dgc:ratio=0.001,momentum=0.9", {"v": (1000,), "w": (1000,)}, 1)
    simulation.step([{"v": g, "w": torch.zeros(1000)}])
    state = simulation.stores[0].portable()
    assert state["momentum"]["v"][0] == 0.5
    assert state["accumulated"]["v"][0] == 0.5
    assert state["momentum"]["v"][500] == 0


def test_options() -> None:
    for text in ("dgc:ratio=0", "dgc:momentum=1", "dgc:clip=0", "dgc:warmup=-1"):
        with pytest.raises(SpecError, match="must be"):
            from_spec(text)
    with pytest.raises(ConfigurationError, match="cannot wrap Dgc"):
        ErrorFeedback(Dgc())
    assert (Dgc().scope, Dgc(clip=1.0).scope) == ("bucket", "step")
    assert slot_of(Dgc(), ("momentum",)).gradient_units
    assert slot_of(Dgc(), ("accumulated",)).local
