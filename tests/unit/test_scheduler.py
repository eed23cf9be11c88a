"""The scheduler: order, poison, and where an exception surfaces."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdbridge.backends.communicator import Answer, Communicator, Work
from hvdbridge.errors import CollectiveMismatch, HvdbridgeError
from hvdbridge.execution.flow import Mailbox, Submission, Task
from hvdbridge.execution.scheduler import Scheduler, ThreadScheduler, drive, open_scheduler
from hvdbridge.policy.collectives import AllReduce, Collective


class Loopback(Communicator):
    """One rank that answers with what it was given, when it is let."""

    rank, size = 0, 1

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def _answer(self, request: Collective) -> Answer:
        self.gate.wait(10)
        self.seen.append(float(request.tensor[0]))
        if self.error is not None:
            raise self.error
        return request.tensor
        yield

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
    communicator, scheduler = Loopback(), ThreadScheduler()
    communicator.gate.clear()
    first = scheduler.submit(Submission(flow(1, 2, 3), communicator))
    second = scheduler.submit(Submission(flow(4, 5), communicator))
    assert not first.done
    communicator.gate.set()
    assert (first.wait(), second.wait()) == (6.0, 9.0)
    assert communicator.seen == [1, 2, 3, 4, 5]
    assert scheduler.traffic.collectives == 5
    scheduler.close()


def test_the_first_failure_poisons_what_is_pending_and_what_comes() -> None:
    communicator, scheduler = Loopback(), ThreadScheduler()
    communicator.gate.clear()
    communicator.error = OSError("wire cut")
    settled: list[bool] = []
    first = scheduler.submit(Submission(flow(1), communicator, on_settled=lambda p: settled.append(p.result is None)))
    second = scheduler.submit(Submission(flow(2), communicator, on_settled=lambda p: settled.append(p.result is None)))
    communicator.gate.set()
    for pending in (first, second):
        with pytest.raises(OSError, match="wire cut"):
            pending.wait()
    with pytest.raises(OSError, match="wire cut"):
        scheduler.submit(Submission(flow(3), communicator))
    assert communicator.seen == [1], "the second flow must not reach the wire"
    assert settled == [True, True]
    scheduler.close()


def test_a_failure_from_outside_frees_who_waits_although_the_library_is_stuck() -> None:
    communicator, scheduler = Loopback(), ThreadScheduler()
    communicator.gate.clear()
    pending = scheduler.submit(Submission(flow(1), communicator))
    scheduler.fail(HvdbridgeError("rank 3 died"))
    with pytest.raises(HvdbridgeError, match="rank 3 died"):
        pending.wait()
    communicator.gate.set()
    scheduler.close()


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
    def refuse() -> Task[None]:
        yield from flow(1)
        raise ValueError("weights differ")

    scheduler: Scheduler = ThreadScheduler()
    with pytest.raises(ValueError, match="weights differ"):
        scheduler.submit(Submission(refuse(), Loopback())).wait()
    assert isinstance(scheduler.failure, ValueError)
    scheduler.close()


def test_signatures_are_checked_before_each_collective() -> None:
    seen: list[tuple[int, str]] = []

    def check(number: int, signature: str) -> None:
        seen.append((number, signature))
        if number == 2:
            raise CollectiveMismatch("rank 1 starts another")

    communicator = Loopback()
    scheduler = ThreadScheduler(check)
    with pytest.raises(CollectiveMismatch):
        scheduler.run(flow(1, 2), communicator)
    assert [number for number, _ in seen] == [1, 2]
    assert communicator.seen == [1]
    scheduler.close()


def test_flows_run_without_grad() -> None:
    def asks() -> Task[bool]:
        yield AllReduce(torch.zeros(1))
        return torch.is_grad_enabled()

    scheduler = ThreadScheduler()
    assert scheduler.run(asks(), Loopback()) is False
    scheduler.close()


def test_a_mailboxs_timeout_ends() -> None:
    box: Mailbox[int] = Mailbox()
    for number in range(20_000):  # SimpleQueue of Python 3.11 hangs in one of the first
        box.put(number)
        assert box.get() == number
        assert box.get(1e-6) is None


class Late(Work):
    """Is done after a while of its own, and remembers in which order such works started."""

    def __init__(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    def done(self) -> bool:
        return time.perf_counter() >= self._until

    def wait(self) -> None:
        time.sleep(max(0.0, self._until - time.perf_counter()))


class Slow(Loopback):
    """Operations that take random times; a negative value takes two of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.under_way = self.most = 0

    def _answer(self, request: Collective) -> Answer:
        value = float(request.tensor[0])
        parts = (0.0, 0.5) if value < 0 else (0.0,)
        for part in parts:
            yield None
            self.seen.append(value - part)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            work = Late(self.random.uniform(0, 0.004))
            work.last = part == parts[-1]
            yield work
            work.wait()
            self.under_way -= 1
        return request.tensor


