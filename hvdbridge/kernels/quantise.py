"""Codes: floats as small integers, block by block, and back.

Rules:

1. If a code has scales, a block's float32 scale depends on all its elements: NaN or inf anywhere in the block makes it
   non-finite, and the whole block decodes to non-finite numbers.
2. Arithmetic is element-wise and in float32. The order of sums depends only on the width of the block. So a block
   decodes to the same bits at any position, on CPU and on CUDA.
3. Steps are at least the smallest normal number, 2**-126: smaller elements are rounded to 0 or to that number.
4. A code does not change its input, unless the caller requests that the coding error replaces it. Random codes take
   their random numbers from the caller: 24 bits per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.deprecated import moved_names
from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.fused import fused
from hvdbridge.kernels.native import Fields
from hvdbridge.kernels.pack import pack, packed_bytes, unpack
from hvdbridge.kernels.random import Seed

TINY = 2.0**-126


class Code(ABC):
    """An encoding of blocks: ``bits`` per element and, for most codes, a float32 scale per block."""

    scaled: ClassVar[bool] = True
    """Whether each block has a scale."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per element in a message."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype that holds one element's code."""
        return torch.uint8

    @property
    def random(self) -> bool:
        """Whether encoding needs noise."""
        return False

    @abstractmethod
    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        """Write the codes and scales of some blocks.

        Args:
            x: float32 ``[blocks, width]``, which must not be changed. Short blocks are padded with zeros.
            counts: number of elements of each block.
            noise: int32 in ``[0, 2**24)``, of the shape of ``x``, if the code is :attr:`random`.
            codes: of the shape of ``x`` and :attr:`dtype`, to be written; below ``2**bits``.
            scales: float32 ``[blocks]``, to be written, if the code is :attr:`scaled`.
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """Write the values of ``codes`` and ``scales`` into ``out``, float32 ``[blocks, width]``."""

    @property
    def fields(self) -> Fields:
        """Parameters of this code for the fused kernels. Empty: they do not support it."""
        return {}

    def wire_bytes(self, n: int) -> int:
        """Return the number of bytes of ``n`` codes in a message."""
        return packed_bytes(n, self.bits)

    def to_wire(self, codes: Tensor) -> Tensor:
        """Pack codes ``[rows, n]`` into uint8 ``[rows, wire_bytes(n)]``."""
        return pack(codes, self.bits)

    def from_wire(self, packed: Tensor, n: int) -> Tensor:
        """Unpack ``n`` codes per row; the inverse of :meth:`to_wire`."""
        return unpack(packed, n, self.bits)


def encode(
    code: Code, flat: Tensor, blocks: Blocks, seed: Seed = 0, block_scales: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Encode a vector: codes ``[blocks.length]``, and scales ``[blocks.count]`` if the code has scales.

    Args:
        blocks: of messages of one row.
        seed: of the noise.
        block_scales: ``[blocks.count, ...]``, for a code that does not compute its scales itself.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = encode(Linear(127), torch.tensor([127., -64., 1., 0., 5., -10.]), blocks)
    >>> codes.view(torch.int8).tolist(), scales.tolist()
    ([127, -64, 1, 0, 64, -127], [1.0, 0.07874015718698502])
    """
    codes, scales = encode_rows(code, flat, blocks, seed, False, block_scales)
    return codes[0], None if scales is None else scales[0]


def encode_rows(
    code: Code, flat: Tensor, blocks: Blocks, seed: Seed, keep_rest: bool, block_scales: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Encode a vector into rows of a message: codes ``[rows, length]``, scales ``[rows, scales_per_row]``.

    Codes and scales that no block has are zeros.

    Args:
        keep_rest: subtract the decoded values from ``flat``, in place.
        block_scales: as for :func:`encode`.
    """
    device = flat.device
    codes = torch.zeros((blocks.rows, blocks.length), dtype=code.dtype, device=device)
    scales = None if block_scales is None else block_scales.contiguous().unsqueeze(0)
    if code.scaled and block_scales is None:
        scales = torch.zeros((blocks.rows, blocks.scales_per_row), dtype=torch.float32, device=device)
    if scales is not None and flat.itemsize <= 4 and (kernels := fused(codes, scales)):
        x = flat.to(torch.float32).contiguous()
        if kernels.encode(code.fields, x, blocks, codes, scales, keep_rest, seed):
            if keep_rest and x is not flat:
                flat.copy_(x)
            return codes, scales
    for chunk, matrix in blocks.matrices(flat):
        x = matrix.to(torch.float32)
        noise = chunk.noise(seed) if code.random else None
        encoded = torch.empty(x.shape, dtype=code.dtype, device=device)
        chunk_scales = None if scales is None else chunk.scales(scales)
        code.encode(x, chunk.counts, noise, encoded, chunk_scales)
        chunk.write(encoded, codes, scales, chunk_scales if block_scales is None else None)
        if keep_rest:
            decoded = torch.empty_like(x)
            code.decode(encoded, chunk_scales, decoded)
            chunk.scatter(matrix.sub_(decoded), flat)
    return codes, scales


def decode(
    code: Code,
    codes: Tensor,
    scales: Tensor | None,
    blocks: Blocks,
    out: Tensor | None = None,
    add: Literal[1, -1] | None = None,
) -> Tensor:
    """Decode messages and sum them in their order: float32 ``[numel]``.

    Args:
        codes, scales: ``[messages * rows, n]``, as :func:`encode_rows` returns them.
        out: memory for the result, float32 or wider ``[numel]``, which is returned.
        add: 1: add the sum to ``out``; -1: subtract it; None: overwrite ``out``.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = torch.tensor([[127, -64, 1, 0, 64, -127]], dtype=torch.int8), torch.tensor([[1., 2.]])
    >>> decode(Linear(127), codes.view(torch.uint8), scales, blocks)
    tensor([ 127.,  -64.,    1.,    0.,  128., -254.])
    """
    total = torch.zeros(blocks.numel, dtype=torch.float32, device=codes.device) if out is None else out
    if scales is not None and total.dtype == torch.float32:
        contiguous = codes if codes.stride(1) == 1 else codes.contiguous(), scales.contiguous()
        kernels = fused(contiguous[1], total)
        if kernels and kernels.decode(code.fields, *contiguous, blocks, total, add or 0):
            return total
    rows = blocks.rows
    for chunk in blocks.chunks:
        matrix: Tensor | None = None if add is None else chunk.gather(total)
        for first in range(0, len(codes), rows):
            chunk_codes = chunk.codes(codes[first : first + rows])
            decoded = torch.empty(chunk_codes.shape, dtype=torch.float32, device=chunk_codes.device)
            code.decode(chunk_codes, None if scales is None else chunk.scales(scales[first : first + rows]), decoded)
            matrix = decoded.to(total.dtype) if matrix is None else matrix.add_(decoded, alpha=add or 1)
        if matrix is not None:
            chunk.scatter(matrix, total)
    return total


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row; overwrites ``x``. The width is a power of two.

    Halves of the row are added repeatedly. This fixes the order of additions, so the bits depend on nothing else.

    >>> row_sums(torch.tensor([[1., 2., 3., 4.]]))
    tensor([10.])
    """
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half].add_(x[:, half:])
    return x[:, 0]


__getattr__ = moved_names(__name__)
