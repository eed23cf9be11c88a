"""Error feedback: the part of a gradient that a lossy policy did not send is added to the next gradient.

Rules:

1. ``p = g w/sum(w) + e``, ``e' = p - sent(p)`` (Seide 2014, section 2; Karimireddy 2019, algorithm 2).
   The sum of all updates and final residuals is the sum of all weighted gradients, but for what rule 3 loses.
2. The residual e is in float32 (float64 for float64 gradients), local to the rank and in units of the gradient.
3. A rank of weight 0 contributes zeros and keeps its residual. The second-stage error of the shard that it owns in
   that step is lost.
4. Memory: beside gradients and state, the new residual. It begins as the corrected gradient p, and a leaf subtracts
   what it sends as soon as that is known (:attr:`Aggregated.rest <hvdbridge.Aggregated.rest>`). The update reuses the
   gradient's memory (:meth:`Bucket.output <hvdbridge.Bucket.output>`). Messages take further memory, and so does
   ``sent`` if an inner policy returns it.
5. Users enable feedback by the wrapper ``ef(inner)`` or by the option ``ef`` of a leaf derived from
   :class:`WithFeedback`. Both hold the state ``{"residual": {name: tensor}, "inner": {...}}`` and give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hvdbridge.kernels.native import compiled
from hvdbridge.policy.base import Aggregated, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten

RESIDUAL: Mapping[str, Slot] = {"residual": Slot(local=True, gradient_units=True, reused=True)}
"""Description of the state that error feedback keeps."""


def residuals(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros of the parameters' shapes and devices, in float32 or wider."""
    wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in params.items()}
    return {name: torch.zeros(p.shape, dtype=wide[name], device=p.device) for name, p in params.items()}


def feedback(bucket: Bucket, state: State, aggregate: Callable[[Bucket, State], Flow]) -> Flow:
    """Run ``aggregate`` on the weighted bucket plus the residual, and store the part it did not send.

    Args:
        bucket: the gradients; overwritten.
        state: ``{"residual": {name: tensor}, "inner": state of aggregate}``; the new state has the same form.
        aggregate: ``aggregate`` of an additive policy.
    """
    excluded = bucket.excluded
    corrected = _corrected(bucket, state["residual"])
    if excluded:
        corrected.buffer.zero_()
    result = yield from aggregate(corrected, state["inner"])
    residual = state["residual"] if excluded else Views(bucket.layout, result.left_of(corrected))
    return Aggregated(result.update, state={"residual": residual, "inner": result.state})


def _corrected(bucket: Bucket, residual: Mapping[str, Tensor]) -> Bucket:
    """Return a bucket with the weighted gradient plus the residual; the gradient's memory becomes its ``spare``."""
    gradient, error = bucket.buffer, flatten(residual, bucket.layout)
    factor = 1.0 if bucket.scaled else bucket.share
    both_float32 = gradient.dtype == error.dtype == torch.float32 and gradient.shape == error.shape
    native = compiled(gradient, error) if both_float32 else None
    if native is None or isinstance(factor, Tensor) or factor == 0.0:
        wide = torch.promote_types(gradient.dtype, error.dtype)
        total = bucket.fresh(error) if error.dtype == wide else torch.empty_like(gradient)
        torch.add(bucket.weighted().buffer, error, out=total)
    else:
        total = bucket.fresh(error)  # equal bits, in one pass over memory
        native.weigh_and_add(gradient.data_ptr(), factor, error.data_ptr(), total.numel(), total.data_ptr())
    return replace(bucket, buffer=total, scaled=True, needs_sent=True, spare=gradient)


class WithFeedback(Policy):
    """Base of a leaf policy with the option ``ef``: ``leaf(ef=true)`` equals ``ef(leaf(ef=false))``.

    The leaf is a frozen dataclass with ``ef: bool`` as its last field, so that positional options keep their order. It
    implements :meth:`compress` and, if it has state, :meth:`fresh` and ``slots``. It must not define ``additive``. Its
    state is ``{"residual": {...}, "inner": fresh}`` with feedback, and ``fresh`` without.
    """

    ef: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.slots = {**RESIDUAL, **cls.slots}

    @property
    def additive(self) -> bool:
        """False with feedback: a second feedback around this policy would add each error twice."""
        return not self.ef

    def inners(self) -> Mapping[str, Policy]:
        """With feedback, the same leaf without feedback, whose state is under ``inner``."""
        return {"inner": _without(self)} if self.ef else super().inners()

    def init(self, params: Mapping[str, Tensor]) -> State:
        own = self.fresh(params)
        return {"residual": residuals(params), "inner": own} if self.ef else own

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self.ef:
            return (yield from feedback(bucket, state, self.compress))
        return (yield from self.compress(bucket, state))

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        """Return the leaf's own initial state for these parameters, without the residual."""
        return {}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        """Aggregate as an additive policy: the leaf's :meth:`Policy.aggregate`, with its own state.

        It calls ``bucket.weighted()``. If ``bucket.needs_sent`` it returns ``rest`` or ``sent``.
        """
        raise NotImplementedError


@lru_cache(maxsize=256)
def _without(policy: WithFeedback) -> WithFeedback:
    return replace(policy, ef=False)  # type: ignore[type-var]  # the leaf is a dataclass, this base is not
