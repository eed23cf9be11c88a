"""Error feedback: what a lossy policy did not send is added to its next gradient. Written once.

Rules:

1. ``p = g w/sum(w) + e``, ``e' = p - sent(p)`` (Seide 2014, section 2; Karimireddy 2019, algorithm 2).
   Updates plus final residuals sum to the inputs.
2. The residual is in float32 (float64 for float64 gradients), local to the rank and in units of the gradient.
3. A rank of weight 0 contributes nothing and keeps its residual as it is; the second-stage error of a shard
   that it owns in that step is then lost.
4. Memory: beside gradients and state there is the new residual, which begins as the corrected gradient and from
   which a leaf takes off what it sends as soon as it knows (:attr:`Aggregated.rest
   <hvdbridge.Aggregated.rest>`). The update takes the gradient's memory (:meth:`Bucket.output
   <hvdbridge.Bucket.output>`). The rest are messages, and ``sent`` of an inner policy that returns it.
5. Two ways lead here: the wrapper ``ef(inner)``, and the option ``ef`` of a leaf that is :class:`WithFeedback`.
   Both hold the same state, ``{"residual": {name: tensor}, "inner": {...}}``, and give the same bits.
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
"""The slot that feedback keeps."""


def residuals(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros of the parameters' shapes, in float32 or wider."""
    wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in params.items()}
    return {name: torch.zeros(p.shape, dtype=wide[name], device=p.device) for name, p in params.items()}


def feedback(bucket: Bucket, state: State, aggregate: Callable[[Bucket, State], Flow]) -> Flow:
    """Run ``aggregate`` on the bucket plus what is left over, and keep what it did not send.

    Args:
        state: ``{"residual": {name: tensor}, "inner": state of aggregate}``; the same comes back.
        aggregate: of an additive policy.
    """
    excluded = bucket.weight == 0.0
    corrected = _corrected(bucket, state["residual"])
    if excluded:
        corrected.buffer.zero_()
    result = yield from aggregate(corrected, state["inner"])
    residual = state["residual"] if excluded else Views(bucket.layout, result.left_of(corrected))
    return Aggregated(result.update, state={"residual": residual, "inner": result.state})


def _corrected(bucket: Bucket, residual: Mapping[str, Tensor]) -> Bucket:
    """The weighted bucket plus what is left over; memory of the former is the spare of the latter."""
    gradient, left = bucket.buffer, flatten(residual, bucket.layout)
    factor = 1.0 if bucket.scaled else bucket.factor
    alike = gradient.dtype == left.dtype == torch.float32 and gradient.shape == left.shape
    if factor == 0.0 or not (alike and (native := compiled(gradient, left))):
        wide = torch.promote_types(gradient.dtype, left.dtype)
        total = bucket.fresh(left) if left.dtype == wide else torch.empty_like(gradient)
        torch.add(bucket.weighted().buffer, left, out=total)
    else:
        total = bucket.fresh(left)  # the same bits, in one pass
        native.weigh_and_add(gradient.data_ptr(), factor, left.data_ptr(), total.numel(), total.data_ptr())
    return replace(bucket, buffer=total, scaled=True, needs_sent=True, spare=gradient)


class WithFeedback(Policy):
    """Base of a leaf with the option ``ef``: with it the leaf is what ``ef(leaf(ef=false))`` is.

    The leaf is a frozen dataclass with the field ``ef: bool`` (last, so that positional options stay what they
    are). It implements :meth:`compress` and, where it has state, :meth:`fresh` and ``slots``; it says nothing of
    ``additive``. Its state is ``{"residual": {...}, "inner": fresh}`` with feedback, and ``fresh`` without.
    """

    ef: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.slots = {**RESIDUAL, **cls.slots}

    @property
    def additive(self) -> bool:
        """Nothing is lost with feedback, so a second one around it would add every error twice."""
        return not self.ef

    def inners(self) -> Mapping[str, Policy]:
        """With feedback, the same leaf without it: where its state stands."""
        return {"inner": _without(self)} if self.ef else super().inners()

    def init(self, params: Mapping[str, Tensor]) -> State:
        own = self.fresh(params)
        return {"residual": residuals(params), "inner": own} if self.ef else own

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if self.ef:
            return (yield from feedback(bucket, state, self.compress))
        return (yield from self.compress(bucket, state))

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        """The leaf's own state for these parameters."""
        return {}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        """The leaf's ``aggregate``, additive: it calls ``bucket.weighted()``, and says what it did not send where
        ``bucket.needs_sent``. ``state`` is its own, as :meth:`fresh` began it."""
        raise NotImplementedError


@lru_cache(maxsize=256)
def _without(policy: WithFeedback) -> WithFeedback:
    return replace(policy, ef=False)  # type: ignore[type-var]  # the leaf is a dataclass, this base is not
