"""One step's buckets through a policy: weights are exchanged, flows run, state is kept.

Rules:

1. A step is ``begin``, then ``submit`` per bucket in index order (the last one marked), then ``end``. All
   ranks do the same. Flows see the weights because the scheduler runs the exchange first.
2. Weights travel on the host-side control communicator. The first step always exchanges; if no rank set one,
   none exchanges again, and a rank that sets one later is an error.
3. A total weight of zero skips the step: updates are zeros, no state changes, nothing else travels.
4. A policy of scope "step" gets one bucket of all gradients when the last is ready: the source's own where it has one,
   else a copy.
5. A flow that said :class:`~hvdbridge.Early` has delivered; the rest of it runs behind the step's last bucket,
   in the order of the buckets, while the caller goes on. The next step's flows come after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdbridge.errors import StepError, WeightError
from hvdbridge.execution.flow import Submission, Task
from hvdbridge.execution.scheduler import Traffic
from hvdbridge.execution.state_store import StateStore
from hvdbridge.policies.dense import all_reduces
from hvdbridge.policies.wrappers import statistics
from hvdbridge.policy.base import Early, Flow, Policy, acts_after_step, advance, anchored, check_weights, finish, flush
from hvdbridge.policy.bucket import Bucket, Layout, Ranks, join_layouts, number_blocks
from hvdbridge.policy.buffer_pool import return_holes
from hvdbridge.policy.collectives import AllGather
from hvdbridge.reduction.context import ReductionContext

if TYPE_CHECKING:
    from hvdbridge.reduction.post_step import AfterStep

UNSET, SET, JOINED, FORWARD = 0.0, 1.0, 2.0, 3.0
"""What a rank's weight is, or that it is none: a forward's flag."""

SMALL = 1 << 22
"""Bytes of a step's only bucket up to which the thread that waits sees it through: threads keep memory of their own for
what flows compute, and of more a hand-over is no large part."""

ABANDON_SECONDS = 1.0

def dropped(update: Tensor | None) -> None:
    """Nobody takes it."""


@dataclass(eq=False)
class Piece:
    """A source's bucket: flat ``buffer`` in, its update out through ``deliver`` (None after a failure)."""

    layout: Layout
    buffer: Tensor
    deliver: Callable[[Tensor | None], None] = dropped


