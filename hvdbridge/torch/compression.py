"""``hvd.Compression``: conversions of a tensor before and after it travels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Base of compressors. Operations take a subclass itself, without an instance."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor that travels instead of ``tensor``, and the context that :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """``tensor`` from the other ranks, in the form that :meth:`compress` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _Narrowed(Compressor):
    """Floating-point tensors travel in another floating-point type; others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Narrowed):
    """Floating-point tensors travel, and are added, in 16 bits: 5 of exponent, 10 of mantissa."""

    dtype = torch.float16


class BF16Compressor(_Narrowed):
    """Floating-point tensors travel, and are added, in 16 bits with the range of float32. Not in Horovod."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name: ``hvd.Compression.fp16``.

    >>> small, context = Compression.fp16.compress(torch.tensor([1.0, 2.0]))
    >>> small.dtype, Compression.fp16.decompress(small, context).dtype
    (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
