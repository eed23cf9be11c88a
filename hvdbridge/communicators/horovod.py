"""Horovod below a communicator.

Rules:

1. Every operation is named ``{communicator}.{kind}.{dtype}.{shape}.{number}``: no other communicator and no user has
   that name, it is in flight once at a time, and it repeats, which Horovod's response cache needs: the number runs
   round, the same on all ranks, because operations start in the same order on all.
2. A group is a process set. Horovod makes one only if all ranks of its world ask for it, and once for the same
   ranks: so a split also makes the sets of its children's ``node`` and ``cross`` groups, sets are shared between
   communicators (names differ), and they live until ``hvd.shutdown``. A user's ``add_process_set`` for the same ranks
   must come first: Horovod has no second one.
3. Waiting polls: ``hvd.synchronize`` spins and takes the interpreter's lock from the thread that runs backward;
   polling was measured alike at two ranks on two cores and up to twice as fast at three. It also bounds the wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from hvdbridge.communicators.base import Capabilities, Communicator, Watch, Work, cross_groups, node_groups, unwatched
from hvdbridge.communicators.bridge import Bridged
from hvdbridge.errors import NotInitialized, Unsupported

POLL_SECONDS = 1e-4

NAMES = 4
"""Numbers that a name ends in; an operation waits for the one that had its name before."""

NATIVE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""What Horovod adds and multiplies rightly; it takes float16, too, but rounds after each addition."""

OPS = {"sum": hvd.Sum, "product": hvd.Product, "min": hvd.Min, "max": hvd.Max}

WORLDS = count()
"""Numbers the worlds of this process: Horovod knows operations by name alone."""


class Operation(Work):
    """A handle that is polled."""

    def __init__(self, handle: int, name: str, seconds: float) -> None:
        self._handle: int | None = handle
        self._error: Exception | None = None
        self._name = name
        self._deadline = time.monotonic() + seconds

    def done(self) -> bool:
        return self._handle is None or hvd.poll(self._handle) or time.monotonic() > self._deadline

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self._handle is None:
            return
        while not hvd.poll(self._handle):
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"The Horovod operation {self._name} timed out")
            time.sleep(POLL_SECONDS)
        handle, self._handle = self._handle, None
        try:
            hvd.synchronize(handle)
        except Exception as error:
            self._error = error
            raise


class HorovodCommunicator(Bridged):
    """Executes requests as named Horovod operations on a process set (None: a group of one rank)."""

    failures = (HorovodInternalError, TimeoutError)

    def __init__(
        self, name: str, ranks: Sequence[int], members: Any, timeout_seconds: float, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, list(ranks).index(hvd.rank()), len(ranks), timeout_seconds, watch)
        self.capabilities = Capabilities(cuda=bool(hvd.nccl_built()))
        self._ranks = list(ranks)  # in Horovod's world
        self._members = members
        self._started: dict[str, int] = {}
        self._in_flight: dict[str, Operation] = {}

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> HorovodCommunicator:
        if not hvd.is_initialized():
            raise NotInitialized("Horovod is not started; call hb.init() or hvd.init() first")
        name = f"hvdbridge.{next(WORLDS)}"
        return cls(name, range(hvd.size()), hvd.global_process_set, timeout_seconds, watch)

    def ranks_of(self, group: object) -> list[int]:
        return super().ranks_of(group.ranks if isinstance(group, hvd.ProcessSet) else group)

    def _reduces(self, flat: Tensor, op: str) -> bool:
        loses_nan = flat.is_floating_point() and op in ("min", "max")
        return flat.dtype in NATIVE and not loses_nan

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        name = self._operation(op, flat)
        return self._work(hvd.allreduce_async_(flat, op=OPS[op], name=name, process_set=self._members), name)

    # The public functions below these two answer in new memory; these write where they are told to.

    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        name = self._operation("gather", data)
        return self._work(mpi_ops._allgather_async(data[None], answer, name, self._members), name)

    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        name = self._operation("exchange", rows)
        received = torch.empty(self.size, dtype=torch.int32)
        handle = mpi_ops._alltoall_async(rows, None, answer, received, name, self._members)
        return self._work(handle, name)

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        name = self._operation(f"from{root}", data)
        handle = hvd.broadcast_async_(data, self._ranks[root], name=name, process_set=self._members)
        return self._work(handle, name)

    def _operation(self, kind: str, tensor: Tensor) -> str:
        """The name of the next operation of this kind, type and shape; the same on all ranks."""
        shape = "x".join(map(str, tensor.shape))
        name = f"{self.name}.{kind}.{str(tensor.dtype).removeprefix('torch.')}.{shape}"
        number = self._started[name] = (self._started.get(name, -1) + 1) % NAMES
        name = f"{name}.{number}"
        if name in self._in_flight:
            with suppress(Exception):  # the flow's whose it is: raised again where that waits
                self._in_flight[name].wait()
        return name

    def _work(self, handle: int, name: str) -> Work:
        work = self._in_flight[name] = Operation(handle, name, self.timeout_seconds)
        return work

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        sets = [self._process_set(group) for group in groups]
        if self.nodes:
            for group in groups:
                nodes = [self.nodes[rank] for rank in group]
                for inner in (*node_groups(nodes), *cross_groups(nodes)):
                    self._process_set([group[i] for i in inner])
        if mine is None:
            return None
        ranks = [self._ranks[rank] for rank in groups[mine]]
        return HorovodCommunicator(f"{name}-{mine}", ranks, sets[mine], self.timeout_seconds, self.watch)

    def _process_set(self, group: list[int]) -> Any:
        """The process set of these ranks of this communicator: the one there is, or a new one."""
        ranks = [self._ranks[rank] for rank in group]
        if len(ranks) == 1:
            return None
        known = {tuple(ranks): number for number, ranks in mpi_ops._basics._get_process_set_ids_and_ranks().items()}
        if tuple(ranks) in known:
            found = hvd.ProcessSet(ranks)
            found.process_set_id = known[tuple(ranks)]
            return found
        if self.size < hvd.size():
            raise Unsupported(
                f"rank {hvd.rank()}: Horovod cannot make the group {ranks} inside the group {self._ranks}; "
                "make it from the communicator of all ranks"
            )
        try:
            return hvd.add_process_set(ranks)
        except ValueError as cause:
            raise Unsupported(
                f"rank {hvd.rank()}: Horovod makes the group {ranks} only if HOROVOD_DYNAMIC_PROCESS_SETS=1 "
                "was in the environment before hvd.init(), as hb.init() sets it"
            ) from cause

    def _close(self) -> None:
        self._members = None
