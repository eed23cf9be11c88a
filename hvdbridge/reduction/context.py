"""What every front end needs to aggregate among a group of ranks: channels, a scheduler, and their lifetime.

Rules:

1. A context lives until :meth:`ReductionContext.close`, or until the session ends.
2. While it lives the job's monitor guards its scheduler: a failure of the job is a failure of the scheduler.
3. After a failure no communicator is freed. Another rank may be gone, and to free a communicator may wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdbridge.backends.communicator import Communicator
from hvdbridge.execution.scheduler import Check, open_scheduler
from hvdbridge.reduction.agreement import open_group
from hvdbridge.reduction.session import Session


class ReductionContext:
    """A scheduler on channels of its own.

    Args:
        session: the open one.
        channels: what the context owns, and frees in reverse order. The first one carries the data.
        device: where the data is.
        check: compares collectives across ranks before they start, see :meth:`.Session.check`.

    Attributes:
        session: as given.
        communicator: carries the data.
        control: carries weights and objects in host memory; the communicator itself where there is no other.
        scheduler: runs flows on both.
        closed: :meth:`close` was called.
    """

    def __init__(
        self, session: Session, channels: Sequence[Communicator], device: torch.device, check: Check | None
    ) -> None:
        self.session = session
        self.communicator, self.control = channels[0], channels[-1]
        self.scheduler = open_scheduler(self.communicator, device, check)
        self.closed = False
        self._channels = list(channels)
        session.monitor.guard(self.scheduler)
        session.at_shutdown(self.close)

    @classmethod
    def among(cls, session: Session, group: Any, device: torch.device) -> ReductionContext:
        """A context among the ranks of ``group`` (None: all). Collective over all ranks of the job.

        Raises:
            RankMismatch: groups overlap, or a rank is not in the group that it names.
        """
        communicator, control, ranks = open_group(session.communicator, group)
        return cls(session, (communicator, control), device, session.check(ranks))

    def close(self) -> None:
        """Let the scheduler finish what was submitted, and free the channels. Collective, but after a failure.
        Harmless when repeated."""
        if self.closed:
            return
        self.closed = True
        self.session.forget_at_shutdown(self.close)
        self.session.monitor.unguard(self.scheduler)
        failed = self.scheduler.failure is not None
        self.scheduler.close()
        if not failed:
            for channel in reversed(self._channels):
                channel.close()
