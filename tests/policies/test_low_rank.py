"""powersgd against references written from the papers in float64 numpy, and against PyTorch's own hooks.

Tolerances: products of float32 matrices of up to 300 columns err by some 2^-24 sqrt(300) = 1e-6 of their norms. What
that does to a basis grows with the condition of P (below 100 here, for normal random matrices of rank <= 4), and so
from step to step: 1e-4 of the largest gradient in a step, times the number of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels import native
from hvdbridge.kernels.orthogonal import orthonormal
from hvdbridge.policies import PowerSGD, bytes_per_step, from_spec
from hvdbridge.policies.matrices import BATCHED_NUMEL
from hvdbridge.policies.wrappers import statistics

SIZES = [1, 2, 3, 4, 8]
SHAPES = {
    "conv": (12, 3, 3, 3), "a": (40, 30), "b": (40, 30), "bias": (41,), "large": (260, 300), "empty": (0, 5),
    "scalar": (), "c": (40, 30), "thin": (3, 50),
}  # fmt: skip
COMPRESSED = {"conv": (12, 27), "a": (40, 30), "b": (40, 30), "large": (260, 300), "c": (40, 30)}
"""At rank 2 and the default rate: ``thin`` has 150 elements, and 2 (3 + 50) 2 > 150."""
Array = NDArray[np.float64]
Grads = dict[str, Tensor]


def gradients(size: int, seed: int = 0, shapes: Mapping[str, Sequence[int]] = SHAPES) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(tuple(s), generator=generator) for n, s in shapes.items()} for _ in range(size)]


def array(tensor: Tensor) -> Array:
    found: Array = tensor.double().numpy()
    return found


def alike(updates: Sequence[Grads]) -> bool:
    return all(torch.equal(mine[n], updates[0][n]) for mine in updates for n in updates[0])


def shares(grads: Sequence[Grads], weights: Sequence[float], name: str) -> list[Array]:
    return [w / math.fsum(weights) * array(g[name]) for w, g in zip(weights, grads, strict=True)]


def basis(p: Array) -> Array:
    """The Q of QR with a positive diagonal in R, as Gram-Schmidt makes it."""
    q, r = np.linalg.qr(p)
    result: Array = q * np.sign(np.diag(r))
    return result


class Reference:
    """Vogels 2019, algorithms 1 and 2, or Zhang 2023, algorithm 2, for one parameter."""

    def __init__(self, shape: tuple[int, int], size: int, q: Array, p: Array | None) -> None:
        self.errors = [np.zeros(shape) for _ in range(size)]
        self.q, self.p = q, p

    def step(self, parts: Sequence[Array], number: int, alternate: bool, ef: bool) -> Array:
        m = [part.reshape(e.shape) + (e if ef else 0) for part, e in zip(parts, self.errors, strict=True)]
        if not alternate:
            left = basis(sum(x @ self.q for x in m))
            mine = [x.T @ left for x in m]
            self.q = sum(mine)
            sent, update = [left @ y.T for y in mine], left @ self.q.T
        elif number % 2 == 0:
            right = basis(self.q)
            mine = [x @ right for x in m]
            self.p = sum(mine)
            sent, update = [y @ right.T for y in mine], self.p @ right.T
        else:
            assert self.p is not None
            left = basis(self.p)
            mine = [x.T @ left for x in m]
            self.q = sum(mine)
            sent, update = [left @ y.T for y in mine], left @ self.q.T
        self.errors = [x - s for x, s in zip(m, sent, strict=True)]
        return update


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,ef=false", "powersgd:rank=2,alternate=true"])
def test_against_the_papers(spec: str, size: int) -> None:
    weights = [float(1 + rank % 3) for rank in range(size)]
    alternate, ef = "alternate" in spec, "ef=false" not in spec
    simulation = Simulation(
        spec, SHAPES, size, buckets=[["scalar", "b", "bias", "large"], ["a", "conv", "c", "empty", "thin"]]
    )
    state = simulation.stores[0].portable()
    slots = state["inner"] if ef else state
    assert set(slots["q"]) == set(COMPRESSED)
    references = {
        n: Reference(s, size, array(slots["q"][n]).T, array(slots["p"][n]).T if alternate else None)
        for n, s in COMPRESSED.items()
    }
    for step in range(5):
        grads = gradients(size, step)
        updates = simulation.step(grads, weights)
        assert alike(updates)
        for name in SHAPES:
            parts = shares(grads, weights, name)
            if name in references:
                expected = references[name].step(parts, step, alternate, ef).reshape(SHAPES[name])
            else:
                expected = np.sum(parts, axis=0)
            assert np.abs(array(updates[0][name]) - expected).max(initial=0) < 4e-4 * (step + 1), (name, step)
    if ef:
        for rank, store in enumerate(simulation.stores):
            residual = store.portable()["residual"]
            for name in SHAPES:
                kept = references[name].errors[rank].reshape(SHAPES[name]) if name in references else 0.0
                assert np.abs(array(residual[name]) - kept).max(initial=0) < 2e-3, name


def test_what_is_of_low_rank_arrives_as_it_is() -> None:
    """The sum of 2 ranks' matrices of rank 1 is of rank 2: P spans it, and the projection changes nothing."""
    generator = torch.Generator().manual_seed(0)
    grads = [{"w": torch.outer(*(torch.randn(n, generator=generator) for n in (60, 50)))} for _ in range(2)]
    for spec in ("powersgd:rank=2,ef=false", "powersgd:rank=4,ef=false"):
        simulation = Simulation(spec, {"w": (60, 50)}, 2)
        for _ in range(3):
            update = simulation.step(grads)[0]["w"]
            assert torch.allclose(update, (grads[0]["w"] + grads[1]["w"]) / 2, atol=2e-5)


