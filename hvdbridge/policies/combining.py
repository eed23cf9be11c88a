"""Linear combinations of the ranks' gradients with coefficients that depend on the gradients' dot products.

    all-to-all  ->  all-reduce of the owners' partial dot products  ->  each owner combines its shard  ->  all-gather

One rank sends ``2 (N-1)/N`` of the vector, like a ring all-reduce, and a small table in float64. A row is one rank's
part of a shard.

Rules:

1. Every vector in such a rule (a partial combination, a centre, a difference) is a linear combination of the rows. Its
   norm and dot products follow from the table of the rows' dot products, so one small all-reduce serves any number of
   iterations.
2. Shards consist of whole blocks, and partial sums are formed block by block, so coefficients do not depend on
   bucket boundaries.
3. A rank of weight 0 has no row; the rule treats the other ranks as the whole group.
4. The owner of a shard combines it and sends the result, so all ranks have equal bits.
5. Memory: a packed vector returns to the pool, and a combination overwrites its first row. Beside the bucket, one
   buffer is held while a vector is in flight (two if shards are padded), and none between collectives.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdbridge.kernels.cells import Cells, dots, sum_all, sum_by_parameter
from hvdbridge.policies.shards import BlockShards, Shards, accumulator, block_shards
from hvdbridge.policy.base import Exchange
from hvdbridge.policy.bucket import Bucket, Ranks
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Collective

Rows = list[Tensor]
"""The participants' parts of one shard, ``[shard length]`` each, in rank order."""


def participants(bucket: Bucket) -> list[int]:
    """Return the ranks of positive weight, in ascending order."""
    weights = bucket.decide(lambda _, weights: weights)
    return [rank for rank in range(bucket.size) if weights is None or weights[rank] > 0]


def weights_of(bucket: Bucket) -> list[float]:
    """Return the weights of the :func:`participants`, in the same order; 1.0 each if no weights were set."""
    weights = bucket.decide(lambda _, weights: weights)
    return [1.0 if weights is None else weights[rank] for rank in participants(bucket)]


def raw_gradient(bucket: Bucket) -> Tensor:
    """Return this rank's gradient ``[numel]`` without the factor of :meth:`Bucket.weighted`; zeros if its weight is 0.

    The result may be the bucket's buffer.
    """
    if bucket.excluded:
        return bucket.buffer.zero_()
    if not bucket.scaled or bucket.size == 1:
        return bucket.buffer
    weights = bucket.decide(lambda _, weights: weights)  # decided, since a quotient by a tensor has other bits
    return bucket.buffer / Ranks(bucket.rank, bucket.size, weights).share


def shard_cells(bucket: Bucket) -> tuple[BlockShards, Cells]:
    """Return the shards of a bucket, in whole blocks, and the cells of the shard that this rank owns."""
    shards, device, rank = block_shards(bucket), bucket.buffer.device, bucket.rank

    def make() -> Cells:
        blocks = [
            (start, count, width, offset) for start, count, width, owner, offset in shards.groups if owner == rank
        ]
        return Cells(bucket.layout, blocks, device)

    return shards, bucket.layout.derive(("cells", shards, rank, device), make)


def exchange_shards(flat: Tensor, shards: Shards, bucket: Bucket) -> Generator[Collective, Tensor, Rows]:
    """Send every owner its shard of ``flat``; return the :func:`participants`' parts of this rank's shard.

    The flow gives ``flat`` away and may overwrite the returned rows. A call of :func:`gather_shards` must follow.
    """
    packed = shards.pack(flat, flat.dtype, pool=bucket.pool)
    received = yield AllToAll(packed, out=bucket.scratch(packed.numel(), packed.dtype))
    bucket.pool.give(packed, but=[flat, received])
    return [received[rank] for rank in participants(bucket)]


def gather_shards(
    rows: Rows, result: Tensor, shards: Shards, wire: torch.dtype, bucket: Bucket, to_output: bool = True
) -> Exchange:
    """Return the owners' results as one flat vector ``[numel]``, in float32 or wider.

    Args:
        rows: the rows that :func:`exchange_shards` returned; their memory goes back to the pool.
        result: this owner's result ``[shard length]``; may be one of ``rows``.
        wire: dtype of the results on the wire.
        to_output: write the vector into the bucket's output buffer.
    """
    wide = accumulator(wire)
    gathered = yield AllGather(result.to(wire), out=bucket.scratch(shards.size * shards.length, wire))
    update = shards.unpack(gathered, wide, bucket.output(wide) if to_output else None)
    bucket.pool.give(gathered, rows[0], but=[update, bucket.buffer])
    return update


def gram_by_parameter(groups: Sequence[Sequence[Tensor]], cells: Cells) -> Exchange:
    """Return the dot products of each group's rows, per parameter: float64 ``[parameters, groups, m, m]``.

    m is the number of rows of the largest group; smaller groups are padded with zeros.
    """
    size, parameters = max(map(len, groups)), cells.parameters
    upper = torch.triu_indices(size, size, device=groups[0][0].device)
    table = torch.zeros((parameters, len(groups), size, size), dtype=torch.float64, device=groups[0][0].device)
    for i, group in enumerate(groups):
        table[:, i, : len(group), : len(group)] = sum_by_parameter(dots(group, cells), cells)
    return _symmetric((yield AllReduce(table[..., upper[0], upper[1]])), size)


def gram(rows: Sequence[Tensor], cells: Cells) -> Exchange:
    """Return the dot products of the rows, over all parameters: float64 ``[rows, rows]``."""
    size = len(rows)
    upper = torch.triu_indices(size, size, device=rows[0].device)
    table = sum_all(dots(rows, cells), cells)
    return _symmetric((yield AllReduce(table[upper[0], upper[1]])), size)


def _symmetric(triangles: Tensor, size: int) -> Tensor:
    """Expand upper triangles ``[..., size (size+1)/2]`` into symmetric matrices ``[..., size, size]``."""
    index = _triangle_index(size, triangles.device)
    return triangles[..., index].view(*triangles.shape[:-1], size, size)


@lru_cache
def _triangle_index(size: int, device: torch.device) -> Tensor:
    """Return the index into the upper triangle of each matrix element, row by row: int64 ``[size * size]``."""
    number = {pair: i for i, pair in enumerate((a, b) for a in range(size) for b in range(a, size))}
    return torch.tensor([number[min(a, b), max(a, b)] for a in range(size) for b in range(size)], device=device)
