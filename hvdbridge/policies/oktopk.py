"""Ok-Topk (Li and Hoefler 2022): a sparse all-reduce whose volume does not grow with the number of ranks.

    each rank's k largest  ->  all-to-all to their owners  ->  owners add and select the largest sums  ->  all-gather

Rules:

1. A hash of an element's index in its parameter determines the owner rank. (A parameter with few chosen elements has
   one owner.) Owners thus get about equal shares wherever the large elements are, and results do not depend on bucket
   boundaries.
2. Messages have a fixed capacity per parameter and owner. Elements beyond it are not sent (but kept by feedback).
3. Memory: an owner adds the received elements in a further vector of the bucket's size.
4. An element counts as sent if its owner's sum is among the returned sums.
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
from hvdbridge.policies.sparse import plan_of, subtract_sent
from hvdbridge.policy.base import Aggregated, Flow, State
from hvdbridge.policy.bucket import Bucket, Layout
from hvdbridge.policy.collectives import AllGather, AllToAll
from hvdbridge.policy.options import option

SPLIT = 16
"""A parameter is divided among N owners if at least ``SPLIT * N`` of its elements are chosen."""


@dataclass(frozen=True)
class OkTopK(WithFeedback):
    """Ok-Topk: the largest elements of the sum of each rank's largest elements (Li and Hoefler 2022).

    Each rank chooses the ``k = ceil(ratio n)`` elements of largest magnitude of each parameter's n. The owners of
    these elements add them in rank order, and each returns its ``k / N`` largest sums to all ranks, k in total.

    State: with ``ef`` the residual, the size of the parameters in float32 (float64 for float64), local to the rank.
    Weights: any. On the wire: about ``k/N + 2 sqrt(k/N)`` pairs of a value and an int32 index to each owner, and
    ``k/N`` pairs from each owner to all ranks. The total is about ``8 (2 k + 2 sqrt(k N)) (N-1)/N`` bytes per rank,
    numbers of pairs being rounded up; ``topk`` sends ``8 k (N-1)``.

    Differences from the paper: each step determines new thresholds from a sample (the paper reuses them for some
    steps). Elements are assigned to owners by a hash (the paper moves region boundaries and balances sums). Each owner
    returns its own k/N largest sums (the paper: those above one global threshold). Messages have a fixed capacity.

    Source:
        Li and Hoefler, *Near-optimal sparse allreduce for distributed deep learning*, 2022.

    When to choose:
        ``topk`` would suit the network, and there are more than about ten ranks.

    Attributes:
        ratio: share of the elements that a rank sends, and share of the elements that are updated.
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
        indices, values = routes.to_owners(*largest(flat, local))

        received = yield AllToAll(torch.stack([pack_pairs(i, v) for i, v in zip(indices, values, strict=True)]))
        index_rows, value_rows = unpack_pairs(received, values.dtype)
        selected = routes.select(bucket.rank, index_rows, value_rows, numel)

        index_rows, value_rows = unpack_pairs((yield AllGather(pack_pairs(*selected))), values.dtype)
        rest = None
        if bucket.needs_sent:
            returned = torch.zeros(numel + 1, dtype=torch.bool, device=flat.device)
            returned.index_fill_(0, _mask_empty(index_rows, value_rows, numel).view(-1), True)
            lost = ~returned[_mask_empty(indices, values, numel)]
            rest = subtract_sent(bucket, indices.reshape(-1), values.masked_fill(lost, 0).view(-1))
        return Aggregated(add_up(zip(index_rows, value_rows, strict=True), bucket.output(values.dtype)), rest=rest)


