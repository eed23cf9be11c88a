"""The one list of all policies: what runs over every policy runs over :data:`CASES`.

A new policy is one line here. What a policy says of itself (``deterministic``, ``additive``, ``unequal_weights``,
``scope``, ``replicas``) is read from it; a fact is written down only where a policy is unlike the others, and each
fact is one that the policy's documentation states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hvdbridge import policies
from hvdbridge.execution.simulation import Simulation
from hvdbridge.policy.base import Policy

Grads = dict[str, Tensor]
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 3, 3, 3), "fc.weight": (60, 40), "fc.bias": (40,), "empty": (0, 3), "scale": (), "one": (1,),
    "wide.weight": (30, 36),
}  # fmt: skip
START = 0.5
LEARNING_RATE = 0.125
"""A power of two, so its product with an update is exact."""


@dataclass(frozen=True)
class Case:
    """A policy and what is special about it.

    Attributes:
        spec: the policy.
        min_size: fewest ranks that the rule is defined for.
        order_matters: which rank holds which gradient decides, and not by private randomness alone.
        flat: it knows no parameters, so bucket boundaries decide.
        survives: so many ranks of NaN are outvoted; None: non-finite gradients reach everybody.
        late: steps between a gradient and the update that it is in.
        overflows: 1e30 is beyond what it can send, and arrives as inf.
        noisy: zero gradients do not give a zero update.
        by_size: the update is a multiple of the number of ranks, those of weight 0 counted.
        counts_excluded: an excluded rank is not the same as an absent one; the reason stands in a comment.
        absolute: gradients four times as large do not give updates four times as large.
        telescopes: updates plus residuals are the inputs, where there are residuals.
        factor: roundings that an update may differ by between orders of summation, see :func:`close`.
        precision: of what float32 gradients give, against float64 ones (which a half wire takes as they are).
        local_size: ranks per node in simulations; None: one node.
    """

    spec: str
    min_size: int = 1
    order_matters: bool = False
    flat: bool = False
    survives: int | None = None
    late: int = 0
    overflows: bool = False
    noisy: bool = False
    by_size: bool = False
    counts_excluded: bool = False
    absolute: bool = False
    telescopes: bool = True
    factor: float = 1.0
    precision: float = 1e-4
    local_size: int | None = None

    @cached_property
    def policy(self) -> Policy:
        return policies.from_spec(self.spec)

    @property
    def drifts(self) -> bool:
        """Updates differ between ranks, and parameters between the policy's own averages."""
        return self.policy.replicas == "drift"

    @cached_property
    def first_due(self) -> int | None:
        """The first step after which it changes parameters; None: it never does."""
        return next((step for step in range(100) if self.policy.due(step)), None)

    @property
    def aggregates(self) -> bool:
        """Whether ranks ever learn of each other."""
        return not self.drifts or self.first_due is not None

    @property
    def horizon(self) -> int:
        """Steps until something of the first gradients has reached all ranks."""
        return 1 + self.late + (self.first_due or 0)

    def alike_after(self, step: int) -> bool:
        """Whether ranks must agree after this step."""
        return not self.drifts or self.policy.due(step)

    @property
    def feeds_back(self) -> bool:
        """The policy itself keeps a residual (inside of a wrapper it is the inner policy's affair)."""
        return "residual" in self.policy.slots and getattr(self.policy, "ef", True)

    def sizes(self, *wanted: int) -> list[int]:
        """Those numbers of ranks that the rule is defined for; its smallest one if that is none of them."""
        return [size for size in wanted if size >= self.min_size] or [self.min_size]

    def __str__(self) -> str:
        return self.spec


