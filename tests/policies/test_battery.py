"""What holds for every policy, over the one list of all: :mod:`policies`.

Everything here runs in one process. Reductions of a simulation run in rank order, so what may differ "to rounding"
between backends is mostly equal here; where a test allows a difference, it says how much arithmetic is behind it.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError, SpecError, WeightError
from hvdbridge.execution import simulation
from hvdbridge.execution.simulation import Simulation
from hvdbridge.execution.state_store import StateStore, leaves, slot_of
from hvdbridge.policies import ErrorFeedback, Partition, bytes_per_step, from_spec, name_of, to_spec
from hvdbridge.policy.base import Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.policy.dry_run import Asked, dry_run
from hvdbridge.policy.options import options_of
from policies.policies import CASES, SHAPES, Case, Grads, Trained, bits, close, gradients, unlisted, weights_for

SIZES = (1, 2, 3, 4, 8)
ONE_BUCKET = [list(SHAPES)]
SEVERAL = [["one"], ["empty"], ["scale", "fc.bias", "wide.weight"], ["fc.weight"], ["conv.weight"]]
REVERSED = [list(reversed(SHAPES))]

every = pytest.mark.parametrize("case", CASES, ids=str)


def every_that(wanted: Iterable[Case]) -> Any:
    return pytest.mark.parametrize("case", list(wanted), ids=str)


class Arranged(Trained):
    """Buckets are laid anew in each step (the last arrangement stays), as DDP does after its first.

    Policies of scope "step" see one bucket, in the order of the arrangement, as they do under a synchronizer.
    """

    def __init__(self, case: Case, size: int, *arrangements: list[list[str]]) -> None:
        super().__init__(case, size)
        self.arrangements = arrangements

    def step(self, grads_per_rank: Any, weights: Any = None) -> list[Grads]:
        arrangement = self.arrangements[min(self.steps, len(self.arrangements) - 1)]
        if self.policy.scope == "step":
            arrangement = [[name for names in arrangement for name in names]]
        wanted = [Layout({name: SHAPES[name] for name in names}, *self._model) for names in arrangement]
        if [layout.names for layout in self._layouts] != [layout.names for layout in wanted]:
            self._layouts = wanted
        return super().step(grads_per_rank, weights)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits differ: an empty list is what tests want."""
    return [name for name in a if (a[name].dtype, bits(a[name])) != (b[name].dtype, bits(b[name]))]


def flat_state(simulated: Simulation) -> list[dict[str, Tensor]]:
    """Each rank's state as one dict ``path/name -> tensor``."""
    return [flat_tree(store.portable()) for store in simulated.stores]


def flat_tree(state: State) -> dict[str, Tensor]:
    return {"/".join((*path, name)): t for path, leaf in leaves(state) for name, t in leaf.items()}


def test_every_built_in_policy_is_in_the_list() -> None:
    assert not unlisted(), f"add a line to tests/policies/policies.py for {sorted(unlisted())}"


def test_no_case_stands_twice() -> None:
    assert len({to_spec(case.policy) for case in CASES}) == len(CASES)


def alike(case: Case, simulated: Simulation, found: Sequence[Grads], where: str = "") -> None:
    """All ranks have the same bits, where they must."""
    if case.alike_after(simulated.steps - 1):
        for rank, mine in enumerate(found):
            assert not same(mine, found[0]), f"{where} rank {rank}"


def finite(found: Sequence[Grads], where: str = "") -> None:
    for rank, mine in enumerate(found):
        wrong = [name for name, tensor in mine.items() if not tensor.isfinite().all()]
        assert not wrong, f"{where} rank {rank}"


