"""What the framework gives to policies: parts after the optimizer's step, early updates, predicted bytes, state."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Capabilities, Communicator
from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.execution.scheduler import ThreadScheduler
from hvdbridge.execution.simulation import Simulation, simulate
from hvdbridge.execution.state_store import StateStore, slot_of
from hvdbridge.kernels.norm import global_norm
from hvdbridge.policies import bytes_per_step, dense, from_spec
from hvdbridge.policies.wrappers import statistics
from hvdbridge.policy.base import SWITCH, Aggregated, Early, Flow, Policy, Slot, State, acts_after_step
from hvdbridge.policy.bucket import Bucket, Layout, Views, cut_layouts, flatten
from hvdbridge.policy.collectives import AllReduce, Collective
from hvdbridge.reduction import aggregator
from hvdbridge.reduction.aggregator import Aggregator, SourceBucket
from hvdbridge.reduction.post_step import AfterStep
from policies.policies import CASES, SHAPES, Case, gradients, weights_for

Grads = dict[str, Tensor]
PARAMS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(())}
ALL = Layout({name: p.shape for name, p in PARAMS.items()})


@dataclass(frozen=True)
class Doubling(Policy):
    """Doubles parameters after every ``every``-th step, and counts how often; gradients are summed."""

    every: int = 1
    replicas = "drift"
    slots = {"count": Slot()}

    def init(self, params: Any) -> State:
        return {"count": {name: torch.zeros(p.shape) for name, p in params.items()}}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield AllReduce(bucket.buffer)))

    def due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        count = Views(bucket.layout, state["count"].flat + 1)
        return Aggregated(bucket.buffer * 2, state={"count": count})


@dataclass(frozen=True)
class Hasty(Policy):
    """Delivers ``value`` at once, then adds gradients up and remembers them."""

    value: float = 7.0
    times: int = 1
    slots = {"seen": Slot()}

    def init(self, params: Any) -> State:
        return {"seen": {name: torch.zeros(p.shape) for name, p in params.items()}}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        mine = bucket.buffer.clone()
        for _ in range(self.times):
            yield Early(torch.full_like(mine, self.value))
        total = yield AllReduce(mine)
        return Aggregated(total, state={"seen": Views(bucket.layout, state["seen"].flat + total)})


def ones(size: int) -> list[Grads]:
    return [{name: torch.full_like(p, float(rank + 1)) for name, p in PARAMS.items()} for rank in range(size)]


# After the optimizer's step


def test_most_policies_do_nothing_after_the_step() -> None:
    for spec in ("mean", "ef(bf16)", "warmup(ef(fp16))", "partition(a=sum)", "clip", "delayed"):
        policy = from_spec(spec)
        assert policy.replicas == "same"
        assert not any(policy.due(step) for step in range(1000))


def test_wrappers_take_the_wider_of_their_inners() -> None:
    for spec in ("clip(local_sgd)", "warmup(steps=5, then=local_sgd)", "partition(a=noop)", "hierarchical(diloco)"):
        assert from_spec(spec).replicas == "drift"
    assert from_spec("clip(mean)").scope == "step"
    assert from_spec("warmup(clip, first=mean)").scope == "step"


@pytest.mark.parametrize("spec", ["clip(local_sgd:every=3)", "partition(a=mean, rest=local_sgd:every=3)"])
def test_wrappers_are_due_when_an_inner_is(spec: str) -> None:
    assert [step for step in range(9) if from_spec(spec).due(step)] == [2, 5, 8]


def test_warmup_is_due_as_the_one_that_runs() -> None:
    policy = from_spec("warmup(steps=4, first=local_sgd:every=2, then=local_sgd:every=3)")
    assert [step for step in range(9) if policy.due(step)] == [1, 3, 5, 8]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_acts_after_a_step_is_due_after_some(case: Case) -> None:
    assert acts_after_step(case.policy) == (case.first_due is not None)


def test_after_step_reaches_inners_and_their_part_of_the_parameters() -> None:
    from hvdbridge.policies import Clip, Mean, Partition, Warmup

    given = [dict(PARAMS)]
    doubled = {name: p * 2 for name, p in PARAMS.items()}
    for policy, changed in (
        (Doubling(), "abc"),
        (Clip(Doubling(), norm=1e9), "abc"),
        (Warmup(Doubling(), steps=1), "abc"),
        (Partition((("b", Doubling()),), rest=Mean()), "b"),
        (Partition((("b", Doubling()), ("c", Mean())), rest=Doubling()), "ab"),
        (Partition((("b", Doubling(every=5)),), rest=Doubling()), "ac"),
    ):
        simulation = Simulation(policy, PARAMS, 1)
        for _ in range(2):
            simulation.step(ones(1))
        new = simulation.after_step(given)[0]
        for name in PARAMS:
            assert torch.equal(new[name], doubled[name] if name in changed else PARAMS[name]), (policy, name)
    assert torch.equal(given[0]["a"], PARAMS["a"]), "what was given is left alone"


class Switching(Doubling):
    def due(self, step: int) -> int:
        return SWITCH if step == 1 else super().due(step)


def test_a_skipped_step_that_switches_has_its_part() -> None:
    with Harness(Switching()) as harness:
        trained = Trained(harness)
        harness.step(1.0)
        harness.aggregator.weights = (0.0,)  # as the exchange finds them
        trained.optimizers[0].step()
        assert trained.values == (1.0, 1.0)
        trained.optimizers[1].step()
        harness.step(1.0)
        harness.aggregator.weights = (0.0,)
        for optimizer in trained.optimizers:
            optimizer.step()
        assert trained.values == (2.0, 2.0)


@dataclass(frozen=True)
class Both(Policy):
    """Two policies after the step, one after the other, as the base class does it."""

    a: Policy
    b: Policy

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        return Aggregated(bucket.buffer)


def test_each_inner_of_an_after_step_scales_by_itself() -> None:
    """The second gets parameters, not shares of them: powers of two keep their bits."""
    policy = Both(from_spec("local_sgd:every=1"), from_spec("local_sgd:every=1"))
    simulation = Simulation(policy, PARAMS, 2)
    simulation.step(ones(2))
    for mine in simulation.after_step([{n: torch.full_like(p, v) for n, p in PARAMS.items()} for v in (1.0, 3.0)]):
        assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in mine.values())


def test_a_skipped_step_has_no_after_step() -> None:
    simulation = Simulation(Doubling(), PARAMS, 2)
    assert torch.equal(simulation.after_step([PARAMS] * 2)[0]["b"], PARAMS["b"])  # before any step
    simulation.step(ones(2), [0, 0])
    assert torch.equal(simulation.after_step([PARAMS] * 2)[0]["b"], PARAMS["b"])
    simulation.step(ones(2), [0, 1])
    assert torch.equal(simulation.after_step([PARAMS] * 2)[0]["b"], 2 * PARAMS["b"])


def test_parameters_keep_their_types_and_averages_are_made_in_float32() -> None:
    params = {"h": torch.tensor([1.0, 3.0]).half(), "f": torch.ones(2), "d": torch.ones(2).double()}
    simulation = Simulation("local_sgd:every=1", params, 3)
    simulation.step([{}] * 3)
    h = [torch.tensor([1.0, 2049.0 + r]).half() for r in range(3)]  # halves between 2048 and 4096 are 2 apart
    new = simulation.after_step([{**params, "h": h[r]} for r in range(3)])
    assert {n: t.dtype for n, t in new[0].items()} == {n: t.dtype for n, t in params.items()}
    assert new[0]["h"].tolist() == [1.0, torch.stack(h).double().mean(0)[1].half().item()]


def test_after_step_wants_all_parameters_of_all_ranks() -> None:
    simulation = Simulation(Doubling(), PARAMS, 2)
    for wrong in ([PARAMS], [PARAMS, {"a": PARAMS["a"]}], [PARAMS, {**PARAMS, "b": torch.ones(3)}]):
        with pytest.raises(ConfigurationError):
            simulation.after_step(wrong)


# Early updates


def test_an_early_update_is_what_is_delivered() -> None:
    simulation = Simulation(Hasty(), PARAMS, 2)
    for step in range(3):
        updates = simulation.step(ones(2))
        assert all((update == 7).all() for mine in updates for update in mine.values())
        assert simulation.stores[0].portable()["seen"]["a"].eq(3 * (step + 1)).all()


def test_early_passes_through_wrappers() -> None:
    from hvdbridge.policies import Fp16, Mean, Partition, Warmup

    for policy in (Fp16(Hasty()), Warmup(Hasty(), 0), Partition((("*", Hasty()),)), Fp16(Fp16(Hasty()))):
        assert simulate(policy, ones(2))[1]["b"].tolist() == [7.0] * 4
    mixed = Partition((("a", Hasty(1.0)), ("b", Mean())), rest=Hasty(2.0))
    simulation = Simulation(mixed, PARAMS, 2)
    update = simulation.step(ones(2))[0]
    assert [float(update[name].view(-1)[0]) for name in "abc"] == [1.0, 1.5, 2.0]
    assert simulation.stores[0].portable()["a"]["seen"]["a"].eq(3).all()
    assert simulation.stores[0].portable()["rest"]["seen"]["c"] == 3


@dataclass(frozen=True)
class HastyAfter(Hasty):
    def due(self, step: int) -> bool:
        return True

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        return self.aggregate(bucket, state)


def test_early_where_it_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="yields Early"):
        simulate(Hasty(times=2), ones(2))
    simulation = Simulation(HastyAfter(), PARAMS, 1)
    simulation.step(ones(1))
    with pytest.raises(ConfigurationError, match="yields Early"):
        simulation.after_step([PARAMS])
    with Harness(Hasty(times=2)) as harness:
        harness.step(1.0)
        with pytest.raises(ConfigurationError, match="aggregate yields Early"):
            harness.aggregator.settle()
    with Harness(HastyAfter()) as harness:
        parameter = torch.nn.Parameter(torch.ones(3))
        after = AfterStep(harness.aggregator, {"w": parameter}, [], torch.nn.Identity())
        harness.step(1.0)
        with pytest.raises(ConfigurationError, match="yields Early"):
            after.catch_up()


class Gated(Communicator):
    """One rank; a collective waits for the gate and returns what it was given."""

    rank, size = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.seen: list[float] = []

    def _answer(self, request: Collective) -> Answer:
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.seen.append(float(request.tensor.view(-1)[0]))
        return request.tensor
        yield

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self

    def control(self) -> Communicator:
        return self

    def close(self) -> None: ...


def context(communicator: Communicator, scheduler: ThreadScheduler) -> Any:
    return SimpleNamespace(
        communicator=communicator, control=communicator, scheduler=scheduler, ranks=None, graphs=None
    )


@dataclass
class Harness:
    """An aggregator of one rank with two buckets, fed by hand."""

    policy: Policy
    communicator: Gated = field(default_factory=Gated)

    def __enter__(self) -> Harness:
        params = {"w": torch.zeros(3), "v": torch.zeros(2)}
        self.scheduler = ThreadScheduler()
        self.aggregator = Aggregator(self.policy, params, context(self.communicator, self.scheduler), weighted=False)
        self.layouts = [Layout({name: p.shape}) for name, p in params.items()]
        self.delivered: list[Tensor | None] = []
        return self

    def __exit__(self, *_: object) -> None:
        self.communicator.gate.set()
        self.scheduler.close()

    def step(self, value: float) -> None:
        self.delivered.clear()
        self.aggregator.begin()
        for index, layout in enumerate(self.layouts):
            piece = SourceBucket(layout, torch.full((layout.numel,), value + index), self.delivered.append)
            self.aggregator.submit(piece, last=index == 1)
        self.aggregator.end()


def test_holes_are_returned_after_the_first_steps_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    with Harness(from_spec("bf16")) as harness:
        monkeypatch.setattr(aggregator, "return_holes", lambda: returned.append(harness.aggregator.step))
        harness.aggregator.step = 1000  # as after a checkpoint
        for _ in range(10):
            harness.step(1.0)
    assert returned == [1000, 1001, 1002, 1004, 1008]


@pytest.mark.parametrize(("spec", "blocks"), [("int8", 9), ("topk", 13), ("onebit", 16), ("adasum", 9)])
def test_as_many_blocks_are_kept_as_flows_in_flight_make(spec: str, blocks: int) -> None:
    store = StateStore(from_spec(spec), {"w": torch.zeros(3)})
    store.pool.give(*[torch.empty(100 + i) for i in range(30)])
    assert len(store.pool._idle) == blocks


def test_the_rest_of_an_early_flow_runs_in_the_background() -> None:
    with Harness(Hasty()) as harness:
        harness.communicator.gate.clear()
        harness.step(1.0)  # returns although nothing can travel
        assert [float(t[0]) for t in harness.delivered if t is not None] == [7.0, 7.0]
        assert harness.communicator.seen == []
        harness.communicator.gate.set()
        harness.step(3.0)  # comes after it
        harness.aggregator.settle()
        assert harness.communicator.seen == [1.0, 2.0, 3.0, 4.0]
        assert harness.aggregator.store.portable()["seen"]["v"].tolist() == [6.0, 6.0]
        assert harness.aggregator.last_traffic.collectives == 2, "each step's own"


def test_the_loss_scale_waits_for_the_background() -> None:
    with Harness(from_spec("delayed")) as harness:
        harness.communicator.gate.clear()
        harness.step(1.0)
        threading.Timer(0.05, harness.communicator.gate.set).start()
        harness.aggregator.loss_scale = 4.0
        harness.step(5.0)
        assert [float(t[0]) for t in harness.delivered if t is not None] == [4.0, 8.0]


def test_a_failure_in_the_background_is_raised_by_whoever_comes_next() -> None:
    for come in (lambda h: h.step(2.0), lambda h: h.aggregator.flush(), lambda h: h.aggregator.settle()):
        with Harness(Hasty()) as harness:
            harness.communicator.gate.clear()
            harness.step(1.0)
            delivered = list(harness.delivered)
            harness.communicator.error = OSError("wire cut")
            harness.communicator.gate.set()
            with pytest.raises(OSError, match="wire cut"):
                come(harness)
            assert None not in delivered


# The hooks around the optimizer's step


class Trained:
    """One rank's model under :class:`AfterStep`, with two optimizers."""

    def __init__(self, harness: Harness, optimizers: int = 2) -> None:
        self.harness = harness
        self.model = torch.nn.Module()
        self.model.w, self.model.v = (torch.nn.Parameter(torch.ones(n)) for n in (3, 2))
        self.model.forward = lambda: self.model.w.sum()  # type: ignore[method-assign]
        self.optimizers = [torch.optim.SGD([p], lr=0.0) for p in self.model.parameters()][:optimizers]
        self.after = AfterStep(harness.aggregator, dict(self.model.named_parameters()), self.optimizers, self.model)

    @property
    def values(self) -> tuple[float, float]:
        return float(self.model.w.detach()[0]), float(self.model.v.detach()[0])


