"""Local steps: ranks train alone and average their parameters now and then.

Rules:

1. Between averages an update is this rank's own gradient (zeros where its weight is 0), and replicas drift.
2. Averages are weighted by the weights of the step that they follow; a rank of weight 0 gets the others' average.
3. What the inner policy aggregates are parameters, or their differences from an anchor that all ranks share: a lossy
   inner policy then loses parts of the differences, not of the parameters.
4. Arithmetic is in float32 (float64 for float64 parameters); parameters are rounded to their type at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.policies.delayed import has_delay
from hvdbridge.policies.dense import MEAN, Mean, own
from hvdbridge.policy.base import SWITCH, Aggregated, Branch, Flow, Policy, Slot, State, anchored, finish, start_from
from hvdbridge.policy.bucket import Bucket, Views, flatten, scale
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.policy.options import option


@dataclass(frozen=True)
class _Local(Policy):
    """Base of the policies that aggregate parameters through ``inner``."""

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
        return Aggregated(own(bucket))


def copies(params: Mapping[str, Tensor], wide: bool = True) -> dict[str, Tensor]:
    """Copies of the parameters' values, in float32 or wider."""
    kinds = {name: torch.promote_types(p.dtype, torch.float32) if wide else p.dtype for name, p in params.items()}
    return {name: p.detach().to(kinds[name], copy=True) for name, p in params.items()}


@dataclass(frozen=True)
class LocalSgd(_Local):
    """Local SGD: every ``every`` steps parameters become their weighted mean over ranks (Stich 2019, algorithm 1).

    One average travels as ``inner`` sends it: 1/every of the bytes of gradients. With an inner policy other than
    ``mean``, ``theta = a + inner(theta_r - a)`` where the anchor a (state, the size of the parameters) is the last
    average: ``local_sgd(every=8, inner=bf16)``, ``local_sgd(every=8, inner=ef(bf16))``. The first anchor are the
    parameters with which local steps begin: those before the first step (in a Simulation, those that ``params`` gives
    as tensors), or after another policy's turn (:class:`~.wrappers.Warmup`). Load the same weights on every rank.

    Attributes:
        every: local steps between two averages; the first comes after step ``every - 1``.
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

    What PyTorch does with ``post_localSGD_hook(start_localSGD_iter=start)`` and
    ``PeriodicModelAverager(warmup_steps=start, period=every)`` together: parameters are averaged over all ranks after
    steps start, start + every, and so on. Where ``inner`` is not ``mean``, the first anchor are the parameters when
    local steps begin, after step start - 1.

    Attributes:
        start: steps in which gradients are averaged over all ranks.
        group: over whom gradients are averaged afterwards: ``node`` (as PyTorch's ``subgroup``), ``none`` or ``world``.
    """

    start: int = option(100, at_least=0)
    group: Literal["none", "node", "world"] = "node"

    def due(self, step: int) -> int:
        if step == self.start - 1 and anchored(self):
            return SWITCH
        return step >= self.start and (step - self.start) % self.every == 0

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        if bucket.step < self.start:  # local steps begin here, and so does what they are compared to
            return Aggregated(bucket.buffer, state=start_from(self, bucket, state))
        return (yield from super().after_step(bucket, state))

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        if bucket.step < self.start or self.group == "world":
            return (yield from MEAN.aggregate(bucket, {}))
        if self.group == "none":
            return Aggregated(own(bucket))
        return Aggregated((yield AllReduce(scale(bucket.buffer, share_in_node(bucket)), group="node")))


@dataclass(frozen=True)
class DiLoCo(_Local):
    """DiLoCo (Douillard 2023, algorithm 1): an outer optimizer steps along the averaged change of the parameters.

    ``d = inner(a - theta_r)``, ``m' = momentum m + d``, ``theta = a - lr (d + momentum m')``, ``a' = theta``: SGD with
    Nesterov momentum, as ``torch.optim.SGD(nesterov=True)``. With ``lr=1, momentum=0`` it is local SGD.

    State: ``anchor`` (a) and ``momentum`` (m), each the size of the parameters in float32, replicated. The first
    anchor are the parameters before the first step (in a Simulation, those that ``params`` gives as tensors), or after
    another policy's turn (:class:`~.wrappers.Warmup`). Load the same weights on every rank.

    Attributes:
        every: local steps between two outer steps; the first comes after step ``every - 1``.
        lr, momentum: of the outer optimizer.
        inner: how differences travel.
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
    """This rank's part of its node's weight; equal ones where no weights were set.

    Raises:
        Unsupported: it is not known which ranks share a node.
    """
    _, size = bucket.place("node")
    if bucket.weights is None:
        return 1.0 / size
    nodes = bucket.ranks.nodes
    total = sum(w for w, node in zip(bucket.weights, nodes, strict=True) if node == nodes[bucket.rank])
    return bucket.weight / total if total else 0.0
