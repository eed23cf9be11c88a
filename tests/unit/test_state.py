"""StateStore: what is kept, what is laid anew, what is refused."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.execution.simulation import Simulation
from hvdbridge.execution.state_store import StateStore, redistribute, to_portable
from hvdbridge.kernels.finite import Finite
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import Aggregated, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Layout, Views
from hvdbridge.training.average import average_gradients
from hvdbridge.training.runtime import session
from hvdbridge.training.synchronizer import GradientSynchronizer

PARAMS = {"w": torch.zeros(4, 3), "b": torch.zeros(4), "e": torch.zeros(0), "s": torch.zeros(())}
ALL = Layout({name: p.shape for name, p in PARAMS.items()})


@dataclass(frozen=True)
class Counted(Policy):
    """One slot of the parameter's shape and one that is not, like a low-rank factor."""

    slots = {"moment": Slot(), "factor": Slot()}

    def init(self, params: dict[str, Tensor]) -> State:  # type: ignore[override]
        return {
            "moment": {n: torch.zeros_like(p) for n, p in params.items()},
            "factor": {n: torch.zeros(2) for n, p in params.items() if p.dim() > 1},
        }

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        new = {"moment": Views(bucket.layout, bucket.buffer + state["moment"].flat)}
        return Aggregated(bucket.buffer, state={**new, "factor": {n: t + 1 for n, t in state["factor"].items()}})


def store_of(spec: str | Policy = "ef(bf16)") -> StateStore:
    return StateStore(from_spec(spec), PARAMS)


def fill(store: StateStore, layout: Layout, value: float) -> None:
    flat = torch.full((layout.numel,), value)
    store.merge(layout, {"residual": Views(layout, flat)}, torch.zeros(layout.numel))


def test_a_part_is_flat_in_bucket_order_and_cached() -> None:
    store = store_of()
    layout = Layout({"b": (4,), "w": (4, 3)})
    part = store.part(layout)
    assert isinstance(part["residual"], Views)
    assert part["residual"].layout is layout
    assert store.part(layout)["residual"] is part["residual"]


def test_buckets_are_rebuilt_by_name() -> None:
    store = store_of()
    values = torch.arange(float(ALL.numel))
    store.merge(ALL, {"residual": Views(ALL, values)}, torch.zeros(ALL.numel))
    first, second = Layout({"s": (), "b": (4,)}), Layout({"e": (0,), "w": (4, 3)})
    assert store.part(first)["residual"].flat.tolist() == [16.0, 12.0, 13.0, 14.0, 15.0]
    assert store.part(second)["residual"].flat.tolist() == values[:12].tolist()
    fill(store, first, 7.0)
    assert store.portable()["residual"]["b"].tolist() == [7.0] * 4
    assert store.portable()["residual"]["w"].flatten().tolist() == values[:12].tolist()
    assert store.part(Layout({"b": (4,)}))["residual"].flat.tolist() == [7.0] * 4


def test_a_partition_shares_the_layout_of_its_state() -> None:
    store = store_of("partition(1d=ef(bf16), rest=ef(fp16))")
    part = store.part(ALL)
    assert part["1d"]["residual"].layout is ALL.part(["b", "e"])  # so that adding it copies nothing


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["w", "b", "s"])
def test_a_parameter_with_a_non_finite_update_keeps_its_state(name: str, bad: float) -> None:
    store = store_of()
    fill(store, ALL, 1.0)
    update = torch.zeros(ALL.numel)
    update[ALL.offsets[name]] = bad
    store.merge(ALL, {"residual": Views(ALL, torch.full((ALL.numel,), math.nan))}, update)
    residual = store.portable()["residual"]
    assert {n: bool((t == 1).all()) for n, t in residual.items() if n != "e"} == {n: n == name for n in ("w", "b", "s")}


