"""Robust policies, for ranks that are not equally trusted: up to f of them may send anything.

Rules:

1. ``f`` is checked against the number of ranks at construction of whatever trains with it, and against the ranks of
   positive weight in every step, before anything is sent.
2. A rank that sends NaN or inf counts as faulty and is left out: per element in ``median`` and ``trimmed_mean``,
   the whole rank in the others. Where more than f are faulty in this way the update is NaN on every rank.
3. Raw gradients travel, in their own type; arithmetic is in float32 (float64 for float64), dot products in float64.
4. Memory: the ranks' gradients of a shard, N times 1/N of the bucket, are held as they came and as they are worked on,
   beside update and messages: up to two buckets, where the whole gradient may be one.
5. The owner of a shard aggregates it and sends the result, so all ranks end with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.cells import combine
from hvdbridge.kernels.order import median, trimmed_mean
from hvdbridge.policies.combining import collect, divide, gram, plan, raw, weights_of
from hvdbridge.policies.feedback import residuals
from hvdbridge.policies.shards import FlatShards
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten
from hvdbridge.policy.options import option

TINY = 1e-300
"""Stands for the distance zero where it divides."""

HUGE = 1e300
"""A squared norm from here on counts as inf: products of such vectors could overflow."""


class _Robust(Policy):
    """Base of a rule that survives ``f`` faulty ranks; None: as many as it can."""

    f: Any

    def check_ranks(self, weights: Sequence[float]) -> None:
        """
        Raises:
            ConfigurationError: ranks of these (positive) weights cannot outvote f of them.
        """
        if self.f is None:
            return
        _check_count(self, self.f, len(weights), 2 * self.f + 1, "2 f + 1")
        if self.f and sum(sorted(weights)[-self.f :]) >= sum(weights) / 2:
            raise ConfigurationError(
                f"{type(self).__name__}: f={self.f} faulty ranks must have less than half of the weight, whichever "
                f"they are; the weights are {list(weights)}"
            )

    def check_size(self, size: int, nodes: int | None = None) -> None:
        self.check_ranks([1.0] * size)


@dataclass(frozen=True)
class _Elementwise(_Robust):
    """A rule that looks at one element of all ranks at a time, by the sharded scheme."""

    rounds = 2
    bytewise = True

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One result of all rows, in float32 or wider; may be made in the memory of the first."""
        raise NotImplementedError

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        weights = weights_of(bucket)
        self.check_ranks(weights)
        flat = raw(bucket)
        shards = FlatShards(flat.numel(), bucket.size)
        rows = yield from divide(flat, shards, bucket)
        return Aggregated((yield from collect(rows, self.reduce(rows, weights), shards, flat.dtype, bucket)))


@dataclass(frozen=True)
class Median(_Elementwise):
    """The median of each element over the ranks (Yin 2018, definition 1); of an even number the mean of the middle two.

    With unequal weights the weighted median: the value at which the weights of the smaller ones reach half of the sum.
    It survives every set of faulty ranks with less than half of the weight: at equal weights (N-1)/2 of N, rounded
    down. Up to so many values of one element may be NaN or inf; the median is that of the others.

    On the wire: ``2 (N-1)/N`` of the gradient, in its own type.

    Attributes:
        f: faulty ranks that it must survive, for a check: N > 2 f, and any f ranks have less than half of the
            weight. None: as many as it can.
    """

    f: int | None = option(None, at_least=0)

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return median(rows, weights, self.f, rows[0])


@dataclass(frozen=True)
class TrimmedMean(_Elementwise):
    """The mean of each element over the ranks, without its ``f`` largest and its ``f`` smallest values
    (Yin 2018, definition 2, with beta = f/N).

    It survives f faulty ranks of N > 2 f. Weights are those of the mean of what is left; what is left out is decided
    by rank, so each value that counts lies between those of two honest ranks, whatever the weights. A value that is
    NaN or inf is one of the f: it is left out, and of the others one fewer on either side.

    On the wire: ``2 (N-1)/N`` of the gradient, in its own type.
    """

    f: int = option(1, at_least=0)

    def check_ranks(self, weights: Sequence[float]) -> None:
        _check_count(self, self.f, len(weights), 2 * self.f + 1, "2 f + 1")

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return trimmed_mean(rows, self.f, weights, rows[0])


