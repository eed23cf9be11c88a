"""Codes of one to nine bits per element: evenly spaced levels, ternary, 8-bit floats, powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hvdbridge.kernels.native import FLOAT8, LINEAR, POWER, TERNARY, Fields
from hvdbridge.kernels.pack import pack, packed_bytes, unpack
from hvdbridge.kernels.quantise import TINY, Code, row_sums

Rounding = Literal["nearest", "stochastic"]


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in each row; NaN where a row has one.

    >>> largest(torch.tensor([[1., -3.], [2., 0.]]))
    tensor([3., 2.])
    """
    return torch.maximum(x.amax(1), x.amin(1).neg_())


def divide(x: Tensor, number: float, out: Tensor) -> None:
    """``x / number`` as IEEE 754 has it: by a plain number CUDA multiplies, with its rounded reciprocal."""
    torch.div(x, x.new_full((), number), out=out)


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

    @property
    def fields(self) -> Fields:
        digits, bias = self._bits
        top = int(torch.finfo(self._kind).max)
        return {"kind": FLOAT8, "bits": 8, "digits": digits, "bias": bias, "top": top, "random": self.random}

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

    @property
    def fields(self) -> Fields:
        return {"kind": POWER}

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
