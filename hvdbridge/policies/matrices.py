"""How a bucket is taken apart into matrices and the rest, for policies of low rank, and put together again.

Rules:

1. Factors are transposed, ``[rank, length]``: the rows are the columns of P and Q in the papers. So both products
   read the gradient along its rows.
2. A matrix's factors have the same bits wherever bucket boundaries lie. native.c multiplies it where it is; for a BLAS
   it is batched by its shape alone and lies at an aligned address: what is not aligned in the bucket is copied.
3. What all ranks make of the same factors has the same bits with and without a C compiler (:func:`outer`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdbridge.kernels.native import compiled
from hvdbridge.kernels.random import key
from hvdbridge.policy.bucket import Layout

ALIGNED = 16
"""Elements to which the address of a matrix is aligned: 64 bytes in float32."""
SMALL = 1 << 16
"""Matrices of up to so many elements are copied together to be multiplied as one batch."""
FEW = 4
"""Vectors up to which native.c is faster than a BLAS."""
ROWS, COLS = 0, 1
Pair = tuple[list[Tensor], list[Tensor]]
"""P and Q of each group of matrices, ``[batch, rank, length]``."""
Parts = list[tuple[slice, Tensor]] | None
"""Which matrices of a batch, and these where they lie; see :meth:`Group.parts`."""


def as_matrix(shape: torch.Size, rank: int, min_rate: float) -> tuple[int, int, int] | None:
    """Rows, columns and rank of a parameter that is worth compressing.

    >>> as_matrix(torch.Size((8, 3, 3, 3)), 1, 2.0), as_matrix(torch.Size((8, 3, 3, 3)), 4, 2.0)
    ((8, 27, 1), None)
    """
    if len(shape) < 2 or shape.numel() == 0:
        return None
    rows, cols = shape[0], shape.numel() // shape[0]
    rank = min(rank, rows, cols)
    return (rows, cols, rank) if (rows + cols) * rank * min_rate < rows * cols else None


def slots(batch: int, rows: int, cols: int, like: Tensor) -> Tensor:
    """Uninitialised matrices, ``[batch, rows, cols]``, each at an aligned address."""
    pitch = -(-rows * cols // ALIGNED) * ALIGNED
    return like.new_empty(batch * pitch).as_strided((batch, rows, cols), (pitch, cols, 1))


def aligned(matrices: Tensor) -> Tensor:
    """``[batch, rows, cols]`` at aligned addresses; copied where they are not."""
    batch, rows, cols = matrices.shape
    whole = matrices.stride()[1:] == (cols, 1) and (batch == 1 or matrices.stride(0) % ALIGNED == 0)
    if whole and matrices.data_ptr() % (ALIGNED * matrices.element_size()) == 0:
        return matrices
    return slots(batch, rows, cols, matrices).copy_(matrices)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Products of matrices, batch by batch. All three are aligned, so that the bits are the same in any batch."""
    if out is None:
        out = slots(len(left), left.shape[1], right.shape[2], left)
    return torch.bmm(left, right, out=out)


