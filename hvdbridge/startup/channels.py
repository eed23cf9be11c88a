"""Channels, on which ranks exchange host names and addresses before the job's helper process runs.

Rules:

1. A channel serves one exchange: every rank sends a description of itself to rank 0, and rank 0 sends one answer to all
   ranks. Later messages go through the job's helper.
2. A rank waits no longer than the start-up timeout. Rank 0's error then names the missing ranks; that of the others
   says that rank 0 did not answer.
3. Keys are unique for each start (restart of the launcher, number of the ``init``), so no rank reads old values.
4. If the user has started a library, its own collectives are the channel (:class:`ObjectChannel`).
"""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from torch.distributed import DistStoreError

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError, RendezvousError, ranks_text
from hvdbridge.startup import network
from hvdbridge.startup.network import first_free, listening, resolves
from hvdbridge.startup.world import World, first_host

if TYPE_CHECKING:  # torch.distributed exports these at run time only
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["Channel", "HashStore", "PrefixStore", "Store"]

POLL_SECONDS = 0.02
ATTEMPTS = 3  # horovodrun drops a connection that is silent for 3 s, as on a busy machine
_stores: dict[tuple[str, int], TCPStore] = {}  # open until exit, because a restarted rank may connect at any time


class Channel(ABC):
    """Sends a text of each rank to rank 0, and a text of rank 0 to all ranks.

    Attributes:
        address: this host's address in the network of the launcher's server, or None if the launcher has none.
        store: the store of torch.distributed that this channel uses, which all ranks reach, or None.
    """

    address: str | None = None
    store: Store | None = None

    @abstractmethod
    def gather(self, value: str) -> list[str]:
        """Return every rank's ``value`` in rank order on rank 0. Other ranks may get an empty list."""

    @abstractmethod
    def broadcast(self, value: str) -> str:
        """Return rank 0's ``value`` on all ranks."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Release what the channel holds. Called when all ranks have finished the exchange."""


class KeyValueChannel(Channel):
    """Base class of channels over a key-value store."""

    def __init__(self, world: World, prefix: str, timeout: float) -> None:
        self.world, self.prefix, self.timeout = world, prefix, timeout

    @abstractmethod
    def _set(self, key: str, value: str) -> None: ...

    @abstractmethod
    def _get(self, key: str, timeout: float) -> str | None:
        """Wait for ``key`` and return its value, or None if it was not set within ``timeout`` seconds."""

    def gather(self, value: str) -> list[str]:
        self._set(f"{self.prefix}/place/{self.world.rank}", value)
        if self.world.rank:
            return []
        deadline = time.monotonic() + self.timeout
        values = [self._get(f"{self.prefix}/place/{r}", deadline - time.monotonic()) for r in range(self.world.size)]
        missing = [r for r, text in enumerate(values) if text is None]
        if missing:
            raise RendezvousError(
                f"rank 0 waited {self.timeout:g} s for {ranks_text(missing)} of {self.world.size} ({self}). "
                "Look for an earlier error of theirs; if they only start slowly, raise HVDBRIDGE_START_SECONDS."
            )
        return cast("list[str]", values)

    def broadcast(self, value: str) -> str:
        key = f"{self.prefix}/answer"
        if self.world.rank == 0:
            self._set(key, value)
            return value
        answer = self._get(key, self.timeout)
        if answer is None:
            raise RendezvousError(
                f"rank {self.world.rank} waited {self.timeout:g} s for rank 0's answer ({self}). Look for an earlier "
                "error of rank 0, or of a rank that never came: rank 0 waits for all."
            )
        return answer


class StoreChannel(KeyValueChannel):
    """Channel over a store of torch.distributed, in torchrun's agent, in rank 0 or in a file."""

    def __init__(
        self, world: World, prefix: str, timeout: float, store: Store, name: str, host: str | None = None
    ) -> None:
        super().__init__(world, prefix, timeout)
        self.store, self.name = store, name
        self.address = network.source_address(host) if host else None

    def __str__(self) -> str:
        return self.name

    def _set(self, key: str, value: str) -> None:
        assert self.store is not None
        self.store.set(key, value)

    def _get(self, key: str, timeout: float) -> str | None:
        assert self.store is not None
        try:
            self.store.wait([key], timedelta(seconds=max(timeout, 0.01)))
            return bytes(self.store.get(key)).decode()
        except DistStoreError:  # timed out
            return None
        except RuntimeError as error:  # the store's server has ended
            raise RendezvousError(f"rank {self.world.rank} lost {self}: {error}") from error