def test_each_optimizer_is_followed_by_its_part() -> None:
    with Harness(Doubling()) as harness:
        trained = Trained(harness)
        harness.step(1.0)
        assert trained.values == (1.0, 1.0)
        trained.optimizers[0].step()
        assert trained.values == (2.0, 1.0)
        trained.optimizers[0].step()  # no backward between: nothing is due
        assert trained.values == (2.0, 1.0)
        trained.optimizers[1].step()
        assert trained.values == (2.0, 2.0)
        trained.model()
        assert trained.values == (2.0, 2.0)


def test_what_training_starts_from_are_the_parameters_of_the_first_backward() -> None:
    with Harness(from_spec("diloco:every=100")) as harness:
        trained = Trained(harness)

        def anchors() -> list[float]:
            anchor = harness.aggregator.store.portable()["anchor"]
            return [*anchor["w"].tolist(), *anchor["v"].tolist()]

        with torch.no_grad():
            trained.model.w.fill_(5.0)  # weights are loaded
        harness.step(1.0)
        assert anchors() == [5.0] * 3 + [1.0] * 2
        with torch.no_grad():
            trained.model.w.fill_(7.0)  # the optimizer's step
        assert anchors() == [5.0] * 3 + [1.0] * 2
        harness.step(1.0)
        assert anchors() == [5.0] * 3 + [1.0] * 2


