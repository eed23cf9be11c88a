"""Kernels that code and pack in one pass over memory: native.c on a CPU, Triton on CUDA.

Rules:

1. All give the bits of the torch operations. (A block that is not finite may have any codes.)
2. A kernel returns None if it does not know a code, or does not compile: then torch's operations do the work.
3. Vectors are float32. Codes are uint8 and scales float32 ``[rows, n]``, see :class:`~hvdbridge.kernels.blocks.Blocks`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hvdbridge.config import Config
from hvdbridge.kernels.blocks import Blocks
from hvdbridge.kernels.native import POWER, TYPES, Fields, Job, compiled, does_not_work


def fused(*tensors: Tensor, packs: bool = False) -> InC | ModuleType | None:
    """The kernels for such tensors, all on one device: native.c, or the module :mod:`.cuda`. None: torch's operations.

    Args:
        packs: native.c reads and writes codes packed as :mod:`.pack` does, among zeros; not in a byte each.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and the kernels do not compile.
    """
    device = tensors[0].device
    if device.type == "cpu":
        native = compiled(*tensors)
        return None if native is None else InC(native, packs)
    if device.type != "cuda" or any(not t.is_contiguous() or t.dtype not in TYPES for t in tensors):
        return None
    return on_cuda(device)


class InC:
    """native.c's kernels: all codes of 8 bits or fewer, and powers of two when packed."""

    def __init__(self, native: ctypes.CDLL, packs: bool) -> None:
        self._native, self._packs = native, packs

    def encode(
        self, fields: Fields, flat: Tensor, blocks: Blocks, codes: Tensor, scales: Tensor, keep_rest: bool, seed: int
    ) -> bool | None:
        """Write codes and scales; with ``keep_rest`` ``flat`` becomes what these do not say.

        Args:
            scales: float32, or its bytes.
            seed: of the noise, for codes that are random.
        """
        halves = {"low": seed & 0xFFFFFFFF, "high": seed >> 32}
        return self._call(self._native.encode, fields, flat, blocks, codes, scales, keep_rest=keep_rest, **halves)

    def decode(
        self, fields: Fields, codes: Tensor, scales: Tensor, blocks: Blocks, out: Tensor, add: int
    ) -> bool | None:
        """Write to ``out`` the sum of some messages ``[messages * rows, n]``, or add it (``add`` 1), or subtract it
        (-1)."""
        messages = codes.shape[0] // blocks.rows
        return self._call(self._native.decode, fields, out, blocks, codes, scales, messages=messages, add=add)

    def _call(
        self, function: Any, fields: Fields, vector: Tensor, blocks: Blocks, codes: Tensor,
        scales: Tensor, **more: int,
    ) -> bool | None:  # fmt: skip
        if not fields or not blocks.fit or (fields["kind"] == POWER and not self._packs):
            return None
        assert codes.stride(1) == 1 or codes.shape[1] < 2, "a row's codes are side by side"
        table = blocks.table(self._native)
        more |= {} if self._packs else {"bits": 8}
        job = Job(
            vector=vector.data_ptr(), table=table.data_ptr(), blocks=len(table), width=blocks.width, rows=blocks.rows,
            codes=codes.data_ptr(), code_stride=codes.stride(0), length=blocks.length, scales=scales.data_ptr(),
            scale_stride=scales.stride(0) * scales.itemsize, **{**fields, **more},
        )  # fmt: skip
        function(ctypes.byref(job))
        return True

    def squeeze(self, codes: Tensor, bits: int, packed: Tensor) -> bool:
        """Eight codes of a byte each -> ``bits`` bytes."""
        self._native.squeeze(codes.data_ptr(), codes.numel() // 8, bits, packed.data_ptr())
        return True

    def spread(self, packed: Tensor, bits: int, codes: Tensor) -> bool:
        """The inverse of :meth:`squeeze`."""
        self._native.spread(packed.data_ptr(), codes.numel() // 8, bits, codes.data_ptr())
        return True


@lru_cache
def on_cuda(device: torch.device) -> ModuleType | None:
    """The module :mod:`.cuda`, if Triton works on the device; else None, and a warning unless the user wants it so.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and Triton does not work.
    """
    if Config.from_environment().kernels == "torch":
        return None
    try:
        import hvdbridge.kernels.cuda as cuda
    except Exception as error:  # whatever Triton may raise
        does_not_work(f"Triton's kernels on {device}", "Triton and a C compiler", error)
        return None
    codes = torch.ones(8, dtype=torch.uint8, device=device)
    return cuda if cuda.squeeze(codes, 1, torch.empty(1, dtype=torch.uint8, device=device)) else None
