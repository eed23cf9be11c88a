"""Which address of a host others can reach, which ranks share a host, and on which ports we listen.

Rules:

1. Ranks share a host when host name, boot and network namespace are equal. Two containers on one machine are two
   hosts.
2. On one host everything listens on loopback only. Across hosts it listens on one address that all can route to.
3. A port that is chosen now and opened later by somebody else comes from outside of the range from which the kernel
   gives ports to connections: within it, one may take the port meanwhile.
4. What listens here uses a port of ``HVDBRIDGE_PORTS``, where a firewall lets a range through, or any port.
5. Interfaces are those of Linux, addresses those of IPv4.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface
from pathlib import Path
from typing import TypeVar

from hvdbridge.errors import ConfigurationError

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B


def host_identity() -> str:
    """A text that is equal on processes of one host (rule 1)."""
    return f"{socket.gethostname()}/{network_identity()}"


def network_identity() -> str:
    """A text that is equal on processes that reach each other by loopback, and on no others: containers of one host
    may share its network, and yet have names of their own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        return f"{boot}/{os.readlink('/proc/self/ns/net').strip('net:[]')}"
    return socket.gethostname()


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


def chosen_interface(name: str) -> IPv4Interface:
    """The address of the interface that ``HVDBRIDGE_IFACE`` names.

    Raises:
        ConfigurationError: this host has none of this name, or it has no IPv4 address.
    """
    found = interfaces()
    if name not in found:
        there = ", ".join(f"{each} ({found[each].ip})" for each in found) or "none"
        raise ConfigurationError(
            f"HVDBRIDGE_IFACE={name}: {socket.gethostname()} has no interface of this name with an IPv4 address. "
            f"Those that have one: {there}"
        )
    return found[name]


def interface_towards(host: str) -> str | None:
    """The name of the interface by which this host talks to ``host``, for libraries that want a name."""
    source = source_address(host)
    return next((name for name, address in interfaces().items() if str(address.ip) == source), None)


def free_port() -> int:
    """A port of this host that is free (rule 3).

    >>> 1024 <= free_port() <= 65535
    True
    """
    kernels = kernel_ports()
    ports = [*range(10000, kernels.start), *range(kernels.stop, 65536)]
    for port in [*random.SystemRandom().sample(ports, min(100, len(ports))), 0]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port on its loopback interface")


def kernel_ports() -> range:
    """The kernel's ephemeral ports: those of outgoing connections, and of sockets that listen at port 0."""
    low, high = 32768, 60999
    with suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(low, high + 1)


def gloo_leaves(ports: range | None) -> str:
    """Why Gloo, which takes the kernel's ports, leaves ``HVDBRIDGE_PORTS``, and what to do; empty: it does not."""
    kernels = kernel_ports()
    if ports is None or (kernels[0] in ports and kernels[-1] in ports):
        return ""
    return (
        f"HVDBRIDGE_PORTS={ports[0]}-{ports[-1]}: Gloo, below torch and Horovod, listens where the kernel says, at "
        f"{kernels[0]}-{kernels[-1]}. Run: sysctl net.ipv4.ip_local_port_range='{ports[0]} {ports[-1]}' on each host, "
        "or use HVDBRIDGE_BACKEND=mpi"
    )


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def common_address(mine: Sequence[str], others: Sequence[Sequence[str]], preferred: str | None = None) -> str | None:
    """The address of mine that hosts with the interfaces ``others`` can reach, ``preferred`` if it qualifies.

    Interfaces are written ``address/prefix``. A network in which every host has an address beats others. An address
    that another host has, too (a container bridge's), leads to that host itself, and is no candidate. None: there is
    none, as on hosts that have IPv6 alone.

    >>> common_address(["127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/24"], [["172.17.0.1/16", "10.0.0.2/24"]])
    '10.0.0.1'
    """
    everywhere = {_ip(text) for host in others for text in host}
    shared = everywhere & {_ip(text) for text in mine}
    usable = [IPv4Interface(text) for text in mine if not is_loopback(text) and _ip(text) not in shared]
    if preferred and not is_loopback(preferred) and preferred not in everywhere:
        return preferred
    theirs = [
        [IPv4Interface(text) for text in host if not is_loopback(text) and _ip(text) not in shared] for host in others
    ]
    for candidate in usable:
        if all(any(there.network == candidate.network for there in host) for host in theirs):
            return str(candidate.ip)
    for host in theirs:
        for there in host:
            routed = source_address(str(there.ip))
            if any(routed == str(candidate.ip) for candidate in usable):
                return routed
    return str(usable[0].ip) if usable else None


def _ip(interface: str) -> str:
    return interface.partition("/")[0]


def first_free(listen: Callable[[int], T], ports: range | None) -> T:
    """The result of ``listen(port)`` for a free port among ``ports``; without ``ports``, of ``listen(0)``.

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
