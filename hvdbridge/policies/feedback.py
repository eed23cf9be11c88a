"""Error feedback: what a lossy policy did not send is added to its next gradient. Written once.

Rules:

1. ``p = g w/sum(w) + e``, ``e' = p - sent(p)`` (Seide 2014, section 2; Karimireddy 2019, algorithm 2).
   Updates plus final residuals sum to the inputs.
2. The residual is in float32 (float64 for float64 gradients), local to the rank and in units of the gradient.
3. A rank of weight 0 contributes nothing and keeps its residual as it is; the second-stage error of a shard
   that it owns in that step is then nobody's.
4. Memory: while a bucket travels, its new residual, what was sent and the update are there at once, beside gradients
   and state: three buckets, and what the inner policy needs for its messages, one or two more.
5. Two ways lead here: the wrapper ``ef(inner)``, and the option ``ef`` of a leaf that is :class:`WithFeedback`.
   Both hold the same state, ``{"residual": {name: tensor}, "inner": {...}}``, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hvdbridge.bucket import Bucket, Views
from hvdbridge.policy import Aggregated, Flow, Policy, Slot, State

RESIDUAL: Mapping[str, Slot] = {"residual": Slot(local=True, gradient_units=True)}
"""The slot that feedback keeps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chosen(Aggregated):
    """What :meth:`WithFeedback.compress` returns where few elements were sent: which, in the place of ``sent``.

    Attributes:
        indices, values: ``sent`` is zero but at ``indices``; an empty slot is (0, 0).
    """

    indices: Tensor
    values: Tensor

    def dense(self) -> Tensor:
        """``sent``, flat, in the type of the values."""
        flat = torch.zeros(self.update.numel(), dtype=self.values.dtype, device=self.values.device)
        return flat.index_add_(0, self.indices, self.values) if self.indices.numel() else flat


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
    corrected = replace(bucket.weighted().plus(state["residual"]), needs_sent=True)
    if excluded:
        corrected.buffer.zero_()
    result = yield from aggregate(corrected, state["inner"])
    residual = state["residual"]
    if excluded:
        pass
    elif isinstance(result, Chosen):
        if result.indices.numel():
            corrected.buffer.index_add_(0, result.indices, result.values, alpha=-1)
        residual = Views(bucket.layout, corrected.buffer)
    else:
        assert result.sent is not None, f"{aggregate} is additive but said not what it sent"
        residual = Views(bucket.layout, corrected.buffer.sub_(result.sent))
    return Aggregated(result.update, state={"residual": residual, "inner": result.state})


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
        result = yield from self.compress(bucket, state)
        if isinstance(result, Chosen):
            return Aggregated(result.update, result.dense() if bucket.needs_sent else None, result.state)
        return result

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        """The leaf's own state for these parameters."""
        return {}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        """The leaf's ``aggregate``, additive: it calls ``bucket.weighted()``, and says what it sent where
        ``bucket.needs_sent`` (or always, as :class:`Chosen`). ``state`` is its own, as :meth:`fresh` began it."""
        raise NotImplementedError


@lru_cache(maxsize=256)
def _without(policy: WithFeedback) -> WithFeedback:
    return replace(policy, ef=False)  # type: ignore[type-var]  # the leaf is a dataclass, this base is not
