"""Codes of one to nine bits per element, or 16: evenly spaced levels, ternary, 8-bit floats, powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.kernels.native import FLOAT8, LINEAR, POWER, TERNARY, Fields
from hvdbridge.kernels.pack import pack, packed_bytes, unpack
from hvdbridge.kernels.quantise import TINY, Code, row_sums

Rounding = Literal["nearest", "stochastic"]


def max_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row, ``[rows]``; NaN where the row contains one.

    >>> max_magnitude(torch.tensor([[1., -3.], [2., 0.]]))
    tensor([3., 2.])
    """
    return torch.maximum(x.amax(1), x.amin(1).neg_())


def divide(x: Tensor, number: float, out: Tensor) -> None:
    """Write ``x / number`` to ``out``, rounded as in IEEE 754.

    For a Python number CUDA would multiply by the rounded reciprocal, so ``number`` becomes a tensor.
    """
    torch.div(x, x.new_full((), number), out=out)


def norms(x: Tensor) -> Tensor:
    """Return the 2-norm of each row, ``[rows]``, without overflow; zero where a row is zero.

    >>> norms(torch.tensor([[3e30, -4e30], [0., 0.]]))
    tensor([5.0000e+30, 0.0000e+00])
    """
    top = max_magnitude(x)
    safe = top.clamp(min=TINY)
    y = x * safe.reciprocal().unsqueeze(1)
    # In float64, as torch's float32 square root on a CPU is not always correctly rounded.
    return row_sums(y.mul_(y)).to(torch.float64).sqrt_().to(torch.float32).mul_(safe)


