"""topk, threshold, randomk: against formulas in float64, and by what their kernels promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, SpecError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.kernels import candidates, select, shuffle
from hvdbridge.kernels.select import Plan, count_of, largest
from hvdbridge.kernels.shuffle import round_keys, shuffled
from hvdbridge.policies import ErrorFeedback, RandomK, Threshold, TopK, from_spec
from hvdbridge.policy.bucket import Bucket, Layout, Ranks

SHAPES = {"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "fc.weight": (60, 40), "fc.bias": (40,), "scale": ()}
CPU = torch.device("cpu")
Grads = dict[str, Tensor]


def gradients(size: int, seed: int, dtype: torch.dtype = torch.float64, shapes: object = None) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    wanted = SHAPES if shapes is None else shapes
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in wanted.items()}  # type: ignore[attr-defined]
        for _ in range(size)
    ]


def top(p: np.ndarray, ratio: float) -> np.ndarray:
    """The formula: the ceil(ratio n) elements of largest magnitude, zeros elsewhere."""
    flat, kept = p.reshape(-1), np.zeros(p.size)
    chosen = np.argsort(-np.abs(flat), kind="stable")[: math.ceil(ratio * flat.size)]
    kept[chosen] = flat[chosen]
    return kept.reshape(p.shape)


def above(p: np.ndarray, ratio: float, limit: float) -> np.ndarray:
    kept = top(p, ratio)
    return np.where(np.abs(kept) >= limit, kept, 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ef", [True, False])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,select=exact", "threshold:value=1.5,ratio=0.1"])
def test_against_the_formula(spec: str, ef: bool, size: int) -> None:
    """Float64 gradients: 4 steps of at most N + 3 roundings of numbers below 32, 2^-53 each."""
    weights = [float(r + 1) for r in range(size)]
    simulation = Simulation(spec + ("" if ef else ",ef=false"), SHAPES, size)
    residual = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(size)]
    for step in range(4):
        grads = gradients(size, step)
        updates = simulation.step(grads, weights)
        for name in SHAPES:
            total = np.zeros(SHAPES[name])
            for rank in range(size):
                p = grads[rank][name].numpy() * (weights[rank] / sum(weights)) + residual[rank][name]
                kept = top(p, 0.05) if "topk" in spec else above(p, 0.1, 1.5 / size)
                total += kept
                if ef:
                    residual[rank][name] = p - kept
            assert np.abs(updates[0][name].numpy() - total).max() <= 4 * (size + 3) * 32 * 2.0**-53
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)
    assert any(np.abs(r).max() > 0 for r in residual[0].values()) == ef


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "threshold:value=0.5", "randomk:ratio=0.1"])
@pytest.mark.parametrize("size", [2, 3])
def test_feedback_telescopes(spec: str, size: int) -> None:
    """Updates plus final residuals sum to the inputs: float32, values below 16, T (N + 3) roundings."""
    steps, weights = 6, [float(r + 1) for r in range(size)]
    simulation = Simulation(spec, SHAPES, size)
    left = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    for step in range(steps):
        grads = gradients(size, step, torch.float32)
        updates = simulation.step(grads, weights)
        for name in SHAPES:
            left[name] += sum(w / sum(weights) * g[name].double() for w, g in zip(weights, grads, strict=True))
            left[name] -= updates[0][name].double()
    for name in SHAPES:
        residual = sum(store.portable()["residual"][name].double() for store in simulation.stores)
        assert (left[name] - residual).abs().max() <= steps * (size + 3) * 16 * 2.0**-24
    assert left["fc.weight"].abs().max() > 0.5


DISTRIBUTIONS = {
    "normal": lambda x: x,
    "heavy": lambda x: x.pow(5).mul(1e20),
    "light": lambda x: x.sign() * (1 + 1e-3 * x.abs()),
    "denormal": lambda x: x * 1e-42,
    "ascending": lambda x: x.abs().sort().values,
    "one block": lambda x: torch.cat([x[:8000] * 100, x[8000:]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", DISTRIBUTIONS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_a_sample_finds_what_a_search_finds(shape: str, ratio: float, dtype: torch.dtype) -> None:
    x = DISTRIBUTIONS[shape](torch.randn(300_000, generator=torch.Generator().manual_seed(1), dtype=dtype))
    layout = Layout({"w": (300_000,)})
    k = count_of(ratio, 300_000)
    plan = Plan.of(layout, {"w": k}, CPU)
    assert plan.large[0].sample_size
    indices, values = largest(x, plan)
    assert torch.equal(values, x[indices])
    limit = x.abs().sort(descending=True).values[k - 1]
    found = values[values != 0].abs()
    assert 0.9 * k <= len(found) <= k
    assert len(set(indices[values != 0].tolist())) == len(found)
    assert (found >= limit).all() or (found > limit).sum() >= 0.9 * k


def test_few_and_equal_elements() -> None:
    """Fewer than k are not zero: all of them are found. All are equal: k of them."""
    n, k = 100_000, 1000
    plan = Plan.of(Layout({"w": (n,)}), {"w": k}, CPU)
    few = torch.zeros(n)
    few[torch.arange(0, n, 997)] = -3.0
    indices, values = largest(few, plan)
    assert torch.equal(torch.zeros(n).index_add_(0, indices, values), few)
    assert (largest(torch.full((n,), 2.0), plan)[1] != 0).sum() == k
    assert not largest(torch.zeros(n), plan)[1].any()
    some = torch.full((n,), 0.5)
    some[-900:] = 2.0  # fewer than k stand out, and the threshold is that of all the others
    assert (largest(some, plan)[1] == 2.0).sum() == 900


def test_indices_that_no_int32_holds_are_refused() -> None:
    """By the size: no such tensor is here."""
    meta = torch.device("meta")
    for numel, refused in ((2**31 - 1, False), (2**31 + 5, True)):
        layout = Layout({"w": (numel - 7,), "bias": (7,)})
        plan = Plan.of(layout, {"w": 3, "bias": 1}, meta)
        flat = torch.empty(numel, device="meta")
        if refused:
            with pytest.raises(ConfigurationError, match=r"bucket of 2,147,483,653 elements: .*bucket_mb"):
                largest(flat, plan)
        else:
            assert largest(flat, plan)[0].shape == (4,)
    plan = Plan.of(Layout({"w": (2**31 + 5,)}), {"w": 3}, meta)
    with pytest.raises(ConfigurationError, match="a parameter of 2,147,483,653 elements: "):
        shuffled(plan, round_keys(0), meta)


def chance(counts: range, m: int, p: float) -> float:
    """That one of ``counts`` is Binomial(m, p), by its terms."""
    fixed = math.lgamma(m + 1)
    logs = (
        fixed - math.lgamma(i + 1) - math.lgamma(m - i + 1) + i * math.log(p) + (m - i) * math.log1p(-p) for i in counts
    )
    return sum(map(math.exp, logs))


def test_a_sample_is_large_enough() -> None:
    """The chance that a candidate is lacking, and that there are more than there is room for: of as many larger ones
    fewer than the tail were sampled then."""
    for n in (40_000, 100_000, 1_000_000, 10_000_000):
        for ratio in (1e-4, 1e-3, 0.01, 0.05, 0.1):
            part = candidates.large_param(0, n, count_of(ratio, n), 0, exact=False)
            if part.sample_size:
                m = part.sample_size
                assert chance(range(part.tail, min(m, part.tail + 60) + 1), m, part.count / n) < 1e-5, (n, ratio)
                assert part.count <= part.capacity < n, (n, ratio)
                assert chance(range(part.tail), m, part.capacity / n) < 1e-8, (n, ratio)


@pytest.mark.parametrize("exact", [False, True])
def test_both_ways_to_search_agree(exact: bool) -> None:
    """Without ties the way for devices chooses what the way for the CPU does; empty slots come where zeros are."""
    sizes = [1, 3, 7, 500, 501, 900, 20_000, 40_000, 70_000, 0, 2]
    layout = Layout({f"p{i}": (size,) for i, size in enumerate(sizes)})
    plan = Plan.of(layout, {n: count_of(0.02, s) for n, s in layout.sizes.items()}, CPU, exact)
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(5))
    x[layout.offsets["p5"] :][:895] = 0  # fewer than the 18 wanted
    x[layout.offsets["p8"] + 11] = math.nan
    x[layout.offsets["p3"] + 11] = -math.inf
    bits, mask = select._bits(x)
    results = []
    for indices, empty in (select._largest(bits, plan, mask), select._largest_on_cpu(bits, plan, mask)):
        chosen = torch.zeros(layout.numel, dtype=torch.bool)
        chosen[indices[~empty]] = True
        results.append(chosen)
        assert not indices[empty].any()
        slot = 0
        for name, count in plan.counts.items():  # each parameter's slots hold its own elements
            mine = indices[slot : slot + count][~empty[slot : slot + count]]
            assert ((mine >= layout.offsets[name]) & (mine < layout.offsets[name] + layout.sizes[name])).all()
            slot += count
    assert torch.equal(*results)
    assert results[0].sum() == plan.total - 13
    assert results[0][layout.offsets["p8"] + 11]
    assert results[0][layout.offsets["p3"] + 11]


@pytest.mark.parametrize(
    "spec", ["topk", "topk:select=exact", "threshold", "randomk", "dgc", "oktopk", "topk:ef=false"]
)
def test_nothing_looks_at_values(spec: str) -> None:
    """On tensors without values the requests are those of a real run."""

    def shapes(device: str) -> list[str]:
        policy = from_spec(spec)
        sizes = {"a": (300, 300), "b": (1000,), "c": ()}
        layout = Layout(sizes)
        state = policy.init({n: torch.zeros(s, device=device) for n, s in sizes.items()})
        flow = policy.aggregate(Bucket(torch.zeros(layout.numel, device=device), layout, ranks=Ranks(0, 4)), state)
        asked, answer = [], None
        try:
            while True:
                request = next(flow) if answer is None else flow.send(answer)
                asked.append(request.signature())
                gathered = request.kind == "AllGather"
                answer = request.tensor.new_zeros((4, *request.tensor.shape)) if gathered else request.tensor
        except StopIteration:
            return asked

    assert shapes("meta") == shapes("cpu")


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1", "topk:ratio=0.1,ef=false", "threshold:value=0.3", "randomk:ratio=0.1"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_travels_and_does_no_harm(spec: str, bad: float) -> None:
    simulation = Simulation(spec, SHAPES, 3)
    simulation.step(gradients(3, 0))
    before = [store.portable() for store in simulation.stores]
    grads = gradients(3, 1)
    grads[1]["fc.weight"][7, 7] = bad
    updates = simulation.step(grads)
    for mine in updates:
        assert not mine["fc.weight"].isfinite().all()
        assert all(mine[name].isfinite().all() for name in SHAPES if name != "fc.weight")
    for old, store in zip(before, simulation.stores, strict=True):
        if "residual" in old:
            assert torch.equal(old["residual"]["fc.weight"], store.portable()["residual"]["fc.weight"])
    assert all(t.isfinite().all() for t in simulation.step(gradients(3, 2))[0].values())


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "threshold:value=1.0", "randomk:ratio=0.05"])
def test_boundaries_and_order_do_not_matter(spec: str) -> None:
    names = list(SHAPES)
    runs = [
        Simulation(spec, SHAPES, 2),
        Simulation(spec, SHAPES, 2, buckets=[names[:2], names[2:3], names[3:]]),
        Simulation(spec, SHAPES, 2, buckets=[names[::-1]]),
    ]
    for step in range(3):
        one, *others = [run.step(gradients(2, step), [1, 3])[0] for run in runs]
        assert all(torch.equal(one[n], other[n]) for other in others for n in SHAPES)


def test_a_rank_of_weight_zero_is_absent() -> None:
    for spec in ("topk:ratio=0.05", "topk:ratio=0.05,ef=false", "randomk:ratio=0.05"):
        three, two = Simulation(spec, SHAPES, 3), Simulation(spec, SHAPES, 2)
        for step in range(3):
            grads = gradients(3, step)
            grads[1] = {n: torch.full_like(t, math.nan) for n, t in grads[1].items()}
            a, b = three.step(grads, [1, 0, 3]), two.step([grads[0], grads[2]], [1, 3])
            assert all(torch.equal(a[0][n], b[0][n]) for n in SHAPES)


def test_contraction() -> None:
    """|p - C(p)|^2 <= (1 - k/n) |p|^2: always for topk, on average for randomk."""
    grads = [{"w": torch.randn(4000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}]
    p = grads[0]["w"]
    whole = p.square().sum().item()
    assert (p - simulate("topk:ratio=0.1,ef=false", grads)[0]["w"]).square().sum() <= 0.9 * whole
    simulation = Simulation("randomk:ratio=0.1,ef=false", {"w": p}, 1)
    lost = np.array([(p - simulation.step(grads)[0]["w"]).square().sum().item() / whole for _ in range(300)])
    # The mean is 1 - k/n = 0.9; five of its standard errors (they are below 0.1 % here).
    assert abs(lost.mean() - 0.9) < 5 * lost.std(ddof=1) / math.sqrt(300)
    assert lost.std(ddof=1) / math.sqrt(300) < 1e-3


def test_randomk_is_unbiased_where_it_says_so() -> None:
    """Mean over T seeds: each element's error is within 5.5 standard errors, sigma = |p| sqrt((n/k - 1) / T)."""
    shapes = {"w": (97,), "v": (7, 5)}
    grads = gradients(1, 3, shapes=shapes)
    mean, trials = grads[0], 1000
    simulation = Simulation("randomk:ratio=0.2,unbiased=true,ef=false", shapes, 1)
    total = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    for _ in range(trials):
        update = simulation.step(grads)[0]
        for name in shapes:
            total[name] += update[name]
    for name in shapes:
        n = mean[name].numel()
        sigma = mean[name].abs() * math.sqrt((n / count_of(0.2, n) - 1) / trials)
        assert ((total[name] / trials - mean[name]).abs() <= 5.5 * sigma + 1e-6 * mean[name].abs()).all()


