"""Gloo's own sends and receives, on the communicator's process group.

Collectives of that group use other slots than messages do; its communicator's exchanges use tag 0, and ours begin at 1.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.backends.point_to_point import Messages, Receipt
from hvdbridge.backends.torch.communicator import TorchCommunicator


class _Waited(Receipt):
    """Gloo tells that a message is over to who waits for it only, and a wait that times out breaks its connections. So
    where somebody asks, or waits for a while, a thread waits."""

    def __init__(self, work: Any, data: Tensor, source: int | None) -> None:
        self._work = work
        self._data = data  # Gloo has its address only
        self._any = source is None
        self.source = -1 if source is None else source
        self._thread: threading.Thread | None = None
        self._over = False
        self._error: Exception | None = None

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
    """See :class:`Messages`."""

    def __init__(self, communicator: Communicator, number: int, tcp: object) -> None:
        assert isinstance(communicator, TorchCommunicator)
        self._group = communicator._host

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return _Waited(self._group.send([data], to, tag + 1), data, to)

    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        if source is None:
            return _Waited(self._group.recv_anysource([data], tag + 1), data, None)
        return _Waited(self._group.recv([data], source, tag + 1), data, source)
