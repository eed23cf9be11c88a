"""The MPI communicator, through mpi4py.

Rules:

1. A communicator is a duplicate (or a split) of ``COMM_WORLD``, so its messages never match those of the user.
2. A wait spins briefly, then sleeps between tests. MPI's own waits spin until the end. On a host with as many ranks as
   cores they would take the core from the backward that they should overlap. Tests also progress operations.
3. MPI is given addresses of memory, so no data is copied and any dtype can be moved. The generator that waits for an
   operation keeps its tensors alive.
4. All ranks must have equal bits. MPI libraries add short messages with operands swapped on some ranks, and NaN + NaN
   keeps the bits of the first operand, so NaNs of short messages are replaced by one NaN. MPICH and Open MPI have each
   chunk of a long message added by one rank.
5. MPI has no timeouts. ``watch`` registers each wait with the job's monitor, which ends a rank whose wait does not end.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Generator

import torch
from mpi4py import MPI
from torch import Tensor

from hvdbridge.backends.bridge import MAX_OPERATION_BYTES, Bridged
from hvdbridge.backends.communicator import Capabilities, Communicator, Watch, Work, unwatched
from hvdbridge.backends.point_to_point import Messages, ReceiveWork, size_mismatch
from hvdbridge.errors import NotInitialized

TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T, torch.uint8: MPI.UINT8_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
}  # fmt: skip
"""Dtypes that each MPI library reduces. MPI has no portable type for 16-bit floats."""

SHORT_BYTES = 16384
"""Above this size, in bytes, each chunk is reduced by one owner: MPICH does so from 2,048, Open MPI from 10,000."""

SPIN_SECONDS = 1e-3
"""How long a wait spins, in seconds: longer than a reduction takes in shared memory if all ranks are ready."""

POLL_SECONDS = 5e-5

REDUCTION_BYTES = 1 << 22
"""Maximum bytes of one reduction, since larger ones in flight share a slow network badly (MPICH, UCX)."""

MPI_OPS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class MpiWork(Work):
    """An MPI request that is polled. MPI progresses only during calls."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def done(self) -> bool:
        return self._request.Test()

    def wait_at_most(self, seconds: float) -> bool:
        started = time.perf_counter()
        while not self.done():
            waited = time.perf_counter() - started
            if waited > seconds:
                return False
            if waited > SPIN_SECONDS:
                time.sleep(POLL_SECONDS)
        return True

    def wait(self) -> None:
        self.wait_at_most(math.inf)


class MpiCommunicator(Bridged):
    """Executes requests on an MPI communicator of its own."""

    failures = (MPI.Exception,)
    reduced_dtypes = TYPES.keys()
    max_reduction_bytes = REDUCTION_BYTES

    def __init__(self, name: str, comm: MPI.Intracomm, timeout_seconds: float, watch: Watch = unwatched) -> None:
        super().__init__(name, comm.Get_rank(), comm.Get_size(), timeout_seconds, watch)
        self.capabilities = Capabilities(progresses=False, cuda=cuda_aware())
        self._comm = comm

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> MpiCommunicator:
        if not MPI.Is_initialized() or MPI.Is_finalized():
            raise NotInitialized("MPI is not running: it was not initialized, or it was finalized already")
        return cls("hvdbridge", MPI.COMM_WORLD.Dup(), timeout_seconds, watch)

    def ranks_of(self, group: object) -> list[int]:
        if isinstance(group, MPI.Comm):
            user_group, own_group = group.Get_group(), self._comm.Get_group()
            group = MPI.Group.Translate_ranks(user_group, None, own_group)
        return super().ranks_of(group)

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return MpiWork(self._comm.Iallreduce(MPI.IN_PLACE, [_view(flat), flat.numel(), TYPES[flat.dtype]], MPI_OPS[op]))

    def _after_reduce(self, flat: Tensor) -> None:
        if flat.is_floating_point() and flat.nbytes <= SHORT_BYTES:
            flat.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)

    def _all_gather(self, data: Tensor, output: Tensor) -> Work:
        return MpiWork(self._comm.Iallgather(_bytes(data), _bytes(output)))

    def _all_to_all(self, rows: Tensor, output: Tensor) -> Work:
        return MpiWork(self._comm.Ialltoall(_bytes(rows), _bytes(output)))

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        return MpiWork(self._comm.Ibcast(_bytes(data), root))

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        comm = self._comm.Split(MPI.UNDEFINED if mine is None else mine, self.rank)
        if comm == MPI.COMM_NULL:
            return None
        assert isinstance(comm, MPI.Intracomm), "what splits an intracommunicator"
        return MpiCommunicator(name, comm, self.timeout_seconds, self.watch)

    def _close(self) -> None:
        if not MPI.Is_finalized():
            self._comm.Free()