class Looked(Work):
    """Is done once ``ready`` says so, which is asked at each look."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready, self.last = ready, True

    def done(self) -> bool:
        return self._ready()

    def wait(self) -> None:
        assert self._ready()


class ForLooks(Loopback):
    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__()
        self._work = Looked(ready)

    def _answer(self, request: Collective) -> Answer:
        yield None
        yield self._work
        self._work.wait()
        return request.tensor


def test_what_only_travels_outlasts_what_is_looked_at_often() -> None:
    """Some hundred looks at the short one, and then few at the long one, whose pauses must not have grown by those."""
    scheduler, looks = ThreadScheduler(), itertools.count()
    short = Submission(flow(1), ForLooks(lambda: next(looks) >= 400), rounds=2)
    long = scheduler.submit(Submission(flow(2), ForLooks(lambda: short.done), rounds=1))
    scheduler.submit(short).wait()
    until(lambda: long.done, seconds=5)
    scheduler.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("flows", "rounds", "expected"), [
    (3, [1, 1, 1], [0.1, 1.1, 2.1]),
    (3, [2, 2, 2, 2], [0.1, 1.1, 0.2, 2.1, 1.2, 3.1, 2.2, 3.2]),
    (3, [3, 3, 3], [0.1, 0.2, 1.1, 0.3, 1.2, 2.1, 1.3, 2.2, 2.3]),
    (3, [5, 5, 5], [0.1, 0.2, 1.1, 0.3, 1.2, 2.1, 0.4, 1.3, 2.2, 0.5, 1.4, 2.3, 1.5, 2.4, 2.5]),
    (3, [3, 1, 2, 3, 1], [0.1, 0.2, 1.1, 0.3, 2.1, 3.1, 2.2, 3.2, 4.1, 3.3]),
    (3, [None, None, None], [0.1, 0.2, 1.1, 1.2, 2.1, 2.2]),
    (2, [2, 2, 2, 2], [0.1, 1.1, 0.2, 2.1, 1.2, 3.1, 2.2, 3.2]),
    (2, [5, 5, 5], [0.1, 0.2, 0.3, 1.1, 0.4, 1.2, 0.5, 1.3, 2.1, 1.4, 2.2, 1.5, 2.3, 2.4, 2.5]),
    (2, [5, 1, 2, 5, 1], [0.1, 0.2, 0.3, 1.1, 0.4, 0.5, 2.1, 2.2, 3.1, 3.2, 3.3, 4.1, 3.4, 3.5]),
])  # fmt: skip
def test_operations_start_in_one_order_whatever_takes_how_long(
    shared: bool, flows: int, rounds: list[int | None], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow k issues k.1 at turn k S, k.2 W turns later, and so on; of one turn the older flow's first."""
    monkeypatch.setattr(Late, "thread_safe_wait", shared)
    for seed in range(8):
        communicator, scheduler, chance = Slow(seed), ThreadScheduler(flows=flows), random.Random(-seed)
        runs = []
        for k, n in enumerate(rounds):
            values = [k + round(r / 10, 1) for r in range(1, 1 + (n or 2))]
            runs.append(scheduler.submit(Submission(flow(*values), communicator, n)))
            time.sleep(chance.choice([0, 0, 0.003]))
        scheduler.flush()
        for pending in runs:
            pending.wait()
        assert communicator.seen == pytest.approx(expected)
        assert flows == 3 or communicator.most <= 2
        assert scheduler.traffic.collectives == len(expected)
        assert 0 < scheduler.traffic.seconds < len(expected) * 0.1
        scheduler.close()


