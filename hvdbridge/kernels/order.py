"""Order statistics of each element over a few rows: median and trimmed mean, plain and weighted.

Rules:

1. A sorting network of element-wise minima and maxima (Batcher's odd-even merge) sorts the rows, in chunks that stay in
   cache. So there are no indices and no gathers, and the work does not depend on the values.
2. Elements that are not finite are replaced by +inf, so they sort last. Their number follows from the sorted rows.
3. Arithmetic is in float32, or in float64 for float64 rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hvdbridge.kernels.cells import chunk_size, sum_buffer


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs to compare and swap, in order, to sort ``count`` items (Knuth, volume 3, 5.2.2, algorithm M).

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
    max_missing: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The median of each element over the rows; for an even number, the mean of the middle two values.

    Elements that are not finite are left out. The weighted median is the value at which the cumulated weights reach
    half of their sum. If they reach exactly half, it is the mean of that value and the next.

    Args:
        rows: vectors of one shape, in rank order.
        weights: one per row, positive; None: all equal.
        max_missing: the result is NaN where more elements than this are left out. None: where the remaining elements
            have at most half of the weight.
        out: memory for the result, used if it has the result's type. It may be one of the rows.

    >>> rows = [torch.tensor([1., 1.]), torch.tensor([5., float("nan")]), torch.tensor([2., 2.])]
    >>> median(rows), median(rows, weights=(1, 5, 1))
    (tensor([2.0000, 1.5000]), tensor([5., nan]))
    """
    count = len(rows)
    if weights is not None and len(set(weights)) == 1:
        weights = None
    limit = (count - 1) // 2 if max_missing is None else max_missing
    result = sum_buffer(rows, out)
    for out_chunk, values, sorted_weights in _sorted(rows, result, weights):
        if sorted_weights is None:
            low, high = values[(count - 1) // 2], values[count // 2]
            for missing in range(1, limit + 1):
                absent = values[count - missing] == math.inf
                low = _where(absent, values[(count - missing - 1) // 2], low)
                high = _where(absent, values[(count - missing) // 2], high)
            undefined = values[count - limit - 1] == math.inf
        else:
            present, low, high = _weighted_median(values, sorted_weights)
            if max_missing is None:
                undefined = present <= sum(weights or ()) / 2
            else:
                undefined = values[count - max_missing - 1] == math.inf
        out_chunk.copy_((high - low).mul_(0.5).add_(low)).masked_fill_(undefined, math.nan)
    return result


def _weighted_median(values: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight of the finite values, and the two values whose mean is the median."""
    total, cumulated = torch.zeros_like(weights[0]), []
    for value, weight in zip(values, weights, strict=True):
        total = total + torch.where(value == math.inf, torch.zeros_like(weight), weight)
        cumulated.append(total)
    low = high = values[-1]
    half = total / 2
    for value, weight_so_far in zip(reversed(values), reversed(cumulated), strict=True):
        low = _where(weight_so_far >= half, value, low)
        high = _where(weight_so_far > half, value, high)
    return total, low, high


def trimmed_mean(
    rows: Sequence[Tensor], f: int, weights: Sequence[float] | None = None, out: Tensor | None = None
) -> Tensor:
    """The mean of each element over the rows, without its ``f`` largest and its ``f`` smallest values.

    An element that is not finite is left out and counts as one of the ``f`` on both sides.
    Where more than ``f`` elements are not finite, the result is NaN.

    Args:
        rows: vectors of one shape, in rank order.
        weights: weights of the mean. Which values are left out does not depend on them. None: all equal.
        out: memory for the result, used if it has the result's type. It may be one of the rows.

    >>> rows = [torch.tensor([1., 1.]), torch.tensor([50., float("nan")]), torch.tensor([2., 3.])]
    >>> trimmed_mean(rows, 1)
    tensor([2., 2.])
    """
    count, result = len(rows), sum_buffer(rows, out)
    if weights is not None and len(set(weights)) == 1:
        weights = None
    for out_chunk, values, sorted_weights in _sorted(rows, result, weights):
        one = torch.ones((), dtype=result.dtype, device=result.device)
        factors = [one] * count if sorted_weights is None else [weight.to(result.dtype) for weight in sorted_weights]
        out_chunk.zero_()
        norm = torch.zeros_like(out_chunk)
        for k in range(count - f):
            value, factor = values[k], factors[k]
            if k < f:  # included if f - k values or more are not finite
                included = values[count - f + k] == math.inf
                value, factor = torch.where(included, value, 0.0 * one), torch.where(included, factor, 0.0 * one)
            out_chunk.add_(value if sorted_weights is None else value * factor)
            norm.add_(factor)
        out_chunk.div_(norm).masked_fill_(values[count - f - 1] == math.inf, math.nan)
    return result


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``torch.where``, on CPUs by bit operations, which are faster for masks that change from element to element."""
    if not y.is_cpu:
        return torch.where(condition, x, y)
    bits = torch.int64 if y.dtype == torch.float64 else torch.int32
    y_bits = y.view(bits)
    return (x.view(bits) ^ y_bits).bitwise_and_(condition.to(bits).neg_()).bitwise_xor_(y_bits).view(y.dtype)


def _sorted(
    rows: Sequence[Tensor], result: Tensor, weights: Sequence[float] | None
) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor] | None]]:
    """Yield, for each chunk: the result's chunk, its values in ascending order, and their weights in float64.

    The caller may write to the result's chunk, which may be the memory of a row.
    """
    count = len(rows)
    pairs, step = list(comparators(count)), max(1 << 12, chunk_size(result.device) // count)  # of all rows together
    for start in range(0, result.numel(), step):
        out = result[start : start + step]
        values = [_finite_or_last(row[start : start + step].to(result.dtype)) for row in rows]
        sorted_weights = None
        if weights is not None:
            sorted_weights = [torch.full(out.shape, w, dtype=torch.float64, device=out.device) for w in weights]
            swap = torch.empty_like(out, dtype=torch.bool)
            mask, difference = torch.empty_like(out, dtype=torch.int64), torch.empty_like(out, dtype=torch.int64)
        buffer = torch.empty_like(out)
        for i, j in pairs:
            if sorted_weights is not None:  # swap the bits in place
                a, b = sorted_weights[i].view(torch.int64), sorted_weights[j].view(torch.int64)
                torch.gt(values[i], values[j], out=swap)
                torch.bitwise_xor(a, b, out=difference).bitwise_and_(mask.copy_(swap).neg_())
                a.bitwise_xor_(difference)
                b.bitwise_xor_(difference)
            torch.minimum(values[i], values[j], out=buffer)
            torch.maximum(values[i], values[j], out=values[j])
            values[i], buffer = buffer, values[i]
        yield out, values, sorted_weights


def _finite_or_last(values: Tensor) -> Tensor:
    """Copy ``values``, with +inf in place of all that are not finite."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf, neginf=math.inf)
