"""Matrices of a bucket for low-rank policies: split a bucket into matrices and dense parameters, and rebuild it.

Rules:

1. Factors are transposed, ``[rank, length]``: their rows are the columns of P and Q in the papers. Both products then
   read the gradient along its rows.
2. The bits of a matrix's factors do not depend on bucket boundaries. Matrices are batched by their shape alone, and a
   BLAS reads them at aligned addresses: matrices that are not aligned in the bucket are copied.
3. Up to rank 4 on CPUs, the bits of ``P Q'`` do not depend on the BLAS (:func:`add_outer`).
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
"""Alignment of a matrix's address, in elements: 64 bytes in float32."""
BATCHED_NUMEL = 1 << 16
"""Matrices of one shape with at most this many elements are multiplied as one batch."""
ELEMENTWISE_RANK = 4
"""Largest rank at which a CPU adds the terms of ``P Q'`` element by element instead of by a BLAS."""
ROWS, COLS = 0, 1  # sides of a matrix: the vectors of P have one element per row, those of Q one per column
Pair = tuple[list[Tensor], list[Tensor]]
"""P and Q of each :class:`Group`, ``[batch, rank, rows]`` and ``[batch, rank, cols]``."""


def as_matrix(shape: torch.Size, rank: int, min_rate: float) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a parameter that is compressed, and None for a dense parameter.

    >>> as_matrix(torch.Size((8, 3, 3, 3)), 1, 2.0), as_matrix(torch.Size((8, 3, 3, 3)), 4, 2.0)
    ((8, 27, 1), None)
    """
    if len(shape) < 2 or shape.numel() == 0:
        return None
    rows, cols = shape[0], shape.numel() // shape[0]
    rank = min(rank, rows, cols)
    return (rows, cols, rank) if (rows + cols) * rank * min_rate < rows * cols else None


def empty_aligned(batch: int, rows: int, cols: int, like: Tensor) -> Tensor:
    """Return uninitialised matrices ``[batch, rows, cols]`` of the type of ``like``, each at an aligned address."""
    pitch = -(-rows * cols // ALIGNED) * ALIGNED
    return like.new_empty(batch * pitch).as_strided((batch, rows, cols), (pitch, cols, 1))


def aligned(matrices: Tensor) -> Tensor:
    """Return ``matrices`` ``[batch, rows, cols]``, or a copy if they are not contiguous at aligned addresses."""
    batch, rows, cols = matrices.shape
    in_place = matrices.stride()[1:] == (cols, 1) and (batch == 1 or matrices.stride(0) % ALIGNED == 0)
    if in_place and matrices.data_ptr() % (ALIGNED * matrices.element_size()) == 0:
        return matrices
    return empty_aligned(batch, rows, cols, matrices).copy_(matrices)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of aligned batches, aligned as well, so that bits do not depend on the batch."""
    return torch.bmm(left, right, out=empty_aligned(len(left), left.shape[1], right.shape[2], left))


def project(vectors: Tensor, matrices: Tensor, side: int) -> Tensor:
    """Return this rank's term of P (``side`` ROWS) or of Q (COLS).

    Args:
        vectors: the other factor, ``[batch, rank, cols]`` for ROWS, ``[batch, rank, rows]`` for COLS; aligned.
        matrices: ``[batch, rows, cols]``; aligned.
    """
    return product(vectors, matrices.mT if side == ROWS else matrices)


