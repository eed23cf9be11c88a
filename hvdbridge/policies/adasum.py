"""Adasum: gradients that point the same way are averaged, orthogonal ones are added.

Rules:

1. ``a + b := (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`` per parameter, dot products in float64
   (Maleki 2020, "Scaling Distributed Training with Adaptive Summation").
2. The sum is a tree: ranks r and r xor 1 first, then r xor 2, r xor 4, ... It is not associative, so which rank
   holds which gradient matters.
3. Zero is neutral. A vector that has cancelled to 2**-22 of what it was made of, which is what rounding leaves of
   zero in float32, counts as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hvdbridge.kernels.cells import combine_by_parameter
from hvdbridge.policies.combining import collect, divide, gram_by_parameter, plan, raw
from hvdbridge.policy.base import Aggregated, Exchange, Flow, Policy, Slot, State
from hvdbridge.policy.bucket import Bucket, Views, flatten

GROUP = 8
"""Ranks whose three levels of the tree share one table of dot products, and so one round."""

CANCELLED = 2.0**-44
"""Squared: by how much a sum may shrink before it counts as zero."""


def tree_coefficients(gram: Tensor) -> Tensor:
    """The coefficients of the whole tree from dot products: ``[..., m, m]`` float64 -> ``[..., m]``.

    >>> tree_coefficients(torch.tensor([[1., 1.], [1., 2.]], dtype=torch.float64))  # of (1, 0) and (1, 1)
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    size = gram.shape[-1]
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()[..., None, :]
    nodes = torch.eye(size, dtype=gram.dtype, device=gram.device).expand(gram.shape)
    while nodes.shape[-2] > 1:
        pairs = nodes.shape[-2] // 2
        left, right, alone = nodes[..., 0 : 2 * pairs : 2, :], nodes[..., 1::2, :], nodes[..., 2 * pairs :, :]
        products = left @ gram
        dot = (products * right).sum(-1)
        new = torch.zeros_like(left)
        for node, image in ((left, products), (right, right @ gram)):
            square, scale = (image * node).sum(-1), (node.abs() * lengths).sum(-1).square()
            # 1, not a quotient, for what is zero; a comparison with NaN is false, so NaN takes the quotient
            share = torch.where(square <= CANCELLED * scale, torch.ones_like(dot), 1 - dot / (2 * square))
            new = new + share[..., None] * node
        nodes = torch.cat([new, alone], dim=-2)
    return nodes[..., 0, :]


def adasum(flat: Tensor, bucket: Bucket, to_output: bool = True) -> Exchange:
    """The Adasum of all ranks' ``flat``, in the bucket's layout; in float32 or wider (see :func:`collect`)."""
    shards, cells = plan(bucket)
    theirs = yield from divide(flat, shards, bucket)
    rows = list(theirs)
    while len(rows) > 1:
        groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]
        shares = tree_coefficients((yield from gram_by_parameter(groups, cells)))
        rows = [
            group[0] if len(group) == 1 else combine_by_parameter(group, shares[:, i, : len(group)].T, cells, group[0])
            for i, group in enumerate(groups)
        ]
    return (yield from collect(theirs, rows[0], shards, flat.dtype, bucket, to_output))


@dataclass(frozen=True)
class Adasum(Policy):
    """The Adasum of the gradients, per parameter.

    Between one gradient and the sum of all in length: a learning rate that suits one rank suits any number.
    Any number of ranks: a rank that finds no partner at some level of the tree (Horovod refuses such numbers) goes
    up as it is, so three ranks give ``(g0 + g1) + g2``. At powers of two it is Horovod's tree.

    A rank of weight 0 is left out, and the others move up in the tree; unequal weights have no meaning. Permuting
    the ranks changes the result. NaN and inf reach every rank, in their parameter.

    On the wire: ``2 (N-1)/N`` of the gradient in its own type (all-to-all, all-gather) and, for every 8 ranks and
    three levels of the tree, one all-reduce of at most 36 doubles per parameter.
    """

    unequal_weights = False

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        return Aggregated((yield from adasum(raw(bucket), bucket)))


@dataclass(frozen=True)
class AdasumDelta(Policy):
    """The Adasum of what each rank's optimizer made of its own gradient: Horovod's optimizer with ``op=hvd.Adasum``.

    Gradients stay local. After the optimizer's step each rank's change ``d_r = p_r - start`` is combined, and every
    rank goes on from ``start + Adasum(d_0, ..., d_N-1)``: so what is combined has the optimizer's momentum and
    scaling in it. Between ``backward()`` and the end of ``step()`` gradients and parameters differ between ranks;
    after it parameters have the same bits everywhere. The optimizer's own state (momenta) stays local and differs.

    State: ``start``, the parameters after the last step, the same on all ranks; one copy of the model.
    Weights and bytes on the wire are those of :class:`Adasum`, in float32 (float64 for float64 parameters). A rank of
    weight 0 takes what the others found.
    """

    slots: ClassVar[Mapping[str, Slot]] = {"start": Slot(anchor=True)}
    replicas = "drift"  # of gradients, between backward() and step(); parameters are the same after every step
    unequal_weights = False

    def init(self, params: Mapping[str, Tensor]) -> State:
        return {"start": {name: p.detach().clone() for name, p in params.items()}}

    def due(self, step: int) -> bool:
        return True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        """The local gradient, as it is; zeros where this rank's weight is 0."""
        yield from ()
        return Aggregated(raw(bucket))

    def after_step(self, bucket: Bucket, state: State) -> Flow:
        """Combine what the optimizers changed."""
        old = state["start"]
        start = flatten(old, bucket.layout).to(bucket.buffer.dtype)
        new = Views(bucket.layout, start + (yield from adasum(bucket.buffer - start, bucket, to_output=False)))
        kept = new if isinstance(old, Views) else {name: new[name].to(p.dtype) for name, p in old.items()}
        return Aggregated(new.flat, state={"start": kept})
