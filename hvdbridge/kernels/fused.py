"""What codes and packs in one pass over memory: native.c on a CPU, Triton on CUDA; torch's operations where there is
neither.

Rules:

1. All give the same bits (a block that is not finite may have any codes).
2. Triton's kernels are used on a device after they have given there what the CPU gives, codes and all; else never.
   ``HVDBRIDGE_KERNELS`` says what a failure is: ``native`` an error, ``auto`` a warning.
"""

from __future__ import annotations

import itertools
import logging
import time
from ctypes import CDLL
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.native import TYPES, compiled

if TYPE_CHECKING:
    from hvdbridge.kernels.quantise import Places

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
        """:class:`~hvdbridge.kernels.quantise.Linear`, nearest, by the largest magnitude."""

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

    def orthonormal(self, batch: Tensor, epsilon: float) -> Tensor:
        """:func:`~hvdbridge.kernels.orthogonal.orthonormal` of no more than FEW columns of float32."""


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
        """:class:`~hvdbridge.kernels.quantise.Ternary`, of one row: what is ``given`` is contiguous."""
        table = places.table(self._native)
        dice = _dice(seed)[1:]
        self._native.ternary_encode(
            flat.data_ptr(), table.data_ptr(), len(table), given.data_ptr(), *dice, codes.data_ptr()
        )

    def float8_encode(
        self, flat: Tensor, places: Places, digits: int, bias: int, top: float, seed: int | None, codes: Tensor,
        scales: Tensor, keep_rest: bool,
    ) -> None:  # fmt: skip
        """:class:`~hvdbridge.kernels.quantise.Float8`, with so many bits of fraction; ``top`` is its largest number."""
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
        """:class:`~hvdbridge.kernels.quantise.PowerOfTwo`: ``length`` exponents, then signs, packed, among zeros."""
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
    started = time.perf_counter()
    try:
        import hvdbridge.kernels.cuda as cuda

        wrong = differences(cuda, device)
    except Exception as error:  # whatever a compiler of kernels, and of C below it, may raise
        wrong = f"{type(error).__name__}: {error}"
    logger.info("Triton's kernels took %.1f s to compile and to compare on %s", time.perf_counter() - started, device)
    if not wrong:
        return cuda
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


