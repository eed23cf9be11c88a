"""The buffer pool: host memory that flows take for messages, sums and new state, and give back.

A C library keeps the holes that blocks leave which live for a step, between others that live for a moment: with state
and messages of some MiB, and some flows in flight, the holes were several times what was held. So blocks have pages of
their own here, and are kept, since new pages cost more than to fill them. On other devices torch's own allocator does
both.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

SMALL, LARGE = 1 << 18, 1 << 25
"""Bytes of a block that has pages of its own: a larger one has them from C, and is not kept."""

SLACK, LASTING_SLACK = 2.0, 1.125
"""A block may be so many times as large as what is asked for, and one that stays."""


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of it share memory, so that it cannot be written.

    >>> overlaps(torch.ones(1).expand(4)), overlaps(torch.ones(5).as_strided((3, 3), (1, 1)))
    (True, True)
    >>> overlaps(torch.ones(4, 6)[::2, 1:3].t()), overlaps(torch.ones(8).as_strided((2, 3), (3, 2)))
    (False, False)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0  # of the axes so far, whose steps are shorter
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                break
            reach += stride * (length - 1)
    else:
        return False
    last = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    places = torch.arange(last + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
    return bool(places.unique().numel() < tensor.numel())


class BufferPool:
    """Idle blocks of what one synchronizer holds. For one thread at a time.

    Args:
        blocks: so many are kept at most; of more, the smallest are dropped.

    >>> pool = BufferPool(2)
    >>> block = pool.take(1000, torch.float32, torch.device("cpu"))
    >>> address = block.data_ptr()
    >>> pool.give(block)
    >>> pool.take(500, torch.float64, torch.device("cpu")).data_ptr() == address
    True
    """

    def __init__(self, blocks: int = 0) -> None:
        self._blocks = blocks
        self._idle: list[torch.UntypedStorage] = []

    @property
    def nbytes(self) -> int:
        """Of the idle blocks."""
        return sum(storage.nbytes() for storage in self._idle)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, lasting: bool = False) -> Tensor:
        """Flat, uninitialised. ``lasting``: it is not given back within the step, as new state is not."""
        size = numel * dtype.itemsize
        if self._blocks and device.type == "cpu":
            most = size * (LASTING_SLACK if lasting else SLACK)
            fit = [(block.nbytes(), -i) for i, block in enumerate(self._idle) if size <= block.nbytes() <= most]
            if fit:  # the smallest, and of such the last that was in use, which may be in the cache
                block = self._idle.pop(-min(fit)[1])
                return torch.empty(0, dtype=dtype, device=device).set_(block, 0, (numel,), (1,))
            if SMALL <= size <= LARGE:
                return _pages(size).view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, *tensors: Tensor, but: Sequence[Tensor] = ()) -> None:
        """Return the whole memory of ``tensors`` (views, too), which no flow reads any more, unless one of ``but`` is
        in it: a communicator of one rank answers with what it was given."""
        kept = {other.untyped_storage().data_ptr() for other in but} | {other.data_ptr() for other in self._idle}
        for tensor in tensors:
            block = tensor.untyped_storage()
            if self._blocks and block.device.type == "cpu" and block.nbytes() <= LARGE and block.data_ptr() not in kept:
                self._idle.append(block)
                kept.add(block.data_ptr())
        while len(self._idle) > self._blocks:
            del self._idle[min(range(len(self._idle)), key=lambda i: self._idle[i].nbytes())]

    def clear(self) -> None:
        """Keep no block."""
        self._idle.clear()


def _pages(size: int) -> Tensor:
    """uint8 ``[size]`` on pages of its own, which go back to the system with the last tensor over them."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without: then a page fault is for 4 KiB instead of 2 MiB
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def return_holes() -> None:
    """Return all unused pages of C's heap to the system, where the C library keeps them (glibc).

    DDP keeps some bytes for each bucket from its second step on, which may come to lie between gradients. There one of
    these less fits in the third step, since a new block is some bytes more than the old one, and so it stays.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