def test_the_guard_holds_for_leaves_of_any_shape() -> None:
    store = store_of(Counted())
    bucket = Bucket(torch.zeros(ALL.numel), ALL)
    for value in (1.0, math.nan, 1.0):
        bucket.buffer[ALL.offsets["w"]] = value
        flow = bucket_result(Counted(), bucket, store.part(ALL))
        store.merge(ALL, flow.state, flow.update)
    saved = store.portable()
    assert saved["factor"]["w"].tolist() == [2.0, 2.0]
    assert saved["moment"]["w"][0, 0] == 2.0


def bucket_result(policy: Policy, bucket: Bucket, state: State) -> Aggregated:
    with pytest.raises(StopIteration) as end:
        next(policy.aggregate(bucket, state))
    return end.value.value  # type: ignore[no-any-return]


def test_an_overflowing_sum_of_finite_updates_is_finite() -> None:
    store = store_of()
    update = torch.full((ALL.numel,), 3e38)
    store.merge(ALL, {"residual": Views(ALL, torch.ones(ALL.numel))}, update)
    assert store.portable()["residual"]["w"].eq(1).all()


def test_flags_of_parts_and_of_empty_parameters() -> None:
    update = torch.zeros(ALL.numel)
    update[13] = math.nan
    finite = Finite(update, ALL)
    assert not finite.known
    assert finite.flags.tolist() == [True, False, True, True, False]
    for part, kept in ((ALL.part(["b", "s"]), [0.0] * 4 + [1.0]), (ALL, [1.0] * 12 + [0.0] * 4 + [1.0])):
        new, old = torch.ones(part.numel), torch.zeros(part.numel)
        assert finite.keep(new, old, part).tolist() == kept
        assert finite.keep(new, old, part, out=old) is old
        assert old.tolist() == kept


def test_training_goes_on_after_an_infinity() -> None:
    simulation = Simulation("ef(bf16)", PARAMS, 2)
    grads = [{n: torch.randn(p.shape) for n, p in PARAMS.items()} for _ in range(2)]
    simulation.step(grads)
    before = [store.portable() for store in simulation.stores]
    broken = [{n: t.clone() for n, t in g.items()} for g in grads]
    broken[1]["w"][0, 0] = math.inf
    assert all(mine["w"][0, 0] == math.inf for mine in simulation.step(broken))
    for rank, store in enumerate(simulation.stores):
        after = store.portable()["residual"]
        assert torch.equal(after["w"], before[rank]["residual"]["w"])
        assert not torch.equal(after["b"], before[rank]["residual"]["b"])
    assert all(t.isfinite().all() for t in simulation.step(grads)[0].values())


def test_unchanged_branches_may_be_left_out() -> None:
    store = store_of("warmup(then=ef(bf16), first=ef(fp16))")
    new = {"then": {"residual": Views(ALL, torch.ones(ALL.numel)), "inner": None}}
    store.merge(ALL, new, torch.zeros(ALL.numel))
    saved = store.portable()
    assert saved["then"]["residual"]["b"].eq(1).all()
    assert saved["first"]["residual"]["b"].eq(0).all()
    store.merge(ALL, None, torch.zeros(ALL.numel))
    with pytest.raises(ConfigurationError, match="did not give: thn"):
        store.merge(ALL, {"thn": new["then"]}, torch.zeros(ALL.numel))


def test_what_was_handed_out_never_changes() -> None:
    store = store_of()
    fill(store, ALL, 1.0)
    residual = store.part(ALL)["residual"]
    saved = store.portable()
    store.rescale(4.0)
    fill(store, ALL, 9.0)
    assert residual.flat.eq(1).all()
    assert saved["residual"]["w"].eq(1).all()


def test_rescale_touches_gradient_units_only() -> None:
    store = store_of("ef(bf16)")
    fill(store, ALL, 2.0)
    store.rescale(0.5)
    assert store.part(ALL)["residual"].flat.eq(1).all()
    counted = store_of(Counted())
    counted.merge(ALL, {"moment": Views(ALL, torch.ones(ALL.numel))}, torch.zeros(ALL.numel))
    counted.rescale(0.5)
    assert counted.portable()["moment"]["b"].eq(1).all()
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="positive finite"):
            store.rescale(factor)


