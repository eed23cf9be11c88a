"""Policies made of policies. They know one invariant of their inners (``sent``), not what these do.

Rules:

1. Requests of an inner flow pass unchanged; inner flows run one after the other.
2. State mirrors the tree of policies: an inner's state stands under its key in :meth:`Policy.inners`.
3. A wrapper is what its inners are (scope, additive, deterministic, unequal weights, bytewise) unless it says not.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.deprecated import own_member_first
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.norm import clip_factor
from hvdbridge.kernels.runs import Runs
from hvdbridge.policies.dense import MEAN
from hvdbridge.policies.feedback import RESIDUAL, feedback, residuals
from hvdbridge.policy import base
from hvdbridge.policy.base import Aggregated, Early, Flow, Policy, Slot, State, advance, finish
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class ErrorFeedback(Policy):
    """What the inner policy did not send is added to the next gradient; the rule is :mod:`.feedback`'s.

    Raises:
        ConfigurationError: the inner policy is not additive (one whose update is the sum of what each rank sent).
    """

    inner: Policy
    slots: ClassVar[Mapping[str, Slot]] = RESIDUAL
    # Nothing is lost by it, so a second feedback around it would add every error twice.
    additive = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.additive:
            why = " with its own feedback (ef=false turns that off)" if getattr(self.inner, "ef", False) else ""
            raise ConfigurationError(
                f"ErrorFeedback cannot wrap {type(self.inner).__name__}{why}: it needs an additive policy, "
                "one whose update is the sum over ranks of what each sent"
            )

    @property
    def rounds(self) -> int | None:
        return self.inner.rounds

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"residual": residuals(params), "inner": self.inner.init(params)}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return feedback(bucket, state, self.inner.aggregate)


@dataclass(frozen=True)
class Warmup(Policy):
    """``first`` for ``steps`` steps, ``then`` from there on. The state of both is kept.

    After the last of these steps ``then`` is told the parameters with which its turn begins, if it remembers any
    (:func:`~hvdbridge.policy.base.anchored`). Where ranks have drifted apart under ``first``
    (``local_sgd``, ``noop``), parameters become their weighted mean then, once: an all-reduce of the model. Momenta of
    the optimizer are its own: where these differ, replicas under ``then=mean`` differ by what is left of them.
    """

    then: Policy
    steps: int = option(100, at_least=0)
    first: Policy = MEAN

    @property
    def rounds(self) -> int | None:
        rounds = [self.first.rounds, self.then.rounds]
        return None if None in rounds else max(filter(None, rounds), default=0)

    @property
    def bytewise(self) -> bool:
        return self.then.bytewise

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        key, inner = self.turn(bucket.step)
        result = yield from inner.aggregate(bucket, state[key])
        return replace(result, state={key: result.state})

    def turn(self, step: int) -> tuple[str, Policy]:
        """The policy whose turn it is in a step, and its key."""
        return ("first", self.first) if step < self.steps else ("then", self.then)

    @property
    def acts_after_step(self) -> bool:
        return self.first.replicas == "drift" or any(map(base.acts_after_step, (self.first, self.then)))

    def due(self, step: int) -> int:
        if step == self.steps - 1 and (self.first.replicas == "drift" or base.anchored(self.then)):
            return base.SWITCH
        return self.turn(step)[1].due(step)

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        (key, inner), states = self.turn(bucket.step), dict[str, State | None]()
        if inner.due(bucket.step):
            result = yield from finish(inner.after_step(bucket, state[key]))
            bucket, states[key] = replace(bucket, buffer=result.update, scaled=False), result.state
        if bucket.step == self.steps - 1:
            if self.first.replicas == "drift":
                result = yield from finish(MEAN.aggregate(bucket, {}))
                bucket = replace(bucket, buffer=result.update, scaled=False)
            states["then"] = base.start_from(self.then, bucket, state["then"])
        return Aggregated(bucket.buffer, state=states)


@dataclass(frozen=True)
class Clip(Policy):
    """This rank's whole local gradient is scaled down to an L2 norm, before the inner policy gets it.

    ``g min(1, norm / |g|)`` over all parameters together (Pascanu 2013, section 3.2), on each rank for itself and
    before weights. It is not ``clip_grad_norm_`` after backward, which clips the aggregate. The norm is added in
    float64; where it is not finite the gradient passes as it is, so NaN and inf travel. Feedback belongs inside
    (``clip(ef(bf16))``): around it, it would bring back what was clipped.
    """

    inner: Policy = MEAN
    norm: float = option(1.0, above=0)
    scope = "step"
    additive = False

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        bucket.buffer.mul_(clip_factor(bucket.buffer, bucket.layout, self.norm))
        result = yield from self.inner.aggregate(bucket, state["inner"])
        return Aggregated(result.update, state={"inner": result.state})


Plan = dict[str, tuple[Layout, Runs]]
"""The layout of each rule's part, and its offsets in the bucket."""


