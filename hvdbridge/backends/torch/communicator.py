"""The torch.distributed communicator: Gloo for host memory, NCCL for CUDA tensors.

Rules:

1. A communicator creates its own process groups, on the default store under names of its own. They are not registered
   with ``torch.distributed``, so the user's groups, their order of creation and their collectives do not affect them.
2. NCCL is used if the user's default group uses it and no two ranks share a GPU, which NCCL does not support. Otherwise
   CUDA tensors pass through host memory.
3. Gloo and NCCL round 16-bit floats after each addition. This backend accepts that.
4. Over Gloo, gathers and exchanges are plain sends and receives, since Gloo's own all-gather takes longer.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from hvdbridge.backends.bridge import Bridged
from hvdbridge.backends.communicator import DTYPES, Capabilities, Communicator, Watch, Work, unwatched
from hvdbridge.backends.point_to_point import Messages, ReceiveWork
from hvdbridge.errors import NotInitialized

log = logging.getLogger("hvdbridge")

REDUCE_OPTIONS: dict[str, Any] = {op: dist.AllreduceOptions() for op in ("sum", "product", "min", "max")}
for _op, _options in REDUCE_OPTIONS.items():
    _options.reduceOp = getattr(dist.ReduceOp, _op.upper())

MIN_TIMEOUT_SECONDS = 1e-3
"""Torch treats a shorter timeout as no timeout at all."""

_KEPT: list[Any] = []
"""Closed process groups of NCCL whose operations are in a user's CUDA graph."""

WORLD_NUMBERS = count()
"""Numbers the world communicators of this process, since the store keeps the keys of closed groups."""


class TorchWork(Work):
    """One or more work objects of torch. :meth:`wait` waits for each of them once.

    Gloo reports completion of a send or receive only to the thread that waits, so :meth:`done` may stay False until
    then. A second wait would wait for another message.
    """

    thread_safe_wait = True

    def __init__(self, *works: Any) -> None:
        self._works: tuple[Any, ...] = works
        self._lock = threading.Lock()
        self._over = False

    def done(self) -> bool:
        return self._over or all(work.is_completed() for work in self._works)

    def wait_at_most(self, seconds: float) -> bool:
        works = self._works
        if len(works) != 1:  # over, or several: a receive is lost when its wait times out
            return self._over
        try:
            works[0].wait(timedelta(seconds=max(seconds, MIN_TIMEOUT_SECONDS)))
        except RuntimeError:  # a timeout, or the operation's own error, which wait() raises
            return bool(works[0].is_completed())
        return True

    def wait(self) -> None:
        with self._lock:
            if not self._over:
                try:
                    for work in self._works:
                        work.wait()
                except Exception as error:
                    self._error = error
                self._over = True
                self._works = ()
        if self._error is not None:
            raise self._error