def test_encoding_and_decoding_do_not_wait_for_turns() -> None:
    """While the turn of 1.2 waits for 1.1, flow 0 decodes, and 3 encodes; 4 does not, since 3 has not been issued.
    (Where a thread waits for operations in the order of their starts, 1.1 would have to come before 0.2.)"""
    communicator, scheduler = Gated(Released), ThreadScheduler()
    told: list[str] = []

    def bucket(k: int) -> Task[None]:
        told.append(f"encode {k}")
        yield AllReduce(torch.tensor([k + 0.1]))
        yield AllReduce(torch.tensor([k + 0.2]))
        told.append(f"decode {k}")

    runs = [scheduler.submit(Submission(bucket(k), communicator, 2)) for k in range(6)]
    communicator.let(0.1)
    started = [0.1, 1.1, 0.2, 2.1]
    until(lambda: communicator.seen == started)
    assert told == ["encode 0", "encode 1", "encode 2"], "three are in flight"
    communicator.let(0.2)
    until(lambda: "decode 0" in told and "encode 3" in told)
    assert sorted(told) == ["decode 0", *(f"encode {k}" for k in range(4))]
    assert communicator.seen == started, "the fourth is issued at its turn"
    communicator.let(*(k / 10 for k in range(70)))
    scheduler.flush()
    for pending in runs:
        pending.wait()
    assert communicator.seen == [*started, 1.2, 3.1, 2.2, 4.1, 3.2, 5.1, 4.2, 5.2]
    scheduler.close()


