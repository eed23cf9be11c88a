"""torch.distributed below a communicator: Gloo for host memory, NCCL for CUDA.

Rules:

1. The process groups are our own: made on the job's store under names of ours, never registered with
   ``torch.distributed``. The user's groups, their order of creation and their collectives cannot meet them.
2. NCCL is used where the user's default group uses it and each rank has a GPU to itself (NCCL refuses to
   share one); otherwise CUDA tensors pass through host memory.
3. Gloo and NCCL round 16-bit floats after each addition; both are taken as they are.
4. Over Gloo, rows travel as plain sends and receives: its own all-gather takes longer.
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
from hvdbridge.backends.point_to_point import Messages, Receipt
from hvdbridge.errors import NotInitialized

log = logging.getLogger("hvdbridge")

OPS: dict[str, Any] = {op: dist.AllreduceOptions() for op in ("sum", "product", "min", "max")}
for _op, _options in OPS.items():
    _options.reduceOp = getattr(dist.ReduceOp, _op.upper())

SHORTEST_SECONDS = 1e-3
"""Torch treats a shorter timeout as no timeout."""

WORLDS = count()
"""Numbers the worlds of this process: the store remembers the names of groups that were closed."""


class Works(Work):
    """One or more of torch's works. Gloo reports that a send or receive is complete only to the thread that waits, and
    a second wait would wait for another message."""

    shared = True

    def __init__(self, *works: Any) -> None:
        self._works: tuple[Any, ...] = works
        self._lock = threading.Lock()
        self._over = False

    def done(self) -> bool:
        return self._over or all(work.is_completed() for work in self._works)

    def over_within(self, seconds: float) -> bool:
        if self._over or len(self._works) > 1:  # a receive whose wait took too long is lost
            return self._over
        try:
            self._works[0].wait(timedelta(seconds=max(seconds, SHORTEST_SECONDS)))
        except RuntimeError:  # that was too long, or its own error, which wait() raises
            return bool(self._works[0].is_completed())
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
    """Executes requests on process groups of its own."""

    reduced_dtypes = frozenset(DTYPES) - {torch.bool}
    even_alone: ClassVar[bool] = False
    """Whether a group of one rank has the library do its work, too: to check and to time NCCL on one GPU."""

    def __init__(
        self, name: str, store: Any, rank: int, size: int, timeout: timedelta, cuda: bool, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, rank, size, timeout.total_seconds(), watch)
        self.alone = size == 1 and not self.even_alone
        self.capabilities = Capabilities(
            blocks_host=not cuda, cuda=cuda, carriers=("gloo", "nccl") if cuda else ("gloo",)
        )
        self._store = store
        self._timeout = timeout
        self._host: Any = None
        self._cuda: Any = None
        if not self.alone:
            self._host = dist.ProcessGroupGloo(PrefixStore(f"{name}/gloo", store), rank, size, timeout)
            self._host.barrier().wait()  # a rank that closes while others still connect would break their connecting
        if cuda and not self.alone:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._cuda = dist.ProcessGroupNCCL(PrefixStore(f"{name}/nccl", store), rank, size, options)

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> TorchCommunicator:
        if not dist.is_initialized():
            raise NotInitialized("torch.distributed is not started; call hb.init() or init_process_group() first")
        name, rank, size = f"hvdbridge/{next(WORLDS)}", dist.get_rank(), dist.get_world_size()
        store = _get_default_store()
        timeout = timedelta(seconds=timeout_seconds)
        if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config()):
            return cls(name, store, rank, size, timeout, False, watch)
        host = cls(f"{name}/host", store, rank, size, timeout, False, watch)
        device = torch.cuda.current_device()
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        devices = host.all_gather_object((socket.gethostname(), uuid))
        alone = len(set(devices)) == size
        host.close()
        if not alone and rank == 0:
            log.warning("several ranks share a GPU, which NCCL refuses: CUDA tensors pass through host memory")
        return cls(name, store, rank, size, timeout, alone, watch)

    def control(self) -> Communicator:
        self._children += 1
        return TorchCommunicator(
            f"{self.name}.{self._children}", self._store, self.rank, self.size, self._timeout, False, self.watch
        )

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return Works((self._cuda if flat.is_cuda else self._host).allreduce([flat], OPS[op]))

    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        if data.is_cuda:
            return Works(self._cuda._allgather_base(answer.view(-1), data))
        return self._swap([data] * self.size, answer)

    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        if rows.is_cuda:
            return Works(self._cuda.alltoall_base(answer, rows, [], []))
        return self._swap(rows.unbind(), answer)

    def _swap(self, rows: Sequence[Tensor], answer: Tensor) -> Work:
        """Send ``rows[i]`` to rank i, receive ``answer[i]`` from it."""
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        works = [self._host.recv([answer[i]], i, 0) for i in others]
        works += [self._host.send([rows[i]], i, 0) for i in others]
        answer[self.rank].copy_(rows[self.rank])
        return Works(*works)

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return Works((self._cuda if data.is_cuda else self._host).broadcast([data], options))

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        if mine is None:
            return None
        ranks = groups[mine]
        return TorchCommunicator(
            f"{name}/{mine}", self._store, ranks.index(self.rank), len(ranks), self._timeout,
            self.capabilities.cuda, self.watch,
        )  # fmt: skip

    def _close(self) -> None:
        if self._cuda is not None:
            self._cuda.shutdown()  # waits for what was enqueued; abort() would cut it off
        self._host = self._cuda = self._store = None


class _Waited(Receipt):
    """A message. Gloo reports completion only to the thread that waits, and a wait that times out breaks its
    connections. So :meth:`done` starts a thread that waits."""

    def __init__(self, work: Any, data: Tensor, source: int | None) -> None:
        self._work = work
        self._data = data  # Gloo has its address only
        self._any = source is None
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
        if self._over:  # Gloo would wait for another message
            return
        try:
            self._work.wait()
            if self._any:
                self.source = self._work._source_rank()
        except RuntimeError as error:
            self._error = error
        self._over = True


class TorchMessages(Messages):
    """Gloo's own sends and receives on the communicator's process group.

    Collectives of that group use other slots. The communicator's exchanges use tag 0, and messages begin at 1.
    """

    def __init__(self, communicator: Communicator, number: int, tcp: object) -> None:
        assert isinstance(communicator, TorchCommunicator)
        self._group = communicator._host

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return _Waited(self._group.send([data], to, tag + 1), data, to)

    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        if source is None:
            return _Waited(self._group.recv_anysource([data], tag + 1), data, None)
        return _Waited(self._group.recv([data], source, tag + 1), data, source)
