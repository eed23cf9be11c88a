"""Messages between two ranks: only the two call. One carrier per backend, as in the other tables.

Rules:

1. A carrier moves bytes in host memory between the ranks of one group, by tag. Messages of one pair with one tag
   arrive in the order in which they were sent.
2. Nothing here is collective: a carrier exists as soon as its group does.
3. MPI and Gloo send and receive themselves. Horovod cannot: there, ranks open TCP connections when they first talk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.errors import ConfigurationError

CARRIERS = {
    "horovod": "hvdbridge.backends.tcp:TcpMessages",
    "mpi": "hvdbridge.backends.mpi.point_to_point:MpiMessages",
    "torch": "hvdbridge.backends.torch.point_to_point:TorchMessages",
}

TAGS = 1 << 24
"""Tags are below it: what every MPI and Gloo can tell apart."""


class Receipt(Work):
    """A message that is awaited. After :meth:`wait`, ``source`` is the rank (of the group) that sent it."""

    source: int


class Messages(ABC):
    """Sends and receives among the ranks of one group; ``data`` is flat, contiguous, uint8, on the host, not empty."""

    @abstractmethod
    def send(self, data: Tensor, to: int, tag: int) -> Work:
        """Start to send; ``data`` must stay as it is until the work is done."""

    @abstractmethod
    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        """Start to receive into ``data`` from rank ``source``; None: from whoever sends."""


def open_messages(backend: str, communicator: Communicator, number: int, tcp: Callable[[], Any]) -> Messages:
    """The carrier of a group.

    Args:
        communicator: the group's; a carrier that needs the library below takes its channel.
        number: of the group, the same on its ranks.
        tcp: makes what TCP needs, on first use; see :class:`.tcp.Exchange`.
    """
    if backend not in CARRIERS:
        raise ConfigurationError(f"no messages between two ranks on backend {backend!r}. Known: {', '.join(CARRIERS)}")
    module, _, attribute = CARRIERS[backend].partition(":")
    made: Messages = getattr(import_module(module), attribute)(communicator, number, tcp)
    return made


def wrong_size(source: int | None, tag: int, sent: int | None, expected: int) -> ConfigurationError:
    """The error of a receive; ``sent``: None for more than ``expected``."""
    whose = "another rank" if source is None else f"rank {source} of the group"
    has = f"more than {expected}" if sent is None else sent
    return ConfigurationError(
        f"the message with tag {tag} from {whose} has {has} bytes, and the tensor to receive it {expected}. "
        "Send and receive tensors of one shape and dtype."
    )
