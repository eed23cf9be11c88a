"""Ok-Topk (Li and Hoefler 2022): a sparse all-reduce whose volume does not grow with the number of ranks.

    k largest of mine  ->  all-to-all to their owners  ->  owners add and keep the largest sums  ->  all-gather

Rules:

1. An element belongs to a rank by a hash of its place in its parameter (a parameter with few chosen elements
   belongs to one rank as a whole), so shares are balanced wherever the large elements lie, and bucket boundaries
   do not matter.
2. Capacities are fixed per parameter and owner; what does not fit waits in the residual.
3. Memory: an owner adds what arrives in one more vector like the bucket.
4. An element counts as sent where its owner's sum of it was among those that came back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdbridge.kernels.random import key
from hvdbridge.kernels.select import Plan, add_up, largest, owners, pack_pairs, unpack_pairs
from hvdbridge.policies.feedback import WithFeedback
from hvdbridge.policies.shards import accumulator
from hvdbridge.policies.sparse import plan_of, rest_of
from hvdbridge.policy.base import Aggregated, Flow, State
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.collectives import AllGather, AllToAll
from hvdbridge.policy.options import option

SHARED = 16
"""A parameter is divided among N ranks where at least this many times N of its elements are chosen."""


@dataclass(frozen=True)
class OkTopK(WithFeedback):
    """The largest elements of the sum of each rank's largest elements.

    Each rank chooses its ``k = ceil(ratio n)`` largest of each parameter's n elements, the owners of their indices
    add them in rank order and keep about ``k / N`` of the largest sums each, k in all.
    On the wire: about ``k/N + 2 sqrt(k/N)`` pairs of a value and an int32 index to each owner, and ``k/N`` pairs
    from each to all, so below ``8 (2 k + 2 sqrt(k N)) (N-1)/N`` bytes per rank where ``topk`` sends ``8 k (N-1)``.

    It differs from the paper in what the paper does to avoid work and variable sizes: thresholds are found anew
    at every step from a sample (the paper reuses them for some steps), regions are hashed instead of moved and
    sums are balanced by it, each owner keeps its own k/N largest sums instead of those above one global
    threshold, and messages have a fixed capacity.

    Attributes:
        ratio: share of the elements that a rank sends, and of those that are updated.
        ef: error feedback.
    """

    ratio: float = option(0.01, above=0, at_most=1)
    ef: bool = True
    rounds = 2

    def compress(self, bucket: Bucket, state: State) -> Flow:
        flat, numel = bucket.weighted().buffer, bucket.layout.numel
        local = plan_of(bucket, self.ratio)
        if not local.total:
            return Aggregated(bucket.output(accumulator(flat.dtype)).zero_(), rest=flat if bucket.needs_sent else None)
        routes = bucket.layout.derive(("oktopk", local, bucket.size), lambda: Routes(local, bucket.size, flat.device))
        indices, values = routes.address(*largest(flat, local))

        arrived = yield AllToAll(torch.stack([pack_pairs(i, v) for i, v in zip(indices, values, strict=True)]))
        where, what = unpack_pairs(arrived, values.dtype)
        chosen = routes.keep(bucket.rank, where, what, numel)

        where, what = unpack_pairs((yield AllGather(pack_pairs(*chosen))), values.dtype)
        rest = None
        if bucket.needs_sent:
            came = torch.zeros(numel + 1, dtype=torch.bool, device=flat.device)
            came.index_fill_(0, _aside(where, what, numel).view(-1), True)
            lost = ~came[_aside(indices, values, numel)]
            rest = rest_of(bucket, indices.reshape(-1), values.masked_fill(lost, 0).view(-1))
        return Aggregated(add_up(zip(where, what, strict=True), bucket.output(values.dtype)), rest=rest)


def _aside(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The indices, int64; those of empty slots moved behind the vector of ``numel`` elements."""
    return indices.long().masked_fill(values == 0, numel)


