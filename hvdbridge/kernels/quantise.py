"""Codes: floats as small integers, block by block, and back.

Rules:

1. A block's float32 scale, where a code has one, stands for its largest element: a NaN or inf anywhere in the block
   makes the scale so, and then the whole block comes back non-finite.
2. Arithmetic is element-wise and in float32; sums are made in an order that depends on nothing but the width of the
   block. So a block comes back with the same bits wherever it lies, on CPU and on CUDA.
3. Steps never get smaller than the smallest normal number, 2**-126: what lies below is rounded to 0 or to that.
4. A code never changes its input, but where it is told to leave in it what it could not say. What it needs of
   randomness it is given: 24 bits per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.fused import InC, fused
from hvdbridge.kernels.native import Fields
from hvdbridge.kernels.pack import pack, packed_bytes, unpack

TINY = 2.0**-126


class Code(ABC):
    """How blocks travel: ``bits`` per element, and mostly a float32 scale per block."""

    scaled: ClassVar[bool] = True
    """Whether a block has a scale."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of one element on the wire."""

    @property
    def dtype(self) -> torch.dtype:
        """Holds one element's code."""
        return torch.uint8

    @property
    def random(self) -> bool:
        """Whether it needs noise."""
        return False

    @abstractmethod
    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        """Write codes and scales of some blocks.

        Args:
            x: float32 ``[blocks, width]``, not to be changed; short blocks are filled up with zeros.
            counts: elements of each block.
            noise: int32 in ``[0, 2**24)``, of the shape of ``x``, where the code is :attr:`random`.
            codes: of the shape of ``x``, to be written; below ``2**bits``.
            scales: float32 ``[blocks]``, to be written, where the code is :attr:`scaled`.
        """

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """Write into ``out``, float32, what ``codes`` and ``scales`` stand for."""

    @property
    def fields(self) -> Fields:
        """What the fused kernels must know of this code; empty: they do not know it."""
        return {}

    def wire_bytes(self, n: int) -> int:
        """Of ``n`` codes."""
        return packed_bytes(n, self.bits)

    def to_wire(self, codes: Tensor) -> Tensor:
        """``[rows, n]`` codes -> uint8 ``[rows, wire_bytes(n)]``."""
        return pack(codes, self.bits)

    def from_wire(self, packed: Tensor, n: int) -> Tensor:
        """The inverse of :meth:`to_wire`."""
        return unpack(packed, n, self.bits)


def encode(
    code: Code, flat: Tensor, blocks: Blocks, seed: int = 0, given: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The codes of a vector ``[blocks.length]``, and its scales ``[blocks.count]`` where the code has them.

    Args:
        seed: of the noise.
        given: ``[blocks.count, ...]``, for a code that does not find its scales itself.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = encode(Linear(127), torch.tensor([127., -64., 1., 0., 5., -10.]), blocks)
    >>> codes.view(torch.int8).tolist(), scales.tolist()
    ([127, -64, 1, 0, 64, -127], [1.0, 0.07874015718698502])
    """
    codes, scales = encode_rows(code, flat, blocks, seed, False, given)
    return codes[0], None if scales is None else scales[0]


def encode_rows(
    code: Code, flat: Tensor, blocks: Blocks, seed: int, keep_rest: bool, given: Tensor | None = None,
    packs: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same as rows of a message, zeros where no block is: codes ``[rows, length]``, scales ``[rows, slots]``.

    Args:
        keep_rest: ``flat`` becomes what the codes do not say.
        packs: signs may come packed on CUDA, in int32 words; ``code.to_wire`` knows both.
    """
    device = flat.device
    codes = torch.zeros((blocks.rows, blocks.length), dtype=code.dtype, device=device)
    scales = None if given is None else given.contiguous().unsqueeze(0)
    if code.scaled and given is None:
        scales = torch.zeros((blocks.rows, blocks.slots), dtype=torch.float32, device=device)
    if scales is not None and flat.itemsize <= 4 and (kernels := fused(codes, scales)):
        x, made = flat.to(torch.float32).contiguous(), codes
        if packs and code.bits == 1 and not isinstance(kernels, InC):
            made = torch.zeros((blocks.rows, -(-blocks.length // 32)), dtype=torch.int32, device=device)
        if kernels.encode(code.fields, x, blocks, made, scales, keep_rest, seed):
            if keep_rest and x is not flat:
                flat.copy_(x)
            return made, scales
    for chunk, matrix in blocks.matrices(flat):
        x = matrix.to(torch.float32)
        noise = chunk.noise(seed) if code.random else None
        made = torch.empty(x.shape, dtype=code.dtype, device=device)
        found = None if scales is None else chunk.scales(scales)
        code.encode(x, chunk.counts, noise, made, found)
        chunk.write(made, codes, scales, found if given is None else None)
        if keep_rest:
            said = torch.empty_like(x)
            code.decode(made, found, said)
            chunk.scatter(matrix.sub_(said), flat)
    return codes, scales


def decode(
    code: Code,
    codes: Tensor,
    scales: Tensor | None,
    blocks: Blocks,
    out: Tensor | None = None,
    add: Literal[1, -1] | None = None,
) -> Tensor:
    """What messages stand for, added in their order: float32 ``[numel]``.

    Args:
        codes, scales: ``[messages * rows, n]``, as :func:`encode_rows` makes them.
        out: where to, float32 or wider ``[numel]``; it is returned.
        add: 1: add it to what is in ``out``; -1: subtract it.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = torch.tensor([[127, -64, 1, 0, 64, -127]], dtype=torch.int8), torch.tensor([[1., 2.]])
    >>> decode(Linear(127), codes.view(torch.uint8), scales, blocks)
    tensor([ 127.,  -64.,    1.,    0.,  128., -254.])
    """
    total = torch.zeros(blocks.numel, dtype=torch.float32, device=codes.device) if out is None else out
    if scales is not None and total.dtype == torch.float32:
        given = codes if codes.stride(1) == 1 else codes.contiguous(), scales.contiguous()
        kernels = fused(given[1], total)
        if kernels and kernels.decode(code.fields, *given, blocks, total, add or 0):
            return total
    rows = blocks.rows
    for chunk in blocks.chunks:
        whole: Tensor | None = None if add is None else chunk.gather(total)
        for first in range(0, len(codes), rows):
            coded = chunk.codes(codes[first : first + rows])
            said = torch.empty(coded.shape, dtype=torch.float32, device=coded.device)
            code.decode(coded, None if scales is None else chunk.scales(scales[first : first + rows]), said)
            whole = said.to(total.dtype) if whole is None else whole.add_(said, alpha=add or 1)
        if whole is not None:
            chunk.scatter(whole, total)
    return total


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row, added in halves; overwrites ``x``. The width is a power of two.

    The order of additions is written down here, so the bits depend on nothing else.

    >>> row_sums(torch.tensor([[1., 2., 3., 4.]]))
    tensor([10.])
    """
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half].add_(x[:, half:])
    return x[:, 0]
