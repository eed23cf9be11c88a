"""Ok-Topk: against its definition where nothing is approximated, and by its bounds where something is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, SpecError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.policies import ErrorFeedback, OkTopK, from_spec

SMALL = {"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "fc.weight": (30, 20), "fc.bias": (20,), "scale": ()}
LARGE = {"w": (300, 400), "v": (90, 50), "b": (100,)}
Grads = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def gradients(
    size: int, seed: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float64
) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
        for _ in range(size)
    ]


def top(p: np.ndarray, count: int) -> np.ndarray:
    flat, kept = p.reshape(-1), np.zeros(p.size)
    chosen = np.argsort(-np.abs(flat), kind="stable")[:count]
    kept[chosen] = flat[chosen]
    return kept.reshape(p.shape)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ef", [True, False])
def test_against_the_definition_where_one_rank_owns_a_parameter(ef: bool, size: int) -> None:
    """update = top_k(sum_r top_k(p_r)); sent_r = top_k(p_r) where the update is not zero. k < 16 N here but at one
    rank, where all belongs to it in any case. Float64: 4 steps, N + 3 roundings of numbers below 32."""
    weights = [float(r + 1) for r in range(size)]
    simulation = Simulation(f"oktopk:ratio=0.02,ef={str(ef).lower()}", SMALL, size)
    residual = [{n: np.zeros(s) for n, s in SMALL.items()} for _ in range(size)]
    for step in range(4):
        grads = gradients(size, step, SMALL)
        updates = simulation.step(grads, weights)
        for name, shape in SMALL.items():
            k = math.ceil(0.02 * math.prod(shape))
            p = [
                g[name].numpy() * (w / sum(weights)) + e[name] for g, w, e in zip(grads, weights, residual, strict=True)
            ]
            chosen = [top(mine, k) for mine in p]
            total = top(sum(chosen), k)  # type: ignore[arg-type]
            assert np.abs(updates[0][name].numpy() - total).max() <= 4 * (size + 3) * 32 * 2.0**-53
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)
            for rank in range(size):
                if ef:
                    residual[rank][name] = p[rank] - np.where(total != 0, chosen[rank], 0)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_divided_parameters(size: int) -> None:
    """Values are sums of what ranks chose, about k of them, and hardly less than the best k of these sums."""
    grads = gradients(size, 7, LARGE)
    update = simulate("oktopk:ratio=0.05,ef=false", grads)[0]
    for name, shape in LARGE.items():
        n = math.prod(shape)
        k = math.ceil(0.05 * n)
        sums = sum(top(g[name].numpy() / size, k) for g in grads)
        found = update[name].numpy()
        best = top(sums, k)  # type: ignore[arg-type]
        count = (found != 0).sum()
        assert 0.9 * k <= count <= k + size
        # Only overflow (2 deviations: 2.3 % of the owners, then by few) makes a value other than the sum.
        assert (np.abs(found - sums)[found != 0] > 1e-12).sum() <= 0.02 * k
        assert (found**2).sum() >= 0.97 * (best**2).sum()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_feedback_telescopes(size: int) -> None:
    """Updates plus final residuals sum to the inputs: float32, values below 32, T (N + 3) roundings."""
    steps, weights = 4, [float(r + 1) for r in range(size)]
    simulation = Simulation("oktopk:ratio=0.02", LARGE, size)
    left = {n: torch.zeros(s, dtype=torch.float64) for n, s in LARGE.items()}
    for step in range(steps):
        grads = gradients(size, step, LARGE, torch.float32)
        updates = simulation.step(grads, weights)
        for name in LARGE:
            left[name] += sum(w / sum(weights) * g[name].double() for w, g in zip(weights, grads, strict=True))
            left[name] -= updates[0][name].double()
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)
    for name in LARGE:
        residual = sum(store.portable()["residual"][name].double() for store in simulation.stores)
        assert (left[name] - residual).abs().max() <= steps * (size + 3) * 32 * 2.0**-24
    assert updates[0]["w"].any()


def test_the_volume_does_not_grow_with_the_number_of_ranks() -> None:
    """Below 8 bytes (2 k + 2 sqrt(k N) + 2 N) (N-1)/N, where topk sends 8 k (N-1)."""
    shapes, k = {"w": (400, 500)}, 2000
    for size in (2, 4, 8, 16):
        simulation = Simulation("oktopk:ratio=0.01", shapes, size)
        simulation.step(gradients(size, 0, shapes, torch.float32))
        sent = simulation.bytes_sent[0]
        assert sent <= 8 * (2 * k + 2 * math.sqrt(k * size) + 2 * size) * (size - 1) / size
        assert sent >= 8 * 2 * k * (size - 1) / size


@pytest.mark.parametrize("hot", ["columns", "rows", "one corner"])
def test_shares_are_balanced_wherever_the_large_elements_lie(hot: str) -> None:
    """Elements that all ranks want, in a pattern: nearly all of them come through in one step."""
    g = torch.full((400, 512), 1e-3, dtype=torch.float64)
    k = math.ceil(0.01 * g.numel())
    if hot == "columns":
        g[:, ::128] = 1.0
    elif hot == "rows":
        g[::100] = 1.0
    else:
        g[:40, :50] = 1.0
    wanted = int((g == 1).sum())
    assert wanted <= k
    update = simulate("oktopk:ratio=0.01,ef=false", [{"w": g * (1 + 1e-3 * r)} for r in range(8)])[0]["w"]
    assert int((update > 0.5).sum()) >= 0.93 * wanted


@pytest.mark.parametrize("shapes", [SMALL, LARGE])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_travels_and_does_no_harm(bad: float, shapes: dict[str, tuple[int, ...]]) -> None:
    name = next(iter(shapes))
    simulation = Simulation("oktopk:ratio=0.02", shapes, 4)
    simulation.step(gradients(4, 0, shapes))
    before = [store.portable()["residual"] for store in simulation.stores]
    grads = gradients(4, 1, shapes)
    grads[2][name].view(-1)[5] = bad
    updates = simulation.step(grads)
    assert all(not mine[name].isfinite().all() for mine in updates)
    assert all(t.isfinite().all() for n, t in updates[0].items() if n != name)
    for old, store in zip(before, simulation.stores, strict=True):
        assert torch.equal(old[name], store.portable()["residual"][name])
    assert all(t.isfinite().all() for t in simulation.step(gradients(4, 2, shapes))[0].values())


def test_boundaries_and_order_do_not_matter() -> None:
    shapes = {**SMALL, **LARGE}
    names = list(shapes)
    runs = [
        Simulation("oktopk:ratio=0.02", shapes, 3, buckets=b) for b in (None, [names[:4], names[4:]], [names[::-1]])
    ]
    for step in range(2):
        one, *others = [run.step(gradients(3, step, shapes), [1, 3, 2])[0] for run in runs]
        assert all(torch.equal(one[n], other[n]) for other in others for n in shapes)


def test_a_rank_of_weight_zero_contributes_nothing_and_keeps_its_residual() -> None:
    simulation = Simulation("oktopk:ratio=0.02", LARGE, 3)
    simulation.step(gradients(3, 0, LARGE))
    before = simulation.stores[1].portable()["residual"]
    grads = gradients(3, 1, LARGE)
    grads[1] = {n: torch.full_like(t, math.nan) for n, t in grads[1].items()}
    updates = simulation.step(grads, [1, 0, 3])
    assert all(t.isfinite().all() for t in updates[1].values())
    assert all(torch.equal(before[n], t) for n, t in simulation.stores[1].portable()["residual"].items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_and_odd_shapes(dtype: torch.dtype) -> None:
    shapes = {"empty": (0, 3), "scalar": (), "one": (1,), "w": (6, 7), "zero": (5,)}
    grads = gradients(3, 0, shapes, dtype)
    for g in grads:
        g["zero"].zero_()
    for spec in ("oktopk:ratio=0.3", "oktopk:ratio=0.3,ef=false"):
        updates = simulate(spec, grads)
        assert updates[0]["w"].dtype == dtype
        assert updates[0]["w"].any()
        assert not updates[0]["zero"].any()
        assert all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in shapes)
    assert simulate("oktopk", [{"e": torch.zeros(0)}] * 2)[0]["e"].numel() == 0


def test_options() -> None:
    assert from_spec("oktopk:ratio=0.02") == OkTopK(0.02)
    with pytest.raises(SpecError, match="must be > 0 and <= 1"):
        from_spec("oktopk:ratio=0")
    with pytest.raises(ConfigurationError, match="ef=false"):
        ErrorFeedback(OkTopK())
