"""median, trimmed_mean, krum, multi_krum, geometric_median, clipped_mean against numpy in float64.

Tolerances: eps = 2^-24 is half a unit in the last place of float32. A combination of N rows in float32 rounds each
coefficient, product and sum once: error <= (N + 3) eps times the sum of the terms' magnitudes, at most (N + 3) eps
times the largest gradient where coefficients are positive and sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, WeightError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels.order import comparators
from hvdbridge.policies import from_spec

SHAPES: dict[str, tuple[int, ...]] = {
    "w": (50, 70), "empty": (0,), "scalar": (), "b": (7,), "long": (2049,), "block": (1024,),
}  # fmt: skip
EPS32 = 2.0**-24
Grads = dict[str, Tensor]
Array = np.ndarray


def gradients(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Grads]:
    """A common part and each rank's own, as in training."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Grads:
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

    shared = normal()
    return [{n: (shared[n] + t).to(dtype) for n, t in normal().items()} for _ in range(size)]


def flat(grads: Sequence[Grads]) -> Array:
    """``[ranks, elements]`` in float64."""
    return np.array([np.concatenate([g[n].double().reshape(-1).numpy() for n in SHAPES]) for g in grads])


def agreed(updates: list[Grads]) -> Array:
    """The update that all ranks have."""
    assert all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in SHAPES)
    return flat(updates[:1])[0]


def weighted_median(rows: Array, weights: Sequence[float]) -> Array:
    order = np.argsort(rows, axis=0)
    values, sums = np.take_along_axis(rows, order, 0), np.cumsum(np.array(weights)[order], axis=0)
    half, each = sum(weights) / 2, np.arange(rows.shape[1])
    low = values[np.argmax(sums >= half, axis=0), each]
    high = values[np.argmax(sums > half, axis=0), each]
    return (low + high) / 2


def trimmed(rows: Array, f: int, weights: Sequence[float]) -> Array:
    order = np.argsort(rows, axis=0)[f : len(weights) - f]
    shares = np.array(weights)[order]
    return (np.take_along_axis(rows, order, 0) * shares).sum(0) / shares.sum(0)


def krum_scores(rows: Array, f: int) -> Array:
    count = len(rows)
    scores = []
    for i in range(count):
        distances = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(count) if j != i)
        scores.append(sum(distances[: count - f - 2]))
    return np.array(scores)


def weiszfeld(rows: Array, weights: Sequence[float], iterations: int, smoothing: float = 1e-6) -> Array:
    share = np.array(weights) / sum(weights)
    first = []
    for row in rows:
        apart = np.sqrt(((rows - row) ** 2).sum(1))
        order = np.argsort(apart, kind="stable")
        inside = np.cumsum(share[order])
        first.append(apart[order][np.argmax(inside > 0.5)])
    floor = smoothing * min(first)
    pull = share / np.maximum(np.maximum(first, floor), 1e-300)
    point = (pull[:, None] * rows).sum(0) / pull.sum()
    for _ in range(iterations - 1):
        pull = share / np.maximum(np.sqrt(((rows - point) ** 2).sum(1)), max(floor, 1e-300))
        point = (pull[:, None] * rows).sum(0) / pull.sum()
    return point


def clip_around(centre: Array, rows: Array, weights: Sequence[float], radius: float, iterations: int) -> Array:
    for _ in range(iterations):
        apart = rows - centre
        scale = np.minimum(1, radius / np.maximum(np.sqrt((apart**2).sum(1)), 1e-300))
        centre = centre + (np.array(weights) / sum(weights) * scale) @ apart
    return centre


def plans(size: int) -> list[list[float] | None]:
    return [None, [float(1 + r % 3) for r in range(size)], [0.5] * size]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_median(size: int) -> None:
    for seed, weights in enumerate(plans(size)):
        grads = gradients(size, seed)
        rows, w = flat(grads), weights or [1.0] * size
        got = agreed(simulate("median", grads, weights))
        assert (np.abs(got - weighted_median(rows, w)) <= 2 * EPS32 * np.abs(rows).max(0)).all()
        if len(set(w)) == 1:
            assert (np.abs(got - np.median(rows, axis=0)) <= 2 * EPS32 * np.abs(rows).max(0)).all()