def test_buckets_know_the_types_of_all_gradients() -> None:
    params = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    scheduler, communicator = ThreadScheduler(), Gated()
    try:
        aggregator = Aggregator(from_spec("mean"), params, context(communicator, scheduler))
        bucket = aggregator.bucket(torch.zeros(4), Layout({"b": (2,), "a": (2,)}), 0, 0)
        assert bucket.layout.dtypes == {"a": torch.bfloat16, "b": torch.float32}
    finally:
        scheduler.close()


def test_an_update_of_another_size_is_refused() -> None:
    """It must not be spread over the bucket."""

    class Total(Policy):
        def aggregate(self, bucket: Bucket, state: State) -> Flow:
            total = yield AllReduce(bucket.buffer)
            return Aggregated(total.sum().reshape(1))

    params = {"w": torch.zeros(4)}
    scheduler, communicator = ThreadScheduler(), Gated()
    try:
        aggregator = Aggregator(Total(), params, context(communicator, scheduler), weighted=False)
        aggregator.begin()
        aggregator.submit(SourceBucket(Layout({"w": (4,)}), torch.ones(4), lambda _: None), last=True)
        with pytest.raises(RuntimeError, match="split"):
            aggregator.end()
    finally:
        scheduler.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weighted": None}, "exchanges weights, .* pass weighted=False"),
        ({"joining": True}, "exchanges weights"),
        ({"has_post_step": True}, "communicates after the optimizer's step"),
        ({"loss_scale": 2.0}, "begins with another loss scale"),
        ({"blocks_host": True}, "runs on the host"),
        ({}, ""),
    ],
)
def test_what_a_users_graph_cannot_repeat_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    with Harness(Doubling()) as harness:
        harness.step(1.0)
        monkeypatch.setattr(ThreadScheduler, "in_users_graph", True)
        harness.communicator.capabilities = Capabilities(blocks_host=changed.pop("blocks_host", False))
        vars(harness.aggregator).update({"has_post_step": False} | changed)
        sent = len(harness.communicator.seen)
        if not reason:
            harness.aggregator.begin()
            assert harness.aggregator.store.in_place
            return
        with pytest.raises(Unsupported, match=f"rank 0: torch.cuda.graph cannot capture .*: it {reason}"):
            harness.step(2.0)
        assert len(harness.communicator.seen) == sent


