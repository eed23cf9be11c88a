"""The ports on which we listen: those of ``HVDBRIDGE_PORTS``, where a firewall lets a range through, or any."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def first_free(listen: Callable[[int], T], ports: range | None) -> T:
    """What ``listen(port)`` makes of a port on which nobody listens; of port 0, for any, without ``ports``.

    Raises:
        OSError: all are taken, or what ``listen`` raises for another reason.
    """
    for port in [0] if ports is None else random.SystemRandom().sample(ports, len(ports)):
        try:
            return listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports is None:
                raise
    assert ports is not None
    raise OSError(errno.EADDRINUSE, f"somebody listens on each of HVDBRIDGE_PORTS={ports.start}-{ports.stop - 1}")


def resolves(host: str) -> bool:
    """Whether this machine knows the name ``host``, or it is an address."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def listening(host: str, port: int, backlog: int, translated: bool = False) -> socket.socket:
    """A socket that listens at ``host``, an address or a name, of IPv4 where it has both; ``translated``: at all
    addresses where ``host`` is not this machine's, but one that a cluster's service translates to it.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not translated:
                raise
            listener.bind(("::" if family == socket.AF_INET6 else "", port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