class TorchCommunicator(Bridged):
    """Executes requests on process groups of its own, on ``store`` under ``name``. ``cuda``: NCCL for CUDA tensors."""

    reduced_dtypes = frozenset(DTYPES) - {torch.bool}
    always_communicate: ClassVar[bool] = False
    """Groups of one rank call the library, too; serves to test and to time NCCL on one GPU."""

    def __init__(
        self, name: str, store: Any, rank: int, size: int, timeout: timedelta, cuda: bool, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, rank, size, timeout.total_seconds(), watch)
        self.local_only = size == 1 and not self.always_communicate
        self.capabilities = Capabilities(
            blocks_host=not cuda, cuda=cuda, torch_backends=("gloo", "nccl") if cuda else ("gloo",)
        )
        self._store = store
        self._timeout = timeout
        self._gloo: Any = None
        self._nccl: Any = None
        if not self.local_only:
            self._gloo = dist.ProcessGroupGloo(PrefixStore(f"{name}/gloo", store), rank, size, timeout)
            self._gloo.barrier().wait()  # a rank that closes early would break connections in setup
        if cuda and not self.local_only:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._nccl = dist.ProcessGroupNCCL(PrefixStore(f"{name}/nccl", store), rank, size, options)

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> TorchCommunicator:
        if not dist.is_initialized():
            raise NotInitialized("torch.distributed is not started; call hb.init() or init_process_group() first")
        name, rank, size = f"hvdbridge/{next(WORLD_NUMBERS)}", dist.get_rank(), dist.get_world_size()
        store = _get_default_store()
        timeout = timedelta(seconds=timeout_seconds)
        if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config()):
            return cls(name, store, rank, size, timeout, False, watch)
        host = cls(f"{name}/host", store, rank, size, timeout, False, watch)
        device = torch.cuda.current_device()
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        devices = host.all_gather_object((socket.gethostname(), uuid))
        own_devices = len(set(devices)) == size
        host.close()
        if not own_devices and rank == 0:
            log.warning("several ranks share a GPU, which NCCL refuses: CUDA tensors pass through host memory")
        return cls(name, store, rank, size, timeout, own_devices, watch)

    def control(self) -> Communicator:
        self._children += 1
        return TorchCommunicator(
            f"{self.name}.{self._children}", self._store, self.rank, self.size, self._timeout, False, self.watch
        )

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return TorchWork((self._nccl if flat.is_cuda else self._gloo).allreduce([flat], REDUCE_OPTIONS[op]))

    def _all_gather(self, data: Tensor, output: Tensor) -> Work:
        if data.is_cuda:
            return TorchWork(self._nccl._allgather_base(output.view(-1), data))
        return self._exchange_rows([data] * self.size, output)

    def _all_to_all(self, rows: Tensor, output: Tensor) -> Work:
        if rows.is_cuda:
            return TorchWork(self._nccl.alltoall_base(output, rows, [], []))
        return self._exchange_rows(rows.unbind(), output)

    def _exchange_rows(self, rows: Sequence[Tensor], output: Tensor) -> Work:
        """Send ``rows[i]`` to rank i and receive ``output[i]`` from it, for each rank."""
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self._gloo.recv([output[i]], i, 0) for i in others]
        works += [self._gloo.send([rows[i]], i, 0) for i in others]
        output[self.rank].copy_(rows[self.rank])
        return TorchWork(*works)

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return TorchWork((self._nccl if data.is_cuda else self._gloo).broadcast([data], options))

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        if mine is None:
            return None
        ranks = groups[mine]
        return TorchCommunicator(
            f"{name}/{mine}", self._store, ranks.index(self.rank), len(ranks), self._timeout,
            self.capabilities.cuda, self.watch,
        )  # fmt: skip

    def _close(self) -> None:
        if self._nccl is not None and self.in_users_graph:
            _KEPT.append(self._nccl)  # its shutdown would wait until the user has freed the graph
        elif self._nccl is not None:
            self._nccl.shutdown()  # waits for enqueued operations, which abort() would cancel
        self._gloo = self._nccl = self._store = None


class _TorchMessage(ReceiveWork):
    """A message in flight over Gloo. :meth:`done` starts a thread that waits.

    Gloo reports completion only to the thread that waits, and a wait that times out breaks Gloo's connections.
    """

    def __init__(self, work: Any, data: Tensor, source: int | None) -> None:
        self._work = work
        self._data = data  # Gloo holds the address alone, so this reference keeps the memory
        self._any_source = source is None
        self.source = -1 if source is None else source
        self._thread: threading.Thread | None = None
        self._over = False

    def done(self) -> bool:
        if self._over:
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="hvdbridge-messages wait", daemon=True)
            self._thread.start()
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is None:
            self._wait()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        if self._over:  # a second wait would block until another message completes
            return
        try:
            self._work.wait()
            if self._any_source:
                self.source = self._work._source_rank()
        except RuntimeError as error:
            self._error = error
        self._over = True


class TorchMessages(Messages):
    """Sends and receives of Gloo on the communicator's process group.

    Collectives of that group use other slots of Gloo. The communicator's own exchanges use tag 0, so a message with tag
    ``t`` uses ``t + 1``.
    """

    def __init__(self, communicator: Communicator, number: int, tcp: object) -> None:
        assert isinstance(communicator, TorchCommunicator)
        self._group = communicator._gloo

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return _TorchMessage(self._group.send([data], to, tag + 1), data, to)

    def receive(self, data: Tensor, source: int | None, tag: int) -> ReceiveWork:
        if source is None:
            return _TorchMessage(self._group.recv_anysource([data], tag + 1), data, None)
        return _TorchMessage(self._group.recv([data], source, tag + 1), data, source)