@dataclass(frozen=True)
class _Whole(_Robust):
    """A rule that looks at the ranks' whole gradients: a combination of them whose coefficients come from their
    dot products.

    Dot products are exact to some 2**-50 of the norms' product, so two gradients that differ by less than 2**-24 of
    their norm are not told apart.
    """

    scope = "step"

    def coefficients(self, products: Tensor, good: Tensor, weights: Sequence[float]) -> Tensor:
        """Float64, one per row; NaN where too many rows are not good.

        Args:
            products: dot products of the rows, float64; zeros for rows that are not good.
            good: bool per row; the row is finite.
            weights: of the ranks.
        """
        raise NotImplementedError

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from self._combine(bucket)))

    def _combine(self, bucket: Bucket, centre: Tensor | None = None) -> Exchange:
        """``centre``: a vector that all ranks have, as one more row, behind those of the ranks."""
        weights = weights_of(bucket)
        self.check_ranks(weights)
        flat = raw(bucket)
        shards, cells = plan(bucket)
        rows = yield from divide(flat, shards, bucket)
        if centre is not None:
            rows.append(shards.owned(centre, bucket.rank))
        products = yield from gram(rows, cells)
        good = products.diagonal() < HUGE
        products = torch.where(good & good[:, None], products, torch.zeros_like(products))
        mine = combine(rows, self.coefficients(products, good, weights), good, rows[0])
        return (yield from collect(rows, mine, shards, flat.dtype, bucket))


