"""Flows that run as graphs: the same bits as flows that run as they are, for each policy, on a CPU.

A tape (``tape.py``) takes the place of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape import Tape, as_on_a_device
from torch import Tensor

from hvdbridge.errors import StepError, Unsupported
from hvdbridge.execution.graphs import FlowGraphs, run_in_users_graph
from hvdbridge.execution.scheduler import ThreadScheduler, Traffic
from hvdbridge.execution.simulation import Simulation
from hvdbridge.execution.state_store import leaves
from hvdbridge.execution.trace import bits
from hvdbridge.policy.base import Aggregated, Early, Flow, Policy, State, advance, finish
from hvdbridge.policy.bucket import Bucket, Layout, Views, scale
from hvdbridge.policy.collectives import AllReduce, Collective, relay
from hvdbridge.reduction.aggregator import copy_if_needed
from hvdbridge.training.runtime import session
from hvdbridge.training.synchronizer import GradientSynchronizer
from policies.policies import CASES, SHAPES, Case

SIZE = 3
STEPS = 12
BUCKETS = [["conv.weight", "fc.weight", "fc.bias", "empty"], ["scale", "one", "wide.weight"]]


class GraphSimulation(Simulation):
    """A simulation whose flows run as graphs, on buffers that keep their addresses as those of DDP do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.graphs: list[FlowGraphs] = []
        self.buffers: dict[tuple[int, int], Tensor] = {}
        self.told: list[list[Any]] = []
        for rank, store in enumerate(self.stores):
            store.in_place = True
            own: list[Any] = []  # what this rank tells the others: compared after the step, since ranks run in turns
            self.told.append(own)
            control = SimpleNamespace(rank=rank, all_gather_object=lambda row, own=own: own.append(row[0]) or [row])
            scheduler = SimpleNamespace(traffic=Traffic(), check_failure=lambda: None)
            graphs: Any = (scheduler, None, control, torch.device("cpu"), lambda: Tape)
            self.graphs.append(FlowGraphs(*graphs))

    def _aggregate(self, layout: Layout, index: int, grads_per_rank: Sequence[Any]) -> Iterator[Views]:
        flows: list[Any] = []
        early: dict[int, Tensor] = {}
        for rank, grads in enumerate(grads_per_rank):
            flat = torch.cat([grads[name].reshape(-1) for name in layout.names])
            buffer = self.buffers.setdefault((rank, index), torch.empty_like(flat)).copy_(flat)
            bucket = replace(self._bucket(buffer, layout, index, self.steps, rank), last=index == len(BUCKETS) - 1)

            def run(bucket: Bucket, rank: int = rank) -> Any:
                flow = self.policy.aggregate(bucket, self.stores[rank].part(layout))
                result = yield from advance(flow)
                if isinstance(result, Early):
                    bucket.decide(lambda step, _: step)
                    early[rank] = result.update.clone()
                    result = yield from finish(flow)
                update = self.stores[rank].merge(layout, result.state, result.update)
                return copy_if_needed(update, bucket.buffer)

            def count(request: Collective, rank: int = rank) -> Any:
                traffic = self.graphs[rank]._scheduler.traffic
                traffic.collectives += 1
                traffic.bytes_sent += request.bytes_sent(self.size)
                return (yield request)

            flows.append(relay(self._run(rank, bucket, run), count))
        results = self._lockstep(flows)
        assert all(told == self.told[0] for told in self.told), "ranks agree, on all ranks as often"
        for rank, (_, update) in enumerate(results):
            yield Views(layout, early.get(rank, update))  # type: ignore[arg-type]

    def _run(self, rank: int, bucket: Bucket, run: Any) -> Any:
        return self.graphs[rank].run(bucket, self.stores[rank], run)


def gradients(step: int, size: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(size)]


def weights_of(step: int, size: int, policy: Policy) -> list[float]:
    if not policy.unequal_weights:
        return [1.0] * size
    weights = [1.0 + (step * rank) % 4 for rank in range(size)]
    if step % 4 == 3 and size > 3:
        weights[1] = 0.0
    return weights


def compare(policy: Policy | str, size: int, weighted: bool, steps: int = STEPS, **options: Any) -> GraphSimulation:
    """Run some steps with graphs and without, and compare updates, states and bytes."""
    plain, graphs = (kind(policy, SHAPES, size, **options) for kind in (Simulation, GraphSimulation))
    for step in range(steps):
        weights = weights_of(step, size, plain.policy) if weighted else None
        pairs = [simulation.step(gradients(step, size), weights) for simulation in (plain, graphs)]
        for rank, (a, b) in enumerate(zip(*pairs, strict=True)):
            for name in SHAPES:
                assert torch.equal(a[name], b[name]), (step, rank, name)
    for one, other in zip(plain.stores, graphs.stores, strict=True):
        for (path, a), (_, b) in zip(leaves(one.whole()), leaves(other.whole()), strict=True):
            for name in a:
                assert torch.equal(a[name], b[name]), (path, name)
    return graphs


