"""Local steps: ranks train independently and average their parameters at intervals.

Rules:

1. Between averages the update is this rank's own gradient (zeros if its weight is 0), and replicas drift.
2. Averages use the weights of the step that they follow. A rank of weight 0 receives the other ranks' average.
3. The inner policy aggregates parameters, or their differences from an anchor that is equal on all ranks. With an
   anchor a lossy inner policy loses parts of the differences, not of the parameters.
4. Arithmetic is in float32 (float64 for float64 parameters); the final parameters are rounded to their own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies.delayed import has_delay
from hvdbridge.policies.dense import MEAN, Mean, local_gradient
from hvdbridge.policy.base import SWITCH, Aggregated, Branch, Flow, Policy, Slot, State, anchored, finish, start_from
from hvdbridge.policy.bucket import Bucket, Views, flatten, scale
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class _Local(Policy):
    """Base of the policies that aggregate parameters through ``inner``.

    Raises:
        ConfigurationError: replicas drift under ``inner``, or ``inner`` contains :class:`~.delayed.Delayed`.
    """

    inner: Policy = MEAN
    replicas = "drift"
    slots: ClassVar[Mapping[str, Slot | Branch]] = {"anchor": Slot(anchor=True), "inner": Branch(parameters=True)}
    additive = False
    scope = "bucket"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.replicas == "drift":
            raise ConfigurationError(f"{type(self).__name__}: inner={type(self.inner).__name__} averages nothing")
        if has_delay(self.inner):
            raise ConfigurationError(
                f"{type(self).__name__}: inner={type(self.inner).__name__} is a step late, and an average cannot wait: "
                "delayed is for gradients"
            )

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        yield from ()
        return Aggregated(local_gradient(bucket))


def copies(params: Mapping[str, Tensor], wide: bool = True) -> dict[str, Tensor]:
    """Return copies of the parameters' values, in float32 or wider (``wide``) or in their own type."""
    dtypes = {name: torch.promote_types(p.dtype, torch.float32) if wide else p.dtype for name, p in params.items()}
    return {name: p.detach().to(dtypes[name], copy=True) for name, p in params.items()}


@dataclass(frozen=True)
class LocalSgd(_Local):
    """Local SGD: parameters become their weighted mean over ranks every ``every`` steps (Stich 2019, algorithm 1).

    With ``inner=mean``, ``theta = sum_r w_r theta_r / sum(w)``. With another inner policy,
    ``theta = a + inner(theta_r - a)``, where the anchor a is the last average: ``local_sgd(every=8, inner=bf16)``,
    ``local_sgd(every=8, inner=ef(bf16))``. The first anchor is the parameters with which local steps begin: those
    before the first step (in a Simulation, the tensors in ``params``), or those after another policy's phase
    (:class:`~.wrappers.Warmup`). Load the same model weights on every rank.

    State: ``anchor``, the size of the parameters in float32 (float64 for float64), equal on all ranks; none with
    ``inner=mean``. On the wire: the bytes of ``inner``, once every ``every`` steps.

    Source:
        Stich, *Local SGD converges fast and communicates little*, 2019, algorithm 1.

    When to choose:
        Latency or bandwidth limits the step, and ranks may take several steps alone.

    Attributes:
        every: number of local steps between two averages; the first average follows step ``every - 1``.
        inner: the policy that averages the parameters or their differences from the anchor.
    """

    every: int = option(8, at_least=1)

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"anchor": copies(params) if anchored(self) else {}, "inner": self.inner.init(params)}

    @property
    def slots(self) -> Mapping[str, Slot | Branch]:  # type: ignore[override]
        inner = {"inner": Branch(parameters=True)}
        return inner if isinstance(self.inner, Mean) else {"anchor": Slot(anchor=True), **inner}

    def due(self, step: int) -> int:
        return (step + 1) % self.every == 0

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        if not anchored(self):
            result = yield from finish(self.inner.aggregate(bucket, state["inner"]))
            return Aggregated(result.update)
        anchor = flatten(state["anchor"], bucket.layout)
        difference = bucket.with_buffer(bucket.buffer - anchor)
        result = yield from finish(self.inner.aggregate(difference, state["inner"]))
        average = anchor + result.update
        return Aggregated(average, state={"anchor": Views(bucket.layout, average), "inner": result.state})


