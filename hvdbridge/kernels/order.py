"""Order statistics over a few rows, element by element: median and trimmed mean, plain and weighted.

Rules:

1. Rows are sorted by a network of element-wise minima and maxima (Batcher's odd-even merge), in pieces that stay
   in cache: no index, no gather, and the same work whatever the values.
2. What is not finite becomes +inf and so sorts last; how many there are is then read off the sorted rows.
3. Arithmetic is in float32, float64 for float64 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdbridge.kernels.cells import chunk, room


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Pairs to put in order, one after the other, to sort ``count`` items (Knuth, volume 3, 5.2.2, algorithm M).

    >>> list(comparators(4))
    [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2)]
    """
    p = 1
    while p < count:
        k = p
        while k >= 1:
            for j in range(k % p, count - k, 2 * k):
                for i in range(min(k, count - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        yield i + j, i + j + k
            k //= 2
        p *= 2


def median(
    rows: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    most: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The median over rows of each element; of an even number the mean of the middle two.

    Elements that are not finite are left out. The weighted median is the value at which the weights of the smaller
    ones reach half of the sum; where they reach exactly half, the mean of that value and the next.

    Args:
        weights: one per row, positive; None: all equal.
        most: where more elements than these are left out, the answer is NaN. None: where those left in have not
            more than half of the weight.
        out: memory for the answer, used where it has that type; may be one of the rows.

    >>> rows = [torch.tensor([1., 1.]), torch.tensor([5., float("nan")]), torch.tensor([2., 2.])]
    >>> median(rows), median(rows, weights=(1, 5, 1))
    (tensor([2.0000, 1.5000]), tensor([5., nan]))
    """
    count = len(rows)
    if weights is not None and len(set(weights)) == 1:
        weights = None
    limit = (count - 1) // 2 if most is None else most
    total = room(rows, out)
    for part, values, carried in _sorted(rows, total, weights):
        if carried is None:
            low, high = values[(count - 1) // 2], values[count // 2]
            for missing in range(1, limit + 1):
                absent = values[count - missing] == math.inf
                low = _chosen(absent, values[(count - missing - 1) // 2], low)
                high = _chosen(absent, values[(count - missing) // 2], high)
            lost = values[count - limit - 1] == math.inf
        else:
            present, low, high = _weighted_median(values, carried)
            if most is None:
                lost = present <= sum(weights or ()) / 2
            else:
                lost = values[count - most - 1] == math.inf
        part.copy_((high - low).mul_(0.5).add_(low)).masked_fill_(lost, math.nan)
    return total


def _weighted_median(values: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of the finite values, and the two values whose mean is the median."""
    reached, sums = torch.zeros_like(weights[0]), []
    for value, weight in zip(values, weights, strict=True):
        reached = reached + torch.where(value == math.inf, torch.zeros_like(weight), weight)
        sums.append(reached)
    low = high = values[-1]
    half = reached / 2
    for value, so_far in zip(reversed(values), reversed(sums), strict=True):
        low = _chosen(so_far >= half, value, low)
        high = _chosen(so_far > half, value, high)
    return reached, low, high


def trimmed_mean(
    rows: Sequence[Tensor], f: int, weights: Sequence[float] | None = None, out: Tensor | None = None
) -> Tensor:
    """The mean over rows of each element without its ``f`` largest and its ``f`` smallest values.

    An element that is not finite is one of the ``f``: it is left out, and of the others one fewer on each side.
    Where more than ``f`` are not finite the answer is NaN.

    Args:
        weights: of the mean of what is left; what is left out is decided by rank. None: all equal.
        out: memory for the answer, used where it has that type; may be one of the rows.

    >>> rows = [torch.tensor([1., 1.]), torch.tensor([50., float("nan")]), torch.tensor([2., 3.])]
    >>> trimmed_mean(rows, 1)
    tensor([2., 2.])
    """
    count, total = len(rows), room(rows, out)
    if weights is not None and len(set(weights)) == 1:
        weights = None
    for part, values, carried in _sorted(rows, total, weights):
        one = torch.ones((), dtype=total.dtype, device=total.device)
        shares = [one] * count if carried is None else [weight.to(total.dtype) for weight in carried]
        part.zero_()
        norm = torch.zeros_like(part)
        for k in range(count - f):
            value, share = values[k], shares[k]
            if k < f:  # kept where f - k values or more were left out already
                kept = values[count - f + k] == math.inf
                value, share = torch.where(kept, value, 0.0 * one), torch.where(kept, share, 0.0 * one)
            part.add_(value if carried is None else value * share)
            norm.add_(share)
        part.div_(norm).masked_fill_(values[count - f - 1] == math.inf, math.nan)
    return total


def _chosen(flag: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """``torch.where``; by bits on CPUs, where that is faster for masks that change from element to element."""
    if not no.is_cpu:
        return torch.where(flag, yes, no)
    kind = torch.int64 if no.dtype == torch.float64 else torch.int32
    other = no.view(kind)
    return (yes.view(kind) ^ other).bitwise_and_(flag.to(kind).neg_()).bitwise_xor_(other).view(no.dtype)


def _sorted(
    rows: Sequence[Tensor], total: Tensor, weights: Sequence[float] | None
) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor] | None]]:
    """Piece by piece: where the answer goes, the values in ascending order, and their weights in float64; the answer
    may stand where a row did."""
    count = len(rows)
    pairs, step = list(comparators(count)), max(1 << 12, chunk(total.device) // count)  # of all rows together
    for start in range(0, total.numel(), step):
        out = total[start : start + step]
        values = [_finite_or_last(row[start : start + step].to(total.dtype)) for row in rows]
        carried = None
        if weights is not None:
            carried = [torch.full(out.shape, w, dtype=torch.float64, device=out.device) for w in weights]
            swap = torch.empty_like(out, dtype=torch.bool)
            mask, change = torch.empty_like(out, dtype=torch.int64), torch.empty_like(out, dtype=torch.int64)
        spare = torch.empty_like(out)
        for i, j in pairs:
            if carried is not None:  # exchange by bits, in place
                a, b = carried[i].view(torch.int64), carried[j].view(torch.int64)
                torch.gt(values[i], values[j], out=swap)
                torch.bitwise_xor(a, b, out=change).bitwise_and_(mask.copy_(swap).neg_())
                a.bitwise_xor_(change)
                b.bitwise_xor_(change)
            torch.minimum(values[i], values[j], out=spare)
            torch.maximum(values[i], values[j], out=values[j])
            values[i], spare = spare, values[i]
        yield out, values, carried


def _finite_or_last(values: Tensor) -> Tensor:
    """A copy with +inf in the place of all that is not finite."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf, neginf=math.inf)
