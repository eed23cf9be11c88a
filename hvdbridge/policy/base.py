"""Base class of aggregation policies: generators that yield collectives, independent of the backend that executes them.

Rules for authors of policies (``examples/custom_policy.py`` is a complete one):

1. ``aggregate`` is a generator, and one run of it is a flow. It yields
   :class:`~hvdbridge.policy.collectives.Collective` requests, receives one tensor for each, and returns
   :class:`Aggregated`. All ranks yield the same sequence of requests: it may depend only on values that are equal on
   all ranks.
2. ``aggregate`` does not change ``state`` in place. The state store keeps the old state of each parameter whose
   update is not finite, unless the leaf's :attr:`Slot.guarded` is False.
3. All ranks return the same bits, unless :attr:`Policy.replicas` is ``"drift"``. After the last collective a flow
   computes element-wise only, or one owner rank computes and sends its result. Random numbers that ranks share are
   functions of a key (:mod:`hvdbridge.kernels.random`), not draws from a sequence.
4. State is a tree of dicts that mirrors the tree of policies. Each leaf maps parameter names to tensors.
5. A policy never waits for a CUDA device: no ``.item()``, no ``synchronize()``.
6. A policy may also change the parameters after the optimizer's step (:meth:`Policy.due`, :meth:`Policy.after_step`).
   A flow may deliver its update before it ends (:class:`Early`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.deprecated import former_members, own_member, own_member_first
from hvdbridge.errors import ConfigurationError, Unsupported, WeightError
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import Collective, relay
from hvdbridge.policy.options import check

State = Mapping[str, Any]
"""A policy's state, as a tree of dicts: ``{"residual": {name: tensor}, "inner": {...}}``."""


