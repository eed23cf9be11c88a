"""PowerSGD: each rank sends the gradient of a matrix as two factors of low rank.

Rules:

1. :mod:`.matrices` decides which parameters are matrices, finds them in the bucket, and multiplies them.
2. All ranks must compute an orthonormal basis with equal bits, so it uses exact sums
   (:mod:`hvdbridge.kernels.orthogonal`). The final product of the two factors adds ``rank`` terms per element, in fixed
   order or by a BLAS.
3. float16 and bfloat16 gradients are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.fused import on_flat
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
    """Low-rank gradients by one power iteration per step (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

    A parameter of two or more dimensions is a matrix M of ``n = shape[0]`` rows and m columns. With M_i the weighted
    gradient of rank i, error feedback included, and Q of the previous step::

        P = sum_i M_i Q;  orthonormalise P;  Q = sum_i M_i' P;  update = P Q'

    A matrix is compressed if ``(n + m) r min_rate < n m`` with ``r = min(rank, n, m)``. All other parameters are
    sent dense. A column of P in the span of the columns before it is dropped for this step, and the state keeps its
    column of Q. (A zero gradient has only such columns.)

    State: with ``warm_start`` ``q``, ``[r, m]`` per compressed parameter (with ``alternate`` also ``p``, ``[r, n]``;
    with ``batched`` ``[rank, side]`` for every parameter), in float32 or wider, equal on all ranks (see below); with
    ``ef`` also the residual, the size of the parameters, local to the rank. Weights: any.

    On the wire: two all-reduces per bucket, of all P and all dense parameters, then of all Q; one with ``alternate``,
    or if no parameter of the bucket is compressed.

    Memory: beside gradients, state and factors, the new residual. During the products also copies of the matrices that
    are not aligned in the bucket, of small matrices of one shape at unequal distances, and of the bucket if
    ``batched``. On GPUs, and above rank 4, also the product of the factors of one group of matrices.

    All ranks have equal bits on CPUs up to rank 4. On GPUs and above rank 4 this needs a BLAS that multiplies equal
    factors with equal bits on all ranks, as the same BLAS does.

    PyTorch's ``PowerSGDState`` in these terms::

        matrix_approximation_rank             rank
        start_powerSGD_iter=n                 warmup(steps=n, then=powersgd(...))
        min_compression_rate                  min_rate
        use_error_feedback                    ef
        warm_start                            warm_start
        orthogonalization_epsilon             epsilon; not needed for zero gradients
        random_seed                           seed
        compression_stats_logging_frequency   sync.stats(), at any time; see compression_rate()
        batch_tensors_with_same_shape         always, where it is faster; the result is equal
        process_group                         group= of the synchronizer
        batched_powerSGD_hook                 batched=true

    The error feedback subtracts what was decoded of this rank's own gradient, as algorithm 2 of the paper does;
    PyTorch's subtracts the aggregated update. On one rank both are equal.

    Source:
        Vogels, Karimireddy and Jaggi, *PowerSGD: practical low-rank gradient compression for distributed optimization*,
        2019, algorithms 1 and 2; ``alternate``: Zhang et al., *ACP-SGD*, 2023, algorithm 2.

    When to choose:
        The model has wide weight matrices, the optimizer is SGD or AdamW, and the network is slow. With Muon a small
        GPT lost 6 % (see Convergence, known models). All messages are all-reduces, so any number of ranks suits it.

    Attributes:
        rank: number of columns of P and Q.
        min_rate: a matrix is compressed if its compression rate ``n m / ((n + m) r)`` is above this.
        warm_start: begin each step with the Q of the previous step. False: with new random numbers in each step.
        epsilon: added to the length by which each column of P is divided.
        alternate: compute P in even steps and Q in odd steps, each against the orthonormalised other factor of the
            previous step (ACP-SGD, Zhang 2023, algorithm 2). This halves bytes and arithmetic. Needs ``warm_start``.
        batched: treat the whole bucket as one square matrix, padded with zeros: fewer products, and less accurate. The
            result depends on bucket boundaries. State from other boundaries is a valid start. No error is kept for the
            padding. If any element of a factor is not finite, all parameters keep their old factor.
        seed: seed of the first Q (of every Q without ``warm_start``).
        ef: error feedback.

    Raises:
        ConfigurationError: ``alternate`` without ``warm_start``.
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
            first = ((name, self._initial_factor(slot, side, name, p)) for name, p in params.items())
            state[slot] = {name: factor for name, factor in first if factor is not None}
        return state

    def _initial_factor(self, slot: str, side: int, name: str, param: Tensor) -> Tensor | None:
        """Return the initial factor of a parameter, ``[rank, length]`` normal numbers; None for a dense parameter."""
        rank, length = self.rank, side_of(param.numel())
        if not self.batched:
            matrix = as_matrix(param.shape, self.rank, self.min_rate)
            if matrix is None:
                return None
            rank, length = matrix[2], matrix[side]
        rng = generator(self.seed, "powersgd", slot, name)
        normal = torch.randn((rank, length), generator=rng, dtype=torch.float32, device="cpu")
        return normal.to(param.device, torch.promote_types(param.dtype, torch.float32))

    def compression_rate(self, params: Mapping[str, Tensor]) -> float:
        """Return the number of the gradient's elements over that of the elements a rank sends to the all-reduces.

        The value is an average over two steps with ``alternate``. With ``batched`` it is that of a single bucket.

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
        iterate = self._alternating if self.alternate else self._p_then_q
        flow = iterate(bucket, plan, matrices, dense, state)
        del matrices  # they may be copies: only the flow holds them, until its last product
        factors, own_factors, dense_sum, new_state = yield from flow
        del flow
        rest = plan.subtract(own_factors, wide) if bucket.needs_sent else None
        out = bucket.output(wide.dtype) if bucket.needs_sent else wide
        return Aggregated(plan.write_update(factors, dense_sum, out), state=new_state, rest=rest)

    def _plan(self, layout: Layout) -> Matrices:
        if self.batched:
            return layout.derive(("square", self.rank), lambda: Square(layout, self.rank))
        return layout.derive(("matrices", self.rank, self.min_rate), lambda: Matrices(layout, self.rank, self.min_rate))

    def _p_then_q(self, bucket: Bucket, plan: Matrices, matrices: list[Tensor], dense: Tensor, state: State) -> Factors:
        """Compute P, then Q, by one all-reduce each."""
        old_q = plan.load(state["q"], COLS, dense.dtype) if self.warm_start else self._random(plan, bucket, dense.dtype)
        # The span of P does not depend on the basis of Q; only with an epsilon its length matters.
        directions = self._bases(old_q) if self.epsilon else [aligned(normalized(q)) for q in old_q]
        p = [project(q, m, ROWS) for q, m in zip(directions, matrices, strict=True)]
        p, dense_sum = plan.unpack((yield AllReduce(plan.pack(p, dense))), ROWS)
        p = self._bases(p)
        own_q = [project(basis, m, COLS) for basis, m in zip(p, matrices, strict=True)]
        q, _ = plan.unpack((yield AllReduce(plan.pack(own_q))), COLS)
        new_state = {"q": plan.store(state["q"], list(map(restored, q, old_q)))} if self.warm_start else None
        return (p, q), (p, own_q), dense_sum, new_state

    def _alternating(
        self, bucket: Bucket, plan: Matrices, matrices: list[Tensor], dense: Tensor, state: State
    ) -> Factors:
        """Compute P in even steps and Q in odd steps, by one all-reduce."""
        even = bucket.decide(lambda step, _: step % 2 == 0)
        (old_slot, old_side), (new_slot, side) = (("q", COLS), ("p", ROWS)) if even else (("p", ROWS), ("q", COLS))
        basis = self._bases(plan.load(state[old_slot], old_side, dense.dtype))
        own = [project(b, m, side) for b, m in zip(basis, matrices, strict=True)]
        new, dense_sum = plan.unpack((yield AllReduce(plan.pack(own, dense))), side)
        old = plan.load(state[new_slot], side, dense.dtype)
        stored = {new_slot: plan.store(state[new_slot], list(map(restored, new, old)))}
        if even:
            return (new, basis), (own, basis), dense_sum, stored
        return (basis, new), (basis, own), dense_sum, stored

    def _bases(self, factors: list[Tensor]) -> list[Tensor]:
        """Return orthonormal bases of the factors' rows, ``[batch, rank, length]`` each, at aligned addresses."""
        bases: dict[int, Tensor] = {}
        for rank in {f.shape[1] for f in factors}:
            indices = [i for i, f in enumerate(factors) if f.shape[1] == rank]
            bases.update(zip(indices, orthonormal([factors[i] for i in indices], self.epsilon), strict=True))
        return [aligned(bases[i]) for i in range(len(factors))]

    def _random(self, plan: Matrices, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
        """Return factors of standard normal numbers (Box and Muller), a function of both seeds, step and element
        alone."""
        numbers = plan.element_numbers(bucket.buffer.device)
        seed, own_seed = bucket.seed, self.seed
        seeds = bucket.integers(lambda step: [key(seed, step, own_seed, "powersgd", half) for half in (0, 1)])
        radius, angle = (hashed(numbers, seed) for seed in seeds)
        normal = (1 - radius).log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
        return plan.unpack(normal.to(dtype), COLS)[0]


Factors = Generator[Collective, Tensor, tuple[Pair, Pair, Tensor, "State | None"]]
"""Part of a flow; returns the factors of the update, those of this rank's contribution, the sum of the dense
parameters, and the new state."""


def normalized(q: Tensor) -> Tensor:
    """Scale rows to about unit length. Only their direction matters, and a product of two gradients may overflow."""
    if (kernels := on_flat(q)) and (scaled := kernels.normalized(q)) is not None:
        return cast(Tensor, scaled)
    largest = q.abs().amax(dim=-1, keepdim=True)
    return q / torch.where(largest == 0, 1.0, largest).mul_(math.sqrt(q.shape[-1]))


def restored(new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` with each row of zeros replaced by the old row: power iteration would keep zeros forever."""
    if (kernels := on_flat(new, old)) and (chosen := kernels.restored(new, old)) is not None:
        return cast(Tensor, chosen)
    return torch.where(new.abs().amax(dim=-1, keepdim=True) == 0, old, new)