def test_a_saved_state_is_plain_and_loads_again() -> None:
    spec = "warmup(steps=1, then=partition(1d=ef(bf16), rest=ef(fp16)))"
    one = Simulation(spec, PARAMS, 2)
    grads = [{n: torch.randn(p.shape) for n, p in PARAMS.items()} for _ in range(2)]
    for _ in range(3):
        one.step(grads)
    file = io.BytesIO()
    torch.save([store.portable() for store in one.stores], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    two = Simulation(spec, PARAMS, 2, buckets=[["b"], ["s", "w"], ["e"]])
    two.step([{}, {}])
    two.steps = one.steps
    for store, state in zip(two.stores, saved, strict=True):
        store.load(state)
    for _ in range(2):
        a, b = one.step(grads), two.step(grads)
        assert all(torch.equal(a[0][n], b[1][n]) for n in PARAMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["residual"].pop("w"), "residual/w is missing"),
        (lambda s: s["residual"].update(v=torch.zeros(1)), "residual/v is not expected"),
        (lambda s: s["residual"].update(w=torch.zeros(3, 4)), r"residual/w is float32\[3, 4\], expected .*\[4, 3\]"),
        (lambda s: s["residual"].update(w=torch.zeros(4, 3).double()), r"w is float64\[4, 3\], expected float32"),
        (lambda s: s.update(other=s.pop("residual")), "residual/w is missing\n.*"),
        (lambda s: s["inner"].update(q={"w": torch.zeros(1)}), "inner/q/w is not expected"),
    ],
)
def test_another_state_is_refused_and_nothing_loaded(change: object, message: str) -> None:
    store = store_of()
    fill(store, ALL, 3.0)
    good = store.portable()
    bad = to_portable(good)
    fill(store, ALL, 5.0)
    change(bad)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=message):
        store.load([good, bad], rank=0, size=2)
    assert store.part(ALL)["residual"].flat.eq(5).all()
    store.load([good, good], rank=1, size=2)
    assert store.part(ALL)["residual"].flat.eq(3).all()
    with pytest.raises(ConfigurationError, match="no state"):
        store.load([])


def test_a_long_list_of_differences_is_counted() -> None:
    store = StateStore(from_spec("ef(bf16)"), {f"p{i}": torch.zeros(1) for i in range(30)})
    with pytest.raises(ConfigurationError, match="and 22 more"):
        store.load({})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_residuals_keep_their_sum_when_ranks_change(size: int) -> None:
    policy = from_spec("warmup(ef(bf16))")
    saved = [{"then": {"residual": {"w": torch.full((2,), float(r))}}, "first": {}} for r in range(3)]
    new = redistribute(policy, saved, size)
    assert len(new) == size
    total = sum(state["then"]["residual"]["w"].double() for state in new)
    assert torch.allclose(total, torch.full((2,), 3.0, dtype=torch.float64), rtol=2.0**-23)
    if size == 3:
        assert new[2]["then"]["residual"]["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("before", "now"), [((0, 0, 1, 1), (0, 0, 0)), ((5, 5, 1), (0, 1, 1, 2)), ((0, 0, 1, 1), (0, 0, 0, 1))]
)
def test_what_belongs_to_nodes_keeps_its_sum_over_nodes(before: tuple[int, ...], now: tuple[int, ...]) -> None:
    """Within a node all ranks hold the same, and it counts once."""
    policy, values = from_spec("hierarchical(ef(bf16))"), {node: 2.0**i for i, node in enumerate(sorted(set(before)))}
    saved = [{"inner": {"residual": {"w": torch.full((2,), values[node])}, "inner": {}}} for node in before]
    new = [s["inner"]["residual"]["w"] for s in redistribute(policy, saved, len(now), nodes=(before, now))]
    wanted = sum(values.values()) / len(set(now))
    assert [tensor.tolist() for tensor in new] == [[pytest.approx(wanted, rel=2.0**-23)] * 2] * len(now)


