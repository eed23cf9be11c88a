"""``bucket_mb="auto"``: what is chosen from measured times; the measuring itself runs in the launch tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdbridge.backends.communicator import Capabilities
from hvdbridge.errors import Unsupported
from hvdbridge.execution.scheduler import drive
from hvdbridge.policies import from_spec
from hvdbridge.reduction import bucket_size
from hvdbridge.reduction.bucket_size import SIZES_MB, choose, fastest_bucket_mb
from hvdbridge.torch.compression import Compression
from hvdbridge.training.horovod_compression import from_horovod_compression

ALONE: Any = SimpleNamespace(communicator=SimpleNamespace(capabilities=Capabilities(), size=1))


@pytest.mark.parametrize(("seconds", "expected"), [
    ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 25.0),
    ((1.0, 1.0, 1.02, 1.04, 1.2, 1.0), 10.0),
    ((1.0, 1.06, 1.06, 1.06, 1.06, 1.06), 1.0),
    ((2.0, 2.0, 2.0, 2.0, 1.1, 1.0), 50.0),
])  # fmt: skip
def test_of_sizes_that_end_alike_it_is_the_largest_up_to_ddps(seconds: tuple[float, ...], expected: float) -> None:
    assert choose(dict(zip(SIZES_MB, seconds, strict=True))) == expected


def test_alone_it_is_the_policys() -> None:
    assert fastest_bucket_mb(from_spec("int8"), {}, ALONE, 10.0) == 10.0


def test_what_remembers_is_not_timed() -> None:
    policy = from_horovod_compression(Compression.fp16)
    with pytest.raises(Unsupported, match="bucket_mb='auto' cannot time"):
        fastest_bucket_mb(policy, {"w": torch.zeros(4)}, ALONE, 10.0)


@pytest.mark.parametrize(("seconds", "most"), [(1e-3, 32), (1.0, 14), (100.0, 2)])
def test_on_a_slow_network_it_ends_all_the_same(seconds: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []

    def step(*_: Any) -> float:
        steps.append(seconds)
        return seconds

    monkeypatch.setattr(bucket_size, "_timed_step", step)
    scheduler = SimpleNamespace(run=lambda flow, _: drive(flow, lambda request: request.tensor))
    two = SimpleNamespace(capabilities=Capabilities(), size=2)
    context: Any = SimpleNamespace(communicator=two, control=two, scheduler=scheduler, ranks=None, graphs=None)
    found = fastest_bucket_mb(from_spec("int8"), {"w": torch.zeros(400_000)}, context, 10.0)
    assert found == (25.0 if seconds < 1 else 10.0)
    assert len(steps) <= most
