"""MPI's own sends and receives, on the communicator's duplicate: collectives and messages do not meet in MPI."""

from __future__ import annotations

import time
from collections.abc import Generator

from mpi4py import MPI
from torch import Tensor

from hvdbridge.backends.bridge import PIECE
from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.backends.mpi.communicator import POLL_SECONDS, SPIN_SECONDS, MpiCommunicator, _bytes
from hvdbridge.backends.point_to_point import Messages, Receipt, wrong_size


class _InPieces(Receipt):
    """Requests one after the other, for tensors whose size no 32-bit count can tell."""

    def __init__(self, steps: Generator[MPI.Request, MPI.Status, int], data: Tensor, tag: int = 0) -> None:
        self._steps = steps
        self.too_long = wrong_size(None, tag, None, data.numel())
        self._data = data  # MPI has its address only
        self.source = -1
        self._error: Exception | None = None
        self._request: MPI.Request | None = next(steps)

    def done(self) -> bool:
        while self._request is not None:
            status = MPI.Status()
            try:
                if not self._request.Test(status):
                    return False
                self._request = self._steps.send(status)
            except StopIteration as end:
                self._request, self.source = None, end.value
            except Exception as error:  # for wait(), however often it is called
                self._request, self._error = None, error
                if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
                    self._error = self.too_long
                    self._error.__cause__ = error
        return True

    def wait(self) -> None:
        asleep = time.perf_counter() + SPIN_SECONDS
        while not self.done():
            if time.perf_counter() > asleep:
                time.sleep(POLL_SECONDS)
        if self._error is not None:
            raise self._error


class MpiMessages(Messages):
    """See :class:`Messages`."""

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
