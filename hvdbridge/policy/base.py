"""What an aggregation policy is: a coroutine over collectives that never learns who executes them.

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
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, Literal

from torch import Tensor

from hvdbridge.errors import ConfigurationError, WeightError
from hvdbridge.policy.bucket import DDP_MB, Bucket
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
    the caller has taken back. The ``update`` of the flow's :class:`Aggregated` is delivered to nobody; it decides
    which parameters keep their old state (see :attr:`Slot.guarded`).
    """

    update: Tensor


Flow = Generator[Collective | Early, Tensor, Aggregated]
"""``tensor = yield request`` until ``return Aggregated(...)``. (``yield Early(...)`` is answered by None.)"""

Exchange = Generator[Collective, Tensor, Tensor]
"""A part of a flow that ends in one tensor."""


def advance(flow: Flow) -> Generator[Collective, Tensor, Early | Aggregated]:
    """Pass on a flow's requests up to its :class:`Early` or its end, and return that; call again after an Early.

    An error from whoever answers is thrown into ``flow``, so the traceback shows the line that asked. As in
    :func:`~hvdbridge.policy.collectives.relay`, no message is held.
    """
    try:
        request = next(flow)
        while not isinstance(request, Early):
            try:
                answer = yield request
            except Exception as error:
                request = flow.throw(error)
            else:
                del request
                request = flow.send(answer)
                del answer
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return request


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
        owned: local, and of each element one rank has it, which one is a matter of how many there are: when that
            changes, its sum goes to the ``residual`` of the feedback around this policy.
        by_node: local to the node instead of the rank: its ranks hold the same. Said by :attr:`Policy.between_nodes`.
        guarded: a parameter keeps its old value where the flow's update is not finite. False: it is replaced always.
        reused: its flat values are made in the memory that :meth:`Bucket.fresh` gives, and nobody else holds them: on a
            CPU that of a replaced one is taken for the next. A C library would keep the holes that blocks leave which
            live for a step between others that live for a moment: once or twice the state.
    """

    local: bool = False
    gradient_units: bool = False
    owned: bool = False
    by_node: bool = False
    guarded: bool = True
    reused: bool = False


class Policy:
    """Base class: a frozen dataclass with :meth:`aggregate`. Its fields are the options of its spec string.

    A leaf states what it is as plain class attributes (``additive = True``); a wrapper says nothing and
    takes these from its inner policies.
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    """The leaves of its own state (not of its inner policies')."""

    on_parameters: ClassVar[bool] = False
    """Whether what its inner policies aggregate are parameters, so that none of their state is in units of the
    gradient."""

    between_nodes: ClassVar[bool] = False
    """Whether its inner policies' ranks are the nodes, so that what is local to one of them belongs to a node."""

    rehearses: ClassVar[bool] = True
    """Whether a flow over made-up gradients leaves nothing behind, so that it can be timed."""

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
        """How many collectives each flow of :meth:`aggregate` asks for at most; None: that is not said.

        Who says it, by a subclass too, says that a flow reads nothing that another one of the step changes (it has its
        bucket's part of the state). Then flows encode and decode as soon as they can, at moments that differ between
        ranks, and one whose last collective is under way holds no other up. Else all of it happens in one order on all
        ranks.
        """
        return None

    @property
    def bucket_mb(self) -> float:
        """The size of a bucket in MiB where nobody says one, on one machine: DDP's, or less where flows that run ahead
        of their turns (:attr:`rounds`) compute between collectives, so that one bucket is coded while another travels.
        Where it is DDP's, buckets on torch are those of plain DDP, whose bits the mean reproduces."""
        return DDP_MB if self.rounds is None else CODED_MB

    @property
    def bytewise(self) -> bool:
        """A byte or more travels for each element, by several collectives: on a slow network these bytes, and not the
        computing between them, are what a step waits for, so its buckets are smaller there than those of other codes. A
        wrapper is so where all its inners are; what these send of parameters is in no bucket."""
        inners = self.inners().values()
        return bool(inners) and not self.on_parameters and all(p.bytewise for p in inners)

    @property
    def acts_after_step(self) -> bool:
        """Whether it is ever :meth:`due`: it says so by saying when, or one of its inners does."""
        return type(self).due is not Policy.due or any(p.acts_after_step for p in self.inners().values())

    @property
    def anchored(self) -> bool:
        """Whether it remembers parameters to which later ones are compared, see :meth:`start_from`."""
        return any(p.anchored for p in self.inners().values())

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

    def due(self, step: int) -> bool:
        """Whether :meth:`after_step` runs after this step; a wrapper's is when one of its inners' is."""
        return any(inner.due(step) for inner in self.inners().values())

    def averaged(self, step: int) -> bool:
        """Whether a job may stop after this step: replicas are equal then, or nothing will make them so."""
        return all(inner.averaged(step) for inner in self.inners().values())

    def switches(self, step: int) -> bool:
        """Whether a phase begins after this step. It is :meth:`due` then, and is never left out: where the weights add
        up to zero they count as equal."""
        return any(inner.switches(step) for inner in self.inners().values())

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        """Change the parameters after the optimizer made the step ``bucket.step``; runs where that is :meth:`due`.

        ``bucket.buffer`` is a copy, in float32 or wider, of all parameters of this rank that the optimizer holds;
        the update becomes their new values. Weights are those of the step. A step whose weights add up to zero has
        no such part, but where one :meth:`switches`. A wrapper passes it to those of its inners for which it is due.
        """
        states: dict[str, State | None] = {}
        for key, inner in self.inners().items():
            if inner.due(bucket.step):
                result = yield from finish(inner.after_step(bucket, state[key]))
                bucket, states[key] = replace(bucket, buffer=result.update, scaled=False), result.state
        return Aggregated(bucket.buffer, state=states)

    def start_from(self, bucket: Bucket, state: State) -> State:
        """The state (or what changes of it) of a phase that begins with these parameters, equal on all ranks.

        ``bucket.buffer`` holds them as in :meth:`after_step`; nothing travels, and what is kept is a copy. It is called
        before the first step, and by a wrapper before a policy takes its turn, where the policy is :attr:`anchored`.
        """
        return {key: inner.start_from(bucket, state[key]) for key, inner in self.inners().items()}

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

    def flush(self, state: State) -> tuple[Mapping[str, Tensor], State]:
        """What is held back for a later step, as updates by name, and the whole state without it.

        Nothing (an empty mapping, and ``state``) for most policies. May wait for a device.
        """
        updates: dict[str, Tensor] = {}
        states: dict[str, State] = {}
        for key, inner in self.inners().items():
            held, states[key] = inner.flush(state[key])
            updates.update(held)
        return (updates, {**state, **states}) if updates else ({}, state)

    def parameters_of(self, key: str, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of ``params`` that the inner policy at ``key`` aggregates."""
        return params

    def statistics(self, params: Mapping[str, Tensor], state: State) -> dict[str, float]:
        """Figures of this rank for ``sync.stats()``; those of an inner policy other than ``inner`` bear its key.

        Args:
            params: those that the policy aggregates, on the device ``meta``.
        """
        found: dict[str, float] = {}
        for key, inner in self.inners().items():
            prefix = "" if key == "inner" else f"{key}."
            found |= {
                prefix + name: value
                for name, value in inner.statistics(self.parameters_of(key, params), state[key]).items()
            }
        return found

    def bytes_per_step(self, *arguments: Any, **options: Any) -> int:
        """Deprecated: :func:`hvdbridge.policies.bytes_per_step`."""
        warnings.warn("use hvdbridge.policies.bytes_per_step(policy, ...)", DeprecationWarning, stacklevel=2)
        # By name, for it is above this module
        return int(import_module("hvdbridge.policy.dry_run").bytes_per_step(self, *arguments, **options))


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