def test_optimizers_come_in_one_order() -> None:
    with Harness(Doubling()) as harness:
        trained = Trained(harness)
        harness.step(1.0)
        trained.optimizers[1].step()
        assert trained.values == (1.0, 1.0)
        trained.optimizers[0].step()
        assert trained.values == (2.0, 2.0)


def test_what_no_step_did_the_next_training_forward_does() -> None:
    with Harness(Doubling()) as harness:
        trained = Trained(harness)
        harness.step(1.0)
        trained.optimizers[0].step()
        with torch.no_grad():
            trained.model()
        assert trained.values == (2.0, 1.0)
        trained.model()
        assert trained.values == (2.0, 2.0)
        harness.step(1.0)
        harness.step(1.0)  # a backward without a forward of its own
        assert trained.values == (4.0, 4.0)


def test_a_closure_is_one_step() -> None:
    with Harness(Doubling()) as harness:
        trained = Trained(harness, optimizers=1)
        seen = []

        def closure() -> float:
            for _ in range(2):
                trained.model()
                harness.step(1.0)
                seen.append(trained.values)
            return 0.0

        trained.after.before_closure()
        trained.optimizers[0].step(closure)
        assert seen == [(1.0, 1.0)] * 2
        assert trained.values == (2.0, 1.0)


