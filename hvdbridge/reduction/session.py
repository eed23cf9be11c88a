"""Session: the state of a process between ``hb.init`` and ``hb.shutdown``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hvdbridge.backends.communicator import Communicator
from hvdbridge.config import Config
from hvdbridge.startup.world import World
from hvdbridge.supervisor.client import Monitor

if TYPE_CHECKING:
    from hvdbridge.policy.base import Policy

Check = Callable[[int, str], None]


@dataclass(eq=False)
class Session:
    """The open session of this process; :func:`hvdbridge.init` returns it.

    Attributes:
        world: rank, size, local rank and node of this process.
        worlds: the same of every rank, in rank order.
        backend: ``torch``, ``horovod`` or ``mpi``.
        config: the settings of the environment, updated by arguments of ``init``.
        policy: the default policy: a spec string, or the policy given to ``init``.
        device: this rank's device: its GPU, or the CPU.
        communicator: hvdbridge's own communicator over all ranks.
        control: its duplicate in host memory, for objects and weights.
        monitor: this rank's connection to the job's helper process.
        opened: objects constructed on first use, by name.
    """

    world: World
    worlds: tuple[World, ...]
    backend: str
    config: Config
    policy: str | Policy
    device: torch.device
    communicator: Communicator
    control: Communicator
    monitor: Monitor
    _arguments: tuple[Any, ...]
    _stop: Callable[[], None]
    _at_shutdown: list[Callable[[], None]] = field(default_factory=list)
    _channels: dict[str, Communicator] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)
    _ranges: Iterator[int] = field(default_factory=count)
    _pid: int = field(default_factory=os.getpid)

    def check(self, ranks: list[int] | None = None) -> Check | None:
        """Return a function that compares collectives across ranks before they start; None without HVDBRIDGE_DEBUG.

        It takes a collective's number and signature. Each call of this method reserves a range of numbers for one
        scheduler. Collectives of a group (``ranks``) are not compared.
        """
        if not self.config.debug or self.world.size == 1:
            return None
        if ranks is not None:
            logging.getLogger("hvdbridge").warning(
                "HVDBRIDGE_DEBUG compares collectives of all ranks, not those of the group %s", ranks
            )
            return None
        first_number = next(self._ranges) << 40
        return lambda number, signature: self.monitor.check(first_number + number, signature)

    def channel(self, name: str) -> Communicator:
        """Return a duplicate of :attr:`communicator` for one purpose; the first use of a name is collective."""
        if name not in self._channels:
            duplicate = self.communicator.split([range(self.world.size)])
            assert duplicate is not None
            self._channels[name] = duplicate
        return self._channels[name]

    def at_shutdown(self, callback: Callable[[], None]) -> None:
        """Register ``callback`` to run when the session closes; the last registered one runs first."""
        self._at_shutdown.append(callback)

    def forget_at_shutdown(self, callback: Callable[[], None]) -> None:
        """Undo :meth:`at_shutdown`. Harmless if ``callback`` is not registered."""
        if callback in self._at_shutdown:
            self._at_shutdown.remove(callback)

    def close(self) -> None:
        for callback in reversed(list(self._at_shutdown)):
            callback()
        for communicator in (*self._channels.values(), self.control, self.communicator):
            communicator.close()
        self._stop()
