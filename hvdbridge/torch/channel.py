"""Channels: the communicators of a ``DistributedOptimizer``.

Opening a channel is a raw operation, so all ranks open channels in one order. Its collectives are not negotiated.
"""

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
class OptimizerChannel:
    """Communicators of one optimizer among the members of a process set.

    Attributes:
        communicator: carries gradients.
        control: carries objects and tensors in host memory.
        member_infos: the object that each member passed to :meth:`open`, in rank order.
        check: compares a collective's signature over the ranks before it starts; None without HVDBRIDGE_DEBUG.
    """

    communicator: Communicator
    control: Communicator
    member_infos: list[Any]
    check: Callable[[int, str], None] | None

    @classmethod
    def open(
        cls, session: Session, settings: Settings, parent: Communicator, ranks: list[int], title: str, member_info: Any
    ) -> OptimizerChannel:
        """Open a channel; collective among ``ranks``, the members of ``parent``.

        Args:
            title: the channel's name in reports; that of the first member is used.
            member_info: picklable object for the other members.
        """
        communicator = parent.split([range(parent.size)])
        assert communicator is not None, "every member is in it"
        control = communicator.control()
        member_infos = control.all_gather_object((member_info, title))
        # The monitor reports waits in the channel under its title, and applies Horovod's time limits.
        communicator.watch = control.watch = partial(_watch, session, member_infos[0][1], settings)
        check = session.check(None if len(ranks) == session.world.size else ranks)
        return cls(communicator, control, [info for info, _ in member_infos], check)

    def close(self) -> None:
        """Free both communicators."""
        self.control.close()
        self.communicator.close()


def _watch(session: Session, title: str, settings: Settings, signature: str) -> AbstractContextManager[None]:
    """Watch one collective of a channel in the monitor."""
    return session.monitor.watch(f"{title}: {signature}", settings.shutdown_seconds, settings.stall_seconds)
