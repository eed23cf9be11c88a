"""The interface of messages between two ranks. Each backend has one class for it.

Rules:

1. A :class:`Messages` object moves bytes in host memory between the ranks of one group, by tag. Messages between one
   pair of ranks with one tag arrive in the order in which they were sent.
2. No function here is collective. The object can be constructed as soon as its group exists.
3. The MPI and torch backends use the library's own sends and receives. Horovod has none: ranks open TCP connections at
   the first message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from hvdbridge.backends.communicator import Work
from hvdbridge.errors import ConfigurationError

TAG_LIMIT = 1 << 24
"""Tags must be below this limit, which all MPI libraries and Gloo support."""


class ReceiveWork(Work):
    """A receive in flight. After :meth:`wait`, ``source`` is the sender's rank in the group."""

    source: int


class Messages(ABC):
    """Sends and receives among the ranks of one group. ``data`` is uint8, flat, contiguous, not empty, on the CPU.

    A subclass is constructed with the group's communicator, the group's number (equal on its ranks), and a function
    that returns the :class:`.tcp.Transport` of this process and the group's ranks in the job.
    """

    @abstractmethod
    def send(self, data: Tensor, to: int, tag: int) -> Work:
        """Start to send ``data`` to rank ``to``. The caller must not change ``data`` until the work is done."""

    @abstractmethod
    def receive(self, data: Tensor, source: int | None, tag: int) -> ReceiveWork:
        """Start to receive into ``data`` from rank ``source``, or from any rank if ``source`` is None."""


def size_mismatch(source: int | None, tag: int, sent: int | None, expected: int) -> ConfigurationError:
    """Return the error for a message of ``sent`` bytes (None: more than ``expected``) into ``expected`` bytes."""
    whose = "another rank" if source is None else f"rank {source} of the group"
    has = f"more than {expected}" if sent is None else sent
    return ConfigurationError(
        f"the message with tag {tag} from {whose} has {has} bytes, and the tensor to receive it {expected}. "
        "Send and receive tensors of one shape and dtype."
    )