@pytest.mark.parametrize(("size", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (5, 2), (8, 3), (8, 0)])
def test_trimmed_mean(size: int, f: int) -> None:
    for seed, weights in enumerate(plans(size)):
        grads = gradients(size, seed)
        rows = flat(grads)
        got = agreed(simulate(f"trimmed_mean:f={f}", grads, weights))
        expected = trimmed(rows, f, weights or [1.0] * size)
        assert (np.abs(got - expected) <= (size + 3) * EPS32 * np.abs(rows).max(0)).all()


@pytest.mark.parametrize(("size", "f"), [(3, 0), (5, 1), (6, 1), (8, 1), (8, 2), (9, 3)])
def test_krum_is_one_of_the_gradients(size: int, f: int) -> None:
    for seed in range(4):
        grads = gradients(size, seed)
        if f:
            grads[seed % size] = {n: 50 * t for n, t in grads[seed % size].items()}
        best = int(np.argmin(krum_scores(flat(grads), f)))
        updates = simulate(f"krum:f={f}", grads)
        agreed(updates)
        assert all(torch.equal(updates[0][n], grads[best][n]) for n in SHAPES)


@pytest.mark.parametrize(("size", "f", "m"), [(3, 0, 2), (5, 1, None), (5, 1, 4), (8, 2, None), (8, 2, 3), (9, 3, 6)])
def test_multi_krum(size: int, f: int, m: int | None) -> None:
    for seed in range(3):
        grads = gradients(size, seed)
        rows = flat(grads)
        chosen = np.argsort(krum_scores(rows, f))[: m or size - f - 2]
        got = agreed(simulate(f"multi_krum:f={f},m={str(m).lower()}", grads, [2.0] * size))
        assert (np.abs(got - rows[chosen].mean(0)) <= (size + 3) * EPS32 * np.abs(rows).max(0)).all()


