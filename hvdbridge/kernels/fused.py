"""Fused kernels, which code and pack in one pass over memory: native.c on CPUs, Triton on CUDA.

Rules:

1. All kernels give the bits of the torch operations. (Blocks that are not finite may get any codes.)
2. A kernel returns None if it does not support a code, or does not compile. The caller then uses torch's operations.
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
from hvdbridge.kernels.native import POWER, TYPES, Fields, Job, compiled, report_unavailable
from hvdbridge.kernels.random import Seed


def fused(*tensors: Tensor, packs: bool = False) -> NativeKernels | ModuleType | None:
    """Return the kernels for ``tensors``, which are on one device: native.c's, or the module :mod:`.cuda`.

    Returns None if there are none for these devices, types or strides; then torch's operations must be used.

    Args:
        packs: native.c's kernels use codes packed as in :mod:`.pack`, in place of a byte each, and write them to zeros.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and the kernels do not compile.
    """
    device = tensors[0].device
    if device.type == "cpu":
        native = compiled(*tensors)
        return None if native is None else NativeKernels(native, packs)
    if device.type != "cuda" or any(not t.is_contiguous() or t.dtype not in TYPES for t in tensors):
        return None
    return on_cuda(device)


class NativeKernels:
    """native.c's kernels. They support all codes of at most 8 bits, and powers of two if packed."""

    def __init__(self, native: ctypes.CDLL, packs: bool) -> None:
        self._native, self._packs = native, packs

    def encode(
        self, fields: Fields, flat: Tensor, blocks: Blocks, codes: Tensor, scales: Tensor, keep_rest: bool, seed: Seed
    ) -> bool | None:
        """Write the codes and scales of ``flat``.

        Args:
            fields: the code's :attr:`~hvdbridge.kernels.quantise.Code.fields`.
            codes: uint8 ``[rows, bytes]``, to be written.
            scales: float32 ``[rows, scales]`` or its bytes, to be written; of ternary codes, to be read.
            keep_rest: subtract the decoded values from ``flat``, in place.
            seed: of the noise, for codes with stochastic rounding.
        """
        assert isinstance(seed, int), "C runs on CPUs, where no flow is captured"
        halves = {"low": seed & 0xFFFFFFFF, "high": seed >> 32}
        return self._call(self._native.encode, fields, flat, blocks, codes, scales, keep_rest=keep_rest, **halves)

    def decode(
        self, fields: Fields, codes: Tensor, scales: Tensor, blocks: Blocks, out: Tensor, add: int
    ) -> bool | None:
        """Decode messages ``[messages * rows, n]`` and write their sum to ``out``, float32 ``[numel]``.

        With ``add`` 1 the sum is added to ``out``, with -1 subtracted.
        """
        messages = codes.shape[0] // blocks.rows
        return self._call(self._native.decode, fields, out, blocks, codes, scales, messages=messages, add=add)

    def _call(
        self, function: Any, fields: Fields, vector: Tensor, blocks: Blocks, codes: Tensor,
        scales: Tensor, **arguments: int,
    ) -> bool | None:  # fmt: skip
        if not fields or not blocks.fits_kernels or (fields["kind"] == POWER and not self._packs):
            return None
        assert codes.stride(1) == 1 or codes.shape[1] < 2, "a row's codes are contiguous"
        table = blocks.table(self._native)
        arguments |= {} if self._packs else {"bits": 8}
        job = Job(
            vector=vector.data_ptr(), table=table.data_ptr(), blocks=len(table), width=blocks.width, rows=blocks.rows,
            codes=codes.data_ptr(), code_stride=codes.stride(0), length=blocks.length, scales=scales.data_ptr(),
            scale_stride=scales.stride(0) * scales.itemsize, **{**fields, **arguments},
        )  # fmt: skip
        function(ctypes.byref(job))
        return True

    def pack_codes(self, codes: Tensor, bits: int, packed: Tensor) -> bool:
        """Pack groups of eight codes, a byte each, into ``bits`` bytes each of ``packed``."""
        self._native.pack_codes(codes.data_ptr(), codes.numel() // 8, bits, packed.data_ptr())
        return True

    def unpack_codes(self, packed: Tensor, bits: int, codes: Tensor) -> bool:
        """Unpack ``packed`` into codes of a byte each; the inverse of :meth:`pack_codes`."""
        self._native.unpack_codes(packed.data_ptr(), codes.numel() // 8, bits, codes.data_ptr())
        return True


@lru_cache
def on_cuda(device: torch.device) -> ModuleType | None:
    """Return the module :mod:`.cuda` if Triton works on ``device``, else None after a warning.

    With ``HVDBRIDGE_KERNELS=torch`` the result is None, without a warning.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and Triton does not work.
    """
    if Config.from_environment().kernels == "torch":
        return None
    try:
        import hvdbridge.kernels.cuda as cuda
    except Exception as error:  # Triton's import may raise anything
        report_unavailable(f"Triton's kernels on {device}", "Triton and a C compiler", error)
        return None
    codes = torch.ones(8, dtype=torch.uint8, device=device)
    return cuda if cuda.pack_codes(codes, 1, torch.empty(1, dtype=torch.uint8, device=device)) else None


def on_flat(*vectors: Tensor) -> ModuleType | None:
    """Return the module :mod:`.cuda_flat` if Triton works on the device of ``vectors`` and supports them, else None."""
    if not all(vector.is_cuda and vector.is_contiguous() for vector in vectors) or not on_cuda(vectors[0].device):
        return None
    from hvdbridge.kernels import cuda_flat

    return cuda_flat if all(vector.dtype in cuda_flat.VALUES for vector in vectors) else None
