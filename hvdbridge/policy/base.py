"""What an aggregation policy is: a coroutine over collectives that does not depend on what executes them.

Rules:

1. ``aggregate`` yields :class:`~hvdbridge.policy.collectives.Collective` requests, is sent back one tensor for
   each, and returns :class:`Aggregated`. What it yields depends only on what all ranks know alike.
2. It does not change ``state`` in place: the scheduler keeps the old state of each parameter whose
   update is not finite.
3. Every rank returns the same bits. Arithmetic after the last collective is element-wise, or is done by
   one owner and sent. Shared randomness is keyed, never drawn in sequence.
4. State is a tree of dicts that mirrors the tree of policies; its leaves map parameter names to tensors.
5. No ``.item()`` and no synchronize on CUDA tensors.
6. A policy may also act on the parameters after the optimizer stepped (:meth:`Policy.due`,
   :meth:`Policy.after_step`), and may hand out an update before its flow has ended (:class:`Early`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.deprecated import former_members, own_member, own_member_first
from hvdbridge.errors import ConfigurationError, WeightError
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import Collective, relay
from hvdbridge.policy.options import check

State = Mapping[str, Any]
"""A tree of dicts: ``{"residual": {name: tensor}, "inner": {...}}``."""


@dataclass(frozen=True, eq=False)
class Aggregated:
    """What a policy made of a bucket.

    Attributes:
        update: flat, in the bucket's layout, equal bits on all ranks. Becomes ``p.grad``.
        sent: flat; what the other ranks decoded of this rank's contribution (the sum over ranks of
            ``sent`` is ``update``). None where ``bucket.needs_sent`` is False.
        rest: in the place of ``sent``, and with less memory: what was not sent, flat, mostly ``bucket.buffer`` from
            which the flow took off what it sent as soon as it knew.
        state: the new state of this bucket's parameters, same tree as was passed in; None = unchanged.
    """

    update: Tensor
    sent: Tensor | None = None
    state: State | None = None
    rest: Tensor | None = None

    def left_of(self, bucket: Bucket) -> Tensor:
        """What of ``bucket``, as it was given to the flow, was not sent; may be its buffer, overwritten.

        Raises:
            ConfigurationError: the flow did not say.
        """
        if self.rest is not None:
            return self.rest
        if self.sent is None:
            raise ConfigurationError(
                "a policy that is additive returned neither `sent` nor `rest`, although bucket.needs_sent"
            )
        return bucket.buffer.sub_(self.sent)


@dataclass(frozen=True, eq=False)
class Early:
    """What a flow may yield once, beside requests: the bucket's update stands now, and is delivered.

    The rest of the flow runs on in the background while the caller goes on, after the last bucket of the step
    was handed in and before the next step's first. From here on the flow must not touch ``bucket.buffer``, which
    the caller has taken back. The ``update`` of the flow's :class:`Aggregated` is not delivered; it decides
    which parameters keep their old state (see :attr:`Slot.guarded`).
    """

    update: Tensor


Flow = Generator[Collective | Early, Tensor, Aggregated]
"""``tensor = yield request`` until ``return Aggregated(...)``. (``yield Early(...)`` is answered by None.)"""

Exchange = Generator[Collective, Tensor, Tensor]
"""A part of a flow that ends in one tensor."""


def advance(flow: Flow) -> Generator[Collective, Tensor, Early | Aggregated]:
    """Pass on a flow's requests up to its :class:`Early` or its end, and return that; call again after an Early."""

    def ask(request: Any) -> Generator[Any, Any, Any]:
        return (yield request)

    return relay(flow, ask, Early)  # type: ignore[no-any-return, arg-type]


def finish(flow: Flow) -> Generator[Collective, Tensor, Aggregated]:
    """Pass on a flow's requests up to its end, where it may not say :class:`Early` (any more)."""
    end = yield from advance(flow)
    if isinstance(end, Early):
        raise too_early(flow)
    return end


def too_early(flow: Flow) -> ConfigurationError:
    """The error about an :class:`Early` where none may be."""
    return ConfigurationError(
        f"{getattr(flow, '__qualname__', flow)} yields Early, which a flow may do once, and only where it aggregates "
        "gradients: this policy cannot stand here"
    )


def rewrite(flow: Flow, exchange: Callable[[Collective], Exchange]) -> Flow:
    """``flow`` with ``exchange(request)`` in the place of each request: how a wrapper changes what travels."""

    def answer(request: Any) -> Generator[Any, Any, Any]:
        return (yield from exchange(request)) if isinstance(request, Collective) else (yield request)

    return relay(flow, answer)  # type: ignore[no-any-return, arg-type]