@every
def test_all_ranks_end_with_the_same_bits(case: Case) -> None:
    for size in case.sizes(*SIZES):
        simulated = Trained(case, size)
        plans: list[list[float] | None] = [None, weights_for(case, size), None, None]
        if size > case.min_size:
            plans[2] = [*weights_for(case, size)[:-1], 0.0]
        for step, weights in enumerate(plans):
            found = simulated.step(gradients(size, step), weights)
            for mine in found:
                kinds = {n: (t.shape, t.dtype) for n, t in mine.items()}
                assert kinds == {n: (torch.Size(s), torch.float32) for n, s in SHAPES.items()}
            finite(found, f"{size} ranks, step {step},")
            alike(case, simulated, found, f"{size} ranks, step {step},")


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_types_and_non_contiguous_gradients(case: Case, dtype: torch.dtype) -> None:
    size = case.sizes(2)[0]
    one, other = Trained(case, size, dtype), Trained(case, size, dtype)
    for step in range(2):
        grads = gradients(size, step, dtype)
        found = one.step(grads)
        scattered = [{n: torch.stack([g, g], -1)[..., 0] for n, g in rank.items()} for rank in grads]
        assert not scattered[0]["fc.weight"].is_contiguous()
        for mine, again in zip(found, other.step(scattered), strict=True):
            assert {t.dtype for t in mine.values()} == {dtype}
            assert not same(mine, again)
        finite(found)
        alike(case, one, found)


@every
def test_only_what_users_make_follows_a_default_device(case: Case) -> None:
    """Memory of ours that is on "meta" would have no values; on a GPU it would meet what is on the CPU."""
    size = case.sizes(2)[0]
    grads = [gradients(size, step) for step in range(case.horizon)]
    found: list[list[list[Grads]]] = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            simulated = Trained(case, size)
            found.append([simulated.step([dict(each) for each in step]) for step in grads])
            found[-1].append(flat_state(simulated))
    for step, again in zip(*found, strict=True):
        for mine, other in zip(step, again, strict=True):
            assert not same(mine, other)


@every_that(case for case in CASES if case.policy.deterministic and case.aggregates)
def test_double_gradients_give_what_single_ones_give(case: Case) -> None:
    """To 1e-4 of the norm: sums in float32 are off by 1e-6, and near-ties that fall otherwise are rare."""
    size = case.sizes(3)[0]
    single, double = Trained(case, size), Trained(case, size, torch.float64)
    for step in range(case.horizon):
        a = single.step(gradients(size, step))[0]
        b = double.step([{n: t.double() for n, t in g.items()} for g in gradients(size, step)])[0]
    off = sum(float((a[n].double() - b[n]).square().sum()) for n in SHAPES) ** 0.5
    assert off <= case.precision * sum(float(b[n].square().sum()) for n in SHAPES) ** 0.5


@every_that(case for case in CASES if not case.flat)
def test_bucket_boundaries_and_order_do_not_matter(case: Case) -> None:
    """Exactly at 2 ranks. Above, kernels may add in another order where a bucket holds more matrices."""
    for size in case.sizes(1, 2, 3):
        whole, several, rebuilt = (
            Arranged(case, size, *a) for a in ([ONE_BUCKET], [SEVERAL], [ONE_BUCKET, REVERSED, SEVERAL])
        )
        for step in range(4):
            grads, weights = gradients(size, step), weights_for(case, size) if step == 2 else None
            want = whole.step(grads, weights)
            for other in (several, rebuilt):
                for mine, theirs in zip(want, other.step(grads, weights), strict=True):
                    if size <= 2:
                        assert not same(mine, theirs), f"{size} ranks, step {step}"
                    else:
                        close(case, mine, theirs, grads, flips=1e-3)
        if size <= 2:
            for a, b, c in zip(*map(flat_state, (whole, several, rebuilt)), strict=True):
                assert not same(a, b)
                assert not same(a, c)