def project(vectors: Tensor, matrices: Tensor, side: int) -> Tensor:
    """What a rank adds to P or Q: for ROWS the vectors ``[batch, rank, cols]`` times each row of its matrices
    ``[batch, rows, cols]``, for COLS the vectors ``[batch, rank, rows]`` times each column; both aligned.

    Other bits with and without a C compiler: it enters a sum over ranks, which is the same for all.
    """
    batch, rank, _ = vectors.shape
    _, rows, cols = matrices.shape
    if (native := _in_c(vectors, matrices)) is None:
        return product(vectors, matrices.mT if side == ROWS else matrices)
    out = slots(batch, rank, rows if side == ROWS else cols, matrices)
    (native.project_rows if side == ROWS else native.project_columns)(
        matrices.data_ptr(), matrices.stride(0), batch, rows, cols, vectors.data_ptr(), vectors.stride(0), rank,
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return out


def outer(p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """``P Q'`` ``[batch, rows, cols]`` of ``[batch, rank, rows]`` and ``[batch, rank, cols]``, all aligned.

    For few vectors on a CPU products are rounded, then added in the order of the vectors; else by a BLAS.
    """
    if p.shape[1] > FEW or p.device.type != "cpu":
        return product(p.mT, q, out)
    if out is None:
        out = slots(len(p), p.shape[2], q.shape[2], p)
    if (native := _in_c(p, q, out)) is not None:
        _outer_in_c(native, p, q, out, take=False)
    else:
        torch.mul(p[:, 0, :, None], q[:, 0, None], out=out)
        for k in range(1, p.shape[1]):
            out += p[:, k, :, None] * q[:, k, None]
    return out


def take_outer(p: Tensor, q: Tensor, matrices: Tensor) -> None:
    """``matrices`` are lessened by ``P Q'``, as :func:`outer` makes it."""
    if (native := _in_c(p, q, matrices)) is not None:
        _outer_in_c(native, p, q, matrices, take=True)
    else:
        matrices -= outer(p, q)


def _outer_in_c(native: CDLL, p: Tensor, q: Tensor, matrices: Tensor, take: bool) -> None:
    batch, rows, cols = matrices.shape
    native.outer(
        matrices.data_ptr(), matrices.stride(0), batch, rows, cols, p.data_ptr(), p.stride(0), q.data_ptr(),
        q.stride(0), p.shape[1], take,
    )  # fmt: skip


def in_c(rank: int, like: Tensor) -> CDLL | None:
    """native.c, if that can multiply matrices like this one by ``rank`` vectors: float32 on a CPU, few vectors."""
    return compiled() if rank <= FEW and like.device.type == "cpu" and like.dtype == torch.float32 else None


def _in_c(*tensors: Tensor) -> CDLL | None:
    """The same for vectors and matrices, if what is in a row lies side by side."""
    rank, lies = tensors[0].shape[1], all(each.stride()[1:] == (each.shape[2], 1) for each in tensors)
    return compiled() if lies and all(in_c(rank, each) for each in tensors) else None


@dataclass(frozen=True)
class Group:
    """Matrices of one shape that are multiplied together, at ``offsets`` in the bucket."""

    names: tuple[str, ...]
    rows: int
    cols: int
    rank: int
    offsets: tuple[int, ...]

    def length(self, side: int) -> int:
        return self.cols if side == COLS else self.rows

    def view(self, flat: Tensor) -> Tensor | None:
        """All matrices where they lie, if that is at equal distances, and at aligned addresses for a BLAS."""
        first, step = self.offsets[0], self.offsets[1] - self.offsets[0] if len(self.offsets) > 1 else 0
        if not all(offset == first + i * step for i, offset in enumerate(self.offsets)):
            return None
        unaligned = first % ALIGNED or step % ALIGNED or flat.data_ptr() % (ALIGNED * flat.element_size())
        if unaligned and in_c(self.rank, flat) is None:
            return None
        shape, stride = (len(self.offsets), self.rows, self.cols), (step or self.rows * self.cols, self.cols, 1)
        return flat.as_strided(shape, stride, flat.storage_offset() + first)

    def parts(self, flat: Tensor) -> Parts:
        """All matrices where they lie, ``[part of batch, rows, cols]``, and which of the batch they are; None: a BLAS
        multiplies them, and cannot do so there."""
        if (view := self.view(flat)) is not None:
            return [(slice(None), view)]
        if in_c(self.rank, flat) is None:
            return None
        return [(slice(i, i + 1), piece[None]) for i, piece in enumerate(self.pieces(flat))]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        numel = self.rows * self.cols
        return [flat[offset : offset + numel].view(self.rows, self.cols) for offset in self.offsets]


class Plan(ABC):
    """How a bucket is taken apart into matrices and the rest, and put together again."""

    layout: Layout
    groups: tuple[Group, ...]
    dense_numel: int = 0

    @abstractmethod
    def matrices(self, flat: Tensor) -> list[Tensor]:
        """The matrices of each group, ``[batch, rows, cols]``, aligned; may be views of ``flat``."""

    @abstractmethod
    def dense(self, flat: Tensor) -> Tensor:
        """The rest, flat; may be a view of ``flat``."""

    @abstractmethod
    def build(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        """``P Q'`` and the rest, written to ``out``."""

    @abstractmethod
    def take_off(self, pair: Pair, flat: Tensor) -> Tensor:
        """``flat`` less ``P Q'``, and zeros in the place of the rest, which travels whole; in place."""

    @abstractmethod
    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        """The factors that the state holds, group by group."""

    @abstractmethod
    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        """The state that holds these factors in the place of those in ``slot``."""

    def pack(self, factors: list[Tensor], dense: Tensor | None = None) -> Tensor:
        """One message of all factors and the rest."""
        return torch.cat([f.reshape(-1) for f in factors] + ([] if dense is None else [dense]))

    def unpack(self, message: Tensor, side: int) -> tuple[list[Tensor], Tensor]:
        """The inverse of :meth:`pack`."""
        shapes = [(len(g.offsets), g.rank, g.length(side)) for g in self.groups]
        sizes = [math.prod(shape) for shape in shapes]
        *parts, rest = message.split([*sizes, message.numel() - sum(sizes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], rest

    def numbers(self, device: torch.device) -> Tensor:
        """int32: a number for each element of a message of Q that belongs to its parameter."""

        def make() -> Tensor:
            rows = [
                key("powersgd", name) % 2**32 + torch.arange(g.rank * g.cols, device="cpu")
                for g in self.groups for name in g.names
            ]  # fmt: skip
            return ((torch.cat(rows) + 2**31) % 2**32 - 2**31).to(device, torch.int32)

        return self.layout.derive(("numbers", type(self), tuple(self.groups), device), make)


class Matrices(Plan):
    """Each parameter that is worth it is a matrix."""

    def __init__(self, layout: Layout, rank: int, min_rate: float) -> None:
        self.layout = layout
        alike: dict[object, tuple[tuple[int, int, int], list[str]]] = {}
        self.runs: list[tuple[int, int]] = []
        for name, shape in layout.shapes.items():
            start, end = layout.offsets[name], layout.offsets[name] + layout.sizes[name]
            if matrix := as_matrix(shape, rank, min_rate):
                large = shape.numel() > SMALL
                alike.setdefault(name if large else matrix, (matrix, []))[1].append(name)
            elif self.runs and self.runs[-1][1] == start:
                self.runs[-1] = (self.runs[-1][0], end)
            elif start < end:
                self.runs.append((start, end))
        offsets = layout.offsets
        self.groups = tuple(
            Group(tuple(names), *matrix, tuple(offsets[n] for n in names)) for matrix, names in alike.values()
        )
        self.dense_numel = sum(end - start for start, end in self.runs)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        return [self._copied(group, flat) if (m := group.view(flat)) is None else m for group in self.groups]

    def _copied(self, group: Group, flat: Tensor) -> Tensor:
        made = slots(len(group.offsets), group.rows, group.cols, flat)
        torch._foreach_copy_(list(made.unbind()), group.pieces(flat))
        return made

    def dense(self, flat: Tensor) -> Tensor:
        pieces = [flat[start:end] for start, end in self.runs] or [flat[:0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def build(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        for group, p, q, parts in self._outer(pair, out):
            for which, there in parts or ():
                outer(p[which], q[which], there)
            if parts is None:
                torch._foreach_copy_(group.pieces(out), list(outer(p, q).unbind()))
        if self.runs:
            sizes = [end - start for start, end in self.runs]
            torch._foreach_copy_([out[start:end] for start, end in self.runs], list(dense.split(sizes)))
        return out

    def take_off(self, pair: Pair, flat: Tensor) -> Tensor:
        for group, p, q, parts in self._outer(pair, flat):
            for which, there in parts or ():
                take_outer(p[which], q[which], there)
            if parts is None:
                torch._foreach_sub_(group.pieces(flat), list(outer(p, q).unbind()))
        for start, end in self.runs:
            flat[start:end].zero_()
        return flat

    def _outer(self, pair: Pair, flat: Tensor) -> Iterator[tuple[Group, Tensor, Tensor, Parts]]:
        """Each group, its P and Q, and its matrices where they lie in ``flat``."""
        for group, p, q in zip(self.groups, *pair, strict=True):
            yield group, aligned(p), aligned(q), group.parts(flat)

    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.stack([slot[name] for name in group.names]).to(dtype) for group in self.groups]

    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for group, many in zip(self.groups, factors, strict=True):
            state.update((n, f.to(slot[n].dtype)) for n, f in zip(group.names, many.unbind(), strict=True))
        return state


class Square(Plan):
    """The whole bucket is one square matrix.

    Its factors are kept by parameter: the first rows of what all parameters of the bucket keep, each as many as the
    side of a square of its own, which is always enough.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.widths = [side_of(size) for size in layout.sizes.values()]
        side = side_of(layout.numel)
        self.groups = (Group(("",), side, side, min(rank, side), (0,)),) if side else ()

    def matrices(self, flat: Tensor) -> list[Tensor]:
        if not self.groups:
            return []
        side, numel = self.groups[0].rows, self.layout.numel
        padded = flat.new_empty(side * side)
        padded[:numel].copy_(flat)
        padded[numel:] = 0
        return [padded.view(1, side, side)]

    def dense(self, flat: Tensor) -> Tensor:
        return flat[:0]

    def build(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        ((p,), (q,)) = pair
        return out.copy_(outer(aligned(p), aligned(q)).view(-1)[: self.layout.numel])

    def take_off(self, pair: Pair, flat: Tensor) -> Tensor:
        ((p,), (q,)) = pair
        return flat.sub_(outer(aligned(p), aligned(q)).view(-1)[: self.layout.numel])

    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        group = self.groups[0]
        return [self._joined(slot)[None, : group.rank, : group.rows].to(dtype)]

    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        # Rows of the square belong to no parameter, so one that is not finite would spoil what others keep.
        group, whole = self.groups[0], self._joined(slot)
        old, new = whole[: group.rank, : group.rows], factors[0][0].to(whole.dtype)
        old.copy_(torch.where(new.isfinite().all(), new, old))
        return dict(zip(self.layout.names, whole.split(self.widths, dim=1), strict=True))

    def _joined(self, slot: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([slot[name] for name in self.layout.names], dim=1)


def side_of(numel: int) -> int:
    """The side of the smallest square that holds so many elements.

    >>> [side_of(n) for n in (0, 1, 2, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return math.isqrt(numel - 1) + 1 if numel else 0
