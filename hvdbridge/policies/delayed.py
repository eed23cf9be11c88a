"""Delayed aggregation: each step applies the previous step's aggregate, so that no step waits for communication.

Rules:

1. Step t delivers the aggregate of step t - 1 immediately, and zeros in the first step. The inner policy aggregates the
   gradient of step t in the background, during the optimizer's step and the next forward and backward.
2. Memory: beside the inner policy's memory, a copy of the bucket that outlives the step.
3. The held aggregate is replicated state: checkpoints contain it, and flush() returns the last one.
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
    """Apply each aggregate one step late: ``u_t = inner(g_{t-1})``, ``u_0 = 0`` (Ho 2013, section 3, staleness 1).

    The first update is zeros; an optimizer with momentum or weight decay still changes parameters in this step. After
    the last step, ``sync.flush()`` puts the last aggregate into ``p.grad`` for one more ``optimizer.step()``. A
    non-finite gradient arrives one step late, too. A step whose weights sum to zero leaves the held aggregate as it is.

    State: ``held``, the last aggregate, the size of the gradients, equal on all ranks. Memory: also a copy of the
    gradients in flight. Weights and bytes on the wire are those of ``inner``.

    Source:
        Ho et al., *More effective distributed ML via a stale synchronous parallel parameter server*, 2013, section 3.

    When to choose:
        Communication takes up to a whole step, and updates may be one step old.

    Attributes:
        inner: the policy that aggregates the gradients.

    Raises:
        ConfigurationError: ``inner`` is or contains another :class:`Delayed`.
    """

    inner: Policy = MEAN
    # A held NaN is delivered and must then be replaced, so the slot is not guarded.
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
        own_bucket = bucket.with_buffer(bucket.buffer.clone())  # the caller reuses its buffer after Early
        yield Early(flatten(state["held"], bucket.layout))
        result = yield from finish(self.inner.aggregate(own_bucket, state["inner"]))
        held = Views(bucket.layout, result.update)
        return Aggregated(result.update, state={"held": held, "inner": result.state})


def has_delay(policy: Policy) -> bool:
    """Return whether ``policy`` is a :class:`Delayed` or contains one."""
    return isinstance(policy, Delayed) or any(map(has_delay, policy.inners().values()))
