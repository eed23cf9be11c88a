"""Channels of optimizers: opened in the agreed order of raw operations; what travels in them is not negotiated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdbridge.backends.communicator import Communicator
from hvdbridge.reduction.session import Session
from hvdbridge.torch.settings import Settings


@dataclass(frozen=True)
class Channel:
    """Communicators for one purpose among the members of a process set.

    Attributes:
        control: for host memory.
        offers: the objects that the members gave when they opened it, in rank order.
        check: compares collectives before they start, under HVDBRIDGE_DEBUG.
    """

    communicator: Communicator
    control: Communicator
    offers: list[Any]
    check: Callable[[int, str], None] | None

    @classmethod
    def open(
        cls, session: Session, settings: Settings, parent: Communicator, ranks: list[int], title: str, offer: Any
    ) -> Channel:
        """Collective among ``ranks``, the members of ``parent``; rank 0's ``title`` counts."""
        communicator = parent.split([range(parent.size)])
        assert communicator is not None, "every member is in it"
        control = communicator.control()
        offers = control.all_gather_object((offer, title))
        # Waits in the channel bear its title in the monitor's reports, and have Horovod's limits.
        communicator.watch = control.watch = partial(_watch, session, offers[0][1], settings)
        check = session.check(None if len(ranks) == session.world.size else ranks)
        return cls(communicator, control, [each for each, _ in offers], check)

    def close(self) -> None:
        self.control.close()
        self.communicator.close()


def _watch(session: Session, title: str, settings: Settings, signature: str) -> AbstractContextManager[None]:
    return session.monitor.watch(f"{title}: {signature}", settings.shutdown_seconds, settings.stall_seconds)