def _mask_empty(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return ``indices`` as int64, with ``numel`` (one past the vector) in empty slots."""
    return indices.long().masked_fill(values == 0, numel)


class Routes:
    """Owner of each element, and the slots of parameters in the messages; equal on all ranks.

    Attributes:
        capacities: slots of each parameter in the message to each owner, ``[parameters][owners]``.
        reply_counts: number of sums that each owner returns for each parameter, ``[parameters][owners]``.
        sent_slots: number of slots in the message to one owner.
        reply_slots: number of slots in the message from one owner.
        sole_owner: the only owner of each parameter, or -1 for a divided one, int64 ``[parameters]``.
    """

    def __init__(self, plan: Plan, size: int, device: torch.device) -> None:
        self.size = size
        layout, self.names = plan.layout, [name for name in plan.layout.names if plan.counts[name]]
        counts = [plan.counts[name] for name in self.names]
        # The only owner of each parameter, or -1 if it is divided among all.
        sole = [key("owner", n) % size if c < SPLIT * size else -1 for n, c in zip(self.names, counts, strict=True)]
        owners = range(size)

        def spread(shares: list[int]) -> list[list[int]]:
            """Return ``[parameters][owners]``: each owner's share, or the parameter's count for its sole owner."""
            rows = zip(shares, sole, counts, strict=True)
            return [[share if one < 0 else count * (o == one) for o in owners] for share, one, count in rows]

        self.capacities = spread([math.ceil(c / size + 2 * math.sqrt(c / size)) for c in counts])
        self.reply_counts = spread([-(-c // size) for c in counts])
        self.sent_slots = max(sum(column) for column in zip(*self.capacities, strict=True))
        self.reply_slots = max(sum(column) for column in zip(*self.reply_counts, strict=True))
        # The first slot of each (parameter, owner) in the concatenated messages.
        first, filled = [], [o * self.sent_slots for o in range(size)]
        for row in self.capacities:
            first.append(list(filled))
            filled = [f + c for f, c in zip(filled, row, strict=True)]

        def table(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # Tables by group = parameter * size + owner; the last group is that of empty slots.
        self.capacity = table([c for row in self.capacities for c in row] + [0])
        self.first = table([f for row in first for f in row] + [0])
        self.group = torch.arange(len(self.names) * size + 1, device=device)
        # Tables by parameter.
        self.counts, self.start, self.sole_owner = (
            table(values) for values in (counts, [layout.offsets[name] for name in self.names], sole)
        )
        self._owned: dict[int, Plan] = {}

    def to_owners(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen indices and values as rows for the owners, ``[size, sent_slots]`` each.

        A value that is not finite makes all chosen values of its parameter NaN: elements beyond the capacity must not
        hide it.
        """
        empty = values == 0
        parameter = owners(self.counts, values.numel())
        poison = torch.zeros(len(self.names), dtype=values.dtype, device=values.device)
        values = values + poison.index_add_(0, parameter, values * 0)[parameter]
        sole = self.sole_owner[parameter]
        owner = torch.where(sole < 0, _hash(indices - self.start[parameter]) % self.size, sole)
        group = (parameter * self.size + owner).masked_fill_(empty, self.group.numel() - 1)
        group, order = torch.sort(group, stable=True)
        slot = torch.arange(group.numel(), device=group.device) - torch.searchsorted(group, self.group)[group]
        target = (self.first[group] + slot).masked_fill_(slot >= self.capacity[group], self.size * self.sent_slots)
        slots = self.size * self.sent_slots + 1  # one more slot, for elements beyond the capacity
        index_rows = torch.zeros(slots, dtype=indices.dtype, device=indices.device).scatter_(0, target, indices[order])
        value_rows = torch.zeros(slots, dtype=values.dtype, device=values.device).scatter_(0, target, values[order])
        return index_rows[:-1].view(self.size, self.sent_slots), value_rows[:-1].view(self.size, self.sent_slots)

    def select(self, owner: int, indices: Tensor, values: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Add the ranks' rows ``[size, sent_slots]`` at ``owner``, and return the indices and values of the largest
        sums, ``[reply_slots]`` each."""
        positions = _mask_empty(indices, values, numel)
        total = add_up(zip(positions, values, strict=True), values.new_empty(numel + 1))
        total[numel:] = 0
        sums = torch.empty_like(values)
        for row, row_positions in zip(sums, positions, strict=True):  # each sum once, in the first slot with its index
            torch.index_select(total, 0, row_positions, out=row)
            total.index_fill_(0, row_positions, 0)
        plan = self.owner_plan(owner, values.device)
        # Column by column, the slots of one parameter are adjacent.
        picked, kept = largest(sums.t().reshape(-1)[: plan.layout.numel], plan)
        reply = indices.t().reshape(-1).index_select(0, picked).masked_fill_(kept == 0, 0)
        unused = self.reply_slots - plan.total
        return torch.cat([reply, reply.new_zeros(unused)]), torch.cat([kept, kept.new_zeros(unused)])

    def owner_plan(self, owner: int, device: torch.device) -> Plan:
        """Return the plan by which ``owner`` selects among the columns of the received rows."""
        if owner not in self._owned:
            layout = Layout({n: (row[owner] * self.size,) for n, row in zip(self.names, self.capacities, strict=True)})
            counts = {n: row[owner] for n, row in zip(self.names, self.reply_counts, strict=True)}
            self._owned[owner] = Plan.of(layout, counts, device)
        return self._owned[owner]


def _hash(x: Tensor) -> Tensor:
    """Return int32 hashes of ``x``, not negative; two rounds of multiplication break up patterns in the indices."""
    x = x.int().mul_(-1640531535)
    x = (x ^ (x >> 15)).mul_(-2048144789)
    return (x ^ (x >> 13)).bitwise_and_(0x7FFFFFFF)
