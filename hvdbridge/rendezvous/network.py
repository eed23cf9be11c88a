"""Which address of a host others can reach, and which ranks share a host. Linux interfaces, IPv4.

Rules:

1. Ranks share a host when they share its network: host name, boot and network namespace are equal. Two containers
   on one machine are two hosts.
2. On one host everything listens on loopback only. Across hosts it listens on one address that all can route to.
3. A port that is chosen now and opened later by somebody else comes from outside of the range from which the kernel
   gives ports to connections: within it, one may take the port meanwhile.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Interface
from pathlib import Path

LOOPBACK = "127.0.0.1"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B


def host_identity() -> str:
    """A text that is equal on processes that reach each other by loopback, and on no others."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net").strip("net:[]"))
    return "/".join(parts)


def interfaces() -> dict[str, IPv4Interface]:
    """Name -> address of every network interface that is configured; empty where the system is no Linux.

    >>> str(interfaces()["lo"].ip)
    '127.0.0.1'
    """
    found: dict[str, IPv4Interface] = {}
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        import fcntl

        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(sock, question, request)[20:24])
                    for question in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
                found[name] = IPv4Interface(f"{address}/{mask}")
    return found


def source_address(host: str) -> str | None:
    """The address of this host from which it talks to ``host``; None where that has no route. Sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])
    return None


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this host talks to ``host``, for libraries that want a name."""
    source = source_address(host)
    return next((name for name, address in interfaces().items() if str(address.ip) == source), None)


def free_port() -> int:
    """A port of this host on which nobody listens (rule 3).

    >>> 1024 <= free_port() <= 65535
    True
    """
    low, high = 32768, 60999
    with suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10000, low), *range(high + 1, 65536)]
    for port in [*random.SystemRandom().sample(ports, min(100, len(ports))), 0]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port on its loopback interface")


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def common_address(mine: Sequence[str], others: Sequence[Sequence[str]], preferred: str | None = None) -> str:
    """The address of mine that hosts with the interfaces ``others`` can reach, ``preferred`` if it qualifies.

    Interfaces are written ``address/prefix``. A network in which every host has an address beats others.

    >>> common_address(["127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/24"], [["127.0.0.1/8", "10.0.0.2/24"]])
    '10.0.0.1'
    """
    usable = [IPv4Interface(text) for text in mine if not is_loopback(text)]
    if preferred and not is_loopback(preferred):
        return preferred
    theirs = [[IPv4Interface(text) for text in host if not is_loopback(text)] for host in others]
    for candidate in usable:
        if all(any(there.network == candidate.network for there in host) for host in theirs):
            return str(candidate.ip)
    for host in theirs:
        for there in host:
            routed = source_address(str(there.ip))
            if routed and not is_loopback(routed):
                return routed
    return str(usable[0].ip) if usable else LOOPBACK