class HorovodChannel(KeyValueChannel):
    """Channel over horovodrun's HTTP key-value store: PUT and GET /scope/key, with status 404 for a missing key."""

    def __init__(self, world: World, prefix: str, timeout: float, host: str, port: str, interface: str) -> None:
        super().__init__(world, prefix.replace("/", "."), timeout)
        self.url = f"http://{host}:{port}"
        device = network.interfaces().get(interface)
        self.address = str(device.ip) if device else network.source_address(host)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # without the user's proxies

    @classmethod
    def from_environment(cls, world: World, prefix: str, config: Config) -> HorovodChannel:
        """Return a channel to the store that horovodrun's variables name.

        Raises:
            RendezvousError: the variables are incomplete.
        """
        names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise RendezvousError(f"horovodrun's {' and '.join(missing)} is not set: start the script by horovodrun")
        host, port = (os.environ[name] for name in names)
        return cls(world, prefix, config.start_seconds, host, port, os.environ.get("HOROVOD_GLOO_IFACE", ""))

    def __str__(self) -> str:
        return f"horovodrun's store at {self.url}"

    def _request(self, method: str, key: str, data: bytes | None = None) -> bytes:
        scope, _, name = key.partition("/")
        request = urllib.request.Request(f"{self.url}/{scope}/{name.replace('/', '.')}", data, method=method)
        with self._open(request, timeout=min(10.0, self.timeout)) as reply:
            return cast(bytes, reply.read())

    def _set(self, key: str, value: str) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                self._request("PUT", key, value.encode())
                return
            except OSError as error:
                if not left:
                    raise RendezvousError(f"rank {self.world.rank} cannot reach {self}: {error}") from error
                time.sleep(POLL_SECONDS)

    def _get(self, key: str, timeout: float) -> str | None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._request("GET", key).decode()
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise RendezvousError(f"rank {self.world.rank}: {self} answers {error}") from error
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RendezvousError(f"rank {self.world.rank} cannot reach {self}: {error}") from error
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)


def _only_value(value: str) -> list[str]:
    return [value]


class ObjectChannel(Channel):
    """Channel over the ``all_gather`` of a library that runs already. The default serves a job of one rank.

    :meth:`close` calls ``release``.
    """

    def __init__(
        self, all_gather: Callable[[str], list[str]] = _only_value, release: Callable[[], None] = lambda: None
    ) -> None:
        self._all_gather, self.close = all_gather, release  # type: ignore[method-assign]

    def gather(self, value: str) -> list[str]:
        return self._all_gather(value)

    def broadcast(self, value: str) -> str:
        return self._all_gather(value)[0]


def tcp_store(host: str, port: int, serve: bool, config: Config, caller: str, shared: bool = True) -> TCPStore:
    """Serve torch's TCP store at ``host:port``, or connect to it.

    Args:
        host: address or name. A server listens on this address only, if it is one of this machine.
        port: 0 for any free port, which ``store.port`` then has.
        serve: this process is the server.
        caller: name of this rank, for errors.
        shared: keep the store open until exit, so that a later ``init_process_group`` on the same port finds it.

    Raises:
        RendezvousError: another process uses the port, or no store answers in time.
    """
    if port and (host, port) in _stores:
        return _stores[host, port]
    limit = timedelta(seconds=config.start_seconds)
    try:
        if serve:
            ports = None if port else config.ports
            listener = first_free(lambda free: listening(host, port or free, 4096, bool(port)), ports)
            port = listener.getsockname()[1]
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=limit, multi_tenant=shared,
                master_listen_fd=listener.detach(), use_libuv=False,  # libuv in older torch accepts no open socket
            )  # fmt: skip
        else:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (OSError, RuntimeError) as error:
        doing = "cannot listen" if serve else f"got no answer within {config.start_seconds:g} s"
        known = "" if resolves(host) else f" This host does not know the name {host}: give MASTER_ADDR an address."
        raise RendezvousError(f"{caller} {doing} at {host}:{port} (MASTER_ADDR:MASTER_PORT): {error}{known}") from error
    if shared:
        _stores[host, port] = store
    return store


