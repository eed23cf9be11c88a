"""How a bucket is taken apart into matrices and the rest, for policies of low rank, and put together again.

Rules:

1. Factors are transposed, ``[rank, length]``: the rows are the columns of P and Q in the papers. So both products
   read the gradient along its rows.
2. A matrix's factors have the same bits whatever the bucket boundaries. Matrices are batched by their shape alone, and
   a BLAS reads them at aligned addresses: a matrix that is not aligned in the bucket is copied.
3. Up to rank 4 on CPUs ``P Q'`` has the same bits for any BLAS (:func:`add_outer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
"""Vectors whose products are added element by element on a CPU."""
ROWS, COLS = 0, 1
Pair = tuple[list[Tensor], list[Tensor]]
"""P and Q of each group of matrices, ``[batch, rank, length]``."""


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


def product(left: Tensor, right: Tensor) -> Tensor:
    """Products of matrices, batch by batch. All three are aligned, so that the bits are the same in any batch."""
    return torch.bmm(left, right, out=slots(len(left), left.shape[1], right.shape[2], left))


def project(vectors: Tensor, matrices: Tensor, side: int) -> Tensor:
    """A rank's share of P or Q: for ROWS the vectors ``[batch, rank, cols]`` times each row of its matrices
    ``[batch, rows, cols]``, for COLS the vectors ``[batch, rank, rows]`` times each column; both aligned."""
    return product(vectors, matrices.mT if side == ROWS else matrices)


def add_outer(p: Tensor, q: Tensor, matrices: list[Tensor], sign: int) -> None:
    """``matrices`` ``[rows, cols]`` become (``sign`` 0) or are lessened by (-1) ``P Q'``, of ``[batch, rank, rows]``
    and ``[batch, rank, cols]``, both aligned.

    For few vectors on a CPU products are rounded, then added in the order of the vectors; else by a BLAS.
    """
    if p.shape[1] > FEW or p.device.type != "cpu":
        products = list(product(p.mT, q).unbind())
        torch._foreach_copy_(matrices, products) if sign == 0 else torch._foreach_sub_(matrices, products)
        return
    for columns, rows, matrix in zip(p, q, matrices, strict=True):
        if native := compiled(columns, rows, matrix) if p.dtype == torch.float32 else None:
            shape, vectors = matrix.shape, (columns.data_ptr(), rows.data_ptr(), len(rows))
            native.outer(matrix.data_ptr(), *shape, *vectors, sign)
            continue
        made = columns[0, :, None] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            made += column[:, None] * row
        matrix.copy_(made) if sign == 0 else matrix.sub_(made)


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
        """All matrices where they are, if that is at equal distances and at aligned addresses."""
        first, step = self.offsets[0], self.offsets[1] - self.offsets[0] if len(self.offsets) > 1 else 0
        if not all(offset == first + i * step for i, offset in enumerate(self.offsets)):
            return None
        if first % ALIGNED or step % ALIGNED or flat.data_ptr() % (ALIGNED * flat.element_size()):
            return None
        shape, stride = (len(self.offsets), self.rows, self.cols), (step or self.rows * self.cols, self.cols, 1)
        return flat.as_strided(shape, stride, flat.storage_offset() + first)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        numel = self.rows * self.cols
        return [flat[offset : offset + numel].view(self.rows, self.cols) for offset in self.offsets]


class Matrices:
    """The matrices of a bucket, one for each parameter that is worth it, and the rest.

    Attributes:
        dense_numel: elements of the rest.
    """

    def __init__(self, layout: Layout, rank: int, min_rate: float) -> None:
        self.layout = layout
        self.groups: tuple[Group, ...]
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
        """The matrices of each group, ``[batch, rows, cols]``, aligned; may be views of ``flat``."""
        return [self._copied(group, flat) if (m := group.view(flat)) is None else m for group in self.groups]

    def _copied(self, group: Group, flat: Tensor) -> Tensor:
        made = slots(len(group.offsets), group.rows, group.cols, flat)
        torch._foreach_copy_(list(made.unbind()), group.pieces(flat))
        return made

    def dense(self, flat: Tensor) -> Tensor:
        """The rest, flat; may be a view of ``flat``."""
        pieces = [flat[start:end] for start, end in self.runs] or [flat[:0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def build(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        """``P Q'`` and the rest, written to ``out``."""
        self._add_outer(pair, out, 0)
        if self.runs:
            sizes = [end - start for start, end in self.runs]
            torch._foreach_copy_([out[start:end] for start, end in self.runs], list(dense.split(sizes)))
        return out

    def take_off(self, pair: Pair, flat: Tensor) -> Tensor:
        """``flat`` less ``P Q'``, and zeros in the place of the rest, which travels whole; in place."""
        self._add_outer(pair, flat, -1)
        for start, end in self.runs:
            flat[start:end].zero_()
        return flat

    def _add_outer(self, pair: Pair, flat: Tensor, sign: int) -> None:
        for group, p, q in zip(self.groups, *pair, strict=True):
            add_outer(aligned(p), aligned(q), group.pieces(flat), sign)

    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        """The factors that the state holds, group by group."""
        return [torch.stack([slot[name] for name in group.names]).to(dtype) for group in self.groups]

    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        """The state that holds these factors in the place of those in ``slot``."""
        state: dict[str, Tensor] = {}
        for group, many in zip(self.groups, factors, strict=True):
            state.update((n, f.to(slot[n].dtype)) for n, f in zip(group.names, many.unbind(), strict=True))
        return state

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


class Square(Matrices):
    """The whole bucket is one square matrix.

    Its factors are kept by parameter: the first rows of what all parameters of the bucket keep, each as many as the
    side of a square of its own, which is always enough.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.dense_numel = layout, 0
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
        return out.copy_(self._outer(pair))

    def take_off(self, pair: Pair, flat: Tensor) -> Tensor:
        return flat.sub_(self._outer(pair))

    def _outer(self, pair: Pair) -> Tensor:
        ((p,), (q,)) = pair
        square = p.new_empty(p.shape[2], q.shape[2])
        add_outer(aligned(p), aligned(q), [square], 0)
        return square.view(-1)[: self.layout.numel]

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
