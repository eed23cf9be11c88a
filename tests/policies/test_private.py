"""dp: what is clipped against numpy, the noise by its moments after the real sum, epsilon against the exact formula.

n independent standard normal numbers: the sum of their squares has mean n and variance 2n, that of their fourth
powers mean 3n and variance 96n, and for n in the thousands both are normal. A test that allows five deviations fails
by chance once in 1.7 million runs.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, WeightError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.policies import bytes_per_step, from_spec
from hvdbridge.policies.private import DifferentiallyPrivate

SHAPES: dict[str, tuple[int, ...]] = {"w": (50, 70), "empty": (0,), "scalar": (), "b": (7,), "long": (2049,)}
MANY = 150_000
Grads = dict[str, Tensor]


def gradients(size: int, seed: int = 0) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(size)]


def flat(grads: Grads) -> np.ndarray:
    return np.concatenate([grads[n].double().reshape(-1).numpy() for n in SHAPES])


@pytest.mark.parametrize("norm", [0.5, 60.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_without_noise_it_is_the_mean_of_clipped_gradients(size: int, norm: float) -> None:
    """Some norms are below 60 and some above. Each float32 term is rounded three times, their sum N times."""
    simulation = Simulation(f"dp:norm={norm},noise=0", SHAPES, size)
    for step in range(3):
        grads = [{n: (1 + r % 2) / 2 * t for n, t in g.items()} for r, g in enumerate(gradients(size, step))]
        weights = [1.0] * (size - 1) + [0.0] if size > 2 and step == 1 else None
        rows = [flat(g) for g in grads[: size - (weights is not None)]]
        expected = sum(row * min(1.0, norm / np.linalg.norm(row)) for row in rows) / len(rows)
        updates = simulation.step(grads, weights)
        assert all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in SHAPES)
        assert np.abs(flat(updates[0]) - expected).max() <= (size + 4) * 2.0**-24 * 5
    assert 30 < min(np.linalg.norm(row) for row in rows) < 60 < 74  # see norm


def test_no_rank_moves_the_sum_by_more_than_the_norm() -> None:
    grads = gradients(3)
    for factor in (1.0, 1e6, 1e30):
        grads[1] = {n: factor * t for n, t in gradients(1, 5)[0].items()}
        without = [grads[0], {n: torch.zeros(s) for n, s in SHAPES.items()}, grads[2]]
        a, b = (flat(simulate("dp:norm=2,noise=0", g)[0]) for g in (grads, without))
        assert abs(3 * np.linalg.norm(a - b) - 2) <= 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        "partition(w=dp(norm=1.0,noise=0), rest=dp(norm=1.0,noise=0))",
        "partition(w=mean, rest=dp(norm=1.0))",
        "fp16(partition(w=mean, rest=dp(norm=1.0)))",
    ],
)
def test_a_part_of_the_gradient_is_refused(spec: str) -> None:
    """Two parts of norm 1 each have one of 1.4 together."""
    with pytest.raises(ConfigurationError, match="a part of it"):
        simulate(spec, gradients(2))
    with pytest.raises(ConfigurationError, match="a part of it"):
        bytes_per_step(from_spec(spec), SHAPES, 2)


def test_all_of_the_gradient_is_not_a_part() -> None:
    grads = gradients(2)
    expected = simulate("dp:norm=1.0,test_seed=3", grads)[0]
    for spec in ("partition(*=dp(norm=1.0,test_seed=3))", "warmup(steps=0, then=dp(norm=1.0,test_seed=3))"):
        update = Simulation(spec, SHAPES, 2, buckets=[[name] for name in SHAPES]).step(grads)[0]
        assert all(torch.equal(update[n], expected[n]) for n in SHAPES)


@pytest.mark.parametrize("spec", ["clip(norm=0.5)", "dgc(ratio=1.0,clip=0.5)", "dp(norm=0.5,noise=0.0)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_of_a_clipped_gradient_do_not_depend_on_where_parameters_lie(spec: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"p{i}": (1000 + 37 * i,) for i in range(12)} | {"long": (100_001,)}
    for _ in range(10):
        grads = [{n: torch.randn(s, generator=generator, dtype=dtype) for n, s in sizes.items()} for _ in range(2)]
        params = {n: torch.zeros(s, dtype=dtype) for n, s in sizes.items()}
        names = torch.randperm(len(sizes), generator=generator).tolist()
        one = Simulation(spec, params, 2).step(grads)[0]
        other = Simulation(spec, {n: params[n] for n in (list(sizes)[i] for i in names)}, 2).step(grads)[0]
        assert all(torch.equal(one[n], other[n]) for n in sizes)


def standardised(spec: str, size: int, weights: list[float] | None, scale: float, dtype: torch.dtype) -> np.ndarray:
    """The noise in the sum over ranks in units of ``noise * norm``: gradients are zero."""
    simulation = Simulation(spec, {"w": torch.zeros(MANY, dtype=dtype)}, size)
    updates = simulation.step([{"w": torch.zeros(MANY, dtype=dtype)}] * size, weights)
    assert all(torch.equal(mine["w"], updates[0]["w"]) for mine in updates)
    count = size if weights is None else sum(w > 0 for w in weights)
    return updates[0]["w"].double().numpy() * count / scale


@pytest.mark.parametrize("seed", ["none", "7"])
@pytest.mark.parametrize(
    ("size", "weights"), [(1, None), (2, None), (3, None), (3, [1.0, 0.0, 1.0]), (8, None), (8, [0.0] * 5 + [2.0] * 3)]
)
def test_the_noise_of_the_sum(size: int, weights: list[float] | None, seed: str) -> None:
    """Its deviation is noise * norm, whatever the number of ranks, and it is normal."""
    z = standardised(f"dp:norm=0.7,noise=3,test_seed={seed}", size, weights, 2.1, torch.float32)
    assert abs(z.mean()) <= 5 / math.sqrt(MANY)
    assert abs((z**2).sum() - MANY) <= 5 * math.sqrt(2 * MANY)
    assert abs((z**4).sum() - 3 * MANY) <= 5 * math.sqrt(96 * MANY)
    assert abs((z[1:] * z[:-1]).sum()) <= 5 * math.sqrt(MANY)
    inside = (np.abs(z) < 1).mean()
    assert abs(inside - math.erf(math.sqrt(0.5))) <= 5 * math.sqrt(0.22 / MANY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", ["none", "7"])
def test_the_noise_of_other_types(dtype: torch.dtype, seed: str) -> None:
    """A half type rounds each number by less than 2^-8 of it, which adds less than 2^-14 to the variance."""
    z = standardised(f"dp:norm=2,noise=0.5,test_seed={seed}", 2, None, 1.0, dtype)
    assert abs((z**2).sum() - MANY) <= 5 * math.sqrt(2 * MANY) + MANY * 2.0**-14


@pytest.mark.parametrize("seed", ["none", "7"])
def test_ranks_steps_and_runs_have_noise_of_their_own(seed: str) -> None:
    zeros = [{"w": torch.zeros(MANY)}]
    policy = from_spec(f"dp:test_seed={seed}")
    one = Simulation(policy, {"w": (MANY,)}, 1)
    noises = [one.step(zeros)[0]["w"] for _ in range(3)]
    # rank 1 alone: the other one is excluded
    noises.append(Simulation(policy, {"w": (MANY,)}, 2).step(zeros * 2, [0.0, 1.0])[0]["w"])
    for i, a in enumerate(noises):
        for b in noises[:i]:
            assert abs(float(a.double() @ b.double())) <= 5 * math.sqrt(MANY)


def test_secrets_are_neither_kept_nor_a_function_of_public_seeds() -> None:
    policy = from_spec("dp:norm=1,noise=1")
    copies = [policy, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), from_spec("dp:norm=1,noise=1")]
    assert policy.__dict__ == {"norm": 1, "noise": 1, "test_seed": None}
    noises = []
    for other in copies:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        simulation = Simulation(other, {"w": (100,)}, 1, seed=0)
        noises.append(simulation.step([{"w": torch.zeros(100)}])[0]["w"])
        assert simulation.stores[0].portable() == {}
    assert not any(torch.equal(noises[i], noises[j]) for i in range(4) for j in range(i))


def test_a_test_seed_repeats_itself() -> None:
    runs = []
    for seed in (3, 3, 4):
        simulation = Simulation(f"dp:test_seed={seed}", SHAPES, 2)
        runs.append([simulation.step(gradients(2, step))[1]["w"] for step in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_travels_unless_its_rank_is_excluded(bad: float) -> None:
    grads = gradients(3)
    grads[1]["long"][2000] = bad
    for mine in simulate("dp", grads):
        assert not mine["long"][2000].isfinite()
    assert all(t.isfinite().all() for mine in simulate("dp", grads, [1, 0, 1]) for t in mine.values())


def test_weights_options_and_what_it_says_it_is() -> None:
    with pytest.raises(WeightError, match="unequal weights no meaning"):
        simulate("dp", gradients(3), [1, 2, 1])
    for spec in ("dp:norm=0", "dp:norm=-1", "dp:noise=-0.1", "dp:norm=1e999", "dp:noise=1e999"):
        with pytest.raises(ConfigurationError, match=r"must be|finite"):
            from_spec(spec)
    policy = from_spec("dp")
    assert (policy.scope, policy.additive, policy.deterministic, policy.unequal_weights) == (
        "step",
        False,
        False,
        False,
    )
    simulation = Simulation(policy, {"w": (4096,)}, 4)
    simulation.step([{} for _ in range(4)])
    assert simulation.bytes_sent == [2 * 3 * 4096 * 4 // 4] * 4


def exact_delta(epsilon: float, mu: float) -> float:
    """Of T steps of deviation s with mu = sqrt(T) / s (Balle and Wang 2018, theorem 8)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("package", ["dp_accounting", "opacus"])