EAGER = {"hierarchical": "is of a group", "dp": "None", "delayed": "None"}
"""Policies whose flows run as they are -> the reason; None: their decisions differ in each step."""


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_device(monkeypatch.setattr)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_policy_gives_the_same_bits(case: Case, weighted: bool) -> None:
    size = max(SIZE + weighted, case.min_size)
    simulation = compare(case.policy, size, weighted, local_size=case.local_size, buckets=BUCKETS)
    refused = next((reason for start, reason in EAGER.items() if case.spec.startswith(start)), None)
    if refused is None:
        assert simulation.graphs[0].captured >= 1, simulation.graphs[0].off
    else:
        assert (simulation.graphs[0].captured, refused in str(simulation.graphs[0].off)) == (0, True)


# -- stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "stages"),
    [("bf16", 1), ("powersgd:rank=2,alternate=true", 2), ("warmup(mean(exact=true), int8, steps=4)", 2)],
)
def test_each_stage_has_a_graph_of_its_own(spec: str, stages: int) -> None:
    simulation = compare(spec, SIZE, weighted=False, steps=14, buckets=BUCKETS)
    assert {graphs.captured for graphs in simulation.graphs} == {2 * stages}


def test_weights_are_numbers_unless_the_flow_decides_by_them() -> None:
    assert compare("int8", 4, weighted=True, steps=20, buckets=BUCKETS).graphs[0].captured == 2, (
        "not where rank 1 has 0"
    )
    assert compare("median:f=0", SIZE, weighted=False, buckets=BUCKETS).graphs[0].captured == 2


def test_a_flow_whose_decisions_differ_in_each_step_runs_as_it_is() -> None:
    simulation = compare("dp:norm=1.0,noise=1.0,test_seed=7", SIZE, weighted=False, steps=24)
    assert (simulation.graphs[0].captured, simulation.graphs[0].off) == (0, None)


