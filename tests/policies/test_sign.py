"""sign, efsign, onebit against references written from the papers' formulas in float64 numpy.

Tolerances: a scale is a mean of up to 1024 float32 numbers (10 halvings and a division: 11 roundings), a sum has N
terms and there are two stages, each of which may round what the one before made: below 64 * 2^-24 = 4e-6 of the
largest value in a step. Residuals carry that over, so T steps have T times as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.execution.state_store import StateStore, leaves
from hvdbridge.kernels.signs import ScaledSign, majority, weighted_majority
from hvdbridge.policies import bytes_per_step, from_spec

SIZES = [1, 2, 3, 4, 8]
SHAPES = {"w": (50, 70), "empty": (0,), "scalar": (), "b": (7,), "long": (2049,), "even": (64,)}
OWNED = 1024
Array = NDArray[np.float64]
Grads = dict[str, Tensor]


def gradients(size: int, seed: int = 0) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(size)]


def weights_of(size: int) -> list[list[float] | None]:
    unequal = [float(1 + rank) for rank in range(size)]
    return [None, unequal, *([[0.0, *unequal[1:]]] if size > 1 else [])]


def flat(tensor: Tensor) -> Array:
    found: Array = tensor.double().numpy().reshape(-1)
    return found


def alike(updates: Sequence[Grads]) -> bool:
    return all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in updates[0])


# Votes


@pytest.mark.parametrize("voters", range(1, 10))
def test_votes_are_counted(voters: int) -> None:
    """All combinations of up to 9 voters, as the bits of words; a tie takes the coin's side."""
    columns = np.array(list(itertools.product([0, 1], repeat=voters))).T
    columns = np.pad(columns, ((0, 0), (0, -columns.shape[1] % 32)))
    coins = np.random.default_rng(0).integers(0, 2, columns.shape[1])

    def words(bits: NDArray[np.int64]) -> Tensor:
        packed = np.packbits(np.ascontiguousarray(bits, dtype=np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(packed.view(np.int32).copy())

    twice = 2 * columns.sum(0)
    expected = np.where(twice == voters, coins, twice > voters)
    assert torch.equal(majority(words(columns), words(coins)), words(expected))
    assert torch.equal(weighted_majority(words(columns), [2.0] * voters, words(coins)), words(expected))
    weights = [float(1 + rank % 4) for rank in range(voters)]
    tally = np.array(weights) @ (2 * columns - 1)
    expected = np.where(tally == 0, coins, tally > 0)
    assert torch.equal(weighted_majority(words(columns), weights, words(coins)), words(expected))


@pytest.mark.parametrize("size", SIZES)
def test_the_majority_of_signs(size: int) -> None:
    for weights in weights_of(size):
        grads = gradients(size)
        updates = simulate("sign:scale=0.25", grads, weights)
        assert alike(updates)
        ties = 0
        for name in SHAPES:
            votes = sum(w * np.sign(flat(g[name])) for w, g in zip(weights or [1.0] * size, grads, strict=True))
            found = flat(updates[0][name])
            assert set(np.abs(found)) <= {0.25}
            decided = votes != 0
            assert (found[decided] == 0.25 * np.sign(votes[decided])).all()
            ties += int((~decided).sum())
        if weights is None:
            assert (ties > 0) == (size % 2 == 0)


def test_ties_are_a_common_coin_that_is_turned_over() -> None:
    """Two ranks of opposite signs tie everywhere. 20,000 fair coins: the mean is below 4 / sqrt(20000) = 0.028."""
    shapes = {"a": (10_001,), "b": (9_999,)}
    grads = [{n: sign * torch.ones(s) for n, s in shapes.items()} for sign in (1.0, -1.0)]
    first = Simulation("sign", shapes, 2)
    other = Simulation("sign", {n: shapes[n] for n in shapes}, 2, buckets=[["b"], ["a"]])
    seeded = Simulation("sign", shapes, 2, seed=1)
    history = []
    for _ in range(4):
        updates, again, third = first.step(grads), other.step(grads), seeded.step(grads)
        assert alike(updates)
        assert all(torch.equal(updates[0][n], again[0][n]) for n in shapes)
        history.append(torch.cat([updates[0]["a"], updates[0]["b"]]))
        assert abs(float(history[-1].mean())) < 0.03
        assert abs(float((history[-1][1:] * history[-1][:-1]).mean())) < 0.03  # neighbours are independent
        assert abs(float((updates[0]["a"] * third[0]["a"]).mean())) < 0.05
    assert torch.equal(history[0], -history[1])
    assert torch.equal(history[2], -history[3])
    assert abs(float((history[0] * history[2]).mean())) < 0.03


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_nobody_wants_to_move_is_back_after_two_steps(size: int) -> None:
    simulation = Simulation("sign", SHAPES, size)
    zeros = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(size)]
    even, odd = simulation.step(zeros)[0], simulation.step(zeros)[0]
    for name in SHAPES:
        assert (even[name] == 1).all()
        assert (odd[name] == -1).all()


@pytest.mark.parametrize("size", [1, 3])
def test_signum(size: int) -> None:
    """``m = beta m + (1 - beta) g`` per rank; an element of m within rounding of zero may vote either way."""
    simulation, beta = Simulation("sign:momentum=0.8", SHAPES, size), 0.8
    momenta = [{n: np.zeros(math.prod(s)) for n, s in SHAPES.items()} for _ in range(size)]
    for step in range(5):
        grads = gradients(size, step)
        weights = [1.0, 0.0, 1.0][:size] if step == 3 else [1.0] * size
        update = simulation.step(grads, weights)[0]
        for name in SHAPES:
            votes, clear = np.zeros(math.prod(SHAPES[name])), np.ones(math.prod(SHAPES[name]), dtype=bool)
            for m, g, w in zip(momenta, grads, weights, strict=True):
                if w:
                    m[name] = beta * m[name] + (1 - beta) * flat(g[name])
                votes += w * np.sign(m[name])
                clear &= np.abs(m[name]) > 1e-5
            clear &= votes != 0
            assert (flat(update[name])[clear] == np.sign(votes)[clear]).all()
            assert clear.sum() >= 0.4 * clear.size  # half of the pairs of signs are ties
    for store, m in zip(simulation.stores, momenta, strict=True):
        held = store.portable()["momentum"]
        assert all(np.abs(flat(held[n]) - m[n]).max(initial=0) < 1e-5 for n in SHAPES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ["sign", "sign:momentum=0.5", "efsign", "efsign:exact=true", "onebit"])
def test_non_finite_travels_and_training_goes_on(spec: str, bad: float) -> None:
    simulation = Simulation(spec, SHAPES, 3)
    simulation.step(gradients(3, 0))
    before = [store.portable() for store in simulation.stores]
    grads = gradients(3, 1)
    grads[1]["long"][2048] = bad
    updates = simulation.step(grads)
    for mine in updates:
        assert not mine["long"].isfinite().all()
        assert all(mine[n].isfinite().all() for n in SHAPES if n != "long")
    assert all(torch.equal(mine["long"].isnan(), updates[0]["long"].isnan()) for mine in updates)
    for store, old in zip(simulation.stores, before, strict=True):
        new = store.portable()
        if spec.startswith("sign"):
            old, new = {"residual": old.get("momentum", {})}, {"residual": new.get("momentum", {})}
        if new["residual"]:
            assert torch.equal(new["residual"]["long"], old["residual"]["long"])
            assert not torch.equal(new["residual"]["w"], old["residual"]["w"])
    assert all(t.isfinite().all() for t in simulation.step(gradients(3, 2))[0].values())
    grads = gradients(3, 3)
    grads[1] = {n: torch.full(s, bad) for n, s in SHAPES.items()}
    assert all(t.isfinite().all() for mine in simulation.step(grads, [2, 0, 1]) for t in mine.values())


# Scaled signs


def scaled_sign(x: Array, block: int) -> Array:
    parts = [x[i : i + block] for i in range(0, len(x), block)]
    return np.concatenate([np.where(p >= 0, 1, -1) * np.abs(p).mean() for p in parts] + [np.empty(0)])


def owners(size: int) -> dict[str, NDArray[np.int64]]:
    """The rank that owns each element: blocks of 1024, numbered over the model, dealt out in turn."""
    found, first = {}, 0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        found[name] = (first + np.arange(numel) // OWNED) % size
        first += -(-numel // OWNED)
    return found


def shares(grads: Sequence[Grads], weights: Sequence[float] | None, name: str) -> list[Array]:
    w = weights or [1.0] * len(grads)
    return [share / math.fsum(w) * flat(g[name]) for share, g in zip(w, grads, strict=True)]


class Reference:
    """Several steps of a policy of scaled signs, for one number of ranks."""

    def __init__(self, size: int, block: int) -> None:
        self.size, self.block, self.owners = size, block, owners(size)
        self.worker = [{n: np.zeros(math.prod(s)) for n, s in SHAPES.items()} for _ in range(size)]
        self.server = {n: np.zeros(math.prod(s)) for n, s in SHAPES.items()}

    def both_ways(self, parts: list[Array], name: str) -> Array:
        """EF-signSGD both ways: what the answer lost is in its owner's residual."""
        p = [e[name] + g for e, g in zip(self.worker, parts, strict=True)]
        sent = [scaled_sign(x, self.block) for x in p]
        total = np.sum(sent, axis=0)
        update = scaled_sign(total, self.block)
        for rank in range(self.size):
            lost = np.where(self.owners[name] == rank, total - update, 0)
            self.worker[rank][name] = p[rank] - sent[rank] + lost
        return update

    def one_way(self, parts: list[Array], name: str) -> Array:
        """EF-signSGD."""
        p = [e[name] + g for e, g in zip(self.worker, parts, strict=True)]
        sent = [scaled_sign(x, self.block) for x in p]
        for rank in range(self.size):
            self.worker[rank][name] = p[rank] - sent[rank]
        total: Array = np.sum(sent, axis=0)
        return total

    def double_squeeze(self, parts: list[Array], name: str) -> Array:
        v = self.one_way(parts, name) + self.server[name]
        update = scaled_sign(v, self.block)
        self.server[name] = v - update
        return update


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("spec", "method", "block"),
    [
        ("efsign", "both_ways", 1024), ("efsign:block=64", "both_ways", 64),
        ("efsign:exact=true", "one_way", 1024), ("efsign:exact=true,block=128", "one_way", 128),
        ("onebit", "double_squeeze", 1024), ("onebit:block=256", "double_squeeze", 256),
    ],
)  # fmt: skip
def test_scaled_signs(spec: str, method: str, block: int, size: int) -> None:
    for weights in (None, [float(1 + rank % 3) for rank in range(size)]):
        simulation, reference = Simulation(spec, SHAPES, size), Reference(size, block)
        for step in range(4):
            grads = gradients(size, step)
            updates = simulation.step(grads, weights)
            assert alike(updates)
            for name in SHAPES:
                expected = getattr(reference, method)(shares(grads, weights, name), name)
                assert np.abs(flat(updates[0][name]) - expected).max(initial=0) < 2e-5 * (step + 1), (name, step)
        for rank, store in enumerate(simulation.stores):
            state = store.portable()
            for name in SHAPES:
                assert np.abs(flat(state["residual"][name]) - reference.worker[rank][name]).max(initial=0) < 1e-4
        if method == "double_squeeze":
            for name in SHAPES:
                held = sum(flat(store.portable()["inner"]["server"][name]) for store in simulation.stores)
                assert np.abs(held - reference.server[name]).max(initial=0) < 1e-4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_onebit_telescopes_over_both_sides(size: int) -> None:
    """Updates, residuals and servers' errors are the inputs: 6 steps of (N + 4) roundings of values below 16."""
    simulation = Simulation("onebit", SHAPES, size)
    balance = {n: np.zeros(math.prod(s)) for n, s in SHAPES.items()}
    for step in range(6):
        grads = gradients(size, step)
        update = simulation.step(grads, [float(1 + rank) for rank in range(size)])[0]
        for name in SHAPES:
            balance[name] += sum(shares(grads, [float(1 + rank) for rank in range(size)], name)) - flat(update[name])
    for name in SHAPES:
        for store in simulation.stores:
            state = store.portable()
            balance[name] -= flat(state["residual"][name]) + flat(state["inner"]["server"][name])
        assert np.abs(balance[name]).max(initial=0) < 6 * (size + 4) * 16 * 2.0**-24


@pytest.mark.parametrize("spec", ["onebit", "onebit:block=64", "partition(w=mean, rest=onebit)", "warmup(onebit)"])
def test_onebit_telescopes_across_a_change_of_the_number_of_ranks(spec: str) -> None:
    """Blocks have other owners then. Values stay below 32 in these 8 steps of up to 5 + 4 roundings."""
    spec = spec.replace("warmup(onebit)", "warmup(onebit, steps=0)")
    balance = {n: np.zeros(math.prod(s)) for n, s in SHAPES.items()}
    simulation, step = Simulation(spec, SHAPES, 4), 0
    for size in (4, 2, 5, 3, 3):
        if step:
            saved = [store.portable() for store in simulation.stores]
            simulation = Simulation(spec, SHAPES, size)
            for rank, store in enumerate(simulation.stores):
                store.load(saved, rank, size)
        for _ in range(0 if size == 5 else 2):  # five ranks save again before they have made a step
            grads = gradients(size, step)
            update, step = simulation.step(grads)[0], step + 1
            for name in SHAPES:
                balance[name] += sum(shares(grads, None, name)) - flat(update[name])
    for store in simulation.stores:
        for _, leaf in leaves(store.portable()):
            for name, tensor in leaf.items():
                balance[name] -= flat(tensor)
    for name in SHAPES:
        assert np.abs(balance[name]).max(initial=0) < 8 * 9 * 32 * 2.0**-24, name


def test_a_node_of_onebit_holds_one_state_after_a_change_of_the_number_of_nodes() -> None:
    simulation = Simulation("hierarchical(onebit)", SHAPES, 4, local_size=2)
    for step in range(2):
        simulation.step(gradients(4, step))
    saved = [store.portable() for store in simulation.stores]
    other = Simulation("hierarchical(onebit)", SHAPES, 6, local_size=2)
    for rank, store in enumerate(other.stores):
        store.load(saved, rank, 6)
    assert alike(other.step(gradients(6, 2)))

    def held(stores: Sequence[StateStore]) -> Array:
        states = [state for store in stores for _, state in leaves(store.portable())]
        return np.sum([np.concatenate([flat(state[n]) for n in SHAPES]) for state in states], axis=0)

    for rank, store in enumerate(other.stores):
        store.load(saved, rank, 6)
    assert np.abs(held(other.stores[::2]) - held(simulation.stores[::2])).max() < 1e-5


def test_a_scaled_sign_contracts_by_its_constant() -> None:
    """``|x - C(x)|^2 = |x|^2 - |x|_1^2 / d`` (Karimireddy 2019, lemma 8)."""
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0)).pow(3)
    codes, scales, out = torch.empty(5, 1024, dtype=torch.uint8), torch.empty(5), torch.empty(5, 1024)
    ScaledSign().encode(x, 1024, None, codes, scales)
    ScaledSign().decode(codes, scales, out)
    x, out = x.double(), out.double()
    error, square, first = (x - out).square().sum(1), x.square().sum(1), x.abs().sum(1)
    assert torch.allclose(error, square - first.square() / 1024, rtol=1e-5)
    assert (error < square).all()