def test_ranks_on_other_nodes() -> None:
    """The same number of ranks: what belongs to ranks stays, what belongs to nodes is refused, begun anew or moved."""
    saved = [{"residual": {"w": torch.full((1,), float(r))}, "inner": {"inner": {}}} for r in range(2)]
    apart, together = (0, 1), (4, 4)
    store = StateStore(from_spec("ef(bf16)"), {"w": torch.zeros(1)})
    store.load(saved, 1, 2, "raise", (apart, together))
    assert store.portable()["residual"]["w"].tolist() == [1.0]
    store = StateStore(from_spec("hierarchical(ef(bf16))"), {"w": torch.zeros(1)})
    inside = [{"inner": state} for state in saved]
    with pytest.raises(ConfigurationError, match="saved by 2 ranks on other nodes"):
        store.load(inside, 1, 2, "raise", (apart, together))
    for rule, wanted in (("redistribute", 1.0), ("reset", 0.0)):
        store.load(inside, 1, 2, rule, (apart, together))  # type: ignore[arg-type]
        assert store.portable()["inner"]["residual"]["w"].tolist() == [wanted]
    store.load(inside, 1, 2, "raise", (apart, (7, 3)))
    assert store.portable()["inner"]["residual"]["w"].tolist() == [1.0]


def test_replicated_slots_are_those_of_rank_0() -> None:
    saved = [{"moment": {"w": torch.full((2,), float(r + 1))}} for r in range(2)]
    assert redistribute(Counted(), saved, 3)[2]["moment"]["w"].tolist() == [1.0, 1.0]


def test_a_policy_without_state_costs_nothing() -> None:
    store = store_of("mean")
    assert store.part(ALL) is store.part(Layout({"w": (4, 3)}))
    assert store.portable() == {}
    store.load({})


STRANGE = [
    {"residual": None}, {"residual": {"w": 1}}, {"residual": torch.zeros(3)}, {"residual/w": torch.zeros(4, 3)},
    {1: {2: torch.zeros(1)}}, 3, "text", None, torch.zeros(2),
]  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE, ids=lambda s: str(s)[:20])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_no_state_at_all_is_refused_with_its_differences(strange: Any, size: int) -> None:
    store = store_of()
    fill(store, ALL, 5.0)
    good = store.portable()
    for given in (strange, [strange], (good, strange)):
        with pytest.raises(ConfigurationError, match=r"residual/w is missing|of type|not expected"):
            store.load(given, 0, size)
    for branch in ({"inner": None}, {"inner": 3}, {"inner": {"q": []}}, {"more": "text"}):
        with pytest.raises(ConfigurationError, match=r"(inner|inner/q|more) is of type"):
            store.load([good | branch], 0, size)
    assert store.part(ALL)["residual"].flat.eq(5).all()


def test_a_branch_without_leaves_may_be_missing() -> None:
    store = store_of()
    fill(store, ALL, 6.0)
    whole = store.portable()
    bare = {"residual": whole["residual"]}
    for saved in ([whole, bare], [bare, whole]):
        store.load(saved, 0, 4)
        assert store.part(ALL)["residual"].flat.eq(3).all()


class Run:
    """One rank's synchronizer around a small model."""

    def __init__(self, policy: str = "topk(ratio=0.3)") -> None:
        self.model = torch.nn.Linear(8, 4)
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                p.copy_(torch.linspace(-1, 1 + i, p.numel()).view(p.shape))
        self.sync = GradientSynchronizer(self.model, torch.optim.SGD(self.model.parameters(), lr=0.0), policy=policy)

    def backward(self, scale: float) -> list[Tensor]:
        self.sync.optimizer.zero_grad()
        (self.sync.model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum() * scale).backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@pytest.fixture
def alone() -> Iterator[None]:
    with session(backend="torch", rank=0, size=1):
        yield


