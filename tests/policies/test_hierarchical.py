"""Hierarchical: the inner policy among nodes, on their means."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, Unsupported, WeightError
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.policies import Hierarchical, Mean, bytes_per_step, from_spec
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout, Ranks
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter

SHAPES = {"conv.weight": (4, 3, 3), "fc.weight": (40, 30), "fc.bias": (41,), "empty": (0, 2), "scale": ()}
PLACES = [(1, 1), (2, 2), (2, 1), (4, 2), (8, 4), (6, 2), (6, 3), (3, 2), (5, 2), (7, 3)]
Grads = dict[str, Tensor]


def gradients(size: int, seed: int) -> list[Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(size)]


def nodes_of(size: int, local_size: int) -> list[list[int]]:
    return [list(range(first, min(first + local_size, size))) for first in range(0, size, local_size)]


def of_nodes(grads: list[Grads], weights: list[float], local_size: int) -> tuple[list[Grads], list[float]]:
    """The nodes' gradients in float32 as the ranks of a node add them up, and the nodes' weights."""
    means, totals = [], []
    for ranks in nodes_of(len(grads), local_size):
        total = sum(weights[r] for r in ranks)
        mean = {n: torch.zeros(s) for n, s in SHAPES.items()}
        for i, r in enumerate(r for r in ranks):
            for name in SHAPES:
                part = grads[r][name] * (weights[r] / total) if weights[r] else torch.zeros(SHAPES[name])
                mean[name] = part if i == 0 else mean[name] + part
        means.append(mean)
        totals.append(total)
    return means, totals


@pytest.mark.parametrize(("size", "local_size"), PLACES)
def test_the_weighted_mean(size: int, local_size: int) -> None:
    """Two scalings and N additions of numbers below 6 in float32."""
    simulation = Simulation(
        "hierarchical", SHAPES, size, local_size, buckets=[["fc.bias", "conv.weight"], ["scale", "fc.weight", "empty"]]
    )
    plans = [None, [float(1 + rank % 3) for rank in range(size)]]
    if size > 2:
        plans.append([0.0, *[1.0] * (size - 1)])
        plans.append([0.0] * local_size + [2.0] * (size - local_size) if size > local_size else None)
    for step, weights in enumerate(plans):
        grads = gradients(size, step)
        given = weights or [1.0] * size
        if weights and not weights[0]:
            grads[0]["fc.bias"].fill_(float("nan"))
        updates = simulation.step(grads, weights)
        for name in SHAPES:
            want = sum(w / sum(given) * g[name].double().numpy() for w, g in zip(given, grads, strict=True) if w)
            assert np.abs(updates[0][name].double().numpy() - want).max(initial=0.0) <= (size + 3) * 6 * 2.0**-24
            assert all(torch.equal(mine[name], updates[0][name]) for mine in updates)


INNERS = [
    "mean:exact=true", "bf16", "ef(bf16)", "ef(fp16)", "sum", "clip(mean)", "delayed(bf16)",
    "partition(1d=mean, rest=ef(bf16))",
]  # fmt: skip


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("size", "local_size"), [(4, 2), (6, 3), (5, 2), (2, 2)])
def test_the_bits_of_the_inner_policy_among_nodes(inner: str, size: int, local_size: int) -> None:
    whole = Simulation(f"hierarchical({inner})", SHAPES, size, local_size)
    nodes = nodes_of(size, local_size)
    among = Simulation(inner, SHAPES, len(nodes))
    for step in range(3):
        grads, weights = gradients(size, step), [1.0] * size if step < 2 else [1.0 + r for r in range(size)]
        means, totals = of_nodes(grads, weights, local_size)
        updates = whole.step(grads, weights)
        want = among.step(means, totals)[0]
        for name in SHAPES:
            assert all(torch.equal(mine[name], want[name]) for mine in updates), name
    for number, ranks in enumerate(nodes):
        theirs = str(among.stores[number].portable())
        assert {str(whole.stores[rank].portable()["inner"]) for rank in ranks} == {theirs}, "state is the node's"


@pytest.mark.parametrize("inner", ["mean", "mean:exact=true", "bf16", "ef(bf16)"])
def test_bytes_between_nodes_are_those_of_one_rank_per_node(inner: str) -> None:
    """2 nodes of 2: each rank sends half of what a rank of the inner policy at 2 ranks sends; paddings of a few
    elements per message aside."""
    whole, among = Simulation(f"hierarchical({inner})", SHAPES, 4, 2), Simulation(inner, SHAPES, 2)
    whole.step(gradients(4, 0))
    among.step(gradients(2, 0))
    for node in ((0, 1), (2, 3)):
        sent = sum(whole.bytes_by_group[rank]["cross"] for rank in node)
        assert 0 <= sent - among.bytes_sent[0] <= 4 * 8
    assert all(counted["world"] == 0 for counted in whole.bytes_by_group)
    flat = Simulation(inner, SHAPES, 4)
    flat.step(gradients(4, 0))
    # A ring over 4 ranks crosses each way once, so a node sends what one of its ranks does: 3/2 of the vector.
    assert sum(whole.bytes_by_group[rank]["cross"] for rank in (0, 1)) < 0.7 * flat.bytes_sent[0]


Body = Callable[[Bucket], Generator[Collective, Tensor, Tensor]]


@dataclass(frozen=True)
class Does(Policy):
    body: Body

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from self.body(bucket)))


SEEN: list[Tensor] = []


def every_kind(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
    """All requests, of odd sizes and several types; what came back is noted."""
    rank, size = bucket.rank, bucket.size
    base = torch.arange(7) + 10 * rank
    rows = torch.arange(size * 6).view(size, 3, 2) + 100 * rank
    found = []
    for dtype in (torch.float32, torch.int8, torch.float64):
        for request in (
            AllReduce(base.to(dtype)),
            AllReduce(base.to(dtype), "max"),
            AllReduce(torch.tensor(3.0 + rank)),
            AllReduce(torch.zeros(0)),
            AllGather(base.view(7, 1).to(dtype)),
            AllGather(torch.tensor(rank)),
            AllGather(torch.zeros(0, 2)),
            AllToAll(rows.to(dtype)),
            AllToAll(torch.zeros(size, 0)),
            ReduceScatter(rows.to(dtype)),
            ReduceScatter(torch.full((size,), 1.0 + rank)),
            Broadcast(base.to(dtype), root=size - 1),
        ):
            found.append((yield request))
    SEEN.append(torch.cat([torch.cat([torch.tensor(t.shape), t.flatten().double()]) for t in found]))
    return bucket.buffer


@pytest.mark.parametrize(("size", "local_size"), PLACES)
def test_every_request_is_answered_as_among_nodes(size: int, local_size: int) -> None:
    SEEN.clear()
    among = len(nodes_of(size, local_size))
    simulate(Does(every_kind), [{"w": torch.zeros(1)}] * among)
    want = list(SEEN)
    SEEN.clear()
    Simulation(Hierarchical(Does(every_kind)), {"w": (1,)}, size, local_size).step([{"w": torch.zeros(1)}] * size)
    assert len(SEEN) == size
    for rank, mine in enumerate(SEEN):  # flows end in the order of ranks
        assert torch.equal(mine, want[rank // local_size])


def test_an_inner_policy_knows_nodes_only() -> None:
    seen: list[tuple[int, int, tuple[float, ...] | None]] = []

    def look(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        seen.append((bucket.rank, bucket.size, bucket.weights))
        return (yield AllReduce(bucket.buffer))

    def ask(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        return (yield AllReduce(bucket.buffer, group="node"))

    grads = [{"w": torch.ones(3)}] * 5
    Simulation(Hierarchical(Does(look)), {"w": (3,)}, 4, 2).step(grads[:4])
    Simulation(Hierarchical(Does(look)), {"w": (3,)}, 4, 2).step(grads[:4], [1, 2, 3, 0])
    Simulation(Hierarchical(Does(look)), {"w": (3,)}, 5, 2).step(grads)
    assert seen[:8:2] == [(0, 2, None), (1, 2, None), (0, 2, (3.0, 3.0)), (1, 2, (3.0, 3.0))]
    assert seen[8::2] == [(0, 3, (2.0, 2.0, 1.0)), (1, 3, (2.0, 2.0, 1.0)), (2, 3, (2.0, 2.0, 1.0))]
    with pytest.raises(Unsupported, match="one group, the nodes"):
        Simulation(Hierarchical(Does(ask)), {"w": (3,)}, 4, 2).step(grads[:4])
    with pytest.raises(Unsupported, match="group 'node' is not known"):
        next(Hierarchical().aggregate(Bucket(torch.ones(2), Layout({"w": (2,)}), ranks=Ranks(0, 2)), {"inner": {}}))


@dataclass(frozen=True)
class Equal(Mean):
    unequal_weights = False


def test_nodes_of_unequal_weight_where_that_means_nothing() -> None:
    policy, grads = Hierarchical(Equal()), [{"w": torch.ones(3)}] * 5
    Simulation(policy, {"w": (3,)}, 4, 2).step(grads[:4])
    Simulation(policy, {"w": (3,)}, 4, 2).step(grads[:4], [1, 1, 0, 0])
    for size, weights in ((5, None), (4, [1, 1, 1, 0])):
        with pytest.raises(WeightError, match="Equal gives unequal weights no meaning"):
            Simulation(policy, {"w": (3,)}, size, 2).step(grads[:size], weights)


def test_a_number_of_nodes_that_the_inner_policy_is_not_for() -> None:
    with pytest.raises(ConfigurationError, match=r"Krum: f=1 faulty ranks need .* there are 4"):
        Simulation("hierarchical(krum)", SHAPES, 8, 2)
    with pytest.raises(ConfigurationError, match="there are 4"):
        bytes_per_step(from_spec("hierarchical(krum)"), SHAPES, 8, local_size=2)
    Simulation("hierarchical(krum)", SHAPES, 10, 2)
    from_spec("hierarchical(krum)").check_size(8)  # on how many nodes is not known


def test_after_the_step_nodes_average_as_ranks_do() -> None:
    """Within a node parameters are the same, so the average of nodes is that of ranks."""
    for weights in (None, [1.0, 2.0, 3.0, 4.0]):
        simulation = Simulation("hierarchical(local_sgd:every=2)", SHAPES, 4, 2)
        assert simulation.policy.replicas == "drift"
        params = [{n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(4)]
        for step in range(2):
            updates = simulation.step(gradients(4, step), weights)
            assert all(torch.equal(updates[0][n], updates[1][n]) for n in SHAPES), "the gradient of the node"
            assert not torch.equal(updates[0]["fc.bias"], updates[2]["fc.bias"])
            params = simulation.after_step(
                [{n: p[n] - u[n] for n in SHAPES} for p, u in zip(params, updates, strict=True)]
            )
        for name in SHAPES:
            assert all(torch.equal(p[name], params[0][name]) for p in params)
            given = weights or [1.0] * 4
            want = np.zeros(SHAPES[name])
            for step in range(2):
                want -= sum(
                    w / sum(given) * g[name].double().numpy() for w, g in zip(given, gradients(4, step), strict=True)
                )
            assert np.abs(params[0][name].double().numpy() - want).max(initial=0.0) <= 12 * 8 * 2.0**-24


def test_it_takes_the_facts_of_its_inner_policy() -> None:
    assert from_spec("hierarchical(clip)").scope == "step"
    assert not Hierarchical(Equal()).unequal_weights
    assert not from_spec("hierarchical(mean)").additive