@pytest.mark.parametrize("size", [3 * 2**29, 2**31 - 1])
def test_the_shuffle_of_as_many_as_an_int32_counts(size: int) -> None:
    """The last slots, whose numbers and pivots together are more; by arithmetic that is wide enough."""
    count, draw = 2_000, torch.Generator().manual_seed(0)
    owner, first = torch.zeros(count, dtype=torch.int64), torch.tensor([count - size], dtype=torch.int32)
    drawn = torch.randint(size, (2, shuffle.ROUNDS + 1, 1), generator=draw, dtype=torch.int32)
    drawn[0, 0] = size - 1
    expected = (torch.arange(size - count, size) + drawn[0, 0]) % size
    for pivot, salt in zip(*drawn[:, 1:], strict=True):
        other = (pivot - expected) % size
        swap = torch.maximum(expected, other).int().add_(salt).mul_(-1640531535)
        expected = torch.where(swap.bitwise_xor_(swap >> 15).mul_(-2048144789) < 0, other, expected)
    found = shuffle.permuted(owner, torch.tensor([size], dtype=torch.int32), first, *drawn)
    assert torch.equal(found.long(), expected)


def test_shuffled_elements_are_distinct_uniform_and_uncorrelated() -> None:
    layout = Layout({"a": (31,), "b": (64,), "c": (5000,), "d": (1,)})
    plan = Plan.of(layout, {"a": 31, "b": 8, "c": 1000, "d": 1}, CPU)
    pairs, trials = np.zeros((64, 64)), 2000
    for seed in range(trials):
        chosen = shuffled(plan, round_keys(seed), CPU)
        a, b, c = chosen[:31], chosen[31:39] - 31, chosen[39:1039] - 95
        if seed < 50:
            assert sorted(a.tolist()) == list(range(31))
            assert len(set(c.tolist())) == 1000
            assert c.min() >= 0
            assert c.max() < 5000
        pairs[np.ix_(b, b)] += 1
    single = np.diag(pairs)
    # Binomial(T, 1/8), and for pairs Binomial(T, 8 7 / 64 63): six deviations.
    assert np.abs(single - trials / 8).max() < 6 * math.sqrt(trials / 8 * 7 / 8)
    both = pairs[np.triu_indices(64, 1)]
    q = 56 / (64 * 63)
    assert np.abs(both - trials * q).max() < 6 * math.sqrt(trials * q * (1 - q))
    assert both.std() < 1.2 * math.sqrt(trials * q * (1 - q))


