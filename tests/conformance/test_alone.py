"""A communicator of one rank that calls its library, as benchmarks/cuda_check.py needs for NCCL on one GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import cuda_check
from hvdbridge.backends.torch.communicator import TorchCommunicator


def test_the_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict.fromkeys(("_reduce_in_place", "_all_gather", "_all_to_all", "_send_to_all"), 0)
    for name in calls:
        inner = getattr(TorchCommunicator, name)

        def counted(self: Any, *arguments: Any, name: str = name, inner: Any = inner) -> Any:
            calls[name] += 1
            return inner(self, *arguments)

        monkeypatch.setattr(TorchCommunicator, name, counted)
    assert {found.verdict for found in cuda_check.collectives("cpu")} == {"ok"}
    assert all(calls.values())


def test_by_default_it_is_not() -> None:
    comm = TorchCommunicator("alone", dist.HashStore(), 0, 1, timedelta(seconds=20), False)
    assert comm._gloo is None
    for request, expected in cuda_check.requests(cuda_check.batch(0)):
        assert comm.execute(request).equal(expected)
