"""Horovod's variables, its names, and who may speak to the coordinator."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import hvdbridge.torch as hvd
from hvdbridge.backends.communicator import Capabilities
from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError, RendezvousError
from hvdbridge.policies import from_spec
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.link import SocketLink
from hvdbridge.supervisor.spawn import HelperAddress
from hvdbridge.supervisor.wire import Message, pack
from hvdbridge.torch.control import Hub, connect_to_hub
from hvdbridge.torch.coordinator import Coordinator, Request
from hvdbridge.torch.optimizer_options import bucket_mb
from hvdbridge.torch.settings import Settings, ignored_variables

NAMES = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip


def test_buckets_among_the_ranks_of_a_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one node and of several, whatever the job has; or as said."""
    monkeypatch.setattr("hvdbridge.reduction.source.DDP_HAS_SIZE_LIST", True)
    world = SimpleNamespace(nodes=(0, 0, 1, 1), capabilities=Capabilities())
    session = SimpleNamespace(communicator=world, config=Config())
    operations: Any = SimpleNamespace(session=session, settings=SimpleNamespace(bucket_bytes=None))
    for spec, expected in (("mean", [25, 10, 10]), ("int8", [10, 5, 5])):
        sizes = [bucket_mb(operations, from_spec(spec), ranks) for ranks in ([0, 1], [1, 2], range(4))]
        assert sizes == expected
    operations.settings.bucket_bytes = 2**20
    assert bucket_mb(operations, from_spec("mean"), [0, 3]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_horovod_torch_is_there(name: str) -> None:
    assert getattr(hvd, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'allredce'"):
        hvd.allredce  # noqa: B018


def test_reductions_are_horovods_numbers() -> None:
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)] == list(range(6))


def test_the_environment() -> None:
    assert Settings.from_environment(30, 300, {}) == Settings()
    assert Settings().limit == "HVDBRIDGE_TIMEOUT_SECONDS"
    env = {
        "HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20", "HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }  # fmt: skip
    assert Settings.from_environment(30, 300, env) == Settings(
        1024, 0.0025, 7.0, 20.0, "t.json", True, shutdown_seconds=20.0, bucket_bytes=1024
    )
    assert Settings.from_environment(30, 300, env).limit == "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    longer = Settings.from_environment(30, 10, env)
    assert (longer.timeout_seconds, longer.shutdown_seconds) == (10, 0)
    assert longer.limit == "HVDBRIDGE_TIMEOUT_SECONDS"
    assert Settings.from_environment(30, 300, {"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_seconds == math.inf
    assert Settings.from_environment(30, 300, {"HOROVOD_TIMELINE": "DYNAMIC"}).timeline == ""
    assert ignored_variables({"HOROVOD_AUTOTUNE": "1", "HOROVOD_RANK": "0", "HOROVOD_CACHE_CAPACITY": "0"}) == [
        "HOROVOD_AUTOTUNE",
        "HOROVOD_CACHE_CAPACITY",
    ]


@pytest.mark.parametrize("text", ["fast", "-1", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HOROVOD_CYCLE_TIME"):
        Settings.from_environment(30, 300, {"HOROVOD_CYCLE_TIME": text})


class Mailbox:
    """Messages that came, and a way to wait for one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._came = threading.Condition()

    def __call__(self, message: Message) -> None:
        with self._came:
            self.messages.append(message)
            self._came.notify_all()

    def wait(self) -> Message:
        with self._came:
            assert self._came.wait_for(lambda: bool(self.messages), 5.0)
            return self.messages.pop(0)


def star(coordinator: Coordinator, boxes: list[Mailbox], first: Callable[[str, int], None]) -> tuple[Hub, SocketLink]:
    """Rank 0 and rank 1 of a job of two; ``first`` is called with the address before rank 1 comes."""
    monitor, opened = Monitor.alone(Config()), []

    def join() -> None:
        while not (found := monitor.store_get("star")):
            time.sleep(0.01)
        address = HelperAddress.parse(found.decode())
        first(address.host, address.port)
        opened.append(connect_to_hub(boxes[1], monitor, 1, "star", 5.0))

    monitor.store_set("star", b"")
    thread = threading.Thread(target=join)
    thread.start()
    hub = Hub(coordinator, boxes[0], monitor, "star", 5.0)
    thread.join()
    return hub, opened[0]


def test_the_star_carries_decisions_and_lets_no_stranger_in() -> None:
    def stranger(host: str, port: int) -> None:
        with socket.create_connection((host, port)) as sock:
            sock.sendall(pack({"secret": "guess", "rank": 1}))
            turned_away.append(sock.recv(1) == b"")

    turned_away: list[bool] = []
    boxes = [Mailbox(), Mailbox()]
    hub, other = star(Coordinator(2), boxes, stranger)
    assert turned_away == [True]
    request = Request("barrier", "barrier")
    other.send({"submit": [request.pack()]})
    hub.send({"submit": [request.pack()]})
    assert boxes[0].wait() == boxes[1].wait() == {"do": [["barrier", ["barrier"], 0, "", [], []]]}
    other.send({"fail": "no memory"})
    assert boxes[0].wait() == boxes[1].wait() == {"failed": "no memory"}
    hub.send({"leave": True})
    other.send({"leave": True})
    assert boxes[0].wait() == boxes[1].wait() == {"end": True}
    other.close()
    hub.close()


def test_a_rank_that_never_comes_to_init_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"ranks \[1\]"):
        Hub(Coordinator(2), Mailbox(), Monitor.alone(Config()), "star", 0.2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_of_the_coordinator_is_told_to_all() -> None:
    """Not found out by each rank's own clock."""

    class Broken(Coordinator):
        def tick(self, now: float) -> None:
            raise KeyError("a set")

    boxes = [Mailbox(), Mailbox()]
    hub, other = star(Broken(2), boxes, lambda host, port: None)
    text = "the coordinator of operations, on rank 0, failed: KeyError('a set')"
    assert boxes[0].wait() == boxes[1].wait() == {"failed": text}
    other.close()
    hub.close()
