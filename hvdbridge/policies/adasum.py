"""Adasum: a sum that averages gradients of the same direction and adds orthogonal gradients.

Rules:

1. ``a + b := (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`` per parameter, with dot products in float64
   (Maleki 2020, "Scaling Distributed Training with Adaptive Summation").
2. The ranks form a binary tree: r is combined with r xor 1 first, then with r xor 2, r xor 4, ... The operation is not
   associative, so the result depends on the order of the ranks.
3. Zero is neutral: ``a + 0 = a``. A combination shorter than 2**-22 of its terms counts as zero, since rounding
   in float32 leaves a remainder of this size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.kernels.cells import combine_by_parameter
from hvdbridge.policies.combining import exchange_shards, gather_shards, gram_by_parameter, raw_gradient, shard_cells
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten

GROUP_SIZE = 8
"""Number of ranks (three levels of the tree) whose dot products share one table and so one all-reduce."""

CANCELLED_SQUARE = 2.0**-44
"""Squared ratio of a combination's length to that of its terms below which the combination counts as zero."""


def tree_coefficients(gram: Tensor) -> Tensor:
    """Return each row's coefficient in the tree's result from the rows' dot products: ``[..., m, m]`` -> ``[..., m]``.

    All are float64.

    >>> tree_coefficients(torch.tensor([[1., 1.], [1., 2.]], dtype=torch.float64))  # of (1, 0) and (1, 1)
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    size = gram.shape[-1]
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]
    nodes = torch.eye(size, dtype=gram.dtype, device=gram.device).expand(gram.shape)
    while nodes.shape[-2] > 1:
        pairs = nodes.shape[-2] // 2
        left, right, unpaired = nodes[..., 0 : 2 * pairs : 2, :], nodes[..., 1::2, :], nodes[..., 2 * pairs :, :]
        products = left @ gram
        dot = (products * right).sum(-1)
        sums = torch.zeros_like(left)
        for node, image in ((left, products), (right, right @ gram)):
            square, scale = (image * node).sum(-1), (node.abs() * lengths).sum(-1).square()
            # A zero vector has the coefficient 1. Comparisons with NaN are false, so NaN takes the quotient.
            coefficient = torch.where(square <= CANCELLED_SQUARE * scale, torch.ones_like(dot), 1 - dot / (2 * square))
            sums = sums + coefficient[..., None] * node
        nodes = torch.cat([sums, unpaired], dim=-2)
    return nodes[..., 0, :]


def adasum(flat: Tensor, bucket: Bucket, to_output: bool = True) -> Exchange:
    """Return the Adasum of all ranks' ``flat`` ``[numel]``, in the bucket's layout, in float32 or wider.

    The flow gives ``flat`` away. ``to_output``: see :func:`~.combining.gather_shards`.
    """
    shards, cells = shard_cells(bucket)
    gradients = yield from exchange_shards(flat, shards, bucket)
    rows = list(gradients)
    while len(rows) > 1:
        groups = [rows[start : start + GROUP_SIZE] for start in range(0, len(rows), GROUP_SIZE)]
        factors = tree_coefficients((yield from gram_by_parameter(groups, cells)))
        rows = [
            group[0] if len(group) == 1 else combine_by_parameter(group, factors[:, i, : len(group)].T, cells, group[0])
            for i, group in enumerate(groups)
        ]
    return (yield from gather_shards(gradients, rows[0], shards, flat.dtype, bucket, to_output))


@dataclass(frozen=True)
class Adasum(Policy):
    """Adasum of the gradients, per parameter (Maleki 2020, "Scaling Distributed Training with Adaptive Summation").

    ``a + b := (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``, applied in a binary tree over the ranks. The length of the
    result lies between that of one gradient and that of their sum. The paper therefore keeps one learning rate for any
    number of ranks.

    Any number of ranks is allowed. At powers of two the tree is Horovod's, which refuses other numbers. A rank without
    a partner at some level passes its gradient up unchanged, so three ranks give ``(g0 + g1) + g2``. Permuting the
    ranks changes the result.

    Weights: a rank of weight 0 is left out, and the ranks after it move up in the tree. Unequal positive weights raise
    :class:`~hvdbridge.WeightError`. NaN and inf of one rank reach the same parameter on all ranks. State: none.

    On the wire: ``2 (N-1)/N`` of the gradient in its own type (all-to-all, all-gather) and, for each three levels of
    the tree, one all-reduce of at most 36 doubles per parameter for every 8 ranks.
    """

    unequal_weights = False

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from adasum(raw_gradient(bucket), bucket)))


@dataclass(frozen=True)
class AdasumDelta(Policy):
    """Adasum of the changes that the ranks' optimizers make: Horovod's optimizer with ``op=hvd.Adasum``.

    Gradients stay local. Each rank's optimizer steps with its own gradient and changes the parameters by
    ``d_r = p_r - start``. The parameters then become ``start + Adasum(d_0, ..., d_N-1)`` on all ranks. The combined
    changes thus include the optimizer's momentum and scaling. Gradients and parameters differ between ranks from
    ``backward()`` to the end of ``step()``; after it parameters have equal bits on all ranks. The optimizer's own state
    (momenta) is local and differs between ranks.

    State: ``start``, the parameters after the last step, in their own type and equal on all ranks: one copy of the
    model. Weights and bytes on the wire are those of :class:`Adasum`, in float32 (float64 for float64 parameters). A
    rank of weight 0 contributes no change and receives the same parameters as the other ranks.
    """

    slots: ClassVar[Mapping[str, Slot]] = {"start": Slot(anchor=True)}
    replicas = "drift"  # gradients differ between backward() and step(); parameters are equal after every step
    unequal_weights = False

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"start": {name: p.detach().clone() for name, p in params.items()}}

    def due(self, step: int) -> bool:
        return True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """Return the local gradient unchanged; zeros if this rank's weight is 0."""
        yield from ()
        return Aggregated(raw_gradient(bucket))

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        """Add the Adasum of all ranks' parameter changes to ``start``; the sum is the new ``start``."""
        old = state["start"]
        start = flatten(old, bucket.layout).to(bucket.buffer.dtype)
        new = Views(bucket.layout, start + (yield from adasum(bucket.buffer - start, bucket, to_output=False)))
        stored = new if isinstance(old, Views) else {name: new[name].to(p.dtype) for name, p in old.items()}
        return Aggregated(new.flat, state={"start": stored})
