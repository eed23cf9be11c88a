"""What an aggregation policy is: a coroutine over collectives that never learns who executes them.

Rules:

1. ``aggregate`` yields :class:`~hvdbridge.collectives.Collective` requests, is sent back one tensor for
   each, and returns :class:`Aggregated`. What it yields depends only on what all ranks know alike.
2. It does not change ``state`` in place: the driver keeps the old state of each parameter whose
   update is not finite.
3. Every rank returns the same bits. Arithmetic after the last collective is element-wise, or is done by
   one owner and sent. Shared randomness is keyed, never drawn in sequence.
4. State is a tree of dicts that mirrors the tree of policies; its leaves map parameter names to tensors.
5. No ``.item()`` and no synchronize on CUDA tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from hvdbridge.bucket import Bucket
from hvdbridge.collectives import Collective, relay
from hvdbridge.errors import WeightError
from hvdbridge.options import check

State = Mapping[str, Any]
"""A tree of dicts: ``{"residual": {name: tensor}, "inner": {...}}``."""


@dataclass(frozen=True, eq=False)
class Aggregated:
    """What a policy made of a bucket.

    Attributes:
        update: flat, in the bucket's layout, equal bits on all ranks. Becomes ``p.grad``.
        sent: flat; what the other ranks decoded of this rank's contribution (the sum over ranks of
            ``sent`` is ``update``). None where ``bucket.needs_sent`` is False.
        state: the new state of this bucket's parameters, same tree as was passed in; None = unchanged.
    """

    update: Tensor
    sent: Tensor | None = None
    state: State | None = None


Flow = Generator[Collective, Tensor, Aggregated]
"""``tensor = yield request`` until ``return Aggregated(...)``."""

Exchange = Generator[Collective, Tensor, Tensor]
"""A part of a flow that ends in one tensor."""


def rewrite(flow: Flow, exchange: Callable[[Collective], Exchange]) -> Flow:
    """``flow`` with ``exchange(request)`` in the place of each request: how a wrapper changes what travels."""
    return relay(flow, exchange)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Slot:
    """What a leaf of a policy's state is.

    Attributes:
        local: differs between ranks (an error-feedback residual) instead of being replicated.
        gradient_units: scales with the loss, so it is rescaled when ``sync.loss_scale`` changes.
    """

    local: bool = False
    gradient_units: bool = False


class Policy:
    """Base class: a frozen dataclass with :meth:`aggregate`. Its fields are the options of its spec string.

    A leaf states what it is as plain class attributes (``additive = True``); a wrapper says nothing and
    takes these from its inner policies.
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    """The leaves of its own state (not of its inner policies')."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def scope(self) -> Literal["bucket", "step"]:
        """``"bucket"``: ``aggregate`` runs per bucket while backward goes on; ``"step"``: once, with one
        bucket of all gradients. A wrapper takes the wider scope of its inners."""
        return "step" if any(p.scope == "step" for p in self.inners().values()) else "bucket"

    @property
    def additive(self) -> bool:
        """The update is the sum over ranks of ``sent``, and a lossless policy sends its weighted input
        (what :class:`~hvdbridge.policies.wrappers.ErrorFeedback` needs)."""
        inners = self.inners().values()
        return bool(inners) and all(p.additive for p in inners)

    @property
    def deterministic(self) -> bool:
        """The same inputs give the same bits, whatever the seed."""
        return all(p.deterministic for p in self.inners().values())

    @property
    def unequal_weights(self) -> bool:
        """Whether positive weights may differ between ranks."""
        return all(p.unequal_weights for p in self.inners().values())

    def inners(self) -> Mapping[str, Policy]:
        """The inner policies of a wrapper, by the key of their state; empty for a leaf."""
        if not is_dataclass(self):
            return {}
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Policy)}

    def init(self, params: Mapping[str, Tensor]) -> State:
        """Fresh state for these parameters (values are not read, only shape, dtype and device)."""
        return {key: inner.init(params) for key, inner in self.inners().items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """Combine the ranks' gradients of one bucket."""
        raise NotImplementedError


def check_weights(policy: Policy, weights: Sequence[float], size: int) -> tuple[float, ...]:
    """The ranks' weights as doubles; a total of zero is not an error (the step is skipped).

    Raises:
        WeightError: not one per rank, negative, not finite, or unequal where ``policy`` refuses that.

    >>> check_weights(Policy(), [3, 1], 2)
    (3.0, 1.0)
    """
    values = tuple(float(w) for w in weights)
    if len(values) != size:
        raise WeightError(f"{size} ranks need {size} weights, got {len(values)}")
    for rank, weight in enumerate(values):
        if not (math.isfinite(weight) and weight >= 0):
            raise WeightError(f"rank {rank} has weight {weight}: a weight is finite and not negative")
    if not math.isfinite(sum(values)):
        raise WeightError(f"the sum of the weights {list(values)} is not finite")
    positive = {weight for weight in values if weight > 0}
    if len(positive) > 1 and not policy.unequal_weights:
        raise WeightError(
            f"{type(policy).__name__} gives unequal weights no meaning, got {list(values)}. "
            "Use equal ones; a weight of 0 excludes a rank."
        )
    return values
