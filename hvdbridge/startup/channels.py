"""Channels: how ranks exchange their addresses before the job's helper runs.

Rules:

1. A channel is used for one exchange: every rank's place goes to rank 0, rank 0's answer goes to all.
   From then on the job's helper is the channel.
2. A rank waits no longer than the start-up timeout; then its error names the missing ranks.
3. Keys are unique per start (restart of the launcher, number of the ``init``), so leftovers are never read.
4. A library that the user has started is the channel (:class:`ObjectChannel`).
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

if TYPE_CHECKING:  # torch.distributed has these, but does not say so
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["Channel", "HashStore", "PrefixStore", "Store"]

POLL_SECONDS = 0.02
ATTEMPTS = 3  # horovodrun drops a connection that is silent for 3 s, as when its process waits for a core
_stores: dict[tuple[str, int], TCPStore] = {}  # open until exit: a rank that starts anew may connect at any time


class Channel(ABC):
    """Carries every rank's text to rank 0, and rank 0's text to all.

    Attributes:
        address: the address of rank 0 that the launcher gives, or None.
        store: a store of torch.distributed that all ranks reach, if this channel is one.
    """

    address: str | None = None
    store: Store | None = None

    @abstractmethod
    def gather(self, value: str) -> list[str]:
        """Every rank's ``value`` in rank order, on rank 0; an empty list elsewhere."""

    @abstractmethod
    def broadcast(self, value: str) -> str:
        """Rank 0's ``value``."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """All ranks have met."""


class KeyValueChannel(Channel):
    """Over a store that can set a key and wait for one."""

    def __init__(self, world: World, prefix: str, timeout: float) -> None:
        self.world, self.prefix, self.timeout = world, prefix, timeout

    @abstractmethod
    def _set(self, key: str, value: str) -> None: ...

    @abstractmethod
    def _get(self, key: str, timeout: float) -> str | None:
        """The value of ``key``, or None when it did not come in time."""

    def gather(self, value: str) -> list[str]:
        self._set(f"{self.prefix}/place/{self.world.rank}", value)
        if self.world.rank:
            return []
        deadline = time.monotonic() + self.timeout
        found = [self._get(f"{self.prefix}/place/{r}", deadline - time.monotonic()) for r in range(self.world.size)]
        missing = [r for r, text in enumerate(found) if text is None]
        if missing:
            raise RendezvousError(
                f"rank 0 waited {self.timeout:g} s for {ranks_text(missing)} of {self.world.size} ({self}). "
                "Look for an earlier error of theirs; if they only start slowly, raise HVDBRIDGE_START_SECONDS."
            )
        return cast("list[str]", found)

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
    """A store of torch.distributed: torchrun's agent hosts it, or rank 0, or it is a file."""

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
        except DistStoreError:  # the timeout
            return None


class HorovodChannel(KeyValueChannel):
    """The HTTP key-value store of horovodrun: PUT and GET /scope/key, 404 while it is absent."""

    def __init__(self, world: World, prefix: str, timeout: float, host: str, port: str, interface: str) -> None:
        super().__init__(world, prefix.replace("/", "."), timeout)
        self.url = f"http://{host}:{port}"
        device = network.interfaces().get(interface)
        self.address = str(device.ip) if device else network.source_address(host)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # a proxy is for the internet

    @classmethod
    def from_environment(cls, world: World, prefix: str, config: Config) -> HorovodChannel:
        """Raises RendezvousError: horovodrun's variables are incomplete."""
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


def _alone(value: str) -> list[str]:
    return [value]


class ObjectChannel(Channel):
    """Over an ``all_gather`` of a library that runs already; by default over that of a job of one.

    ``release`` is called when all ranks have met.
    """

    def __init__(
        self, all_gather: Callable[[str], list[str]] = _alone, release: Callable[[], None] = lambda: None
    ) -> None:
        self._all_gather, self.close = all_gather, release  # type: ignore[method-assign]

    def gather(self, value: str) -> list[str]:
        return self._all_gather(value)

    def broadcast(self, value: str) -> str:
        return self._all_gather(value)[0]


