"""ReductionContext: communicators and a scheduler to aggregate among a group of ranks, and checks that ranks agree.

Rules:

1. A context lives until :meth:`ReductionContext.close`, or until the session ends.
2. While it lives the job's monitor guards its scheduler: a failure of the job fails the scheduler.
3. After a failure no communicator is freed. Freeing one may wait for a rank that has ended.
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
from hvdbridge.execution.graphs import FlowGraphs, open_graphs
from hvdbridge.execution.scheduler import Check, open_scheduler
from hvdbridge.policy.base import Policy
from hvdbridge.reduction.parameters import bare_name
from hvdbridge.reduction.session import Session

GRAPHS = "graphs"
"""Key of the open graphs in :attr:`.Session.opened`."""


class ReductionContext:
    """A scheduler with communicators of its own.

    Args:
        session: the open session.
        channels: the communicators that the context owns, and frees in reverse order. The first carries the data, the
            last weights and objects.
        device: the device of the data.
        check: compares collectives across ranks before they start, see :meth:`.Session.check`.

    Attributes:
        session: as given.
        communicator: carries the data.
        control: carries weights and objects in host memory; may be ``communicator`` itself.
        scheduler: runs flows on both.
        ranks: the ranks of the group; None: all.
        graphs: runs flows as CUDA graphs (:meth:`open_graphs`); None: they run as they are. Only one context at a time
            has graphs, because graphs with NCCL operations of several communicators may wait for each other.
        closed: :meth:`close` was called.
    """

    ranks: list[int] | None = None
    graphs: FlowGraphs | None = None

    def __init__(
        self, session: Session, channels: Sequence[Communicator], device: torch.device, check: Check | None
    ) -> None:
        self.session = session
        self.communicator, self.control = channels[0], channels[-1]
        self.scheduler = open_scheduler(self.communicator, device, check)
        self.closed = False
        self._channels = list(channels)
        session.monitor.register(self.scheduler)
        session.at_shutdown(self.close)

    @classmethod
    def among(cls, session: Session, group: Any, device: torch.device) -> ReductionContext:
        """Return a context among the ranks of ``group`` (None: all). Collective over all ranks of the job.

        Raises:
            RankMismatch: groups overlap, or a rank is not in its group.
        """
        world = session.communicator
        control = world.control()
        group_ranks = list(range(world.size)) if group is None else sorted(world.ranks_of(group))
        groups = sorted({tuple(ranks) for ranks in control.all_gather_object(group_ranks)})
        control.close()
        members = [rank for ranks in groups for rank in ranks]
        if len(members) != len(set(members)) or world.rank not in group_ranks:
            raise RankMismatch(
                f"rank {world.rank}: group={group_ranks}, and the ranks name the groups {groups}. "
                "Groups must be disjoint, and each rank names the one that it is in."
            )
        communicator = world.split(groups)
        assert communicator is not None
        ranks = None if len(group_ranks) == world.size else group_ranks
        context = cls(session, (communicator, communicator.control()), device, session.check(ranks))
        context.ranks = ranks
        return context

    def open_graphs(self, policy: Policy, device: torch.device) -> None:
        """Let flows of ``policy`` run as CUDA graphs, if HVDBRIDGE_GRAPHS asks for it and no other context has any."""
        wanted = self.session.config.graphs == "auto" and policy.rounds is not None
        if wanted and GRAPHS not in self.session.opened:
            self.graphs = open_graphs(self.scheduler, self.communicator, self.control, device)
            if self.graphs is not None:
                self.session.opened[GRAPHS] = self.graphs

    def agree(self, policy: Policy, lines: list[str]) -> None:
        """Compare ``lines`` over the ranks, and check that ``policy`` supports their number. Collective.

        Raises:
            RankMismatch: on every rank; the message has the first difference and the ranks on each side.
            ConfigurationError: see :meth:`Policy.check_size <hvdbridge.Policy.check_size>`.
        """
        try:
            self._compare([*lines, f"HVDBRIDGE_GRAPHS={self.session.config.graphs}"])
            policy.check_size(self.communicator.size, len(set(self.communicator.nodes)) or None)
        except (ConfigurationError, RankMismatch):
            self.close()
            raise

    def _compare(self, lines: list[str]) -> None:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if len(set(self.control.all_gather_object(digest))) == 1:
            return
        lines_by_rank = self.control.all_gather_object(lines)
        for i in range(max(map(len, lines_by_rank))):
            values = [other[i] if i < len(other) else "nothing" for other in lines_by_rank]
            if len(set(values)) > 1:
                text = "; ".join(
                    f"ranks {[r for r, v in enumerate(values) if v == value]} have {value}"
                    for value in dict.fromkeys(values)
                )
                raise RankMismatch(f"GradientSynchronizer: the ranks differ: {text}. Construct it alike on every rank.")

    def close(self) -> None:
        """Finish the submitted flows, and free the communicators. Collective, but after a failure local."""
        if self.closed:
            return
        self.closed = True
        self.session.forget_at_shutdown(self.close)
        self.session.monitor.unregister(self.scheduler)
        failed = self.scheduler.failure is not None
        self.scheduler.close()
        if not failed:
            if self.graphs is not None:
                self.graphs.close()
                del self.session.opened[GRAPHS]
            for channel in reversed(self._channels):
                channel.close()


def describe(
    model: Module, params: Mapping[str, Tensor], options: Mapping[str, object], ignored: Iterable[str] = ()
) -> list[str]:
    """Return all that must be equal on all ranks, one line per item, without buffers named in ``ignored``."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in set(ignored)}
    return [
        *(f"parameter {name} {list(p.shape)} {p.dtype}" for name, p in params.items()),
        *(f"buffer {bare_name(name)} {list(b.shape)} {b.dtype}" for name, b in buffers.items()),
        *(f"{name}={value}" for name, value in options.items()),
    ]
