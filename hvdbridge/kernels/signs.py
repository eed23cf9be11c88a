"""Signs of one bit each: a code for blocks, and majority votes, which are counted without unpacking.

Rules:

1. A bit stands for + (1) or - (0); there is no third value. The caller that encodes decides the sign of zeros.
2. Votes of equal weight are counted in binary, 32 elements per word, one bit plane per digit. There are enough digits
   for the number of voters, so no count overflows.
3. Weighted votes are added in float64 in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdbridge.kernels.blocks import CHUNK
from hvdbridge.kernels.native import SIGN, Fields
from hvdbridge.kernels.pack import pack_bits, unpack_bits
from hvdbridge.kernels.quantise import Code, row_sums


@dataclass(frozen=True)
class ScaledSign(Code):
    """``mean|block| * sign(x)``, with sign(0) = +: the closest approximation of a block by its signs and one number.

    >>> code, x = ScaledSign(), torch.tensor([[3.0, -1.0, 0.0, -2.0]])
    >>> codes, scales, out = torch.empty(1, 4, dtype=torch.uint8), torch.empty(1), torch.empty(1, 4)
    >>> code.encode(x, 4, None, codes, scales); code.decode(codes, scales, out); out
    tensor([[ 1.5000, -1.5000,  1.5000, -1.5000]])
    """

    bits = 1

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert scales is not None
        torch.div(row_sums(x.abs()), counts, out=scales)
        torch.ge(x, 0, out=codes.view(torch.bool))

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        assert scales is not None
        out.copy_(codes).sub_(0.5).mul_((2 * scales).unsqueeze(1))

    @property
    def fields(self) -> Fields:
        return {"kind": SIGN, "bits": 1}


def majority(votes: Tensor, ties: Tensor) -> Tensor:
    """Return the bits that more than half of the rows have set; where exactly half have, those of ``ties``.

    Args:
        votes: integers ``[voters, n]``; every bit is an element.
        ties: ``[n]``; ignored if the number of voters is odd.

    >>> votes = torch.tensor([[0b1100], [0b1010]], dtype=torch.int32)
    >>> f"{majority(votes, torch.tensor([0b0011], dtype=torch.int32)).item():04b}"
    '1010'
    """
    voters = votes.shape[0]
    planes: list[Tensor] = []
    for count, vote in enumerate(votes, start=1):
        carry = vote
        for i, plane in enumerate(planes):
            planes[i], carry = plane ^ carry, plane & carry
        if count.bit_length() > len(planes):
            planes.append(carry)
    half = voters // 2
    above_half, equal = torch.zeros_like(votes[0]), torch.full_like(votes[0], -1)
    for i in reversed(range(len(planes))):
        if half >> i & 1:
            equal = equal & planes[i]
        else:
            above_half = above_half | (equal & planes[i])
            equal = equal & ~planes[i]
    return above_half if voters % 2 else above_half | (equal & ties)


def weighted_majority(votes: Tensor, weights: Sequence[float], ties: Tensor) -> Tensor:
    """Like :func:`majority`, with a weight per voter: 1 where the sum of weights times signs is positive.

    Args:
        votes: int32 ``[voters, n]``.
        weights: one per voter.
        ties: int32 ``[n]``, the result where that sum is zero.

    >>> votes = torch.tensor([[0b110], [0b101], [0b000]], dtype=torch.int32)
    >>> f"{weighted_majority(votes, [3.0, 2.0, 1.0], torch.tensor([0b010], dtype=torch.int32)).item():03b}"
    '110'
    """
    result = torch.empty_like(ties)
    size = CHUNK // 32 if votes.device.type == "cpu" else max(1, ties.numel())
    for chunk, chunk_ties, out in zip(votes.split(size, dim=1), ties.split(size), result.split(size), strict=True):
        sums = torch.zeros(chunk.shape[1] * 32, dtype=torch.float64, device=votes.device)
        for vote, weight in zip(chunk, weights, strict=True):
            signs = unpack_bits(vote.contiguous().view(torch.uint8), sums.numel()).view(torch.int8).mul_(2).sub_(1)
            sums.add_(signs, alpha=weight)
        positive, zero = (pack_bits(bits).view(torch.int32) for bits in (sums > 0, sums == 0))
        torch.bitwise_or(positive, zero.bitwise_and_(chunk_ties), out=out)
    return result