CODED_MB, BYTEWISE_MB = 10.0, 5.0
"""The size of a bucket whose messages take computing, or a network's time, and of one whose messages are a byte or more
for each element and take a network's time: the best of those measured, over policies and slow links."""


@dataclass(frozen=True)
class Slot:
    """What a leaf of a policy's state is.

    Attributes:
        local: differs between ranks (an error-feedback residual) instead of being replicated.
        gradient_units: scales with the loss, so it is rescaled when ``sync.loss_scale`` changes.
        owned: local, and each element belongs to one rank, which depends on the number of ranks. When that number
            changes, the sum of the leaf goes to the ``residual`` of the feedback around this policy.
        by_node: local to the node instead of the rank: the node's ranks hold the same. :attr:`Branch.nodes` sets it.
        guarded: a parameter keeps its old value where the flow's update is not finite. False: the flow's value always
            replaces it.
        reused: the flow makes its values in memory of :meth:`Bucket.fresh` and keeps no other reference. On a CPU the
            next value takes the memory of the replaced one, because a C library would fragment by once or twice the
            state.
        held: an update that a later step delivers; :func:`flush` hands it out.
        anchor: parameters to which later ones are compared; :func:`start_from` sets them.
    """

    local: bool = False
    gradient_units: bool = False
    owned: bool = False
    by_node: bool = False
    guarded: bool = True
    reused: bool = False
    held: bool = False
    anchor: bool = False


@dataclass(frozen=True)
class Branch:
    """What the state of an inner policy is.

    Attributes:
        parameters: the inner policy aggregates parameters, so nothing in its state has the gradient's units.
        nodes: the inner policy's ranks are the nodes, so what is local to one of them belongs to a node.
    """

    parameters: bool = False
    nodes: bool = False


SWITCH = 2
"""What :meth:`Policy.due` returns where a phase begins after the step."""


