"""Gram-Schmidt orthogonalization whose bits do not depend on the CPU, the BLAS, the batch or the alignment.

Rules:

1. Operations other than sums are element-wise in float64. Sums are exact, so their order does not matter: columns are
   rounded to multiples of 2**-27 of their largest element, split into two halves of 14 bits, and multiplied and added
   as whole numbers (Ozaki 2012). Machines need to conform to IEEE 754, no more.
2. A column becomes zeros if, within :data:`TOLERANCE` of its own length, it is in the span of the columns before it:
   the rest is rounding error and has no meaningful direction. Zeros stay zeros. NaN or inf makes NaN of its column and
   of all later columns.
3. Matrices are transposed: ``[batch, columns, length]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdbridge.kernels.fused import on_cuda

TOLERANCE = 2.0**-18
"""A remainder below this part of a column's length cannot be told from float32's rounding errors."""
HIGH, LOW = 2.0**13, 2.0**14
"""Number of steps of the upper half between 0 and 1, and of the lower half between two steps of the upper half."""


def orthonormal(batches: Sequence[Tensor], epsilon: float = 0.0) -> list[Tensor]:
    """Make the columns of each matrix orthogonal, and divide each by its remaining length plus ``epsilon``.

    Args:
        batches: ``[batch, columns, length]`` each, floating point, all with the same number of columns. The results
            have the same shapes and types.

    >>> orthonormal([torch.tensor([[[3.0, 4.0], [6.0, 8.0]], [[0.0, 0.0], [0.0, 2.0]]])])[0]
    tensor([[[0.6000, 0.8000],
             [0.0000, 0.0000]],
            [[0.0000, 0.0000],
             [0.0000, 1.0000]]])
    """
    if all(batch.dtype == torch.float32 and batch.is_cuda for batch in batches):
        kernels = on_cuda(batches[0].device)
        if kernels and all(batch.shape[1] <= kernels.SIDE for batch in batches):
            results = [kernels.orthonormal(batch.contiguous(), epsilon, HIGH, LOW, TOLERANCE) for batch in batches]
            if all(result is not None for result in results):
                return results
    columns, grams, scales = [], [], []
    for batch in batches:
        # Scaled, so that columns of 1e30 and of 1e-30 round alike. (inf / inf is NaN, as it should be.)
        largest = batch.abs().amax(dim=-1, keepdim=True).double()
        scale = torch.where(largest == 0, 1.0, largest)
        high = torch.div(batch, scale / HIGH)
        low = high.clone()
        low.sub_(high.round_()).mul_(LOW).round_()
        grams.append(_gram(high, low))
        columns.append(high.add_(low.div_(LOW)).div_(HIGH))
        scales.append(scale.squeeze(-1))
    changes = _gram_schmidt(torch.cat(grams), torch.cat(scales), epsilon).split([len(batch) for batch in batches])
    return [_combine(c, change).to(b.dtype) for c, change, b in zip(columns, changes, batches, strict=True)]


def _gram(high: Tensor, low: Tensor) -> Tensor:
    """Inner products ``[batch, columns, columns]`` of columns ``(high + low / LOW) / HIGH``, whole numbers up to HIGH.

    Products have at most 26 bits, so float64 adds 2**27 of them without rounding, in any order.
    """
    rank = high.shape[1]
    halves = torch.cat([high, low], dim=1)
    products = torch.bmm(halves, halves.mT)
    mixed = products[:, :rank, rank:] + products[:, rank:, :rank]
    return (products[:, :rank, :rank] + (mixed + products[:, rank:, rank:] / LOW) / LOW) / HIGH**2


def _gram_schmidt(gram: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Return the upper triangular matrices that make the columns orthonormal, from their inner products.

    This is the modified process, column by column: divide a column by its length, then subtract its component from the
    later columns. Only the inner products are updated; TOLERANCE squared is far above float64's rounding of these.

    Args:
        gram: inner products, float64 ``[batch, columns, columns]``; overwritten.
        scale: ``[batch, columns]``, the factors that the columns were divided by.
    """
    rank = gram.shape[-1]
    first = torch.diagonal(gram, dim1=1, dim2=2).clone()
    change = torch.eye(rank, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
    for i in range(rank):
        square = gram[:, i, i]
        dependent = square <= TOLERANCE**2 * first[:, i]  # False for NaN, which must not become zero
        length = _sqrt(torch.where(dependent, 1.0, square))
        factor = scale[:, i] / (scale[:, i] * length + epsilon) if epsilon else 1 / length
        factor = torch.where(dependent, 0.0, factor)[:, None]
        gram[:, i, :] *= factor
        gram[:, :, i] *= factor
        change[:, :, i] *= factor
        if i + 1 < rank:
            projections = gram[:, i, i + 1 :].clone()
            change[:, :, i + 1 :] -= change[:, :, i : i + 1] * projections[:, None, :]
            correction = (2 - gram[:, i, i])[:, None, None]  # 1, but for epsilon
            gram[:, i + 1 :, i + 1 :] -= correction * (projections[:, :, None] * projections[:, None, :])
    return change


def _sqrt(x: Tensor) -> Tensor:
    """The square root of positive float64, correctly rounded. MKL's, which torch uses on CPUs, often is not.

    The error ``x - root * root`` is computed exactly, from halves of the root's bits (Dekker 1971), and corrected.
    """
    root = x.sqrt()
    if x.is_cuda:  # CUDA's is correctly rounded
        return root
    high = root * (2.0**27 + 1)
    high -= high - root
    low = root - high
    error = ((x - high * high) - 2 * high * low) - low * low
    return torch.where(root.isfinite(), root + error / (2 * root), root)


def _combine(columns: Tensor, change: Tensor) -> Tensor:
    """``columns`` times the upper triangular ``change``: column j is a combination of columns 0 to j."""
    result = change[:, 0, :, None] * columns[:, 0:1]
    for i in range(1, columns.shape[1]):
        result[:, i:] += change[:, i, i:, None] * columns[:, i : i + 1]
    return result
