"""What codes and packs in one pass over memory: native.c on a CPU, Triton on CUDA; torch's operations where there is
neither.

Rules:

1. All give the same bits (a block that is not finite may have any codes).
2. Triton's kernels are used on a device where one of them compiles and runs. ``HVDBRIDGE_KERNELS`` says what a failure
   is: ``native`` an error, ``auto`` a warning. ``hvdbridge doctor --gpu`` compares all of them with the CPU.
"""

from __future__ import annotations

import logging
from ctypes import CDLL
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.native import TYPES, compiled
from hvdbridge.kernels.places import Places

logger = logging.getLogger("hvdbridge")


class Fused(Protocol):
    """Vectors are float32 and contiguous. Codes and scales are ``[rows, n]``, what is in a row lies side by side;
    scales are float32 or its bytes.

    Attributes:
        aligned: scales must lie as floats do.
        packs: ``sign_encode`` takes int32 codes, too: zeros, that become words of 32 signs each, packed.
        packed: in their rows codes have the bits that :func:`fused` was asked for, as :mod:`.pack` lays them, and are
            written among zeros; else they have a byte each.
    """

    @property
    def aligned(self) -> bool: ...

    @property
    def packs(self) -> bool: ...

    @property
    def packed(self) -> bool: ...

    def linear_encode(
        self, flat: Tensor, places: Places, levels: int, offset: int, mask: int, codes: Tensor, scales: Tensor,
        keep_rest: bool,
    ) -> None:  # fmt: skip
        """:class:`~hvdbridge.kernels.codes.Linear`, nearest, by the largest magnitude."""

    def linear_decode(
        self, codes: Tensor, scales: Tensor, places: Places, offset: int, out: Tensor, add: int
    ) -> None: ...

    def sign_encode(self, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool) -> None:
        """:class:`~hvdbridge.kernels.signs.ScaledSign`."""

    def sign_decode(self, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: int) -> None: ...

    def squeeze(self, codes: Tensor, bits: int, packed: Tensor) -> None:
        """Eight codes of a byte each -> ``bits`` bytes."""

    def spread(self, packed: Tensor, bits: int, codes: Tensor) -> None: ...


class OnDevice(Fused, Protocol):
    """What runs where the host may not look at what was found."""

    def reaching(self, bits: Tensor, limit: Tensor, positions: Tensor) -> None:
        """Where magnitudes reach a limit.

        Args:
            bits: of float32 numbers, int32 ``[n]``, contiguous.
            limit: int32 ``[1]``, above 0: the bits of a magnitude.
            positions: int32, all -1: takes those of the larger ones, ascending, and behind them of the equal ones, as
                far as there is room.
        """

    def shuffle(self, owner: Tensor, sizes: Tensor, first: Tensor, pivots: Tensor, salts: Tensor) -> Tensor:
        """:func:`~hvdbridge.kernels.select.swapped`."""

    @property
    def SIDE(self) -> int:
        """Columns that :meth:`orthonormal` takes at most."""

    def orthonormal(self, batch: Tensor, epsilon: float, high: float, low: float, nothing: float) -> Tensor:
        """:func:`~hvdbridge.kernels.orthogonal.orthonormal` of float32, with that module's constants."""


def fused(*tensors: Tensor, bits: int = 8) -> Fused | None:
    """Who does it for such tensors, all on one device; None: torch's operations.

    Args:
        bits: of a code in its row, where who does it has that choice (:attr:`Fused.packed`).

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and there is none.
    """
    device = tensors[0].device
    if device.type == "cpu":
        native = compiled(*tensors)
        return None if native is None else InC(native, bits)
    if device.type != "cuda" or any(not t.is_contiguous() or t.dtype not in TYPES for t in tensors):
        return None
    return on_cuda(device)