@pytest.mark.parametrize("iterations", [1, 8, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_geometric_median(size: int, iterations: int) -> None:
    for seed, weights in enumerate(plans(size)):
        grads = gradients(size, seed)
        rows, w = flat(grads), weights or [1.0] * size
        got = agreed(simulate(f"geometric_median:iterations={iterations}", grads, weights))
        expected = weiszfeld(rows, w, iterations)
        assert (np.abs(got - expected) <= (size + 4) * EPS32 * np.abs(rows).max(0)).all()
        if iterations == 40:  # it is the minimum: going any way from there, the objective grows

            def objective(point: Array, rows: Array = rows, w: Sequence[float] = w) -> float:
                return float((np.array(w) * np.sqrt(((rows - point) ** 2).sum(1))).sum())

            least = objective(expected)
            ways = np.random.RandomState(seed).standard_normal((5, rows.shape[1]))
            assert all(objective(expected + step * way) > least for way in ways for step in (0.01, -0.01))


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_clipped_mean(size: int, iterations: int) -> None:
    """Five steps, so that the centre has gone some way; some gradients lie inside of the radius, some do not."""
    for radius in (5.0, 100.0):
        simulation = Simulation(f"clipped_mean:radius={radius},iterations={iterations}", SHAPES, size)
        centre = np.zeros(flat(gradients(1)).shape[1])
        for step in range(5):
            weights = plans(size)[step % 3]
            grads = gradients(size, step)
            if size > 1:
                grads[0] = {n: 30 * t for n, t in grads[0].items()}
            centre = clip_around(centre, flat(grads), weights or [1.0] * size, radius, iterations)
            got = agreed(simulation.step(grads, weights))
            largest = np.abs(flat(grads)).max() + np.abs(centre).max()
            assert (np.abs(got - centre) <= (step + 1) * iterations * (size + 4) * EPS32 * largest).all()
        for store in simulation.stores:
            assert (flat([store.portable()["centre"]])[0] == got).all()


RULES = ["median", "trimmed_mean:f=2", "krum:f=2", "multi_krum:f=2", "geometric_median", "clipped_mean:radius=90"]


@pytest.mark.parametrize("attack", [math.nan, math.inf, -math.inf, 1e30, -1e38, "opposite", "zero", "same"])
@pytest.mark.parametrize("spec", RULES)
def test_two_of_seven_may_send_anything(spec: str, attack: float | str) -> None:
    """The update stays about as near to the honest mean as honest gradients are; the plain mean does not."""
    grads = gradients(7)
    honest = flat(grads[:5])
    for rank in (5, 6):
        match attack:
            case "opposite":
                grads[rank] = {n: -100 * t for n, t in grads[0].items()}
            case "zero":
                grads[rank] = {n: torch.zeros(s) for n, s in SHAPES.items()}
            case "same":
                grads[rank] = {n: 20 + t for n, t in grads[5].items()}
            case float(value):
                grads[rank] = {n: torch.full(s, value) for n, s in SHAPES.items()}
    simulation = Simulation(spec, SHAPES, 7)
    for _ in range(6 if "clipped" in spec else 1):  # its centre comes near in a few steps
        got = agreed(simulation.step(grads))
    middle = honest.mean(0)
    spread = np.sqrt(((honest - middle) ** 2).sum(1)).max()
    assert np.sqrt(((got - middle) ** 2).sum()) <= 1.5 * spread
    if attack != "zero":  # which shrinks the mean, and no more
        mean = flat(simulate("mean", grads)[:1])[0]
        assert not np.sqrt(((mean - middle) ** 2).sum()) <= 1.5 * spread


@pytest.mark.parametrize("spec", RULES)
def test_more_non_finite_ranks_than_it_survives(spec: str) -> None:
    grads = gradients(7)
    for rank in (1, 2, 4):
        grads[rank] = {n: torch.full(s, math.nan) for n, s in SHAPES.items()}
    simulation = Simulation(spec, SHAPES, 7)
    before = [store.portable() for store in simulation.stores]
    if spec in ("median", "geometric_median") or "clipped" in spec:  # these survive three
        assert np.isfinite(agreed(simulation.step(grads))).all()
        grads[5] = grads[1]
        simulation = Simulation(spec, SHAPES, 7)
    updates = simulation.step(grads)
    assert all(t.isnan().all() for mine in updates for t in mine.values())
    assert str([store.portable() for store in simulation.stores]) == str(before)
    assert np.isfinite(agreed(simulation.step(gradients(7)))).all()


@pytest.mark.parametrize("spec", ["median:f=1", "geometric_median:f=1", "clipped_mean:f=1"])
def test_a_stated_f_is_the_limit(spec: str) -> None:
    grads = gradients(7)
    grads[0] = {n: torch.full(s, math.inf) for n, s in SHAPES.items()}
    assert np.isfinite(agreed(simulate(spec, grads))).all()
    grads[1] = grads[0]
    assert all(t.isnan().all() for t in simulate(spec, grads)[3].values())


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 2.0, 1.0]])
@pytest.mark.parametrize("f", [None, 1, 2])
def test_median_without_what_is_not_finite(f: int | None, weights: list[float] | None) -> None:
    """Element by element: another number of them in each."""
    size = 5
    generator, w = torch.Generator().manual_seed(3), weights or [1.0] * size
    rows = torch.randn(size, 400, generator=generator)
    rows[torch.rand(size, 400, generator=generator) < 0.25] = math.nan
    rows[torch.rand(size, 400, generator=generator) < 0.05] = -math.inf
    if weights and f == 2:
        with pytest.raises(ConfigurationError, match="less than half of the weight"):
            simulate("median:f=2", [{"w": row} for row in rows], weights)
        return
    got = simulate(f"median:f={str(f).lower()}", [{"w": row} for row in rows], weights)[0]["w"]
    seen = set()
    for e in range(400):
        good = [r for r in range(size) if rows[r, e].isfinite()]
        lost = size - len(good) > f if f is not None else sum(w[r] for r in good) <= sum(w) / 2
        seen.add((size - len(good), lost))
        if lost:
            assert got[e].isnan()
        else:
            expected = weighted_median(rows[good, e : e + 1].double().numpy(), [w[r] for r in good])[0]
            assert abs(float(got[e]) - expected) <= 4 * EPS32 * 4
    assert {lost for _, lost in seen} == {True, False}


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 2.0, 1.0]])
@pytest.mark.parametrize("f", [0, 1, 2])
def test_trimmed_mean_without_what_is_not_finite(f: int, weights: list[float] | None) -> None:
    size = 5
    generator, w = torch.Generator().manual_seed(4), weights or [1.0] * size
    rows = torch.randn(size, 400, generator=generator)
    rows[torch.rand(size, 400, generator=generator) < 0.25] = math.inf
    got = simulate(f"trimmed_mean:f={f}", [{"w": row} for row in rows], weights)[0]["w"]
    for e in range(400):
        good = [r for r in range(size) if rows[r, e].isfinite()]
        bad = size - len(good)
        if bad > f:
            assert got[e].isnan()
        else:
            expected = trimmed(rows[good, e : e + 1].double().numpy(), f - bad, [w[r] for r in good])[0]
            assert abs(float(got[e]) - expected) <= 8 * EPS32 * 4


