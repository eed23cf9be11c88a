"""MPI below a communicator, through mpi4py.

Rules:

1. A communicator is a duplicate (or a split) of ``COMM_WORLD``: the user's messages cannot meet ours.
2. A wait spins for a moment and then sleeps between tests: MPI's own waits spin without end, and on a host with as
   many ranks as cores they take the core from the backward that they should overlap. Testing makes progress.
3. Memory is handed over by address, so nothing is copied and no dtype is refused; the steps that wait for an
   operation keep its tensors alive.
4. All ranks must end with equal bits, and NaN + NaN keeps the first one's: short messages, which MPIs add in another
   order on each rank, have their NaNs made alike. Long ones are added by one rank per piece (MPICH, Open MPI).
5. MPI has no time limit. ``watch`` registers each wait with the job's monitor, which ends a rank that waits for ever.
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

from hvdbridge.backends.bridge import PIECE, Bridged
from hvdbridge.backends.communicator import Capabilities, Communicator, Watch, Work, unwatched
from hvdbridge.backends.point_to_point import Messages, Receipt, wrong_size
from hvdbridge.errors import NotInitialized

TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T, torch.uint8: MPI.UINT8_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
}  # fmt: skip
"""What every MPI reduces. 16-bit floats are missing: MPI has no portable type for them."""

SHORT = 16384
"""Bytes from which on MPICH (2,048) and Open MPI (10,000) reduce in pieces that have one owner each."""

SPIN_SECONDS = 1e-3
"""Longer than 4 MiB take among ranks that are all there (shared memory)."""

POLL_SECONDS = 5e-5

REDUCED = 1 << 22
"""Bytes that are reduced at once: larger reductions in flight share a network of 1 Gbit/s badly (MPICH, UCX)."""

OPS = {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class Polled(Work):
    """A request that is tested: MPI makes progress when it is called."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def done(self) -> bool:
        return self._request.Test()

    def over_within(self, seconds: float) -> bool:
        started = time.perf_counter()
        while not self.done():
            waited = time.perf_counter() - started
            if waited > seconds:
                return False
            if waited > SPIN_SECONDS:
                time.sleep(POLL_SECONDS)
        return True

    def wait(self) -> None:
        self.over_within(math.inf)


class MpiCommunicator(Bridged):
    """Executes requests on an MPI communicator of its own."""

    failures = (MPI.Exception,)
    reduced_dtypes = TYPES.keys()
    reduced_piece = REDUCED

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
            theirs, ours = group.Get_group(), self._comm.Get_group()
            group = MPI.Group.Translate_ranks(theirs, None, ours)
        return super().ranks_of(group)

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        return Polled(self._comm.Iallreduce(MPI.IN_PLACE, [_memory(flat), flat.numel(), TYPES[flat.dtype]], OPS[op]))

    def _reduced(self, flat: Tensor) -> None:
        if flat.is_floating_point() and flat.nbytes <= SHORT:
            flat.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)

    def _all_gather(self, data: Tensor, answer: Tensor) -> Work:
        return Polled(self._comm.Iallgather(_bytes(data), _bytes(answer)))

    def _all_to_all(self, rows: Tensor, answer: Tensor) -> Work:
        return Polled(self._comm.Ialltoall(_bytes(rows), _bytes(answer)))

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        return Polled(self._comm.Ibcast(_bytes(data), root))

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        comm = self._comm.Split(MPI.UNDEFINED if mine is None else mine, self.rank)
        if comm == MPI.COMM_NULL:
            return None
        assert isinstance(comm, MPI.Intracomm), "what splits an intracommunicator"
        return MpiCommunicator(name, comm, self.timeout_seconds, self.watch)

    def _close(self) -> None:
        if not MPI.Is_finalized():
            self._comm.Free()


class _InPieces(Polled, Receipt):
    """A message as several requests in sequence, since MPI's counts have 32 bits."""

    def __init__(self, steps: Generator[MPI.Request, MPI.Status, int], data: Tensor, tag: int = 0) -> None:
        self._steps = steps
        self.too_long = wrong_size(None, tag, None, data.numel())
        self._data = data  # MPI has its address only
        self.source = -1
        self._next: MPI.Request | None = next(steps)

    def done(self) -> bool:
        while self._next is not None:
            status = MPI.Status()
            try:
                if not self._next.Test(status):
                    return False
                self._next = self._steps.send(status)
            except StopIteration as end:
                self._next, self.source = None, end.value
            except Exception as error:  # for wait(), however often it is called
                self._next, self._error = None, error
                if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
                    self._error = self.too_long
                    self._error.__cause__ = error
        return True

    def wait(self) -> None:
        super().wait()
        if self._error is not None:
            raise self._error


class MpiMessages(Messages):
    """Sends and receives of MPI on the communicator's duplicate: MPI keeps them apart from collectives."""

    def __init__(self, communicator: Communicator, number: int, tcp: object) -> None:
        assert isinstance(communicator, MpiCommunicator)
        self._comm = communicator._comm

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return _InPieces(self._send(data, to, tag), data)

    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        return _InPieces(self._receive(data, source, tag), data, tag)

    def _send(self, data: Tensor, to: int, tag: int) -> Generator[MPI.Request, MPI.Status, int]:
        for part in data.split(PIECE):
            yield self._comm.Isend(_bytes(part), to, tag)
        return to

    def _receive(self, data: Tensor, source: int | None, tag: int) -> Generator[MPI.Request, MPI.Status, int]:
        found = MPI.ANY_SOURCE if source is None else source
        for part in data.split(PIECE):
            status = yield self._comm.Irecv(_bytes(part), found, tag)
            found = status.Get_source()
            if status.Get_count(MPI.BYTE) != part.numel():
                raise wrong_size(found, tag, status.Get_count(MPI.BYTE), part.numel())
        return found


def cuda_aware() -> bool:
    """Whether this MPI takes device pointers: MPICH has a function for it, Cray a variable.

    Open MPI supports it in blocking operations only: the others add on the host, and crash there.
    """
    if not torch.cuda.is_available() or MPI.get_vendor()[0] == "Open MPI":
        return False
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def _memory(tensor: Tensor) -> MPI.buffer:
    if tensor.is_cuda:  # MPI reads device memory when it is called, not when the stream comes to it
        torch.cuda.current_stream(tensor.device).synchronize()
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _bytes(tensor: Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    return _memory(tensor), MPI.BYTE