@every_that(c for c in CASES if c.policy.deterministic and not c.order_matters and c.aggregates)
def test_the_order_of_ranks_does_not_matter(case: Case) -> None:
    """Until the first aggregate: in the next, residuals of what owners rounded lie on other ranks."""
    for size in case.sizes(2, 3, 4, 8):
        weights = weights_for(case, size)
        order = [*range(1, size), 0]
        one, other = Trained(case, size), Trained(case, size)
        for step in range(case.horizon):
            grads = gradients(size, step)
            a = one.step(grads, weights)[0]
            b = other.step([grads[r] for r in order], [weights[r] for r in order])[0]
        close(case, a, b, grads, flips=2e-3)


@every
def test_equal_weights_give_what_none_give(case: Case) -> None:
    for size in case.sizes(1, 3, 4):
        one, other = Trained(case, size), Trained(case, size)
        for step in range(2):
            grads = gradients(size, step)
            for mine, theirs in zip(one.step(grads), other.step(grads, [3.0] * size), strict=True):
                close(case, mine, theirs, grads)


@every_that(case for case in CASES if not case.policy.unequal_weights)
def test_unequal_weights_are_refused_where_they_mean_nothing(case: Case) -> None:
    size = case.sizes(2)[0]
    with pytest.raises(WeightError, match="unequal weights"):
        Trained(case, size).step(gradients(size, 0), [2.0, *[1.0] * (size - 1)])


@every
def test_a_rank_of_weight_zero_is_excluded(case: Case) -> None:
    """Not even its NaN arrives, and what it remembers for itself stays."""
    for needed in case.sizes(2, 3):
        size = needed + 1
        out = size - 2
        simulated = Trained(case, size)
        simulated.step(gradients(size, 0))
        before = flat_state(simulated)
        grads, weights = gradients(size, 1), weights_for(case, size)
        grads[out] = {n: torch.full(s, math.nan) for n, s in SHAPES.items()}
        weights[out] = 0.0
        found = simulated.step(grads, weights)
        assert not simulated.skipped
        finite(found, f"{size} ranks,")
        alike(case, simulated, found, f"{size} ranks,")
        kept = simulated.stores[out].portable()
        finite([flat_tree(kept)], f"{size} ranks, state,")
        for path, leaf in leaves(kept):
            if slot_of(case.policy, path).local and case.local_size is None:  # else it is that of the whole node
                keys = ["/".join((*path, name)) for name in leaf]
                after = flat_tree(kept)
                assert not same({k: before[out][k] for k in keys}, {k: after[k] for k in keys}), path


@every_that(c for c in CASES if c.policy.deterministic and not c.counts_excluded and c.aggregates)
def test_a_rank_of_weight_zero_matters_no_more_than_an_absent_one(case: Case) -> None:
    """Until the first aggregate: in the next, residuals of what owners rounded lie on other ranks."""
    for size in case.sizes(2, 3):
        weights = weights_for(case, size + 1)
        others = [rank for rank in range(size + 1) if rank != size - 1]
        weights[size - 1] = 0.0
        one, other = Trained(case, size + 1), Trained(case, size)
        for step in range(case.horizon):
            grads = gradients(size + 1, step)
            a = one.step(grads, weights)[0]
            b = other.step([grads[r] for r in others], [weights[r] for r in others])[0]
        if case.by_size:
            a = {name: tensor * size / (size + 1) for name, tensor in a.items()}
        close(case, a, b, grads, flips=2e-3)


@every
def test_a_total_weight_of_zero_skips_the_step(case: Case) -> None:
    size = case.sizes(2)[0]
    simulated = Trained(case, size)
    simulated.step(gradients(size, 0))
    before, parameters = flat_state(simulated), simulated.parameters
    updates = simulated.step(gradients(size, 1), [0.0] * size)
    assert simulated.skipped
    assert not any(t.count_nonzero() for mine in updates for t in mine.values())
    assert not any(same(a, b) for a, b in zip(before, flat_state(simulated), strict=True))
    assert not any(same(a, b) for a, b in zip(parameters, simulated.after_step(parameters), strict=True))


