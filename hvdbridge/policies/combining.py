"""Linear combinations of the ranks' gradients, whose coefficients come from their dot products.

    all-to-all  ->  owners' partial dot products, all-reduced  ->  the owner combines its shard  ->  all-gather

One rank sends ``2 (N-1)/N`` of the vector, like a ring all-reduce, and a small table in float64.

Rules:

1. Every vector that such a rule speaks of (a partial combination, a centre, a difference) is itself a combination
   of the rows, so its norms and products follow from one table of the rows' dot products: however many
   iterations a rule makes, one small round is enough.
2. Shards consist of whole blocks, and partial sums are made block by block: coefficients do not depend on
   bucket boundaries.
3. A rank of weight 0 has no row: the rule sees the others alone, as if it were not there.
4. The owner of a shard combines it and sends it, so all ranks end with the same bits.
5. Memory: the pool takes back a packed vector, and a combination overwrites its first row. So beside the bucket one
   buffer is held while a vector travels, two where shards are padded, and none in between.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hvdbridge.kernels.cells import Cells, by_parameter, dots, in_all
from hvdbridge.policies.shards import BlockShards, Shards, accumulator, block_shards
from hvdbridge.policy.base import Exchange
from hvdbridge.policy.bucket import Bucket
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Collective

Rows = list[Tensor]
"""The ranks' parts of one shard."""


def participants(bucket: Bucket) -> list[int]:
    """The ranks of positive weight."""
    return [rank for rank in range(bucket.size) if bucket.weights is None or bucket.weights[rank] > 0]


def weights_of(bucket: Bucket) -> list[float]:
    """Their weights, in the same order."""
    return [1.0 if bucket.weights is None else bucket.weights[rank] for rank in participants(bucket)]


def raw(bucket: Bucket) -> Tensor:
    """The gradient as this rank computed it (what ``weighted()`` did is undone); zeros where its weight is 0."""
    if bucket.weight == 0.0:
        return bucket.buffer.zero_()
    if not bucket.scaled or bucket.factor == 1.0:
        return bucket.buffer
    return bucket.buffer / bucket.factor


def plan(bucket: Bucket) -> tuple[BlockShards, Cells]:
    """The shards of a bucket by whole blocks, and the cells of the one that this rank owns."""
    shards, device, rank = block_shards(bucket), bucket.buffer.device, bucket.rank

    def make() -> Cells:
        pieces = [
            (start, count, width, offset) for start, count, width, owner, offset in shards.pieces if owner == rank
        ]
        return Cells(bucket.layout, pieces, device)

    return shards, bucket.layout.derive(("cells", shards, rank, device), make)


def divide(flat: Tensor, shards: Shards, bucket: Bucket) -> Generator[Collective, Tensor, Rows]:
    """The parts of this rank's shard that the participants hold, in their order. They may be changed. ``flat`` is given
    away, and :func:`collect` follows."""
    rows = shards.pack(flat, flat.dtype, pool=bucket.pool)
    answer = yield AllToAll(rows, out=bucket.scratch(rows.numel(), rows.dtype))
    bucket.pool.give(rows, but=[flat, answer])
    return [answer[rank] for rank in participants(bucket)]


def collect(
    rows: Rows, mine: Tensor, shards: Shards, wire: torch.dtype, bucket: Bucket, to_output: bool = True
) -> Exchange:
    """The owners' results as one flat vector, in float32 or wider.

    Args:
        rows: what :func:`divide` gave; no flow reads them afterwards.
        mine: this owner's result; may be one of ``rows``.
        to_output: in the bucket's output buffer.
    """
    wide = accumulator(wire)
    answer = yield AllGather(mine.to(wire), out=bucket.scratch(shards.size * shards.length, wire))
    update = shards.unpack(answer, wide, bucket.output(wide) if to_output else None)
    bucket.pool.give(answer, rows[0], but=[update, bucket.buffer])
    return update


def gram_by_parameter(groups: Sequence[Sequence[Tensor]], cells: Cells) -> Exchange:
    """The dot products of each group's rows: float64 ``[parameters, groups, m, m]``.

    Groups are filled up with zeros to the size m of the largest.
    """
    largest, length = max(map(len, groups)), cells.parameters
    corner = torch.triu_indices(largest, largest, device=groups[0][0].device)
    table = torch.zeros((length, len(groups), largest, largest), dtype=torch.float64, device=groups[0][0].device)
    for i, rows in enumerate(groups):
        table[:, i, : len(rows), : len(rows)] = by_parameter(dots(rows, cells), cells)
    return _symmetric((yield AllReduce(table[..., corner[0], corner[1]])), largest)


def gram(rows: Sequence[Tensor], cells: Cells) -> Exchange:
    """The dot products of the rows: float64 ``[rows, rows]``."""
    size = len(rows)
    corner = torch.triu_indices(size, size, device=rows[0].device)
    table = in_all(dots(rows, cells), cells)
    return _symmetric((yield AllReduce(table[corner[0], corner[1]])), size)


def _symmetric(corners: Tensor, size: int) -> Tensor:
    """``[..., size (size+1)/2]`` as symmetric matrices ``[..., size, size]``."""
    places = _places(size, corners.device)
    return corners[..., places].view(*corners.shape[:-1], size, size)


@lru_cache
def _places(size: int, device: torch.device) -> Tensor:
    """Where each element of a matrix, row by row, stands in its upper triangle."""
    number = {pair: i for i, pair in enumerate((a, b) for a in range(size) for b in range(a, size))}
    return torch.tensor([number[min(a, b), max(a, b)] for a in range(size) for b in range(size)], device=device)
