"""The agreement on a last step, with messages that are late by any time; and the clock by which limits are judged."""

from __future__ import annotations

import random

import pytest

from hvdbridge.supervisor.job import Job
from hvdbridge.supervisor.last_step import LastStep

Message = dict[str, object]


class World:
    """Ranks that make steps together, each a step ahead of the slowest at most, and messages that take their time.

    One event at a time: a message arrives, or a rank makes its step, or asks whether that was the last one.
    """

    def __init__(self, size: int, seed: int, drift: int = 1) -> None:
        self.random = random.Random(seed)
        self.job = Job(size, 300.0, 30.0)
        self.parts = [LastStep() for _ in range(size)]
        self.steps = [0] * size  # as far as they are made
        self.asked = [0] * size  # as far as the answer was no
        self.last: dict[int, int] = {}
        self.drift = drift
        self.up: list[list[Message]] = [[] for _ in range(size)]  # in order, as over a connection
        self.down: list[list[Message]] = [[] for _ in range(size)]
        for rank in range(size):
            assert self.job.join(rank, size, "host", rank) is None

    def move(self) -> None:
        """One event, of those that may happen now."""
        may = [("up", rank) for rank, queue in enumerate(self.up) if queue]
        may += [("down", rank) for rank, queue in enumerate(self.down) if queue]
        may += [("ask", rank) for rank in range(len(self.steps)) if self._goes_on(rank)]
        what, rank = self.random.choice(may)
        if what == "up":
            self.job.receive(rank, self.up[rank].pop(0), b"", 0.0)
            for to, message, _ in self.job.take():
                self.down[to].append(message)
        elif what == "down":
            message = self.down[rank].pop(0)
            if message["op"] == "stop?":
                self.up[rank].append({"op": "passed", "steps": self.parts[rank].freeze()})
            else:
                self.parts[rank].set_last(message["steps"])
        else:
            self.steps[rank] = self.asked[rank] + 1
            over = self.parts[rank].reached("0", self.steps[rank])
            if over:
                self.last[rank] = self.steps[rank]
            elif over is not None:
                self.asked[rank] = self.steps[rank]

    def _goes_on(self, rank: int) -> bool:
        """A step needs all ranks: nobody is further ahead of the slowest than ``drift``."""
        return rank not in self.last and self.asked[rank] < min(self.asked) + self.drift


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("drift", [1, 4])
def test_all_stop_after_the_same_step(size: int, drift: int) -> None:
    for seed in range(300):
        world = World(size, seed, drift)
        for _ in range(world.random.randrange(20)):
            world.move()
        made = max(world.asked)
        for rank in world.random.sample(range(size), world.random.randrange(1, size + 1)):
            world.up[rank].append({"op": "stop"})
        while len(world.last) < size:
            world.move()
        assert len(set(world.last.values())) == 1, (seed, world.last)
        assert world.last[0] > made, "nobody has passed it before"


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    job = Job(3, 300.0, 30.0)
    for rank in range(3):
        job.join(rank, 3, "host", rank)
    job.receive(0, {"op": "stop"}, b"", 0.0)
    job.receive(0, {"op": "passed", "steps": {"0": 4}}, b"", 0.0)
    job.receive(1, {"op": "bye", "id": 1}, b"", 0.0)
    assert not [message for _, message, _ in job.take() if message.get("op") == "stop"]
    job.receive(2, {"op": "passed", "steps": {"0": 3, "1": 8}}, b"", 0.0)
    named = [message for _, message, _ in job.take() if message.get("op") == "stop"]
    assert named == [{"op": "stop", "steps": {"0": 5, "1": 9}}] * 3


def test_a_synchronizer_that_was_made_after_the_answer_stops_at_its_first_step() -> None:
    part = LastStep()
    assert part.reached("0", 3) is False
    assert part.freeze() == {"0": 3}
    assert part.reached("1", 1) is None, "no step is passed between the answer and the word"
    part.set_last({"0": 4})
    assert part.reached("1", 0) is False
    assert part.reached("1", 1) is True


def waiting(job: Job, rank: int, now: float, age: float = 0.0) -> None:
    job.receive(rank, {"op": "waiting", "token": 1, "label": "AllReduce", "age": age, "limit": 0, "stall": 0}, b"", now)


def test_limits_stand_still_while_a_rank_is_patient() -> None:
    job = Job(2, 10.0, 5.0)
    for rank in range(2):
        job.join(rank, 2, "host", rank)
    waiting(job, 1, 100.0, age=4.0)
    job.receive(0, {"op": "patience", "token": 1, "seconds": 60.0}, b"", 100.0)
    job.receive(1, {"op": "gather", "id": 5, "name": "model", "value": "x", "timeout": 10.0}, b"", 110.0)
    job.receive(1, {"op": "get", "id": 6, "key": "k", "timeout": 10.0}, b"", 110.0)
    job.tick(150.0)
    job.receive(0, {"op": "patience", "token": 1, "seconds": 0.0}, b"", 150.0)
    job.tick(155.9)
    assert job.failure is None
    told = [message for _, message, _ in job.take()]
    assert [m["on"] for m in told if m["op"] == "patience"] == [True, True, False, False]
    assert not [m for m in told if "id" in m]
    job.tick(156.1)
    assert job.failure is not None
    assert "not finished after 10.1 s" in job.failure["text"]


def test_patience_ends_by_itself_and_with_its_rank() -> None:
    job = Job(2, 10.0, 5.0)
    for rank in range(2):
        job.join(rank, 2, "host", rank)
    waiting(job, 1, 100.0)
    job.receive(0, {"op": "patience", "token": 1, "seconds": 60.0}, b"", 100.0)
    job.tick(160.0)
    job.tick(169.9)
    assert job.failure is None
    job.tick(170.1)
    assert job.failure is not None
    assert "rank 0 (host, pid 0): within hb.patience(60)" in job.failure["text"]


def test_a_rank_that_joins_late_learns_of_patience() -> None:
    job = Job(2, 10.0, 5.0)
    job.join(0, 2, "host", 0)
    job.receive(0, {"op": "patience", "token": 1, "seconds": 60.0}, b"", 100.0)
    job.take()
    job.join(1, 2, "host", 1)
    assert job.take() == [(1, {"op": "patience", "on": True}, b"")]


def test_the_rank_that_left_first_ends_the_wait() -> None:
    """Ranks leave in another order than they join."""
    job = Job(3, 10.0, 5.0)
    for rank in range(3):
        job.join(rank, 3, "host", rank)
    waiting(job, 2, 100.0)
    for rank, now in ((1, 100.0), (0, 101.4)):
        job.receive(rank, {"op": "leave", "id": 1}, b"", now)
    job.tick(101.6)
    assert job.failure is not None
    assert job.failure["text"].startswith("rank 1 (host, pid 1), rank 0 (host, pid 0) left without hb.shutdown()")


def test_messages_print_the_name_of_a_host_alone_where_it_is_unique() -> None:
    job = Job(3, 10.0, 5.0)
    for rank, host in enumerate(("a/8be80b07/1", "b/8be80b07/1", "b/8be80b07/2")):
        job.join(rank, 3, host, rank)
    assert [str(member) for member in job.members.values()] == [
        "rank 0 (a, pid 0)", "rank 1 (b/8be80b07/1, pid 1)", "rank 2 (b/8be80b07/2, pid 2)"
    ]  # fmt: skip