@pytest.mark.parametrize("spec", ["powersgd:rank=3,ef=false", "powersgd:rank=3,ef=false,alternate=true"])
def test_power_iteration_finds_the_best_approximation(spec: str) -> None:
    """At a constant gradient, warm start converges to the truncated SVD: by (s_4 / s_3)^2 = 1/4 in a step."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(50, 40, generator=generator), full_matrices=False)
    s = 2.0 ** -torch.arange(40.0)
    gradient = {"w": u * s @ v}
    best = float(s[3:].norm())
    simulation, errors = Simulation(spec, {"w": (50, 40)}, 1), []
    for _ in range(24):
        errors.append(float((simulation.step([gradient])[0]["w"] - gradient["w"]).norm()))
    assert errors[0] > 1.05 * best
    assert best * 0.999 < errors[-1] < 1.01 * best
    cold = Simulation("powersgd:rank=3,ef=false,warm_start=false", {"w": (50, 40)}, 1)
    for _ in range(24):
        assert float((cold.step([gradient])[0]["w"] - gradient["w"]).norm()) > 1.05 * best


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,alternate=true", "powersgd:rank=2,batched=true"])
def test_it_contracts_and_telescopes(spec: str) -> None:
    """A projection is never longer than what it projects; updates plus the residual are the inputs."""
    simulation = Simulation(spec, SHAPES, 3)
    balance = {n: np.zeros(s) for n, s in SHAPES.items()}
    left = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(3)]
    for step in range(6):
        grads = gradients(3, step)
        update = simulation.step(grads, [1, 2, 3])[0]
        p = [{n: w / 6 * g[n] + e[n] for n in SHAPES} for w, g, e in zip([1, 2, 3], grads, left, strict=True)]
        left = [store.portable()["residual"] for store in simulation.stores]
        for mine, kept in zip(p, left, strict=True):
            whole = [torch.cat([t.reshape(-1) for t in tensors.values()]).norm() for tensors in (mine, kept)]
            assert whole[1] <= whole[0] * (1 + 1e-5)
        for name in SHAPES:
            balance[name] += sum(shares(grads, [1, 2, 3], name)) - array(update[name])
    for name in SHAPES:
        # 6 steps of N + 3 = 6 roundings of values below 16.
        assert np.abs(balance[name] - sum(array(e[name]) for e in left)).max(initial=0) < 6 * 6 * 16 * 2.0**-24, name


def test_each_step_has_random_numbers_of_its_own_without_warm_start() -> None:
    grads = gradients(2)
    one = Simulation("powersgd:rank=2,warm_start=false,ef=false", SHAPES, 2)
    other = Simulation("powersgd:rank=2,warm_start=false,ef=false", SHAPES, 2, buckets=[[n] for n in SHAPES])
    first, second = one.step(grads)[0], one.step(grads)[0]
    assert all(torch.equal(first[n], t) for n, t in other.step(grads)[0].items())
    assert all(not torch.allclose(first[n], second[n], atol=1e-2) for n in COMPRESSED)
    # Random numbers of a parameter, not of its shape: a and b differ even where their gradients do not.
    same = simulate("powersgd:rank=2,warm_start=false,ef=false", [dict.fromkeys(("a", "b"), grads[0]["a"])])[0]
    assert not torch.allclose(same["a"], same["b"], atol=1e-2)
    assert not from_spec("powersgd:warm_start=false").deterministic
    assert from_spec("powersgd").deterministic


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bucket_boundaries_do_not_matter_at_two_ranks(
    dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, wherever a matrix lies in memory: large ones and small ones, alone and in batches."""
    if kernels == "torch":
        monkeypatch.setattr(native, "_load", lambda: None)
    shapes = {f"w{i}": (33, 35) for i in range(5)} | {"odd": (3,), "x": (64, 64), "y": (257, 259), "z": (64, 64)}
    names = list(shapes)
    assert 257 * 259 > BATCHED_NUMEL > 64 * 64
    splits = [
        [names],
        [[n] for n in names],
        [names[::-1]],
        [["odd", *names[3:5]], [n for n in names if n not in ("odd", *names[3:5])]],
    ]
    for spec in ("powersgd:rank=3", "powersgd:rank=1,alternate=true", "powersgd:rank=4,ef=false"):
        runs = []
        for buckets in splits:
            typed = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
            simulation = Simulation(spec, typed, 2, buckets=buckets)
            for step in range(3):
                given = [{n: g.to(dtype) for n, g in each.items()} for each in gradients(2, step, shapes)]
                updates = simulation.step(given, [1, 2])[0]
            runs.append(updates)
        for other in runs[1:]:
            assert all(torch.equal(other[n], runs[0][n]) for n in shapes), spec