def tcp_store(host: str, port: int, serve: bool, config: Config, who: str, shared: bool = True) -> TCPStore:
    """Torch's TCP store at ``host:port``: served by this process, or reached. Port 0: any; ``store.port`` has it.

    It listens on ``host`` only, where that is an address of this machine. ``shared``: the store of a fixed port stays
    open until exit, and a later ``init_process_group`` of this process on the same port finds it.

    Raises:
        RendezvousError: the port is taken, or no store answers there in time.
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
                master_listen_fd=listener.detach(), use_libuv=False,  # which takes no open socket in older torch
            )  # fmt: skip
        else:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (OSError, RuntimeError) as error:
        doing = "cannot listen" if serve else f"got no answer within {config.start_seconds:g} s"
        known = "" if resolves(host) else f" This host does not know the name {host}: give MASTER_ADDR an address."
        raise RendezvousError(f"{who} {doing} at {host}:{port} (MASTER_ADDR:MASTER_PORT): {error}{known}") from error
    if shared:
        _stores[host, port] = store
    return store


def from_url(url: str, world: World, prefix: str, config: Config) -> Channel:
    """The channel of ``init_method``: ``tcp://host:port``, ``file:///path`` or ``env://``.

    Raises:
        ConfigurationError: another form.
    """
    parts = urlsplit(url)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return _served(world, prefix, config, parts.hostname, parts.port)
    if parts.scheme == "file" and parts.path:
        store = FileStore(parts.path, world.size)
        return StoreChannel(world, prefix, config.start_seconds, store, f"the file {parts.path}")
    if parts.scheme == "env":
        return from_variables(world, prefix, config)
    raise ConfigurationError(f"init_method={url!r} must be tcp://host:port, file:///path or env://")


def from_variables(world: World, prefix: str, config: Config) -> Channel:
    """MASTER_ADDR and MASTER_PORT: served by torchrun's agent, or by rank 0.

    Raises:
        RendezvousError: one of them is missing.
        ConfigurationError: the port is no number.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise RendezvousError(
            f"rank {world.rank} of {world.size} does not know where to meet the others: set {' and '.join(missing)} "
            "(the host of rank 0 and a free port there), or use init_method='tcp://host:port'"
        )
    try:
        port = int(os.environ["MASTER_PORT"])
    except ValueError:
        raise ConfigurationError(f"MASTER_PORT={os.environ['MASTER_PORT']!r} must be a number") from None
    return _served(world, prefix, config, os.environ["MASTER_ADDR"], port)


def from_slurm(world: World, prefix: str, config: Config) -> Channel:
    """Rank 0 serves on the first host of srun's step, at :func:`slurm_port`."""
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return from_variables(world, prefix, config)
    host = first_host(os.environ.get("SLURM_STEP_NODELIST", "") or os.environ.get("SLURM_NODELIST", ""))
    if not host:
        raise RendezvousError("srun's SLURM_STEP_NODELIST is not set: set MASTER_ADDR and MASTER_PORT")
    return _served(world, prefix, config, host, slurm_port(os.environ, config))


def slurm_port(environ: Mapping[str, str], config: Config) -> int:
    """A port that Slurm reserved for the step (``srun --resv-ports``), or one that follows from the numbers of job and
    step: steps and jobs that follow each other have others.

    >>> slurm_port({"SLURM_STEP_RESV_PORTS": "12000-12003"}, Config())
    12000
    """
    if reserved := re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", "")):
        return int(reserved.group())
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    ports = config.ports or range(15000, 30000)
    return ports[zlib.crc32(step.encode()) % len(ports)]


def _served(world: World, prefix: str, config: Config, host: str, port: int) -> Channel:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world.launcher == "torchrun"
    store = tcp_store(host, port, world.rank == 0 and not agent, config, f"rank {world.rank}")
    return StoreChannel(world, prefix, config.start_seconds, store, f"the store at {host}:{port}", host)