@dataclass(frozen=True, eq=False)
class Aggregated:
    """Result of a flow. Tensors are flat, ``[layout.numel]``, in the order of the bucket's layout.

    Attributes:
        update: the aggregated gradient, which becomes ``p.grad``; the same bits on all ranks (rule 3).
        sent: this rank's contribution as the other ranks decoded it: the sum of ``sent`` over ranks is ``update``.
            May be None unless ``bucket.needs_sent``.
        rest: the part of the bucket that this rank did not send, as an alternative to ``sent`` that needs less memory.
            It is usually ``bucket.buffer``, from which the flow has subtracted the part that it sent.
        state: the new state of the bucket's parameters, in the tree that ``aggregate`` received. None, for the whole
            or for a branch, leaves it unchanged.
    """

    update: Tensor
    sent: Tensor | None = None
    state: State | None = None
    rest: Tensor | None = None

    def left_of(self, bucket: Bucket) -> Tensor:
        """Return the part of ``bucket``, which the flow received, that was not sent. May overwrite ``bucket.buffer``.

        Raises:
            ConfigurationError: the flow returned neither ``sent`` nor ``rest``.
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
    """An update that a flow delivers before it ends. A flow may yield one, beside its requests.

    The caller then continues with ``update`` and reuses ``bucket.buffer``, which the flow must not access any more.
    The remainder of the flow runs in the background, after the step's last bucket was submitted and before the next
    step's first. The ``update`` of its :class:`Aggregated` is not delivered: it only decides which parameters keep
    their old state (:attr:`Slot.guarded`).
    """

    update: Tensor


Flow = Generator[Collective | Early, Tensor, Aggregated]
"""A generator of ``tensor = yield request``, which ends in ``return Aggregated(...)``. ``yield Early(...)`` evaluates
to None."""

Exchange = Generator[Collective, Tensor, Tensor]
"""A part of a flow that returns one tensor."""


def advance(flow: Flow) -> Generator[Collective, Tensor, Early | Aggregated]:
    """Yield a flow's requests up to its :class:`Early` or its end, and return the Early or the :class:`Aggregated`.

    Call it again after an Early for the remainder of the flow.
    """

    def forward(request: Any) -> Generator[Any, Any, Any]:
        return (yield request)

    return relay(flow, forward, Early)  # type: ignore[no-any-return, arg-type]


def finish(flow: Flow) -> Generator[Collective, Tensor, Aggregated]:
    """Yield a flow's requests up to its end, and return its :class:`Aggregated`.

    Raises:
        ConfigurationError: the flow yields an :class:`Early`, which is not allowed here.
    """
    end = yield from advance(flow)
    if isinstance(end, Early):
        raise too_early(flow)
    return end


def too_early(flow: Flow) -> ConfigurationError:
    """Return the error for a flow that yields :class:`Early` where it must not."""
    return ConfigurationError(
        f"{getattr(flow, '__qualname__', flow)} yields Early, which a flow may do once, and only where it aggregates "
        "gradients: this policy cannot stand here"
    )


def rewrite(flow: Flow, exchange: Callable[[Collective], Exchange]) -> Flow:
    """Run ``exchange(request)`` instead of each request of ``flow``. A wrapper changes messages this way."""

    def answer(request: Any) -> Generator[Any, Any, Any]:
        return (yield from exchange(request)) if isinstance(request, Collective) else (yield request)

    return relay(flow, answer)  # type: ignore[no-any-return, arg-type]


CODED_MB, BYTEWISE_MB, NCCL_MB = 10.0, 5.0, 100.0
"""Default bucket sizes in MiB. ``CODED_MB`` is for messages that are encoded, and for messages between nodes.
``BYTEWISE_MB`` is for messages between nodes that have a byte or more per element (:attr:`Policy.bytewise`).
``NCCL_MB`` is for messages that are encoded and that NCCL carries."""


@dataclass(frozen=True)
class Slot:
    """Properties of one leaf (a dict of tensors) of a policy's state.

    Attributes:
        local: the leaf differs between ranks, as a residual does. Otherwise it is replicated.
        gradient_units: the leaf scales with the loss. It is rescaled when ``sync.loss_scale`` changes.
        owned: the leaf is local, and one rank owns each of its elements. The owner depends on the number of ranks. When
            that number changes, the sum of the leaf is added to the ``residual`` of the error feedback directly around
            this policy, which must exist.
        by_node: the leaf is local to a node, whose ranks hold the same values. The state store sets this for local
            leaves below a :attr:`Branch.nodes`; a policy does not declare it.
        guarded: a parameter whose update is not finite keeps its old value in this leaf. False: the flow's value always
            replaces the old one.
        reused: the flow allocates the leaf's values with :meth:`Bucket.fresh` and keeps no other reference to them. On
            a CPU the memory of a replaced value is then reused, since new allocations would fragment C's heap.
        held: the leaf is an update that a later step delivers. :func:`flush` delivers the last one.
        anchor: the leaf is a copy of parameters to which later ones are compared. :func:`start_from` sets it.
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
    """Properties of the state of an inner policy.

    Attributes:
        parameters: the inner policy aggregates parameters, so no leaf of its state has the gradient's units.
        nodes: the inner policy aggregates between nodes, so its local leaves belong to nodes instead of ranks.
    """

    parameters: bool = False
    nodes: bool = False


SWITCH = 2
"""Value of :meth:`Policy.due` for the last step before a new phase of training, as where warmup's ``then`` takes
over."""


