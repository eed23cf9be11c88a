"""adasum, adasum_delta against float64 references written from the formula.

Tolerances: eps = 2^-24 is half a unit in the last place of float32. A level's combination ``ca a + cb b`` made in
float32 from rows with coefficients rounded to float32 is off by at most 3 eps of its terms' magnitudes for each of
them, and a sum of N terms by N more; coefficients are quotients of float64 sums, exact to 2^-40 here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import WeightError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels.cells import Cells, dots, sum_all, sum_by_parameter
from hvdbridge.policies import from_spec
from hvdbridge.policies.adasum import tree_coefficients
from hvdbridge.policies.shards import BlockShards
from hvdbridge.policy.bucket import Layout, number_blocks

SHAPES: dict[str, tuple[int, ...]] = {
    "w": (50, 70), "empty": (0,), "scalar": (), "b": (7,), "long": (2049,), "block": (1024,), "last": (300,),
}  # fmt: skip
EPS32 = 2.0**-24
Grads = dict[str, Tensor]
Array = np.ndarray


def gradients(size: int, seed: int = 0, dtype: torch.dtype = torch.float32, common: float = 0.5) -> list[Grads]:
    """Partly alike, so that dot products matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Grads:
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

    shared = normal()
    return [{n: (common * shared[n] + t).to(dtype) for n, t in normal().items()} for _ in range(size)]


