"""What a backend must be able to do: execute collectives among a fixed group of ranks.

Rules:

1. All ranks of a communicator issue the same requests in the same order, from one thread at a time.
2. A communicator is its own channel: its messages never meet those of another communicator or of the
   user's own calls to the library below.
3. Every dtype in :data:`DTYPES` works for every operation that has a meaning; where the library below has a
   gap, the communicator bridges it exactly.
4. ``execute`` may reduce into the request's tensor (it was given away); the answer never aliases another
   rank's memory and is equal on all ranks, bit by bit, where its meaning is.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.collectives import AllGather, AllReduce, Broadcast, Collective

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
)  # fmt: skip

Watch = Callable[[str], AbstractContextManager[None]]
"""``with watch("AllReduce[3] float32 ..."):`` tells the job's monitor what this rank waits for."""


def unwatched(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Capabilities:
    """How a backend differs from others; read instead of its name.

    Attributes:
        blocks_host: ``execute`` returns when the answer is there (Gloo, MPI, Horovod); otherwise it only
            enqueues on the current CUDA stream (NCCL).
        cuda: CUDA tensors travel without passing through host memory.
    """

    blocks_host: bool = True
    cuda: bool = False


class Communicator(ABC):
    """Executes :class:`Collective` requests among ``size`` ranks of which this process is ``rank``."""

    rank: int
    size: int
    capabilities: Capabilities = Capabilities()

    def __init__(self, watch: Watch = unwatched) -> None:
        self.watch = watch
        self.groups: dict[str, Communicator] = {}

    def execute(self, request: Collective) -> Tensor:
        """Answer one request; see :mod:`hvdbridge.collectives` for shapes.

        Raises:
            Unsupported: the operation has no meaning for this dtype.
            CollectiveTimeout: it took too long.
            RankFailed: another rank is gone.
        """
        comm = self if request.group == "world" else self._named(request.group)
        with self.watch(request.signature()):
            return comm._execute(request)

    def size_of(self, group: str) -> int:
        """Number of ranks that take part in a request of ``group``."""
        return self.size if group == "world" else self._named(group).size

    def places(self) -> dict[str, tuple[int, int]]:
        """This rank's number in, and the size of, each named group."""
        return {name: (comm.rank, comm.size) for name, comm in self.groups.items()}

    def _named(self, group: str) -> Communicator:
        try:
            return self.groups[group]
        except KeyError:
            raise KeyError(f"no group named {group!r}; known: world, {', '.join(sorted(self.groups))}") from None

    @abstractmethod
    def _execute(self, request: Collective) -> Tensor:
        """Answer a request whose group is this communicator."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """Divide into disjoint groups of ranks; collective over all ranks of this communicator.

        Returns the communicator of the group that holds this rank (ranks renumbered in the order given), or
        None where no group does. ``split([range(size)])`` duplicates.
        """

    @abstractmethod
    def control(self) -> Communicator:
        """A duplicate whose tensors live in host memory (weights, objects); collective."""

    @abstractmethod
    def close(self) -> None:
        """Free what this communicator opened; the library below stays up. Harmless when repeated."""

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.execute(AllReduce(torch.zeros(1, dtype=torch.int32), "max"))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``, in rank order. Host memory only: call it on :meth:`control`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.execute(AllGather(torch.tensor([data.numel()]))).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.execute(AllGather(padded))
        return [pickle.loads(rows[i, : lengths[i]].numpy().tobytes()) for i in range(self.size)]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Rank ``root``'s picklable ``value`` on all ranks. Host memory only: call it on :meth:`control`."""
        mine = pickle.dumps(value) if self.rank == root else b""
        length = int(self.execute(Broadcast(torch.tensor([len(mine)]), root)).item())
        buffer = torch.frombuffer(bytearray(mine or length), dtype=torch.uint8)
        return pickle.loads(self.execute(Broadcast(buffer, root)).numpy().tobytes())