def from_url(url: str, world: World, prefix: str, config: Config) -> Channel:
    """Return the channel for an ``init_method``: ``tcp://host:port``, ``file:///path`` or ``env://``.

    Raises:
        ConfigurationError: the URL has another form, or no valid port.
    """
    parts = urlsplit(url)
    if parts.scheme == "tcp" and parts.hostname:
        port = _port(f"init_method={url!r}", parts.netloc.rpartition(":")[2])
        return _tcp_channel(world, prefix, config, parts.hostname, port)
    if parts.scheme == "file" and parts.path:
        store = FileStore(parts.path, world.size)
        return StoreChannel(world, prefix, config.start_seconds, store, f"the file {parts.path}")
    if parts.scheme == "env":
        return from_variables(world, prefix, config)
    raise ConfigurationError(f"init_method={url!r} must be tcp://host:port, file:///path or env://")


def from_variables(world: World, prefix: str, config: Config) -> Channel:
    """Return the channel at MASTER_ADDR and MASTER_PORT, where torchrun's agent or rank 0 serves the store.

    Raises:
        RendezvousError: one of the variables is missing.
        ConfigurationError: the port is not a number from 1 to 65535.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RendezvousError(
            f"rank {world.rank} of {world.size} does not know where to meet the others: set {' and '.join(missing)} "
            "(the host of rank 0 and a free port there), or use init_method='tcp://host:port'"
        )
    port = _port("MASTER_PORT", os.environ["MASTER_PORT"])
    return _tcp_channel(world, prefix, config, os.environ["MASTER_ADDR"], port)


def _port(setting: str, text: str) -> int:
    """Return the port ``text``; raise ConfigurationError if it is none."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise ConfigurationError(f"{setting}: {text!r} is no port, which is a number from 1 to 65535")
    return int(text)


def from_slurm(world: World, prefix: str, config: Config) -> Channel:
    """Return the channel for srun: rank 0 serves the store on the first host of the step, at :func:`slurm_port`.

    MASTER_ADDR and MASTER_PORT take precedence.

    Raises:
        RendezvousError: srun's list of hosts is missing.
    """
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return from_variables(world, prefix, config)
    host = first_host(os.environ.get("SLURM_STEP_NODELIST", "") or os.environ.get("SLURM_NODELIST", ""))
    if not host:
        raise RendezvousError("srun's SLURM_STEP_NODELIST is not set: set MASTER_ADDR and MASTER_PORT")
    return _tcp_channel(world, prefix, config, host, slurm_port(os.environ, config))


def slurm_port(environ: Mapping[str, str], config: Config) -> int:
    """Return a port that Slurm reserved for the step (``srun --resv-ports=1``), else one that depends on job and step.

    Steps of one job use different ports. Those of two jobs may be equal.

    >>> slurm_port({"SLURM_STEP_RESV_PORTS": "12000-12003"}, Config())
    12000
    """
    if reserved := re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", "")):
        return int(reserved.group())
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    ports = config.ports or range(15000, 30000)
    return ports[(zlib.crc32(job.encode()) + (int(step) if step.isdecimal() else 0)) % len(ports)]


def _tcp_channel(world: World, prefix: str, config: Config, host: str, port: int) -> Channel:
    """Return a channel over the TCP store at ``host:port``, which rank 0 serves unless torchrun's agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world.launcher == "torchrun"
    store = tcp_store(host, port, world.rank == 0 and not agent, config, f"rank {world.rank}")
    return StoreChannel(world, prefix, config.start_seconds, store, f"the store at {host}:{port}", host)
