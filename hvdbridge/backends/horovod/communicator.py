"""Horovod below a communicator.

Rules:

1. Every operation is named ``{communicator}.{kind}.{dtype}.{shape}.{number}``: no other communicator and no user has
   that name, it is in flight once at a time, and it repeats, which Horovod's response cache needs: the number runs
   round, the same on all ranks, because operations start in the same order on all.
2. A group is a process set. Horovod makes one only if all ranks of its world ask for it, and once for the same
   ranks: so a split also makes the sets of its children's ``node`` and ``cross`` groups, sets are shared between
   communicators (names differ), and they live until ``hvd.shutdown``. A user's ``add_process_set`` for the same ranks
   must come first: Horovod has no second one.
3. Waiting polls: ``hvd.synchronize`` spins and takes the interpreter's lock from the thread that runs backward.
   Polling also bounds the wait.
4. Horovod is lent tensors of its own over the same memory, and a view of each is held until the operation succeeds.
   When a rank dies, Horovod's thread lets go of all tensors under a lock that starting an operation takes, too. In
   torch 2.13 the last holder beside Python needs the interpreter's lock to let go, and the thread that starts an
   operation has that: both waited for ever. A view refers to its base unless that is a view itself, so Horovod's
   thread is not the last holder (but of tensors of ``torch.inference_mode``, whose views have no base).
5. An operation that is started while Horovod's thread ends may be taken, though nothing is left to do it. So a
   waiter asks every second whether Horovod still runs. A thread asks, because the answer may take as long as another
   rank is silent.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Lock, Thread
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor

from hvdbridge.backends.bridge import Bridged
from hvdbridge.backends.communicator import (
    Capabilities,
    Communicator,
    Watch,
    Work,
    cross_groups,
    node_groups,
    unwatched,
)
from hvdbridge.errors import NotInitialized, Unsupported

POLL_SECONDS = 1e-4

ALIVE_SECONDS = 1.0
"""Between questions whether Horovod still runs."""

ASKING = Lock()
"""One question at a time."""

HELD: dict[int, list[Tensor]] = {}
"""By handle, the views of rule 4. Those of an operation that failed stay until its number comes again."""

NAMES = 4
"""Numbers that a name ends in; an operation waits for the one that had its name before."""

OPS = {"sum": hvd.Sum, "product": hvd.Product, "min": hvd.Min, "max": hvd.Max}

WORLDS = count()
"""Numbers the worlds of this process: Horovod knows operations by name alone."""


def has_ended() -> bool:
    """Whether Horovod's thread is gone, as it is after another rank's death: what is under way never ends.

    Takes a lock that Horovod's thread has while it talks to the other ranks.
    """
    if not hvd.is_initialized():
        return True
    ranks = (ctypes.c_int * hvd.size())()
    return int(mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks(0, ranks)) < 0


class Operation(Work):
    """A handle that is polled. The flow that started it may wait at the same time as the one that wants its name."""

    def __init__(self, handle: int, name: str, seconds: float) -> None:
        self._lock = Lock()
        self._handle: int | None = handle
        self._error: Exception | None = None
        self._name = name
        self._abandoned = False  # Horovod was asked, and has ended
        now = time.monotonic()
        self._deadline = now + seconds
        self._ask = now + ALIVE_SECONDS

    def done(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread waits, and will synchronize the handle
        try:
            return self._handle is None or hvd.poll(self._handle) or self._lost() is not None
        finally:
            self._lock.release()

    def wait(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._handle is None:
                return
            while not hvd.poll(self._handle):
                if (lost := self._lost()) is not None:
                    raise lost
                time.sleep(POLL_SECONDS)
            handle, self._handle = self._handle, None
            try:
                hvd.synchronize(handle)
            except Exception as error:
                self._error = error
                raise
            HELD.pop(handle, None)

    def _lost(self) -> Exception | None:
        """Why there is nothing more to wait for, if so."""
        now = time.monotonic()
        if self._abandoned and not hvd.poll(self._handle):  # what Horovod knew of it told before it ended
            ended: Exception = HorovodInternalError(f"Horovod has been shut down; {self._name} was never done")
            return ended
        if now > self._deadline:
            return TimeoutError(f"The Horovod operation {self._name} timed out")
        if now > self._ask and ASKING.acquire(blocking=False):
            self._ask = now + ALIVE_SECONDS
            Thread(target=self._look, name="hvdbridge-alive", daemon=True).start()
        return None

    def _look(self) -> None:
        try:
            self._abandoned = has_ended()
        finally:
            ASKING.release()


class HorovodCommunicator(Bridged):
    """Executes requests as named Horovod operations on a process set (None: a group of one rank)."""

    failures = (HorovodInternalError, TimeoutError)
    reduced_dtypes = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
    """Horovod takes float16, too, but rounds after each addition."""

    def __init__(
        self, name: str, ranks: Sequence[int], members: Any, timeout_seconds: float, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, list(ranks).index(hvd.rank()), len(ranks), timeout_seconds, watch)
        # NCCL refuses ranks that share a GPU
        self.capabilities = Capabilities(cuda=bool(hvd.nccl_built()) and hvd.local_size() <= torch.cuda.device_count())
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

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return self._start(op, partial(hvd.allreduce_async_, op=OPS[op], process_set=self._members), flat)

    # The public functions below these two answer in new memory; these write where they are told to.

    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        return self._start("gather", partial(mpi_ops._allgather_async, process_set=self._members), data[None], answer)

    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        def start(rows: Tensor, *answers: Tensor, name: str) -> int:
            return int(mpi_ops._alltoall_async(rows, None, *answers, name, self._members))

        return self._start("exchange", start, rows, answer, torch.empty(self.size, dtype=torch.int32, device="cpu"))

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        start = partial(hvd.broadcast_async_, root_rank=self._ranks[root], process_set=self._members)
        return self._start(f"from{root}", start, data)

    def _start(self, kind: str, start: Callable[..., int], *tensors: Tensor) -> Work:
        """``start(*tensors, name=...)`` under the next name of this kind, and the first tensor's type and shape."""
        shape = "x".join(map(str, tensors[0].shape))
        name = f"{self.name}.{kind}.{str(tensors[0].dtype).removeprefix('torch.')}.{shape}"
        number = self._started[name] = (self._started.get(name, -1) + 1) % NAMES
        name = f"{name}.{number}"
        if name in self._in_flight:
            with suppress(Exception):  # its own flow raises it again in its wait
                self._in_flight[name].wait()
        lent = [tensor.detach() for tensor in tensors]
        views = [tensor.view(tensor.shape) for tensor in lent]
        handle = start(*lent, name=name)
        HELD[handle] = views
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
