"""The Horovod communicator.

Rules:

1. Each operation is named ``{communicator}.{kind}.{dtype}.{shape}.{number}``. No other communicator and no user code
   uses this name, and only one operation with it is in flight at a time. ``number`` cycles, since Horovod's response
   cache needs repeated names. All ranks use the same number, since they start operations in the same order.
2. A group is a process set. Horovod creates one only if all ranks of its world request it, and only once for the same
   ranks. Therefore a split also creates the sets of its children's ``node`` and ``cross`` groups, communicators
   share sets (their operations' names differ), and sets exist until ``hvd.shutdown``. A user's own ``add_process_set``
   for the same ranks must run first, since Horovod rejects a second one.
3. A wait polls, which allows a timeout. ``hvd.synchronize`` spins and takes the GIL from the thread that runs backward.
4. Horovod receives an alias of each tensor, and a view of the alias is kept until the operation succeeds. When a rank
   fails, Horovod's thread releases all tensors while it holds a lock that the start of an operation also needs. In
   torch 2.13, release of the last C++ reference needs the GIL, which the thread that starts an operation holds: a
   deadlock. A view refers to its base (unless the base is a view itself), so Horovod's thread never releases the last
   reference. Views of ``torch.inference_mode`` tensors have no base, so these tensors are not protected.
5. An operation that starts while Horovod's thread ends may be accepted but never executed. So each waiter checks every
   second that Horovod still runs, in a separate thread, because the check blocks while another rank does not respond.
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

LIVENESS_SECONDS = 1.0
"""Interval, in seconds, between two checks whether Horovod still runs."""

LIVENESS_LOCK = Lock()
"""Held during a check, so that at most one thread checks at a time."""

VIEWS: dict[int, list[Tensor]] = {}
"""The views of rule 4, by Horovod handle. Those of a failed operation stay until Horovod reuses its handle."""

NAME_COUNT = 4
"""How many numbers a name cycles through. An operation waits for the previous operation of the same name."""

HOROVOD_OPS = {"sum": hvd.Sum, "product": hvd.Product, "min": hvd.Min, "max": hvd.Max}

WORLD_NUMBERS = count()
"""Numbers the world communicators of this process, since Horovod identifies operations by name alone."""


def has_shut_down() -> bool:
    """Return whether Horovod's thread has ended, as after another rank's failure. Operations then never complete.

    The call takes a lock that Horovod's thread holds while it communicates with the other ranks.
    """
    if not hvd.is_initialized():
        return True
    ranks = (ctypes.c_int * hvd.size())()
    return int(mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks(0, ranks)) < 0


class HorovodWork(Work):
    """A Horovod handle that is polled. Its flow and a flow that is about to reuse its name may wait at once."""

    def __init__(self, handle: int, name: str, seconds: float) -> None:
        self._lock = Lock()
        self._handle: int | None = handle
        self._error: Exception | None = None
        self._name = name
        self._shut_down = False  # the last check found that Horovod has ended
        now = time.monotonic()
        self._deadline = now + seconds
        self._next_check = now + LIVENESS_SECONDS

    def done(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread is in wait(), and will synchronize the handle
        try:
            return self._handle is None or hvd.poll(self._handle) or self._failure() is not None
        finally:
            self._lock.release()

    def wait(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._handle is None:
                return
            while not hvd.poll(self._handle):
                if (failure := self._failure()) is not None:
                    raise failure
                time.sleep(POLL_SECONDS)
            handle, self._handle = self._handle, None
            try:
                hvd.synchronize(handle)
            except Exception as error:
                self._error = error
                raise
            VIEWS.pop(handle, None)

    def _failure(self) -> Exception | None:
        """Return the error that ends the wait, or None; start a liveness check when one is due."""
        now = time.monotonic()
        if self._shut_down and not hvd.poll(self._handle):  # not completed before Horovod ended
            ended: Exception = HorovodInternalError(f"Horovod has been shut down; {self._name} was never done")
            return ended
        if now > self._deadline:
            return TimeoutError(f"The Horovod operation {self._name} timed out")
        if now > self._next_check and LIVENESS_LOCK.acquire(blocking=False):
            self._next_check = now + LIVENESS_SECONDS
            Thread(target=self._check_liveness, name="hvdbridge-alive", daemon=True).start()
        return None

    def _check_liveness(self) -> None:
        try:
            self._shut_down = has_shut_down()
        finally:
            LIVENESS_LOCK.release()


class HorovodCommunicator(Bridged):
    """Executes requests as named Horovod operations on ``process_set``, which is None for a group of one rank.

    ``ranks`` are the group's ranks in Horovod's world, ascending.
    """

    failures = (HorovodInternalError, TimeoutError)
    reduced_dtypes = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
    """Horovod also supports float16, but rounds after each addition."""

    def __init__(
        self, name: str, ranks: Sequence[int], process_set: Any, timeout_seconds: float, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, list(ranks).index(hvd.rank()), len(ranks), timeout_seconds, watch)
        # NCCL does not support ranks that share a GPU.
        self.capabilities = Capabilities(cuda=bool(hvd.nccl_built()) and hvd.local_size() <= torch.cuda.device_count())
        self._ranks = list(ranks)
        self._hvd_set = process_set
        self._start_counts: dict[str, int] = {}
        self._latest: dict[str, HorovodWork] = {}

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> HorovodCommunicator:
        if not hvd.is_initialized():
            raise NotInitialized("Horovod is not started; call hb.init() or hvd.init() first")
        name = f"hvdbridge.{next(WORLD_NUMBERS)}"
        return cls(name, range(hvd.size()), hvd.global_process_set, timeout_seconds, watch)

    def ranks_of(self, group: object) -> list[int]:
        return super().ranks_of(group.ranks if isinstance(group, hvd.ProcessSet) else group)

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return self._start(op, partial(hvd.allreduce_async_, op=HOROVOD_OPS[op], process_set=self._hvd_set), flat)

    # Horovod's public functions allocate their outputs; the private ones of the next two methods take an output.

    def _all_gather(self, data: Tensor, output: Tensor) -> Work:
        return self._start("gather", partial(mpi_ops._allgather_async, process_set=self._hvd_set), data[None], output)

    def _all_to_all(self, rows: Tensor, output: Tensor) -> Work:
        def start(rows: Tensor, *outputs: Tensor, name: str) -> int:
            return int(mpi_ops._alltoall_async(rows, None, *outputs, name, self._hvd_set))

        return self._start("exchange", start, rows, output, torch.empty(self.size, dtype=torch.int32, device="cpu"))

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        start = partial(hvd.broadcast_async_, root_rank=self._ranks[root], process_set=self._hvd_set)
        return self._start(f"from{root}", start, data)

    def _start(self, kind: str, start: Callable[..., int], *tensors: Tensor) -> Work:
        """Call ``start(*tensors, name=...)`` with the next name of this kind and the first tensor's dtype and shape."""
        shape = "x".join(map(str, tensors[0].shape))
        name = f"{self.name}.{kind}.{str(tensors[0].dtype).removeprefix('torch.')}.{shape}"
        number = self._start_counts[name] = (self._start_counts.get(name, -1) + 1) % NAME_COUNT
        name = f"{name}.{number}"
        if name in self._latest:
            with suppress(Exception):  # wait() raises the error again in the operation's own flow
                self._latest[name].wait()
        aliases = [tensor.detach() for tensor in tensors]
        views = [tensor.view(tensor.shape) for tensor in aliases]
        handle = start(*aliases, name=name)
        VIEWS[handle] = views
        work = self._latest[name] = HorovodWork(handle, name, self.timeout_seconds)
        return work

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        sets = [self._find_or_create_set(group) for group in groups]
        if self.nodes:
            for group in groups:
                nodes = [self.nodes[rank] for rank in group]
                for inner in (*node_groups(nodes), *cross_groups(nodes)):
                    self._find_or_create_set([group[i] for i in inner])
        if mine is None:
            return None
        ranks = [self._ranks[rank] for rank in groups[mine]]
        return HorovodCommunicator(f"{name}-{mine}", ranks, sets[mine], self.timeout_seconds, self.watch)

    def _find_or_create_set(self, group: list[int]) -> Any:
        """Return the process set of these ranks of this communicator, existing or new; None for a single rank."""
        ranks = [self._ranks[rank] for rank in group]
        if len(ranks) == 1:
            return None
        known = {tuple(ranks): number for number, ranks in mpi_ops._basics._get_process_set_ids_and_ranks().items()}
        if tuple(ranks) in known:
            process_set = hvd.ProcessSet(ranks)
            process_set.process_set_id = known[tuple(ranks)]
            return process_set
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
        self._hvd_set = None
