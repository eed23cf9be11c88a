"""Sparse messages of fixed capacity: choose elements of a flat vector, parameter by parameter, and add them up.

Rules:

1. What is chosen depends on the parameter alone (its name, its values, its count), not on its neighbours.
2. Shapes depend on the plan, never on values. A slot without an element is (index 0, value 0).
3. Magnitudes are compared as integers: the bits of a float without its sign grow with it, inf is above all
   numbers and NaN above inf. So NaN and inf are chosen first, and travel.
4. Vectors of several ranks are added in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvdbridge.bucket import Layout
from hvdbridge.kernels.random import generator, key

ROW = 16384
"""Parameters of at most so many elements are searched together, as rows of a matrix; larger ones by themselves."""
CHUNK = 131072
"""Elements that one thread looks through at a time: they stay in its cache."""
TAIL = 400
"""Elements of a sample that lie among the k largest, where the parameter is large enough."""
ROUNDS = 20
"""Of the shuffle; each halves the chance that an element has not moved."""


@dataclass(frozen=True)
class Rows:
    """Parameters of similar size, one per row: ``length`` elements, ``most`` slots.

    Attributes:
        numbers: of the parameters, among those of the layout.
        starts: offset of each in the vector, ``[rows, 1]``.
        slots: where each of ``[rows, most]`` goes in the message; those beyond a row's own count to its end.
    """

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    most: int
    starts: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Large:
    """A parameter that is searched by itself.

    Attributes:
        count: elements to choose; they stand at ``slot`` in the message.
        sample: positions whose ``tail``-th largest magnitude is the threshold of candidates; None: no sample.
        capacity: of the candidates.
    """

    start: int
    size: int
    count: int
    slot: int
    sample: Tensor | None
    tail: int
    capacity: int


@dataclass(frozen=True, eq=False)
class Plan:
    """How to choose ``counts[name]`` elements of each parameter: message slots stand in the layout's order."""

    layout: Layout
    counts: dict[str, int]
    total: int
    rows: tuple[Rows, ...]
    large: tuple[Large, ...]

    @staticmethod
    def of(layout: Layout, counts: Mapping[str, int], device: torch.device, exact: bool = False) -> Plan:
        """Kept with the layout.

        Args:
            counts: at most the parameter's size each.
            exact: search large parameters without a sample.
        """
        kept = tuple(counts[name] for name in layout.names)
        return layout.derive(("plan", kept, device, exact), lambda: _plan(layout, kept, device, exact))


def count_of(ratio: float, numel: int) -> int:
    """``ceil(ratio * numel)``, where a product that rounding put just above an integer counts as that integer.

    >>> count_of(0.01, 1000), count_of(0.01, 1001), count_of(0.07, 100), count_of(0.5, 0)
    (10, 11, 7, 0)
    """
    return min(numel, math.ceil(ratio * numel * (1 - 1e-12)))


def _plan(layout: Layout, counts: Sequence[int], device: torch.device, exact: bool) -> Plan:
    classes: dict[int, list[tuple[int, int, int, int, int]]] = {}
    large: list[Large] = []
    slot = 0
    for number, (name, count) in enumerate(zip(layout.names, counts, strict=True)):
        start, size = layout.offsets[name], layout.sizes[name]
        if size > ROW:
            large.append(_large(name, start, size, count, slot, device, exact))
        elif count:
            classes.setdefault((size - 1).bit_length(), []).append((number, start, size, count, slot))
        slot += count
    rows: list[Rows] = []
    for _, members in sorted(classes.items()):
        most = max(count for *_, count, _ in members)
        slots = torch.full((len(members), most), slot)
        for row, (_, _, _, count, first) in enumerate(members):
            slots[row, :count] = torch.arange(first, first + count)
        starts = torch.tensor([[start] for _, start, *_ in members])
        numbers, sizes = tuple(m[0] for m in members), tuple(m[2] for m in members)
        rows.append(Rows(numbers, sizes, max(sizes), most, starts.to(device), slots.view(-1).to(device)))
    return Plan(layout, dict(zip(layout.names, counts, strict=True)), slot, tuple(rows), tuple(large))