@pytest.mark.parametrize("spec", ["krum", "multi_krum:m=4", "geometric_median", "clipped_mean:radius=20,iterations=1"])
def test_whole_ranks_are_left_out(spec: str) -> None:
    """One NaN in a corner: the same as if the rank were not there, for rules whose other numbers stay as they are."""
    grads = gradients(6)
    grads[2]["scalar"].fill_(math.nan)
    got = agreed(simulate(spec, grads))
    rows = flat([g for r, g in enumerate(grads) if r != 2])
    match spec.partition(":")[0]:
        case "krum" | "multi_krum" as rule:  # the missing one is the farthest of all, for everybody
            near = np.array([np.sort(((rows - row) ** 2).sum(1))[1:4].sum() for row in rows])  # N - f - 2 = 3
            expected = rows[np.argsort(near)[: 1 if rule == "krum" else 4]].mean(0)
        case "geometric_median":
            expected = weiszfeld(rows, [1.0] * 5, 8)
        case _:
            expected = clip_around(np.zeros(rows.shape[1]), rows, [1.0] * 5, 20.0, 1)
    assert (np.abs(got - expected) <= 10 * EPS32 * np.abs(rows).max(0)).all()


@pytest.mark.parametrize("spec", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "clipped_mean"])
def test_identical_gradients_are_the_answer(spec: str) -> None:
    """Exactly for those that choose; to rounding for combinations. Also where all but one are identical."""
    g = gradients(1)[0]
    for outlier in (g, {n: 1000 - t for n, t in g.items()}):
        got = simulate(f"{spec}:radius=1e9" if spec == "clipped_mean" else spec, [g, g, outlier, g, g])[0]
        if spec in ("median", "trimmed_mean", "krum"):
            limit = 2 * EPS32
        elif spec == "geometric_median":
            # floor: 1e-6 of a distance that is zero but for the dot products' 2^-26 of the norm
            limit = 1e-4
        elif spec == "clipped_mean" and outlier is not g:
            continue  # inside of that radius it is the mean
        else:
            limit = 12 * EPS32
        for n in SHAPES:
            assert (got[n] - g[n]).abs().le(limit * g[n].abs().max().clamp(min=1) if g[n].numel() else 0).all(), n


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", RULES)
def test_other_types(spec: str, dtype: torch.dtype) -> None:
    """Arithmetic is in float32 or wider, so the update is that of float64 gradients, rounded once."""
    grads = gradients(7, dtype=dtype)
    params = {n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()}
    got = Simulation(spec, params, 7).step(grads)
    wide = Simulation(spec, {n: p.double() for n, p in params.items()}, 7).step(
        [{n: t.double() for n, t in g.items()} for g in grads]
    )
    for n in SHAPES:
        assert got[0][n].dtype == dtype
        limit = torch.finfo(dtype).eps * wide[0][n].abs() + 12 * EPS32 * 8
        assert (got[0][n].double() - wide[0][n]).abs().le(limit).all()


