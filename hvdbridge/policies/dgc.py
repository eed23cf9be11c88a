"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018): momentum inside the compression.

Rules:

1. Momentum is accumulated on each rank before elements are chosen (section 3.2), so the optimizer behind this
   policy must be plain SGD without momentum.
2. What was sent is removed from the accumulated gradient and from the momentum (factor masking, section 3.3).
3. It is its own error feedback: ``ef(dgc)`` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.kernels.norm import clip_factor
from hvdbridge.kernels.select import largest
from hvdbridge.policies.combining import participants
from hvdbridge.policies.feedback import residuals
from hvdbridge.policies.shards import accumulator
from hvdbridge.policies.sparse import gathered_sum, plan_of
from hvdbridge.policy.base import Aggregated, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class Dgc(Policy):
    """Sends the largest elements of a local gradient that was accumulated with momentum.

    ::

        u = momentum u + g w/sum(w)        momentum correction
        v = v + u                          (nesterov: u = momentum (u + g), v = v + u + g)
        send the k = ceil(ratio n) elements of v of largest magnitude; where sent, u = v = 0

    The update is the sum over ranks of what was sent. State: ``momentum`` and ``accumulated``, float32, of this
    rank. A rank of weight 0 sends nothing and keeps both. On the wire: as ``topk`` of the present ratio.
    Memory: the new momentum and accumulated gradient stand beside the old ones while a bucket travels (with ``clip``
    all parameters are one), and so do N ranks' messages, which are longer in the warm-up.

    Attributes:
        ratio: share of the elements that travel after the warm-up.
        momentum: in place of the optimizer's.
        nesterov: the other form of momentum.
        clip: the norm to which this rank's whole gradient is clipped, times ``N ** -0.5`` (of N ranks that have
            a weight), before it is accumulated (local gradient clipping, section 3.3). The flow then waits for the
            last gradient.
        warmup: steps in which the ratio falls from 1/4 by factors of 4 to ``ratio``, in equal stages (section 3.3).
    """

    ratio: float = option(0.001, above=0, at_most=1)
    momentum: float = option(0.9, at_least=0, below=1)
    nesterov: bool = False
    clip: float | None = option(None, above=0)
    warmup: int = option(0, at_least=0)
    rounds = 1
    slots: ClassVar[Mapping[str, Slot]] = {
        "momentum": Slot(local=True, gradient_units=True, reused=True),
        "accumulated": Slot(local=True, gradient_units=True, reused=True),
    }

    @property
    def scope(self) -> Literal["bucket", "step"]:
        """The norm is that of the whole gradient."""
        return "bucket" if self.clip is None else "step"

    def ratio_at(self, step: int) -> float:
        """The share of the elements that travels in a step.

        >>> [Dgc(0.01, warmup=6).ratio_at(step) for step in range(7)]
        [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01]
        """
        if step >= self.warmup:
            return self.ratio
        stages = max(1, math.ceil(math.log(1 / self.ratio, 4) - 1e-9) - 1)
        return max(self.ratio, 0.25 ** (1 + step * stages // self.warmup))

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"momentum": residuals(params), "accumulated": residuals(params)}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        layout, dtype = bucket.layout, accumulator(bucket.buffer.dtype)
        plan = plan_of(bucket, self.ratio_at(bucket.step))
        if bucket.weight == 0.0:
            indices = torch.zeros(plan.total, dtype=torch.int64, device=bucket.buffer.device)
            values = torch.zeros(plan.total, dtype=dtype, device=bucket.buffer.device)
            return Aggregated((yield from gathered_sum(bucket, indices, values)))
        gradient = bucket.weighted().buffer.to(dtype)
        if self.clip is not None:
            # The limit of this rank's own gradient, before its weight
            limit = self.clip * len(participants(bucket)) ** -0.5 * bucket.factor
            gradient.mul_(clip_factor(gradient, bucket.layout, limit))
        momentum, accumulated = flatten(state["momentum"], layout), flatten(state["accumulated"], layout)
        new = bucket.fresh(momentum)
        if self.nesterov:
            momentum = torch.add(momentum, gradient, out=new).mul_(self.momentum)
            accumulated = torch.add(accumulated, momentum, out=bucket.fresh(accumulated)).add_(gradient)
        else:
            momentum = torch.mul(momentum, self.momentum, out=new).add_(gradient)
            accumulated = torch.add(accumulated, momentum, out=bucket.fresh(accumulated))
        indices, values = largest(accumulated, plan)
        # An empty slot points at element 0 but must not clear it: it subtracts 0 and multiplies by 1.
        accumulated.index_add_(0, indices, values, alpha=-1)
        momentum.scatter_reduce_(0, indices, (values == 0).to(dtype), "prod")
        held = {"momentum": Views(layout, momentum), "accumulated": Views(layout, accumulated)}
        return Aggregated((yield from gathered_sum(bucket, indices, values)), state=held)
