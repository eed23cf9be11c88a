"""The negotiation of raw operations, by hand: no process, no socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvdbridge.torch.coordinator import Coordinator, Decision, Request

JOIN = Request("join", "join", label="join()")


def allreduce(name: str = "a", shape: tuple[int, ...] = (2,), **more: Any) -> Request:
    return Request("allreduce", f"allreduce.{name}", dtypes=("float32",), shapes=(shape,), op="Sum", bytes=8, **more)


def gather(name: str, rows: int) -> Request:
    return Request("allgather", f"allgather.{name}", dtypes=("float32",), shapes=((rows, 2),))


def group(*dtypes: str) -> Request:
    return Request("allreduce", "allreduce.a", dtypes=dtypes, shapes=((2,),) * len(dtypes), op="Sum")


def decisions(coordinator: Coordinator) -> dict[int, list[Decision]]:
    """What each rank is told to do."""
    told: dict[int, list[Decision]] = {}
    for rank, message in coordinator.take():
        if message == {"announce": True}:  # somebody has joined
            continue
        assert list(message) == ["do"], message
        told.setdefault(rank, []).extend(Decision(*packed) for packed in message["do"])
    return told


def test_ready_when_all_have_come_and_the_same_for_all() -> None:
    coordinator = Coordinator(3)
    for rank in (2, 0):
        coordinator.submit(rank, [allreduce()], 0.0)
        assert coordinator.take() == []
    coordinator.submit(1, [allreduce()], 0.0)
    told = decisions(coordinator)
    assert list(told) == [0, 1, 2]
    assert all(each == [Decision("allreduce", ["allreduce.a"])] for each in told.values())


def test_names_match_in_any_order_and_in_the_order_in_which_they_are_ready() -> None:
    coordinator = Coordinator(2, fusion_bytes=0)
    coordinator.submit(0, [allreduce("a"), allreduce("b"), allreduce("c")], 0.0)
    coordinator.submit(1, [allreduce("c"), allreduce("a"), allreduce("b")], 0.0)
    told = decisions(coordinator)
    assert [each.names for each in told[0]] == [["allreduce.c"], ["allreduce.a"], ["allreduce.b"]]
    assert told[0] == told[1]


def test_what_may_travel_together_does_up_to_the_threshold() -> None:
    coordinator = Coordinator(1, fusion_bytes=20)
    other = allreduce("d", factors=(2.0, 1.0))
    coordinator.submit(0, [allreduce("a"), other, gather("g", 1), allreduce("b"), allreduce("c")], 0.0)
    assert [each.names for each in decisions(coordinator)[0]] == [
        ["allreduce.a", "allreduce.b"], ["allreduce.d"], ["allgather.g"], ["allreduce.c"],
    ]  # fmt: skip


def test_gathers_tell_the_rows_of_each_rank() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(1, [gather("g", 5)], 0.0)
    coordinator.submit(0, [gather("g", 3)], 0.0)
    assert decisions(coordinator)[1][0].sizes == [[3], [5]]


def test_members_alone_are_asked_and_told() -> None:
    coordinator = Coordinator(3)
    for rank in range(3):
        coordinator.submit(rank, [Request("add_set", "add_set.1", ranks=(0, 2))], 0.0)
    assert decisions(coordinator)[1][0].sizes == [1]
    for rank in (0, 2):
        coordinator.submit(rank, [allreduce(process_set=1)], 0.0)
    assert list(decisions(coordinator)) == [0, 2]
    for rank in range(3):
        coordinator.submit(rank, [Request("add_set", "add_set.2", ranks=(0, 2))], 0.0)
    assert "duplicate" in decisions(coordinator)[0][0].error
    for rank in range(3):
        coordinator.submit(rank, [Request("remove_set", "remove_set.1", ranks=(1,))], 0.0)
    assert decisions(coordinator)[2][0].error == ""
    assert list(coordinator.sets) == [0]


def test_what_is_open_in_a_process_set_ends_with_it() -> None:
    coordinator = Coordinator(3, stall=1.0)
    for rank in range(3):
        coordinator.submit(rank, [Request("add_set", "add_set.1", ranks=(0, 1))], 0.0)
    coordinator.submit(0, [allreduce(process_set=1)], 0.0)
    coordinator.take()
    for rank in range(3):
        coordinator.submit(rank, [Request("remove_set", "remove_set.1", ranks=(1,))], 0.0)
    ended, removed = decisions(coordinator)[0]
    assert (ended.names, removed.kind) == (["allreduce.a"], "remove_set")
    assert ended.error == "allreduce 'a': its process set, number 1, was removed"
    coordinator.submit(1, [allreduce(process_set=1)], 0.0)
    assert "was removed" in decisions(coordinator)[1][0].error, "who comes later is told as well"
    coordinator.tick(2.0)
    assert coordinator.take() == [], "nothing is open"


def test_joined_ranks_are_told_what_they_know_nothing_of() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(2, [JOIN], 0.0)
    coordinator.submit(0, [allreduce("a")], 0.0)
    coordinator.submit(1, [allreduce("a")], 0.0)
    told = decisions(coordinator)
    assert told[2] == [Decision("allreduce", ["allreduce.a"], requests=[allreduce("a").pack()])]
    coordinator.submit(0, [gather("g", 1)], 0.0)
    coordinator.submit(1, [gather("g", 1)], 0.0)
    told = decisions(coordinator)
    assert list(told) == [0, 1]
    assert "not supported with Join at this time: rank 2 called hvd.join()" in told[0][0].error
    coordinator.submit(1, [JOIN], 0.0)
    coordinator.submit(0, [allreduce("b")], 0.0)
    assert list(decisions(coordinator)) == [0, 1, 2]
    coordinator.submit(0, [JOIN], 0.0)
    assert decisions(coordinator)[1] == [Decision("join", ["join"], sizes=[0])]
    coordinator.submit(0, [allreduce("c")], 0.0)
    assert coordinator.take() == [], "the join is over: all must come again"


def test_a_joined_rank_is_with_zeros_in_its_process_sets_too() -> None:
    coordinator = Coordinator(3)
    for rank in range(3):
        coordinator.submit(rank, [Request("add_set", "add_set.1", ranks=(0, 2))], 0.0)
    coordinator.submit(2, [JOIN], 0.0)
    coordinator.take()
    coordinator.submit(0, [allreduce(process_set=1)], 0.0)
    assert decisions(coordinator)[2][0].requests == [allreduce(process_set=1).pack()]


def test_a_join_makes_ready_what_waits_for_that_rank() -> None:
    coordinator = Coordinator(2)
    coordinator.submit(0, [allreduce()], 0.0)
    coordinator.submit(1, [JOIN], 0.0)
    assert list(decisions(coordinator)) == [0, 1]


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (allreduce(), allreduce(shape=(3,)), "Mismatched allreduce tensor shapes: rank 0 has [2]; ranks 1-2 have [3]"),
        (allreduce(), allreduce(factors=(2.0, 1.0)), "factors: rank 0 has (1.0, 1.0); ranks 1-2 have (2.0, 1.0)"),
        (allreduce(), allreduce(device="cuda"), "CPU/GPU device selection: rank 0 has CPU; ranks 1-2 have CUDA"),
        (
            Request("broadcast", "allreduce.a", dtypes=("float32",), shapes=((2,),)), allreduce(),
            "Mismatched operations: rank 0 has broadcast; ranks 1-2 have allreduce",
        ),
        (
            Request("allgather", "allreduce.a", dtypes=("int8",), shapes=((2,),)),
            Request("allgather", "allreduce.a", dtypes=("int8", "int8"), shapes=((2,), (2,))),
            "Mismatched numbers of tensors in a group: rank 0 has 1; ranks 1-2 have 2",
        ),
        (
            group("float32", "float64", "float32"), group("float32", "float64", "float64"),
            "Mismatched data types: rank 0 has float32, float64, float32; ranks 1-2 have float32, float64, float64",
        ),
    ],
)  # fmt: skip
def test_differences_name_ranks_and_values(mine: Request, theirs: Request, text: str) -> None:
    coordinator = Coordinator(3)
    for rank in (1, 0, 2):
        coordinator.submit(rank, [mine if rank == 0 else theirs], 0.0)
    told = decisions(coordinator)
    assert list(told) == [0, 1, 2]
    for (decision,) in told.values():
        assert text in decision.error
        assert "'a'" in decision.error


def test_scalars_have_no_rows() -> None:
    coordinator = Coordinator(1)
    coordinator.submit(0, [Request("allgather", "allgather.s", dtypes=("int8",), shapes=((),))], 0.0)
    assert "rank-zero tensor" in decisions(coordinator)[0][0].error


def test_a_rank_that_left_fails_what_needs_it_now_and_later() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(0, [allreduce("a")], 0.0)
    coordinator.leave(1, "has gone")
    told = decisions(coordinator)
    assert list(told) == [0]
    assert "rank 1 has gone, and rank 0 waits for it" in told[0][0].error
    coordinator.submit(2, [JOIN], 0.0)
    assert "join() cannot complete: rank 1 has gone" in decisions(coordinator)[2][0].error
    coordinator.leave(0, "has gone")
    coordinator.leave(2, "has gone")
    assert coordinator.take() == [(rank, {"end": True}) for rank in range(3)]


def test_stalls_are_reported_once_and_end_everything_at_last() -> None:
    coordinator = Coordinator(3, stall=1, timeout=5)
    coordinator.submit(0, [allreduce("a")], 0.0)
    coordinator.submit(1, [allreduce("b")], 0.5)
    coordinator.tick(0.9)
    assert coordinator.take() == []
    coordinator.tick(1.0)
    ((rank, message),) = coordinator.take()
    assert rank == 0
    assert message["stalled"].startswith(
        "allreduce 'a' has not started for 1.0 s: rank 0 submitted it; missing: rank 1"
    )
    assert "rank 1 (waits for allreduce 'b'), rank 2 (has submitted nothing that is open)" in message["stalled"]
    coordinator.tick(1.2)
    assert coordinator.take() == []
    coordinator.tick(5.0)
    told = [(rank, message["failed"]) for rank, message in coordinator.take() if "failed" in message]
    assert [rank for rank, _ in told] == [0, 1, 2]
    assert "HVDBRIDGE_TIMEOUT_SECONDS=5" in told[0][1]
    coordinator.submit(2, [allreduce("a")], 6.0)
    assert coordinator.take() == [(2, {"failed": told[0][1]})]


def test_requests_and_decisions_travel_as_json() -> None:
    request = allreduce(factors=(0.5, 2.0), splits=(1, 2), ranks=(3,))
    assert Request(*request.pack()) == request
    decision = Decision("allreduce", ["allreduce.a"], 2, "error", [[1], [2]], [request.pack()])
    assert Decision(*json.loads(json.dumps(decision.pack()))).names == decision.names
    assert Request(*json.loads(json.dumps(request.pack()))).fusion == request.fusion


def channel(name: str = "a") -> Request:
    return Request("channel", f"channel.{name}", label="DistributedOptimizer 1")


def test_who_joined_is_told_of_the_steps_that_others_begin_and_opens_their_channels() -> None:
    coordinator = Coordinator(3)
    coordinator.submit(0, [channel()], 0.0)
    coordinator.submit(2, [JOIN], 1.0)
    announce = {"announce": True}
    assert coordinator.take() == [(0, announce), (1, announce), (2, announce), (2, {"follow": [0, "channel.a", 0]})]
    coordinator.submit(1, [channel()], 2.0)
    assert coordinator.take() == []
    coordinator.submit(2, [channel()], 3.0)
    assert list(decisions(coordinator)) == [0, 1, 2]
    for rank_step in (1, 1, 2):
        coordinator.begin([(0, "channel.a", rank_step)], 4.0)
    assert coordinator.take() == [(2, {"follow": [0, "channel.a", step]}) for step in (1, 2)]
    coordinator.submit(1, [JOIN], 5.0)
    assert (1, {"follow": [0, "channel.a", 2]}) in coordinator.take()
    coordinator.submit(0, [JOIN], 6.0)
    assert [message for rank, message in coordinator.take() if rank == 0][-1]["do"][0][4] == [0]


def test_a_join_is_no_stall_while_others_step() -> None:
    coordinator = Coordinator(2, stall=10, timeout=20)
    coordinator.submit(0, [JOIN], 0.0)
    coordinator.take()
    for now in range(0, 100, 9):
        coordinator.begin([(0, "channel.a", now)], float(now))
        coordinator.tick(now + 9.0)
    assert all("follow" in message for _, message in coordinator.take())
    coordinator.tick(120.0)
    assert "join() waits" in coordinator.failure