def pair(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Adasum of two vectors, each with the magnitude of the terms that it was made of."""
    (x, ax), (y, ay) = a, b
    dot, xx, yy = float(x @ y), float(x @ x), float(y @ y)
    cx = 1 - dot / (2 * xx) if xx else 1.0
    cy = 1 - dot / (2 * yy) if yy else 1.0
    return cx * x + cy * y, abs(cx) * ax + abs(cy) * ay


def recursive_doubling(vectors: list[Array]) -> list[tuple[Array, Array]]:
    """What each of 2^k ranks has after exchanging with rank xor 1, 2, 4, ... (Maleki 2020)."""
    held = [(v, np.abs(v)) for v in vectors]
    distance = 1
    while distance < len(held):
        held = [pair(held[min(r, r ^ distance)], held[max(r, r ^ distance)]) for r in range(len(held))]
        distance *= 2
    return held


def tree(vectors: list[Array]) -> tuple[Array, Array]:
    """Neighbours first; whoever is left alone goes up as it is."""
    held = [(v, np.abs(v)) for v in vectors]
    while len(held) > 1:
        held = [pair(*held[i : i + 2]) if i + 1 < len(held) else held[i] for i in range(0, len(held), 2)]
    return held[0]


def flat(grads: list[Grads], name: str) -> list[Array]:
    return [g[name].double().reshape(-1).numpy() for g in grads]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_powers_of_two_are_recursive_doubling(size: int) -> None:
    for seed in range(2):
        grads = gradients(size, seed)
        updates = simulate("adasum", grads)
        assert all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in SHAPES)
        for name in SHAPES:
            for expected, magnitude in recursive_doubling(flat(grads, name)):
                off = np.abs(updates[0][name].double().reshape(-1).numpy() - expected)
                assert (off <= (size + 12) * EPS32 * magnitude).all(), name


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 11, 17])
def test_other_numbers_of_ranks(size: int) -> None:
    grads = gradients(size)
    updates = simulate("adasum", grads)
    for name in SHAPES:
        expected, magnitude = tree(flat(grads, name))
        off = np.abs(updates[-1][name].double().reshape(-1).numpy() - expected)
        assert (off <= (size + 12) * EPS32 * magnitude).all(), name


def test_three_ranks_by_hand() -> None:
    grads = [{"w": torch.tensor(v)} for v in ([1.0, 0.0], [1.0, 1.0], [0.0, 2.0])]
    # (1,0)+(1,1) = (1.25, 0.75); with (0,2): dot 1.5, squares 2.125 and 4
    a, b = 1 - 1.5 / (2 * 2.125), 1 - 1.5 / (2 * 4)
    want = torch.tensor([1.25 * a, 0.75 * a + 2 * b])
    assert torch.allclose(simulate("adasum", grads)[0]["w"], want, rtol=4 * EPS32, atol=0)
    assert simulate("adasum", grads[:2])[1]["w"].tolist() == [1.25, 0.75]


def test_parallel_gradients_are_averaged_orthogonal_ones_added() -> None:
    g = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    for size in (2, 4, 8):  # powers of two: the tree weighs all ranks alike
        assert torch.allclose(simulate("adasum", [{"w": g}] * size)[0]["w"], g, rtol=16 * EPS32, atol=0)
    rows = torch.zeros(5, 4000)
    for rank in range(5):
        rows[rank, rank::5] = g[rank::5]
    assert torch.equal(simulate("adasum", [{"w": row} for row in rows])[0]["w"], rows.sum(0))


def test_zero_is_neutral_and_what_cancels_is_zero() -> None:
    g = gradients(3, common=0.0)
    zero = {n: torch.zeros(s) for n, s in SHAPES.items()}
    minus = {n: -t for n, t in g[0].items()}
    for order in ([zero, g[1]], [g[1], zero], [zero, zero, g[1]], [g[0], minus, g[1]], [g[0], minus, zero, g[1]]):
        updates = simulate("adasum", order)
        assert all(torch.equal(updates[0][n], g[1][n]) for n in SHAPES)
    assert not any(t.any() for t in simulate("adasum", [zero] * 3)[0].values())
    # what is left of a sum that cancels but for the last bits: no wild coefficients
    almost = {n: -t * (1 + 2.0**-23) for n, t in g[0].items()}
    updates = simulate("adasum", [g[0], almost, g[1]])
    for name in SHAPES:
        assert (updates[0][name] - g[1][name]).abs().le(2.0**-20 * (g[0][name].abs() + 1e-9)).all()


def test_each_parameter_by_itself() -> None:
    grads = gradients(4)
    together = simulate("adasum", grads)[0]
    for name in SHAPES:
        alone = simulate("adasum", [{name: g[name]} for g in grads])[0]
        # Alone its blocks have other owners, so partial sums are added in another order: off by 2^-53 of them, which
        # may turn the rounding of a coefficient, by 2^-24 of it.
        assert torch.allclose(together[name], alone[name], rtol=0, atol=8 * EPS32 * 8)


@pytest.mark.parametrize("size", [2, 3, 8, 11])
def test_bucket_boundaries_do_not_matter(size: int) -> None:
    """To the bit, at any number of ranks: the simulation adds in rank order."""
    splits = [list(SHAPES)], [["last", "b"], ["long", "w"], ["scalar", "empty", "block"]], [[n] for n in SHAPES]
    runs = []
    for buckets in splits:
        simulation = Simulation("adasum", SHAPES, size, buckets=buckets)
        runs.append([simulation.step(gradients(size, step))[0] for step in range(2)])
    for run in runs[1:]:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(run, runs[0], strict=True) for n in SHAPES)


def test_the_order_of_ranks_matters() -> None:
    grads = gradients(4)
    a, b = (simulate("adasum", order)[0]["w"] for order in (grads, [grads[0], grads[2], grads[1], grads[3]]))
    assert (a - b).abs().max() > 1e-3  # the documentation says so
    swapped = simulate("adasum", [grads[1], grads[0], grads[3], grads[2]])[0]["w"]
    assert torch.allclose(a, swapped, rtol=0, atol=1e-5)  # within a pair it does not


def test_weights() -> None:
    grads = gradients(4)
    with pytest.raises(WeightError, match="unequal weights no meaning"):
        simulate("adasum", grads, [1, 2, 1, 1])
    plain = simulate("adasum", grads)[0]
    assert all(torch.equal(plain[n], t) for n, t in simulate("adasum", grads, [0.3] * 4)[0].items())
    grads[1] = {n: torch.full(s, math.nan) for n, s in SHAPES.items()}
    without = simulate("adasum", [grads[0], grads[2], grads[3]])[0]
    for mine in simulate("adasum", grads, [5, 0, 5, 5]):
        assert all(torch.allclose(mine[n], without[n], rtol=0, atol=1e-6) for n in SHAPES)


@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8), (torch.float64, 2e-14)]
)
def test_other_types(dtype: torch.dtype, eps: float) -> None:
    grads = gradients(3, dtype=dtype)
    updates = simulate("adasum", grads)
    for name in SHAPES:
        expected, magnitude = tree(flat(grads, name))
        assert updates[0][name].dtype == dtype
        off = np.abs(updates[0][name].double().reshape(-1).numpy() - expected)
        # one rounding of the result to its type, and float32 arithmetic below it
        limit = eps * magnitude + (2.0**-20 * magnitude if dtype != torch.float64 else 0) + 1e-7 * (dtype.itemsize < 4)
        assert (off <= limit).all()


def test_the_scale_of_gradients_does_not_matter() -> None:
    grads = gradients(3)
    plain = simulate("adasum", grads)[0]
    scaled = simulate("adasum", [{n: t * 2.0**90 for n, t in g.items()} for g in grads])[0]
    assert all(torch.equal(scaled[n], plain[n] * 2.0**90) for n in SHAPES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reaches_every_rank_in_its_parameter(bad: float) -> None:
    for size in (1, 2, 3, 9):
        grads = gradients(size)
        grads[-1]["long"][2000] = bad
        for mine in simulate("adasum", grads):
            assert not mine["long"][2000].isfinite()
            assert all(mine[n].isfinite().all() for n in SHAPES if n != "long")


def test_bytes_on_the_wire() -> None:
    simulation = Simulation("adasum", {"w": (4096,), "v": (4096,)}, 4)
    simulation.step([{} for _ in range(4)])
    table = 2 * (4 * 5 // 2) * 8  # two parameters, ten products of four rows
    assert simulation.bytes_sent == [2 * 3 * 8192 * 4 // 4 + 2 * 3 * table // 4] * 4


def test_a_parameter_that_is_huge_and_one_that_vanishes() -> None:
    grads = [{"w": g["w"] * 1e30, "long": g["long"] * 1e-40} for g in gradients(3)]
    updates = simulate("adasum", grads)[0]
    for name, spacing in (("w", 0.0), ("long", 2.0**-147)):
        expected, magnitude = tree(flat(grads, name))
        off = np.abs(updates[name].double().reshape(-1).numpy() - expected)
        assert (off <= 16 * EPS32 * magnitude + spacing).all()


def test_cells_add_up() -> None:
    """Dot products by parameter and in all, over the shards of three owners, against numpy."""
    layout, grads = Layout(SHAPES), gradients(3)
    shards = BlockShards(layout, number_blocks(SHAPES), 3)
    vectors = [torch.cat([g[n].reshape(-1) for n in SHAPES]) for g in grads]
    each, total = torch.zeros(len(SHAPES), 3, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for rank in range(3):
        pieces = [
            (start, count, width, offset) for start, count, width, owner, offset in shards.groups if owner == rank
        ]
        cells = Cells(layout, pieces, torch.device("cpu"))
        table = dots([shards.pack(v, torch.float32)[rank] for v in vectors], cells)
        each += sum_by_parameter(table, cells)
        total += sum_all(table, cells)
    for i, name in enumerate(SHAPES):
        rows = np.array(flat(grads, name))
        assert np.allclose(each[i].numpy(), rows @ rows.T, rtol=1e-12, atol=1e-12)
    assert np.allclose(total.numpy(), each.sum(0).numpy(), rtol=1e-12, atol=1e-12)


def test_sums_over_all_cells_do_not_change_with_the_order_of_parameters() -> None:
    """To the bit."""
    first, grads, tables = number_blocks(SHAPES), gradients(3), []
    for names in (list(SHAPES), list(reversed(SHAPES))):
        layout = Layout({n: SHAPES[n] for n in names})
        shards = BlockShards(layout, first, 2)
        pieces = [(start, count, width, offset) for start, count, width, owner, offset in shards.groups if owner == 1]
        rows = [shards.pack(torch.cat([g[n].reshape(-1) for n in names]), torch.float32)[1] for g in grads]
        cells = Cells(layout, pieces, torch.device("cpu"))
        tables.append(sum_all(dots(rows, cells), cells))
    assert torch.equal(tables[0], tables[1])


def test_coefficients_of_batches() -> None:
    rows = torch.randn(4, 3, 5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = tree_coefficients(rows @ rows.mT)
    for i in range(4):
        for j in range(3):
            expected, _ = tree(list(rows[i, j].numpy()))
            assert np.allclose((shares[i, j][:, None] * rows[i, j]).sum(0).numpy(), expected, rtol=1e-12, atol=1e-12)


def momentum_step(p: Array, g: Array, m: Array, lr: float) -> tuple[Array, Array]:
    m = 0.9 * m + g
    return p - lr * m, m


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_deltas_of_the_optimizers_are_combined(size: int) -> None:
    """Four steps of SGD with momentum and another learning rate on each rank, against numpy."""
    generator = torch.Generator().manual_seed(5)
    start = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    simulation = Simulation("adasum_delta", start, size)
    params = [{n: t.clone() for n, t in start.items()} for _ in range(size)]
    lrs = [0.1 / (r + 1) for r in range(size)]
    optimizers = [torch.optim.SGD(list(p.values()), lr, momentum=0.9) for p, lr in zip(params, lrs, strict=True)]
    want = {n: t.double().reshape(-1).numpy() for n, t in start.items()}
    momenta = [{n: np.zeros(t.numel()) for n, t in start.items()} for _ in range(size)]
    for step in range(4):
        grads = gradients(size, step)
        updates = simulation.step(grads)
        for rank in range(size):
            assert all(torch.equal(updates[rank][n], grads[rank][n]) for n in SHAPES)  # gradients stay local
            for n, p in params[rank].items():
                p.grad = updates[rank][n]
            optimizers[rank].step()
        new = simulation.after_step(params)
        for rank in range(size):
            for n, p in params[rank].items():
                assert torch.equal(new[rank][n], new[0][n])  # parameters are the same after every step
                p.copy_(new[rank][n])
        for name in SHAPES:
            deltas = []
            for rank in range(size):
                g = grads[rank][name].double().reshape(-1).numpy()
                moved, momenta[rank][name] = momentum_step(want[name], g, momenta[rank][name], lrs[rank])
                deltas.append(moved - want[name])
            want[name] = want[name] + tree(deltas)[0]
            # A delta of about 0.3 is a difference of parameters of about 4, each rounded three times a step (momentum,
            # step, sum): 4 steps of 8 roundings of 2^-24 of at most 8.
            assert np.abs(new[0][name].double().reshape(-1).numpy() - want[name]).max(initial=0) <= 4 * 8 * 8 * EPS32
    states = [store.portable()["start"] for store in simulation.stores]
    assert all(torch.equal(state[n], new[0][n]) for state in states for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None])
def test_deltas_of_other_types(dtype: torch.dtype | None) -> None:
    """What is remembered is what the model holds, rounded to its type; None: two types in one model."""
    kinds = {n: dtype or (torch.bfloat16 if n == "w" else torch.float32) for n in SHAPES}
    start = {n: torch.ones(s, dtype=kinds[n]) for n, s in SHAPES.items()}
    simulation = Simulation("adasum_delta", start, 2)
    for step in range(2):
        simulation.step([{n: t.to(kinds[n]) for n, t in g.items()} for g in gradients(2, step)])
        moved = [{n: t + (0.1 * g[n]).to(kinds[n]) for n, t in start.items()} for g in gradients(2, step)]
        new = simulation.after_step(moved)
        for mine, store in zip(new, simulation.stores, strict=True):
            held = store.portable()["start"]
            assert {n: t.dtype for n, t in held.items()} == kinds
            assert all(torch.equal(held[n], mine[n]) and torch.equal(mine[n], new[0][n]) for n in SHAPES)
        start = new[0]


def test_deltas_of_an_excluded_rank_do_not_count() -> None:
    start = {n: torch.zeros(s) for n, s in SHAPES.items()}
    simulation = Simulation("adasum_delta", start, 3)
    grads = gradients(3)
    grads[2] = {n: torch.full(s, math.nan) for n, s in SHAPES.items()}
    updates = simulation.step(grads, [1, 1, 0])
    assert not any(t.any() for t in updates[2].values())  # not even its own optimizer sees them
    new = simulation.after_step([grads[0], grads[1], grads[2]])
    for name in SHAPES:
        expected, magnitude = tree(flat(grads[:2], name))
        off = np.abs(new[2][name].double().reshape(-1).numpy() - expected)
        assert (off <= 16 * EPS32 * magnitude).all()


def test_what_they_say_they_are() -> None:
    adasum, delta = from_spec("adasum"), from_spec("adasum_delta")
    assert (adasum.additive, adasum.deterministic, adasum.unequal_weights) == (False, True, False)
    assert (adasum.scope, adasum.replicas) == ("bucket", "same")
    assert (delta.additive, delta.replicas, delta.due(0), delta.due(7)) == (False, "drift", True, True)
