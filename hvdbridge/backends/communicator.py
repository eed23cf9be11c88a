"""The interface of a backend: execute collectives among a fixed group of ranks.

Rules:

1. All ranks of a communicator issue the same requests in the same order. One thread at a time issues them.
2. A communicator has a message channel of its own. Its messages never match those of another communicator, nor those
   of the user's direct calls to the library.
3. Each dtype in :data:`DTYPES` works with each operation that is defined for it. Where the library lacks a dtype or an
   operation, the communicator computes the result itself, without loss.
4. ``execute`` may reduce into the request's tensor, which the caller no longer owns. The result never aliases memory
   of another rank. Where an operation gives all ranks the same result, its bits are equal on all ranks.
5. ``answer`` performs ``execute`` in steps, so that several requests can be in flight. It first yields None
   once. Then, for each operation of the library, it yields None before it starts the operation, and the :class:`Work`
   afterwards; resumed after that, it waits for the operation. The caller resumes these generators in the same
   order on all ranks.
"""

from __future__ import annotations

import math
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policy.collectives import AllGather, AllReduce, Broadcast, Collective, groups_of

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


POLL_SECONDS = 5e-5
"""Interval, in seconds, between two tests of an operation whose own wait takes no timeout."""


class Work(ABC):
    """An operation that a library has started.

    Attributes:
        last: True if no other operation of the same request follows.
        thread_safe_wait: several threads may call :meth:`wait` at once. The scheduler then blocks in :meth:`wait`
            instead of polling :meth:`done`.
    """

    last = False
    thread_safe_wait: ClassVar[bool] = False
    _error: Exception | None = None  # for subclasses, whose wait() raises it

    @abstractmethod
    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once. MPI progresses the operation only in this call."""

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; return whether the operation is over."""
        end = time.perf_counter() + seconds
        while not self.done():
            if time.perf_counter() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    @abstractmethod
    def wait(self) -> None:
        """Block until the operation is complete. Further calls return at once.

        Raises:
            Exception: the operation failed. The library defines the type.
        """


Answer = Generator[Work | None, None, Tensor]
"""Generator of one request (rule 5); returns the result."""

Watch = Callable[[object], AbstractContextManager[None]]
"""``with watch(request):`` registers a wait with the job's monitor, under the name ``str(request)``. It raises the
job's first failure, and the job fails if the wait exceeds its limit."""


def unwatched(_: object) -> AbstractContextManager[None]:
    """Return a context that registers no wait; the default :data:`Watch`."""
    return nullcontext()


@dataclass(frozen=True)
class Capabilities:
    """Properties in which backends differ. Callers test them instead of the backend's name.

    Attributes:
        blocks_host: ``execute`` returns when the result is complete (Gloo, MPI, Horovod). If False, it only enqueues
            work on the current CUDA stream (NCCL).
        progresses: operations progress by themselves. If False, only while a thread tests them (MPI).
        cuda: the library takes CUDA tensors; they do not pass through host memory.
        torch_backends: the libraries that move the data, under the names that torch.distributed gives its backends.
    """

    blocks_host: bool = True
    progresses: bool = True
    cuda: bool = False
    torch_backends: tuple[str, ...] = ()