@dataclass(frozen=True)
class Partition(Policy):
    """A policy per parameter: the first rule that matches decides, ``rest`` takes what no rule matches.

    ``partition(*.bias=mean, <1024=mean, 1d=fp16, bfloat16=mean, rest=ef(bf16))``. A rule is

    - a number of elements: ``<1024``, ``<=1024``, ``>1024``, ``>=1024``;
    - a number of dimensions: ``1d``, or compared, ``>=2d``;
    - the type of the parameter's gradient: ``float16``, ``bfloat16``, ``float32``, ``float64``;
    - else a pattern of the parameter's name, as in :mod:`fnmatch`: ``*.bias``, ``layers.[0-3].*``.

    Each part of a bucket is a bucket of its own. State is keyed by the text of the rule.
    """

    rules: tuple[tuple[str, Policy], ...] = field(default=(), metadata={"collects": True})
    rest: Policy = MEAN

    def __post_init__(self) -> None:
        if isinstance(self.rules, Mapping):
            object.__setattr__(self, "rules", tuple(self.rules.items()))
        super().__post_init__()
        texts = [text for text, _ in self.rules]
        for text, policy in self.rules:
            if not isinstance(policy, Policy):
                raise ConfigurationError(f"Partition: rule {text!r} needs a policy, got {policy!r}")
            if text == "rest" or texts.count(text) > 1:
                raise ConfigurationError(f"Partition: rule {text!r} is given twice, or is reserved ('rest')")
            _matcher(text)

    def inners(self) -> Mapping[str, Policy]:
        return {**dict(self.rules), "rest": self.rest}

    @property
    def rounds(self) -> int | None:
        rounds = [inner.rounds for inner in self.inners().values()]
        return None if None in rounds else sum(filter(None, rounds))

    def rule_of(self, name: str, shape: torch.Size, dtype: torch.dtype) -> str:
        """The text of the rule that a parameter falls under."""
        return next((text for text, _ in self.rules if _matcher(text)(name, shape, dtype)), "rest")

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {key: inner.init(parameters_of(self, key, params)) for key, inner in self.inners().items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        inners = self.inners()
        return self._each(bucket, state, lambda key: inners[key].aggregate)

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        inners = self.inners()
        return self._each(bucket, state, lambda key: inners[key].after_step if inners[key].due(bucket.step) else keep)

    def start_from(self, bucket: Bucket, state: State) -> State:
        """Each inner policy starts from its part; see :func:`hvdbridge.policy.base.start_from`."""
        inners, plan = self.inners(), self._plan(bucket)
        return {key: base.start_from(inners[key], _select(bucket, *part), state[key]) for key, part in plan.items()}

    def _each(self, bucket: Bucket, state: State, start: Callable[[str], Callable[[Bucket, State], Flow]]) -> Flow:
        """Run each part's flow, one after the other; where one is early, the rest of them after all have begun."""
        plan = self._plan(bucket)
        given: dict[str, Bucket] = {}
        flows: dict[str, Flow] = {}
        ends: dict[str, Early | Aggregated] = {}
        for key, part in plan.items():
            given[key] = _select(bucket, *part)
            flows[key] = start(key)(given[key], state[key])
            ends[key] = yield from advance(flows[key])
        early = any(isinstance(end, Early) for end in ends.values())
        if early:
            yield Early(_join({key: end.update for key, end in ends.items()}, bucket, plan))
        results: dict[str, Aggregated] = {}
        for key, end in ends.items():
            results[key] = (yield from finish(flows[key])) if isinstance(end, Early) else end
        update = _join({key: result.update for key, result in results.items()}, bucket, plan, output=not early)
        left = {key: results[key].left_of(part) for key, part in given.items()} if bucket.needs_sent else {}
        state = {key: result.state for key, result in results.items()}
        return Aggregated(update, state=state, rest=_join(left, bucket, plan) if left else None)

    def _plan(self, bucket: Bucket) -> Plan:
        layout = bucket.layout
        dtypes = tuple(layout.dtypes.get(name, bucket.buffer.dtype) for name in layout.names)
        return layout.derive((self, dtypes), lambda: self._divide(layout, dtypes))

    def _divide(self, layout: Layout, dtypes: Sequence[torch.dtype]) -> Plan:
        kinds = zip(layout.shapes.items(), dtypes, strict=True)
        rules = {name: self.rule_of(name, shape, dtype) for (name, shape), dtype in kinds}
        keys = [key for key in self.inners() if key in rules.values()] or ["rest"]
        parts = {key: layout.part(name for name, rule in rules.items() if rule == key) for key in keys}
        at = layout.offsets
        return {
            key: (part, Runs((at[name], part.offsets[name], part.sizes[name]) for name in part.names))
            for key, part in parts.items()
        }


@own_member_first()
def parameters_of(policy: Policy, key: str, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Those of ``params`` that the inner policy at ``key`` aggregates."""
    if not isinstance(policy, Partition):
        return params
    return {name: p for name, p in params.items() if policy.rule_of(name, p.shape, p.dtype) == key}


@own_member_first(warn=False)
def statistics(policy: Policy, params: Mapping[str, Tensor], state: State) -> dict[str, float]:
    """Figures of this rank for ``sync.stats()``, which a policy's class may define as a method of this name; those of
    an inner policy other than ``inner`` bear its key.

    Args:
        params: those that the policy aggregates, on the device ``meta``.
    """
    found: dict[str, float] = {}
    for key, inner in policy.inners().items():
        figures = statistics(inner, parameters_of(policy, key, params), state[key])
        found |= {name if key == "inner" else f"{key}.{name}": figure for name, figure in figures.items()}
    return found


@own_member_first()
def averaged(policy: Policy, step: int) -> bool:
    """Whether a job may stop after this step: replicas are equal then, or nothing will make them so."""
    if isinstance(policy, Warmup):
        return base.switches(policy, step) or averaged(policy.turn(step)[1], step)
    if policy.replicas == "drift" and type(policy).due is not Policy.due:
        return bool(policy.due(step)) or step < getattr(policy, "start", 0)
    return all(averaged(inner, step) for inner in policy.inners().values())


def _select(bucket: Bucket, part: Layout, runs: Runs) -> Bucket:
    """The part of a bucket, a copy; the bucket itself if it is all of it."""
    if part is bucket.layout:
        return bucket
    chosen = runs.to(bucket.buffer, part.empty(bucket.buffer.dtype, bucket.buffer.device))
    return replace(bucket, buffer=chosen, layout=part, spare=None)


def _join(tensors: Mapping[str, Tensor], bucket: Bucket, plan: Plan, output: bool = False) -> Tensor:
    """The bucket's vector, made of its parts' vectors; ``output``: in the bucket's output buffer."""
    if len(tensors) == 1:
        (only,) = tensors.values()
        return only
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    whole = bucket.output(dtype) if output else bucket.layout.empty(dtype, bucket.buffer.device)
    for key, (_, runs) in plan.items():
        runs.back(whole, tensors[key])
    return whole


def keep(bucket: Bucket, state: State) -> Flow:
    """The flow that changes nothing."""
    yield from ()
    return Aggregated(bucket.buffer)


Matcher = Callable[[str, torch.Size, torch.dtype], bool]
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "": operator.eq}
_TYPES = ("float16", "bfloat16", "float32", "float64")


def _matcher(rule: str) -> Matcher:
    """The predicate that a rule's text stands for."""
    if rule in _TYPES:
        return lambda name, shape, dtype: dtype is getattr(torch, rule)
    number = re.fullmatch(r"(<=?|>=?|)([0-9]+)(d?)", rule)
    if number is None:
        if not rule or rule[0] in "<>":
            raise ConfigurationError(f"Partition: rule {rule!r} compares with nothing; write <1024, >=1024, 1d or >=2d")
        return lambda name, shape, dtype: fnmatchcase(name, rule)
    compare, limit, dims = _COMPARE[number[1]], int(number[2]), bool(number[3])
    if not number[1] and not dims:  # a bare number can only be meant as a name
        return lambda name, shape, dtype: fnmatchcase(name, rule)
    return lambda name, shape, dtype: compare(len(shape) if dims else shape.numel(), limit)
