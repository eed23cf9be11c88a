"""Gram-Schmidt whose bits depend on the numbers alone: not on the CPU, the BLAS, the batch or the alignment.

Rules:

1. What is not a sum is element-wise in float64. Sums are exact, so their order does not matter: columns are rounded
   to multiples of 2**-27 of their largest element, and their halves of 14 bits are multiplied and added as whole
   numbers (Ozaki 2012). The machines must keep to IEEE 754, no more.
2. A column that lies in the span of those before it, within :data:`NOTHING` of its own length, becomes zeros: what
   is left of it is rounding, and no direction. Zeros stay zeros. NaN and inf make NaN of their column and of those
   behind it.
3. Matrices are transposed: ``[batch, columns, length]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdbridge.kernels.fused import on_cuda

NOTHING = 2.0**-18
"""Part of a column's length that float32 cannot tell from rounding."""
HIGH, LOW = 2.0**13, 2.0**14
"""Steps of the upper half between 0 and 1, and of the lower half between two steps of the upper."""


def orthonormal(batches: Sequence[Tensor], epsilon: float = 0.0) -> list[Tensor]:
    """The columns of each matrix made orthogonal, each divided by its remaining length plus ``epsilon``.

    Args:
        batches: ``[batch, columns, length]`` each, floating point, the same number of columns in all.

    >>> orthonormal([torch.tensor([[[3.0, 4.0], [6.0, 8.0]], [[0.0, 0.0], [0.0, 2.0]]])])[0]
    tensor([[[0.6000, 0.8000],
             [0.0000, 0.0000]],
            [[0.0000, 0.0000],
             [0.0000, 1.0000]]])
    """
    if all(batch.dtype == torch.float32 and batch.is_cuda for batch in batches):
        kernels = on_cuda(batches[0].device)
        if kernels and all(batch.shape[1] <= kernels.SIDE for batch in batches):
            made = [kernels.orthonormal(batch.contiguous(), epsilon, HIGH, LOW, NOTHING) for batch in batches]
            if all(some is not None for some in made):
                return made
    columns, grams, units = [], [], []
    for batch in batches:
        # Columns of 1e30 and of 1e-30 alike. (inf / inf is NaN, as it should be.)
        largest = batch.abs().amax(dim=-1, keepdim=True).double()
        unit = torch.where(largest == 0, 1.0, largest)
        high = torch.div(batch, unit / HIGH)
        low = high.clone()
        low.sub_(high.round_()).mul_(LOW).round_()
        grams.append(_gram(high, low))
        columns.append(high.add_(low.div_(LOW)).div_(HIGH))
        units.append(unit.squeeze(-1))
    changes = _gram_schmidt(torch.cat(grams), torch.cat(units), epsilon).split([len(batch) for batch in batches])
    return [_combine(c, change).to(b.dtype) for c, change, b in zip(columns, changes, batches, strict=True)]


def _gram(high: Tensor, low: Tensor) -> Tensor:
    """Inner products of all pairs of columns ``(high + low / LOW) / HIGH`` of whole numbers up to HIGH.

    Products have at most 26 bits, so float64 adds 2**27 of them without rounding, whatever the order.
    """
    rank = high.shape[1]
    both = torch.cat([high, low], dim=1)
    products = torch.bmm(both, both.mT)
    mixed = products[:, :rank, rank:] + products[:, rank:, :rank]
    return (products[:, :rank, :rank] + (mixed + products[:, rank:, rank:] / LOW) / LOW) / HIGH**2


def _gram_schmidt(gram: Tensor, unit: Tensor, epsilon: float) -> Tensor:
    """The upper triangular matrix that makes the columns orthonormal, from their inner products.

    The modified process, column by column: divide by the length, then take its part out of those that follow.
    Only the inner products are updated; NOTHING squared is far above float64's rounding of these.

    Args:
        unit: what each column was divided by.
    """
    rank = gram.shape[-1]
    first = torch.diagonal(gram, dim1=1, dim2=2).clone()
    change = torch.eye(rank, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
    for i in range(rank):
        square = gram[:, i, i]
        lost = square <= NOTHING**2 * first[:, i]  # False for NaN, which must not become a zero
        length = _sqrt(torch.where(lost, 1.0, square))
        factor = unit[:, i] / (unit[:, i] * length + epsilon) if epsilon else 1 / length
        factor = torch.where(lost, 0.0, factor)[:, None]
        gram[:, i, :] *= factor
        gram[:, :, i] *= factor
        change[:, :, i] *= factor
        if i + 1 < rank:
            along = gram[:, i, i + 1 :].clone()
            change[:, :, i + 1 :] -= change[:, :, i : i + 1] * along[:, None, :]
            one = (2 - gram[:, i, i])[:, None, None]  # but for epsilon
            gram[:, i + 1 :, i + 1 :] -= one * (along[:, :, None] * along[:, None, :])
    return change


def _sqrt(x: Tensor) -> Tensor:
    """The square root of positive float64, rounded as IEEE 754 has it: MKL's, which torch takes on CPUs, is often not.

    What the root's square lacks of ``x`` is found exactly, by halves of the root's bits (Dekker 1971).
    """
    root = x.sqrt()
    if x.is_cuda:  # CUDA's is
        return root
    high = root * (2.0**27 + 1)
    high -= high - root
    low = root - high
    lack = ((x - high * high) - 2 * high * low) - low * low
    return torch.where(root.isfinite(), root + lack / (2 * root), root)


def _combine(columns: Tensor, change: Tensor) -> Tensor:
    """``columns`` times the upper triangular ``change``: column j is made of columns 0 to j."""
    made = change[:, 0, :, None] * columns[:, 0:1]
    for i in range(1, columns.shape[1]):
        made[:, i:] += change[:, i, i:, None] * columns[:, i : i + 1]
    return made