@every
def test_zero_huge_and_denormal_gradients(case: Case) -> None:
    for size in case.sizes(1, 3):
        for value in (0.0, 1e30, 1e-40):
            if value > 1 and case.overflows:
                continue
            simulated = Trained(case, size)
            for step in range(3):
                where = f"{size} ranks, {value}, step {step},"
                found = simulated.step(
                    [{n: value * g.sign() for n, g in rank.items()} for rank in gradients(size, step)]
                )
                finite(found, where)
                alike(case, simulated, found, where)
                if value == 0 and not case.noisy:  # averages of parameters are rounded
                    limit = 0 if case.first_due is None else 2.0**-22
                    assert not any((t.abs() > limit).any() for mine in found for t in mine.values()), where
            finite(flat_state(simulated), f"{size} ranks, {value}, state,")
            finite(simulated.step(gradients(size, 9)), f"{size} ranks, {value}, afterwards,")


@every_that(c for c in CASES if not (c.overflows or c.flat or c.policy.scope == "step"))
def test_one_huge_parameter_does_not_drown_the_others(case: Case) -> None:
    size = case.sizes(3)[0]
    usual, huge = Trained(case, size), Trained(case, size)
    for step in range(case.horizon):
        grads = gradients(size, step)
        a = usual.step(grads)
        for mine in grads:
            mine["fc.weight"] *= 1e30
        b = huge.step(grads)
        finite(b)
        for mine, theirs in zip(a, b, strict=True):
            assert not set(same(mine, theirs)) - {"fc.weight"}


@every_that(case for case in CASES if case.survives is None and case.aggregates)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_non_finite_gradient_reaches_every_rank(case: Case, value: float) -> None:
    """On every rank, and only in that parameter; its state stays as it was, and it goes on.

    A policy that acts on parameters finds them non-finite afterwards, so it can only go on with others.
    """
    hit = ("fc.weight", "scale")
    for size in case.sizes(1, 3):
        simulated = Trained(case, size)
        simulated.step(gradients(size, 0))
        before = flat_state(simulated)
        grads = gradients(size, 1)
        grads[-1]["fc.weight"].view(-1)[1234] = value
        grads[0]["scale"].fill_(value)
        found = simulated.step(grads)
        after = flat_state(simulated)
        for late in range(case.late):
            finite(found)
            found = simulated.step(gradients(size, 2 + late))
            after = flat_state(simulated)
        assert case.alike_after(simulated.steps - 1), "the test must end with an average"
        for mine in found:
            assert all(not mine[name].isfinite().all() for name in hit), f"{size} ranks"
            assert all(torch.equal(mine[n].isfinite(), found[0][n].isfinite()) for n in SHAPES)
            if case.policy.scope == "bucket" and not case.flat:
                finite([{n: t for n, t in mine.items() if n not in hit}], f"{size} ranks, other parameters,")
        finite(after, f"{size} ranks, state,")
        if not case.late:
            for old, new in zip(before, after, strict=True):
                keys = [key for key in old if key.rpartition("/")[2] in hit]
                assert not same({k: old[k] for k in keys}, {k: new[k] for k in keys})
        simulated.parameters = [{n: torch.full(s, 0.5) for n, s in SHAPES.items()} for _ in range(size)]
        for step in range(2):
            finite(simulated.step(gradients(size, 5 + step)), f"{size} ranks, afterwards,")


@every_that(case for case in CASES if case.survives)
def test_faulty_ranks_are_outvoted(case: Case) -> None:
    assert case.survives is not None
    for size in case.sizes(2 * case.survives + 1, 8):
        simulated = Trained(case, size)
        for step, value in enumerate((math.nan, math.inf, -math.inf, 1e30)):
            grads = gradients(size, step)
            for rank in range(case.survives):
                grads[rank - 1] = {n: torch.full_like(g, value) for n, g in grads[rank - 1].items()}
            found = simulated.step(grads)
            honest = max(float(g.abs().max()) for mine in grads[:-1] for g in mine.values() if g.numel())
            finite(found, f"{size} ranks, {value},")
            alike(case, simulated, found)
            assert all(t.abs().max() <= 10 * honest for t in found[0].values() if t.numel()), f"{size} ranks, {value}"
        finite(flat_state(simulated))


