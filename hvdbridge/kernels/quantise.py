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
from hvdbridge.kernels.fused import Fused, InC, fused
from hvdbridge.kernels.pack import pack, packed_bytes, unpack
from hvdbridge.kernels.places import Places

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

    def add(self, codes: Tensor, scales: Tensor | None, out: Tensor, sign: int, spare: Tensor) -> None:
        """Add to ``out``, float32 or wider, or take off it (``sign`` 1, -1) what they stand for.

        ``spare``: of its shape, float32, to be overwritten.
        """
        self.decode(codes, scales, spare)
        out.add_(spare, alpha=sign)

    def encoded_by(self, kernels: Fused) -> bool:
        """Whether they know it: C, what fits into a byte."""
        return isinstance(kernels, InC)

    def decoded_by(self, kernels: Fused) -> bool:
        """Whether they know it: C, what fits into a byte."""
        return isinstance(kernels, InC)

    @abstractmethod
    def encode_fused(
        self, kernels: Fused, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """All blocks in one pass.

        Args:
            flat: float32; with ``keep_rest`` it becomes what the codes do not say.
            codes, scales: uint8 and float32 (or its bytes), ``[rows, n]``, to be written; what is in a row lies side by
                side.
            seed: of the noise, where the code is :attr:`random`.
        """

    def room(self, kernels: Fused, rows: int, n: int, device: torch.device) -> Tensor:
        """For what :meth:`encode_fused` makes of ``[rows, n]`` elements, and :meth:`to_wire` turns into bytes, of which
        some more than :meth:`wire_bytes` may come: codes in whole words, or packed already."""
        return torch.empty((rows, n + -n % 8), dtype=torch.uint8, device=device)

    @abstractmethod
    def decode_fused(
        self, kernels: Fused, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: Literal[1, -1] | None
    ) -> None:
        """The inverse, of one message or the sum of several, ``[messages * rows, n]``; see :func:`decode`."""

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
    """Codes ``[numel]`` of a vector, and scales ``[blocks]`` where the code has them.

    Args:
        seed: of the noise.
        given: ``[blocks, ...]``, for a code that does not find its scales itself.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = encode(Linear(127), torch.tensor([127., -64., 1., 0., 5., -10.]), blocks)
    >>> codes.view(torch.int8).tolist(), scales.tolist()
    ([127, -64, 1, 0, 64, -127], [1.0, 0.07874015718698502])
    """
    codes = torch.empty(blocks.numel, dtype=code.dtype, device=flat.device)
    blocks.clear_padding(codes)
    scales = (
        torch.empty(blocks.count, dtype=torch.float32, device=flat.device) if code.scaled and given is None else given
    )
    kernels = fused(codes) if flat.itemsize <= 4 else None
    if scales is not None and kernels and code.encoded_by(kernels):
        x = flat.to(torch.float32).contiguous()
        code.encode_fused(kernels, x, blocks.places, codes.unsqueeze(0), scales.unsqueeze(0), seed=seed)
        return codes, scales
    for at, first, count in blocks.pieces():
        these = slice(first, first + count)
        x = blocks.view(flat, at, count).to(torch.float32)
        noise = blocks.noise(these, seed) if code.random else None
        code.encode(x, blocks.width, noise, blocks.view(codes, at, count), None if scales is None else scales[these])
    for some in blocks.loose:
        x = blocks.gather(flat, some).to(torch.float32)
        noise = blocks.noise(some.which, seed) if code.random else None
        theirs = None if scales is None else scales.index_select(0, some.which)
        coded = torch.empty(x.shape, dtype=code.dtype, device=flat.device)
        code.encode(x, some.lengths, noise, coded, theirs)
        blocks.scatter(coded, codes, some)
        if given is None and scales is not None and theirs is not None:
            scales.index_copy_(0, some.which, theirs)
    return codes, scales


def decode(
    code: Code,
    codes: Tensor,
    scales: Tensor | None,
    blocks: Blocks,
    out: Tensor | None = None,
    add: Literal[1, -1] | None = None,
) -> Tensor:
    """What ``codes`` ``[rows, numel]`` and ``scales`` ``[rows, blocks]`` stand for, added in the order of rows:
    float32 ``[numel]``.

    Args:
        out: where to, float32 or wider ``[numel]``; it is returned.
        add: to what is in ``out`` add what they stand for, or take it off.

    >>> from hvdbridge.kernels.blocks import Part
    >>> from hvdbridge.kernels.codes import Linear
    >>> blocks = Blocks([Part(0, 6)], 4, 6, "cpu")
    >>> codes, scales = torch.tensor([[127, -64, 1, 0, 64, -127]], dtype=torch.int8), torch.tensor([[1., 2.]])
    >>> decode(Linear(127), codes.view(torch.uint8), scales, blocks)
    tensor([ 127.,  -64.,    1.,    0.,  128., -254.])
    """
    total = torch.empty(blocks.numel, dtype=torch.float32, device=codes.device) if out is None else out
    rows = range(codes.shape[0])
    direct = add is None and total.dtype == torch.float32  # the first row is written where it belongs
    if add is None:
        blocks.clear_padding(total)
    if scales is not None and total.dtype == torch.float32:
        lying = codes.contiguous(), scales.contiguous()
        if (kernels := fused(*lying, total)) and code.decoded_by(kernels):
            code.decode_fused(kernels, *lying, blocks.places, total, add)
            return total
    for at, first, count in blocks.pieces():
        here = blocks.view(total, at, count)
        spare = here if direct and len(rows) == 1 else torch.empty(here.shape, dtype=torch.float32, device=here.device)
        for row in rows:
            theirs = None if scales is None else scales[row, first : first + count]
            coded = blocks.view(codes[row], at, count)
            if row or add is not None:
                code.add(coded, theirs, here, add or 1, spare)
            elif direct:
                code.decode(coded, theirs, here)
            else:
                code.decode(coded, theirs, spare)
                here.copy_(spare)
    for some in blocks.loose:
        spare = torch.zeros((some.which.numel(), blocks.width), dtype=torch.float32, device=codes.device)
        whole = torch.zeros_like(spare) if add is None else blocks.gather(total, some)
        for row in rows:
            theirs = None if scales is None else scales[row].index_select(0, some.which)
            coded = blocks.gather(codes[row], some)
            if row or add is not None:
                code.add(coded, theirs, whole, add or 1, spare)
            else:
                code.decode(coded, theirs, whole)
        blocks.scatter(whole, total, some)
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


