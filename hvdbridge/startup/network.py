"""Addresses by which hosts reach each other, identities of hosts, and ports to listen on.

Rules:

1. Ranks share a host if host name, boot and network namespace are equal. Two containers on one machine are two hosts.
2. Servers listen on loopback only if all ranks share a host, else on one address that all hosts can route to.
3. A port that another process opens later is chosen outside the kernel's ephemeral range. Within it, a connection may
   take the port in between.
4. Sockets that hvdbridge opens listen on a port of ``HVDBRIDGE_PORTS``, for firewalls, or on any free port.
5. Interfaces are read as on Linux, and addresses are IPv4.
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
    """Return a text that is equal for processes on one host (rule 1), and differs between hosts."""
    return f"{socket.gethostname()}/{network_identity()}"


def network_identity() -> str:
    """Return a text that is equal for processes that reach each other by loopback, and differs for others.

    Containers on one machine may share its network but have host names of their own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        return f"{boot}/{os.readlink('/proc/self/ns/net').strip('net:[]')}"
    return socket.gethostname()


def interfaces() -> dict[str, IPv4Interface]:
    """Return the address of every configured network interface, by name; empty if the system is not Linux.

    >>> str(interfaces()["lo"].ip)
    '127.0.0.1'
    """
    addresses: dict[str, IPv4Interface] = {}
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        import fcntl

        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(sock, operation, request)[20:24])
                    for operation in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
                addresses[name] = IPv4Interface(f"{address}/{mask}")
    return addresses


def source_address(host: str) -> str | None:
    """Return this host's address on the route to ``host``, or None if there is no route. Sends no packet."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return str(sock.getsockname()[0])
    return None


def chosen_interface(name: str) -> IPv4Interface:
    """Return the address of the interface ``name``, the value of ``HVDBRIDGE_IFACE``.

    Raises:
        ConfigurationError: this host has no interface of this name with an IPv4 address.
    """
    addresses = interfaces()
    if name not in addresses:
        known = ", ".join(f"{other} ({addresses[other].ip})" for other in addresses) or "none"
        raise ConfigurationError(
            f"HVDBRIDGE_IFACE={name}: {socket.gethostname()} has no interface of this name with an IPv4 address. "
            f"Those that have one: {known}"
        )
    return addresses[name]


def interface_towards(host: str) -> str | None:
    """Return the name of this host's interface on the route to ``host``, or None if there is no route."""
    source = source_address(host)
    return next((name for name, address in interfaces().items() if str(address.ip) == source), None)


def free_port() -> int:
    """Return a port that is free on this host's loopback address (rule 3).

    >>> 1024 <= free_port() <= 65535
    True
    """
    ephemeral = ephemeral_ports()
    ports = [*range(10000, ephemeral.start), *range(ephemeral.stop, 65536)]
    for port in [*random.SystemRandom().sample(ports, min(100, len(ports))), 0]:
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise OSError("this host has no free port on its loopback interface")


def ephemeral_ports() -> range:
    """Return the kernel's port range for outgoing connections and for sockets that listen at port 0."""
    low, high = 32768, 60999
    with suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(low, high + 1)


def gloo_port_warning(ports: range | None) -> str:
    """Return a warning if Gloo, which uses this host's ephemeral ports, may leave ``HVDBRIDGE_PORTS``; else empty."""
    kernel = ephemeral_ports()
    if ports is None or (kernel[0] in ports and kernel[-1] in ports):
        return ""
    return (
        f"HVDBRIDGE_PORTS={ports[0]}-{ports[-1]}: Gloo, below torch and Horovod, listens where the kernel of "
        f"{socket.gethostname()} says, at {kernel[0]}-{kernel[-1]}: {gloo_port_remedy(ports)}"
    )


def gloo_port_remedy(ports: range) -> str:
    sysctl = f"sysctl net.ipv4.ip_local_port_range='{ports[0]} {ports[-1]}'"
    return (
        f"use HVDBRIDGE_BACKEND=mpi without mpiexec, or run {sysctl} on each host, whose other connections use that "
        "range, too: it must have some thousand ports"
    )


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def common_address(mine: Sequence[str], others: Sequence[Sequence[str]], preferred: str | None = None) -> str | None:
    """Return the address of this host that other hosts most likely reach, ``preferred`` if it qualifies; None: none.

    An address in a network in which every host has one takes precedence. An address that another host has, too (of a
    container bridge), leads to that host itself, so it does not qualify. Hosts with IPv6 alone have no address.

    Args:
        mine: this host's interfaces, as ``address/prefix``.
        others: the interfaces of each other host.

    >>> common_address(["127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/24"], [["172.17.0.1/16", "10.0.0.2/24"]])
    '10.0.0.1'
    """
    everywhere = {_ip(text) for host in others for text in host}
    shared = everywhere & {_ip(text) for text in mine}
    usable = [IPv4Interface(text) for text in mine if not is_loopback(text) and _ip(text) not in shared]
    if preferred and not is_loopback(preferred) and preferred not in everywhere:
        return preferred
    remote = [
        [IPv4Interface(text) for text in host if not is_loopback(text) and _ip(text) not in shared] for host in others
    ]
    for candidate in usable:
        if all(any(other.network == candidate.network for other in host) for host in remote):
            return str(candidate.ip)
    for host in remote:
        for other in host:
            routed = source_address(str(other.ip))
            if any(routed == str(candidate.ip) for candidate in usable):
                return routed
    return str(usable[0].ip) if usable else None


def _ip(interface: str) -> str:
    return interface.partition("/")[0]


def first_free(listen: Callable[[int], T], ports: range | None) -> T:
    """Return ``listen(port)`` for a free port among ``ports``, or ``listen(0)`` if ``ports`` is None.

    Raises:
        OSError: all ports are in use, or ``listen`` fails for another reason.
    """
    for port in [0] if ports is None else random.SystemRandom().sample(ports, len(ports)):
        try:
            return listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports is None:
                raise
    assert ports is not None
    raise OSError(errno.EADDRINUSE, f"other processes listen on all of HVDBRIDGE_PORTS={ports.start}-{ports.stop - 1}")


def resolves(host: str) -> bool:
    """Return whether ``host`` is an address or a name that this machine can resolve."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def listening(host: str, port: int, backlog: int, translated: bool = False) -> socket.socket:
    """Return a socket that listens at ``host``, an address or a name. A name with addresses of both kinds means IPv4.

    Args:
        translated: listen on all addresses if ``host`` is not an address of this machine, because a cluster's service
            may translate it to one.

    Raises:
        OSError: the port is in use, or ``host`` is not an address of this machine.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
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
