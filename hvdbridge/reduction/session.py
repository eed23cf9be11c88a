"""What the ranks of a job share while hvdbridge is initialized."""

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
    """What :func:`hvdbridge.init` opened.

    Attributes:
        world: rank, size, and place of this process.
        worlds: of every rank, in rank order.
        backend: ``torch``, ``horovod`` or ``mpi``.
        config: the environment's, with the arguments of ``init`` in it.
        policy: the default policy's spec, or the policy that ``init`` was given.
        device: where this rank computes.
        communicator: our own channel over all ranks.
        control: a duplicate in host memory, for objects and weights.
        monitor: this rank's end of the job's helper.
        opened: what was opened on first use and is needed again, by name.
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
        """What compares collectives across ranks before they start, if HVDBRIDGE_DEBUG asks for it.

        Each call opens a range of numbers of its own: one per scheduler. Groups (``ranks``) are not compared.
        """
        if not self.config.debug or self.world.size == 1:
            return None
        if ranks is not None:
            logging.getLogger("hvdbridge").warning(
                "HVDBRIDGE_DEBUG compares collectives of all ranks, not those of the group %s", ranks
            )
            return None
        first = next(self._ranges) << 40
        return lambda number, signature: self.monitor.check(first + number, signature)

    def channel(self, name: str) -> Communicator:
        """A duplicate of :attr:`communicator` for one purpose; the first use of a name is collective."""
        if name not in self._channels:
            duplicate = self.communicator.split([range(self.world.size)])
            assert duplicate is not None
            self._channels[name] = duplicate
        return self._channels[name]

    def at_shutdown(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the session closes, last registered first."""
        self._at_shutdown.append(callback)

    def forget_at_shutdown(self, callback: Callable[[], None]) -> None:
        """Undo :meth:`at_shutdown`; harmless if it is not registered."""
        if callback in self._at_shutdown:
            self._at_shutdown.remove(callback)

    def close(self) -> None:
        for callback in reversed(list(self._at_shutdown)):
            callback()
        for communicator in (*self._channels.values(), self.control, self.communicator):
            communicator.close()
        self._stop()
