"""The interface that starts and stops a backend's library: each backend implements one :class:`Starter`."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdbridge.backends import registry
from hvdbridge.config import Config
from hvdbridge.errors import RendezvousError
from hvdbridge.startup import network
from hvdbridge.startup.channels import Channel, Store
from hvdbridge.startup.world import World
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.spawn import HelperAddress

log = logging.getLogger("hvdbridge")
RankAndSize = tuple[int, int]
"""This process's rank, and the number of ranks."""


@dataclass(frozen=True)
class RendezvousInfo:
    """The result of the rendezvous, on each rank.

    Attributes:
        config: the settings of this process.
        monitor: this rank's connection to the job's helper.
        worlds: the :class:`.World` of each rank, in rank order, with all numbers filled in.
        world: the element of this rank.
        address: an address of rank 0's host that all ranks reach (loopback if all ranks share a host).
        own_devices: each rank has a GPU that no other rank uses.
        helper: address of the job's helper; None for a job of one process.
        store: a store of torch.distributed that all ranks reach, if the launcher's channel has one.
        key: prefix for keys in stores, unique for each start and the same on all ranks.
    """

    config: Config
    monitor: Monitor
    worlds: tuple[World, ...]
    world: World
    address: str
    own_devices: bool
    helper: HelperAddress | None
    store: Store | None
    key: str

    def check_gloo_ports(self) -> str:
        """Warn if Gloo, between hosts, may listen on this host outside ``HVDBRIDGE_PORTS``; called before Gloo starts.

        Each host has a port range of its own, so one rank of each host warns. Return the warning on each rank, as the
        hint for a start that hangs.
        """
        warning = "" if network.is_loopback(self.address) else network.gloo_port_warning(self.config.ports)
        if warning and self.world.local_rank == 0:
            log.warning("%s", warning)
        return warning


class Starter(ABC):
    """Starts one library, or uses it as it is if the user has started it.

    Class attributes:
        name: name of the backend, as in :data:`hvdbridge.config.BACKENDS` or as it was registered.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def running(cls) -> RankAndSize | None:
        """Return rank and size if the library is running, else None."""

    @abstractmethod
    def all_gather(self, value: str) -> list[Any]:
        """Return each rank's ``value`` in rank order. It uses the library, which must be running. Collective."""

    def native_channel(self, world: World, config: Config) -> Channel | None:
        """If the launcher itself supports the library, start it now and return a channel over it; else return None.

        :meth:`start` is called later in both cases.
        """
        return None

    def check(self, world: World) -> None:
        """Check that the library can start under the launcher of ``world``, before anything is started.

        Raises:
            BackendUnavailable: the library is not installed, or cannot start under this launcher.
        """
        registry.require(self.name)

    @abstractmethod
    def start(self, rendezvous: RendezvousInfo) -> None:
        """Start the library on all ranks. Collective."""

    def rank_and_size(self) -> RankAndSize:
        """Return rank and size as the library reports them. The library must be running."""
        reported = self.running()
        assert reported is not None, "it runs"
        return reported

    def verify_rank_and_size(self, world: World) -> None:
        """Check that the library, which must be running, has the launcher's rank and size.

        Raises:
            RendezvousError: the library reports another rank or size.
        """
        reported = self.rank_and_size()
        if reported != (world.rank, world.size):
            title = registry.entry(self.name).title
            raise RendezvousError(
                f"{world.launcher} started rank {world.rank} of {world.size}, but {title} "
                f"found rank {reported[0]} of {reported[1]}. {self.hint(world)}".rstrip()
            )

    def hint(self, world: World) -> str:
        """Return a likely cause of a rank or size that differs from the launcher's, and the remedy."""
        return ""

    @abstractmethod
    def stop(self) -> None:
        """Undo :meth:`start`."""


class EnvironmentOverrides:
    """Environment variables that are set for a library, and restored afterwards."""

    def __init__(self) -> None:
        self._original: dict[str, str | None] = {}

    def set(self, values: Mapping[str, str | None]) -> None:
        """Set variables; the value None removes one."""
        self._original = {name: os.environ.get(name) for name in values} | self._original
        _apply(values)

    def set_defaults(self, values: Mapping[str, str | None]) -> None:
        """Set those variables that the user has left unset or empty; the value None sets nothing."""
        self.set({k: v for k, v in values.items() if v is not None and not os.environ.get(k)})

    def unset(self, prefixes: Iterable[str]) -> None:
        """Remove all variables whose names start with one of ``prefixes``."""
        self.set({name: None for name in os.environ if name.startswith(tuple(prefixes))})

    def restore(self) -> None:
        """Restore the values from before the first change of each variable."""
        _apply(self._original)
        self._original.clear()


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