class Aggregator:
    """Joins a policy, its state and a scheduler; knows nothing of where gradients come from."""

    def __init__(
        self, policy: Policy, params: Mapping[str, Tensor], context: ReductionContext, seed: int = 0,
        weighted: bool | None = None,
    ) -> None:  # fmt: skip
        self.communicator, self.control, self.scheduler = context.communicator, context.control, context.scheduler
        self.ranks = context.ranks  # None: all
        self._take_up(policy, params)
        self.seed = seed
        self.step = 0
        self.ended = 0  # steps of this process, where `step` goes on from a saved one
        self.weight: float | None = None
        self.weighted = weighted
        self.joining = False  # within join(): exchange always
        self.joined = False  # this rank has run out of data and shadows the others
        self.joined_weight = 0.0  # what it then counts for; other than 0, its gradients are zeros
        self.weights: tuple[float, ...] | None = None
        self.loss_scale = self.state_scale = 1.0  # of the next backward, and of the state
        self.last_traffic = Traffic()
        self.traffic_elsewhere: Callable[[], Traffic] | None = None  # where a step's gradients do not come here
        self.after: AfterStep | None = None
        self._blocks = number_blocks({name: tensor.shape for name, tensor in params.items()})
        self._dtypes = {name: tensor.dtype for name, tensor in params.items()}
        self._pending: list[Submission[Any]] = []
        self._pieces: list[Piece] = []
        self._index = 0  # of the next bucket
        self._joint: dict[tuple[Layout, ...], Layout] = {}
        self._counted = -1  # the step that the scheduler's traffic is that of
        self._unfinished: list[tuple[int, Flow, Layout]] = []  # early ones, by index
        self._rest: Submission[None] | None = None

    def use(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        """Take another policy, before the first step.

        Raises:
            StepError: a step has been made.
        """
        if self.step or self._pending:
            raise StepError("a policy cannot be replaced after the first step: its state would be lost")
        self._take_up(policy, params)

    def _take_up(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        self.policy, self.store = policy, StateStore(policy, params)
        # What a policy is, is looked up in all of its inner ones, and here it is asked for with each bucket.
        self._whole = policy.scope == "step"
        self.acts_after = acts_after_step(policy) or anchored(policy)
        self._rounds, self._inline = policy.rounds, all_reduces(policy)

    @property
    def skipped(self) -> bool:
        """Whether the weights of the current step add up to zero."""
        return self.weights is not None and sum(self.weights) == 0.0

    def begin(self) -> None:
        """Start a step: exchange weights where that is due.

        Raises:
            WeightError: this rank set a weight although all agreed in the first step to set none.
        """
        if self.after is not None and self.acts_after:
            self.after.before_backward()
        self._pending.clear()
        self._pieces = []
        self._index = 0
        if self.loss_scale != self.state_scale:
            self.settle()
            self.store.rescale(self.loss_scale / self.state_scale)
            self.state_scale = self.loss_scale
        if self.weighted is False and not self.joining:
            if self.weight is not None:
                raise WeightError(
                    f"rank {self.control.rank}: sync.weight was set to {self.weight} although no rank had set one in "
                    "the first step, so weights are no longer exchanged. "
                    "Pass weighted=True to GradientSynchronizer."
                )
            self.weights = None
            return
        mine = (UNSET, 1.0) if self.weight is None else (SET, self.weight)
        flow = self._weigh(self.step, *(JOINED, self.joined_weight) if self.joined else mine)
        self._pending.append(self.scheduler.submit(Submission(flow, self.control)))

    def submit(self, piece: Piece, last: bool) -> None:
        """Hand in the next bucket; flows start here for policies of scope "bucket"."""
        self._pieces.append(piece)
        if self._whole and not last:
            return
        pieces, self._pieces = self._pieces, []
        only = last and self._index == 0 and sum(piece.buffer.nbytes for piece in pieces) <= SMALL
        flow = self._aggregate(pieces, self.step, self._index, last)
        self._index += 1
        pending = Submission(flow, self.communicator, self._rounds, self._inline, only, partial(deliver, pieces))
        self._pending.append(self.scheduler.submit(pending))

    def wait(self) -> None:
        """Wait for the flows of this step that were submitted; others may follow.

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self.scheduler.check_failure()
        self.scheduler.flush()
        for pending in self._pending:
            pending.wait()
        self.scheduler.order()
        self._pending.clear()

    def abandon(self, error: Exception) -> None:
        """The step cannot go on; all later ones fail with ``error``. What was submitted may end before, for a while:
        other ranks have submitted it, too, and a thread within a library cannot be stopped."""
        self.scheduler.flush()
        end = time.monotonic() + ABANDON_SECONDS
        while not all(pending.done for pending in self._pending) and time.monotonic() < end:
            time.sleep(1e-3)
        self.scheduler.fail(error)

    def end(self) -> None:
        """Wait for all flows of this step.

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self.wait()
        self.last_traffic = self.scheduler.traffic
        if self._unfinished:
            self._start_rest()
        if self.after is not None and self.acts_after:
            self.after.note(self.step)
        if self.ended & (self.ended - 1) == 0:  # 0, 1, 2, 4, 8: the first ones leave most, each in its own way
            return_holes()
        self.ended += 1
        self.step += 1

    def end_ahead(self) -> None:
        """All that :meth:`end` and the optimizer's step start, without waiting: for a rank that shadows others, where
        the backend's own traffic comes between this step's last bucket and its end."""
        self._start_rest()
        if self.after is not None:
            self.after.note(self.step)
            self.after.start()

    def catch_up(self) -> None:
        """Do what is outstanding after the step before, if the optimizer's step did not."""
        if self.after is not None:
            self.after.catch_up()

    def settle(self) -> None:
        """Wait for what runs in the background.

        Raises:
            BaseException: the scheduler's failure.
        """
        if self._rest is not None:
            self._rest.wait()
            self._rest = None
            self.scheduler.order()

    def stats(self) -> dict[str, float]:
        """See ``GradientSynchronizer.stats``."""
        self.settle()
        traffic = self.last_traffic if self.traffic_elsewhere is None else self.traffic_elsewhere()
        return {
            "step": self.step,
            "collectives": traffic.collectives,
            "bytes_sent": traffic.bytes_sent,
            "communication_seconds": traffic.seconds,
            "compression_seconds": traffic.computing,
            "state_bytes": self.store.nbytes,
            **statistics(self.policy, self.store.params, self.store.whole()),
        }

    def flush(self) -> Mapping[str, Tensor]:
        """What the policy holds back, by name; it holds nothing afterwards."""
        self.settle()
        updates, state = flush(self.policy, self.store.whole())
        if updates:
            self.store.load(state)
            self.weights = None  # should the last step have been skipped, this one is not
        return updates

    def bucket(
        self, buffer: Tensor, layout: Layout, index: int, step: int, last: bool = True
    ) -> Bucket:
        """A bucket of this rank."""
        world = self.communicator
        ranks = Ranks(world.rank, world.size, self.weights, world.places(), world.nodes)
        layout.of_model(self._blocks, self._dtypes)
        return Bucket(buffer, layout, index, step, self.seed, ranks, last=last, pool=self.store.pool)

    def _start_rest(self) -> None:
        self._rest = self.scheduler.submit(Submission(self._finish_early(), self.communicator))

    def _finish_early(self) -> Task[None]:
        unfinished, self._unfinished = sorted(self._unfinished, key=itemgetter(0)), []
        for _, flow, layout in unfinished:
            result = yield from finish(flow)
            self.store.merge(layout, result.state, result.update)

    def _count(self, step: int) -> None:
        """The scheduler's thread begins with ``step``: what it sends from now on is this step's."""
        if self._counted != step:
            self._counted = step
            self.scheduler.traffic = Traffic()

    def _aggregate(self, pieces: list[Piece], step: int, index: int, last: bool) -> Task[list[Tensor]]:
        self._count(step)
        if self.skipped:
            return [piece.buffer.zero_() for piece in pieces]
        layout, buffer = pieces[0].layout, pieces[0].buffer
        if len(pieces) > 1:
            key = tuple(piece.layout for piece in pieces)
            if key not in self._joint:
                self._joint = {key: join_layouts(key)}
            # In the widest of their types
            layout, buffer = self._joint[key], torch.cat([piece.buffer for piece in pieces])
        if self.joined:
            buffer.zero_()
        flow = self.policy.aggregate(self.bucket(buffer, layout, index, step, last), self.store.part(layout))
        end = yield from advance(flow)
        if isinstance(end, Early):
            self._unfinished.append((index, flow, layout))
        else:
            self.store.merge(layout, end.state, end.update)
        if len(pieces) == 1 and end.update.numel() == layout.numel:
            return [brought(end.update, buffer)]
        parts = end.update.split([piece.layout.numel for piece in pieces])
        return [brought(part, piece.buffer) for part, piece in zip(parts, pieces, strict=True)]

    def in_forward(self, flag: bool) -> list[bool]:
        """Every rank's flag, in rank order, where a forward has to know it, or that the others make one.

        Raises:
            StepError: another rank began a backward, and exchanges weights.
        """
        rows = self.scheduler.run(self._exchange(self.step, FORWARD, flag), self.control)
        return [value != 0.0 for value in rows[:, 1].tolist()]

    def _exchange(self, step: int, mark: float, value: float) -> Task[Tensor]:
        self._count(step)
        rows = yield AllGather(torch.tensor([mark, value], dtype=torch.float64, device="cpu"))
        forward = [rank for rank, mark in enumerate(rows[:, 0].tolist()) if mark == FORWARD]
        if forward and len(forward) < len(rows):
            raise StepError(
                f"ranks {forward} began a forward that aggregates while the others began a backward, or had no more "
                "data within join(). Make as many forwards on every rank, one before each backward; what one rank "
                "does alone belongs under torch.no_grad()."
            )
        return rows

    def _weigh(self, step: int, mark: float, value: float) -> Task[None]:
        rows = yield from self._exchange(step, mark, value)
        marks, values = rows[:, 0].tolist(), rows[:, 1].tolist()
        unset = [rank for rank, mark in enumerate(marks) if mark == UNSET]
        given = [rank for rank, mark in enumerate(marks) if mark == SET]
        if unset and given:
            raise WeightError(
                f"sync.weight is set on ranks {given} and not on ranks {unset}. Set it on every rank, "
                "before its first gradient, or on none."
            )
        self.weights = None
        if given or JOINED in marks:
            self.weights = check_weights(self.policy, values, self.control.size)
        if self.weighted is None and not self.joining:
            self.weighted = bool(given)


def deliver(pieces: Sequence[Piece], pending: Submission[list[Tensor]]) -> None:
    """The flow of ``pieces`` has ended or failed."""
    for i, piece in enumerate(pieces):
        piece.deliver(None if pending.result is None else pending.result[i])


def brought(update: Tensor, buffer: Tensor) -> Tensor:
    """``update`` in ``buffer``: what takes it may wait for all of a step, and then nothing else is held for it."""
    same = update.data_ptr() == buffer.data_ptr() and update.dtype == buffer.dtype
    return update if same else buffer.copy_(update)