def differences(kernels: ModuleType | Any, device: torch.device) -> str:
    """What ``kernels`` get wrong on ``device``, by name; compared with the CPU, whose bits all devices give. Waits."""
    from hvdbridge.kernels import orthogonal, pack, select, signs
    from hvdbridge.kernels.quantise import Blocks, Linear, Part, decode, encode

    draw, wrong = torch.Generator("cpu").manual_seed(0), []
    for code, width in itertools.product((Linear(127), Linear(7), signs.ScaledSign()), (1024, 16)):
        numel = 4 * width + width // 2 + 1
        x = torch.empty(numel, dtype=torch.float32, device="cpu").normal_(generator=draw)
        x *= torch.empty_like(x).normal_(generator=draw).mul_(8).exp_()
        x[:width] = (x[:width] * 4).round().clamp(-254, 254) / 2  # halves, between two codes
        x[0], x[2 * width : 3 * width], x[-1] = 127.0, 0.0, 1e-40
        blocks, theirs = (Blocks([Part(0, numel)], width, numel, where) for where in ("cpu", device))
        codes, scales = encode(code, x, blocks)
        assert scales is not None, "these codes have them"
        rest = decode(code, codes.unsqueeze(0), scales.unsqueeze(0), blocks, x.clone(), add=-1)
        vector = x.to(device, copy=True)
        found, rates = (torch.zeros_like(t, device=device).unsqueeze(0) for t in (codes, scales))
        code.encode_fused(kernels, vector, theirs.places, found, rates, keep_rest=True)
        same = torch.equal(found.cpu()[0], codes) and torch.equal(rates.cpu()[0], scales)
        room = code.room(kernels, 1, numel, device)
        if room.dtype == torch.int32:
            code.encode_fused(kernels, x.to(device), theirs.places, room, rates)
            packed = code.to_wire(room)[0, : code.wire_bytes(numel)]
            same = same and torch.equal(packed.cpu(), code.to_wire(codes)) and torch.equal(rates.cpu()[0], scales)
        two, their_rates = found.expand(2, -1).contiguous(), rates.expand(2, -1).contiguous()
        for add in (None, 1, -1):
            expected = decode(code, two.cpu(), their_rates.cpu(), blocks, x.clone(), add)
            out = x.to(device, copy=True)
            code.decode_fused(kernels, two, their_rates, theirs.places, out, add)
            same = same and torch.equal(out.cpu(), expected)
        if not (same and torch.equal(vector.cpu(), rest)):
            wrong.append(f"{code} of {width}")
    for bits in range(1, 8):
        some = torch.randint(1 << bits, (8 * 321,), generator=draw, dtype=torch.uint8, device="cpu")
        expected = pack.pack(some, bits)
        packed, back = (torch.zeros_like(t, device=device) for t in (expected, some))
        kernels.squeeze(some.to(device), bits, packed)
        kernels.spread(packed, bits, back)
        if not (torch.equal(packed.cpu(), expected) and torch.equal(back.cpu(), some)):
            wrong.append(f"{bits} bits")
    for numel in (1, 33, 9_000):  # of the last, several programs
        some = torch.randint(4, (numel,), generator=draw, dtype=torch.int32, device="cpu")
        some -= (some == 3) * torch.iinfo(torch.int32).max  # below zero, as bits
        magnitudes, size = some & 0x7FFFFFFF, (numel + 1) // 2
        for limit in (1, 2, 4):
            reached = torch.cat([(magnitudes > limit).nonzero(), (magnitudes == limit).nonzero()]).view(-1)[:size].int()
            expected = torch.nn.functional.pad(reached, (0, size - len(reached)), value=-1)
            positions = torch.full((size,), -1, dtype=torch.int32, device=device)
            bound = torch.full((1,), limit, dtype=torch.int32, device=device)
            anywhere = torch.cat([some[:1], some]).to(device)[1:]  # for an aligned one there are other kernels
            again = positions.clone()
            kernels.reaching(some.to(device), bound, positions)
            kernels.reaching(anywhere, bound, again)
            if not (torch.equal(positions.cpu(), expected) and torch.equal(again, positions)):
                wrong.append(f"{numel} that reach {limit}")
    sizes = torch.tensor([1_000, 3, 2**31 - 1], dtype=torch.int64, device="cpu")
    counts = torch.tensor([700, 3, 20], dtype=torch.int64, device="cpu")
    drawn = torch.randint(2**31 - 1, (2, select.ROUNDS + 1, 3), generator=draw, dtype=torch.int64, device="cpu")
    first, pivots, salts = torch.cumsum(counts, 0) - counts, drawn[0].remainder(sizes), drawn[1]
    pivots[0, 2] = 2**31 - 10
    tables = [select.owners(counts, 723), *(table.int() for table in (sizes, first, pivots, salts))]
    if not torch.equal(kernels.shuffle(*(table.to(device) for table in tables)).cpu(), select.swapped(*tables)):
        wrong.append("a shuffle")
    for shape, epsilon in (((2, 1, 1), 0.0), ((3, 4, 700), 0.0), ((1, 3, 5_000), 1e-8), ((1, orthogonal.FEW, 50), 0.5)):
        columns = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=draw)
        columns[:, 1:2] = 2 * columns[:, :1]  # in the span of the one before
        columns[1:2, 2:3], columns[2:, -1:, -1:] = 0.0, float("nan")
        found = kernels.orthonormal(columns.to(device), epsilon).cpu()
        (expected,) = orthogonal.orthonormal([columns], epsilon)
        if not torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)):
            wrong.append(f"{shape[1]} columns, orthonormal")
    return f"other bits than the CPU's: {', '.join(wrong)}" if wrong else ""
