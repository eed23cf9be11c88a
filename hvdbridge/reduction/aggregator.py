"""Aggregator: runs the buckets of one step through a policy, with the ranks' weights and the policy's state.

Rules:

1. A step is ``begin``, then ``submit`` for each bucket in index order (the last one marked), then ``end``. All ranks
   call them alike. Flows read the weights, because the scheduler runs the exchange of weights before them.
2. Weights travel on the host-side control communicator: in every step if ``weighted`` is True or within ``join()``, in
   none if it is False. None: in the first step, and in later ones if a rank has set a weight then. Otherwise a rank
   that sets one later raises an error.
3. A step whose weights add up to zero is skipped: updates are zeros, and the policy does not run. Buffers are sent, and
   ``after_step`` runs if it is due as :data:`~hvdbridge.policy.base.SWITCH`.
4. A policy of scope "step" gets one bucket of all gradients when the last is ready: the source's own bucket if it has
   only one, else a copy.
5. A flow that yields :class:`~hvdbridge.Early` has delivered its update. The scheduler runs the rest of it after the
   step's last bucket, in bucket order and in the background. The next step's flows come after it.
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

from hvdbridge.errors import StepError, Unsupported, WeightError
from hvdbridge.execution.flow import Submission, Task
from hvdbridge.execution.graphs import NO_USERS_GRAPH, run_in_users_graph
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
"""Kinds of rows that ranks exchange: no weight set, a weight, the weight of a rank without data (``joined``), a
forward's flag."""

SMALL_STEP_BYTES = 1 << 22
"""Bytes up to which the waiting thread runs the flow of a step's only bucket. The allocator caches memory per thread,
so larger flows run in the scheduler's thread alone; for these the time of the hand-over does not matter."""

ABANDON_SECONDS = 1.0  # limit of the wait in Aggregator.abandon()


def discard_update(update: Tensor | None) -> None:
    """Discard the update of a bucket."""


@dataclass(eq=False)
class SourceBucket:
    """A source's bucket: its flat gradients, and the callback that takes their update (None after a failure)."""

    layout: Layout
    buffer: Tensor
    deliver: Callable[[Tensor | None], None] = discard_update