def add_outer(p: Tensor, q: Tensor, matrices: list[Tensor], sign: int) -> None:
    """Write ``P Q'`` to ``matrices`` (``sign`` 0), or subtract it from them (``sign`` -1).

    Up to rank :data:`ELEMENTWISE_RANK` on a CPU each product is rounded and then added in the order of the vectors.
    Otherwise a BLAS multiplies.

    Args:
        p, q: ``[batch, rank, rows]`` and ``[batch, rank, cols]``, aligned.
        matrices: ``batch`` tensors ``[rows, cols]``, written in place.
    """
    if p.shape[1] > ELEMENTWISE_RANK or p.device.type != "cpu":
        products = list(product(p.mT, q).unbind())
        torch._foreach_copy_(matrices, products) if sign == 0 else torch._foreach_sub_(matrices, products)
        return
    for columns, rows, matrix in zip(p, q, matrices, strict=True):
        if native := compiled(columns, rows, matrix) if p.dtype == torch.float32 else None:
            shape, vectors = matrix.shape, (columns.data_ptr(), rows.data_ptr(), len(rows))
            native.outer(matrix.data_ptr(), *shape, *vectors, sign)
            continue
        outer = columns[0, :, None] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            outer += column[:, None] * row
        matrix.copy_(outer) if sign == 0 else matrix.sub_(outer)


@dataclass(frozen=True)
class Group:
    """Parameters of one matrix shape that are multiplied as one batch, at ``offsets`` in the bucket."""

    names: tuple[str, ...]
    rows: int
    cols: int
    rank: int
    offsets: tuple[int, ...]

    def length(self, side: int) -> int:
        return self.cols if side == COLS else self.rows

    def batch(self, flat: Tensor) -> Tensor | None:
        """Return all matrices as a view ``[batch, rows, cols]`` of ``flat``, or None if their addresses are not aligned
        and at equal distances."""
        first, step = self.offsets[0], self.offsets[1] - self.offsets[0] if len(self.offsets) > 1 else 0
        if not all(offset == first + i * step for i, offset in enumerate(self.offsets)):
            return None
        if first % ALIGNED or step % ALIGNED or flat.data_ptr() % (ALIGNED * flat.element_size()):
            return None
        shape, stride = (len(self.offsets), self.rows, self.cols), (step or self.rows * self.cols, self.cols, 1)
        return flat.as_strided(shape, stride, flat.storage_offset() + first)

    def views(self, flat: Tensor) -> list[Tensor]:
        numel = self.rows * self.cols
        return [flat[offset : offset + numel].view(self.rows, self.cols) for offset in self.offsets]