def test_hooks_are_laid_when_something_is_due_and_taken_off() -> None:
    with Harness(Doubling(every=3)) as harness:
        trained = Trained(harness, optimizers=1)
        for due in (False, False, True):
            harness.step(1.0)
            assert bool(trained.model._forward_pre_hooks) == due
            trained.optimizers[0].step()
        assert trained.values == (2.0, 1.0)
        trained.after.remove()
        assert not trained.model._forward_pre_hooks
        assert not trained.optimizers[0]._optimizer_step_post_hooks


# State


def test_what_only_after_step_uses_is_not_laid_for_buckets() -> None:
    """Otherwise it would be copied twice in every step in which it is due."""
    store = StateStore(from_spec("diloco(every=1, inner=ef(bf16))"), PARAMS)
    buckets = [Layout({"a": (2, 3)}), Layout({"c": (), "b": (4,)})]
    for _ in range(3):
        for layout in buckets:
            store.merge(layout, {"inner": {"inner": None}}, torch.zeros(layout.numel))
            store.merge(layout, store.part(layout), torch.zeros(layout.numel))
        anchor = store.part(ALL)["anchor"]
        store.merge(ALL, {"anchor": Views(ALL, anchor.flat + 1)}, torch.zeros(ALL.numel))
    assert list(store._leaves[("anchor",)]) == [None, ALL]
    assert list(store._leaves[("momentum",)]) == [None]
    assert torch.equal(store.portable()["anchor"]["a"], PARAMS["a"] + 3)
    assert store.whole()["anchor"]["b"].tolist() == [4.0] * 4


