"""Low rank: the gradient of a matrix travels as two thin factors.

Rules:

1. Factors are transposed, ``[rank, length]``: the rows are the columns of P and Q in the papers. So both products
   read the gradient along its rows.
2. Each matrix is multiplied at an aligned address and batched by its shape alone, so its factors have the same bits
   wherever bucket boundaries lie; what is not aligned in the bucket is copied.
3. What every rank must compute alike (the basis) is made of exact sums (:mod:`hvdbridge.kernels.orthogonal`). The
   last product, of the two factors, is element-wise but for sums of ``rank`` terms, which a BLAS adds in order.
4. float16 and bfloat16 gradients are computed in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.bucket import Bucket, Layout
from hvdbridge.collectives import AllReduce, Collective
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.orthogonal import orthonormal
from hvdbridge.kernels.random import generator, hashed, key
from hvdbridge.options import option
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policy import Aggregated, Flow, Slot, State

ALIGNED = 16
"""Elements to which the address of a matrix is aligned: 64 bytes in float32."""
SMALL = 1 << 16
"""Matrices of up to so many elements are copied together to be multiplied as one batch."""


@dataclass(frozen=True)
class PowerSGD(WithFeedback):
    """One step of power iteration per step of training (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

    A parameter of two or more dimensions is a matrix M of ``n = shape[0]`` rows and m columns. With ``M = sum_r M_r``
    of the weighted gradients and Q of the step before::

        P = sum_r M_r Q;  orthonormalise P;  Q = sum_r M_r' P;  update = P Q'

    It is compressed where that pays: ``(n + m) r min_rate < n m`` with ``r = min(rank, n, m)``. All other parameters
    travel dense.

    On the wire: two all-reduces per bucket, of all P and all dense parameters, then of all Q; with ``alternate``
    one. A column of P that lies in the span of others (a zero gradient has only such) is dropped for that step,
    and its column of Q stays.

    Ranks end with equal bits as far as their matrix products do that add ``rank`` terms; those of one BLAS do.

    PyTorch's ``PowerSGDState`` in these terms::

        matrix_approximation_rank             rank
        start_powerSGD_iter=n                 warmup(steps=n, then=powersgd(...))
        min_compression_rate                  min_rate
        use_error_feedback                    ef
        warm_start                            warm_start
        orthogonalization_epsilon             epsilon; it is not needed for zero gradients
        random_seed                           seed
        compression_stats_logging_frequency   sync.stats(), at any time; see compression_rate()
        batch_tensors_with_same_shape         always, where it is faster; the result is the same
        process_group                         group= of the synchronizer
        batched_powerSGD_hook                 batched=true

    Its error feedback compares with the aggregated update, ours with what was decoded of this rank's gradient, as
    algorithm 2 of the paper does; on one rank that is the same.

    Attributes:
        rank: columns of P and Q.
        min_rate: the least rate that makes compression worth its while.
        warm_start: begin with the Q of the step before. If not, with random numbers in each step.
        epsilon: added to the length that a column of P is divided by.
        alternate: compute P in even steps and Q in odd ones, against the orthonormalised other factor of the step
            before (ACP-SGD, Zhang 2023, algorithm 2): half the bytes and the arithmetic.
        batched: the whole bucket is one square matrix, padded with zeros. Fast, and less accurate. Its result depends
            on bucket boundaries; so does the meaning of its state, which is still a good start for other ones. Of the
            padding no error is kept.
        seed: of the first Q.
        ef: error feedback.
    """

    rank: int = option(4, at_least=1)
    min_rate: float = option(2.0, above=0)
    warm_start: bool = True
    epsilon: float = option(0.0, at_least=0)
    alternate: bool = False
    batched: bool = False
    seed: int = 0
    ef: bool = True
    slots: ClassVar[Mapping[str, Slot]] = {"q": Slot(), "p": Slot()}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate and not self.warm_start:
            raise ConfigurationError("PowerSGD: alternate=true is about the factor of the step before; warm_start=true")

    @property
    def deterministic(self) -> bool:
        return self.warm_start

    def fresh(self, params: Mapping[str, Tensor]) -> State:
        if not self.warm_start:
            return {}
        sides = {"q": COLS, "p": ROWS} if self.alternate else {"q": COLS}
        state: dict[str, dict[str, Tensor]] = {}
        for slot, side in sides.items():
            first = ((name, self._first(slot, side, name, p)) for name, p in params.items())
            state[slot] = {name: factor for name, factor in first if factor is not None}
        return state

    def _first(self, slot: str, side: int, name: str, param: Tensor) -> Tensor | None:
        """The first factor of a parameter: standard normal numbers, ``[rank, length]``."""
        rank, length = self.rank, side_of(param.numel())
        if not self.batched:
            matrix = as_matrix(param.shape, self.rank, self.min_rate)
            if matrix is None:
                return None
            rank, length = matrix[2], matrix[side]
        drawn = torch.randn((rank, length), generator=generator(self.seed, "powersgd", slot, name))
        return drawn.to(param.device, torch.promote_types(param.dtype, torch.float32))

    def compression_rate(self, params: Mapping[str, Tensor]) -> float:
        """Elements of the gradient over elements that a rank contributes to the all-reduces of a step.

        ``batched``: as if all parameters were one bucket.

        >>> PowerSGD(rank=1).compression_rate({"w": torch.empty(100, 100), "b": torch.empty(100)})
        33.66...
        """
        plan = self._plan(Layout({name: p.shape for name, p in params.items()}))
        factors = sum(len(g.names) * g.rank * (g.rows + g.cols) for g in plan.groups)
        sent = plan.dense_numel + factors / (2 if self.alternate else 1)
        return plan.layout.numel / sent if sent else 1.0

    def statistics(self, state: State) -> dict[str, float]:
        """The compression rate; without feedback the state does not tell the shapes that it takes."""
        return {"compression_rate": self.compression_rate(state["residual"])} if self.ef else {}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        plan = self._plan(bucket.layout)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        matrices = plan.matrices(wide)
        dense = plan.dense(wide)
        if not plan.groups:
            total = yield AllReduce(dense.clone() if bucket.needs_sent else dense)
            return Aggregated(total, dense if bucket.needs_sent else None)
        steps = self._alternating if self.alternate else self._both
        summed, mine, total, new = yield from steps(bucket, plan, matrices, dense, state)
        if not bucket.needs_sent:
            return Aggregated(plan.build(summed, total, wide), None, new)
        update = plan.build(summed, total, torch.empty_like(wide))
        return Aggregated(update, plan.build(mine, dense, torch.empty_like(wide)), new)

    def _plan(self, layout: Layout) -> Plan:
        if self.batched:
            return layout.derive(("square", self.rank), lambda: Square(layout, self.rank))
        return layout.derive(("matrices", self.rank, self.min_rate), lambda: Matrices(layout, self.rank, self.min_rate))

    def _both(self, bucket: Bucket, plan: Plan, matrices: list[Tensor], dense: Tensor, state: State) -> Factors:
        """P, then Q."""
        old = plan.load(state["q"], COLS, dense.dtype) if self.warm_start else self._drawn(plan, bucket, dense.dtype)
        # The span of P is that of any basis of Q; only an epsilon asks for its length.
        start = self._basis(old) if self.epsilon else [aligned(_scaled(q)) for q in old]
        p = [product(q, m.mT) for q, m in zip(start, matrices, strict=True)]
        p, total = plan.unpack((yield AllReduce(plan.pack(p, dense))), ROWS)
        p = self._basis(p)
        mine = [product(basis, m) for basis, m in zip(p, matrices, strict=True)]
        q, _ = plan.unpack((yield AllReduce(plan.pack(mine))), COLS)
        kept = {"q": plan.store(state["q"], _revived(q, old))} if self.warm_start else None
        return (p, q), (p, mine), total, kept

    def _alternating(self, bucket: Bucket, plan: Plan, matrices: list[Tensor], dense: Tensor, state: State) -> Factors:
        """P in even steps, Q in odd ones."""
        even = bucket.step % 2 == 0
        (known, given), (wanted, side) = (("q", COLS), ("p", ROWS)) if even else (("p", ROWS), ("q", COLS))
        basis = self._basis(plan.load(state[known], given, dense.dtype))
        mine = [product(b, m.mT if even else m) for b, m in zip(basis, matrices, strict=True)]
        new, total = plan.unpack((yield AllReduce(plan.pack(mine, dense))), side)
        kept = {wanted: plan.store(state[wanted], _revived(new, plan.load(state[wanted], side, dense.dtype)))}
        if even:
            return (new, basis), (mine, basis), total, kept
        return (basis, new), (basis, mine), total, kept

    def _basis(self, factors: list[Tensor]) -> list[Tensor]:
        """Orthonormal rows, aligned."""
        made: dict[int, Tensor] = {}
        for rank in {f.shape[1] for f in factors}:
            where = [i for i, f in enumerate(factors) if f.shape[1] == rank]
            made.update(zip(where, orthonormal([factors[i] for i in where], self.epsilon), strict=True))
        return [aligned(made[i]) for i in range(len(factors))]

    def _drawn(self, plan: Plan, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """Standard normal numbers by (seed, step, name), equal on all ranks; by Box and Muller."""
        numbers = plan.numbers(bucket.buffer.device)
        seeds = (key(bucket.seed, bucket.step, self.seed, "powersgd", half) for half in (0, 1))
        radius, angle = (hashed(numbers, seed) for seed in seeds)
        normal = (1 - radius).log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
        return plan.unpack(normal.to(dtype), COLS)[0]


Pair = tuple[list[Tensor], list[Tensor]]
"""P and Q of each group of matrices, ``[batch, rank, length]``."""
Factors = Generator[Collective, Tensor, tuple[Pair, Pair, Tensor, "State | None"]]
"""A part of a flow that ends in: the factors of the update, those of what was sent, the dense sum, the new state."""
ROWS, COLS = 0, 1


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


def _scaled(q: Tensor) -> Tensor:
    """Rows of about unit length: only their direction matters, and a product of two gradients may overflow."""
    largest = q.abs().amax(dim=-1, keepdim=True)
    return q / torch.where(largest == 0, 1.0, largest).mul_(math.sqrt(q.shape[-1]))


def _revived(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """``new``, but a row of zeros, which would remain one for ever, is the old one."""
    return [torch.where(n.abs().amax(dim=-1, keepdim=True) == 0, o, n) for n, o in zip(new, old, strict=True)]


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
        """All matrices where they lie, if that is at aligned addresses at equal distances."""
        first, step = self.offsets[0], self.offsets[1] - self.offsets[0] if len(self.offsets) > 1 else 0
        regular = all(offset == first + i * step for i, offset in enumerate(self.offsets))
        if not regular or first % ALIGNED or step % ALIGNED or flat.data_ptr() % (ALIGNED * flat.element_size()):
            return None
        shape, stride = (len(self.offsets), self.rows, self.cols), (step or self.rows * self.cols, self.cols, 1)
        return flat.as_strided(shape, stride, flat.storage_offset() + first)

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
                key("powersgd", name) % 2**32 + torch.arange(g.rank * g.cols) for g in self.groups for name in g.names
            ]
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
        for group, p, q in zip(self.groups, *pair, strict=True):
            view = group.view(out)
            made = product(aligned(p).mT, aligned(q), view)
            if view is None:
                torch._foreach_copy_(group.pieces(out), list(made.unbind()))
        if self.runs:
            sizes = [end - start for start, end in self.runs]
            torch._foreach_copy_([out[start:end] for start, end in self.runs], list(dense.split(sizes)))
        return out

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
        return out.copy_(product(aligned(p).mT, aligned(q)).view(-1)[: self.layout.numel])

    def load(self, slot: Mapping[str, Tensor], side: int, dtype: torch.dtype) -> list[Tensor]:
        group = self.groups[0]
        return [self._joined(slot)[None, : group.rank, : group.rows].to(dtype)]

    def store(self, slot: Mapping[str, Tensor], factors: list[Tensor]) -> dict[str, Tensor]:
        group, whole = self.groups[0], self._joined(slot)
        whole[: group.rank, : group.rows] = factors[0][0]
        return dict(zip(self.layout.names, whole.split(self.widths, dim=1), strict=True))

    def _joined(self, slot: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([slot[name] for name in self.layout.names], dim=1)


def side_of(numel: int) -> int:
    """The side of the smallest square that holds so many elements.

    >>> [side_of(n) for n in (0, 1, 2, 4, 5)]
    [0, 1, 2, 2, 3]
    """
    return math.isqrt(numel - 1) + 1 if numel else 0