@every
def test_resumed_is_as_if_never_interrupted(case: Case) -> None:
    for size in case.sizes(2, 3):
        whole = Trained(case, size)
        for step in range(3):
            whole.step(gradients(size, step), weights_for(case, size))
        file = io.BytesIO()
        torch.save([store.portable() for store in whole.stores], file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        resumed = Trained(case, size)
        for rank, store in enumerate(resumed.stores):
            store.load(saved, rank, size)
        resumed.steps, resumed.parameters = whole.steps, whole.parameters
        for step in range(3, 6):
            grads = gradients(size, step)
            for mine, theirs in zip(whole.step(grads), resumed.step(grads), strict=True):
                assert not same(mine, theirs), f"{size} ranks, step {step}"
        assert not any(same(a, b) for a, b in zip(flat_state(whole), flat_state(resumed), strict=True))


@every_that(case for case in CASES if case.policy.deterministic and not case.absolute and case.first_due is None)
def test_a_change_of_the_loss_scale_changes_nothing(case: Case) -> None:
    """A power of two costs no rounding, so the updates are those of before times it, bit by bit."""
    size = case.sizes(3)[0]
    usual, scaled = Trained(case, size), Trained(case, size)
    for step in range(4):
        grads = gradients(size, step)
        a = usual.step(grads)
        if step == 2:
            for store in scaled.stores:
                store.rescale(4.0)
        factor = 4.0 if step >= 2 else 1.0
        b = scaled.step([{n: g * factor for n, g in rank.items()} for rank in grads])
        for mine, theirs in zip(a, b, strict=True):
            assert not same({n: t * factor for n, t in mine.items()}, theirs), f"step {step}"


@every
def test_the_state_is_tensors_by_parameter_name_of_their_own(case: Case) -> None:
    size = case.sizes(2)[0]
    simulated = Trained(case, size)
    fresh = {key: (t.shape, t.dtype) for key, t in flat_state(simulated)[0].items()}
    simulated.step(gradients(size, 0))
    held = simulated.stores[0].portable()
    for path, leaf in leaves(held):
        assert set(leaf) <= set(SHAPES), path
        slot_of(case.policy, path)
    assert {key: (t.shape, t.dtype) for key, t in flat_tree(held).items()} == fresh
    # Steps replace tensors; what was handed out before stays as it was.
    part = {k: t.clone() for k, t in flat_tree(simulated.stores[0].part(simulated._layouts[0])).items()}
    views = flat_tree(simulated.stores[0].part(simulated._layouts[0]))
    simulated.step(gradients(size, 1))
    assert not same(part, views)


@every
def test_another_number_of_ranks_keeps_sums_of_what_is_local(case: Case) -> None:
    """Residuals are float32: each of the N new ones is rounded once, 2^-24 of it."""
    old = case.sizes(3)[0]
    simulated = Trained(case, old)
    for step in range(2):
        simulated.step(gradients(old, step))
    saved = [store.portable() for store in simulated.stores]
    before = flat_state(simulated)
    for size in {case.sizes(2)[0], old + 1} - {old}:
        other = Trained(case, size)
        for rank, store in enumerate(other.stores):
            with pytest.raises(ConfigurationError, match=f"{old} ranks"):
                store.load(saved, rank, size, on_resize="raise")
            store.load(saved, rank, size)
        after = flat_state(other)
        for keys in joint_leaves(case, saved[0]):
            want, got = (sum(s[key].double() for s in states for key in keys) for states in (before, after))
            largest = max((float(s[key].abs().max()) for s in before for key in keys if s[key].numel()), default=0.0)
            assert bool(((want - got).abs() <= (old + size) * largest * 2.0**-23).all()), keys
        for key in before[0].keys() - local_leaves(case, saved[0]).keys():
            assert all(not same({key: before[0][key]}, {key: mine[key]}) for mine in after), key
        other.steps = simulated.steps
        for step in range(2):
            found = other.step(gradients(size, 5 + step))
            finite(found)
            alike(case, other, found)


@every
def test_another_number_of_ranks_begins_anew_with_what_is_local(case: Case) -> None:
    old, size = case.sizes(3)[0], case.sizes(3)[0] + 1
    simulated = Trained(case, old)
    for step in range(2):
        simulated.step(gradients(old, step))
    other = Trained(case, size)
    fresh, before = flat_state(other)[0], flat_state(simulated)[0]
    for rank, store in enumerate(other.stores):
        store.load([store.portable() for store in simulated.stores], rank, size, on_resize="reset")
    local = local_leaves(case, other.stores[0].portable())
    for mine in flat_state(other):
        assert not same(mine, {key: (fresh if key in local else before)[key] for key in mine})


def local_leaves(case: Case, state: State) -> dict[str, str]:
    """``path/name -> name`` of what is local to ranks."""
    return {
        "/".join((*path, name)): name
        for path, leaf in leaves(state)
        for name in leaf
        if slot_of(case.policy, path).local
    }


def joint_leaves(case: Case, state: State) -> Iterable[list[str]]:
    """``path/name`` of what is local to ranks, each with what joins it when owners change (:attr:`Slot.owned`)."""
    joint: dict[tuple[str, ...], list[str]] = {}
    for key, name in local_leaves(case, state).items():
        path = tuple(key.removesuffix(f"/{name}").split("/"))
        target = (*path[:-2], "residual") if slot_of(case.policy, path).owned else path
        joint.setdefault((*target, name), []).append(key)
    return joint.values()


@every
def test_a_state_that_does_not_fit_is_refused_whole(case: Case) -> None:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    store = StateStore(case.policy, params)
    mine = flat_tree(store.portable())
    strange = StateStore(from_spec("warmup(ef(mean), first=ef(bf16))"), params).portable()
    with pytest.raises(ConfigurationError, match=r"\n  .*(is not expected|is missing|, expected )"):
        store.load(strange)
    if not mine:
        return
    with pytest.raises(ConfigurationError, match="is missing"):
        store.load({})
    renamed = StateStore(case.policy, {f"module.{name}": p for name, p in params.items()}).portable()
    with pytest.raises(ConfigurationError, match=r"missing[\s\S]*module\..* is not expected|and \d+ more"):
        store.load(renamed)
    reshaped = StateStore(case.policy, {name: torch.zeros(5, 7) for name in params}).portable()
    if flat_tree(reshaped).keys() == mine.keys():
        with pytest.raises(ConfigurationError, match=r"is \w+\[.*\], expected \w+\["):
            store.load(reshaped)
    assert not same(mine, flat_tree(store.portable()))


@every
def test_the_spec_says_all(case: Case) -> None:
    policy = case.policy
    assert from_spec(to_spec(policy)) == policy
    assert hash(from_spec(case.spec)) == hash(policy)
    assert type(policy).__doc__
    with pytest.raises(FrozenInstanceError):
        policy.anything = 1  # type: ignore[attr-defined]


@every
def test_bad_options_are_refused_with_their_limits(case: Case) -> None:
    cls = type(case.policy)
    name = name_of(cls)
    if not any("collects" in field.metadata for field in options_of(cls).values()):
        with pytest.raises(SpecError, match="has no option 'surely_unknown'"):
            from_spec(f"{name}(surely_unknown=3)")
    for option, field in options_of(cls).items():
        limits = field.metadata.get("limits")
        if limits is None:
            continue
        whole = isinstance(getattr(case.policy, option), int)
        for bound, sign in ((limits.above, 0), (limits.at_least, -1), (limits.below, 0), (limits.at_most, 1)):
            if bound is not None:
                wrong = int(bound) + sign if whole else bound + sign
                with pytest.raises(ConfigurationError, match=f"{option}=.*must be"):
                    replace(case.policy, **{option: wrong})
        if not whole:
            with pytest.raises(ConfigurationError, match=f"{option}=nan.*must be"):
                replace(case.policy, **{option: math.nan})
        with pytest.raises(ConfigurationError, match=f"{option}="):
            replace(case.policy, **{option: "many"})


SENT: list[Tensor] = []


@dataclass(frozen=True)
class Recorded(Policy):
    """Asks for what was sent, as ErrorFeedback does, and notes it."""

    inner: Policy

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        asked = replace(bucket.weighted(), needs_sent=True)
        kept = asked.buffer.clone()
        result = yield from self.inner.aggregate(asked, state["inner"])
        if result.rest is None:
            assert torch.equal(kept, asked.buffer), "the buffer was changed although `sent` says it would not be"
        left = result.left_of(asked)
        assert left.shape == kept.shape
        SENT.append(kept - left)
        return replace(result, state={"inner": result.state})


@every_that(case for case in CASES if case.policy.additive)
def test_the_update_is_the_sum_of_what_was_sent(case: Case) -> None:
    for size in case.sizes(1, 2, 3, 4):
        simulated = Simulation(Recorded(case.policy), SHAPES, size, case.local_size)
        for step in range(2):
            SENT.clear()
            grads = gradients(size, step)
            update = simulated.step(grads, weights_for(case, size))[0]
            layout = simulated._layouts[0]
            total = torch.stack([sent.double() for sent in SENT]).sum(0)
            parts = {n: total[o : o + layout.sizes[n]].view(SHAPES[n]) for n, o in layout.offsets.items()}
            close(case, update, parts, grads, factor=case.factor)


@every_that(case for case in CASES if case.policy.additive)
def test_what_is_asked_does_not_change_the_update(case: Case) -> None:
    """That somebody wants to know what was sent changes nothing in what is sent."""
    size = case.sizes(2)[0]
    asked, plain = Simulation(Recorded(case.policy), SHAPES, size, case.local_size), Trained(case, size)
    for step in range(2):
        grads = gradients(size, step)
        assert not same(asked.step(grads)[0], plain.step(grads)[0])


def telescoping() -> Iterable[Case]:
    found = [case for case in CASES if case.telescopes and (case.feeds_back or case.policy.additive)]
    found = [case if case.feeds_back else replace(case, spec=to_spec(ErrorFeedback(case.policy))) for case in found]
    return {case.policy: case for case in found}.values()


@every_that(case for case in CASES if case.policy.rounds is not None)
def test_rounds_are_what_it_says(case: Case) -> None:
    """The most that a bucket asks for; with ``partition`` one of all parameters, as others fall under fewer rules."""
    params = {name: torch.empty(shape) for name, shape in SHAPES.items()}

    def rounds(bucket_mb: float) -> Counter[int]:
        events = dry_run(case.policy, params, case.sizes(2)[0], bucket_mb=bucket_mb)
        return Counter(event.bucket for event in events if isinstance(event, Asked))

    small, whole = rounds(0.001), rounds(25.0)
    assert len(small) > 1 or case.policy.scope == "step"
    assert len(whole) == 1
    most, said = max(whole.values()), case.policy.rounds
    if "16(" in case.spec:  # halves of another policy, as if all that it asks for were sums
        assert said // 2 <= most <= said
    else:
        assert most == said
    assert max(small.values()) == most or isinstance(case.policy, Partition)


@every_that(case for case in CASES if case.policy.bytewise)
def test_what_is_bytewise_sends_a_byte_for_each_element(case: Case) -> None:
    """Or more; in the last phase of those that change. A matrix, since ``powersgd`` and its like send a vector whole;
    nodes of one rank."""
    elements = 256 * 256
    assert bytes_per_step(case.policy, {"w": (256, 256)}, case.sizes(2)[0], 10**6, local_size=1) >= elements


@every_that(telescoping())
def test_feedback_telescopes(case: Case) -> None:
    """Updates plus final residuals are the inputs: each of T steps rounds the corrected gradient, the residual and
    the update, of values below 16 (the largest gradient is 16 in magnitude; residuals grow to some multiple)."""
    steps = 5
    for size in case.sizes(1, 2, 3):
        simulated = Trained(case, size)
        balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        largest = 0.0
        for step in range(steps):
            grads, weights = gradients(size, step), weights_for(case, size)
            update = simulated.step(grads, weights)[0]
            for name in SHAPES:
                balance[name] += sum(w / sum(weights) * g[name].double() for w, g in zip(weights, grads, strict=True))
                balance[name] -= update[name].double()
            states = [store.portable() for store in simulated.stores]
            largest = max(largest, *(float(t.abs().max()) for s in states for t in flat_tree(s).values() if t.numel()))
        for name in SHAPES:
            residual = sum(state["residual"][name].double() for state in states)
            bound = case.factor * steps * (size + 3) * max(16.0, 4 * largest) * 2.0**-24
            assert bool(((balance[name] - residual).abs() <= bound).all()), f"{size} ranks, {name}"


def overlap(a: Tensor, b: Tensor | None) -> bool:
    """Whether two contiguous tensors have memory in common."""
    if b is None:
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


@pytest.mark.parametrize(
    ("alone", "dtype"),
    [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)],
    ids=["together", "together-bfloat16", "alone"],
)
@pytest.mark.parametrize("case", [*CASES, Case("ef(mean(exact=true))")], ids=str)
def test_nobody_looks_at_what_was_given_back(
    case: Case, alone: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle memory may hold anything, and is never the source's bucket. Nor does it matter where an answer stands: with
    communicators a group of one has its own tensor for it, and a reduction may be made in that of the request."""
    buckets: list[Tensor] = []
    size = case.min_size if alone else max(case.min_size, 3)
    answers = simulation.execute

    def execute(requests: Sequence[Collective]) -> list[Tensor]:
        assert not any(overlap(request.tensor, getattr(request, "out", None)) for request in requests)
        match requests:
            case [AllToAll(tensor)]:
                return [tensor]
            case [AllGather(tensor)]:
                return [tensor.unsqueeze(0)]
        found = answers(requests)
        for rank, request in enumerate(requests):
            if isinstance(request, AllReduce | Broadcast):
                found[rank] = request.tensor.copy_(found[rank])
            if isinstance(request, ReduceScatter):
                found[rank] = request.tensor[rank].copy_(found[rank])
        return found

    def train() -> list[Any]:
        simulated, seen = Trained(case, size, dtype, buckets=SEVERAL), []
        for step in range(4):
            weights = weights_for(case, size) if step == 2 else None
            updates = simulated.step(gradients(size, step, dtype), weights)
            seen += [bits(update[name]) for update in updates for name in update]
        states = [store.portable() for store in simulated.stores]
        return [*seen, *(bits(t) for state in states for _, leaf in leaves(state) for t in leaf.values())]

    clean = train()
    monkeypatch.setattr(simulation, "execute", execute)
    assert train() == clean
    give, bucket = BufferPool.give, Simulation._bucket

    def known(self: Simulation, flat: Tensor, *rest: Any) -> Bucket:
        buckets.append(flat)
        return bucket(self, flat, *rest)

    def spoil(memory: BufferPool, *tensors: Tensor, but: Sequence[Tensor] = ()) -> None:
        give(memory, *tensors, but=but)
        for block in memory._idle:
            assert all(block.data_ptr() != flat.untyped_storage().data_ptr() for flat in buckets if flat.numel())
            torch.empty(0, dtype=torch.uint8).set_(block).fill_(0xFF)

    monkeypatch.setattr(BufferPool, "give", spoil)
    monkeypatch.setattr(Simulation, "_bucket", known)
    assert train() == clean
