"""The interface of messages between two ranks. Each backend has one class for it.

Rules:

1. A carrier moves bytes in host memory between the ranks of one group, by tag. Messages of one pair with one tag
   arrive in the order in which they were sent.
2. Nothing here is collective: a carrier exists as soon as its group does.
3. MPI and Gloo send and receive themselves. Horovod cannot: there, ranks open TCP connections at the first message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from hvdbridge.backends.communicator import Work
from hvdbridge.errors import ConfigurationError

TAGS = 1 << 24
"""The bound of tags that every MPI and Gloo supports."""


class Receipt(Work):
    """A receive in flight. After :meth:`wait`, ``source`` is the rank (of the group) that sent it."""

    source: int


class Messages(ABC):
    """Sends and receives among the ranks of one group; ``data`` is flat, contiguous, uint8, on the host, not empty.

    A backend's class is called with the group's communicator, the group's number (the same on its ranks), and a
    function that makes what TCP needs (:class:`.tcp.Exchange`).
    """

    @abstractmethod
    def send(self, data: Tensor, to: int, tag: int) -> Work:
        """Start to send; ``data`` must stay as it is until the work is done."""

    @abstractmethod
    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        """Start to receive into ``data`` from rank ``source``; None: from any rank."""


def wrong_size(source: int | None, tag: int, sent: int | None, expected: int) -> ConfigurationError:
    """The error of a receive; ``sent``: None for more than ``expected``."""
    whose = "another rank" if source is None else f"rank {source} of the group"
    has = f"more than {expected}" if sent is None else sent
    return ConfigurationError(
        f"the message with tag {tag} from {whose} has {has} bytes, and the tensor to receive it {expected}. "
        "Send and receive tensors of one shape and dtype."
    )
