"""One step late: the aggregate of a step is applied in the next, so that no one waits for communication.

Rules:

1. Step t delivers the aggregate of step t - 1 at once, and zeros in the first. Its own gradient travels in the
   background while the optimizer, the next forward and the next backward run.
2. Memory: beside what the inner policy needs, a copy of the bucket, which outlives the step.
3. What is held is replicated state like any other: a checkpoint moves, and flush() hands out the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies.dense import MEAN
from hvdbridge.policy.base import Aggregated, Early, Flow, Policy, Slot, State, finish
from hvdbridge.policy.bucket import Bucket, Views, flatten


@dataclass(frozen=True)
class Delayed(Policy):
    """``u_t = inner(g_{t-1})``, ``u_0 = 0``: gradients one step old (Ho 2013, section 3: staleness 1).

    The first step's update is zeros; an optimizer with momentum or weight decay still moves in it. After the last
    step ``sync.flush()`` puts the last aggregate into ``p.grad`` for one more ``optimizer.step()``. A non-finite
    gradient arrives one step late, too, and a step whose weights add up to zero holds what is held.

    State: ``held``, the size of the gradients, replicated. A copy of the gradients lives while they travel.
    What the inner policy sends is what this sends.
    """

    inner: Policy = MEAN
    # A NaN that is held must be delivered and then replaced, so no parameter keeps its old one.
    slots: ClassVar[Mapping[str, Slot]] = {"held": Slot(gradient_units=True, guarded=False, held=True)}
    additive = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if has_delay(self.inner):
            raise ConfigurationError("Delayed cannot wrap Delayed: what is one step late already cannot wait once more")

    def init(self, params: Mapping[str, Tensor]) -> State:
        held = {name: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for name, p in params.items()}
        return {"held": held, "inner": self.inner.init(params)}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        mine = bucket.with_buffer(bucket.buffer.clone())  # the caller takes its buffer back
        yield Early(flatten(state["held"], bucket.layout))
        result = yield from finish(self.inner.aggregate(mine, state["inner"]))
        fresh = Views(bucket.layout, result.update)
        return Aggregated(result.update, state={"held": fresh, "inner": result.state})


def has_delay(policy: Policy) -> bool:
    """Whether a :class:`Delayed` is anywhere in it."""
    return isinstance(policy, Delayed) or any(map(has_delay, policy.inners().values()))
