"""What the first edition's users imported still works, and says what to import instead."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import hvdbridge
from hvdbridge.deprecated import MOVED
from hvdbridge.execution.flow import Submission
from hvdbridge.execution.scheduler import ThreadScheduler
from hvdbridge.execution.state_store import slot_of
from hvdbridge.kernels import codes, select, shuffle
from hvdbridge.policies import Bf16, Clip, ErrorFeedback, LocalSgd, shards
from hvdbridge.policies.dense import bucket_mb
from hvdbridge.policies.wrappers import averaged
from hvdbridge.policy.base import State, flush, start_from, switches
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.reduction import parameters
from hvdbridge.reduction.bucket_size import check_rehearses

STARTING = ("backends.mpi", "backends.horovod", "reduction.horovod_optimizer")
IMPORTABLE = [old for old, new in MOVED.items() if not new.startswith(STARTING)]
"""To import the others starts a library."""


LAYOUT = Layout({"w": (3,)})


@pytest.mark.parametrize("old", IMPORTABLE)
def test_an_old_module_is_the_new_one(old: str) -> None:
    modules = [importlib.import_module(f"hvdbridge.{new}") for new in MOVED[old].split()]
    new = modules[0]
    sys.modules.pop(f"hvdbridge.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"hvdbridge\.{old} is {new.__name__} now") as caught:
        stand_in = importlib.import_module(f"hvdbridge.{old}")
    assert caught[-1].filename == importlib.__file__  # whoever imports, and not our own file
    for module in reversed(modules):
        assert all(getattr(stand_in, name) for name in vars(module) if isinstance(getattr(module, name), type))
    public = [name for name in vars(new) if not name.startswith("_")]
    assert all(getattr(stand_in, name) is getattr(new, name) for name in public)
    with pytest.raises(AttributeError, match="internal names changed with release"):
        stand_in.no_such_name  # noqa: B018


def test_classes_are_the_same() -> None:
    sys.modules.pop("hvdbridge.bucket", None)
    with pytest.warns(DeprecationWarning, match="policy.bucket"):
        from hvdbridge.bucket import Bucket
    assert Bucket is hvdbridge.Bucket


def test_old_members_are_the_new_ones() -> None:
    bucket = hvdbridge.Bucket(torch.ones(3), Layout({"w": (3,)}))
    with pytest.warns(DeprecationWarning, match="Bucket.room is Bucket.output now") as caught:
        assert bucket.room(torch.float32) is bucket.buffer
    assert caught[-1].filename == __file__
    with pytest.warns(DeprecationWarning, match="Bucket.rooms is Bucket.pool now"):
        assert bucket.rooms is bucket.pool
    with pytest.raises(AttributeError, match="'Bucket' object has no attribute 'rooom'"):
        bucket.rooom  # noqa: B018
    with pytest.warns(DeprecationWarning, match="bytes_per_step"):
        assert hvdbridge.policies.from_spec("mean").bytes_per_step({"w": (10, 10)}, 2) == 400


def test_old_fields_of_a_bucket_are_in_its_ranks_and_layout() -> None:
    bucket = hvdbridge.Bucket(torch.ones(3), Layout({"w": (3,)}))
    with pytest.warns(DeprecationWarning, match=r"nodes, rank, size in ranks=hvdbridge.policy.bucket.Ranks") as caught:
        other = replace(bucket, rank=1, size=2, nodes=(0, 1), buffer=torch.zeros(3))
    assert (other.rank, other.size, other.ranks.nodes, other.place("world")) == (1, 2, (0, 1), (1, 2))
    with pytest.warns(DeprecationWarning, match="blocks in ranks"):
        assert replace(bucket, blocks={"w": 7}).layout.blocks == {"w": 7}
    assert bucket.layout.blocks == {"w": 0}
    for old, new in {"nodes": (), "groups": {}, "blocks": {"w": 0}, "mark": bucket.weighting}.items():
        with pytest.warns(DeprecationWarning, match=f"Bucket.{old} is Bucket") as caught:
            assert getattr(bucket, old) == new
        assert caught[-1].filename == __file__


@dataclass(frozen=True)
class FirstEdition(hvdbridge.Policy):
    """A wrapper as 0.1.0 let one write it."""

    inner: hvdbridge.Policy = LocalSgd(Bf16(), every=2)
    on_parameters = True
    rehearses = False
    slots = {"residual": hvdbridge.Slot(local=True, gradient_units=True)}

    @property
    def bucket_mb(self) -> float:
        return 3.0 + super().bucket_mb  # type: ignore[misc]

    def switches(self, step: int) -> bool:
        return step == 5 or super().switches(step)  # type: ignore[misc]

    def start_from(self, bucket: hvdbridge.Bucket, state: State) -> State:
        return {"mine": {}, **super().start_from(bucket, state)}  # type: ignore[misc]

    def flush(self, state: State) -> tuple[dict[str, torch.Tensor], State]:
        assert super().flush(state) == ({}, state)  # type: ignore[misc]
        return {"w": torch.ones(3)}, state


def test_old_members_of_a_policy_are_functions() -> None:
    for name, value in (("anchored", True), ("acts_after_step", True), ("bucket_mb", 25.0), ("rehearses", True)):
        with pytest.warns(DeprecationWarning, match=f"LocalSgd.{name} goes with the next release") as caught:
            assert getattr(FirstEdition.inner, name) == value
        assert caught[-1].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use hvdbridge.policy.base.switches\(policy, ...\)"):
        assert not FirstEdition.inner.switches(1)


def test_old_members_that_a_policy_overrides_still_count() -> None:
    policy = FirstEdition()
    bucket = hvdbridge.Bucket(torch.ones(3), Layout({"w": (3,)}))
    state = {"inner": FirstEdition.inner.init({"w": torch.zeros(3)})}
    with pytest.warns(DeprecationWarning, match="FirstEdition.bucket_mb"):
        assert bucket_mb(policy) == 28.0
    with pytest.warns(DeprecationWarning, match="switches"):
        assert [step for step in range(7) if switches(policy, step)] == [5]
    with pytest.warns(DeprecationWarning, match="start_from"):
        new = start_from(policy, bucket, state)
    assert new["mine"] == {}
    assert torch.equal(new["inner"]["anchor"]["w"], torch.ones(3))
    with pytest.warns(DeprecationWarning, match="flush"):
        assert list(flush(policy, state)[0]) == ["w"]
    with pytest.warns(DeprecationWarning, match="rehearses"), pytest.raises(hvdbridge.Unsupported, match="auto"):
        check_rehearses(policy)
    with pytest.warns(DeprecationWarning, match="on_parameters"):
        slot = slot_of(FirstEdition(ErrorFeedback(Bf16())), ("inner", "residual"))
    assert slot == hvdbridge.Slot(local=True, reused=True)


def test_old_classes_are_the_new_ones() -> None:
    for module in ("driver", "flows", "memory"):
        sys.modules.pop(f"hvdbridge.{module}", None)
    with pytest.warns(DeprecationWarning, match="execution.scheduler"):
        from hvdbridge.driver import ThreadDriver
    with pytest.warns(DeprecationWarning, match="execution.flow"):
        from hvdbridge.flows import Pending
    with pytest.warns(DeprecationWarning, match="policy.buffer_pool"):
        from hvdbridge.memory import Memory
    assert (ThreadDriver, Pending, Memory) == (ThreadScheduler, Submission, BufferPool)


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hvdbridge.nowhere")


def test_fields_of_the_first_edition_by_position() -> None:
    with pytest.warns(DeprecationWarning, match="Bucket takes rank, size, weights in ranks="):
        bucket = hvdbridge.Bucket(torch.ones(3), Layout({"w": (3,)}), 0, 0, 7, 1, 4, (1.0,) * 4, True)
    assert (bucket.seed, bucket.rank, bucket.size, bucket.weights, bucket.needs_sent) == (7, 1, 4, (1.0,) * 4, True)


def test_members_that_only_a_users_class_has_still_decide() -> None:
    @dataclass(frozen=True)
    class Phased(LocalSgd):
        slots: ClassVar[dict[str, hvdbridge.Slot]] = {"extra": hvdbridge.Slot()}  # Python 3.10 needs the type

        def averaged(self, step: int) -> bool:
            return step == 3

        def switches(self, step: int) -> bool:
            return step == 5

    policy = Phased()
    assert policy.slots == {**LocalSgd().slots, "extra": hvdbridge.Slot()}
    with pytest.warns(DeprecationWarning, match=r"ignores Phased\.averaged"):
        assert [averaged(policy, step) for step in (2, 3)] == [False, True]
    with pytest.warns(DeprecationWarning, match=r"ignores Phased\.switches"):
        assert [switches(Clip(policy, norm=1.0), step) for step in (4, 5)] == [False, True]


def test_members_of_the_class_itself() -> None:
    with pytest.warns(DeprecationWarning, match=r"Policy\.flush goes"):
        assert hvdbridge.Policy.flush(Bf16(), {"inner": {}}) == ({}, {"inner": {}})


def test_bytes_per_step_where_it_was() -> None:
    sys.modules.pop("hvdbridge.dry_run", None)
    with pytest.warns(DeprecationWarning, match="policy.dry_run"):
        from hvdbridge.dry_run import bytes_per_step
    assert bytes_per_step is hvdbridge.policies.bytes_per_step


def test_names_that_left_a_module() -> None:
    with pytest.warns(DeprecationWarning, match=r"kernels.quantise.Linear is hvdbridge.kernels.codes.Linear") as caught:
        from hvdbridge.kernels.quantise import Linear
    assert caught[-1].filename == __file__
    with pytest.warns(DeprecationWarning, match="policies.shards.FlatShards"):
        from hvdbridge.policies.sharded import FlatShards
    with pytest.warns(DeprecationWarning, match="kernels.shuffle.shuffled"):
        from hvdbridge.kernels.select import shuffled
    with pytest.warns(DeprecationWarning, match="kernels.candidates.LargeParam"):
        assert select.Large is select.LargeParam
    with pytest.warns(DeprecationWarning, match="kernels.select.ROUNDS is elsewhere"):
        assert select.ROUNDS == shuffle.ROUNDS
    with pytest.raises(AttributeError, match="__wrapped__"):
        select.__wrapped__  # noqa: B018
    sys.modules.pop("hvdbridge.agreement", None)
    assert (Linear, FlatShards, shuffled) == (codes.Linear, shards.FlatShards, shuffle.shuffled)
    with pytest.warns(DeprecationWarning, match="reduction.context"):
        from hvdbridge.agreement import trainable
    assert trainable is parameters.trainable


def test_old_fields_by_position() -> None:
    """The first edition's buckets had nineteen fields."""
    pool = BufferPool()
    rest = (1, 2, None, True, {"w": 7}, {}, (0, 1), False, {}, hvdbridge.Bucket(torch.ones(3), LAYOUT).weighting, False)
    with pytest.warns(DeprecationWarning, match=r"Bucket takes"):
        bucket = hvdbridge.Bucket(torch.ones(3), LAYOUT, 4, 5, 6, *rest, None, pool, pool)
    assert (bucket.rank, bucket.size, bucket.ranks.nodes, bucket.last, bucket.pool) == (1, 2, (0, 1), False, pool)
    with pytest.raises(TypeError, match="at most 19 positional"):
        hvdbridge.Bucket(torch.ones(3), LAYOUT, 4, 5, 6, *rest, None, pool, pool, 0)


def test_members_without_effect_are_named() -> None:
    with pytest.warns(DeprecationWarning, match="Eager.in_place has no effect"):

        @dataclass(frozen=True)
        class Eager(hvdbridge.Policy):
            in_place = True

    with pytest.warns(DeprecationWarning, match="takes_shares goes with the next release"):
        assert not Eager().takes_shares