def test_a_laid_leaf_is_held_once() -> None:
    store = StateStore(from_spec("ef(bf16)"), PARAMS)
    assert store.nbytes == 4 * ALL.numel
    flat = store.part(ALL)["residual"].flat
    assert list(store._leaves[("residual",)].values()) == [{}, store.part(ALL)["residual"]]
    assert store.whole()["residual"]["a"].data_ptr() == flat.data_ptr()
    assert store.nbytes == 4 * ALL.numel


def test_slots_that_are_not_guarded_are_replaced_always() -> None:
    store = StateStore(from_spec("delayed(ef(bf16))"), PARAMS)
    update = torch.full((ALL.numel,), math.nan)
    new = {"held": Views(ALL, update), "inner": {"residual": Views(ALL, torch.ones(ALL.numel)), "inner": None}}
    store.merge(ALL, new, update)
    assert store.part(ALL)["held"].flat.isnan().all()
    assert not store.part(ALL)["inner"]["residual"].flat.any()


def test_state_about_parameters_is_not_in_units_of_the_gradient() -> None:
    policy = from_spec("warmup(local_sgd(inner=ef(bf16)), first=ef(bf16))")
    assert slot_of(policy, ("first", "residual")).gradient_units
    assert not slot_of(policy, ("then", "inner", "residual")).gradient_units
    assert slot_of(policy, ("then", "inner", "residual")).local


def test_another_number_of_ranks() -> None:
    policy = from_spec("delayed(ef(bf16))")
    saved = []
    for rank in range(3):
        store = StateStore(policy, PARAMS)
        for leaf in (store.whole()["held"], store.whole()["inner"]["residual"]):
            for tensor in leaf.values():
                tensor.fill_(2.0 + rank)
        saved.append(store.portable())
    store = StateStore(policy, PARAMS)
    with pytest.raises(ConfigurationError, match=r"saved by 3 ranks and would be loaded by 2"):
        store.load(saved, 1, 2, "raise")
    assert not store.whole()["held"]["b"].any()
    store.load(saved, 1, 2, "reset")
    assert store.whole()["held"]["b"].eq(2).all()
    assert not store.whole()["inner"]["residual"]["b"].any()
    store.load(saved, 1, 2)
    assert store.whole()["inner"]["residual"]["b"].eq(4.5).all()
    store.load(saved, 1, 3, "reset")
    assert store.whole()["inner"]["residual"]["b"].eq(3).all()
    store.reset()
    assert not store.whole()["inner"]["residual"]["b"].any()
    with pytest.raises(ConfigurationError, match="Did you mean 'reset'"):
        store.load(saved, 1, 2, "resett")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Telling(Policy):
    inner: Policy = dense.MEAN

    def statistics(self, params: dict[str, Tensor], state: State) -> dict[str, float]:
        return {"figure": 3.0}


def test_statistics_bear_the_key_of_an_inner_policy() -> None:
    from hvdbridge.policies import Clip, Partition, Warmup

    for policy, want in (
        (from_spec("ef(bf16)"), {}),
        (Clip(Telling()), {"figure": 3.0}),
        (Warmup(Clip(Telling())), {"then.figure": 3.0}),
        (Partition((("*.bias", Telling()),)), {"*.bias.figure": 3.0}),
    ):
        assert statistics(policy, PARAMS, policy.init(PARAMS)) == want


# Predicted bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_bytes_are_those_of_a_simulation(case: Case) -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for size in case.sizes(1, 3, 5):
        local_size = 2 if size == 5 else case.local_size
        for bucket_mb in (25.0, 0.003) if size == 3 else (0.003,):
            simulated = Simulation(case.policy, params, size, local_size, bucket_mb=bucket_mb)
            for step in range(2):
                before = simulated.bytes_sent[0]
                updates = simulated.step(gradients(size, step), weights_for(case, size))
                simulated.after_step(updates)
                predicted = bytes_per_step(case.policy, params, size, step, bucket_mb, local_size)
                assert simulated.bytes_sent[0] - before == predicted, f"{size} ranks, step {step}, {bucket_mb} MiB"