def _large(name: str, start: int, size: int, count: int, slot: int, device: torch.device, exact: bool) -> Large:
    """The sample, and how far to look, so that the candidates hold the ``count`` largest.

    The number of sampled elements among the ``count`` largest is binomial with mean ``inside``; with the
    ``tail``-th largest sample as threshold the candidates lack one of them only if that number reaches ``tail``,
    4.5 deviations and 4 above its mean (probability below 1e-5 for every ``inside``; few are then lacking).
    Beyond the capacity, again 5 deviations away, candidates are dropped in the order of their index.
    """
    if count and not exact:
        drawn = min(size // 8, math.ceil(TAIL * size / count))
        inside = drawn * count / size
        tail = math.ceil(inside + 4.5 * math.sqrt(inside) + 4)
        capacity = math.ceil((tail + 5 * math.sqrt(tail) + 12) * size / drawn)
        if capacity < size // 2:
            # One position in each of equal strata: distinct, ascending, and the same at every step.
            uniform = torch.rand(drawn, generator=generator("sample", name), dtype=torch.float64)
            positions = ((torch.arange(drawn) + uniform) * (size / drawn)).long().clamp_(max=size - 1)
            return Large(start, size, count, slot, positions.to(device), tail, capacity)
    return Large(start, size, count, slot, None, 0, size)


def largest(flat: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The elements of largest magnitude of each parameter, as many as the plan says.

    Zeros are never chosen: their slots are empty. Among equal magnitudes the choice is torch.topk's.

    Returns:
        ``(indices, values)``: int64 into ``flat``, and of its type (float32 for half types), ``[plan.total]``.

    >>> layout = Layout({"a": (4,), "b": (3,)})
    >>> plan = Plan.of(layout, {"a": 2, "b": 1}, torch.device("cpu"))
    >>> largest(torch.tensor([1., -5., 0., 2., 0., -1., 0.]), plan)
    (tensor([1, 3, 5]), tensor([-5.,  2., -1.]))
    """
    if flat.element_size() < 4:
        flat = flat.float()
    bits, mask = _bits(flat)
    # One more slot than the message has: where rows put what is beyond their count.
    indices = torch.empty(plan.total + 1, dtype=torch.int64, device=flat.device)
    found = torch.empty(plan.total + 1, dtype=bits.dtype, device=flat.device)
    if plan.rows:
        views = torch.split(bits, list(plan.layout.sizes.values()))
        for group in plan.rows:
            rows = _matrix([views[number] for number in group.numbers], group).bitwise_and_(mask)
            top = torch.topk(rows, group.most, dim=1)
            found[group.slots] = top.values.view(-1)
            indices[group.slots] = top.indices.add_(group.starts).view(-1)
    for part in plan.large:
        if part.count:
            here = slice(part.slot, part.slot + part.count)
            positions, magnitudes = _search(bits[part.start : part.start + part.size], part, mask)
            torch.add(positions, part.start, out=indices[here])
            found[here] = magnitudes
    indices, empty = indices[: plan.total], found[: plan.total] == 0
    indices.masked_fill_(empty, 0)
    return indices, flat.index_select(0, indices).masked_fill_(empty, 0)


def _bits(flat: Tensor) -> tuple[Tensor, int]:
    """The vector's bits as integers, and the mask that removes the sign."""
    if flat.element_size() == 8:
        return flat.view(torch.int64), (1 << 63) - 1
    return flat.view(torch.int32), (1 << 31) - 1


def _matrix(views: list[Tensor], group: Rows) -> Tensor:
    """Vectors as the rows of a matrix, zeros behind them."""
    rows = torch.zeros((len(views), group.length), dtype=views[0].dtype, device=views[0].device)
    widths = [width for size in group.sizes for width in (size, group.length - size)]
    torch._foreach_copy_(list(torch.split(rows.view(-1), widths)[::2]), views)
    return rows


def _search(bits: Tensor, part: Large, mask: int) -> tuple[Tensor, Tensor]:
    """Positions and magnitudes (as integers) of the ``part.count`` largest; magnitude 0: none."""
    if part.sample is None:
        top = torch.topk(bits & mask, part.count, sorted=False)
        return top.indices, top.values
    sampled = bits.index_select(0, part.sample).bitwise_and_(mask)
    threshold = torch.kthvalue(sampled, sampled.numel() - part.tail + 1).values.clamp_(min=1)
    if bits.device.type == "cpu":
        candidates = _reaching_on_cpu(bits, threshold, mask)[: part.capacity]
    else:
        candidates = reaching(bits & mask, threshold, part.capacity)
    magnitudes = bits.index_select(0, candidates.clamp(min=0)).bitwise_and_(mask).masked_fill_(candidates < 0, 0)
    lacking = part.count - candidates.numel()  # on the CPU there are as many as there are
    if lacking > 0:
        candidates = torch.cat([candidates, candidates.new_zeros(lacking)])
        magnitudes = torch.cat([magnitudes, magnitudes.new_zeros(lacking)])
    top = torch.topk(magnitudes, part.count, sorted=False)
    return candidates.index_select(0, top.indices), top.values


def reaching(magnitudes: Tensor, threshold: Tensor, capacity: int) -> Tensor:
    """Positions of the elements that are not below ``threshold``, ascending: the first ``capacity``, then -1.

    >>> reaching(torch.tensor([3, 1, 4, 1, 5]), torch.tensor(3), 4), reaching(torch.arange(9), torch.tensor(1), 2)
    (tensor([ 0,  2,  4, -1]), tensor([1, 2]))
    """
    chosen = magnitudes >= threshold
    slots = torch.cumsum(chosen, 0).sub_(1).clamp_(max=capacity).masked_fill_(~chosen, capacity)
    positions = torch.full((capacity + 1,), -1, device=magnitudes.device)
    # Only what is put at the end, to be cut off, meets with another.
    return positions.scatter_(0, slots, torch.arange(magnitudes.numel(), device=magnitudes.device))[:capacity]


def _reaching_on_cpu(bits: Tensor, threshold: Tensor, mask: int) -> Tensor:
    """The same, all of them, in the cache: numpy compares and finds several times faster than torch does."""
    source, limit = bits.numpy(), threshold.numpy()
    magnitudes = np.empty(min(CHUNK, source.size), source.dtype)
    chosen = np.empty(magnitudes.size, np.bool_)
    pieces = []
    for start in range(0, source.size, CHUNK):
        chunk = source[start : start + CHUNK]
        np.bitwise_and(chunk, chunk.dtype.type(mask), out=magnitudes[: chunk.size])
        np.greater_equal(magnitudes[: chunk.size], limit, out=chosen[: chunk.size])
        positions = np.flatnonzero(chosen[: chunk.size])
        positions += start
        pieces.append(positions)
    return torch.from_numpy(np.concatenate(pieces))


def shuffled(plan: Plan, seed: int, device: torch.device) -> Tensor:
    """Random elements of each parameter, all distinct, as many as the plan says, by (seed, name) alone.

    Slot i of a parameter of n elements holds image i of a keyed permutation of n, "swap or not" (Hoang, Morris,
    Rogaway 2012) after a random rotation: exactly uniform in each slot, and free of host waits.

    >>> layout = Layout({"a": (100,), "b": (3,)})
    >>> chosen = shuffled(Plan.of(layout, {"a": 50, "b": 3}, torch.device("cpu")), 1, torch.device("cpu"))
    >>> len(set(chosen[:50].tolist())), sorted(chosen[50:].tolist())
    (50, [100, 101, 102])
    """

    def make() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        layout = plan.layout
        sizes = torch.tensor([max(1, layout.sizes[name]) for name in layout.names], dtype=torch.int64, device=device)
        names = torch.tensor([key(name) for name in layout.names], dtype=torch.int64, device=device)
        counts = torch.tensor([plan.counts[name] for name in layout.names], dtype=torch.int64, device=device)
        owner = torch.repeat_interleave(counts, output_size=plan.total)
        first = torch.cumsum(counts, 0) - counts
        start = torch.tensor([layout.offsets[name] for name in layout.names], dtype=torch.int64, device=device)
        number = torch.arange(plan.total, device=device) - first[owner]
        return sizes, names, owner, sizes.int()[owner], number.int(), start[owner]

    sizes, names, owner, size, number, start = plan.layout.derive(("shuffle", plan, device), make)
    x = number
    for round_ in range(ROUNDS + 1):
        salt = _mixed(names ^ key(seed, round_))
        pivot = ((salt >> 1) & ((1 << 62) - 1)).remainder_(sizes).int()[owner]
        if round_ == 0:
            x = x + pivot
            x = torch.where(x >= size, x - size, x)
            continue
        other = pivot.sub_(x)
        other.add_((other >> 31).bitwise_and_(size))
        swap = torch.maximum(x, other).add_((_mixed(salt) & 0x7FFFFFFF).int()[owner]).mul_(-1640531535)
        swap.bitwise_xor_(swap >> 15).mul_(-2048144789)
        x = torch.where(swap.bitwise_xor_(swap >> 13) & 1 == 1, other, x)
    return start + x


def _mixed(x: Tensor) -> Tensor:
    """int64 -> int64, each bit depending on all; the finalizer of splitmix64 up to the signs of its shifts."""
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


def poison(flat: Tensor, layout: Layout) -> Tensor:
    """For each parameter 0, or NaN where an element is not finite: what messages that would lose it add.

    >>> poison(torch.tensor([1., math.inf, 2.]), Layout({"a": (2,), "b": (1,)}))
    tensor([nan, 0.])
    """
    flags = torch.zeros(len(layout.names), dtype=flat.dtype, device=flat.device)
    if flat.device.type == "cpu":  # the host may look: a finite sum has finite terms
        if not math.isfinite(flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).item()):
            parts = torch.split(flat, list(layout.sizes.values()))
            flags.masked_fill_(~torch.stack([torch.isfinite(part).all() for part in parts]), math.nan)
        return flags
    count = torch.zeros(flat.numel() + 1, dtype=torch.int32, device=flat.device)
    torch.cumsum(~torch.isfinite(flat), 0, dtype=torch.int32, out=count[1:])
    ends = layout.derive(("ends", flat.device), lambda: _ends(layout, flat.device))
    return flags.masked_fill_(count[ends[1:]] != count[ends[:-1]], math.nan)


def _ends(layout: Layout, device: torch.device) -> Tensor:
    return torch.tensor([*layout.offsets.values(), layout.numel], dtype=torch.int64, device=device)


def pack_pairs(indices: Tensor, values: Tensor) -> Tensor:
    """One message of both: int32, ``[2 K]`` (``[3 K]`` for float64 values), indices first.

    >>> unpack_pairs(pack_pairs(torch.tensor([3, 0]), torch.tensor([1.5, 0.])), torch.float32)
    (tensor([3, 0], dtype=torch.int32), tensor([1.5000, 0.0000]))
    """
    return torch.cat([indices.to(torch.int32), values.view(torch.int32)])


def unpack_pairs(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of messages ``[..., 2 K]`` the indices and the values of type ``dtype``, ``[..., K]``."""
    width = message.shape[-1] // (1 + dtype.itemsize // 4)
    values = message[..., width:]
    return message[..., :width], values.contiguous().view(dtype)


def add_up(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """A flat vector of ``numel`` zeros to which the rows of ``values`` ``[N, K]`` were added, in their order.

    >>> add_up(torch.tensor([[0, 2], [2, 0]]), torch.tensor([[1., 2.], [4., 0.]]), 3)
    tensor([1., 0., 6.])
    """
    total = torch.zeros(numel, dtype=values.dtype, device=values.device)
    if numel:
        for where, what in zip(indices, values, strict=True):
            total.index_add_(0, where, what)
    return total
