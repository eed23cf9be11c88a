"""What every front end needs to aggregate among a group of ranks: channels, a scheduler, their lifetime, and agreement.

Rules:

1. A context lives until :meth:`ReductionContext.close`, or until the session ends.
2. While it lives the job's monitor guards its scheduler: a failure of the job is a failure of the scheduler.
3. After a failure no communicator is freed. Another rank may be gone, and to free a communicator may wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import ConfigurationError, RankMismatch
from hvdbridge.execution.scheduler import Check, open_scheduler
from hvdbridge.policy.base import Policy
from hvdbridge.reduction.parameters import bare_name
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
        ranks: those of the group; None: all.
        closed: :meth:`close` was called.
    """

    ranks: list[int] | None = None

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
        """A context among the ranks of ``group`` (None: all). Collective over all ranks of the job; each names the
        group that it belongs to.

        Raises:
            RankMismatch: groups overlap, or a rank is not in the group that it names.
        """
        world = session.communicator
        control = world.control()
        wanted = list(range(world.size)) if group is None else sorted(world.ranks_of(group))
        groups = sorted({tuple(ranks) for ranks in control.all_gather_object(wanted)})
        control.close()
        members = [rank for ranks in groups for rank in ranks]
        if len(members) != len(set(members)) or world.rank not in wanted:
            raise RankMismatch(
                f"rank {world.rank}: group={wanted}, and the ranks name the groups {groups}. "
                "Groups must be disjoint, and each rank names the one that it is in."
            )
        own = world.split(groups)
        assert own is not None
        ranks = None if len(wanted) == world.size else wanted
        made = cls(session, (own, own.control()), device, session.check(ranks))
        made.ranks = ranks
        return made

    def agree(self, policy: Policy, lines: list[str]) -> None:
        """Compare ``lines`` over the ranks, and check that ``policy`` is defined for so many. Collective; an error
        closes the context.

        Raises:
            RankMismatch: on every rank, naming the first difference and which ranks have what.
            ConfigurationError: see :meth:`Policy.check_size <hvdbridge.Policy.check_size>`.
        """
        try:
            self._compare(lines)
            policy.check_size(self.communicator.size, len(set(self.communicator.nodes)) or None)
        except (ConfigurationError, RankMismatch):
            self.close()
            raise

    def _compare(self, lines: list[str]) -> None:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if len(set(self.control.all_gather_object(digest))) == 1:
            return
        everyone = self.control.all_gather_object(lines)
        for i in range(max(map(len, everyone))):
            values = [theirs[i] if i < len(theirs) else "nothing" for theirs in everyone]
            if len(set(values)) > 1:
                who = "; ".join(
                    f"ranks {[r for r, v in enumerate(values) if v == value]} have {value}"
                    for value in dict.fromkeys(values)
                )
                raise RankMismatch(f"GradientSynchronizer: the ranks differ: {who}. Construct it alike on every rank.")

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


def describe(
    model: Module, params: Mapping[str, Tensor], options: Mapping[str, object], left_alone: Iterable[str] = ()
) -> list[str]:
    """What must be equal on all ranks, a line each. Buffers of the names in ``left_alone`` need not."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in set(left_alone)}
    return [
        *(f"parameter {name} {list(p.shape)} {p.dtype}" for name, p in params.items()),
        *(f"buffer {bare_name(name)} {list(b.shape)} {b.dtype}" for name, b in buffers.items()),
        *(f"{name}={value}" for name, value in options.items()),
    ]
