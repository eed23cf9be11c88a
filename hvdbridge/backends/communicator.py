"""What a backend must be able to do: execute collectives among a fixed group of ranks.

Rules:

1. All ranks of a communicator issue the same requests in the same order, from one thread at a time.
2. A communicator is its own channel: its messages never meet those of another communicator or of the
   user's own calls to the library below.
3. Every dtype in :data:`DTYPES` works for every operation that has a meaning; where the library below has a
   gap, the communicator bridges it exactly.
4. ``execute`` may reduce into the request's tensor (it was given away); the answer never aliases another
   rank's memory and is equal on all ranks, bit by bit, where its meaning is.
5. ``answer`` is ``execute`` in steps, so that several requests can be under way: it yields None where it is about to
   start an operation of the library, and the :class:`Work` it has started. The caller starts operations in the same
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
from hvdbridge.policy.collectives import AllGather, AllReduce, Broadcast, Collective

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


LOOK_SECONDS = 5e-5
"""Seconds between two tests of an operation whose wait takes no limit."""


class Work(ABC):
    """An operation that a library has started.

    Attributes:
        last: no other operation of its request follows.
        shared: several threads may call :meth:`wait` at once. The scheduler then blocks in it instead of polling.
    """

    last = False
    shared: ClassVar[bool] = False
    _error: Exception | None = None  # what wait() raises

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once; makes progress where the library needs that."""

    def over_within(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; returns whether the operation is over."""
        end = time.perf_counter() + seconds
        while not self.done():
            if time.perf_counter() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    @abstractmethod
    def wait(self) -> None:
        """Return when it is complete. Harmless when repeated.

        Raises:
            Exception: the library's own.
        """


Answer = Generator[Work | None, None, Tensor]
"""Steps towards an answer: None before an operation starts, the work that was started; returns the tensor."""

Watch = Callable[[object], AbstractContextManager[None]]
"""``with watch(request):`` registers a wait with the job's monitor, which prints ``str(request)`` if it takes long."""


def unwatched(_: object) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Capabilities:
    """How a backend differs from others; read instead of its name.

    Attributes:
        blocks_host: ``execute`` returns when the answer is there (Gloo, MPI, Horovod); otherwise it only
            enqueues on the current CUDA stream (NCCL).
        progresses: operations advance by themselves; otherwise only while a thread tests them (MPI).
        cuda: CUDA tensors travel without passing through host memory.
        carriers: the libraries below, as torch.distributed names its backends.
    """

    blocks_host: bool = True
    progresses: bool = True
    cuda: bool = False
    carriers: tuple[str, ...] = ()


class Communicator(ABC):
    """Executes :class:`Collective` requests among ``size`` ranks of which this process is ``rank``; ``timeout_seconds``
    is what the library below allows for one, where it has limits of its own."""

    rank: int
    size: int
    timeout_seconds: float = math.inf
    capabilities: Capabilities = Capabilities()

    def __init__(self, watch: Watch = unwatched) -> None:
        self.watch = watch
        self.groups: dict[str, Communicator] = {}
        self.nodes: tuple[int, ...] = ()
        self._among_nodes: dict[str, tuple[int, int]] = {}

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> Communicator:
        """All ranks of the library below, which is already started; an own channel; collective."""
        raise NotImplementedError(f"{cls.__name__} is not a backend")

    def execute(self, request: Collective) -> Tensor:
        """Answer one request; see :mod:`hvdbridge.policy.collectives` for shapes.

        Raises:
            Unsupported: the operation has no meaning for this dtype.
            CollectiveTimeout: it took too long.
            RankFailed: another rank is gone.
        """
        steps = self.answer(request)
        try:
            while True:
                next(steps)  # resumed at once, it waits in the library
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def answer(self, request: Collective) -> Answer:
        """:meth:`execute` in steps; the first is yielded before any work is done."""
        yield None
        comm = self if request.group == "world" else self._named(request.group)
        with self.watch(request):
            return (yield from comm._answer(request))

    def size_of(self, group: str) -> int:
        """The number of ranks in ``group``."""
        return self.size if group == "world" else self._named(group).size

    def places(self) -> Mapping[str, tuple[int, int]]:
        """This rank's number in, and the size of, each named group."""
        return {**{name: (comm.rank, comm.size) for name, comm in self.groups.items()}, **self._among_nodes}

    def set_nodes(self, nodes: Sequence[int]) -> None:
        """Say on which node each rank runs (any numbers, equal within a node); this gives the groups
        ``"node"`` and ``"cross"`` their meaning. The same on all ranks."""
        if len(nodes) != self.size:
            raise ConfigurationError(f"one node for each of {self.size} ranks is needed, got {list(nodes)}")
        self.nodes = tuple(nodes)
        for name, divide in DIVISIONS.items():
            ranks = next(ranks for ranks in divide(self.nodes) if self.rank in ranks)
            self._among_nodes[name] = (ranks.index(self.rank), len(ranks))

    def _named(self, group: str) -> Communicator:
        if group not in self.groups:  # made on first use: all ranks execute the same requests, so all ranks are here
            if group.startswith("ranks:"):
                parts = [[int(rank) for rank in part.split(",")] for part in group[6:].split("|")]
            else:
                parts = DIVISIONS[group](self.nodes) if group in DIVISIONS else []
            if not parts:
                known = ", ".join(["world", *sorted(self.groups)])
                raise ConfigurationError(f"rank {self.rank} is in no group named {group!r}; it knows: {known}")
            made = self.split(parts)
            assert made is not None, "every rank is in a part"
            self.groups[group] = made
        return self.groups[group]

    @abstractmethod
    def _answer(self, request: Collective) -> Answer:
        """Answer a request whose group is this communicator, in steps."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Divide into disjoint groups of ranks; collective over all ranks of this communicator.

        Returns the communicator of the group that holds this rank (ranks renumbered in ascending order), or
        None where no group does. ``split([range(size)])`` duplicates.
        """

    def ranks_of(self, group: object) -> list[int]:
        """The ranks, ascending, that a user means by ``group``: an iterable of ranks, a process group of torch or a
        DeviceMesh of one dimension, or the backend's own group.

        Raises:
            ConfigurationError: it is none of these, it is empty, or a rank is not one of this communicator's.
        """
        group = of_torch(group)
        ranks = sorted(group) if isinstance(group, Iterable) else []
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ConfigurationError(
                f"group={group!r} must hold distinct ranks below {self.size}, or be a group of the backend's library"
            )
        return ranks

    @abstractmethod
    def control(self) -> Communicator:
        """A duplicate whose tensors live in host memory (weights, objects); collective."""

    @abstractmethod
    def close(self) -> None:
        """Free what this communicator opened; the library below stays up. Harmless when repeated."""

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.execute(AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max"))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order. Host memory only: call it on :meth:`control`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.execute(AllGather(torch.tensor([data.numel()], device="cpu"))).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = self.execute(AllGather(padded))
        return [pickle.loads(rows[i, : lengths[i]].numpy().tobytes()) for i in range(self.size)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank ``root``'s picklable ``value`` on all ranks. Host memory only: call it on :meth:`control`."""
        mine = pickle.dumps(value) if self.rank == root else b""
        length = int(self.execute(Broadcast(torch.tensor([len(mine)], device="cpu"), root)).item())
        buffer = torch.frombuffer(bytearray(mine or length), dtype=torch.uint8)
        return pickle.loads(self.execute(Broadcast(buffer, root)).numpy().tobytes())


def of_torch(group: object) -> object:
    """The ranks of a DeviceMesh or of a process group of torch, on whatever backend; anything else as it is.

    Raises:
        ConfigurationError: a mesh of several dimensions.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and isinstance(group, c10d.ProcessGroup):
        return c10d.get_process_group_ranks(group)
    meshes = sys.modules.get("torch.distributed.device_mesh")  # importing it is slow, and a mesh exists only after that
    if meshes is None or not isinstance(group, meshes.DeviceMesh):
        return group
    if group.ndim != 1:
        raise ConfigurationError(f"group={group} has {group.ndim} dimensions. Give one of them: mesh[name].")
    return group.mesh.flatten().tolist()


def node_groups(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node.

    >>> node_groups([0, 0, 1, 1, 1]), cross_groups([0, 0, 1, 1, 1])
    ([[0, 1], [2, 3, 4]], [[0, 2], [1, 3], [4]])
    """
    return [[rank for rank, at in enumerate(nodes) if at == node] for node in dict.fromkeys(nodes)]


def cross_groups(nodes: Sequence[int]) -> list[list[int]]:
    """The first rank of each node, then the second of each node that has one, and so on."""
    rows = node_groups(nodes)
    return [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows), default=0))]


DIVISIONS = {"node": node_groups, "cross": cross_groups}
"""How a named group divides the ranks, by their nodes."""