@pytest.mark.parametrize("shared", [False, True])
def test_flows_of_unknown_rounds_may_share_what_they_like(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's hook does: what they read there, and so what they ask for, is not a matter of time."""
    monkeypatch.setattr(Late, "thread_safe_wait", shared)

    def bucket(k: int, known: set[str]) -> Task[None]:
        for word in "ab":
            if word not in known:
                yield AllReduce(torch.tensor([k + 0.5]))
                known.add(word)
            yield AllReduce(torch.tensor([float(k)]))

    orders = set()
    for seed in range(12):
        communicator, scheduler = Slow(seed), ThreadScheduler()
        moments = random.Random(seed)
        known: set[str] = set()
        runs = []
        for k in range(5):
            time.sleep(moments.uniform(0, 0.004))
            runs.append(scheduler.submit(Submission(bucket(k, known), communicator)))
        scheduler.flush()
        for pending in runs:
            pending.wait()
        orders.add(tuple(communicator.seen))
        scheduler.close()
    assert len(orders) == 1


@pytest.mark.parametrize("rounds", [8, None])
def test_flows_that_need_no_operation_come_to_their_ends(rounds: int | None) -> None:
    """As among one rank."""
    communicator, scheduler = Loopback(), ThreadScheduler()
    runs = [scheduler.submit(Submission(flow(*range(1, 9)), communicator, rounds)) for _ in range(4)]
    scheduler.flush()
    until(lambda: all(pending.done for pending in runs))
    assert [pending.wait() for pending in runs] == [36.0] * 4
    scheduler.close()


@pytest.mark.parametrize(("nodes", "flows"), [((0, 0), 2), ((0, 1), 3)])
def test_two_flows_are_in_flight_within_a_node_and_three_across_nodes(nodes: tuple[int, ...], flows: int) -> None:
    communicator = Slow(0)
    communicator.nodes = nodes
    scheduler = open_scheduler(communicator, torch.device("cpu"))
    runs = [scheduler.submit(Submission(flow(k + 0.1, k + 0.2), communicator, 2)) for k in range(6)]
    scheduler.flush()
    for pending in runs:
        pending.wait()
    assert communicator.most == flows
    scheduler.close()


def test_a_turn_lasts_until_the_last_operation_of_the_collective_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, scheduler = Slow(0), ThreadScheduler()
    runs = [scheduler.submit(Submission(flow(value), communicator, 1)) for value in (-1.0, -2.0)]
    scheduler.flush()
    for pending in runs:
        pending.wait()
    assert communicator.seen == [-1.0, -1.5, -2.0, -2.5]
    scheduler.close()


class Gated(Loopback):
    """Operations that are done when :meth:`let`."""

    def __init__(self, work: Callable[[threading.Event], Work]) -> None:
        super().__init__()
        self._work = work
        self._free = {k / 10: threading.Event() for k in range(70)}

    def let(self, *values: float) -> None:
        for value in values:
            self._free[value].set()

    def _answer(self, request: Collective) -> Answer:
        value = round(float(request.tensor[0]), 1)
        yield None
        self.seen.append(value)
        work = self._work(self._free[value])
        yield work
        work.wait()
        return request.tensor


class Silent(Work):
    """Only who waits for it learns of its end."""

    thread_safe_wait = last = True

    def __init__(self, free: threading.Event) -> None:
        self._free, self._waited = free, False

    def done(self) -> bool:
        return self._waited

    def wait(self) -> None:
        assert self._free.wait(10)
        self._waited = True


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def test_what_settles_a_flow_may_fail_and_leaves_nobody_waiting() -> None:
    communicator, scheduler = Loopback(), ThreadScheduler()
    communicator.gate.clear()

    def settled(_: Submission[float]) -> None:
        raise OSError("out of memory")

    first = scheduler.submit(Submission(flow(1), communicator, on_settled=settled))
    second = scheduler.submit(Submission(flow(2), communicator, on_settled=settled))
    communicator.gate.set()
    until(lambda: first.done and second.done)
    with pytest.raises(OSError, match="out of memory"):
        second.wait()
    with pytest.raises(OSError, match="out of memory"):
        scheduler.submit(Submission(flow(3), communicator))
    scheduler.close()


class Broken(Silent):
    @property
    def thread_safe_wait(self) -> bool:  # type: ignore[override]
        raise OSError("not a flow's own")


def test_a_defect_in_the_thread_itself_leaves_nobody_waiting() -> None:
    communicator, scheduler = Gated(Broken), ThreadScheduler()
    pending = scheduler.submit(Submission(flow(0.1), communicator, rounds=1))
    until(lambda: pending.done)
    for action in (pending.wait, lambda: scheduler.submit(Submission(flow(1.1), communicator))):
        with pytest.raises(OSError, match="not a flow's own"):
            action()
    scheduler.close()


@pytest.mark.parametrize("flush", [False, True])
def test_nobody_waits_for_looks_where_somebody_can_tell(flush: bool) -> None:
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    runs = [scheduler.submit(Submission(flow(value), communicator, rounds=1)) for value in (0.1, 1.1)]
    if flush:
        scheduler.flush()
    communicator.let(0.1, 1.1)
    until(lambda: all(pending.done for pending in runs))
    scheduler.close()


def test_operations_are_waited_for_in_the_order_of_their_starts() -> None:
    """The second flow's first operation started before the first flow's second one, and is told of first."""
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    told: list[float] = []

    def bucket(k: int) -> Task[None]:
        for r in (0.1, 0.2):
            yield AllReduce(torch.tensor([k + r]))
            told.append(k + r)

    runs = [scheduler.submit(Submission(bucket(k), communicator, 2)) for k in range(3)]
    communicator.let(0.1)
    until(lambda: communicator.seen == [0.1, 1.1, 0.2, 2.1])
    communicator.let(1.1)  # and not 0.2
    until(lambda: told == [0.1, 1.1], seconds=5)
    communicator.let(*(k / 10 for k in range(70)))
    scheduler.flush()
    for pending in runs:
        pending.wait()
    scheduler.close()


class Held(Loopback):
    """Operations that are done when somebody says so; the last of its request, each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def _answer(self, request: Collective) -> Answer:
        yield None
        self.seen.append(float(request.tensor[0]))
        work = Released(self.free)
        yield work
        work.wait()
        return request.tensor


class Released(Work):
    last = True

    def __init__(self, free: threading.Event) -> None:
        self._free = free

    def done(self) -> bool:
        return self._free.is_set()

    def wait(self) -> None:
        self._free.wait(10)


@pytest.mark.parametrize(
    ("rounds", "inline", "started"), [(1, True, [0, 1, 2, 3]), (1, False, [0, 1, 2]), (None, False, [0])]
)
def test_a_flow_that_starts_nothing_more_holds_nobody_up(
    rounds: int | None, inline: bool, started: list[float]
) -> None:
    communicator, scheduler = Held(), ThreadScheduler()
    runs = [scheduler.submit(Submission(flow(float(k)), communicator, rounds, inline)) for k in range(4)]
    until(lambda: len(communicator.seen) >= len(started))
    time.sleep(0.05)  # what would start although it should not
    assert communicator.seen == started
    assert not any(pending.done for pending in runs)
    communicator.free.set()
    until(lambda: all(pending.done for pending in runs))  # without a flush, so that nobody seems to wait for it
    assert [pending.wait() for pending in runs] == [0, 1, 2, 3]
    scheduler.close()


class Grouped(Loopback):
    """Rank ``rank`` of three on nodes of two and of one: a request has one operation, two if it is negative, and none
    in a group of one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.random = rank, random.Random(rank)
        self.channels: defaultdict[str, list[float]] = defaultdict(list)

    def size_of(self, group: str) -> int:
        return {"node": (2, 2, 1), "cross": (2, 1, 2), "world": (3, 3, 3)}[group][self.rank]

    def answer(self, request: Collective) -> Answer:
        yield None
        value = float(request.tensor[0])
        parts = (0.0, 0.5) if value < 0 else (0.0,)
        for part in parts if self.size_of(request.group) > 1 else ():
            yield None
            self.channels[request.group].append(value - part)
            work = Late(self.random.uniform(0, 0.002))
            work.last = part == parts[-1]
            yield work
            work.wait()
        return request.tensor


@pytest.mark.parametrize("rounds", [None, 10])
def test_groups_of_several_sizes_have_one_order_each(rounds: int | None) -> None:
    """Of flows that share what they know, too, as those may that declare no rounds."""

    def across(k: int, known: set[float]) -> Task[None]:
        for value, group in ((0.0, "node"), (-10.0, "cross"), (20.0, "cross"), (30.0, "node"), (-40.0, "world")):
            if value not in known:
                yield AllReduce(torch.tensor([100.0 + k + value]))
                known.add(value)
            yield AllReduce(torch.tensor([math.copysign(abs(value) + k, value)]), group=group)

    found = []
    for rank in range(3):
        communicator, scheduler = Grouped(rank), ThreadScheduler()
        known: set[float] = set()
        runs = [
            scheduler.submit(Submission(across(k, set() if rounds else known), communicator, rounds)) for k in range(5)
        ]
        scheduler.flush()
        until(lambda runs=runs: all(pending.done for pending in runs))  # type: ignore[misc]
        found.append(communicator.channels)
        scheduler.close()
    assert found[0]["node"] == found[1]["node"]
    assert found[0]["cross"] == found[2]["cross"]
    assert found[0]["world"] == found[1]["world"] == found[2]["world"]
    assert (len(found[0]["node"]), len(found[0]["cross"])) == (10, 15)
    assert len(found[0]["world"]) == (10 + 25 if rounds else 10 + 5)


def test_a_flow_that_asks_for_more_than_its_policy_said() -> None:
    scheduler = ThreadScheduler()
    pending = scheduler.submit(Submission(flow(1, 2), Slow(0), rounds=1))
    scheduler.flush()
    with pytest.raises(HvdbridgeError, match=r"ask for 1 collectives, and one asks for another: AllReduce\[1\]"):
        pending.wait()
    scheduler.close()


def test_what_stands_alone_waits_for_what_is_under_way() -> None:
    communicator, scheduler = Slow(0), ThreadScheduler()
    first = scheduler.submit(Submission(flow(1, 2), communicator, 2))
    assert scheduler.run(flow(3, 4), communicator) == 7.0
    assert first.done
    assert communicator.seen == [1, 2, 3, 4]
    scheduler.close()


def test_a_failure_ends_all_that_is_under_way() -> None:
    class Broken(Slow):
        def _answer(self, request: Collective) -> Answer:
            answer = yield from super()._answer(request)
            if float(answer[0]) == 2.0:
                raise OSError("wire cut")
            return answer

    communicator, scheduler = Broken(0), ThreadScheduler()
    runs = [scheduler.submit(Submission(flow(*values), communicator, 2)) for values in ((1, 5), (2, 6), (3, 7))]
    scheduler.flush()
    for pending in runs[1:]:
        with pytest.raises(OSError, match="wire cut"):
            pending.wait()
    assert 6.0 not in communicator.seen
    assert 7.0 not in communicator.seen
    scheduler.close()


@pytest.mark.parametrize("flush", [True, False])
def test_a_failure_ahead_of_a_turn_does_not_wait_for_it(flush: bool) -> None:
    """Else a rank that decodes early fails alone, and others wait for what it never starts."""

    def fails() -> Task[None]:
        yield AllReduce(torch.tensor([1.1]))
        raise ValueError("what came cannot be")

    communicator, scheduler = Gated(Released), ThreadScheduler()
    flows = (flow(0.1, 0.2, 0.3), fails(), flow(2.1))
    runs = [scheduler.submit(Submission(each, communicator, rounds=3)) for each in flows]
    if flush:
        scheduler.flush()
    communicator.let(0.1)
    until(lambda: communicator.seen == [0.1, 0.2, 1.1])  # and the turn is that of 0.3
    communicator.let(1.1)
    if flush:  # the thread is in the earliest operation, which all ranks have started
        communicator.let(0.2)
    until(lambda: all(pending.done for pending in runs), seconds=5)
    assert 0.3 not in communicator.seen
    for pending in runs:
        with pytest.raises(ValueError, match="what came"):
            pending.wait()
    communicator.let(0.2, 2.1)
    scheduler.close()


def test_after_a_failure_no_part_of_a_request_starts() -> None:
    """Other ranks, which do not know of it yet, start what is next in the order."""

    class Parts(Gated):
        def _answer(self, request: Collective) -> Answer:
            for part in (0.0, 0.5):
                yield from super()._answer(replace(request, tensor=request.tensor + part))
            return request.tensor

    communicator, scheduler = Parts(Released), ThreadScheduler()
    scheduler.submit(Submission(flow(0.1), communicator))
    until(lambda: communicator.seen == [0.1])
    scheduler.fail(ValueError("the policy has a bug"))
    communicator.let(0.1)
    scheduler.close()
    scheduler._thread.join(5)
    assert not scheduler._thread.is_alive()
    assert communicator.seen == [0.1]


def test_a_turn_that_ends_with_its_flow_gives_way_to_the_next() -> None:
    """The first flow asks for less than it may, so it ends at a turn; the other one waits for the next."""
    decoded, waited_for = threading.Event(), threading.Event()

    class Noticed(Released):
        def wait(self) -> None:
            if not self.done():
                waited_for.set()
            super().wait()

    def waits() -> Task[None]:
        yield AllReduce(torch.tensor([1.1]))
        decoded.set()
        yield AllReduce(torch.tensor([1.2]))

    communicator, scheduler = Gated(Noticed), ThreadScheduler()
    runs: list[Submission[Any]] = [Submission(each, communicator, rounds=2) for each in (flow(0.1), waits())]
    for pending in runs:
        scheduler.submit(pending)
    communicator.let(1.1)
    assert decoded.wait(10)
    scheduler.flush()
    assert waited_for.wait(10)
    communicator.let(0.1)
    until(lambda: communicator.seen == [0.1, 1.1, 1.2])
    communicator.let(1.2)
    until(lambda: all(pending.done for pending in runs))
    scheduler.close()


def test_what_waits_for_its_turn_does_not_travel_any_more() -> None:
    """The second flow's first answer is there, and its second round waits for the first flow's."""
    watched: list[str] = []

    @contextmanager
    def watch(signature: str) -> Iterator[None]:
        yield
        watched.append(signature)

    communicator, scheduler = Gated(Released), ThreadScheduler()
    communicator.watch = watch
    runs = [scheduler.submit(Submission(flow(k + 0.1, k + 0.2), communicator, 2)) for k in range(2)]
    until(lambda: communicator.seen == [0.1, 1.1])
    communicator.let(0.1, 0.2)
    until(lambda: runs[0].done)
    communicator.let(1.1)
    until(lambda: len(watched) == 3 and not scheduler._operations)
    assert not runs[1].done
    communicator.let(1.2)
    scheduler.flush()
    assert runs[1].wait() == pytest.approx(2.3)
    scheduler.close()


@pytest.mark.parametrize("look", [True, False])
def test_a_lost_operation_is_explained_by_the_communicator(look: bool) -> None:
    class Lost(Late):
        def done(self) -> bool:
            if look:
                raise ConnectionError("reset by peer")
            return super().done()

        def wait(self) -> None:
            raise ConnectionError("reset by peer")

    class Explaining(Loopback):
        def _answer(self, request: Collective) -> Answer:
            work = Lost(0.001)
            try:
                yield work
                work.wait()
            except ConnectionError as cause:
                raise HvdbridgeError("rank 1 is gone") from cause
            return request.tensor

    scheduler: Scheduler = ThreadScheduler()
    with pytest.raises(HvdbridgeError, match="rank 1 is gone"):
        scheduler.run(flow(1), Explaining())
    assert scheduler.traffic.seconds > 0
    scheduler.close()


def inline(value: float, communicator: Communicator, **options: Any) -> Submission[float]:
    return Submission(flow(value), communicator, rounds=1, inline=True, **options)


def test_an_inline_flow_starts_where_it_is_submitted() -> None:
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    threads: list[str] = []

    def bucket() -> Task[float]:
        threads.append(threading.current_thread().name)
        answer = yield AllReduce(torch.tensor([0.1]))
        threads.append(threading.current_thread().name)
        assert not torch.is_grad_enabled()
        return float(answer[0])

    first = scheduler.submit(Submission(bucket(), communicator, rounds=1, inline=True))
    second = scheduler.submit(inline(1.1, communicator))
    assert communicator.seen == [0.1, 1.1], "both, when submit() has returned"
    scheduler.flush()
    communicator.let(0.1, 1.1)
    assert (first.wait(), second.wait()) == pytest.approx((0.1, 1.1))
    assert threads == [threading.current_thread().name, "hvdbridge-scheduler"]
    scheduler.close()


def test_an_inline_flow_waits_behind_what_has_not_ended() -> None:
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    before = scheduler.submit(Submission(flow(0.1, 0.2), communicator, rounds=2))
    after = scheduler.submit(inline(1.1, communicator))
    until(lambda: communicator.seen == [0.1, 1.1])
    communicator.let(0.1, 0.2, 1.1)
    scheduler.flush()
    assert (before.wait(), after.wait()) == pytest.approx((0.3, 1.1))
    assert communicator.seen == [0.1, 1.1, 0.2]
    scheduler.close()


def test_what_stands_alone_waits_for_inline_flows() -> None:
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    scheduler.submit(inline(0.1, communicator))
    alone = scheduler.submit(Submission(flow(1.1), communicator))
    time.sleep(0.05)  # in which it would start
    assert communicator.seen == [0.1]
    communicator.let(0.1, 1.1)
    assert alone.wait() == pytest.approx(1.1)
    scheduler.close()


def test_the_failure_of_an_inline_flow_poisons_all_others() -> None:
    class Breaks(Gated):
        def _answer(self, request: Collective) -> Answer:
            answer = yield from super()._answer(request)
            if round(float(answer[0]), 1) == 0.1:
                raise OSError("wire cut")
            return answer

    communicator, scheduler = Breaks(Silent), ThreadScheduler()
    runs = [scheduler.submit(inline(value, communicator)) for value in (0.1, 1.1)]
    communicator.let(0.1, 1.1)
    for pending in runs:
        with pytest.raises(OSError, match="wire cut"):
            pending.wait()
    with pytest.raises(OSError, match="wire cut"):
        scheduler.submit(inline(2.1, communicator))
    assert communicator.seen == [0.1, 1.1]
    scheduler.close()


def test_a_failure_from_outside_frees_who_waits_for_an_inline_flow() -> None:
    communicator, scheduler = Gated(Silent), ThreadScheduler()
    pending = scheduler.submit(inline(0.1, communicator))
    scheduler.fail(HvdbridgeError("rank 3 died"))
    with pytest.raises(HvdbridgeError, match="rank 3 died"):
        pending.wait()
    communicator.let(0.1)
    scheduler.close()


@pytest.mark.parametrize("rounds", [None, 3])
def test_who_waits_anyway_does_it_all_himself(rounds: int | None) -> None:
    """Two operations of one request, too, and those of flows that share what they like."""
    communicator, scheduler = Slow(0), ThreadScheduler()
    threads: list[str] = []

    def bucket() -> Task[None]:
        for value in (1.0, -2.0, 3.0):
            yield AllReduce(torch.tensor([value]))
            threads.append(threading.current_thread().name)

    pending = scheduler.submit(Submission(bucket(), communicator, rounds, awaited=True))
    assert pending.done
    assert communicator.seen == [1.0, -2.0, -2.5, 3.0]
    assert set(threads) == {threading.current_thread().name}
    assert scheduler.run(flow(4.0), communicator) == 4.0
    scheduler.close()


@pytest.mark.parametrize("work", [Silent, Released])
def test_who_waits_long_can_be_told_of_a_failure(work: Callable[[threading.Event], Work]) -> None:
    """And what he began goes on where it was, as soon as it can."""
    communicator, scheduler = Gated(work), ThreadScheduler()
    pending = scheduler.submit(Submission(flow(0.1, 0.2), communicator, rounds=2, awaited=True))
    assert not pending.done
    assert communicator.seen == [0.1]
    scheduler.flush()
    communicator.let(0.1, 0.2)
    assert pending.wait() == pytest.approx(0.3)
    stuck = scheduler.submit(Submission(flow(1.1), communicator, rounds=1, awaited=True))
    scheduler.fail(HvdbridgeError("rank 3 died"))
    with pytest.raises(HvdbridgeError, match="rank 3 died"):
        stuck.wait()
    communicator.let(1.1)
    scheduler.close()


@pytest.mark.parametrize("shared", [False, True])
def test_inline_flows_keep_the_order_of_starts(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thread is idle when they come is another matter on each rank."""
    monkeypatch.setattr(Late, "thread_safe_wait", shared)
    monkeypatch.setattr(Late, "last", True)
    orders = set()
    for seed in range(12):
        communicator, scheduler, moments = Slow(seed), ThreadScheduler(), random.Random(seed)
        runs = []
        for k in range(8):
            time.sleep(moments.choice([0, 0, 0.004]))
            if k % 4 == 2:
                values = [k + 0.1, k + 0.2]
                runs.append(scheduler.submit(Submission(flow(*values), communicator, rounds=2)))
            else:
                runs.append(scheduler.submit(inline(float(k), communicator)))
        scheduler.flush()
        for pending in runs:
            pending.wait()
        assert scheduler.traffic.collectives == 10
        orders.add(tuple(round(value, 1) for value in communicator.seen))
        scheduler.close()
    assert len(orders) == 1


def test_an_error_that_a_library_tells_once_is_not_lost() -> None:
    """After a failing test MPI has a null request, which is done."""

    class Once(Work):
        def __init__(self, free: threading.Event) -> None:
            self._told = False

        def done(self) -> bool:
            if not self._told:
                self._told = True
                raise OSError("truncated")
            return True

        def wait(self) -> None: ...

    communicator, scheduler = Gated(Once), ThreadScheduler()
    pending = scheduler.submit(Submission(flow(0.1), communicator, rounds=1, awaited=True))
    with pytest.raises(OSError, match="truncated"):
        pending.wait()
    scheduler.close()


@pytest.mark.parametrize("options", [{"inline": True}, {"awaited": True}])
def test_autocast_stays_where_it_was_set(options: dict[str, bool]) -> None:
    """Whether the thread is idle, and so who runs a flow, differs between ranks; what it computes must not."""

    def asks() -> Task[bool]:
        yield AllReduce(torch.zeros(1))
        return torch.is_autocast_enabled("cpu")

    scheduler = ThreadScheduler()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scheduler.submit(Submission(asks(), Loopback(), rounds=1, **options)).wait() is False
    scheduler.close()


@pytest.mark.parametrize("idle", [True, False])
def test_a_grouped_request_keeps_its_turn_where_it_is_handed_over(idle: bool) -> None:
    """Else it starts its second operation behind the next flow's first, on ranks whose thread was idle."""
    communicator, scheduler = Grouped(0), ThreadScheduler()

    def across(value: float) -> Task[None]:
        yield AllReduce(torch.tensor([value]), group="node")

    before = None if idle else scheduler.submit(Submission(flow(1.0), communicator, rounds=1))
    runs = [
        scheduler.submit(Submission(across(value), communicator, rounds=1, inline=True)) for value in (-10.0, -20.0)
    ]
    scheduler.flush()
    for pending in (*runs, *([before] if before else [])):
        pending.wait()
    assert communicator.channels["node"] == [-10.0, -10.5, -20.0, -20.5]
    scheduler.close()
