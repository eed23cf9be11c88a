"""Host buffer pool: flows take buffers from it for messages, sums and new state, and give them back.

C's heap fragments where allocations that live for a step alternate with allocations that live for a moment. Buffers of
the pool therefore have memory pages of their own, from :data:`MIN_PAGED` to :data:`MAX_PAGED`. The pool keeps returned
buffers, because page faults cost more than filling the memory. Other devices need no pool: torch's caching allocators
do the same.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

MIN_PAGED, MAX_PAGED = 1 << 18, 1 << 25
"""Sizes, in bytes, of buffers that the pool gives pages of their own. C does so for larger ones, which are not kept."""

SLACK, LASTING_SLACK = 2.0, 1.125
"""Largest ratio of a buffer's size to the requested size, and the same for a lasting buffer."""


def overlaps(tensor: Tensor) -> bool:
    """Return whether elements of ``tensor`` share memory, so that it must not be written to.

    >>> overlaps(torch.ones(1).expand(4)), overlaps(torch.ones(5).as_strided((3, 3), (1, 1)))
    (True, True)
    >>> overlaps(torch.ones(4, 6)[::2, 1:3].t()), overlaps(torch.ones(8).as_strided((2, 3), (3, 2)))
    (False, False)
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    extent = 0  # offset of the last element along the axes so far, in order of strides
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= extent:
                break
            extent += stride * (length - 1)
    else:
        return False
    last = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    offsets = torch.arange(last + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
    return bool(offsets.unique().numel() < tensor.numel())


class BufferPool:
    """Pool of reusable host buffers of one synchronizer. Not thread-safe: one thread uses it at a time.

    Args:
        capacity: maximum number of idle buffers. The pool drops the smallest ones beyond it.

    >>> pool = BufferPool(2)
    >>> buffer = pool.take(1000, torch.float32, torch.device("cpu"))
    >>> address = buffer.data_ptr()
    >>> pool.give(buffer)
    >>> pool.take(500, torch.float64, torch.device("cpu")).data_ptr() == address
    True
    """

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = capacity
        self._idle: list[torch.UntypedStorage] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the idle buffers."""
        return sum(storage.nbytes() for storage in self._idle)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, lasting: bool = False) -> Tensor:
        """Return a flat, uninitialized tensor of ``numel`` elements.

        Args:
            lasting: the buffer is not given back within the step (new state), so it may be little larger than needed.
        """
        size = numel * dtype.itemsize
        if self._capacity and device.type == "cpu":
            limit = size * (LASTING_SLACK if lasting else SLACK)
            fit = [(idle.nbytes(), -i) for i, idle in enumerate(self._idle) if size <= idle.nbytes() <= limit]
            if fit:  # the smallest; among equal ones the last that was given back, which may be in the CPU's cache
                storage = self._idle.pop(-min(fit)[1])
                return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))
            if MIN_PAGED <= size <= MAX_PAGED:
                return _pages(size).view(dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, *tensors: Tensor, but: Sequence[Tensor] = ()) -> None:
        """Give back the storages of ``tensors`` (which may be views). No flow may read them afterwards.

        Storages of tensors in ``but`` are not given back: the communicator of a single rank may return a request's own
        tensor as the answer.
        """
        skip = {other.untyped_storage().data_ptr() for other in but} | {idle.data_ptr() for idle in self._idle}
        for tensor in tensors:
            freed = tensor.untyped_storage()
            poolable = self._capacity and freed.device.type == "cpu" and freed.nbytes() <= MAX_PAGED
            if poolable and freed.data_ptr() not in skip:
                self._idle.append(freed)
                skip.add(freed.data_ptr())
        while len(self._idle) > self._capacity:
            del self._idle[min(range(len(self._idle)), key=lambda i: self._idle[i].nbytes())]

    def clear(self) -> None:
        """Drop all idle buffers."""
        self._idle.clear()


def _pages(size: int) -> Tensor:
    """Return uint8 ``[size]`` on pages of its own, which return to the system with the last tensor that uses them."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages has more page faults, and is as correct
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def return_holes() -> None:
    """Return all unused pages of C's heap to the system, if the C library keeps them (glibc).

    From its second step on, DDP keeps a few bytes per bucket, possibly between freed gradients. One gradient fewer then
    fits into such a gap in the third step, so glibc keeps the gap and allocates more memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
