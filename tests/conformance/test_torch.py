"""How torch's process groups are made: of one rank that has the library work all the same, as benchmarks/cuda_check.py
gets NCCL to on an only GPU, and between nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import cuda_check
from hvdbridge.collectives import AllReduce
from hvdbridge.communicators.torch import TorchCommunicator


def test_one_rank_asks_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict.fromkeys(("_reduce_in_place", "_all_gather", "_all_to_all", "_send_to_all"), 0)
    for name in asked:
        inner = getattr(TorchCommunicator, name)

        def counted(self: Any, *arguments: Any, name: str = name, inner: Any = inner) -> Any:
            asked[name] += 1
            return inner(self, *arguments)

        monkeypatch.setattr(TorchCommunicator, name, counted)
    assert {found.verdict for found in cuda_check.collectives("cpu")} == {"ok"}
    assert all(asked.values())


def test_by_default_it_does_not() -> None:
    comm = TorchCommunicator("alone", dist.HashStore(), 0, 1, timedelta(seconds=20), False)
    assert comm._host is None
    for request, expected in cuda_check.asked(cuda_check.batch(0)):
        assert comm.execute(request).equal(expected)


@pytest.mark.parametrize("interface", [None, "lo"])
@pytest.mark.parametrize(("nodes", "threads"), [([0, 0, 1], 1), ([0, 0, 0], 2)])
def test_between_nodes_gloo_reduces_one_vector_after_the_other(
    nodes: list[int], threads: int, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    store = dist.HashStore()

    def rank(number: int) -> tuple[int, float]:
        whole = TorchCommunicator("whole", store, number, 3, timedelta(seconds=20), False)
        whole.set_nodes(nodes)
        part = whole.split([[0, 2], [1]])
        assert isinstance(part, TorchCommunicator)
        total = part.execute(AllReduce(torch.tensor([1.0 + number]))).item()
        found = 0 if part._host is None else part._host.options._threads
        whole.execute(AllReduce(torch.ones(1)))
        part.close()
        whole.close()
        return found, total

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [(threads, 4.0), (0, 2.0), (threads, 4.0)]
