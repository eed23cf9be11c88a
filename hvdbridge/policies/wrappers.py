"""Wrappers: policies around other policies, of which they use only the public interface.

Rules:

1. The requests of an inner flow pass unchanged. Inner flows run one after the other.
2. State mirrors the tree of policies: the state of an inner policy is under its key in :meth:`Policy.inners`.
3. A wrapper takes its properties (scope, additive, deterministic, unequal_weights, bytewise) from its inner policies
   unless it defines them.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Error feedback: the part of a gradient that the inner policy did not send is added to the next gradient.

    ``p = g w/sum(w) + e``, ``u = inner(p)``, ``e' = p - sent(p)`` (Seide 2014, section 2; Karimireddy 2019,
    algorithm 2; see :mod:`.feedback`). A rank of weight 0 contributes zeros and keeps its residual.

    State: ``residual`` (e), the size of the parameters in float32 (float64 for float64), local to the rank.
    On the wire: the bytes of ``inner``.

    Source:
        Seide et al., *1-bit stochastic gradient descent*, 2014, section 2; Karimireddy et al., *Error feedback fixes
        SignSGD*, 2019, algorithm 2.

    When to choose:
        An additive policy without a residual of its own loses too much.

    Attributes:
        inner: an additive policy: its update is the sum over ranks of what each rank sent.

    Raises:
        ConfigurationError: ``inner`` is not additive.
    """

    inner: Policy
    slots: ClassVar[Mapping[str, Slot]] = RESIDUAL
    # A second feedback around this one would add each error twice.
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
    """Aggregate by ``first`` for ``steps`` steps, and by ``then`` from there on.

    After the last step of ``first``, ``then`` copies the parameters into its anchors if it has any
    (:func:`~hvdbridge.policy.base.anchored`). If replicas drift under ``first`` (``local_sgd``, ``noop``), parameters
    become their weighted mean before that, by one all-reduce of the model. The optimizer's momenta are not averaged: if
    they differ between ranks, replicas drift further under ``then=mean`` while these momenta decay.

    State: that of both policies, for the whole training.

    When to choose:
        A lossy policy needs a dense start, when gradients change fastest. A tenth of the training is usual.

    Attributes:
        then: the policy from step ``steps`` on.
        steps: number of steps with ``first``.
        first: the policy of the steps before ``steps``.
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
        key, inner = bucket.decide(lambda step, _: self.turn(step))
        result = yield from inner.aggregate(bucket, state[key])
        return replace(result, state={key: result.state})

    def turn(self, step: int) -> tuple[str, Policy]:
        """Return the key of the policy that aggregates in a step, and the policy."""
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
    """Clip each rank's whole gradient to an L2 norm before the inner policy aggregates it (Pascanu 2013, section 3.2).

    ``inner(g min(1, norm / |g|))``, with one norm over all parameters. Each rank clips its own gradient before weights
    apply; ``clip_grad_norm_`` after backward clips the aggregate instead. The norm is computed in float64. A gradient
    whose norm is not finite stays unchanged, so NaN and inf reach the other ranks. Put error feedback inside,
    ``clip(ef(bf16))``: outside, it would add the clipped part to the next gradient.

    Aggregation needs the whole gradient, so nothing is sent during backward. State, weights and bytes on the wire are
    those of ``inner``.

    Source:
        Pascanu et al., *On the difficulty of training recurrent neural networks*, 2013, section 3.2.

    When to choose:
        Single ranks have exploding gradients.

    Attributes:
        inner: the policy that aggregates the clipped gradients.
        norm: largest L2 norm, in units of the gradients as they arrive (multiplied by a GradScaler's scale).
    """

    inner: Policy = MEAN
    norm: float = option(1.0, above=0)
    scope = "step"
    additive = False

    @property
    def rounds(self) -> int | None:
        return self.inner.rounds

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        bucket.buffer.mul_(clip_factor(bucket.buffer, bucket.layout, self.norm))
        result = yield from self.inner.aggregate(bucket, state["inner"])
        return Aggregated(result.update, state={"inner": result.state})


Plan = dict[str, tuple[Layout, Runs]]
"""By rule: the layout of the rule's part of a bucket, and the part's offsets in the bucket."""


@dataclass(frozen=True)
class Partition(Policy):
    """A policy per parameter: that of the first rule that matches, or ``rest`` if none matches.

    ``partition(*.bias=mean, <1024=mean, 1d=fp16, bfloat16=mean, rest=ef(bf16))``. A rule is

    - a number of elements: ``<1024``, ``<=1024``, ``>1024``, ``>=1024``;
    - a number of dimensions: ``1d``, or a comparison, ``>=2d``;
    - the type of the parameter's gradient: ``float16``, ``bfloat16``, ``float32``, ``float64``;
    - otherwise a pattern of the parameter's name, as in :mod:`fnmatch`: ``*.bias``, ``layers.[0-3].*``.

    The parameters of a bucket that share a rule form a bucket of their own. State: that of each policy, keyed by the
    text of its rule. Weights and bytes on the wire are those of the policies.

    When to choose:
        Parameters need different policies: small ones are sent whole and matrices compressed, for example.

    Attributes:
        rules: pairs of a rule and a policy, in order; the constructor also takes a mapping.
        rest: the policy of all other parameters.

    Raises:
        ConfigurationError: a rule does not parse, is given twice or is ``rest``, or has no policy.
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
        """Return the text of the first rule that a parameter matches, or ``"rest"``."""
        return next((text for text, _ in self.rules if _matcher(text)(name, shape, dtype)), "rest")

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {key: inner.init(parameters_of(self, key, params)) for key, inner in self.inners().items()}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        inners = self.inners()
        return self._run(bucket, state, lambda key: inners[key].aggregate)

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        inners = self.inners()
        return self._run(bucket, state, lambda key: inners[key].after_step if inners[key].due(bucket.step) else skip)

    def start_from(self, bucket: Bucket, state: State) -> State:
        """Set the anchors of each inner policy from its part; see :func:`hvdbridge.policy.base.start_from`."""
        inners, plan = self.inners(), self._plan(bucket)
        return {key: base.start_from(inners[key], _select(bucket, *part), state[key]) for key, part in plan.items()}

    def _run(self, bucket: Bucket, state: State, start: Callable[[str], Callable[[Bucket, State], Flow]]) -> Flow:
        """Run the flows of all parts, one after the other, and join their updates.

        If a flow yields Early, the joined update is yielded once every flow has reached its Early or its end. The early
        flows are finished after that.
        """
        plan = self._plan(bucket)
        buckets: dict[str, Bucket] = {}
        flows: dict[str, Flow] = {}
        outcomes: dict[str, Early | Aggregated] = {}
        for key, part in plan.items():
            buckets[key] = _select(bucket, *part)
            flows[key] = start(key)(buckets[key], state[key])
            outcomes[key] = yield from advance(flows[key])
        early = any(isinstance(outcome, Early) for outcome in outcomes.values())
        if early:
            yield Early(_join({key: outcome.update for key, outcome in outcomes.items()}, bucket, plan))
        results: dict[str, Aggregated] = {}
        for key, outcome in outcomes.items():
            results[key] = (yield from finish(flows[key])) if isinstance(outcome, Early) else outcome
        update = _join({key: result.update for key, result in results.items()}, bucket, plan, output=not early)
        rests = {key: results[key].left_of(part) for key, part in buckets.items()} if bucket.needs_sent else {}
        state = {key: result.state for key, result in results.items()}
        return Aggregated(update, state=state, rest=_join(rests, bucket, plan) if rests else None)

    def _plan(self, bucket: Bucket) -> Plan:
        layout = bucket.layout
        dtypes = tuple(layout.dtypes.get(name, bucket.buffer.dtype) for name in layout.names)
        return layout.derive((self, dtypes), lambda: self._make_plan(layout, dtypes))

    def _make_plan(self, layout: Layout, dtypes: Sequence[torch.dtype]) -> Plan:
        params = zip(layout.shapes.items(), dtypes, strict=True)
        rules = {name: self.rule_of(name, shape, dtype) for (name, shape), dtype in params}
        keys = [key for key in self.inners() if key in rules.values()] or ["rest"]
        parts = {key: layout.part(name for name, rule in rules.items() if rule == key) for key in keys}
        offsets = layout.offsets
        return {
            key: (part, Runs((offsets[name], part.offsets[name], part.sizes[name]) for name in part.names))
            for key, part in parts.items()
        }


@own_member_first()
def parameters_of(policy: Policy, key: str, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the ``params`` that the inner policy under ``key`` aggregates."""
    if not isinstance(policy, Partition):
        return params
    return {name: p for name, p in params.items() if policy.rule_of(name, p.shape, p.dtype) == key}


def unmatched_patterns(policy: Policy, names: Iterable[str]) -> list[str]:
    """Return the name patterns of all :class:`Partition` in ``policy`` that match none of ``names``.

    >>> unmatched_patterns(Partition({"*.bias": MEAN, "<1024": MEAN, "0.*": MEAN}), ["0.weight"])
    ['*.bias']
    """
    names = list(names)
    rules = [rule for rule, _ in policy.rules] if isinstance(policy, Partition) else []
    unmatched = [rule for rule in rules if is_pattern(rule) and not any(fnmatchcase(name, rule) for name in names)]
    return unmatched + [rule for inner in policy.inners().values() for rule in unmatched_patterns(inner, names)]


@own_member_first(warn=False)
def statistics(policy: Policy, params: Mapping[str, Tensor], state: State) -> dict[str, float]:
    """Return this rank's statistics of ``policy`` for ``sync.stats()``, by name.

    A policy class may define a method of this name instead. Names from an inner policy under a key other than
    ``inner`` have the key as prefix: ``then.compression_rate``.

    Args:
        params: the parameters that the policy aggregates, on the device ``meta``.
        state: the state of ``policy``.
    """
    merged: dict[str, float] = {}
    for key, inner in policy.inners().items():
        values = statistics(inner, parameters_of(policy, key, params), state[key])
        merged |= {name if key == "inner" else f"{key}.{name}": value for name, value in values.items()}
    return merged


@own_member_first()
def averaged(policy: Policy, step: int) -> bool:
    """Return whether a job may stop after this step: replicas are equal, or no later step makes them equal."""
    if isinstance(policy, Warmup):
        return base.switches(policy, step) or averaged(policy.turn(step)[1], step)
    if policy.replicas == "drift" and type(policy).due is not Policy.due:
        return bool(policy.due(step)) or step < getattr(policy, "start", 0)
    return all(averaged(inner, step) for inner in policy.inners().values())


def _select(bucket: Bucket, part: Layout, runs: Runs) -> Bucket:
    """Return one part of a bucket as a bucket with a copy of its gradients; the bucket itself if it is all of it."""
    if part is bucket.layout:
        return bucket
    selected = runs.to(bucket.buffer, part.empty(bucket.buffer.dtype, bucket.buffer.device))
    return replace(bucket, buffer=selected, layout=part, spare=None)


def _join(tensors: Mapping[str, Tensor], bucket: Bucket, plan: Plan, output: bool = False) -> Tensor:
    """Join the parts' flat vectors into one of the bucket; ``output``: in the bucket's output buffer."""
    if len(tensors) == 1:
        (only,) = tensors.values()
        return only
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    joined = bucket.output(dtype) if output else bucket.layout.empty(dtype, bucket.buffer.device)
    for key, (_, runs) in plan.items():
        runs.back(joined, tensors[key])
    return joined


def skip(bucket: Bucket, state: State) -> Flow:
    """Return the bucket's buffer as the update, without communication: the flow of a policy that is not due."""
    yield from ()
    return Aggregated(bucket.buffer)


Matcher = Callable[[str, torch.Size, torch.dtype], bool]
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_SIZE = re.compile(r"(<=?|>=?)([0-9]+)(d?)|([0-9]+)d")
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def is_pattern(rule: str) -> bool:
    """Return whether the text of a rule is a pattern of names, and neither a dtype nor a comparison of sizes.

    >>> is_pattern("*.bias"), is_pattern("0"), is_pattern("1d"), is_pattern("<1024"), is_pattern("bfloat16")
    (True, True, False, False, False)
    """
    return rule not in _DTYPES and _SIZE.fullmatch(rule) is None


def _matcher(rule: str) -> Matcher:
    """Return the predicate of name, shape and dtype for the text of a rule.

    Raises:
        ConfigurationError: the text is empty or an incomplete comparison.
    """
    if rule in _DTYPES:
        return lambda name, shape, dtype: dtype is getattr(torch, rule)
    match = _SIZE.fullmatch(rule)
    if match is None:
        if not rule or rule[0] in "<>":
            raise ConfigurationError(f"Partition: rule {rule!r} compares with nothing; write <1024, >=1024, 1d or >=2d")
        return lambda name, shape, dtype: fnmatchcase(name, rule)
    if match[4]:
        return lambda name, shape, dtype: len(shape) == int(match[4])
    compare, limit, of_dims = _COMPARE[match[1]], int(match[2]), bool(match[3])
    return lambda name, shape, dtype: compare(len(shape) if of_dims else shape.numel(), limit)