@pytest.mark.parametrize("set_again", [True, False])
@pytest.mark.parametrize("scale", [512.0, 700.0])
def test_a_state_knows_the_scale_that_it_is_in(scale: float, set_again: bool, alone: None) -> None:
    one, other = Run(), Run()
    one.sync.loss_scale = 1024.0
    one.backward(1024.0)
    one.sync.loss_scale = scale  # as a GradScaler's update says; the residual is still in units of 1024
    saved = one.sync.state_dict()
    other.sync.load_state_dict(saved)
    assert other.sync.loss_scale == scale
    if set_again:
        other.sync.loss_scale = scale
    for run in (one, other):
        run.found = [run.backward(scale), run.backward(scale)]  # type: ignore[attr-defined]
        run.state = run.sync.state_dict()  # type: ignore[attr-defined]
    for a, b in zip(one.found, other.found, strict=True):  # type: ignore[attr-defined]
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    residuals = (run.state["state"]["residual"] for run in (one, other))  # type: ignore[attr-defined]
    mine, theirs = residuals
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(t.any() for t in mine.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("loss_scale"), "loss_scale missing"),
        (lambda s: s.pop("state_scale"), "state_scale missing"),
        (lambda s: s.pop("step"), "step missing"),
        (lambda s: s.pop("state"), "state missing"),
        (lambda s: s.pop("policy"), "policy missing"),
        (lambda s: s.clear(), "complete on rank 0 alone"),
        (lambda s: s.update(policy="mean"), "one of policy 'mean'"),
        (lambda s: s.update(step="ten"), "step='ten'"),
        (lambda s: s.update(step=1.5), "step=1.5"),
        (lambda s: s.update(loss_scale=0.0), "loss_scale=0.0"),
        (lambda s: s.update(state_scale=math.nan), "state_scale=nan"),
        (lambda s: s.update(size=None), "size=None"),
        (lambda s: s.update(size=2), "saved by 2 ranks"),
        (lambda s: s.update(state=None), "of type NoneType"),
        (lambda s: s.update(state={"residual": 1}), "residual is of type int"),
        (lambda s: s.update(ranks={}), "ranks of type dict"),
        (lambda s: s.update(ranks=[]), "no state to load"),
        (lambda s: s.update(ranks=[s["state"], {}]), "of rank 1 does not fit"),
    ],
)
def test_a_synchronizer_takes_all_of_a_state_or_nothing(change: Any, message: str, alone: None) -> None:
    run = Run("ef(bf16)")
    run.sync.loss_scale = 8.0
    run.backward(8.0)
    before = run.sync.state_dict()
    bad = {"loss_scale": 2.0, "state_scale": 2.0, "step": 7, "size": 1, "nodes": [], "policy": before["policy"]}
    bad["state"] = {"residual": {n: t + 1 for n, t in before["state"]["residual"].items()}, "inner": {}}
    change(bad)
    with pytest.raises(ConfigurationError, match=message):
        run.sync.load_state_dict(bad)
    after = run.sync.state_dict()
    assert {k: v for k, v in after.items() if k != "state"} == {k: v for k, v in before.items() if k != "state"}
    assert all(torch.equal(t, before["state"]["residual"][n]) for n, t in after["state"]["residual"].items())


def test_a_policy_that_is_not_defined_for_one_rank_is_refused_at_once(alone: None) -> None:
    with pytest.raises(ConfigurationError, match="Krum: f=1"):
        Run("krum")
    with pytest.raises(ConfigurationError, match="Krum: f=1"):
        average_gradients(torch.nn.Linear(2, 2), policy="krum")


@pytest.mark.parametrize("strange", [None, [], 3])
def test_a_synchronizer_takes_dicts_alone(strange: Any, alone: None) -> None:
    with pytest.raises(ConfigurationError, match="is a dict"):
        Run().sync.load_state_dict(strange)


def test_an_owned_leaf_without_error_feedback_cannot_be_redistributed() -> None:
    @dataclass(frozen=True)
    class Owning(Policy):
        slots = {"error": Slot(local=True, owned=True)}

        def init(self, params: Mapping[str, Tensor]) -> State:
            return {"error": {name: torch.zeros_like(p) for name, p in params.items()}}

    store = StateStore(Owning(), {"w": torch.zeros(2)})
    saved = store.portable()
    store.load([saved, saved], 0, 2)
    with pytest.raises(ConfigurationError, match=r"error: Slot\(owned=True\) needs error feedback around its policy"):
        store.load([saved, saved], 0, 3)