class _ChunkedMessage(MpiWork, ReceiveWork):
    """A message as a sequence of requests, since MPI's counts have 32 bits.

    ``requests`` starts each request, is sent its status, and returns the peer's rank.
    """

    def __init__(self, requests: Generator[MPI.Request, MPI.Status, int], data: Tensor, tag: int = 0) -> None:
        self._requests = requests
        self._truncation_error = size_mismatch(None, tag, None, data.numel())
        self._data = data  # MPI holds the address alone, so this reference keeps the memory
        self.source = -1
        self._current: MPI.Request | None = next(requests)

    def done(self) -> bool:
        while self._current is not None:
            status = MPI.Status()
            try:
                if not self._current.Test(status):
                    return False
                self._current = self._requests.send(status)
            except StopIteration as end:
                self._current, self.source = None, end.value
            except Exception as error:  # each call of wait() raises it
                self._current, self._error = None, error
                if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
                    self._error = self._truncation_error
                    self._error.__cause__ = error
        return True

    def wait(self) -> None:
        super().wait()
        if self._error is not None:
            raise self._error


class MpiMessages(Messages):
    """Sends and receives on the communicator's own MPI communicator; MPI separates them from collectives."""

    def __init__(self, communicator: Communicator, number: int, tcp: object) -> None:
        assert isinstance(communicator, MpiCommunicator)
        self._comm = communicator._comm

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return _ChunkedMessage(self._send(data, to, tag), data)

    def receive(self, data: Tensor, source: int | None, tag: int) -> ReceiveWork:
        return _ChunkedMessage(self._receive(data, source, tag), data, tag)

    def _send(self, data: Tensor, to: int, tag: int) -> Generator[MPI.Request, MPI.Status, int]:
        for chunk in data.split(MAX_OPERATION_BYTES):
            yield self._comm.Isend(_bytes(chunk), to, tag)
        return to

    def _receive(self, data: Tensor, source: int | None, tag: int) -> Generator[MPI.Request, MPI.Status, int]:
        sender = MPI.ANY_SOURCE if source is None else source
        for chunk in data.split(MAX_OPERATION_BYTES):
            status = yield self._comm.Irecv(_bytes(chunk), sender, tag)
            sender = status.Get_source()
            if status.Get_count(MPI.BYTE) != chunk.numel():
                raise size_mismatch(sender, tag, status.Get_count(MPI.BYTE), chunk.numel())
        return sender


def cuda_aware() -> bool:
    """Return whether this MPI library takes device pointers: MPICH has a function for it, Cray a variable.

    Open MPI supports device pointers in blocking operations only. Its other operations reduce on the host and crash.
    """
    if not torch.cuda.is_available() or MPI.get_vendor()[0] == "Open MPI":
        return False
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def _view(tensor: Tensor) -> MPI.buffer:
    """Return the memory of ``tensor`` as an MPI buffer, without a copy."""
    if tensor.is_cuda:  # MPI reads device memory during the call, not in stream order
        torch.cuda.current_stream(tensor.device).synchronize()
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    """Return the memory of ``tensor`` as an MPI message of bytes."""
    return _view(tensor), MPI.BYTE
