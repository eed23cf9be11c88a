"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018): momentum inside the compression.

Rules:

1. Each rank accumulates momentum before it chooses elements (section 3.2), so the optimizer must be plain SGD
   without momentum.
2. Sent elements are cleared in the accumulated gradient and in the momentum (momentum factor masking, section 3.3).
3. The accumulated gradient is the error feedback: ``ef(dgc)`` is refused.
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
    """Send the largest elements of a local gradient accumulated with momentum (Lin 2018, sections 3.2 and 3.3).

    ::

        u = momentum u + g w/sum(w)        momentum correction
        v = v + u                          (nesterov: u = momentum (u + g), v = v + u + g)
        send the k = ceil(ratio n) elements of v of largest magnitude; where sent, u = v = 0

    The update is the sum over ranks of the sent elements. Use plain SGD without momentum as the optimizer.

    State: ``momentum`` (u) and ``accumulated`` (v), of this rank, each the size of the parameters in float32 (float64
    for float64). A rank of weight 0 sends nothing and keeps both. On the wire: as ``topk`` of the current ratio.
    Memory: the old and the new state of each bucket in flight, and the messages of all N ranks, which are longer during
    the warm-up. With ``clip`` all parameters form one bucket.

    Source:
        Lin et al., *Deep gradient compression*, 2018, sections 3.2 and 3.3.

    When to choose:
        The recipe is SGD with momentum: the policy applies the momentum, so construct the optimizer without. Ranks are
        few, and the network is slow.

    Attributes:
        ratio: share of the elements that are sent after the warm-up.
        momentum: coefficient of the momentum, which replaces the optimizer's.
        nesterov: use Nesterov momentum.
        clip: this rank's whole gradient is clipped to the L2 norm ``clip * N ** -0.5`` before it is accumulated, where
            N counts the ranks of positive weight (local gradient clipping, section 3.3). Aggregation then begins after
            the last gradient of the step. A GradScaler's scale multiplies the gradient. None: no clipping.
        warmup: number of steps in which the ratio falls from 1/4 to ``ratio`` by factors of 4, in equal stages
            (section 3.3).
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
        """``"step"`` with ``clip``, whose norm needs the whole gradient."""
        return "bucket" if self.clip is None else "step"

    def ratio_at(self, step: int) -> float:
        """Return the share of the elements that is sent in a step.

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
        plan = plan_of(bucket, bucket.decide(lambda step, _: self.ratio_at(step)))
        if bucket.excluded:
            indices = torch.zeros(plan.total, dtype=torch.int64, device=bucket.buffer.device)
            values = torch.zeros(plan.total, dtype=dtype, device=bucket.buffer.device)
            return Aggregated((yield from gathered_sum(bucket, indices, values)))
        gradient = bucket.weighted().buffer.to(dtype)
        if self.clip is not None:
            # `clip` limits the unweighted gradient; `gradient` is already multiplied by the rank's factor.
            limit = self.clip * len(participants(bucket)) ** -0.5 * bucket.share
            gradient.mul_(clip_factor(gradient, bucket.layout, limit))
        momentum, accumulated = flatten(state["momentum"], layout), flatten(state["accumulated"], layout)
        out = bucket.fresh(momentum)
        if self.nesterov:
            momentum = torch.add(momentum, gradient, out=out).mul_(self.momentum)
            accumulated = torch.add(accumulated, momentum, out=bucket.fresh(accumulated)).add_(gradient)
        else:
            momentum = torch.mul(momentum, self.momentum, out=out).add_(gradient)
            accumulated = torch.add(accumulated, momentum, out=bucket.fresh(accumulated))
        indices, values = largest(accumulated, plan)
        # An empty slot (index 0, value 0) must not clear element 0: it subtracts 0 and multiplies by 1.
        accumulated.index_add_(0, indices, values, alpha=-1)
        momentum.scatter_reduce_(0, indices, (values == 0).to(dtype), "prod")
        new_state = {"momentum": Views(layout, momentum), "accumulated": Views(layout, accumulated)}
        return Aggregated((yield from gathered_sum(bucket, indices, values)), state=new_state)