class Aggregator:
    """Runs steps of a policy on a scheduler and keeps the policy's state; independent of the source of gradients."""

    def __init__(
        self, policy: Policy, params: Mapping[str, Tensor], context: ReductionContext, seed: int = 0,
        weighted: bool | None = None,
    ) -> None:  # fmt: skip
        self.communicator, self.control, self.scheduler = context.communicator, context.control, context.scheduler
        self.graphs = context.graphs
        self.ranks = context.ranks  # ranks of the group; None: all
        self._set_policy(policy, params)
        self.seed = seed
        self.step = 0
        self.completed_steps = 0  # of this process; `step` may continue from a checkpoint
        self.weight: float | None = None  # of this rank in the next step
        self.weighted = weighted  # exchange weights in every step; None: the first step decides
        self.joining = False  # within join(): every step exchanges weights
        self.joined = False  # within join(): this rank has no more data; it sends zeros in the others' steps
        self.joined_weight = 0.0  # its weight then; its gradients are zeros
        self.weights: tuple[float, ...] | None = None  # of all ranks in this step; None: equal
        self.loss_scale = self.state_scale = 1.0  # scales of the next backward's gradients and of the state
        self.last_traffic = Traffic()
        self.external_traffic: Callable[[], Traffic] | None = None  # traffic if the backend itself aggregates
        self.post_step: AfterStep | None = None
        self._blocks = number_blocks({name: tensor.shape for name, tensor in params.items()})
        self._dtypes = {name: tensor.dtype for name, tensor in params.items()}
        self._pending: list[Submission[Any]] = []
        self._collected: list[SourceBucket] = []
        self._next_index = 0  # index of the next bucket
        self._in_users_graph = False  # the user captures this step
        self._joined_layouts: dict[tuple[Layout, ...], Layout] = {}
        self._traffic_step = -1  # the step that the scheduler's traffic belongs to
        self._early_flows: list[tuple[int, Flow, Layout]] = []  # bucket index, flow, layout; unordered
        self._background: Submission[None] | None = None

    def use(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        """Replace the policy, before the first step.

        Raises:
            StepError: a step has been made, so the policy's state would be lost.
        """
        if self.step or self._pending:
            raise StepError("a policy cannot be replaced after the first step: its state would be lost")
        self._set_policy(policy, params)

    def _set_policy(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        self.policy, self.store = policy, StateStore(policy, params)
        # Properties of a policy walk through its inner policies, so keep those that every bucket needs
        self._single_bucket = policy.scope == "step"
        self.has_post_step = acts_after_step(policy) or anchored(policy)
        self._rounds, self._inline = policy.rounds, all_reduces(policy)
        self._as_graphs = self.store.in_place = self.graphs is not None and self._rounds is not None
        if self._as_graphs:  # a flow that is verified asks for more collectives, and runs alone and in one thread
            self._rounds, self._inline = None, False

    @property
    def skipped(self) -> bool:
        """True if the weights of the current step add up to zero."""
        return self.weights is not None and sum(self.weights) == 0.0

    def begin(self) -> None:
        """Start a step, and exchange weights if necessary (rule 2).

        Raises:
            WeightError: this rank set a weight, and no rank had set one in the first step, or ``weighted=False``.
            Unsupported: the user captures the step as a CUDA graph, which cannot replay it.
        """
        self._in_users_graph = self.scheduler.in_users_graph
        if self._in_users_graph:
            self._check_users_graph()
        if self.post_step is not None and self.has_post_step:
            self.post_step.before_backward()
        self._pending.clear()
        self._collected = []
        self._next_index = 0
        if self.loss_scale != self.state_scale:
            self.settle()
            self.store.rescale(self.loss_scale / self.state_scale)
            self.state_scale = self.loss_scale
        if self.weighted is False and not self.joining:
            if self.weight is not None:
                raise WeightError(
                    f"rank {self.control.rank}: sync.weight was set to {self.weight}, and weights are not exchanged: "
                    "weighted=False, or no rank had set one in the first step. "
                    "Pass weighted=True to GradientSynchronizer."
                )
            self.weights = None
            return
        own = (UNSET, 1.0) if self.weight is None else (SET, self.weight)
        flow = self._exchange_weights(self.step, *(JOINED, self.joined_weight) if self.joined else own)
        self._pending.append(self.scheduler.submit(Submission(flow, self.control)))

    def _check_users_graph(self) -> None:
        needs = {
            "runs on the host (MPI, Horovod, or HVDBRIDGE_DEBUG=1)": self.communicator.capabilities.blocks_host
            or self.scheduler.checks,
            "exchanges weights, for which the host waits: pass weighted=False": self.weighted is not False
            or self.joining,
            "communicates after the optimizer's step": self.has_post_step,
            "begins with another loss scale than the state has": self.loss_scale != self.state_scale,
        }
        for what, needed in needs.items():
            if needed:
                raise Unsupported(f"rank {self.control.rank}: {NO_USERS_GRAPH}: it {what}")
        self.store.in_place = True
        for communicator in (self.communicator, *self.communicator.groups.values()):
            communicator.in_users_graph = True

    def submit(self, bucket: SourceBucket, last: bool) -> None:
        """Submit the next bucket. Its flow starts now, or for policies of scope "step" with the last bucket."""
        self._collected.append(bucket)
        if self._single_bucket and not last:
            return
        buckets, self._collected = self._collected, []
        lone = last and self._next_index == 0 and sum(bucket.buffer.nbytes for bucket in buckets) <= SMALL_STEP_BYTES
        flow = self._aggregate(buckets, self.step, self._next_index, last)
        self._next_index += 1
        lone &= not self._as_graphs
        submission = Submission(flow, self.communicator, self._rounds, self._inline, lone, partial(deliver, buckets))
        self._pending.append(self.scheduler.submit(submission))

    def wait(self) -> None:
        """Wait for the flows submitted so far in this step.

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self.scheduler.check_failure()
        self.scheduler.flush()
        for submission in self._pending:
            submission.wait()
        self.scheduler.order()
        self._pending.clear()

    def abandon(self, error: Exception) -> None:
        """Fail this step and all later ones with ``error``, after a short wait for the flows already submitted.

        Other ranks have submitted these, too, so they may end. A thread that waits within a library cannot be stopped.
        """
        self.scheduler.flush()
        deadline = time.monotonic() + ABANDON_SECONDS
        while not all(submission.done for submission in self._pending) and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.scheduler.fail(error)

    def end(self) -> None:
        """Wait for all flows of this step, and start the rest of flows that delivered early (rule 5).

        Raises:
            BaseException: the scheduler's failure, the same cause on all ranks.
        """
        self.wait()
        self.last_traffic = self.scheduler.traffic
        if self._early_flows:
            self._start_background()
        if self.post_step is not None and self.has_post_step:
            self.post_step.record_due(self.step)
        if self.completed_steps & (self.completed_steps - 1) == 0:  # 0, 1, 2, 4, 8: later steps leave few new holes
            return_holes()
        self.completed_steps += 1
        self.step += 1

    def end_ahead(self) -> None:
        """Start the collectives of :meth:`end` and of the optimizer's step, without waiting.

        For ranks without data within ``join()``, if DDP communicates between this step's last bucket and its end.
        """
        self._start_background()
        if self.post_step is not None:
            self.post_step.record_due(self.step)
            self.post_step.start()

    def catch_up(self) -> None:
        """Run the post-step collectives of the previous step, if the optimizer's step did not run them."""
        if self.post_step is not None:
            self.post_step.catch_up()

    def settle(self) -> None:
        """Wait for the flows that run in the background.

        Raises:
            BaseException: the scheduler's failure.
        """
        if self._background is not None:
            self._background.wait()
            self._background = None
            self.scheduler.order()

    def stats(self) -> dict[str, float]:
        """Return figures of the last step; see ``GradientSynchronizer.stats``."""
        self.settle()
        traffic = self.last_traffic if self.external_traffic is None else self.external_traffic()
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
        """Return the updates that the policy has held back, by parameter name; the policy holds none afterwards."""
        self.settle()
        updates, state = flush(self.policy, self.store.whole())
        if updates:
            self.store.load(state)
            self.weights = None  # the last step may have been skipped; this update must not be
        return updates

    def bucket(self, buffer: Tensor, layout: Layout, index: int, step: int, last: bool = True) -> Bucket:
        """Return the policy's view of a bucket of this rank."""
        communicator = self.communicator
        positions = communicator.group_positions()
        ranks = Ranks(communicator.rank, communicator.size, self.weights, positions, communicator.nodes)
        layout.of_model(self._blocks, self._dtypes)
        return Bucket(buffer, layout, index, step, self.seed, ranks, last=last, pool=self.store.pool)

    def _start_background(self) -> None:
        self._background = self.scheduler.submit(Submission(self._finish_early(), self.communicator))

    def _finish_early(self) -> Task[None]:
        early_flows, self._early_flows = sorted(self._early_flows, key=itemgetter(0)), []
        for _, flow, layout in early_flows:
            result = yield from finish(flow)
            self.store.merge(layout, result.state, result.update)

    def _reset_traffic(self, step: int) -> None:
        """Reset the scheduler's traffic at the first flow of ``step``."""
        if self._traffic_step != step:
            self._traffic_step = step
            self.scheduler.traffic = Traffic()

    def _aggregate(self, buckets: list[SourceBucket], step: int, index: int, last: bool) -> Task[list[Tensor]]:
        """Run the policy on ``buckets``, concatenated if there are several; return the update of each."""
        self._reset_traffic(step)
        if self.skipped:
            return [bucket.buffer.zero_() for bucket in buckets]
        layout, buffer = buckets[0].layout, buckets[0].buffer
        if len(buckets) > 1:
            key = tuple(bucket.layout for bucket in buckets)
            if key not in self._joined_layouts:
                self._joined_layouts = {key: join_layouts(key)}
            # torch.cat promotes to the widest of the dtypes
            layout, buffer = self._joined_layouts[key], torch.cat([bucket.buffer for bucket in buckets])
        if self.joined:
            buffer.zero_()
        bucket = self.bucket(buffer, layout, index, step, last)
        alone = len(buckets) == 1
        if self._in_users_graph:
            update = yield from run_in_users_graph(bucket, partial(self._run_policy, in_place=alone))
        elif self.graphs is not None and self._as_graphs and alone:
            update = yield from self.graphs.run(bucket, self.store, self._run_policy)
        else:
            update = yield from self._run_policy(bucket, in_place=alone)
        if alone and update.numel() == layout.numel:
            return [update]
        parts = update.split([bucket.layout.numel for bucket in buckets])
        return [copy_if_needed(part, bucket.buffer) for part, bucket in zip(parts, buckets, strict=True)]

    def _run_policy(self, bucket: Bucket, in_place: bool = True) -> Task[Tensor]:
        """Run the policy on a bucket and merge its state; return the update, ``in_place`` of the bucket if it fits."""
        buffer, layout = bucket.buffer, bucket.layout
        flow = self.policy.aggregate(bucket, self.store.part(layout))
        result = yield from advance(flow)
        if isinstance(result, Early):
            bucket.decide(lambda step, _: int(step))  # a graph has no rest that runs later
            self._early_flows.append((bucket.index, flow, layout))
            update = result.update
        else:
            update = self.store.merge(layout, result.state, result.update)
        return copy_if_needed(update, buffer) if in_place and update.numel() == layout.numel else update

    def exchange_forward_flags(self, flag: bool) -> list[bool]:
        """Return every rank's ``flag`` in rank order, such as: this rank has data. Collective, before a forward.

        Raises:
            StepError: another rank exchanges weights instead, because it began a backward.
        """
        rows = self.scheduler.run(self._exchange_rows(self.step, FORWARD, flag), self.control)
        return [value != 0.0 for value in rows[:, 1].tolist()]

    def _exchange_rows(self, step: int, kind: float, value: float) -> Task[Tensor]:
        """Gather the kind and value of every rank: float64 ``[ranks, 2]``."""
        self._reset_traffic(step)
        rows = yield AllGather(torch.tensor([kind, value], dtype=torch.float64, device="cpu"))
        forward = [rank for rank, kind in enumerate(rows[:, 0].tolist()) if kind == FORWARD]
        if forward and len(forward) < len(rows):
            raise StepError(
                f"ranks {forward} began a forward that aggregates while the others began a backward, or had no more "
                "data within join(). Make as many forwards on every rank, one before each backward; what one rank "
                "does alone belongs under torch.no_grad()."
            )
        return rows

    def _exchange_weights(self, step: int, kind: float, value: float) -> Task[None]:
        """Exchange the ranks' weights; in the first step decide whether later ones do so, too."""
        rows = yield from self._exchange_rows(step, kind, value)
        kinds, values = rows[:, 0].tolist(), rows[:, 1].tolist()
        unset = [rank for rank, kind in enumerate(kinds) if kind == UNSET]
        with_weight = [rank for rank, kind in enumerate(kinds) if kind == SET]
        if unset and with_weight:
            raise WeightError(
                f"sync.weight is set on ranks {with_weight} and not on ranks {unset}. Set it on every rank, "
                "before its first gradient, or on none."
            )
        self.weights = None
        if with_weight or JOINED in kinds:
            self.weights = check_weights(self.policy, values, self.control.size)
        if self.weighted is None and not self.joining:
            self.weighted = bool(with_weight)


def deliver(buckets: Sequence[SourceBucket], submission: Submission[list[Tensor]]) -> None:
    """Deliver each bucket's update, or None, after the flow of ``buckets`` has ended or failed."""
    for i, bucket in enumerate(buckets):
        bucket.deliver(None if submission.result is None else submission.result[i])


def copy_if_needed(update: Tensor, buffer: Tensor) -> Tensor:
    """Return ``update`` in the memory of ``buffer``, so that no other memory is held until the end of the step."""
    in_place = update.data_ptr() == buffer.data_ptr() and update.dtype == buffer.dtype
    return update if in_place else buffer.copy_(update)