@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (4.0, 100), (20.0, 1000)])
def test_epsilon(package: str, noise: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never below the exact one, and for privacy loss distributions within 1 % (a thousandth in delta)."""
    with warnings.catch_warnings():  # theirs are not ours to mend
        warnings.simplefilter("ignore")
        pytest.importorskip(package)
        if package == "opacus":
            monkeypatch.setitem(sys.modules, "dp_accounting", None)
        found = DifferentiallyPrivate(noise=noise).epsilon(steps, delta=1e-5)
    mu = math.sqrt(steps) / noise
    assert exact_delta(found, mu) <= 1e-5 * (1 + 1e-6)
    slack = 0.99 if package == "dp_accounting" else 0.85  # Renyi's bound is looser
    assert exact_delta(slack * found, mu) > 1e-5


def test_epsilon_without_an_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        DifferentiallyPrivate().epsilon(10, 1e-5)


def test_what_epsilon_asks_the_accountants(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for both, as neither comes with the library."""
    asked = []

    class Account:
        def __init__(self) -> None:
            self.history: list[tuple[float, float, int]] = []

        def compose(self, event: object, count: int) -> None:
            asked.append(("dp_accounting", event, count))

        def get_epsilon(self, delta: float) -> float:
            asked.append((*self.history, delta))
            return 2.5

    accounting, pld = ModuleType("dp_accounting"), ModuleType("dp_accounting.pld")
    accounting.GaussianDpEvent = lambda noise: ("gaussian", noise)  # type: ignore[attr-defined]
    pld.PLDAccountant = Account  # type: ignore[attr-defined]
    opacus, accountants = ModuleType("opacus"), ModuleType("opacus.accountants")
    accountants.RDPAccountant = Account  # type: ignore[attr-defined]
    for module in (accounting, pld, opacus, accountants):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    policy = DifferentiallyPrivate(norm=3.0, noise=1.5)
    assert policy.epsilon(7, 1e-6) == 2.5
    assert asked == [("dp_accounting", ("gaussian", 1.5), 7), (1e-6,)]
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert policy.epsilon(7, 1e-6) == 2.5
    assert asked[2:] == [((1.5, 1.0, 7), 1e-6)]


def test_epsilon_at_its_ends() -> None:
    assert DifferentiallyPrivate().epsilon(0, 1e-5) == 0
    assert DifferentiallyPrivate(noise=0.0).epsilon(1, 1e-5) == math.inf
    for steps, delta in ((-1, 1e-5), (1, 0.0), (1, 1.0), (1, math.nan)):
        with pytest.raises(ConfigurationError, match="0 < delta < 1"):
            DifferentiallyPrivate().epsilon(steps, delta)
