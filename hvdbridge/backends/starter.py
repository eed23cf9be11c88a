"""The interface that starts a library: each backend implements one :class:`Starter`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdbridge.backends import registry
from hvdbridge.config import Config
from hvdbridge.errors import RendezvousError
from hvdbridge.startup.channels import Channel, Store
from hvdbridge.startup.world import World
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.spawn import HelperAddress

Numbers = tuple[int, int]
"""Rank and size."""


@dataclass(frozen=True)
class Meeting:
    """What every rank knows after the ranks have met.

    Attributes:
        world: complete.
        worlds: of every rank, in rank order.
        address: of rank 0's host; every rank reaches it (loopback where all share a host).
        own_devices: every rank has a GPU that no other rank uses.
        helper: the job's helper, None for one process.
        store: a store of torch.distributed that all ranks reach, if the launcher's channel is one.
        key: unique per start; the same on all ranks.
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


class Starter(ABC):
    """Starts one library, or finds it running.

    Class attributes:
        name: of the backend, as in :data:`hvdbridge.config.BACKENDS`.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def running(cls) -> Numbers | None:
        """Rank and size, if the user started the library."""

    @abstractmethod
    def all_gather(self, value: str) -> list[Any]:
        """Every rank's ``value`` in rank order, by the library, which runs."""

    def native_channel(self, world: World, config: Config) -> Channel | None:
        """Start the library at once where it is the launcher's own and its channel, too; else None."""
        return None

    def check(self, world: World) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            BackendUnavailable: not installed, or unable to start under this launcher.
        """
        registry.require(self.name)

    @abstractmethod
    def start(self, meeting: Meeting) -> None:
        """Start the library among all ranks."""

    def numbers(self) -> Numbers:
        """Rank and size as the library, which runs, found them."""
        found = self.running()
        assert found is not None, "it runs"
        return found

    def compare(self, world: World) -> None:
        """Return if the library, which runs, found the launcher's rank and size.

        Raises:
            RendezvousError: it found others.
        """
        found = self.numbers()
        if found != (world.rank, world.size):
            title = registry.entry(self.name).title
            raise RendezvousError(
                f"{world.launcher} started rank {world.rank} of {world.size}, but {title} "
                f"found rank {found[0]} of {found[1]}. {self.hint(world)}".rstrip()
            )

    def hint(self, world: World) -> str:
        """Why the library may have found other numbers than the launcher's, and the remedy."""
        return ""

    @abstractmethod
    def stop(self) -> None:
        """Undo :meth:`start`."""


class Variables:
    """Environment variables that are set for a library, and put back afterwards."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, values: Mapping[str, str | None]) -> None:
        """None removes a variable."""
        self._before = {name: os.environ.get(name) for name in values} | self._before
        _put(values)

    def default(self, values: Mapping[str, str | None]) -> None:
        """Only what the user did not set; None leaves it so."""
        self.set({k: v for k, v in values.items() if v is not None and not os.environ.get(k)})

    def remove(self, prefixes: Iterable[str]) -> None:
        self.set({name: None for name in os.environ if name.startswith(tuple(prefixes))})

    def restore(self) -> None:
        _put(self._before)
        self._before.clear()


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