# PyTorch's hooks


class OneBucket:
    """What the hooks ask of a GradBucket."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        self.views = [
            v.view(t.shape) for v, t in zip(self.flat.split([t.numel() for t in tensors]), tensors, strict=True)
        ]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


LEFT: list[dist.ProcessGroup | None] = []
"""Groups that were destroyed, until exit.

The hook's last callback, which refers to the group, is freed in Gloo's own thread, at some time after ``wait()``. Where
that is the last reference, the thread joins itself and the process aborts (torch 2.13; in 17 of 48 runs under load).
"""


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    LEFT.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("powersgd:rank=2", {"matrix_approximation_rank": 2}),
        ("powersgd:rank=3", {"matrix_approximation_rank": 3, "batch_tensors_with_same_shape": True}),
        ("powersgd:rank=1,min_rate=20.0", {"min_compression_rate": 20}),
        ("powersgd:rank=2,epsilon=0.5",
         {"matrix_approximation_rank": 2, "orthogonalization_epsilon": 0.5}),
        ("powersgd:rank=2,ef=false", {"matrix_approximation_rank": 2, "use_error_feedback": False}),
        ("powersgd:rank=2,batched=true", {"matrix_approximation_rank": 2, "min_compression_rate": 0}),
        ("powersgd:rank=1,batched=true", {"min_compression_rate": 0}),
    ],
)  # fmt: skip
def test_it_is_what_pytorch_does(spec: str, options: dict[str, Any], alone: None) -> None:
    """From the same Q: on one rank both mean the same by error feedback.

    ``batched_powerSGD_hook`` itself fails in every call, as of torch 2.13 (it hands a matrix to what takes batches of
    them); by its documentation it is the other hook on one square matrix, and that is what is compared with here.
    """
    shapes = {n: s for n, s in SHAPES.items() if n not in ("empty", "scalar")}
    simulation = Simulation(spec, shapes, 1)
    policy = simulation.policy
    assert isinstance(policy, PowerSGD)
    theirs = PowerSGDState(None, start_powerSGD_iter=2, **options)
    theirs.iter = 2
    state = simulation.stores[0].portable()
    q = (state["inner"] if policy.ef else state)["q"]
    numel = sum(math.prod(s) for s in shapes.values())
    side = math.isqrt(numel - 1) + 1
    if policy.batched:
        start = torch.cat(list(q.values()), dim=1)[:, :side].T.reshape(-1)
        theirs.p_memory_dict[0] = torch.empty(side * policy.rank)
    else:
        # The hook goes through shapes in the order of their first matrix.
        order = sorted(q, key=lambda name: [math.prod(shapes[n]) for n in shapes].index(math.prod(shapes[name])))
        start = torch.cat([q[name].T.reshape(-1) for name in order])
        theirs.p_memory_dict[0] = torch.empty(sum(policy.rank * shapes[name][0] for name in q))
    theirs.q_memory_dict[0] = start.clone()
    for step in range(4):
        grads = gradients(1, step, shapes)
        update = simulation.step(grads)[0]
        tensors = list(grads[0].values())
        if policy.batched:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            tensors = [torch.nn.functional.pad(flat, (0, side * side - numel)).view(side, side)]
        bucket = OneBucket(tensors)
        powerSGD_hook(theirs, bucket).wait()
        if policy.batched:
            theirs.error_dict[0][numel:] = 0  # the padding has no gradient, so we keep no error of it
        found = torch.cat([update[name].reshape(-1) for name in shapes])
        assert (found - bucket.flat[:numel]).abs().max() < 4e-4 * (step + 1), step


# Decisions, bytes, bad and odd input


def test_what_is_compressed_and_what_is_sent() -> None:
    params = {n: torch.empty(s) for n, s in SHAPES.items()}
    thin = sum(2 * (n + m) for n, m in COMPRESSED.values())
    rest = sum(math.prod(s) for n, s in SHAPES.items() if n not in COMPRESSED)
    numel = sum(math.prod(s) for s in SHAPES.values())
    for size in (2, 3):
        simulation = Simulation("powersgd:rank=2", SHAPES, size)
        simulation.step(gradients(size))
        predicted = 2 * (size - 1) * 4 * (thin + rest) / size
        assert abs(simulation.bytes_sent[0] - predicted) < 2
        assert bytes_per_step(from_spec("powersgd:rank=2"), params, size) == simulation.bytes_sent[0]
        simulation = Simulation("powersgd:rank=2,alternate=true", SHAPES, size)
        for step in range(2):
            simulation.step(gradients(size, step))
        assert abs(simulation.bytes_sent[0] - 2 * (size - 1) * 4 * (thin + 2 * rest) / size) < 3
    assert PowerSGD(rank=2).compression_rate(params) == pytest.approx(numel / (thin + rest))
    assert PowerSGD(rank=2, alternate=True).compression_rate(params) == pytest.approx(numel / (thin / 2 + rest))
    side = math.isqrt(numel - 1) + 1
    assert PowerSGD(rank=2, batched=True).compression_rate(params) == pytest.approx(numel / (4 * side))
    store = simulation.stores[0].portable()
    rate = pytest.approx(numel / (thin / 2 + rest))
    assert statistics(simulation.policy, params, store) == {"compression_rate": rate}
    assert PowerSGD(min_rate=1e9).compression_rate(params) == 1


@pytest.mark.parametrize("shapes", [{"bias": (5,)}, {"empty": (0,)}, {"scalar": ()}])
@pytest.mark.parametrize("spec", ["powersgd", "powersgd:alternate=true", "powersgd:batched=true"])
def test_nothing_to_compress(spec: str, shapes: dict[str, tuple[int, ...]]) -> None:
    grads = gradients(2, 0, shapes)
    for name, update in simulate(spec, grads)[0].items():
        assert "batched" in spec or torch.equal(update, grads[0][name] / 2 + grads[1][name] / 2)
        assert update.shape == shapes[name]


def test_a_rank_beyond_the_matrix_is_cut_off() -> None:
    """Where compression is forced, ``min(n, m)`` columns are the whole matrix."""
    grads = gradients(2, 0, {"w": (5, 9), "v": (7, 4)})
    for spec in ("powersgd:rank=100,min_rate=0.001", "powersgd:rank=100,min_rate=0.001,alternate=true"):
        for name, update in simulate(spec, grads)[0].items():
            mean = (grads[0][name] + grads[1][name]) / 2
            if "alternate" in spec and grads[0][name].shape[0] < grads[0][name].shape[1]:
                assert (update - mean).norm() < mean.norm()  # P Q' with 5 of the 9 columns of a square Q
            else:
                assert torch.allclose(update, mean, atol=1e-5)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,alternate=true", "powersgd:rank=2,batched=true"])
def test_a_zero_gradient_does_no_harm(spec: str) -> None:
    """Nothing becomes NaN, and no column is lost: what comes later is compressed as if zeros had never been."""
    with_zeros, without = Simulation(spec, SHAPES, 2), Simulation(spec, SHAPES, 2)
    zeros = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(2)]
    for _ in range(2):
        assert not any(t.count_nonzero() for t in with_zeros.step(zeros)[0].values())
    for step in range(2):
        a, b = with_zeros.step(gradients(2, step))[0], without.step(gradients(2, step))[0]
        assert all(torch.equal(a[n], b[n]) for n in SHAPES)


def test_a_gradient_of_low_rank_costs_no_column() -> None:
    """After steps of rank 1, rank 2 is still there."""
    generator = torch.Generator().manual_seed(0)
    simulation = Simulation("powersgd:rank=2,ef=false", {"w": (60, 50)}, 1)
    for _ in range(3):
        gradient = torch.outer(torch.randn(60, generator=generator), torch.randn(50, generator=generator))
        assert torch.allclose(simulation.step([{"w": gradient}])[0]["w"], gradient, atol=1e-4)
    last = sum(
        torch.outer(torch.randn(60, generator=generator), torch.randn(50, generator=generator)) for _ in range(2)
    )
    assert isinstance(last, Tensor)
    assert torch.allclose(simulation.step([{"w": last}])[0]["w"], last, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,alternate=true"])
def test_non_finite_travels_and_the_state_stays(spec: str, bad: float) -> None:
    simulation = Simulation(spec, SHAPES, 3)
    for step in range(2):
        simulation.step(gradients(3, step))
        before = [store.portable() for store in simulation.stores]
        grads = gradients(3, step + 10)
        grads[1]["b"][3, 4] = bad
        for mine in simulation.step(grads):
            assert not mine["b"].isfinite().all()
            assert all(mine[n].isfinite().all() for n in SHAPES if n != "b")
        for store, old in zip(simulation.stores, before, strict=True):
            new = store.portable()
            assert torch.equal(new["residual"]["b"], old["residual"]["b"])
            assert all(torch.equal(new["inner"][slot]["b"], old["inner"][slot]["b"]) for slot in new["inner"])
            assert not torch.equal(new["residual"]["a"], old["residual"]["a"])
    assert all(t.isfinite().all() for t in simulation.step(gradients(3, 9))[0].values())


@pytest.mark.parametrize("at", [("a", 3), ("b", 5), ("b", 60), ("b", 99), ("c", 0)])
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("alternate", ["true", "false"])
def test_one_bad_number_in_a_square_passes(alternate: str, step: int, at: tuple[str, int]) -> None:
    """A row of the square lies anywhere in the parameters, and its factors are kept under other names."""
    shapes = {"a": (100,), "b": (100,), "c": (5,)}
    simulation = Simulation(f"powersgd:batched=true,alternate={alternate}", shapes, 2)
    for now in range(6):
        grads = gradients(2, now, shapes)
        if now == step:
            grads[0][at[0]][at[1]] = math.nan
        finite = [all(t.isfinite().all() for t in mine.values()) for mine in simulation.step(grads)]
        assert finite == [now != step] * 2
        state = simulation.stores[0].portable()["inner"]
        assert all(t.isfinite().all() for leaf in state.values() for t in leaf.values())


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_gradients_are_as_good_as_others(scale: float) -> None:
    usual, scaled = Simulation("powersgd:rank=2", SHAPES, 2), Simulation("powersgd:rank=2", SHAPES, 2)
    for step in range(4):
        grads = gradients(2, step)
        a = usual.step(grads)[0]
        b = scaled.step([{n: scale * g for n, g in mine.items()} for mine in grads])[0]
        assert all(torch.allclose(a[n], b[n] / scale, atol=4e-4 * (step + 1)) for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,ef=false", "powersgd:rank=2,batched=true"])
def test_other_types_of_gradients(spec: str, dtype: torch.dtype) -> None:
    """They are computed in float32 (float64): rounded only when they come in and when they go out, and by weights."""
    grads = [{n: t.to(dtype) for n, t in mine.items()} for mine in gradients(1)]
    expected = simulate(spec, [{n: t.float() for n, t in mine.items()} for mine in grads])
    updates = simulate(spec, grads)
    for name in SHAPES:
        assert updates[0][name].dtype == dtype
        assert torch.allclose(updates[0][name].float(), expected[0][name], rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_bad_options() -> None:
    for spec, text in (
        ("powersgd:rank=0", "rank=0 must be >= 1"), ("powersgd:min_rate=0.0", "> 0"),
        ("powersgd:epsilon=-1.0", ">= 0"), ("powersgd:alternate=true,warm_start=false", "factor of the step before"),
        ("ef(powersgd)", "cannot wrap PowerSGD"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=text):
            from_spec(spec)


# The basis


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_gram_schmidt(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(b, rank, n, generator=generator) for b, n in ((1, 7), (3, 100), (2, 2000))]
    for batch, found in zip(batches, orthonormal(batches), strict=True):
        for a, q in zip(batch, found, strict=True):
            assert np.abs(array(q).T - basis(array(a).T)).max() < 2e-6  # condition below 100 at 7 of 7
    whole = orthonormal([torch.cat([batches[1], batches[1][:1]])])[0]
    assert torch.equal(whole[:3], orthonormal(batches)[1])  # whatever is beside it


def test_the_bits_of_a_basis_do_not_depend_on_the_order_of_sums() -> None:
    """Sums are exact, so the rows of a matrix may come in any order: no BLAS can make a difference."""
    generator = torch.Generator().manual_seed(0)
    for n in (5, 33, 1000, 20_001):
        columns = torch.randn(2, 4, n, generator=generator) * torch.randn(n, generator=generator).exp()
        order = torch.randperm(n, generator=generator)
        assert torch.equal(orthonormal([columns[..., order].contiguous()])[0], orthonormal([columns])[0][..., order])


def test_columns_in_the_span_of_others_vanish() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, generator=generator)
    found = orthonormal([torch.stack([a, 3 * a, b, a + b, torch.zeros(50)])[None]])[0][0]
    assert [bool(row.any()) for row in found] == [True, False, True, False, False]
    gram = array(found[[0, 2]]) @ array(found[[0, 2]]).T
    assert np.abs(gram - np.eye(2)).max() < 1e-6
