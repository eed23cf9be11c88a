"""Simulation: its own arithmetic, its checks, and where errors surface."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hvdbridge.errors import CollectiveMismatch, ConfigurationError, Unsupported, WeightError
from hvdbridge.execution.simulation import Simulation, execute, simulate
from hvdbridge.policy.base import Aggregated, Flow, Policy, State
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter

Body = Callable[[Bucket], Generator[Collective, Tensor, Tensor]]


@dataclass(frozen=True)
class Does(Policy):
    """Whatever the test says."""

    body: Body

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from self.body(bucket)))


def ones(size: int) -> list[dict[str, Tensor]]:
    return [{"w": torch.full((2,), float(rank))} for rank in range(size)]


def run(body: Body, size: int, local_size: int | None = None) -> list[list[float]]:
    updates = Simulation(Does(body), {"w": (2,)}, size, local_size).step(ones(size))
    return [mine["w"].tolist() for mine in updates]


def test_every_collective_and_group() -> None:
    def reduce(group: str) -> Body:
        def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
            return (yield AllReduce(bucket.buffer, group=group))

        return body

    assert [row[0] for row in run(reduce("world"), 4)] == [6, 6, 6, 6]
    assert [row[0] for row in run(reduce("node"), 4, 2)] == [1, 1, 5, 5]
    assert [row[0] for row in run(reduce("cross"), 4, 2)] == [2, 4, 2, 4]
    assert [row[0] for row in run(reduce("node"), 5, 2)] == [1, 1, 5, 5, 4]
    assert [row[0] for row in run(reduce("cross"), 5, 2)] == [6, 4, 6, 4, 6]
    assert [row[0] for row in run(reduce("ranks:0,3|1,2"), 4)] == [3, 3, 3, 3]
    assert [row[0] for row in run(reduce("ranks:0|1,2,3"), 4)] == [0, 6, 6, 6]


def test_answers() -> None:
    rows = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])]
    assert execute([AllReduce(t, "max") for t in rows])[0].tolist() == [[5, 6], [7, 8]]
    assert execute([AllReduce(t, "product") for t in rows])[1].tolist() == [[5, 12], [21, 32]]
    assert execute([AllReduce(t > 2, "min") for t in rows])[1].tolist() == [[False, False], [True, True]]
    assert execute([AllGather(t) for t in rows])[1].shape == (2, 2, 2)
    assert [t.tolist() for t in execute([AllToAll(t) for t in rows])] == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert [t.tolist() for t in execute([ReduceScatter(t) for t in rows])] == [[6, 8], [10, 12]]
    assert [t.tolist() for t in execute([Broadcast(t, root=1) for t in rows])] == [[[5, 6], [7, 8]]] * 2
    with pytest.raises(Unsupported, match="2 ranks need 2 rows"):
        execute([AllToAll(torch.zeros(3)), AllToAll(torch.zeros(3))])


def test_no_rank_sees_another_ranks_memory() -> None:
    def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        answer = yield AllReduce(bucket.buffer)
        answer += bucket.rank
        gathered = yield AllGather(answer.clone())
        gathered += bucket.rank
        return (yield Broadcast(gathered[0].clone())) + answer * 0

    assert run(body, 3) == [[3.0, 3.0]] * 3


def test_reductions_run_left_to_right() -> None:
    values = [1e8, 1.0, -1e8]
    grads = [{"w": torch.tensor([v])} for v in values]
    assert simulate("sum", grads)[2]["w"].item() == ((torch.tensor(1e8) + 1.0) - 1e8).item()


def test_ranks_that_disagree_are_named() -> None:
    def shapes(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        return (yield AllReduce(bucket.buffer if bucket.rank != 1 else bucket.buffer[:1]))

    def ends(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        if bucket.rank == 2:
            return bucket.buffer
        return (yield AllReduce(bucket.buffer))

    def groups(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        return (yield AllReduce(bucket.buffer, group="world" if bucket.rank else "node"))

    with pytest.raises(CollectiveMismatch, match=r"ranks \[0, 2\]: AllReduce\[2\].*\n.*ranks \[1\]: AllReduce\[1\]"):
        run(shapes, 3)
    with pytest.raises(CollectiveMismatch, match=r"ranks \[2\]: nothing"):
        run(ends, 3)
    with pytest.raises(CollectiveMismatch, match=r"ranks \[0\]: .*group=node"):
        run(groups, 3)


def test_errors_show_the_policys_line() -> None:
    def raises(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        yield AllReduce(bucket.buffer)
        raise ZeroDivisionError

    def asks_nonsense(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        return (yield AllToAll(bucket.buffer))

    for body, kind in ((raises, ZeroDivisionError), (asks_nonsense, Unsupported)):
        with pytest.raises(kind) as caught:
            run(body, 3)
        assert body.__name__ in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_unknown_groups_are_refused() -> None:
    def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        return (yield AllReduce(bucket.buffer, group="rack"))

    with pytest.raises(Unsupported, match="known: world, node, cross"):
        run(body, 2)


def test_weights() -> None:
    simulation = Simulation("ef(bf16)", {"w": (2,)}, 2)
    grads = [{"w": torch.tensor([1.001, 2.0])}, {"w": torch.tensor([3.0, 4.003])}]
    simulation.step(grads)
    before = [str(store.portable()) for store in simulation.stores]
    assert [mine["w"].tolist() for mine in simulation.step(grads, [0, 0])] == [[0.0, 0.0]] * 2
    assert simulation.skipped
    assert [str(store.portable()) for store in simulation.stores] == before
    simulation.step(grads, [0, 1])
    assert not simulation.skipped
    for bad in ([-1, 1], [math.nan, 1], [math.inf, 1], [1], [1, 1, 1], [1e308, 1e308]):
        with pytest.raises(WeightError):
            simulation.step(grads, bad)


def test_missing_gradients_are_zeros() -> None:
    simulation = Simulation("mean", {"w": (2,), "b": (1,)}, 2)
    updates = simulation.step([{"w": torch.ones(2)}, {"w": None, "b": torch.ones(1)}])
    assert updates[0]["w"].tolist() == [0.5, 0.5]
    assert updates[1]["b"].tolist() == [0.5]
    assert simulate("mean", [{"w": torch.ones(2)}, {}])[1]["w"].tolist() == [0.5, 0.5]


def test_inputs_are_left_alone() -> None:
    grads = [{"w": torch.ones(2)}, {"w": torch.ones(2, requires_grad=True)}]
    updates = simulate("sum", grads, [1, 3])
    assert [g["w"].tolist() for g in grads] == [[1.0, 1.0]] * 2
    assert not updates[0]["w"].requires_grad


def test_layouts_of_memory_do_not_matter() -> None:
    image = torch.randn(2, 3, 4, 4)
    grads = [{"w": image.to(memory_format=torch.channels_last), "v": image.transpose(0, 3)} for _ in range(2)]
    updates = simulate("mean", grads)[0]
    assert torch.equal(updates["w"], image)
    assert torch.equal(updates["v"], image.transpose(0, 3))


def test_types_are_never_mixed_in_a_bucket() -> None:
    params = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2), "c": torch.zeros(1, dtype=torch.bfloat16)}
    seen: list[tuple[tuple[str, ...], torch.dtype]] = []

    def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        if bucket.rank == 0:
            seen.append((bucket.layout.names, bucket.buffer.dtype))
        return (yield AllReduce(bucket.buffer))

    updates = Simulation(Does(body), params, 2).step([params, params])
    assert seen == [(("a", "c"), torch.bfloat16), (("b",), torch.float32)]
    assert list(updates[0]) == ["a", "b", "c"]


@dataclass(frozen=True)
class Whole(Does):
    scope = "step"


def test_scope_step_sees_one_bucket_of_everything() -> None:
    seen: list[tuple[str, ...]] = []

    def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        seen.append(bucket.layout.names)
        return (yield AllReduce(bucket.buffer))

    params = {"a": (2,), "b": (3,), "c": (1,)}
    Simulation(Whole(body), params, 1, buckets=[["c"], ["a", "b"]]).step([{}])
    assert seen == [("a", "b", "c")]


def test_bytes_are_counted_per_rank() -> None:
    def body(bucket: Bucket) -> Generator[Collective, Tensor, Tensor]:
        yield AllGather(bucket.buffer.clone(), group="node")
        return (yield AllReduce(bucket.buffer))

    simulation = Simulation(Does(body), {"w": (2,)}, 3, local_size=2)
    simulation.step(ones(3))
    assert simulation.bytes_sent == [8 + 10, 8 + 10, 10]


def test_bad_arguments() -> None:
    for make in (
        lambda: Simulation("mean", {"w": (2,)}, 0),
        lambda: Simulation("mean", {"w": (2,)}, 2, local_size=0),
        lambda: Simulation("mean", {"w": (2,)}, 2, buckets=[["w"], ["w"]]),
        lambda: Simulation("mean", {"w": (2,)}, 2).step(ones(3)),
        lambda: Simulation("mean", {"w": (3,)}, 2).step(ones(2)),
        lambda: Simulation("mean", {"w": torch.zeros(2).double()}, 2).step(ones(2)),
        lambda: Simulation("mean", {"v": (2,)}, 2).step(ones(2)),
        lambda: Simulation("maen", {"w": (2,)}, 2),
    ):
        with pytest.raises(ConfigurationError):
            make()