# -- what cannot be captured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Custom(Policy):
    """A user's policy with one line of its own."""

    kind: str = ""

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        factor = 1.0
        group = "world"
        match self.kind:
            case "step":
                factor = 1.0 / (1 + bucket.step)
            case "step in a copy":
                factor = 0.5 if replace(bucket, needs_sent=True).step % 2 else 1.0
            case "weights":
                factor = 2.0 if bucket.weights is None else 1.0
            case "host":
                factor = float(bucket.buffer.abs().max())
            case "group":
                group = "node"
            case "table":
                bucket.integers(lambda step: [step] * 100_000)
            case "growing list":
                bucket.integers(lambda step: [step] * (1 + step // 7))
            case "own step":
                later = bucket.decide(lambda step, _: step // 8)
                own = replace(bucket, step=later)
                assert own.decide(lambda step, _: step) == later
                assert own.integers(lambda step: [step]) == [later]
                factor = 1.0 + own.decide(lambda step, _: step)
            case "former fields":
                with pytest.warns(DeprecationWarning, match="Bucket takes rank"):
                    factor = 1.0 + replace(bucket, rank=1).rank
            case "own weights":
                own = replace(bucket, ranks=replace(bucket.ranks, weights=None))
                assert own.decide(lambda _, weights: weights is None)
                factor = 1.0 / own.share
            case "counts":
                COUNT.append(0)
                factor = float(len(COUNT))
            case "decisions":
                if not isinstance(bucket.step, int):
                    bucket.decide(lambda *_: "one more when it is captured")
            case "late table":
                COUNT.append(0)
                bucket.layout.derive(("late", len(COUNT)), lambda: torch.ones(3))
        return Aggregated((yield AllReduce(bucket.weighted().buffer * factor, group=group)))


COUNT: list[int] = []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("step", "reads Bucket.step or the ranks' weights"),
        ("step in a copy", "reads Bucket.step or the ranks' weights"),
        ("weights", "reads Bucket.step or the ranks' weights"),
        ("former fields", "reads Bucket.step or the ranks' weights"),
        ("host", "the host reads a tensor"),
        ("group", "group=node is of a group"),
        ("table", "more than 16384 numbers"),
        ("late table", "needs a table ('late', "),
        ("decisions", "other decisions in the same stage"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_and_says_why(
    kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    COUNT.clear()
    simulation = compare(Custom(kind), SIZE, weighted=False)
    assert {graphs.captured for graphs in simulation.graphs} == {0}
    assert all(graphs.off is not None for graphs in simulation.graphs)
    assert len(caplog.records) == 1, "rank 0 alone"
    assert reason in caplog.text


def test_a_graph_that_gives_other_results_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    COUNT.clear()
    simulation = GraphSimulation(Custom("counts"), SHAPES, SIZE)
    for step in range(5):
        simulation.step(gradients(step, SIZE))
    assert "gives other results" in caplog.text
    assert {graphs.captured for graphs in simulation.graphs} == {0}


def test_the_reason_of_one_rank_is_that_of_all() -> None:
    simulation = GraphSimulation("bf16", SHAPES, SIZE)
    for graphs in simulation.graphs:
        graphs._control.all_gather_object = lambda row: [(row[0], None), (row[0], "another driver"), row]  # type: ignore
    for step in range(5):
        simulation.step(gradients(step, SIZE))
    assert {graphs.off for graphs in simulation.graphs} == {"rank 1: another driver"}
    assert {graphs.captured for graphs in simulation.graphs} == {0}


def test_ranks_that_decide_unlike_fail_before_they_wait_for_each_other() -> None:
    simulation = GraphSimulation("bf16", SHAPES, SIZE)
    for graphs in simulation.graphs:
        graphs._control.all_gather_object = lambda row: [row, ((row[0][0], "[True]"), None)]  # type: ignore
    for step in range(2):
        simulation.step(gradients(step, SIZE))
    with pytest.raises(StepError, match=r"different decisions: .*'\[True\]'"):
        simulation.step(gradients(2, SIZE))


def test_a_list_whose_length_changes_within_a_stage_is_an_error() -> None:
    simulation = GraphSimulation(Custom("growing list"), SHAPES, SIZE)
    for step in range(7):
        simulation.step(gradients(step, SIZE))
    with pytest.raises(StepError, match="gives 2 integers in step 7, and 1 in an earlier step"):
        simulation.step(gradients(7, SIZE))


@pytest.mark.parametrize("kind", ["own step", "own weights"])
def test_a_step_or_ranks_of_the_policys_own_count_in_the_place_of_the_buckets(kind: str) -> None:
    simulation = compare(Custom(kind), 4, weighted=True, steps=20)
    assert (simulation.graphs[0].captured > 0, simulation.graphs[0].off) == (True, None)


# -- what moves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["ef(bf16)", "onebit", "dgc:ratio=0.05", "powersgd:rank=2"])
def test_a_state_that_is_loaded_or_rescaled_keeps_its_addresses(spec: str) -> None:
    plain, graphs = Simulation(spec, SHAPES, 2), GraphSimulation(spec, SHAPES, 2)
    saved = [store.portable() for store in plain.stores]
    for step in range(14):
        pairs = [simulation.step(gradients(step, 2)) for simulation in (plain, graphs)]
        assert all(torch.equal(a[name], b[name]) for a, b in zip(*pairs, strict=True) for name in SHAPES), step
        if step == 7:
            saved = [store.portable() for store in graphs.stores]
        for simulation in (plain, graphs):
            for rank, store in enumerate(simulation.stores):
                if step == 9:
                    store.rescale(0.5)
                elif step == 11:
                    store.load(saved, rank, 2)
    assert graphs.graphs[0].captured > 0


def test_gradients_that_move_on_one_rank_are_copied() -> None:
    simulation = GraphSimulation("int8", SHAPES, SIZE)
    for step in range(8):
        updates = simulation.step(gradients(step, SIZE))
        simulation.buffers.pop((1, 0), None) if step == 5 else None
    assert all(torch.equal(updates[0][name], updates[1][name]) for name in SHAPES)
    assert {graphs.captured for graphs in simulation.graphs} == {1}


def test_other_buckets_begin_anew() -> None:
    simulation = GraphSimulation("ef(bf16)", SHAPES, 2)
    for step in range(14):
        simulation.step(gradients(step, 2))
        if step == 6:
            assert {graphs.captured for graphs in simulation.graphs} == {1}
            whole = simulation._layouts[0]
            simulation._layouts = [Layout({n: whole.shapes[n] for n in names}, *simulation._model) for names in BUCKETS]
            simulation.buffers.clear()
        if step == 7:
            assert {graphs.captured for graphs in simulation.graphs} == {0}
    assert {graphs.captured for graphs in simulation.graphs} == {2}


@dataclass(frozen=True)
class Swaps(Policy):
    def init(self, params: Any) -> State:
        starts = {"a": 1.0, "b": 2.0}
        return {key: {name: torch.full_like(p, start) for name, p in params.items()} for key, start in starts.items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        update = yield AllReduce(bucket.weighted().buffer)
        return Aggregated(update, state={"a": state["b"], "b": state["a"]})


def test_leaves_that_a_flow_exchanges_are_exchanged_in_place() -> None:
    assert compare(Swaps(), 2, weighted=False, steps=7).graphs[0].captured == 1


@dataclass(frozen=True)
class SwapsParts(Swaps):
    """As :class:`Swaps`, but leaves return as views at an offset, and only of some parameters."""

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        update = yield AllReduce(bucket.weighted().buffer)
        last = bucket.layout.names[-2:]
        return Aggregated(update, state={"a": {n: state["b"][n] for n in last}, "b": {n: state["a"][n] for n in last}})


def test_parts_of_leaves_that_a_flow_exchanges_are_exchanged_in_place() -> None:
    assert compare(SwapsParts(), 2, weighted=False, steps=7).graphs[0].captured == 1


@dataclass(frozen=True)
class Held(Policy):
    """Delivers what the state holds, which the step's sum replaces."""

    def init(self, params: Any) -> State:
        return {"held": {name: torch.zeros_like(p) for name, p in params.items()}}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        new = yield AllReduce(bucket.weighted().buffer.clone())
        return Aggregated(state["held"].flat, state={"held": Views(bucket.layout, new)})


def test_an_update_that_the_state_holds_is_delivered_before_it_is_replaced() -> None:
    assert compare(Held(), 2, weighted=False, steps=7).graphs[0].captured == 1


def test_bytes_and_collectives_are_those_of_one_flow() -> None:
    simulation = GraphSimulation("int8", SHAPES, 2)
    counted: list[Traffic] = []
    for step in range(7):
        for graphs in simulation.graphs:
            graphs._scheduler.traffic = Traffic()
        simulation.step(gradients(step, 2))
        counted.append(simulation.graphs[0]._scheduler.traffic)
    assert {traffic.collectives for traffic in counted} == {2}
    assert len({traffic.bytes_sent for traffic in counted}) == 1


def test_the_bits_of_a_number_on_the_device_are_those_on_the_host() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
        for factor in (1 / 3, 0.1, 5e-8):
            number = torch.tensor([bits(factor)]).view(torch.float64)[0]
            assert torch.equal(scale(values.clone(), factor), scale(values.clone(), number)), (dtype, factor)


# -- the user's own graph --------------------------------------------------------------------------------


class UsersGraphSimulation(GraphSimulation):
    """A simulation whose third step is captured, as by ``torch.cuda.graph``; later steps replay it."""

    tapes: dict[int, Tape]

    def _run(self, rank: int, bucket: Bucket, run: Any) -> Any:
        self.tapes = getattr(self, "tapes", {})
        if self.steps < 2:
            yield from run(bucket)
        elif self.steps == 2:
            tape = self.tapes[rank] = Tape()
            with tape.capture():
                yield from relay(run_in_users_graph(bucket, run), tape.answer)
        else:
            yield from self.tapes[rank].replay()
        return bucket.buffer


@pytest.mark.parametrize("spec", ["mean", "bf16", "ef(bf16)", "topk:ratio=0.1", "clip(ef(bf16))", "efsign", "onebit"])
def test_a_step_that_the_user_captures_gives_the_same_bits(spec: str) -> None:
    plain, graphs = Simulation(spec, SHAPES, 2), UsersGraphSimulation(spec, SHAPES, 2)
    for step in range(6):
        pairs = [simulation.step(gradients(step, 2)) for simulation in (plain, graphs)]
        assert all(torch.equal(a[name], b[name]) for a, b in zip(*pairs, strict=True) for name in SHAPES), step


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("int8:rounding=stochastic", "reads Bucket.step or the ranks' weights"),
        ("warmup(mean, bf16, steps=5)", "reads Bucket.step or the ranks' weights"),
        (Custom("step"), "reads Bucket.step or the ranks' weights"),
        (Custom("host"), "the host reads a tensor"),
        (Custom("late table"), "needs a table"),
    ],
)
def test_a_step_that_a_users_graph_would_not_repeat_is_refused(policy: Any, reason: str) -> None:
    COUNT.clear()
    simulation = UsersGraphSimulation(policy, SHAPES, 2)
    simulation.step(gradients(0, 2))
    simulation.step(gradients(1, 2))
    with pytest.raises(Unsupported, match=f"cannot capture a step with this policy: .*{reason}"):
        simulation.step(gradients(2, 2))


def test_after_a_refused_capture_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with session("torch", rank=0, size=1):
        model = torch.nn.Linear(3, 1)
        sync = GradientSynchronizer(model, policy="ef(bf16)", weighted=False)
        sync.model(torch.ones(2, 3)).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(ThreadScheduler, "in_users_graph", True)
            with pytest.raises(Unsupported, match="it runs on the host"):
                sync.model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        sync.model(torch.ones(2, 3)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[2.0] * 3]