def test_feedback_matters() -> None:
    """A constant gradient with one large element: with feedback the updates add up to it, without they do not."""
    gradient = torch.full((64,), 0.01)
    gradient[0] = 0.5
    off = {}
    for spec in ("efsign", "efsign:exact=true", "onebit", "efsign:ef=false", "onebit:ef=false", "sign:scale=0.01"):
        simulation = Simulation(spec, {"w": (64,)}, 2)
        total = sum(simulation.step([{"w": gradient}] * 2)[0]["w"].double() for _ in range(200))
        off[spec] = float((total / 200 - gradient).norm() / gradient.norm())
    assert all(off[spec] < 0.2 for spec in ("efsign", "efsign:exact=true", "onebit")), off
    assert all(off[spec] > 0.9 for spec in ("efsign:ef=false", "onebit:ef=false", "sign:scale=0.01")), off


# All


@pytest.mark.parametrize("size", [2, 4])
def test_one_bit_per_element_on_the_wire(size: int) -> None:
    numel = 64 * 1024
    for spec, messages, extra in (
        ("sign", 2, 4 * size), ("efsign", 2, 64 * 4), ("onebit", 2, 64 * 4), ("efsign:exact=true", size, 64 * 4),
    ):  # fmt: skip
        simulation = Simulation(spec, {"w": (numel,)}, size)
        simulation.step([{} for _ in range(size)])
        assert simulation.bytes_sent == [messages * (size - 1) * (numel // 8 + extra) // size] * size, spec
        params = {"w": torch.empty(numel)}
        assert bytes_per_step(from_spec(spec), params, size) == simulation.bytes_sent[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["sign:scale=0.5", "efsign", "efsign:exact=true", "onebit"])
def test_other_types_of_gradients(spec: str, dtype: torch.dtype) -> None:
    grads = [{n: t.to(dtype) for n, t in mine.items()} for mine in gradients(3)]
    expected = simulate(spec, [{n: t.float() for n, t in mine.items()} for mine in grads])
    updates = simulate(spec, grads)
    assert alike(updates)
    for name in SHAPES:
        assert updates[0][name].dtype == dtype
        eps = torch.finfo(dtype).eps + 1e-6
        assert torch.allclose(updates[0][name].float(), expected[0][name], rtol=2 * eps, atol=eps)


def test_bad_options() -> None:
    for spec, text in (
        ("sign:scale=0", "> 0"), ("sign:momentum=1", ">= 0 and < 1"), ("efsign:block=100", "power of two"),
        ("onebit:block=2048", "power of two"), ("efsign:block=8", "16 to 1024"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=text):
            from_spec(spec)
    with pytest.raises(ConfigurationError, match="cannot wrap Sign"):
        from_spec("ef(sign)")
    with pytest.raises(ConfigurationError, match="cannot wrap OneBit"):
        from_spec("ef(onebit)")