def test_bytes_of_shapes_types_and_steps() -> None:
    mean = from_spec("mean")
    assert bytes_per_step(mean, {"w": (10, 10)}, 2) == 400
    assert bytes_per_step(mean, {"w": torch.zeros(10, 10, dtype=torch.float16)}, 2) == 200
    assert bytes_per_step(mean, {"w": torch.zeros(10, 10, dtype=torch.float64)}, 1) == 0
    local = from_spec("local_sgd:every=3")
    assert [bytes_per_step(local, {"w": (10, 10)}, 2, step) for step in range(6)] == [0, 0, 400, 0, 0, 400]
    for wrong in ({"size": 0}, {"size": 2, "bucket_mb": 0}, {"size": 2, "local_size": 0}):
        with pytest.raises(ConfigurationError):
            bytes_per_step(mean, {"w": (3,)}, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        ("krum", 4, r"Krum: f=1 faulty ranks need N >= 2 f \+ 3 = 5"),
        ("multi_krum:f=1,m=6", 6, "m=6 must be at most N - f = 5"),
        ("trimmed_mean", 2, r"N >= 2 f \+ 1 = 3"),
        ("median:f=2", 4, r"N >= 2 f \+ 1 = 5"),
        ("geometric_median:f=1", 2, "N >= 2 f"),
        ("clipped_mean:f=1", 2, "N >= 2 f"),
        ("warmup(steps=5, then=krum)", 4, "Krum"),
        ("partition(a=trimmed_mean, rest=mean)", 2, "TrimmedMean"),
        ("local_sgd(inner=krum)", 4, "Krum"),
    ],
)
def test_an_impossible_number_of_ranks_is_found_before_the_first_step(spec: str, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Simulation(spec, PARAMS, size)
    with pytest.raises(ConfigurationError, match=message):
        bytes_per_step(from_spec(spec), PARAMS, size)
    Simulation(spec, PARAMS, size + 1)


def test_buckets_are_cut_from_the_end_by_type() -> None:
    params = {f"p{i}": torch.zeros(300_000, dtype=torch.float16 if i == 3 else torch.float32) for i in range(6)}
    names = [layout.names for layout in cut_layouts(params, 2 * 2**20)]
    assert names == [("p5",), ("p4", "p2"), ("p1", "p0"), ("p3",)]
    assert [layout.names for layout in cut_layouts(params, 1)] == [(f"p{i}",) for i in reversed(range(6))]


def test_bytes_are_counted_by_group() -> None:
    simulation = Simulation("hierarchical", {"w": (12,)}, 4, local_size=2)
    simulation.step([{"w": torch.ones(12)}] * 4)
    # Inside: an all-reduce of 48 bytes and a gathered half of them; between: an all-reduce of a half.
    assert simulation.bytes_by_group == [{"world": 0, "node": 48 + 24, "cross": 24}] * 4
    assert simulation.bytes_sent == [96] * 4


def test_bucket_mb_cuts_as_the_hooks_do() -> None:
    params = {"a": torch.zeros(1000), "b": torch.zeros(10), "c": torch.zeros(500)}
    whole = Simulation("mean", params, 2, bucket_mb=0.003)
    assert [layout.names for layout in whole._layouts] == [("c", "b", "a")]
    assert [layout.names for layout in Simulation("mean", params, 2, bucket_mb=0.001)._layouts] == [("c",), ("b", "a")]
    with pytest.raises(ConfigurationError, match="not both"):
        Simulation("mean", params, 2, buckets=[["a", "b", "c"]], bucket_mb=1.0)


# noop and Clip


def test_noop_is_this_ranks_own_gradient(caplog: pytest.LogCaptureFixture) -> None:
    dense._warn_of_drift.cache_clear()
    grads = gradients(3, 0)
    with caplog.at_level(logging.WARNING, logger="hvdbridge"):
        simulation = Simulation("noop", SHAPES, 3)
        updates = simulation.step(grads, [5, 0, 1])
    assert [r.message for r in caplog.records] == [
        "policy noop aggregates nothing: from the first step on, replicas drift"
    ]
    for name in SHAPES:
        assert torch.equal(updates[0][name], grads[0][name])
        assert not updates[1][name].any()
        assert torch.equal(updates[2][name], grads[2][name])
    assert simulation.bytes_sent == [0, 0, 0]


@pytest.mark.parametrize("norm", [0.5, 20.0, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_clip_bounds_each_ranks_whole_gradient(norm: float, size: int) -> None:
    """float32 roundings: one of the factor, one of the product, then a sum of ``size`` weighted terms."""
    weights = [float(rank + 1) for rank in range(size)]
    grads = gradients(size, 3)
    grads[0] = {name: g / 1000 for name, g in grads[0].items()}  # one that needs no clipping
    got = Simulation(f"clip:norm={norm}", SHAPES, size, buckets=[[n] for n in SHAPES]).step(grads, weights)
    want = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    largest = 0.0
    for weight, mine in zip(weights, grads, strict=True):
        values = {name: g.numpy().astype(np.float64) for name, g in mine.items()}
        length = math.sqrt(sum(float((v**2).sum()) for v in values.values()))
        for name, v in values.items():
            clipped = v * min(1.0, norm / length)
            want[name] += weight / sum(weights) * clipped
            largest = max(largest, float(np.abs(clipped).max(initial=0.0)))
    for name in SHAPES:
        assert np.abs(got[-1][name].numpy() - want[name]).max(initial=0.0) <= (size + 4) * 2.0**-24 * largest


def test_clip_is_exact_where_nothing_is_clipped_and_lets_non_finite_through() -> None:
    grads = gradients(2, 0)
    clipped, plain = simulate("clip:norm=1e6", grads)[0], simulate("mean", grads)[0]
    assert all(torch.equal(clipped[n], plain[n]) for n in SHAPES)
    zeros = [{n: torch.zeros(s) for n, s in SHAPES.items()}] * 2
    assert not any(t.any() for t in simulate("clip", zeros)[0].values())
    for value in (math.nan, math.inf, -math.inf):
        broken = gradients(2, 0)
        broken[1]["fc.bias"][3] = value
        update = simulate("clip", broken)[0]
        assert not update["fc.bias"][3].isfinite()
        assert update["fc.weight"].isfinite().all()
        excluded = simulate("clip", broken, [1, 0])[0]
        assert all(t.isfinite().all() for t in excluded.values())
    huge = simulate("clip:norm=2", [{"w": torch.tensor([3e30, 4e30])}])[0]["w"]
    assert torch.allclose(huge, torch.tensor([1.2, 1.6]), rtol=2**-22, atol=0)  # its square is beyond float32


def test_clip_is_not_additive_and_bounded() -> None:
    with pytest.raises(ConfigurationError, match="cannot wrap Clip"):
        from_spec("ef(clip)")
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(ConfigurationError, match=r"norm=.* must be > 0"):
            from_spec(f"clip:norm={wrong}")


@pytest.mark.parametrize("sizes", [[3, 5000, 7, 0, 4096, 40000, 1], [1] * 40000, [4096] * 20, [0, 5000, 0], [0]])
def test_a_norm_knows_no_order(sizes: list[int]) -> None:
    torch.manual_seed(0)
    parts = {f"p{i}": torch.randn(size) for i, size in enumerate(sizes)}
    norms = []
    for names in (list(parts), list(reversed(parts)), [*list(parts)[1::2], *list(parts)[::2]]):
        layout = Layout({name: parts[name].shape for name in names})
        norms.append(float(global_norm(flatten(parts, layout), layout)))
    # Each rounds a sum of numel squares at most numel times, by 2^-53 of it, and a norm has half of a sum's error
    exact = math.sqrt(math.fsum(x * x for part in parts.values() for x in part.tolist()))
    assert norms == [pytest.approx(exact, rel=sum(sizes) * 2**-53)] * 3
    assert len(set(norms)) == 1


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["meta", "inference"])
def test_a_mode_of_the_first_call_is_not_that_of_the_next(mode: Any) -> None:
    """Per thread, memory is kept in which halves are added."""
    gradients = [{"w": torch.full((4,), float(i))} for i in range(4)]
    found = []

    def run() -> None:
        with mode():
            found.append(simulate("bf16", gradients)[0]["w"].tolist())
        found.append(simulate("bf16", gradients)[0]["w"].tolist())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [[1.5] * 4] * 2
