"""What the first edition's users imported still works, and says what to import instead."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import hvdbridge
from hvdbridge.deprecated import MOVED
from hvdbridge.execution.flow import Submission
from hvdbridge.execution.scheduler import ThreadScheduler
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.buffer_pool import BufferPool

IMPORTABLE = [old for old, new in MOVED.items() if not new.startswith(("backends.mpi", "backends.horovod"))]
"""To import the others starts a library."""


@pytest.mark.parametrize("old", IMPORTABLE)
def test_an_old_module_is_the_new_one(old: str) -> None:
    new = importlib.import_module(f"hvdbridge.{MOVED[old]}")
    sys.modules.pop(f"hvdbridge.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"hvdbridge\.{old} is {new.__name__} now") as caught:
        stand_in = importlib.import_module(f"hvdbridge.{old}")
    assert caught[-1].filename == importlib.__file__  # whoever imports, and not our own file
    public = [name for name in vars(new) if not name.startswith("_")]
    assert all(getattr(stand_in, name) is getattr(new, name) for name in public)


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