class Communicator(ABC):
    """Executes :class:`Collective` requests among a fixed group of ranks.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        timeout_seconds: the library's limit for one operation, where the library has one.
        groups: communicators of named groups, by name.
        nodes: the node of each rank, see :meth:`set_nodes`; empty until then.
        in_users_graph: a CUDA graph of the user has captured operations, so :meth:`close` cannot wait for their end.
    """

    rank: int
    size: int
    timeout_seconds: float = math.inf
    capabilities: Capabilities = Capabilities()

    in_users_graph = False

    def __init__(self, watch: Watch = unwatched) -> None:
        self.watch = watch
        self.groups: dict[str, Communicator] = {}
        self.nodes: tuple[int, ...] = ()
        self._node_group_positions: dict[str, tuple[int, int]] = {}

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> Communicator:
        """Return a communicator of all ranks, with a channel of its own. Collective.

        Raises:
            NotInitialized: the library is not running.
        """
        raise NotImplementedError(f"{cls.__name__} is not a backend")

    def execute(self, request: Collective) -> Tensor:
        """Execute one request and return its result. See :mod:`hvdbridge.policy.collectives` for shapes.

        Raises:
            Unsupported: the operation is not defined for this dtype or shape.
            CollectiveTimeout: the operation exceeded its time limit.
            RankFailed: another rank failed.
        """
        steps = self.answer(request)
        try:
            while True:
                next(steps)  # a generator that is resumed at once blocks in Work.wait
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def answer(self, request: Collective) -> Answer:
        """Perform :meth:`execute` in steps (rule 5). The first step precedes all computation."""
        yield None
        comm = self if request.group == "world" else self._group_communicator(request.group)
        with self.watch(request):
            return (yield from comm._answer(request))

    def size_of(self, group: str) -> int:
        """Return the number of ranks in ``group``."""
        return self.size if group == "world" else self._group_communicator(group).size

    def group_positions(self) -> Mapping[str, tuple[int, int]]:
        """Return, for each named group, this rank's number in the group and the group's size."""
        return {**{name: (comm.rank, comm.size) for name, comm in self.groups.items()}, **self._node_group_positions}

    def set_nodes(self, nodes: Sequence[int]) -> None:
        """Set the node of each rank, which defines the groups ``"node"`` and ``"cross"``.

        Args:
            nodes: one number for each rank, equal for ranks of one node. All ranks pass the same sequence.

        Raises:
            ConfigurationError: ``nodes`` does not have ``size`` elements.
        """
        if len(nodes) != self.size:
            raise ConfigurationError(f"one node for each of {self.size} ranks is needed, got {list(nodes)}")
        self.nodes = tuple(nodes)
        for name, divide in NODE_DIVISIONS.items():
            ranks = next(ranks for ranks in divide(self.nodes) if self.rank in ranks)
            self._node_group_positions[name] = (ranks.index(self.rank), len(ranks))

    def _group_communicator(self, group: str) -> Communicator:
        """Return the communicator of ``group``. The first use, which all ranks make together, creates it."""
        if group not in self.groups:
            parts = groups_of(group)
            if group in NODE_DIVISIONS:
                parts = NODE_DIVISIONS[group](self.nodes)
            if not parts:
                known = ", ".join(["world", *sorted(self.groups)])
                raise ConfigurationError(f"rank {self.rank} is in no group named {group!r}; it knows: {known}")
            communicator = self.split(parts)
            assert communicator is not None, "every rank is in a part"
            self.groups[group] = communicator
        return self.groups[group]

    @abstractmethod
    def _answer(self, request: Collective) -> Answer:
        """Execute a request whose group is this communicator, in steps (rule 5)."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Divide the ranks into disjoint groups. Collective over all ranks of this communicator.

        Returns:
            The communicator of the group that contains this rank, or None if no group does. Its ranks are numbered in
            ascending order of their ranks here. ``split([range(size)])`` duplicates this communicator.
        """

    def ranks_of(self, group: object) -> list[int]:
        """Return the ranks of ``group`` in ascending order.

        Args:
            group: an iterable of ranks, a process group of torch, a DeviceMesh of one dimension, or a group object of
                the backend's library.

        Raises:
            ConfigurationError: ``group`` is none of these, is empty, repeats a rank, or has ranks not below ``size``.
        """
        group = torch_group_ranks(group)
        ranks = sorted(group) if isinstance(group, Iterable) else []
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ConfigurationError(
                f"group={group!r} must hold distinct ranks below {self.size}, or be a group of the backend's library"
            )
        return ranks

    @abstractmethod
    def control(self) -> Communicator:
        """Return a duplicate whose tensors are in host memory, for weights and objects. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources of this communicator; the library keeps running. Further calls do nothing."""

    def barrier(self) -> None:
        """Block until all ranks have called this method."""
        self.execute(AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max"))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return each rank's picklable ``value``, in rank order. It uses host memory: call it on :meth:`control`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.execute(AllGather(torch.tensor([data.numel()], device="cpu"))).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = self.execute(AllGather(padded))
        return [pickle.loads(rows[i, : lengths[i]].numpy().tobytes()) for i in range(self.size)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return rank ``root``'s picklable ``value`` on all ranks. It uses host memory: call it on :meth:`control`."""
        mine = pickle.dumps(value) if self.rank == root else b""
        length = int(self.execute(Broadcast(torch.tensor([len(mine)], device="cpu"), root)).item())
        buffer = torch.frombuffer(bytearray(mine or length), dtype=torch.uint8)
        return pickle.loads(self.execute(Broadcast(buffer, root)).numpy().tobytes())


def torch_group_ranks(group: object) -> object:
    """Return the global ranks of a DeviceMesh or of a process group of torch; return any other object unchanged.

    Raises:
        ConfigurationError: the mesh has several dimensions.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and isinstance(group, c10d.ProcessGroup):
        return c10d.get_process_group_ranks(group)
    meshes = sys.modules.get("torch.distributed.device_mesh")  # its import is slow; a mesh exists only after it
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ConfigurationError(f"group={group} has {group.ndim} dimensions. Give one of them: mesh[name].")
    return group.mesh.flatten().tolist()


def node_groups(nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node.

    >>> node_groups([0, 0, 1, 1, 1]), cross_groups([0, 0, 1, 1, 1])
    ([[0, 1], [2, 3, 4]], [[0, 2], [1, 3], [4]])
    """
    return [[rank for rank, of_rank in enumerate(nodes) if of_rank == node] for node in dict.fromkeys(nodes)]


def cross_groups(nodes: Sequence[int]) -> list[list[int]]:
    """Return the first ranks of all nodes, then the second ranks of all nodes that have one, and so on."""
    rows = node_groups(nodes)
    return [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows), default=0))]


NODE_DIVISIONS = {"node": node_groups, "cross": cross_groups}
"""Functions from the nodes of all ranks to groups of ranks, by name of the group."""