class Policy:
    """Base class of policies. A policy is a frozen dataclass whose fields are the options of its spec string.

    A policy implements :meth:`aggregate` and, if it has state, :meth:`init`. A policy without inner policies declares
    its properties as plain class attributes (``additive = True``). A wrapper, which has policies as fields, derives
    them from these inner policies, except for :attr:`rounds`. A class may also define ``statistics(params, state)``,
    see :func:`hvdbridge.policies.wrappers.statistics`.
    """

    slots: ClassVar[Mapping[str, Slot | Branch]] = {}
    """Properties of the state, by key: a :class:`Slot` for an own leaf, a :class:`Branch` for an inner policy. Absent
    keys mean ``Slot()`` or ``Branch()``."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def scope(self) -> Literal["bucket", "step"]:
        """``"bucket"``: ``aggregate`` runs per bucket, during backward. ``"step"``: it runs once per step, with one
        bucket of all gradients. A wrapper's scope is ``"step"`` if that of any inner policy is."""
        return "step" if any(p.scope == "step" for p in self.inners().values()) else "bucket"

    @property
    def additive(self) -> bool:
        """True if the update is the sum over ranks of ``sent``, which approximates the weighted bucket.
        :class:`~hvdbridge.policies.wrappers.ErrorFeedback` requires this."""
        inners = self.inners().values()
        return bool(inners) and all(p.additive for p in inners)

    @property
    def deterministic(self) -> bool:
        """True if the same inputs give the same bits with every seed."""
        return all(p.deterministic for p in self.inners().values())

    @property
    def unequal_weights(self) -> bool:
        """True if positive weights may differ between ranks."""
        return all(p.unequal_weights for p in self.inners().values())

    @property
    def replicas(self) -> Literal["same", "drift"]:
        """``"same"``: all ranks have the same parameters. ``"drift"``: updates differ between ranks, and parameters do
        until the policy averages them. A wrapper drifts if any inner policy does."""
        return "drift" if any(p.replicas == "drift" for p in self.inners().values()) else "same"

    @property
    def rounds(self) -> int | None:
        """Maximum number of collectives that one flow of :meth:`aggregate` yields; None: not declared.

        A policy that declares a number also declares that its flows are independent. A flow then reads only its bucket
        and its part of the state, never data that another flow of the step changes. Several flows may be in flight, and
        encode and decode at moments that differ between ranks. Without a number, flows run one after another.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the ``slots`` of a subclass to those of its base class."""
        super().__init_subclass__(**kwargs)
        inherited: Any = super(cls, cls).slots  # type: ignore[misc]
        for name in {"in_place", "takes_shares"} & cls.__dict__.keys():
            warnings.warn(f"{cls.__name__}.{name} has no effect any more", DeprecationWarning, stacklevel=3)
        own = cls.__dict__.get("slots")
        if not isinstance(own, Mapping):
            return
        if isinstance(inherited, property):
            cls.slots = property(lambda policy: {**inherited.__get__(policy), **own})  # type: ignore[assignment]
        else:
            cls.slots = {**inherited, **own}

    @property
    def bytewise(self) -> bool:
        """True if a flow sends a byte or more per element, by several collectives. Such buckets are smaller between
        nodes, where a step waits for these bytes. A wrapper is bytewise if all its inner policies are, and none of them
        aggregates parameters, which are not sent in buckets."""
        inners = self.inners()
        parameters = any(isinstance(slot, Branch) and slot.parameters for slot in self.slots.values())
        return bool(inners) and not parameters and all(p.bytewise for p in inners.values())

    def inners(self) -> Mapping[str, Policy]:
        """Return the inner policies of a wrapper, by the key of their state; empty for a leaf."""
        if not is_dataclass(self):
            return {}
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Policy)}

    def init(self, params: Mapping[str, Tensor]) -> State:
        """Return the initial state for ``params`` (name -> parameter, with its initial value, equal on all ranks). Most
        policies read only shape, dtype and device. A policy that keeps values clones them."""
        return {key: inner.init(params) for key, inner in self.inners().items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """Combine the ranks' gradients of one bucket; see the rules at the top of this module.

        Args:
            bucket: this rank's local gradients, not yet weighted. Weighted sums begin with :meth:`Bucket.weighted`.
            state: the part of the state that belongs to the bucket's parameters.
        """
        raise NotImplementedError

    def due(self, step: int) -> int:
        """Return whether :meth:`after_step` runs after this step. A wrapper's runs when that of an inner policy does.

        Returns:
            False, True, or :data:`SWITCH` if a new phase of training begins after this step. With SWITCH,
            :meth:`after_step` runs even if the weights add up to zero. They then count as equal.
        """
        return max((inner.due(step) for inner in self.inners().values()), default=False)

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        """Change the parameters after the optimizer's step ``bucket.step``. Runs only if :meth:`due` for that step.

        ``bucket.buffer`` is a copy, in float32 or wider, of all parameters of this rank that the optimizer holds. The
        returned update becomes their new values. Weights are those of the step. A wrapper runs ``after_step`` of its
        inner policies that are due, one after another.

        Args:
            bucket: the parameters, as one bucket.
            state: the state of all these parameters.
        """
        states: dict[str, State | None] = {}
        for key, inner in self.inners().items():
            if inner.due(bucket.step):
                result = yield from finish(inner.after_step(bucket, state[key]))
                bucket, states[key] = replace(bucket, buffer=result.update, scaled=False), result.state
        return Aggregated(bucket.buffer, state=states)

    def check_size(self, size: int, nodes: int | None = None) -> None:
        """Check that the policy is defined for this number of ranks. Runs before training.

        Args:
            size: number of ranks. Each is assumed to have a positive weight.
            nodes: number of nodes that they run on; None: unknown.

        Raises:
            ConfigurationError: the policy is not defined for so many ranks. The message names the limits.
        """
        for inner in self.inners().values():
            inner.check_size(size, nodes)


former_members(
    Policy,
    on_parameters=False,
    between_nodes=False,
    rehearses=True,
    in_place=False,
    takes_shares=False,
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
    """Base of policies around a user's object. Dry runs must not call it, because the object may have state."""


@own_member_first(warn=False)
def acts_after_step(policy: Policy) -> bool:
    """Return whether the policy can ever be :meth:`Policy.due`: its class overrides ``due``, or an inner policy can be.

    A class that overrides ``due`` only to select an inner policy's defines an attribute of this name, which decides.
    """
    return type(policy).due is not Policy.due or any(map(acts_after_step, policy.inners().values()))


@own_member_first()
def switches(policy: Policy, step: int) -> bool:
    """Return whether a new phase of training begins after this step (:data:`SWITCH`)."""
    if policy.due(step) == SWITCH:
        return True
    return any(own_member(inner, "switches") and switches(inner, step) for inner in policy.inners().values())


@own_member_first()
def anchored(policy: Policy) -> bool:
    """Return whether the policy, or an inner one, has state that :func:`start_from` sets (:attr:`Slot.anchor`)."""
    own = any(isinstance(slot, Slot) and slot.anchor for slot in policy.slots.values())
    return own or any(map(anchored, policy.inners().values()))


@own_member_first(warn=False)
def start_from(policy: Policy, bucket: Bucket, state: State) -> State:
    """Return the anchors (:attr:`Slot.anchor`) for a phase of training that begins with the parameters in ``bucket``.

    ``bucket.buffer`` holds parameters as in :meth:`Policy.after_step`, equal on all ranks; the anchors are copies of
    them. The result has only the leaves that change. The synchronizer calls this before the first step, and a wrapper
    before the first step of an inner policy.
    """
    values = bucket.grads
    slots = {key for key, slot in policy.slots.items() if isinstance(slot, Slot) and slot.anchor}
    new: dict[str, Any] = {key: {name: values[name].clone() for name in state[key]} for key in slots}
    return {**new, **{key: start_from(inner, bucket, state[key]) for key, inner in policy.inners().items()}}


@own_member_first()
def flush(policy: Policy, state: State) -> tuple[Mapping[str, Tensor], State]:
    """Take the updates that are held for a later step (:attr:`Slot.held`) out of the state. May wait for a device.

    Returns:
        The updates, by parameter name, and the whole state, in which zeros replace them.
    """
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


def refuse_complex(params: Mapping[str, Tensor]) -> None:
    """Check that no parameter is complex: policies aggregate real numbers.

    Raises:
        Unsupported: one of ``params`` is complex. The message names it.
    """
    for name, p in params.items():
        if p.is_complex():
            raise Unsupported(
                f"parameter {name!r} is {str(p.dtype).removeprefix('torch.')}: gradients are real numbers. Hold it as "
                "pairs of these, torch.view_as_real(...), and use torch.view_as_complex() of it in forward."
            )


def check_weights(policy: Policy, weights: Sequence[float], size: int) -> tuple[float, ...]:
    """Check the ranks' weights and return them as floats. A sum of zero is valid: that step is skipped.

    Raises:
        WeightError: there is not one weight per rank, a weight or the sum is negative or not finite, or weights differ
            although ``policy`` requires equal ones (:attr:`Policy.unequal_weights`).

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