@dataclass(frozen=True)
class PostLocalSgd(LocalSgd):
    """Post-local SGD (Lin 2020, section 3): the mean of gradients for ``start`` steps, then local SGD.

    Parameters are averaged over all ranks after steps start, start + every, and so on. PyTorch does the same with
    ``post_localSGD_hook(start_localSGD_iter=start)`` and ``PeriodicModelAverager(warmup_steps=start, period=every)``.
    If ``inner`` is not ``mean``, the first anchor is the parameters after step start - 1. State: as
    :class:`LocalSgd`.

    Source:
        Lin et al., *Don't use large mini-batches, use local SGD*, 2020, section 3.

    When to choose:
        The purpose is that of ``local_sgd``, and training needs the mean of all gradients at its start.

    Attributes:
        start: number of steps in which gradients are averaged over all ranks.
        group: the ranks over which gradients are averaged afterwards: those of a ``node`` (PyTorch's ``subgroup``),
            ``none``, or ``world``.
        every: number of local steps between two averages over all ranks.
        inner: the policy that averages the parameters or their differences from the anchor, as in :class:`LocalSgd`.

    Raises:
        Unsupported: ``group="node"``, and it is not known which ranks share a node.
    """

    start: int = option(100, at_least=0)
    group: Literal["none", "node", "world"] = "node"

    def due(self, step: int) -> int:
        if step == self.start - 1 and anchored(self):
            return SWITCH
        return step >= self.start and (step - self.start) % self.every == 0

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        if bucket.step < self.start:  # local steps begin: set the first anchor
            return Aggregated(bucket.buffer, state=start_from(self, bucket, state))
        return (yield from super().after_step(bucket, state))

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if bucket.decide(lambda step, _: step < self.start) or self.group == "world":
            return (yield from MEAN.aggregate(bucket, {}))
        if self.group == "none":
            return Aggregated(local_gradient(bucket))
        return Aggregated((yield AllReduce(scale(bucket.buffer, share_in_node(bucket)), group="node")))


@dataclass(frozen=True)
class DiLoCo(_Local):
    """DiLoCo (Douillard 2023, algorithm 1): an outer optimizer steps along the averaged change of the parameters.

    ``d = inner(a - theta_r)``, ``m' = momentum m + d``, ``theta = a - lr (d + momentum m')``, ``a' = theta``. The outer
    optimizer is SGD with Nesterov momentum, as ``torch.optim.SGD(nesterov=True)``. With ``lr=1, momentum=0`` the policy
    is local SGD.

    State: ``anchor`` (a) and ``momentum`` (m), each the size of the parameters in float32 (float64 for float64), equal
    on all ranks. The first anchor is the parameters before the first step (in a Simulation, the tensors in ``params``),
    or those after another policy's phase (:class:`~.wrappers.Warmup`). Load the same model weights on every rank.
    On the wire: the bytes of ``inner``, once every ``every`` steps.

    Source:
        Douillard et al., *DiLoCo: distributed low-communication training of language models*, 2023, algorithm 1.

    When to choose:
        Sites communicate over distant links, and can afford a round now and then.

    Attributes:
        every: number of local steps between two outer steps; the first outer step follows step ``every - 1``.
        lr: learning rate of the outer optimizer.
        momentum: momentum of the outer optimizer.
        inner: the policy that averages the differences ``a - theta_r``.
    """

    every: int = option(500, at_least=1)
    lr: float = option(0.7, above=0)
    momentum: float = option(0.9, at_least=0, below=1)

    def init(self, params: Mapping[str, Tensor]) -> State:
        anchor = copies(params)
        momentum = {name: torch.zeros_like(tensor) for name, tensor in anchor.items()}
        return {"anchor": anchor, "momentum": momentum, "inner": self.inner.init(params)}

    def due(self, step: int) -> int:
        return (step + 1) % self.every == 0

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        anchor, momentum = (flatten(state[key], bucket.layout) for key in ("anchor", "momentum"))
        change = bucket.with_buffer(anchor - bucket.buffer)
        result = yield from finish(self.inner.aggregate(change, state["inner"]))
        momentum = (momentum * self.momentum).add_(result.update)
        new = anchor.add(result.update.add(momentum, alpha=self.momentum), alpha=-self.lr)
        views = {key: Views(bucket.layout, flat) for key, flat in (("anchor", new), ("momentum", momentum))}
        return Aggregated(new, state={**views, "inner": result.state})


def share_in_node(bucket: Bucket) -> float:
    """Return this rank's share of its node's weight, from 0 to 1; equal shares if no weights were set.

    Raises:
        Unsupported: it is not known which ranks share a node.
    """
    _, size = bucket.place("node")
    weights = bucket.decide(lambda _, weights: weights)
    if weights is None:
        return 1.0 / size
    nodes = bucket.ranks.nodes
    total = sum(w for w, node in zip(weights, nodes, strict=True) if node == nodes[bucket.rank])
    return weights[bucket.rank] / total if total else 0.0