class Policy:
    """Base class: a frozen dataclass with :meth:`aggregate`. Its fields are the options of its spec string.

    A leaf states its properties as plain class attributes (``additive = True``). A wrapper takes them from its inner
    policies. A class may also define ``statistics(params, state)``, see :func:`hvdbridge.policies.wrappers.statistics`.
    """

    slots: ClassVar[Mapping[str, Slot | Branch]] = {}
    """The leaves of the policy's own state, and what the state of its inner policies is, by key."""

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

    @property
    def replicas(self) -> Literal["same", "drift"]:
        """``"drift"``: updates differ between ranks, and so do parameters between the policy's own averages. A
        wrapper takes the wider of its inners."""
        return "drift" if any(p.replicas == "drift" for p in self.inners().values()) else "same"

    @property
    def rounds(self) -> int | None:
        """The most collectives that a flow of :meth:`aggregate` asks for; None: not stated.

        A policy that states a number also states that a flow reads nothing that another flow of the step changes: it
        has its bucket's part of the state. The scheduler then lets flows encode and decode as soon as they can, at
        moments that differ between ranks. Otherwise all of it happens in one order on all ranks.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass's ``slots`` are added to those of its base."""
        super().__init_subclass__(**kwargs)
        inherited: Any = super(cls, cls).slots  # type: ignore[misc]
        own = cls.__dict__.get("slots")
        if not isinstance(own, Mapping):
            return
        if isinstance(inherited, property):
            cls.slots = property(lambda policy: {**inherited.__get__(policy), **own})  # type: ignore[assignment]
        else:
            cls.slots = {**inherited, **own}

    @property
    def bytewise(self) -> bool:
        """A byte or more travels for each element, by several collectives. On a slow network a step waits for these
        bytes, so such buckets are smaller there. A wrapper is bytewise where all its inners are; inners that aggregate
        parameters are not, since these travel in no bucket."""
        inners = self.inners()
        parameters = any(isinstance(slot, Branch) and slot.parameters for slot in self.slots.values())
        return bool(inners) and not parameters and all(p.bytewise for p in inners.values())

    def inners(self) -> Mapping[str, Policy]:
        """The inner policies of a wrapper, by the key of their state; empty for a leaf."""
        if not is_dataclass(self):
            return {}
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Policy)}

    def init(self, params: Mapping[str, Tensor]) -> State:
        """Fresh state for these parameters. Their values are those at the start, equal on all ranks; most policies
        read only shape, dtype and device. What is kept of them is a copy."""
        return {key: inner.init(params) for key, inner in self.inners().items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """Combine the ranks' gradients of one bucket."""
        raise NotImplementedError

    def due(self, step: int) -> int:
        """Whether :meth:`after_step` runs after this step; a wrapper's is due when one of its inners' is.

        Returns:
            False, True, or :data:`SWITCH` where a phase begins after this step. Then :meth:`after_step` runs even
            if the weights add up to zero, and they count as equal.
        """
        return max((inner.due(step) for inner in self.inners().values()), default=False)

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        """Change the parameters after the optimizer made the step ``bucket.step``; runs where that is :meth:`due`.

        ``bucket.buffer`` is a copy, in float32 or wider, of all parameters of this rank that the optimizer holds;
        the update becomes their new values. Weights are those of the step. A wrapper passes the bucket to those of its
        inners for which it is due.
        """
        states: dict[str, State | None] = {}
        for key, inner in self.inners().items():
            if inner.due(bucket.step):
                result = yield from finish(inner.after_step(bucket, state[key]))
                bucket, states[key] = replace(bucket, buffer=result.update, scaled=False), result.state
        return Aggregated(bucket.buffer, state=states)

    def check_size(self, size: int, nodes: int | None = None) -> None:
        """Refuse numbers of ranks for which the policy is not defined, before anything is trained.

        Args:
            size: number of ranks, all of positive weight.
            nodes: number of their nodes; None: not known.

        Raises:
            ConfigurationError: names the limits.
        """
        for inner in self.inners().values():
            inner.check_size(size, nodes)


former_members(
    Policy,
    on_parameters=False,
    between_nodes=False,
    rehearses=True,
    bucket_mb="policies.dense:bucket_mb",
    acts_after_step="policy.base:acts_after_step",
    anchored="policy.base:anchored",
    switches="policy.base:switches",
    start_from="policy.base:start_from",
    flush="policy.base:flush",
    parameters_of="policies.wrappers:parameters_of",
    averaged="policies.wrappers:averaged",
    statistics="policies.wrappers:statistics",
    bytes_per_step="policies:bytes_per_step",
)


class Foreign(Policy):
    """Base of a policy around a user's object that may remember what it is given, so no rehearsal may call it."""


@own_member_first(warn=False)
def acts_after_step(policy: Policy) -> bool:
    """Whether the policy is ever :meth:`Policy.due`: its class overrides that method, or an inner policy acts. A class
    whose ``due`` is that of its inners has an attribute of this name instead."""
    return type(policy).due is not Policy.due or any(map(acts_after_step, policy.inners().values()))


@own_member_first()
def switches(policy: Policy, step: int) -> bool:
    """Whether a phase begins after this step."""
    if policy.due(step) == SWITCH:
        return True
    return any(own_member(inner, "switches") and switches(inner, step) for inner in policy.inners().values())


@own_member_first()
def anchored(policy: Policy) -> bool:
    """Whether the policy has state that :func:`start_from` sets."""
    own = any(isinstance(slot, Slot) and slot.anchor for slot in policy.slots.values())
    return own or any(map(anchored, policy.inners().values()))


@own_member_first(warn=False)
def start_from(policy: Policy, bucket: Bucket, state: State) -> State:
    """What changes of the state where a phase begins with these parameters, equal on all ranks: copies.

    ``bucket.buffer`` holds them as in :meth:`Policy.after_step`. The synchronizer calls this before the first step,
    and a wrapper before a policy takes its turn.
    """
    values = bucket.grads
    slots = {key for key, slot in policy.slots.items() if isinstance(slot, Slot) and slot.anchor}
    new: dict[str, Any] = {key: {name: values[name].clone() for name in state[key]} for key in slots}
    return {**new, **{key: start_from(inner, bucket, state[key]) for key, inner in policy.inners().items()}}


@own_member_first()
def flush(policy: Policy, state: State) -> tuple[Mapping[str, Tensor], State]:
    """What is held back for a later step, as updates by name, and the whole state without it. May wait for a device."""
    updates: dict[str, Tensor] = {}
    new: dict[str, Any] = dict(state)
    for key, slot in policy.slots.items():
        if isinstance(slot, Slot) and slot.held and any(bool(held.count_nonzero()) for held in state[key].values()):
            updates.update(state[key])
            new[key] = {name: torch.zeros_like(held) for name, held in state[key].items()}
    for key, inner in policy.inners().items():
        held, new[key] = flush(inner, state[key])
        updates.update(held)
    return updates, new


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