@dataclass(frozen=True)
class MultiKrum(_Whole):
    """The mean of the ``m`` gradients of the lowest scores; a score is the sum of the squared distances to the
    N - f - 2 nearest others (Blanchard 2017).

    It survives f faulty ranks of N >= 2 f + 3. Ties go to the lower rank. A rank with NaN or inf anywhere is infinitely
    far from the others. Unequal weights are refused: the score has no weighted definition.

    On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and an all-reduce of N (N+1)/2 doubles. It needs the
    whole gradient, so nothing travels while backward runs.

    Attributes:
        f: faulty ranks that it must survive.
        m: gradients in the mean, at most N - f. None: N - f - 2, up to which the rule is proved (El Mhamdi 2018).
    """

    f: int = option(1, at_least=0)
    m: int | None = option(None, at_least=1)
    unequal_weights = False

    def check_ranks(self, weights: Sequence[float]) -> None:
        count = len(weights)
        _check_count(self, self.f, count, 2 * self.f + 3, "2 f + 3")
        if self.m is not None and self.m > count - self.f:
            raise ConfigurationError(
                f"{type(self).__name__}: m={self.m} must be at most N - f = {count - self.f}: "
                f"{count} ranks have a positive weight, and f={self.f} of them may be faulty"
            )

    def coefficients(self, products: Tensor, good: Tensor, weights: Sequence[float]) -> Tensor:
        count = len(weights)
        chosen = self.m if self.m is not None else count - self.f - 2
        norms = products.diagonal()
        # Two orders of adding, so that the matrix is symmetric to the bit.
        distances = ((norms + norms[:, None]) - 2 * products).clamp(min=0)
        distances = torch.where(good & good[:, None], distances, torch.full_like(distances, math.inf))
        distances = distances + torch.where(
            torch.eye(count, dtype=torch.bool, device=norms.device), torch.inf, torch.zeros_like(distances)
        )
        scores = distances.sort(dim=1).values[:, : count - self.f - 2].sum(1)
        best = torch.argsort(scores, stable=True)[:chosen]
        picked = torch.zeros_like(norms).scatter(0, best, 1 / chosen)
        return _unless((~good).sum() > self.f, picked)


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one gradient of the lowest score; a score is the sum of the squared distances to the N - f - 2 nearest
    others (Blanchard 2017).

    ``multi_krum`` with m = 1; see there.
    """

    m: int | None = option(1, at_least=1, at_most=1)


@dataclass(frozen=True)
class GeometricMedian(_Whole):
    """The point with the least weighted sum of distances to the ranks' gradients, by the smoothed Weiszfeld algorithm
    (Pillutla 2019, "RFA").

    ``v <- sum_i b_i g_i / sum_i b_i`` with ``b_i = w_i / max(nu, |v - g_i|)``. It survives every set of faulty ranks
    with less than half of the weight. The first ``b_i`` take, in the place of ``|v - g_i|``, the distance from
    g_i within which more than half of the weight lies: from the mean, where the paper starts, it would take as many
    iterations to leave a gradient of 1e30 as that number has digits. ``nu`` is ``smoothing`` times the least of these
    distances, so the rule does not change with the gradients' scale.

    On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and an all-reduce of N (N+1)/2 doubles: points on the
    way are combinations of the gradients, so iterations cost no communication. It needs the whole gradient, so
    nothing travels while backward runs.

    Attributes:
        f: faulty ranks that it must survive, for a check: N > 2 f, and any f ranks have less than half of the
            weight. None: as many as it can.
        iterations: of Weiszfeld.
        smoothing: nu, relative.
    """

    f: int | None = option(None, at_least=0)
    iterations: int = option(8, at_least=1)
    smoothing: float = option(1e-6, above=0, at_most=1)

    def coefficients(self, products: Tensor, good: Tensor, weights: Sequence[float]) -> Tensor:
        share, lost = _shares(good, weights, self.f)
        norms = products.diagonal()
        apart = ((norms + norms[:, None]) - 2 * products).clamp(min=0).sqrt()
        apart = torch.where(torch.eye(len(weights), dtype=torch.bool, device=norms.device), 0.0, apart)
        near, order = torch.where(good, apart, torch.inf).sort(dim=1)
        inside = (share[order].cumsum(1) <= 0.5).sum(1, keepdim=True).clamp(max=len(weights) - 1)
        distance = near.gather(1, inside)[:, 0]
        floor = self.smoothing * torch.where(good, distance, torch.inf).min()
        point = share
        for i in range(self.iterations):
            if i:
                distance = _distances(products, point)
            pull = share / torch.maximum(distance, floor).clamp(min=TINY)
            point = pull / pull.sum()
        return _unless(lost, point)


@dataclass(frozen=True)
class ClippedMean(_Whole):
    """Centred clipping: the mean of the gradients' differences from a centre, each clipped to a radius
    (Karimireddy 2021, "Learning from history").

    ``v <- v + sum_i w_i (g_i - v) min(1, radius / |g_i - v|) / sum(w)``, ``iterations`` times, from the update of the
    step before. No rank moves the update by more than its share of the radius, so it survives up to half of the
    weight in the sense that nobody can move it far, and is proved to converge for up to a tenth of the ranks.
    It was made for gradients with momentum taken on each rank.

    On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and an all-reduce of (N+1)(N+2)/2 doubles, however
    many iterations. It needs the whole gradient, so nothing travels while backward runs.

    State: ``centre``, the last update, the same on all ranks, in float32 or wider.

    Attributes:
        f: faulty ranks that it must survive, for a check: N > 2 f, and any f ranks have less than half of the
            weight. None: as many as it can.
        radius: the paper's tau, a norm of the whole gradient; in the units in which gradients arrive, so a
            GradScaler's scale is in it.
        iterations: the paper's l, there 1 where gradients hardly change from step to step. They cost no
            communication, and plain gradients need some to come away from the last update.
    """

    f: int | None = option(None, at_least=0)
    radius: float = option(10.0, above=0)
    iterations: int = option(5, at_least=1)
    slots: ClassVar[Mapping[str, Slot]] = {"centre": Slot(gradient_units=True)}

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"centre": residuals(params)}

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        centre = flatten(state["centre"], bucket.layout)
        update = yield from self._combine(bucket, centre)
        kept = update.clone() if update is bucket.buffer else update
        return Aggregated(update, state={"centre": Views(bucket.layout, kept)})

    def coefficients(self, products: Tensor, good: Tensor, weights: Sequence[float]) -> Tensor:
        share, lost = _shares(good[:-1], weights, self.f)
        point = torch.zeros_like(products[0])
        point[-1:] = 1.0
        for _ in range(self.iterations):
            distance = _distances(products, point)[:-1]
            pull = share * (self.radius / distance.clamp(min=TINY)).clamp(max=1.0)
            point = point * (1 - pull.sum())
            point[:-1] += pull
        return _unless(lost, point)


def _distances(products: Tensor, point: Tensor) -> Tensor:
    """From each row to the combination ``point`` of all rows."""
    images = products @ point
    return ((products.diagonal() - 2 * images) + (images * point).sum()).clamp(min=0).sqrt()


def _shares(good: Tensor, weights: Sequence[float], f: int | None) -> tuple[Tensor, Tensor]:
    """The good rows' shares of their weight, float64, and whether the others are too many."""
    given = torch.tensor(weights, dtype=torch.float64, device="cpu", pin_memory=good.is_cuda)
    given = given.to(good.device, non_blocking=True)  # a GPU's stream is not waited for
    share = torch.where(good, given, 0.0)
    bad = (~good).sum()
    lost = bad > f if f is not None else share.sum() <= sum(weights) / 2
    return share / share.sum().clamp(min=TINY), lost


def _unless(lost: Tensor, coefficients: Tensor) -> Tensor:
    return torch.where(lost, math.nan, coefficients)


def _check_count(policy: Policy, f: int, count: int, least: int, formula: str) -> None:
    if count < least:
        raise ConfigurationError(
            f"{type(policy).__name__}: f={f} faulty ranks need N >= {formula} = {least} ranks of positive weight, "
            f"there are {count}"
        )