class Routes:
    """Who owns which element, and where it stands in the messages; the same on all ranks.

    Attributes:
        width: slots of the message to one owner.
        back: slots of the message from one owner.
    """

    def __init__(self, plan: Plan, size: int, device: torch.device) -> None:
        self.size = size
        layout, self.names = plan.layout, [name for name in plan.layout.names if plan.counts[name]]
        counts = [plan.counts[name] for name in self.names]
        # The owner of each parameter, or -1: divided among all.
        whole = [key("owner", n) % size if c < SHARED * size else -1 for n, c in zip(self.names, counts, strict=True)]
        owners = range(size)

        def spread(shares: list[int]) -> list[list[int]]:
            """By parameter and owner: the parameter's share for each owner, or all of it for the one."""
            rows = zip(shares, whole, counts, strict=True)
            return [[share if one < 0 else count * (o == one) for o in owners] for share, one, count in rows]

        self.capacities = spread([math.ceil(c / size + 2 * math.sqrt(c / size)) for c in counts])
        self.kept = spread([-(-c // size) for c in counts])
        self.width = max(sum(column) for column in zip(*self.capacities, strict=True))
        self.back = max(sum(column) for column in zip(*self.kept, strict=True))
        # The slot where (p, o) begins in the messages, which stand one behind the other.
        first, filled = [], [o * self.width for o in range(size)]
        for row in self.capacities:
            first.append(list(filled))
            filled = [f + c for f, c in zip(filled, row, strict=True)]

        def table(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # By group = parameter * size + owner; the last group is that of empty slots.
        self.capacity = table([c for row in self.capacities for c in row] + [0])
        self.first = table([f for row in first for f in row] + [0])
        self.group = torch.arange(len(self.names) * size + 1, device=device)
        # By parameter.
        self.counts, self.start, self.whole = (
            table(values) for values in (counts, [layout.offsets[name] for name in self.names], whole)
        )
        self._owned: dict[int, Plan] = {}

    def address(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What was chosen here as rows for the owners, ``[size, width]`` each.

        A value that is not finite makes all of its parameter so: what finds no room must not hide it.
        """
        empty = values == 0
        number = owners(self.counts, values.numel())
        bad = torch.zeros(len(self.names), dtype=values.dtype, device=values.device)
        values = values + bad.index_add_(0, number, values * 0)[number]
        whole = self.whole[number]
        owner = torch.where(whole < 0, _hash(indices - self.start[number]) % self.size, whole)
        group = (number * self.size + owner).masked_fill_(empty, self.group.numel() - 1)
        group, order = torch.sort(group, stable=True)
        place = torch.arange(group.numel(), device=group.device) - torch.searchsorted(group, self.group)[group]
        target = (self.first[group] + place).masked_fill_(place >= self.capacity[group], self.size * self.width)
        shape = self.size * self.width + 1  # one more, where meets what finds no room
        rows = torch.zeros(shape, dtype=indices.dtype, device=indices.device).scatter_(0, target, indices[order])
        what = torch.zeros(shape, dtype=values.dtype, device=values.device).scatter_(0, target, values[order])
        return rows[:-1].view(self.size, self.width), what[:-1].view(self.size, self.width)

    def keep(self, owner: int, indices: Tensor, values: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The largest sums of what arrived at ``owner``: rows ``[size, width]`` in, ``[back]`` out."""
        where = _aside(indices, values, numel)
        total = add_up(zip(where, values, strict=True), values.new_empty(numel + 1))
        total[numel:] = 0
        sums = torch.empty_like(values)
        for row, places in zip(sums, where, strict=True):  # each sum once, where it was met first
            torch.index_select(total, 0, places, out=row)
            total.index_fill_(0, places, 0)
        plan = self.plan(owner, values.device)
        # By columns, what belongs to one parameter lies together.
        picked, kept = largest(sums.t().reshape(-1)[: plan.layout.numel], plan)
        back = indices.t().reshape(-1).index_select(0, picked).masked_fill_(kept == 0, 0)
        gap = self.back - plan.total
        return torch.cat([back, back.new_zeros(gap)]), torch.cat([kept, kept.new_zeros(gap)])

    def plan(self, owner: int, device: torch.device) -> Plan:
        """How ``owner`` chooses among the columns that arrive there."""
        if owner not in self._owned:
            layout = Layout({n: (row[owner] * self.size,) for n, row in zip(self.names, self.capacities, strict=True)})
            counts = {n: row[owner] for n, row in zip(self.names, self.kept, strict=True)}
            self._owned[owner] = Plan.of(layout, counts, device)
        return self._owned[owner]


def _hash(x: Tensor) -> Tensor:
    """Not negative; two rounds of multiplication in 32 bits, so that patterns in the indices do not matter."""
    x = x.int().mul_(-1640531535)
    x = (x ^ (x >> 15)).mul_(-2048144789)
    return (x ^ (x >> 13)).bitwise_and_(0x7FFFFFFF)
