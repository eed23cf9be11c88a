"""What an aggregation policy is. Written once, as a coroutine over collectives; it never learns who executes them.

Rules:

1. ``aggregate`` yields :class:`~hvdbridge.collectives.Collective` requests, is sent back one tensor for
   each, and returns :class:`Aggregated`. What it yields depends only on what all ranks know alike.
2. It does not change ``state`` in place: the driver keeps the old state of each parameter whose
   update is not finite.
3. Every rank returns the same bits. Arithmetic after the last collective is element-wise, or is done by one owner
   and sent. Shared randomness is keyed, never drawn in sequence.
4. State is a tree of dicts that mirrors the tree of policies; its leaves map parameter names to tensors.
5. No ``.item()`` and no synchronize on CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from hvdbridge.bucket import Bucket
from hvdbridge.collectives import Collective

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

    Class attributes:
        scope: ``"bucket"``: ``aggregate`` runs per bucket while backward goes on; ``"step"``: once, with one
            bucket of all gradients. A wrapper takes the wider scope of its inners.
        additive: the update is the sum over ranks of ``sent`` (what :class:`ErrorFeedback` needs).
        deterministic: the same inputs give the same bits, whatever the seed.
        unequal_weights: whether positive weights may differ between ranks.
        slots: the leaves of its own state (not of its inner policies').
    """

    additive: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    unequal_weights: ClassVar[bool] = True
    slots: ClassVar[Mapping[str, Slot]] = {}

    @property
    def scope(self) -> Literal["bucket", "step"]:
        return "step" if any(p.scope == "step" for p in self.inners().values()) else "bucket"

    def inners(self) -> Mapping[str, Policy]:
        """The inner policies of a wrapper, by the key of their state; empty for a leaf."""
        return {}

    def init(self, params: Mapping[str, Tensor]) -> State:
        """Fresh state for these parameters (values are not read, only shape, dtype and device)."""
        return {}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """Combine the ranks' gradients of one bucket."""
        raise NotImplementedError
