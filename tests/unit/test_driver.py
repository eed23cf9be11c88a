"""The driver: order, poison, and where an exception surfaces."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hvdbridge.collectives import AllReduce, Collective
from hvdbridge.communicators.base import Communicator
from hvdbridge.driver import Driver, Pending, Task, ThreadDriver, drive
from hvdbridge.errors import CollectiveMismatch, HvdbridgeError


class Loopback(Communicator):
    """One rank that answers with what it was given, when it is let."""

    rank, size = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def _execute(self, request: Collective) -> Tensor:
        self.gate.wait(10)
        self.seen.append(float(request.tensor[0]))
        if self.error is not None:
            raise self.error
        return request.tensor

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        return self

    def control(self) -> Communicator:
        return self

    def close(self) -> None: ...


def flow(*values: float) -> Task[float]:
    total = 0.0
    for value in values:
        total += float((yield AllReduce(torch.tensor([value])))[0])
    return total


def test_flows_run_one_after_the_other_in_order_of_submission() -> None:
    communicator, driver = Loopback(), ThreadDriver()
    communicator.gate.clear()
    first = driver.submit(Pending(flow(1, 2, 3), communicator))
    second = driver.submit(Pending(flow(4, 5), communicator))
    assert not first.done
    communicator.gate.set()
    assert (first.wait(), second.wait()) == (6.0, 9.0)
    assert communicator.seen == [1, 2, 3, 4, 5]
    assert driver.traffic.collectives == 5
    driver.close()


def test_the_first_failure_poisons_what_is_pending_and_what_comes() -> None:
    communicator, driver = Loopback(), ThreadDriver()
    communicator.gate.clear()
    communicator.error = OSError("wire cut")
    settled: list[bool] = []
    first = driver.submit(Pending(flow(1), communicator, settled=lambda p: settled.append(p.result is None)))
    second = driver.submit(Pending(flow(2), communicator, settled=lambda p: settled.append(p.result is None)))
    communicator.gate.set()
    for pending in (first, second):
        with pytest.raises(OSError, match="wire cut"):
            pending.wait()
    with pytest.raises(OSError, match="wire cut"):
        driver.submit(Pending(flow(3), communicator))
    assert communicator.seen == [1], "the second flow must not reach the wire"
    assert settled == [True, True]
    driver.close()


def test_a_failure_from_outside_frees_who_waits_although_the_library_is_stuck() -> None:
    communicator, driver = Loopback(), ThreadDriver()
    communicator.gate.clear()
    pending = driver.submit(Pending(flow(1), communicator))
    driver.fail(HvdbridgeError("rank 3 died"))
    with pytest.raises(HvdbridgeError, match="rank 3 died"):
        pending.wait()
    communicator.gate.set()
    driver.close()


def test_an_error_is_thrown_into_the_waiting_flow() -> None:
    def answer(request: Collective) -> Tensor:
        raise OSError("wire cut")

    def policy_line() -> Task[None]:
        yield AllReduce(torch.zeros(1))

    with pytest.raises(OSError, match="wire cut") as caught:
        drive(policy_line(), answer)
    assert any(frame.name == "policy_line" for frame in traceback.extract_tb(caught.value.__traceback__))


def test_a_flow_may_answer_an_error() -> None:
    def careful() -> Task[str]:
        try:
            yield AllReduce(torch.zeros(1))
        except OSError:
            return "mended"
        return "fine"

    def answer(request: Collective) -> Tensor:
        raise OSError

    assert drive(careful(), answer) == "mended"


def test_what_follows_a_flow_may_fail_too() -> None:
    def refuse(_: float) -> None:
        raise ValueError("weights differ")

    driver: Driver = ThreadDriver()
    with pytest.raises(ValueError, match="weights differ"):
        driver.submit(Pending(flow(1), Loopback(), then=refuse)).wait()
    assert isinstance(driver.failure, ValueError)
    driver.close()


def test_signatures_are_checked_before_each_collective() -> None:
    seen: list[tuple[int, str]] = []

    def check(number: int, signature: str) -> None:
        seen.append((number, signature))
        if number == 2:
            raise CollectiveMismatch("rank 1 starts another")

    communicator = Loopback()
    driver = ThreadDriver(check)
    with pytest.raises(CollectiveMismatch):
        driver.run(flow(1, 2), communicator)
    assert [number for number, _ in seen] == [1, 2]
    assert communicator.seen == [1]
    driver.close()


def test_flows_run_without_grad() -> None:
    def asks() -> Task[bool]:
        yield AllReduce(torch.zeros(1))
        return torch.is_grad_enabled()

    driver = ThreadDriver()
    assert driver.run(asks(), Loopback()) is False
    driver.close()
