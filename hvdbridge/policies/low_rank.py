"""Low rank: the gradient of a matrix travels as two thin factors.

Rules:

1. What is a matrix, where it lies and how it is multiplied is :mod:`.matrices`' affair.
2. What every rank must compute alike (the basis) is made of exact sums (:mod:`hvdbridge.kernels.orthogonal`). The
   last product, of the two factors, is element-wise but for sums of ``rank`` terms, added in order by us, or by a BLAS.
3. float16 and bfloat16 gradients are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.orthogonal import orthonormal
from hvdbridge.kernels.random import generator, hashed, key
from hvdbridge.policies.dense import MEAN
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policies.matrices import COLS, ROWS, Matrices, Pair, Square, aligned, as_matrix, project, side_of
from hvdbridge.policy.base import Aggregated, Flow, Slot, State
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.collectives import AllReduce, Collective
from hvdbridge.policy.options import option


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

    Memory: beside gradients, state and factors, the new residual; and for a moment copies of the matrices that are
    not aligned in the bucket, of small ones at unequal distances, and of what is ``batched``. On GPUs and above rank 4
    also a product of the largest matrices of one shape.

    Ranks end with equal bits on CPUs up to rank 4; beyond, as far as the matrix products do that add ``rank`` terms:
    those of one BLAS do.

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
            padding no error is kept. Where any of the factors is not finite, all parameters keep the old ones.
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

    @property
    def rounds(self) -> int:
        return 1 if self.alternate else 2

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
        draw = generator(self.seed, "powersgd", slot, name)
        drawn = torch.randn((rank, length), generator=draw, dtype=torch.float32, device="cpu")
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

    def statistics(self, params: Mapping[str, Tensor], state: State) -> dict[str, float]:
        return {"compression_rate": self.compression_rate(params)}

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat = bucket.weighted().buffer
        plan = self._plan(bucket.layout)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if not plan.groups:
            return (yield from MEAN.aggregate(bucket.with_buffer(wide), {}))
        matrices, dense = plan.matrices(wide), plan.dense(wide)
        steps = self._alternating if self.alternate else self._both
        flow = steps(bucket, plan, matrices, dense, state)
        del matrices  # they may be copies: not held longer than their products need them
        summed, mine, total, new = yield from flow
        del flow
        rest = plan.take_off(mine, wide) if bucket.needs_sent else None
        out = bucket.output(wide.dtype) if bucket.needs_sent else wide
        return Aggregated(plan.build(summed, total, out), state=new, rest=rest)

    def _plan(self, layout: Layout) -> Matrices:
        if self.batched:
            return layout.derive(("square", self.rank), lambda: Square(layout, self.rank))
        return layout.derive(("matrices", self.rank, self.min_rate), lambda: Matrices(layout, self.rank, self.min_rate))

    def _both(self, bucket: Bucket, plan: Matrices, matrices: list[Tensor], dense: Tensor, state: State) -> Factors:
        """P, then Q."""
        old = plan.load(state["q"], COLS, dense.dtype) if self.warm_start else self._drawn(plan, bucket, dense.dtype)
        # The span of P is that of any basis of Q; only an epsilon asks for its length.
        start = self._basis(old) if self.epsilon else [aligned(_scaled(q)) for q in old]
        p = [project(q, m, ROWS) for q, m in zip(start, matrices, strict=True)]
        p, total = plan.unpack((yield AllReduce(plan.pack(p, dense))), ROWS)
        p = self._basis(p)
        mine = [project(basis, m, COLS) for basis, m in zip(p, matrices, strict=True)]
        q, _ = plan.unpack((yield AllReduce(plan.pack(mine))), COLS)
        kept = {"q": plan.store(state["q"], _revived(q, old))} if self.warm_start else None
        return (p, q), (p, mine), total, kept

    def _alternating(
        self, bucket: Bucket, plan: Matrices, matrices: list[Tensor], dense: Tensor, state: State
    ) -> Factors:
        """P in even steps, Q in odd ones."""
        even = bucket.step % 2 == 0
        (known, given), (wanted, side) = (("q", COLS), ("p", ROWS)) if even else (("p", ROWS), ("q", COLS))
        basis = self._basis(plan.load(state[known], given, dense.dtype))
        mine = [project(b, m, side) for b, m in zip(basis, matrices, strict=True)]
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

    def _drawn(self, plan: Matrices, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """Standard normal numbers by (seed, step, name), equal on all ranks; by Box and Muller."""
        numbers = plan.numbers(bucket.buffer.device)
        seeds = (key(bucket.seed, bucket.step, self.seed, "powersgd", half) for half in (0, 1))
        radius, angle = (hashed(numbers, seed) for seed in seeds)
        normal = (1 - radius).log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
        return plan.unpack(normal.to(dtype), COLS)[0]


Factors = Generator[Collective, Tensor, tuple[Pair, Pair, Tensor, "State | None"]]
"""A part of a flow that ends in: the factors of the update, those of what was sent, the dense sum, the new state."""


def _scaled(q: Tensor) -> Tensor:
    """Rows of about unit length: only their direction matters, and a product of two gradients may overflow."""
    largest = q.abs().amax(dim=-1, keepdim=True)
    return q / torch.where(largest == 0, 1.0, largest).mul_(math.sqrt(q.shape[-1]))


def _revived(new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """``new``, but a row of zeros, which would remain one for ever, is the old one."""
    return [torch.where(n.abs().amax(dim=-1, keepdim=True) == 0, o, n) for n, o in zip(new, old, strict=True)]