class Matrices:
    """The compressed parameters of a bucket as groups of matrices, and its dense parameters.

    Attributes:
        groups: the matrices, grouped by shape; one of more than :data:`BATCHED_NUMEL` elements is a group of its own.
        dense_runs: start and end in the bucket of each run of dense parameters.
        dense_numel: number of elements of the dense parameters.
    """

    def __init__(self, layout: Layout, rank: int, min_rate: float) -> None:
        self.layout = layout
        self.groups: tuple[Group, ...]
        members: dict[object, tuple[tuple[int, int, int], list[str]]] = {}
        self.dense_runs: list[tuple[int, int]] = []
        for name, shape in layout.shapes.items():
            start, end = layout.offsets[name], layout.offsets[name] + layout.sizes[name]
            if matrix := as_matrix(shape, rank, min_rate):
                large = shape.numel() > BATCHED_NUMEL
                members.setdefault(name if large else matrix, (matrix, []))[1].append(name)
            elif self.dense_runs and self.dense_runs[-1][1] == start:
                self.dense_runs[-1] = (self.dense_runs[-1][0], end)
            elif start < end:
                self.dense_runs.append((start, end))
        offsets = layout.offsets
        self.groups = tuple(
            Group(tuple(names), *matrix, tuple(offsets[n] for n in names)) for matrix, names in members.values()
        )
        self.dense_numel = sum(end - start for start, end in self.dense_runs)

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices of each group, ``[batch, rows, cols]``, aligned; they may be views of ``flat``."""
        return [self._copy(group, flat) if (m := group.batch(flat)) is None else m for group in self.groups]

    def _copy(self, group: Group, flat: Tensor) -> Tensor:
        copy = empty_aligned(len(group.offsets), group.rows, group.cols, flat)
        torch._foreach_copy_(list(copy.unbind()), group.views(flat))
        return copy

    def dense(self, flat: Tensor) -> Tensor:
        """Return the dense parameters, ``[dense_numel]``; the result may be a view of ``flat``."""
        parts = [flat[start:end] for start, end in self.dense_runs] or [flat[:0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write_update(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        """Write ``P Q'`` and the dense parameters to ``out``, the flat update."""
        self._add_outer(pair, out, 0)
        if self.dense_runs:
            sizes = [end - start for start, end in self.dense_runs]
            torch._foreach_copy_([out[start:end] for start, end in self.dense_runs], list(dense.split(sizes)))
        return out

    def subtract(self, pair: Pair, flat: Tensor) -> Tensor:
        """Subtract ``P Q'`` from ``flat`` in place, and zero the dense parameters, which are sent without loss."""
        self._add_outer(pair, flat, -1)
        if self.dense_runs:
            torch._foreach_zero_([flat[start:end] for start, end in self.dense_runs])
        return flat

    def _add_outer(self, pair: Pair, flat: Tensor, sign: int) -> None:
        for group, p, q in zip(self.groups, *pair, strict=True):
            add_outer(aligned(p), aligned(q), group.views(flat), sign)

    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the factors in the state ``slot``, ``[batch, rank, length]`` per group."""
        return [torch.stack([slot[name] for name in group.names]).to(dtype) for group in self.groups]

    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        """Return a new state with ``factors`` instead of those in ``slot``, in the types of ``slot``."""
        state: dict[str, Tensor] = {}
        for group, many in zip(self.groups, factors, strict=True):
            state.update((n, f.to(slot[n].dtype)) for n, f in zip(group.names, many.unbind(), strict=True))
        return state

    def pack(self, factors: list[Tensor], dense: Tensor | None = None) -> Tensor:
        """Return one flat message of all factors and the dense parameters."""
        return torch.cat([f.reshape(-1) for f in factors] + ([] if dense is None else [dense]))

    def unpack(self, message: Tensor, side: int) -> tuple[list[Tensor], Tensor]:
        """Return the factors of ``side`` and the dense parameters of a message from :meth:`pack`."""
        shapes = [(len(g.offsets), g.rank, g.length(side)) for g in self.groups]
        sizes = [math.prod(shape) for shape in shapes]
        *parts, rest = message.split([*sizes, message.numel() - sum(sizes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], rest

    def element_numbers(self, device: torch.device) -> Tensor:
        """Return an int32 number for each element of a message of Q, from its parameter's name and its index."""

        def make() -> Tensor:
            rows = [
                key("powersgd", name) % 2**32 + torch.arange(g.rank * g.cols, device="cpu")
                for g in self.groups for name in g.names
            ]  # fmt: skip
            return ((torch.cat(rows) + 2**31) % 2**32 - 2**31).to(device, torch.int32)

        return self.layout.derive(("numbers", type(self), tuple(self.groups), device), make)


class Square(Matrices):
    """The whole bucket as one square matrix, padded with zeros.

    State is kept by parameter: ``[rank, side_of(numel)]`` for each. Joined along their length, the states of a bucket's
    parameters are at least as long as the side of the bucket's square; the first columns are its factor.
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

    def write_update(self, pair: Pair, dense: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self._outer(pair))

    def subtract(self, pair: Pair, flat: Tensor) -> Tensor:
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
        # Rows of the square span several parameters, so a factor that is not finite would spoil the state of all.
        group, joined = self.groups[0], self._joined(slot)
        old, new = joined[: group.rank, : group.rows], factors[0][0].to(joined.dtype)
        old.copy_(torch.where(new.isfinite().all(), new, old))
        return dict(zip(self.layout.names, joined.split(self.widths, dim=1), strict=True))

    def _joined(self, slot: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([slot[name] for name in self.layout.names], dim=1)


def side_of(numel: int) -> int:
    """Return the side of the smallest square with at least ``numel`` elements.

    >>> [side_of(n) for n in (0, 1, 2, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return math.isqrt(numel - 1) + 1 if numel else 0