@dataclass(frozen=True)
class Linear(Code):
    """Evenly spaced levels ``-levels .. levels`` times ``scale``, where ``scale = norm(block) / levels``.

    Attributes:
        levels: number of levels above zero. Up to 127 a code is a uint8 of :attr:`bits` bits, beyond that an int16.
        rounding: to the nearest level, or stochastic.
        norm: ``"max"``: the largest magnitude. ``"l2"``: the 2-norm, for which QSGD's bound of the variance holds, but
            with which few elements reach the upper levels.
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
        divide(max_magnitude(x) if self.norm == "max" else norms(x), self.levels, scales)
        y = x * scales.clamp_(min=TINY).reciprocal().unsqueeze(1)
        round_(y, noise, self.levels)
        self.write(y, codes)

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        assert scales is not None
        self.read(codes, out).mul_(scales.unsqueeze(1))

    @property
    def fields(self) -> Fields:
        if self.levels > 127:
            return {}
        return {
            "kind": LINEAR, "bits": self.bits, "levels": self.levels, "offset": self._zero,
            "mask": (1 << self.bits) - 1, "l2": self.norm == "l2", "random": self.random,
        }  # fmt: skip

    @property
    def _zero(self) -> int:
        """The code of zero. Up to 63 levels, codes count from the lowest level; above, a code is a signed byte."""
        return 0 if self.levels > 63 else self.levels

    def write(self, y: Tensor, codes: Tensor) -> None:
        """Write whole numbers ``-levels .. levels``, float or int, as codes; overwrites ``y``.

        NaN may give any code of :attr:`bits` bits.
        """
        if self.levels > 127:
            codes.copy_(y)
        elif self.levels > 63:
            codes.view(torch.int8).copy_(y)
        else:
            codes.copy_(y.add_(self.levels)).bitwise_and_((1 << self.bits) - 1)

    def read(self, codes: Tensor, out: Tensor) -> Tensor:
        """Write the numbers that ``codes`` stand for into ``out`` and return it; the inverse of :meth:`write`."""
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
    """Round in place to integers: to the nearest, or stochastically if ``noise`` (24 bits per element) is given.

    Stochastic rounding goes up with a probability equal to the fraction.
    """
    if noise is None:
        y.round_()  # |y| <= levels (1 + 2 eps), so no result exceeds levels
    else:
        y.add_(noise, alpha=2.0**-24).floor_().clamp_(-levels, levels)


@dataclass(frozen=True)
class Ternary(Linear):
    """-1, 0 or 1 times a scale that the caller gives, rounded stochastically.

    ``scales`` is ``[blocks, 2]``: each block's scale, and the magnitude to which its elements are clipped. The latter
    must not exceed the scale.
    """

    levels: int = 1
    rounding: Rounding = "stochastic"

    @property
    def fields(self) -> Fields:
        return {**super().fields, "kind": TERNARY}

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
    """8-bit floats times a scale that maps the block's largest magnitude to the format's largest number."""

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
        top = torch.finfo(self._format_dtype).max
        divide(max_magnitude(x), top, scales)
        y = x * scales.clamp_(min=TINY).reciprocal().unsqueeze(1)
        if noise is not None:
            fraction_bits, bias = self._format
            # The spacing around y follows from its exponent, but is at least that of the smallest normal number.
            power = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0 ** (1 - bias))
            step = power.mul_(2.0**-fraction_bits)
            y.div_(step).add_(noise, alpha=2.0**-24).floor_().mul_(step).clamp_(-top, top)
        codes.view(self._format_dtype).copy_(y)

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        assert scales is not None
        # By way of fp16, whose bits are those of the code, shifted: torch's own conversion from e4m3 is slow.
        if self.format == "e5m2":
            half, power = codes.to(torch.int16) << 8, 1.0
        else:
            # Sign extension keeps the sign on top after the shift; the mask clears its copy below. NaN is lost here,
            # but then the scale of its block is not finite.
            half, power = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000), 2.0**8
        out.copy_(half.view(torch.float16)).mul_(power).mul_(scales.unsqueeze(1))

    @property
    def fields(self) -> Fields:
        fraction_bits, bias = self._format
        top = int(torch.finfo(self._format_dtype).max)
        return {"kind": FLOAT8, "bits": 8, "digits": fraction_bits, "bias": bias, "top": top, "random": self.random}

    @property
    def _format_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2

    @property
    def _format(self) -> tuple[int, int]:
        """Number of fraction bits, and bias of the exponent."""
        return (3, 7) if self.format == "e4m3" else (2, 15)


@dataclass(frozen=True)
class PowerOfTwo(Code):
    """A sign and float32's exponent, rounded up with a probability equal to the fraction; no scale.

    The exponent is the byte of IEEE 754: 0 for zero, 255 for inf and NaN. An element takes 8 + 1 bits: eight signs
    share a byte after all exponents. Above 2**127 there is no next power of two, so such numbers are rounded down.
    """

    bits = 9
    dtype = torch.int16
    scaled = False
    random = True

    def encode(
        self, x: Tensor, counts: Tensor | int, noise: Tensor | None, codes: Tensor, scales: Tensor | None
    ) -> None:
        assert noise is not None
        bits = x.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        finite = magnitude < 0x7F800000
        # Fraction plus 23 random bits carries into the exponent with a probability equal to the fraction.
        rounded = noise.bitwise_right_shift(1).add_(magnitude.clamp_(max=0x7F7FFFFF)).bitwise_right_shift_(23)
        exponent = torch.where(finite, rounded.clamp_(max=254), 255)
        codes.copy_(exponent.add_((bits < 0).to(torch.int32), alpha=256))

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        # The sign is the bit above the exponent, as in float32.
        torch.bitwise_left_shift(codes.to(torch.int32), 23, out=out.view(torch.int32))

    @property
    def fields(self) -> Fields:
        return {"kind": POWER}

    def wire_bytes(self, n: int) -> int:
        return n + packed_bytes(n, 1)

    def to_wire(self, codes: Tensor) -> Tensor:
        """Return the exponents' bytes, followed by the packed signs: uint8 ``[rows, wire_bytes(n)]``."""
        code_bytes = codes.view(torch.uint8).view(*codes.shape, 2)
        return torch.cat([code_bytes[..., 0], pack(code_bytes[..., 1].contiguous(), 1)], dim=-1)

    def from_wire(self, packed: Tensor, n: int) -> Tensor:
        codes = torch.empty((*packed.shape[:-1], n, 2), dtype=torch.uint8, device=packed.device)
        codes[..., 0] = packed[..., :n]
        codes[..., 1] = unpack(packed[..., n:], n, 1)
        return codes.view(torch.int16).squeeze(-1)
