"""``hvd.Compression``: compressors, which convert a tensor before it is sent and after it is received."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Base of compressors. ``compression=`` takes a subclass itself, not an instance."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send in place of ``tensor``, and the context that :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Convert a received ``tensor`` back to the form of the argument of :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors without a conversion."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors as :attr:`dtype`, and other tensors without a conversion."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends and sums floating-point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends and sums floating-point tensors as bfloat16, which has the range of float32. Not in Horovod."""

    dtype = torch.bfloat16


class Compression:
    """Compressors by name: ``hvd.Compression.fp16``.

    >>> compressed, context = Compression.fp16.compress(torch.tensor([1.0, 2.0]))
    >>> compressed.dtype, Compression.fp16.decompress(compressed, context).dtype
    (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