def test_bytes_and_sizes_of_messages() -> None:
    k = sum(math.ceil(0.05 * torch.Size(s).numel()) for s in SHAPES.values())
    for spec, wanted in (("topk:ratio=0.05", 3 * 8 * k), ("randomk:ratio=0.05", 2 * 3 * 4 * k // 4)):
        simulation = Simulation(spec, SHAPES, 4)
        simulation.step(gradients(4, 0, torch.float32))
        assert simulation.bytes_sent == [wanted] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", ["topk:ratio=0.3", "topk:ratio=0.3,ef=false", "randomk:ratio=0.3", "threshold"])
def test_types_and_odd_shapes(spec: str, dtype: torch.dtype) -> None:
    shapes = {"empty": (0, 3), "scalar": (), "one": (1,), "w": (6, 7), "zero": (5,), "huge": (9,)}
    grads = gradients(2, 0, dtype, shapes)
    for g in grads:
        g["zero"].zero_()
        if dtype != torch.float16:
            g["huge"].mul_(1e30)
    updates = simulate(spec, grads)
    for name in shapes:
        assert updates[0][name].dtype == dtype
        assert torch.equal(updates[0][name], updates[1][name])
        assert updates[0][name].isfinite().all()
    assert updates[0]["w"].any()
    only_empty = simulate(spec, [{"e": torch.zeros(0, dtype=dtype)}] * 2)
    assert only_empty[0]["e"].numel() == 0


def test_resumed_runs_are_the_same_run() -> None:
    whole, first, second = (Simulation("topk:ratio=0.05", SHAPES, 2) for _ in range(3))
    for step in range(4):
        expected = whole.step(gradients(2, step))
        if step < 2:
            first.step(gradients(2, step))
    second.step(gradients(2, 9))
    for old, new in zip(first.stores, second.stores, strict=True):
        new.load(old.portable())
    for step in range(2, 4):
        second.steps = step
        found = second.step(gradients(2, step))
    assert all(torch.equal(found[0][n], expected[0][n]) for n in SHAPES)


def test_options() -> None:
    assert from_spec("topk:ratio=0.02") == TopK(0.02)
    assert ErrorFeedback(TopK(ef=False)).inner == TopK(ef=False)
    for text in ("topk:ratio=0", "topk:ratio=1.5", "threshold:value=0", "threshold:ratio=0", "randomk:ratio=-1"):
        with pytest.raises(SpecError, match=r"must be > 0"):
            from_spec(text)
    with pytest.raises(SpecError, match="one of 'sampled', 'exact'"):
        from_spec("topk:select=fast")
    with pytest.raises(ConfigurationError, match="unbiased=true needs ef=false"):
        RandomK(unbiased=True)
    with pytest.raises(ConfigurationError, match="ef=false"):
        ErrorFeedback(Threshold())
    assert not RandomK().deterministic
    assert TopK().deterministic
