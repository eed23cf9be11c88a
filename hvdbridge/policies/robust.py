"""Robust policies: aggregates that tolerate up to f faulty ranks, which may send any values.

Rules:

1. ``f`` is checked against the number of ranks when training is set up, and in each step against the number of ranks of
   positive weight, before anything is sent.
2. A rank that sends NaN or inf counts as faulty and is left out: per element in ``median`` and ``trimmed_mean``, as a
   whole in the others. If more than f ranks are faulty in this way, the update is NaN on all ranks.
3. Unweighted gradients are sent in their own type. Arithmetic is in float32 (float64 for float64), dot products are in
   float64.
4. Memory: an owner holds all ranks' gradients of its shard (N times 1/N of the bucket) as received and as computed on,
   beside update and messages: up to two buckets. The whole gradient may be one bucket.
5. The owner of a shard aggregates it and sends the result, so all ranks have equal bits.
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
from hvdbridge.policies.combining import exchange_shards, gather_shards, gram, raw_gradient, shard_cells, weights_of
from hvdbridge.policies.feedback import residuals
from hvdbridge.policies.shards import FlatShards
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten
from hvdbridge.policy.options import option

MIN_DIVISOR = 1e-300
"""Divisors are clamped to this, so that a distance of zero divides."""

MAX_SQUARE = 1e300
"""Rows with a squared norm from this on count as not finite: dot products of such rows could overflow."""


class _Robust(Policy):
    """Base of a rule that tolerates ``f`` faulty ranks; None: as many as the rule can."""

    f: Any

    def check_ranks(self, weights: Sequence[float]) -> None:
        """Check that the rule tolerates ``f`` faulty ranks among ranks of these positive weights.

        Raises:
            ConfigurationError: there are too few ranks, or f ranks can have half of the weight or more.
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
    """Base of a rule that aggregates each element on its own: all-to-all, reduction by the owners, all-gather."""

    rounds = 2
    bytewise = True

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the aggregate of ``rows`` ``[shard length]`` in float32 or wider; it may overwrite the first row."""
        raise NotImplementedError

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        weights = weights_of(bucket)
        self.check_ranks(weights)
        flat = raw_gradient(bucket)
        shards = FlatShards(flat.numel(), bucket.size)
        rows = yield from exchange_shards(flat, shards, bucket)
        return Aggregated((yield from gather_shards(rows, self.reduce(rows, weights), shards, flat.dtype, bucket)))


@dataclass(frozen=True)
class Median(_Elementwise):
    """Element-wise median over the ranks (Yin 2018, definition 1).

    For an even number of ranks it is the mean of the middle two values. With unequal weights it is the weighted median:
    the value at which the weights of all values up to it reach half of the sum. The median tolerates any faulty ranks
    with less than half of the weight: with equal weights (N-1)/2 of N, rounded down. As many values of an element may
    be NaN or inf; the result is the median of the others.

    State: none. On the wire: ``2 (N-1)/N`` of the gradient, in its own type.

    Source:
        Yin et al., *Byzantine-robust distributed learning: towards optimal statistical rates*, 2018, definition 1.

    When to choose:
        Fewer than half of the ranks may be faulty or hostile, and their number is not known.

    Attributes:
        f: number of faulty ranks to tolerate; needs N > 2 f, and any f ranks must have less than half of the weight.
            None: as many as possible.

    Raises:
        ConfigurationError: the ranks of positive weight do not tolerate ``f`` faulty ones.
    """

    f: int | None = option(None, at_least=0)

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return median(rows, weights, self.f, rows[0])


@dataclass(frozen=True)
class TrimmedMean(_Elementwise):
    """Element-wise mean over the ranks without the ``f`` largest and ``f`` smallest values (Yin 2018, definition 2).

    The paper's beta is f/N. The rule tolerates f faulty ranks of N > 2 f. The remaining values are averaged with their
    weights. Weights do not affect which values are left out, so each remaining value is between the values of two
    honest ranks. Each NaN or inf is left out, and counts as one of the f values on both sides.

    State: none. On the wire: ``2 (N-1)/N`` of the gradient, in its own type.

    Source:
        Yin et al., *Byzantine-robust distributed learning: towards optimal statistical rates*, 2018, definition 2.

    When to choose:
        At most ``f`` ranks may be faulty or hostile.

    Attributes:
        f: number of faulty ranks to tolerate.

    Raises:
        ConfigurationError: fewer than 2 f + 1 ranks have a positive weight.
    """

    f: int = option(1, at_least=0)

    def check_ranks(self, weights: Sequence[float]) -> None:
        _check_count(self, self.f, len(weights), 2 * self.f + 1, "2 f + 1")

    def reduce(self, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return trimmed_mean(rows, self.f, weights, rows[0])


@dataclass(frozen=True)
class _Whole(_Robust):
    """Base of a rule that combines whole gradients linearly, with coefficients that depend on their dot products.

    Dot products have an error of about 2**-50 of the product of the norms. Gradients that differ by less than 2**-24
    of their norm therefore count as equal.
    """

    scope = "step"

    def coefficients(self, products: Tensor, finite: Tensor, weights: Sequence[float]) -> Tensor:
        """Return the coefficients, float64 ``[rows]``; NaN if too many rows are not finite.

        Args:
            products: dot products of the rows, float64 ``[rows, rows]``; zeros for rows that are not finite.
            finite: whether each row is finite, bool ``[rows]``.
            weights: weights of the ranks.
        """
        raise NotImplementedError

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from self._combine(bucket)))

    def _combine(self, bucket: Bucket, centre: Tensor | None = None) -> Exchange:
        """Return the combination of the ranks' gradients, and of ``centre`` (equal on all ranks) as an additional last
        row."""
        weights = weights_of(bucket)
        self.check_ranks(weights)
        flat = raw_gradient(bucket)
        shards, cells = shard_cells(bucket)
        rows = yield from exchange_shards(flat, shards, bucket)
        if centre is not None:
            rows.append(shards.owned(centre, bucket.rank))
        products = yield from gram(rows, cells)
        finite = products.diagonal() < MAX_SQUARE
        products = torch.where(finite & finite[:, None], products, torch.zeros_like(products))
        combined = combine(rows, self.coefficients(products, finite, weights), finite, rows[0])
        return (yield from gather_shards(rows, combined, shards, flat.dtype, bucket))


@dataclass(frozen=True)
class MultiKrum(_Whole):
    """Mean of the ``m`` gradients with the lowest Krum scores (Blanchard 2017).

    The score of a gradient is the sum of the squared distances to its N - f - 2 nearest other gradients. The rule
    tolerates f faulty ranks of N >= 2 f + 3. Ties go to the lower rank. A gradient with NaN or inf has an infinite
    distance to all others. Unequal positive weights raise :class:`~hvdbridge.WeightError`, since the score has no
    weighted definition.

    State: none. On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and an all-reduce of N (N+1)/2 doubles.
    Aggregation needs the whole gradient, so nothing is sent during backward.

    Source:
        Blanchard et al., *Machine learning with adversaries: Byzantine tolerant gradient descent*, 2017; largest ``m``:
        El Mhamdi et al., *The hidden vulnerability of distributed learning in Byzantium*, 2018.

    When to choose:
        Up to ``f`` ranks may be hostile, whole gradients must be kept or left out, and ``krum`` is too noisy.

    Attributes:
        f: number of faulty ranks to tolerate.
        m: number of gradients in the mean, at most N - f. None: N - f - 2, the largest m with a proof (El Mhamdi 2018).

    Raises:
        ConfigurationError: fewer than 2 f + 3 ranks have a positive weight, or ``m`` is larger than N - f.
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

    def coefficients(self, products: Tensor, finite: Tensor, weights: Sequence[float]) -> Tensor:
        count = len(weights)
        chosen = self.m if self.m is not None else count - self.f - 2
        norms = products.diagonal()
        # This order of additions makes the matrix symmetric to the bit.
        distances = ((norms + norms[:, None]) - 2 * products).clamp(min=0)
        distances = torch.where(finite & finite[:, None], distances, torch.full_like(distances, math.inf))
        distances = distances + torch.where(
            torch.eye(count, dtype=torch.bool, device=norms.device), torch.inf, torch.zeros_like(distances)
        )
        scores = distances.sort(dim=1).values[:, : count - self.f - 2].sum(1)
        best = torch.argsort(scores, stable=True)[:chosen]
        coefficients = torch.zeros_like(norms).scatter(0, best, 1 / chosen)
        return _nan_if((~finite).sum() > self.f, coefficients)


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one gradient with the lowest Krum score (Blanchard 2017): :class:`MultiKrum` with ``m=1``.

    The score of a gradient is the sum of the squared distances to its N - f - 2 nearest other gradients.

    Source:
        Blanchard et al., *Machine learning with adversaries: Byzantine tolerant gradient descent*, 2017.

    When to choose:
        Up to ``f`` ranks may be hostile, and the update must be the gradient of one rank.

    Attributes:
        f: number of faulty ranks to tolerate.
        m: always 1.

    Raises:
        ConfigurationError: fewer than 2 f + 3 ranks have a positive weight.
    """

    m: int | None = option(1, at_least=1, at_most=1)


@dataclass(frozen=True)
class GeometricMedian(_Whole):
    """Geometric median of the gradients, by the smoothed Weiszfeld algorithm (Pillutla 2019, "RFA").

    The geometric median is the point v with the smallest weighted sum of distances to the gradients. Each iteration
    computes ``v <- sum_i b_i g_i / sum_i b_i`` with ``b_i = w_i / max(nu, |v - g_i|)``. The rule tolerates any faulty
    ranks with less than half of the weight.

    The first iteration replaces ``|v - g_i|`` by the radius around g_i that holds more than half of the weight. The
    paper starts from the mean; from there the number of iterations would grow with the logarithm of a huge gradient.
    ``nu`` is ``smoothing`` times the smallest of these radii, so the rule does not depend on the gradients' scale.

    State: none. On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and an all-reduce of N (N+1)/2 doubles.
    All v are combinations of the gradients, so iterations need no communication. Aggregation needs the whole gradient,
    so nothing is sent during backward.

    Source:
        Pillutla et al., *Robust aggregation for federated learning*, 2019.

    When to choose:
        Fewer than half of the ranks may be faulty or hostile, and the result must stay close to the mean where none is.

    Attributes:
        f: number of faulty ranks to tolerate; needs N > 2 f, and any f ranks must have less than half of the weight.
            None: as many as possible.
        iterations: number of Weiszfeld iterations.
        smoothing: nu relative to the smallest radius.

    Raises:
        ConfigurationError: the ranks of positive weight do not tolerate ``f`` faulty ones.
    """

    f: int | None = option(None, at_least=0)
    iterations: int = option(8, at_least=1)
    smoothing: float = option(1e-6, above=0, at_most=1)

    def coefficients(self, products: Tensor, finite: Tensor, weights: Sequence[float]) -> Tensor:
        share, failed = _shares(finite, weights, self.f)
        norms = products.diagonal()
        distances = ((norms + norms[:, None]) - 2 * products).clamp(min=0).sqrt()
        distances = torch.where(torch.eye(len(weights), dtype=torch.bool, device=norms.device), 0.0, distances)
        ordered, order = torch.where(finite, distances, torch.inf).sort(dim=1)
        majority = (share[order].cumsum(1) <= 0.5).sum(1, keepdim=True).clamp(max=len(weights) - 1)
        distance = ordered.gather(1, majority)[:, 0]
        nu = self.smoothing * torch.where(finite, distance, torch.inf).min()
        point = share
        for i in range(self.iterations):
            if i:
                distance = _distances(products, point)
            factors = share / torch.maximum(distance, nu).clamp(min=MIN_DIVISOR)
            point = factors / factors.sum()
        return _nan_if(failed, point)


@dataclass(frozen=True)
class ClippedMean(_Whole):
    """Centred clipping: the mean of the gradients, each clipped to a radius around a centre (Karimireddy 2021).

    ``v <- v + sum_i w_i (g_i - v) min(1, radius / |g_i - v|) / sum(w)``, ``iterations`` times, starting from the
    previous update. In each iteration no rank moves v by more than its share of the radius. Faulty ranks with less than
    half of the weight thus have a bounded influence; convergence is proved for up to a tenth of the ranks ("Learning
    from history for Byzantine robust optimization"). The paper applies the rule to momenta of the ranks.

    State: ``centre``, the previous update, the size of the parameters in float32 (float64 for float64), equal on all
    ranks. On the wire: ``2 (N-1)/N`` of the gradient, in its own type, and one all-reduce of (N+1)(N+2)/2 doubles for
    any number of iterations. Aggregation needs the whole gradient, so nothing is sent during backward.

    Source:
        Karimireddy et al., *Learning from history for Byzantine robust optimization*, 2021.

    When to choose:
        Hostile ranks may send values within the spread of the honest ones.

    Attributes:
        f: number of faulty ranks to tolerate; needs N > 2 f, and any f ranks must have less than half of the weight.
            None: as many as possible.
        radius: the paper's tau, an L2 norm over all parameters, in units of the gradients as they arrive (multiplied by
            a GradScaler's scale).
        iterations: the paper's l. The paper uses 1, for vectors that hardly change between steps. Plain gradients
            need several to move away from the previous update. Iterations need no communication.

    Raises:
        ConfigurationError: the ranks of positive weight do not tolerate ``f`` faulty ones.
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
        stored = update.clone() if update is bucket.buffer else update
        return Aggregated(update, state={"centre": Views(bucket.layout, stored)})

    def coefficients(self, products: Tensor, finite: Tensor, weights: Sequence[float]) -> Tensor:
        share, failed = _shares(finite[:-1], weights, self.f)
        point = torch.zeros_like(products[0])
        point[-1:] = 1.0
        for _ in range(self.iterations):
            distance = _distances(products, point)[:-1]
            factors = share * (self.radius / distance.clamp(min=MIN_DIVISOR)).clamp(max=1.0)
            point = point * (1 - factors.sum())
            point[:-1] += factors
        return _nan_if(failed, point)


def _distances(products: Tensor, point: Tensor) -> Tensor:
    """Return the distance of each row to the combination of all rows with coefficients ``point``, ``[rows]``."""
    images = products @ point
    return ((products.diagonal() - 2 * images) + (images * point).sum()).clamp(min=0).sqrt()


def _shares(finite: Tensor, weights: Sequence[float], f: int | None) -> tuple[Tensor, Tensor]:
    """Return the finite rows' shares of their total weight, float64 ``[rows]``, and whether the other rows are too many
    or too heavy."""
    # Filled, because a copy from the host waits for the GPU's stream, and cannot be captured in a CUDA graph
    like: dict[str, Any] = {"dtype": torch.float64, "device": finite.device}
    if len(set(weights)) == 1:
        all_weights = torch.full((len(weights),), weights[0], **like)
    else:
        all_weights = torch.stack([torch.full((), weight, **like) for weight in weights])
    share = torch.where(finite, all_weights, 0.0)
    faulty = (~finite).sum()
    failed = faulty > f if f is not None else share.sum() <= sum(weights) / 2
    return share / share.sum().clamp(min=MIN_DIVISOR), failed


def _nan_if(failed: Tensor, coefficients: Tensor) -> Tensor:
    return torch.where(failed, math.nan, coefficients)


def _check_count(policy: Policy, f: int, count: int, least: int, formula: str) -> None:
    if count < least:
        raise ConfigurationError(
            f"{type(policy).__name__}: f={f} faulty ranks need N >= {formula} = {least} ranks of positive weight, "
            f"there are {count}"
        )
