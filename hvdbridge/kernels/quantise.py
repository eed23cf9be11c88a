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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hvdbridge.kernels.fused import Fused, InC, fused
from hvdbridge.kernels.pack import pack, packed_bytes, unpack
from hvdbridge.kernels.places import Places, Strip, blocks_in
from hvdbridge.kernels.random import hashed_bits
from hvdbridge.kernels.runs import Runs

CHUNK = 1 << 18
"""Elements that a CPU codes at a time, so that temporaries stay in its cache."""
RUN = 1 << 13
"""Elements from which a run of full blocks is worth a turn of a Python loop."""
TINY = 2.0**-126

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Loose:
    """Blocks that are copied: which, int64, their lengths, and where they lie in the vector and in the matrix."""

    which: Tensor
    lengths: Tensor
    runs: Runs


class Part(NamedTuple):
    """``times`` times ``size`` elements of a vector, which lie side by side, each of them cut into blocks.

    Attributes:
        start: of the first.
        number, hop: what randomness calls its first element, and from each of them to the next; see :mod:`.random`.
    """

    start: int
    size: int
    number: int = 0
    times: int = 1
    hop: int = 0


class Blocks:
    """Where the blocks of a flat vector lie: all of ``width`` elements, some shorter.

    Long runs of full blocks are matrices in place; the others are copied into matrices, filled up with zeros.

    Args:
        parts: in their order; ``width`` divides the size of those that are several.
        numel: of the vector; what no block covers is padding behind the last.
        device: of the vectors.

    >>> blocks = Blocks([Part(0, 6), Part(6, 1)], 4, 7, "cpu")
    >>> blocks.gather(torch.arange(7.), blocks.loose[0])
    tensor([[0., 1., 2., 3.],
            [4., 5., 0., 0.],
            [6., 0., 0., 0.]])
    """

    def __init__(self, parts: Iterable[Part], width: int, numel: int, device: torch.device | str) -> None:
        self.parts, self.width, self.numel = [part for part in parts if part.size and part.times], width, numel
        self.device = torch.device(device)
        self.count = sum(-(-part.size // width) * part.times for part in self.parts)
        self._ends = max((part.start + part.size * part.times for part in self.parts), default=0)
        self._at_once = max(1, CHUNK // width if self.device.type == "cpu" else self.count)

    @cached_property
    def places(self) -> Places:
        """With codes in the order of the vector, as :func:`encode` has them."""
        return Places(self._strips(), 1, self.width)

    def _strips(self) -> Iterator[Strip]:
        scale = 0
        for part in self.parts:
            yield Strip(part.start, part.size, part.times, part.size, 0, part.start, scale, part.number, part.hop)
            scale += -(-part.size // self.width) * part.times

    @cached_property
    def numbers(self) -> Tensor:
        """int32 ``[blocks]``: of each block's first element, for randomness."""
        numbered = [strip._replace(start=strip.number, hop=strip.skip) for strip in self._strips()]
        strips = torch.tensor(numbered, dtype=torch.int64, device="cpu").view(-1, len(Strip._fields))
        return blocks_in(strips, self.width)[:, 0].to(self.device, torch.int32)

    @cached_property
    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Blocks that follow each other without a gap, of which the last may be short: (position, first block, full
        blocks, elements of the short one)."""
        groups: list[tuple[int, int, int, int]] = []
        first = 0
        for part in self.parts:
            full, short = divmod(part.size * part.times, self.width)
            at, begin, before = part.start, first, 0
            first += full + (short > 0)
            if groups and groups[-1][0] + groups[-1][2] * self.width == at and not groups[-1][3]:
                at, begin, before, _ = groups.pop()
            groups.append((at, begin, before + full, short))
        return groups

    def _in_place(self, full: int) -> int:
        """How many of a group's full blocks are a matrix in place."""
        return full if full * self.width >= RUN else 0

    @cached_property
    def loose(self) -> list[Loose]:
        """The blocks outside of runs, on a CPU in parts that stay in its cache."""
        blocks = [
            (at + i * self.width, begin + i, self.width if i < full else short)
            for at, begin, full, short in self._groups
            for i in range(self._in_place(full), full + (short > 0))
        ]
        found = []
        for some in (blocks[i : i + self._at_once] for i in range(0, len(blocks), self._at_once)):
            runs = Runs((at, row * self.width, length) for row, (at, _, length) in enumerate(some))
            which, lengths = (torch.tensor([b[i] for b in some], device="cpu").to(self.device) for i in (1, 2))
            found.append(Loose(which, lengths, runs))
        return found

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """The runs as (position, first block, blocks), on a CPU in pieces that stay in its cache."""
        for at, first, full, _ in self._groups:
            count = self._in_place(full)
            for skip in range(0, count, self._at_once):
                yield at + skip * self.width, first + skip, min(self._at_once, count - skip)

    def view(self, flat: Tensor, at: int, count: int) -> Tensor:
        """``count`` full blocks from position ``at`` as a matrix."""
        return flat[at : at + count * self.width].view(count, self.width)

    def gather(self, flat: Tensor, some: Loose) -> Tensor:
        """Blocks filled up with zeros: ``[blocks, width]``."""
        matrix = torch.zeros((some.which.numel(), self.width), dtype=flat.dtype, device=flat.device)
        some.runs.to(flat, matrix.view(-1))
        return matrix

    def scatter(self, matrix: Tensor, flat: Tensor, some: Loose) -> None:
        """The inverse of :meth:`gather`, into ``flat``."""
        some.runs.back(flat, matrix.view(-1))

    def clear_padding(self, flat: Tensor) -> None:
        """Zeros behind the last block."""
        flat[self._ends :] = 0

    def measure(self, flat: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
        """``what`` of every block, float32 ``[blocks]``; it is given float32 matrices, not to be changed."""
        found = torch.empty(self.count, dtype=torch.float32, device=flat.device)
        for at, first, count in self.pieces():
            found[first : first + count] = what(self.view(flat, at, count).to(torch.float32))
        for some in self.loose:
            found.index_copy_(0, some.which, what(self.gather(flat, some).to(torch.float32)))
        return found

    def noise(self, blocks: slice | Tensor, seed: int) -> Tensor:
        """24 bits for every element of some blocks, int32 ``[blocks, width]``."""
        inside = torch.arange(self.width, dtype=torch.int32, device=self.device)
        return hashed_bits(self.numbers[blocks].unsqueeze(1) + inside, seed)


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


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in each row; NaN where a row has one.

    >>> largest(torch.tensor([[1., -3.], [2., 0.]]))
    tensor([3., 2.])
    """
    return torch.maximum(x.amax(1), x.amin(1).neg_())


def divide(x: Tensor, number: float, out: Tensor) -> None:
    """``x / number`` as IEEE 754 has it: by a plain number CUDA multiplies, with its rounded reciprocal."""
    torch.div(x, x.new_full((), number), out=out)


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


def norms(x: Tensor) -> Tensor:
    """The 2-norm of each row, without overflow; zero where a row is zero.

    >>> norms(torch.tensor([[3e30, -4e30], [0., 0.]]))
    tensor([5.0000e+30, 0.0000e+00])
    """
    top = largest(x)
    safe = top.clamp(min=TINY)
    y = x * safe.reciprocal().unsqueeze(1)
    # Through float64, as torch's root of float32 on a CPU may be the neighbour of the nearest.
    return row_sums(y.mul_(y)).to(torch.float64).sqrt_().to(torch.float32).mul_(safe)


@dataclass(frozen=True)
class Linear(Code):
    """Evenly spaced levels ``-levels .. levels`` times ``scale``, where ``scale = norm(block) / levels``.

    Attributes:
        norm: ``"max"``: the largest magnitude; ``"l2"``: the 2-norm, which wastes the upper levels and makes
            the variance's bound that of QSGD.
    """

    levels: int
    rounding: Rounding = "nearest"
    norm: Literal["max", "l2"] = "max"

    @property
    def bits(self) -> int:
        return (2 * self.levels).bit_length() if self.levels <= 127 else 16

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.levels <= 127 else torch.int16

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert scales is not None
        divide(largest(x) if self.norm == "max" else norms(x), self.levels, scales)
        y = x * scales.clamp_(min=TINY).reciprocal().unsqueeze(1)
        round_(y, noise, self.levels)
        self.write(y, codes)

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        assert scales is not None
        self.read(codes, out).mul_(scales.unsqueeze(1))

    def encoded_by(self, kernels: Fused) -> bool:
        simple = self.norm == "max" and not self.random
        return self.levels <= 127 and (simple or isinstance(kernels, InC))

    def decoded_by(self, kernels: Fused) -> bool:
        return self.levels <= 127

    def encode_fused(
        self, kernels: Fused, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        given = flat, places, self.levels, self._zero, (1 << self.bits) - 1, codes, scales, keep_rest
        if isinstance(kernels, InC):
            kernels.linear_encode(*given, self.norm == "l2", seed if self.random else None)
        else:
            kernels.linear_encode(*given)

    def decode_fused(
        self, kernels: Fused, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: Literal[1, -1] | None
    ) -> None:
        kernels.linear_decode(codes, scales, places, self._zero, out, add or 0)

    @property
    def _zero(self) -> int:
        """The code of zero: up to 63 levels are counted from the lowest, those of a whole byte are signed."""
        return 0 if self.levels > 63 else self.levels

    def write(self, y: Tensor, codes: Tensor) -> None:
        """Whole numbers ``-levels .. levels``, float or int, as codes; overwrites ``y``.

        NaN gives any code, but one of these bits.
        """
        if self.levels > 127:
            codes.copy_(y)
        elif self.levels > 63:
            codes.view(torch.int8).copy_(y)
        else:
            codes.copy_(y.add_(self.levels)).bitwise_and_((1 << self.bits) - 1)

    def read(self, codes: Tensor, out: Tensor) -> Tensor:
        """The inverse of :meth:`write`, into ``out``, which is returned."""
        if self.levels > 127:
            return out.copy_(codes)
        return out.copy_(codes.view(torch.int8)) if self.levels > 63 else out.copy_(codes).sub_(self.levels)

    def to_wire(self, codes: Tensor) -> Tensor:
        return codes.view(torch.uint8) if self.levels > 127 else super().to_wire(codes)

    def from_wire(self, packed: Tensor, n: int) -> Tensor:
        if self.levels > 127:
            codes = torch.empty((*packed.shape[:-1], n), dtype=torch.int16, device=packed.device)
            codes.view(torch.uint8).copy_(packed)
            return codes
        return super().from_wire(packed, n)


def round_(y: Tensor, noise: Tensor | None, levels: int) -> None:
    """Round in place to integers: to the nearest, or with ``noise`` up with the probability of the fraction."""
    if noise is None:
        y.round_()  # |y| <= levels (1 + 2 eps): cannot pass the last level
    else:
        y.add_(noise, alpha=2.0**-24).floor_().clamp_(-levels, levels)


@dataclass(frozen=True)
class Ternary(Linear):
    """-1, 0 or 1 times a scale that is given: ``[blocks, 2]``, each block's scale and the magnitude that elements are
    clipped to, no larger than the scale.
    """

    levels: int = 1
    rounding: Rounding = "stochastic"

    def encoded_by(self, kernels: Fused) -> bool:
        return Code.encoded_by(self, kernels)

    def encode_fused(
        self, kernels: Fused, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Of one row, and without a rest."""
        assert isinstance(kernels, InC)
        assert len(codes) == 1
        assert not keep_rest
        kernels.ternary_encode(flat, places, seed, codes, scales.contiguous())

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert scales is not None
        scale, limit = scales.clamp(min=TINY).unsqueeze(2).unbind(1)
        y = x.clamp(-limit, limit).mul_(scale.reciprocal())
        round_(y, noise, 1)
        self.write(y, codes)


@dataclass(frozen=True)
class Float8(Code):
    """8-bit floats times a scale that maps the block's largest magnitude to the format's."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    rounding: Rounding = "nearest"
    bits = 8

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert scales is not None
        top = torch.finfo(self._kind).max
        divide(largest(x), top, scales)
        y = x * scales.clamp_(min=TINY).reciprocal().unsqueeze(1)
        if noise is not None:
            digits, bias = self._bits
            # The spacing around y: its power of two, but not below that of the smallest normal number.
            power = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0 ** (1 - bias))
            step = power.mul_(2.0**-digits)
            y.div_(step).add_(noise, alpha=2.0**-24).floor_().mul_(step).clamp_(-top, top)
        codes.view(self._kind).copy_(y)

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        assert scales is not None
        # Through fp16, whose bits these are, shifted; torch's own conversion from e4m3 takes nine times as long.
        if self.format == "e5m2":
            half, lift = codes.to(torch.int16) << 8, 1.0
        else:
            # sign extended, so that the shift leaves the sign on top; the copy of it below goes. NaN does not
            # come back as such, but never is without its scale.
            half, lift = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000), 2.0**8
        out.copy_(half.view(torch.float16)).mul_(lift).mul_(scales.unsqueeze(1))

    def encode_fused(
        self, kernels: Fused, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        assert isinstance(kernels, InC)
        dice = seed if self.random else None
        kernels.float8_encode(flat, places, *self._bits, torch.finfo(self._kind).max, dice, codes, scales, keep_rest)

    def decode_fused(
        self, kernels: Fused, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: Literal[1, -1] | None
    ) -> None:
        assert isinstance(kernels, InC)
        kernels.float8_decode(codes, scales, places, *self._bits, out, add or 0)

    @property
    def _kind(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2

    @property
    def _bits(self) -> tuple[int, int]:
        """Of the fraction, and the bias of the exponent."""
        return (3, 7) if self.format == "e4m3" else (2, 15)


@dataclass(frozen=True)
class PowerOfTwo(Code):
    """A sign and the exponent of float32, rounded up with the probability of the fraction; no scale.

    The exponent is the byte that IEEE 754 has, 0 for zero, 255 for what is not finite. 1 + 8 bits: eight signs share
    a byte behind the exponents. Beyond 2**127 there is no next power, so there it is rounded down.
    """

    bits = 9
    dtype = torch.int16
    scaled = False
    random = True

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert noise is not None
        word = x.view(torch.int32)
        magnitude = word & 0x7FFFFFFF
        finite = magnitude < 0x7F800000
        # 23 random bits carry into the exponent as often as the fraction says.
        raised = noise.bitwise_right_shift(1).add_(magnitude.clamp_(max=0x7F7FFFFF)).bitwise_right_shift_(23)
        exponent = torch.where(finite, raised.clamp_(max=254), 255)
        codes.copy_(exponent.add_((word < 0).to(torch.int32), alpha=256))

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        # The sign lies above the exponent, as it does in float32.
        torch.bitwise_left_shift(codes.to(torch.int32), 23, out=out.view(torch.int32))

    def encode_fused(
        self, kernels: Fused, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        assert isinstance(kernels, InC)
        kernels.power_encode(flat, places, seed, codes, self._exponents(codes), keep_rest)

    def decode_fused(
        self, kernels: Fused, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: Literal[1, -1] | None
    ) -> None:
        assert isinstance(kernels, InC)
        kernels.power_decode(codes, places, self._exponents(codes), out, add or 0)

    def _exponents(self, codes: Tensor) -> int:
        """Elements in a row of :meth:`wire_bytes`."""
        return codes.shape[1] * 8 // 9

    def wire_bytes(self, n: int) -> int:
        return n + packed_bytes(n, 1)

    def to_wire(self, codes: Tensor) -> Tensor:
        """The exponents' bytes, then the signs packed."""
        halves = codes.view(torch.uint8).view(*codes.shape, 2)
        return torch.cat([halves[..., 0], pack(halves[..., 1].contiguous(), 1)], dim=-1)

    def from_wire(self, packed: Tensor, n: int) -> Tensor:
        codes = torch.empty((*packed.shape[:-1], n, 2), dtype=torch.uint8, device=packed.device)
        codes[..., 0] = packed[..., :n]
        codes[..., 1] = unpack(packed[..., n:], n, 1)
        return codes.view(torch.int16).squeeze(-1)