def test_a_huge_float64_gradient_is_a_faulty_one() -> None:
    grads = gradients(5, dtype=torch.float64)
    grads[1] = {n: t * 1e200 for n, t in grads[1].items()}
    others = flat([g for r, g in enumerate(grads) if r != 1])
    for spec in ("krum", "multi_krum", "geometric_median", "clipped_mean:radius=90"):
        assert (np.abs(agreed(simulate(spec, grads))) <= np.abs(others).max()).all()


def test_limits() -> None:
    three, seven = gradients(3), gradients(7)
    for spec, grads, message in (
        ("trimmed_mean:f=2", three, r"f=2 .* N >= 2 f \+ 1 = 5 .* there are 3"),
        ("krum:f=1", three, r"f=1 .* N >= 2 f \+ 3 = 5 .* there are 3"),
        ("multi_krum:f=3", seven, r"N >= 2 f \+ 3 = 9 .* there are 7"),
        ("multi_krum:f=1,m=7", seven, r"m=7 must be at most N - f = 6"),
        ("median:f=2", three, r"N >= 2 f \+ 1 = 5"),
        ("geometric_median:f=4", seven, r"N >= 2 f \+ 1 = 9"),
        ("clipped_mean:f=2", three, r"N >= 2 f \+ 1 = 5"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            simulate(spec, grads)
    for spec in ("median:f=1", "geometric_median:f=1", "clipped_mean:f=1"):
        simulate(spec, three, [1, 1.5, 2])
        with pytest.raises(ConfigurationError, match=r"f=1 .* less than half of the weight"):
            simulate(spec, three, [1, 1, 2])
    # an excluded rank outvotes nobody
    for spec in ("krum:f=2", "median:f=3", "trimmed_mean:f=3"):
        simulate(spec, seven)
        with pytest.raises(ConfigurationError, match="there are 6"):
            simulate(spec, seven, [1, 1, 1, 0, 1, 1, 1])
    for spec in ("krum", "multi_krum"):
        with pytest.raises(WeightError, match="no meaning"):
            simulate(spec, seven, [1, 1, 2, 1, 1, 1, 1])
    refused = "median:f=-1 trimmed_mean:f=-1 krum:f=-1 krum:m=2 multi_krum:m=0 clipped_mean:radius=0"
    for (
        spec
    ) in f"{refused} clipped_mean:iterations=0 geometric_median:iterations=0 geometric_median:smoothing=0".split():
        with pytest.raises(ConfigurationError, match="must be"):
            from_spec(spec)


@pytest.mark.parametrize("spec", RULES)
def test_bytes_on_the_wire(spec: str) -> None:
    simulation = Simulation(spec, {"w": (7 * 1024,)}, 7)
    simulation.step([{} for _ in range(7)])
    rows = 8 if "clipped" in spec else 7
    table = 0 if spec.startswith(("median", "trimmed")) else 8 * rows * (rows + 1) // 2
    assert simulation.bytes_sent == [2 * 6 * 7 * 1024 * 4 // 7 + 2 * 6 * table // 7] * 7


@pytest.mark.parametrize("spec", ["geometric_median", "clipped_mean:radius=20"])
@pytest.mark.parametrize("size", [2, 5])
def test_the_order_of_parameters_does_not_matter(spec: str, size: int) -> None:
    """Buckets of scope "step" hold the parameters in the order that the source of gradients has."""
    simulations = [Simulation(spec, SHAPES, size) for _ in range(2)]
    simulations[1]._layouts = [
        type(layout)(dict(reversed(layout.shapes.items()))) for layout in simulations[1]._layouts
    ]
    for step in range(3):
        grads = gradients(size, step)
        a, b = (simulation.step(grads) for simulation in simulations)
        assert all(torch.equal(a[0][n], b[0][n]) for n in SHAPES)


def test_networks_sort() -> None:
    """All sequences of zeros and ones, and so everything (the 0-1 principle)."""
    for size in range(1, 10):
        for number in range(2**size):
            bits = [number >> i & 1 for i in range(size)]
            for i, j in comparators(size):
                bits[i], bits[j] = min(bits[i], bits[j]), max(bits[i], bits[j])
            assert bits == sorted(bits)
