"""One step's buckets through a policy: weights are exchanged, flows run, state is kept.

Rules:

1. A step is ``begin``, then ``submit`` per bucket in index order (the last one marked), then ``end``. All
   ranks do the same. Flows see the weights because the driver runs the exchange first.
2. Weights travel on the host-side control communicator. The first step always exchanges; if no rank set one,
   none exchanges again, and a rank that sets one later is an error.
3. A total weight of zero skips the step: updates are zeros, no state changes, nothing else travels.
4. A policy of scope "step" gets one bucket of all gradients when the last is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdbridge.bucket import Bucket, Layout, join_layouts, number_blocks
from hvdbridge.collectives import AllGather
from hvdbridge.communicators.base import Communicator
from hvdbridge.driver import Driver, Pending, Task, Traffic
from hvdbridge.errors import StepError, WeightError
from hvdbridge.policy import Policy, check_weights
from hvdbridge.state import StateStore

UNSET, SET, JOINED = 0.0, 1.0, 2.0
Deliver = Callable[[Tensor | None], None]


@dataclass(eq=False)
class Piece:
    """A source's bucket: flat ``buffer`` in, its update out through ``deliver`` (None after a failure)."""

    layout: Layout
    buffer: Tensor
    deliver: Deliver


class Aggregator:
    """Joins a policy, its state and a driver; knows nothing of where gradients come from."""

    def __init__(
        self,
        policy: Policy,
        params: Mapping[str, Tensor],
        communicator: Communicator,
        control: Communicator,
        driver: Driver,
        seed: int = 0,
        weighted: bool | None = None,
    ) -> None:
        self.policy = policy
        self.communicator = communicator
        self.control = control
        self.driver = driver
        self.store = StateStore(policy, params)
        self.seed = seed
        self.step = 0
        self.weight: float | None = None
        self.weighted = weighted
        self.joining = False  # within join(): exchange always
        self.joined = False  # this rank has run out of data and shadows the others
        self.joined_weight = 0.0  # what it then counts for; other than 0, its gradients are zeros
        self.weights: tuple[float, ...] | None = None
        self.loss_scale = 1.0
        self.last_traffic = Traffic()
        self._held_scale = 1.0
        self._blocks = number_blocks({name: tensor.shape for name, tensor in params.items()})
        self._pending: list[Pending[Any]] = []
        self._pieces: list[Piece] = []
        self._index = 0  # of the next bucket
        self._joint: dict[tuple[Layout, ...], Layout] = {}

    def use(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        """Take another policy, before the first step.

        Raises:
            StepError: a step has been made.
        """
        if self.step or self._pending:
            raise StepError("a policy cannot be replaced after the first step: its state would be lost")
        self.policy, self.store = policy, StateStore(policy, params)

    @property
    def skipped(self) -> bool:
        """Whether the weights of the current step add up to zero."""
        return self.weights is not None and sum(self.weights) == 0.0

    def begin(self) -> None:
        """Start a step: exchange weights where that is due.

        Raises:
            WeightError: this rank set a weight although all agreed in the first step to set none.
        """
        self.driver.traffic = Traffic()
        self._pending.clear()
        self._pieces.clear()
        self._index = 0
        if self.loss_scale != self._held_scale:
            self.store.rescale(self.loss_scale / self._held_scale)
            self._held_scale = self.loss_scale
        if self.weighted is False and not self.joining:
            if self.weight is not None:
                raise WeightError(
                    f"rank {self.control.rank}: sync.weight was set to {self.weight} although no rank had set one in "
                    "the first step, so weights are no longer exchanged. "
                    "Pass weighted=True to GradientSynchronizer."
                )
            self.weights = None
            return
        self._pending.append(self.driver.submit(Pending(self._exchange(), self.control, then=self._take)))

    def submit(self, piece: Piece, last: bool) -> None:
        """Hand in the next bucket; flows start here for policies of scope "bucket"."""
        if self.policy.scope == "bucket":
            self._start([piece], last)
            return
        self._pieces.append(piece)
        if last:
            self._start(self._pieces, last)
            self._pieces = []

    def end(self) -> None:
        """Wait for all flows of this step.

        Raises:
            BaseException: the driver's failure, the same cause on all ranks.
        """
        if self.driver.failure is not None:
            raise self.driver.failure
        self.driver.flush()
        for pending in self._pending:
            pending.wait()
        self.driver.order()
        self._pending.clear()
        self.last_traffic = self.driver.traffic
        self.step += 1

    def _start(self, pieces: Sequence[Piece], last: bool) -> None:
        def settled(pending: Pending[list[Tensor]]) -> None:
            for i, piece in enumerate(pieces):
                piece.deliver(None if pending.result is None else pending.result[i])

        pieces = list(pieces)
        flow = self._aggregate(pieces, self.step, self._index, last)
        self._index += 1
        self._pending.append(self.driver.submit(Pending(flow, self.communicator, overlaps=True, settled=settled)))

    def _aggregate(self, pieces: list[Piece], step: int, index: int, last: bool) -> Task[list[Tensor]]:
        if self.skipped:
            return [piece.buffer.zero_() for piece in pieces]
        layout, buffer = self._join(pieces)
        if self.joined:
            buffer.zero_()
        bucket = Bucket(
            buffer, layout, index, step, self.seed, self.communicator.rank, self.communicator.size,
            self.weights, blocks=self._blocks, groups=self.communicator.places(), last=last,
        )  # fmt: skip
        result = yield from self.policy.aggregate(bucket, self.store.part(layout))
        if result.state is not None:
            self.store.merge(layout, result.state, result.update)
        if len(pieces) == 1:
            return [result.update.to(pieces[0].buffer.dtype)]
        parts = result.update.split([piece.layout.numel for piece in pieces])
        return [part.to(piece.buffer.dtype) for part, piece in zip(parts, pieces, strict=True)]

    def _join(self, pieces: list[Piece]) -> tuple[Layout, Tensor]:
        if len(pieces) == 1:
            return pieces[0].layout, pieces[0].buffer
        key = tuple(piece.layout for piece in pieces)
        if key not in self._joint:
            self._joint = {key: join_layouts(key)}
        dtype = torch.float32
        for piece in pieces:
            dtype = torch.promote_types(dtype, piece.buffer.dtype)
        return self._joint[key], torch.cat([piece.buffer.to(dtype) for piece in pieces])

    def _exchange(self) -> Task[Tensor]:
        if self.joined:
            mine = [JOINED, self.joined_weight]
        else:
            mine = [UNSET, 1.0] if self.weight is None else [SET, float(self.weight)]
        return (yield AllGather(torch.tensor(mine, dtype=torch.float64)))

    def _take(self, rows: Tensor) -> None:
        marks, values = rows[:, 0].tolist(), rows[:, 1].tolist()
        unset = [rank for rank, mark in enumerate(marks) if mark == UNSET]
        given = [rank for rank, mark in enumerate(marks) if mark == SET]
        if unset and given:
            raise WeightError(
                f"sync.weight is set on ranks {given} and not on ranks {unset}. Set it on every rank, "
                "before its first gradient, or on none."
            )
        if given or JOINED in marks:
            self.weights = check_weights(self.policy, values, self.control.size)
        else:
            self.weights = None
        if self.weighted is None and not self.joining:
            self.weighted = bool(given)