CASES = [
    # Dense
    Case("mean"),
    Case("mean:exact=true"),
    Case("sum", by_size=True),
    Case("fp16", overflows=True),
    Case("bf16"),
    Case("fp16(powersgd(rank=2, ef=false))", overflows=True, precision=2.0**-9),
    Case("fp16(adasum)", order_matters=True, overflows=True, precision=2.0**-9),
    Case("bf16(mean:exact=true)"),
    Case("bf16(topk(ratio=0.1))"),
    Case("noop"),
    # Quantised
    Case("int8"),
    Case("int8:ef=true,block=64"),
    Case("int8:rounding=stochastic"),
    Case("int4"),
    Case("int4:rounding=stochastic,ef=false"),
    Case("fp8"),
    Case("fp8:format=e5m2,ef=true"),
    Case("qsgd"),
    Case("qsgd:norm=l2,bits=4"),
    Case("terngrad"),
    Case("natural"),
    # Sparse
    Case("topk:ratio=0.05"),
    Case("topk:ratio=0.05,select=exact,ef=false"),
    Case("threshold:value=1.0", absolute=True),
    Case("randomk:ratio=0.1"),
    Case("randomk:ratio=0.1,unbiased=true,ef=false"),
    Case("dgc:ratio=0.05"),
    Case("dgc:ratio=0.05,clip=10.0,nesterov=true,warmup=2", absolute=True),
    Case("oktopk:ratio=0.05", counts_excluded=True),  # owners share the k elements out by their number
    # Sign
    Case("sign:scale=0.1", noisy=True),
    Case("sign:momentum=0.9", noisy=True),
    Case("efsign"),
    Case("efsign:exact=true,block=64"),
    Case("onebit", telescopes=False),  # with the servers' errors it does; see test_sign
    Case("onebit:ef=false,block=256"),
    # Low rank
    Case("powersgd:rank=2"),
    Case("powersgd:rank=2,alternate=true"),
    Case("powersgd:rank=2,batched=true", flat=True),
    Case("powersgd:rank=2,batched=true,alternate=true", flat=True),
    Case("powersgd:rank=2,warm_start=false"),
    # Combining and robust
    Case("adasum", order_matters=True),
    Case("adasum_delta", order_matters=True),
    Case("median", survives=1, min_size=1),
    Case("trimmed_mean", survives=1, min_size=3),
    Case("krum", survives=1, min_size=5),
    Case("multi_krum", survives=1, min_size=5),
    Case("geometric_median", survives=1),
    Case("clipped_mean:radius=30", survives=1, absolute=True),
    # Private
    Case("dp:norm=30.0,noise=0.1,test_seed=7", noisy=True, absolute=True),
    # Later or less often
    Case("delayed(ef(bf16))", late=1),
    Case("local_sgd:every=2"),
    Case("local_sgd(ef(bf16), every=1)"),
    Case("post_local_sgd:start=1,every=2,group=none"),
    Case("diloco(every=2)"),
    Case("hierarchical(mean)", local_size=2),
    Case("hierarchical(ef(bf16))", local_size=2, order_matters=True, counts_excluded=True),  # roundings are a node's
    Case("hierarchical(fp16(sign(scale=0.1)))", local_size=2, noisy=True, order_matters=True, counts_excluded=True),
    # Wrappers
    Case("ef(fp16)", overflows=True),
    Case("ef(bf16)"),
    Case("clip(ef(bf16), norm=30.0)", absolute=True),
    Case("warmup(powersgd(rank=2), steps=1, first=ef(bf16))"),
    Case("partition(*.bias=mean, 2d=topk(ratio=0.1), <2=fp16, rest=bf16)", overflows=True),
]
OF_FAMILY = list({type(case.policy).__module__: case for case in reversed(CASES)}.values())
"""The first listed policy of each module of ``hvdbridge.policies``."""


def used(policy: Policy) -> Iterator[str]:
    """The registered names of a policy and of all that it is made of."""
    yield policies.name_of(type(policy))
    for inner in policy.inners().values():
        yield from used(inner)


def unlisted() -> set[str]:
    """Built-in policies that no case uses."""
    return set(policies.BUILT_IN) - {name for case in CASES for name in used(case.policy)}


def gradients(size: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Grads]:
    """Normal numbers, of another magnitude for each parameter; no ties."""
    generator = torch.Generator().manual_seed(1000 + seed)
    scales = {name: 2.0 ** (i % 3) for i, name in enumerate(SHAPES)}
    return [
        {n: (scales[n] * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for n, s in SHAPES.items()}
        for _ in range(size)
    ]


def weights_for(case: Case, size: int) -> list[float]:
    """Unequal ones where they have a meaning, else equal ones."""
    return [float(1 + rank % 3) for rank in range(size)] if case.policy.unequal_weights else [2.0] * size


def bits(tensor: Tensor) -> bytes:
    """To compare by: a zero and a negative zero differ, a NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def close(
    case: Case, a: Grads, b: Grads, inputs: Sequence[Grads], flips: float = 0.0, factor: float | None = None
) -> None:
    """``a`` and ``b`` differ by no more than sums in another order do.

    A sum of N <= 8 terms has at most N roundings of 2^-24 of a partial sum, itself below N times the largest
    gradient: below 64 * 2^-24 of it for a sum, a factor N less for a mean. ``case.factor`` times that for policies
    that compute more than a sum. ``flips``: the share of elements that may lie a whole quantum apart, because a
    rounding before the second stage moved them over the border between two quanta.
    """
    slack = (case.factor if factor is None else factor) * 64 * 2.0**-24
    for name, mine in a.items():
        largest = max((float(g[name].abs().max()) for g in inputs if g[name].numel()), default=0.0)
        off = (mine.double() - b[name].double()).abs() > slack * largest
        allowed = math.floor(flips * mine.numel())
        assert int(off.sum()) <= allowed, f"{name}: {int(off.sum())} of {mine.numel()} elements differ"


class Trained(Simulation):
    """A simulation whose ranks train: plain SGD, and after it what the policy makes of the parameters.

    Args:
        names: the order of the parameters.

    Attributes:
        parameters: of each rank, all :data:`START` at the start.
    """

    def __init__(
        self,
        case: Case,
        size: int,
        dtype: torch.dtype = torch.float32,
        names: Sequence[str] = tuple(SHAPES),
        **more: Any,
    ) -> None:
        start = {name: torch.full(SHAPES[name], START, dtype=dtype, device="cpu") for name in names}
        super().__init__(case.policy, start, size, **{"local_size": case.local_size, **more})
        self.case = case
        self.parameters: list[Grads] = [dict(start) for _ in range(size)]

    def step(self, grads_per_rank: Any, weights: Any = None) -> list[Grads]:
        """What the policy did to each rank: the update, or, where it acts on parameters, the change of these."""
        updates = super().step(grads_per_rank, weights)
        if self.case.first_due is None or self.skipped:
            return updates
        moved = [
            {name: p - LEARNING_RATE * update[name] for name, p in mine.items()}
            for mine, update in zip(self.parameters, updates, strict=True)
        ]
        self.parameters = self.after_step(moved)
        return [{n: t - START for n, t in mine.items()} for mine in self.parameters]