class InC:
    """native.c's, which know more codes."""

    aligned, packs, packed = False, False, True

    def __init__(self, native: CDLL, bits: int) -> None:
        self._native, self._bits = native, bits

    def linear_encode(
        self, flat: Tensor, places: Places, levels: int, offset: int, mask: int, codes: Tensor, scales: Tensor,
        keep_rest: bool, l2: bool = False, seed: int | None = None,
    ) -> None:  # fmt: skip
        """``l2``: by the norm. ``seed``: at random."""
        table = places.table(self._native)
        self._native.linear_encode(
            flat.data_ptr(), table.data_ptr(), len(table), places.width, levels, offset, mask, self._bits, l2,
            *_dice(seed), *_lie(codes), *_lie(scales), keep_rest,
        )  # fmt: skip

    def linear_decode(self, codes: Tensor, scales: Tensor, places: Places, offset: int, out: Tensor, add: int) -> None:
        table, messages = places.table(self._native), codes.shape[0] // places.height
        self._native.linear_decode(
            *_lie(codes), *_lie(scales), messages, places.height, table.data_ptr(), len(table), offset,
            self._bits, out.data_ptr(), add,
        )  # fmt: skip

    def sign_encode(self, flat: Tensor, places: Places, codes: Tensor, scales: Tensor, keep_rest: bool) -> None:
        table = places.table(self._native)
        self._native.sign_encode(
            flat.data_ptr(), table.data_ptr(), len(table), places.width, self._bits, *_lie(codes), *_lie(scales),
            keep_rest,
        )  # fmt: skip

    def sign_decode(self, codes: Tensor, scales: Tensor, places: Places, out: Tensor, add: int) -> None:
        table, messages = places.table(self._native), codes.shape[0] // places.height
        self._native.sign_decode(
            *_lie(codes), *_lie(scales), messages, places.height, table.data_ptr(), len(table), self._bits,
            out.data_ptr(), add,
        )  # fmt: skip

    def ternary_encode(self, flat: Tensor, places: Places, seed: int, codes: Tensor, given: Tensor) -> None:
        """:class:`~hvdbridge.kernels.codes.Ternary`, of one row: what is ``given`` is contiguous."""
        table = places.table(self._native)
        dice = _dice(seed)[1:]
        self._native.ternary_encode(
            flat.data_ptr(), table.data_ptr(), len(table), given.data_ptr(), *dice, codes.data_ptr()
        )

    def float8_encode(
        self, flat: Tensor, places: Places, digits: int, bias: int, top: float, seed: int | None, codes: Tensor,
        scales: Tensor, keep_rest: bool,
    ) -> None:  # fmt: skip
        """:class:`~hvdbridge.kernels.codes.Float8`, with so many bits of fraction; ``top`` is its largest number."""
        table = places.table(self._native)
        self._native.float8_encode(
            flat.data_ptr(), table.data_ptr(), len(table), digits, bias, top, *_dice(seed), *_lie(codes),
            *_lie(scales), keep_rest,
        )  # fmt: skip

    def float8_decode(
        self, codes: Tensor, scales: Tensor, places: Places, digits: int, bias: int, out: Tensor, add: int
    ) -> None:
        table, messages = places.table(self._native), codes.shape[0] // places.height
        self._native.float8_decode(
            *_lie(codes), *_lie(scales), messages, places.height, table.data_ptr(), len(table), digits, bias,
            out.data_ptr(), add,
        )  # fmt: skip

    def power_encode(
        self, flat: Tensor, places: Places, seed: int, codes: Tensor, length: int, keep_rest: bool
    ) -> None:
        """:class:`~hvdbridge.kernels.codes.PowerOfTwo`: ``length`` exponents, then signs, packed, among zeros."""
        table = places.table(self._native)
        self._native.power_encode(
            flat.data_ptr(), table.data_ptr(), len(table), *_dice(seed)[1:], *_lie(codes), length, keep_rest
        )

    def power_decode(self, codes: Tensor, places: Places, length: int, out: Tensor, add: int) -> None:
        table, messages = places.table(self._native), codes.shape[0] // places.height
        self._native.power_decode(
            *_lie(codes), length, messages, places.height, table.data_ptr(), len(table), out.data_ptr(), add
        )

    def squeeze(self, codes: Tensor, bits: int, packed: Tensor) -> None:
        self._native.squeeze(codes.data_ptr(), codes.numel() // 8, bits, packed.data_ptr())

    def spread(self, packed: Tensor, bits: int, codes: Tensor) -> None:
        self._native.spread(packed.data_ptr(), codes.numel() // 8, bits, codes.data_ptr())


def _dice(seed: int | None) -> tuple[bool, int, int]:
    """Whether to throw them, and the halves of what :func:`~hvdbridge.kernels.random.hashed_bits` takes."""
    return seed is not None, (seed or 0) & 0xFFFFFFFF, (seed or 0) >> 32


def _lie(rows: Tensor) -> tuple[int, int]:
    """Where rows begin, and how many bytes they are apart."""
    assert rows.stride(1) == 1 or rows.shape[1] < 2, "what is in a row lies side by side"
    return rows.data_ptr(), rows.stride(0) * rows.itemsize


@lru_cache
def on_cuda(device: torch.device) -> OnDevice | None:
    """Triton's, if they work there; else None, and a warning unless the user wants it so.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and they do not.
    """
    kernels = Config.from_environment().kernels
    if kernels == "torch":
        return None
    try:
        import hvdbridge.kernels.cuda as cuda

        codes = torch.ones(8, dtype=torch.uint8, device=device)
        cuda.squeeze(codes, 1, torch.empty(1, dtype=torch.uint8, device=device))
        return cuda
    except Exception as error:  # whatever a compiler of kernels, and of C below it, may raise
        wrong = f"{type(error).__name__}: {error}"
    if kernels == "native":
        raise ConfigurationError(
            f"HVDBRIDGE_KERNELS=native: Triton's kernels do not work on {device}: {wrong}. Install Triton and a C "
            "compiler, or unset the variable: torch's operations do the same, more slowly."
        )
    logger.warning(
        "compression on %s takes several times as long without Triton's kernels (install Triton and a C compiler, or "
        "set HVDBRIDGE_KERNELS=torch): %s", device, wrong,
    )  # fmt: skip
    return None
