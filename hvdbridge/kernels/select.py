"""Sparse messages of fixed capacity: choose elements of a flat vector, parameter by parameter, and add them up.

Rules:

1. What is chosen depends on the parameter alone (its name, its values, its count), not on its neighbours.
2. Shapes depend on the plan, never on values. A slot without an element is (index 0, value 0).
3. Magnitudes are compared as integers: the bits of a float without its sign grow with it, inf is above all
   numbers and NaN above inf. So NaN and inf are chosen first, and travel.
4. Vectors of several ranks are added in rank order.
5. Indices travel as int32: a vector that has larger ones is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.fused import on_cuda
from hvdbridge.kernels.native import compiled
from hvdbridge.kernels.random import generator, key
from hvdbridge.policy.bucket import Layout

Array = np.ndarray[Any, Any]

ROW = 32768
"""Parameters of at most so many elements are searched together, as rows of a matrix; larger ones by themselves."""
KERNEL = 1 << 24
"""Elements of a parameter from which on a device's kernels search it: they save bytes, and make many more launches than
``torch.topk``. Measured on an H100, where of fewer elements that took less time."""
CHUNK = 131072
"""Elements that the CPU looks through at a time: they stay in its cache."""
TAIL = 400
"""Elements of a sample that lie among the k largest, where the parameter is large enough."""
ROUNDS = 20
"""Of the shuffle; each halves the chance that an element has not moved."""
INDICES = 2**31 - 1
"""That an int32 counts."""


@dataclass(frozen=True)
class Rows:
    """Parameters of similar size, one per row: ``length`` elements, ``most`` slots.

    Attributes:
        numbers: of the parameters, among those of the layout.
        counts, starts, first: of each row the elements to choose, its offset in the vector, its first slot.
    """

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    most: int
    counts: Tensor
    starts: Tensor
    first: Tensor


@dataclass(frozen=True)
class Large:
    """A parameter that is searched by itself.

    Attributes:
        count: elements to choose; they stand at ``slot`` in the message.
        drawn: elements of a sample, whose ``tail``-th largest magnitude is the threshold of candidates; 0: no sample.
        room: for candidates where the host may not ask how many there are.
    """

    start: int
    size: int
    count: int
    slot: int
    drawn: int
    tail: int
    room: int

    def sample(self) -> Array:
        """Positions of the sample: one in each of equal strata, so distinct and ascending; the same at every step."""
        return _sample(self.size, self.drawn)


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
        if size > ROW and count:
            large.append(_large(start, size, count, slot, exact))
        elif count:
            classes.setdefault((size - 1).bit_length(), []).append((number, start, size, count, slot))
        slot += count
    rows: list[Rows] = []
    several = [members for _, members in sorted(classes.items())]
    if device.type == "cpu":  # as many rows at a time as the cache holds
        pieces = [(members, max(1, 2 * CHUNK >> bits)) for bits, members in sorted(classes.items())]
        several = [members[i : i + step] for members, step in pieces for i in range(0, len(members), step)]
    for members in several:
        most = max(count for *_, count, _ in members)
        numbers, sizes = tuple(m[0] for m in members), tuple(m[2] for m in members)
        own, starts, first_slots = (torch.tensor([m[i] for m in members], device=device) for i in (3, 1, 4))
        rows.append(Rows(numbers, sizes, max(sizes), most, own, starts, first_slots))
    return Plan(layout, dict(zip(layout.names, counts, strict=True)), slot, tuple(rows), tuple(large))


def _large(start: int, size: int, count: int, slot: int, exact: bool) -> Large:
    """The sample, and how far to look, so that the candidates hold the ``count`` largest.

    The number of sampled elements among the ``count`` largest is binomial with mean ``inside``; with the
    ``tail``-th largest sample as threshold the candidates lack one of them only if that number reaches ``tail``,
    4.5 deviations and 4 above its mean (probability below 1e-5; few are then lacking). More than ``room`` are larger
    than the threshold only if of so many fewer than ``tail`` were sampled, 6 deviations below their mean.
    """
    if not exact:
        drawn = min(size // 32, math.ceil(TAIL * size / count))
        inside = drawn * count / size
        tail = math.ceil(inside + 4.5 * math.sqrt(inside) + 4)
        if tail < drawn // 2:
            most = (3 + math.sqrt(tail + 9)) ** 2  # less six times its square root it is the tail
            return Large(start, size, count, slot, drawn, tail, min(size, math.ceil(most * size / drawn)))
    return Large(start, size, count, slot, 0, 0, 0)


@cache
def _points(number: int) -> Array:
    """The points of some strata: one table for all parameters, which needs no more than a 16th of the largest."""
    uniform = torch.rand(CHUNK, generator=generator("sample", number), dtype=torch.float64, device="cpu")
    points: Array = np.arange(number * CHUNK, (number + 1) * CHUNK) + uniform.numpy()
    return points


def _sample(size: int, drawn: int) -> Array:
    return np.minimum((_strata(drawn) * (size / drawn)).astype(np.int64), size - 1)


@cache
def _sample_on(size: int, drawn: int, device: torch.device) -> Tensor:
    """Kept for good (8 bytes each, at most a 16th of a parameter of that size): bringing them to a GPU would have the
    host wait in every step."""
    return torch.from_numpy(_sample(size, drawn)).to(device)


def _strata(count: int) -> Array:
    """A random point in each of ``count`` strata of length 1, ascending."""
    if count <= CHUNK:
        return _points(0)[:count]
    return np.concatenate([_points(number) for number in range(-(-count // CHUNK))])[:count]


def check_indices(numel: int, what: str, remedy: str) -> None:
    """By the size alone, so that all ranks refuse alike."""
    if numel > INDICES:
        raise ConfigurationError(f"{what} of {numel:,} elements: more than 32-bit indices can count. {remedy}")


def largest(flat: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The elements of largest magnitude of each parameter, as many as the plan says.

    Zeros are never chosen: their slots are empty. Which of equal magnitudes are chosen is the same at every run: those
    that stand first, but on a device only of parameters that its kernels search; of others their order differs, too.

    Returns:
        ``(indices, values)``: int64 into ``flat``, and of its type (float32 for half types), ``[plan.total]``.

    Raises:
        ConfigurationError: indices into ``flat`` would not fit into the int32 that they travel as.

    >>> layout = Layout({"a": (4,), "b": (3,)})
    >>> plan = Plan.of(layout, {"a": 2, "b": 1}, torch.device("cpu"))
    >>> largest(torch.tensor([1., -5., 0., 2., 0., -1., 0.]), plan)
    (tensor([1, 3, 5]), tensor([-5.,  2., -1.]))
    """
    check_indices(flat.numel(), "a bucket", "Make buckets smaller (bucket_mb), or partition(...) a parameter out")
    if flat.element_size() < 4:
        flat = flat.float()
    bits, mask = _bits(flat)
    if flat.device.type == "cpu":
        indices, empty = _largest_on_cpu(bits, plan, mask)
    else:
        takes = bits.is_cuda and bits.dtype == torch.int32 and bits.is_contiguous()
        kernels = on_cuda(bits.device) if takes and any(part.size >= KERNEL for part in plan.large) else None
        indices, empty = _largest(bits, plan, mask, kernels)
    return indices, flat.index_select(0, indices).masked_fill_(empty, 0)


def _largest(bits: Tensor, plan: Plan, mask: int, kernels: ModuleType | None) -> tuple[Tensor, Tensor]:
    """Indices, and which slots are empty: without a look at any value by the host. By ``kernels`` where a sample tells
    them what to look for in many, else by comparing all."""
    # One more slot than the message has: where rows put what is beyond their count.
    indices = torch.empty(plan.total + 1, dtype=torch.int64, device=bits.device)
    found = torch.empty(plan.total + 1, dtype=bits.dtype, device=bits.device)
    for group, rows in _matrices(bits, plan, mask):
        top = torch.topk(rows, group.most, dim=1)
        place = torch.arange(group.most, device=bits.device)
        slots = torch.where(place < group.counts[:, None], group.first[:, None] + place, plan.total)
        found[slots] = top.values
        indices[slots] = top.indices.add_(group.starts[:, None])
    for part in plan.large:
        here, piece = slice(part.slot, part.slot + part.count), bits[part.start : part.start + part.size]
        sampled = kernels if part.drawn and part.size >= KERNEL else None
        chosen = _among_candidates(piece, part, mask, sampled) if sampled else None
        found[here], places = chosen or torch.topk(piece & mask, part.count, sorted=False)
        torch.add(places, part.start, out=indices[here])
    indices, empty = indices[: plan.total], found[: plan.total] == 0
    return indices.masked_fill_(empty, 0), empty


def _among_candidates(bits: Tensor, part: Large, mask: int, kernels: ModuleType) -> tuple[Tensor, Tensor] | None:
    """Magnitudes and positions of the largest; of equal ones those that stand first, and magnitudes of 0 where there
    are fewer. What :func:`_largest_on_cpu` finds, but those that are equal to the limit stand behind the others. None:
    the kernel does not compile."""
    sampled = bits.index_select(0, _sample_on(part.size, part.drawn, bits.device)).bitwise_and_(mask)
    limit = torch.topk(sampled, part.tail).values[-1:].clamp_(min=1)
    positions = torch.full((part.room,), -1, dtype=torch.int32, device=bits.device)
    if kernels.reaching(bits, limit, positions) is None:
        return None
    missing = positions < 0
    positions.masked_fill_(missing, 0)
    magnitudes = bits.index_select(0, positions).bitwise_and_(mask).masked_fill_(missing, 0)
    least = torch.topk(magnitudes, part.count, sorted=False).values.min()
    larger, equal = magnitudes > least, magnitudes == least
    left = part.count - larger.sum(dtype=torch.int32)
    chosen = larger.logical_or_(equal.logical_and_(torch.cumsum(equal, 0, dtype=torch.int32) <= left))
    numbers = torch.arange(1, part.count + 1, dtype=torch.int32, device=bits.device)
    places = torch.searchsorted(torch.cumsum(chosen, 0, dtype=torch.int32), numbers, out_int32=True)
    return magnitudes.index_select(0, places), positions.index_select(0, places)


def _largest_on_cpu(bits: Tensor, plan: Plan, mask: int) -> tuple[Tensor, Tensor]:
    """The same, where the host may look: numpy finds and partitions several times faster than torch does."""
    indices = torch.zeros(plan.total, dtype=torch.int64, device=bits.device)
    empty = torch.ones(plan.total, dtype=torch.bool, device=bits.device)
    target, unfilled = indices.numpy(), empty.numpy()
    for group, matrix in _matrices(bits, plan, mask):
        rows, counts = matrix.numpy(), group.counts.numpy()
        top = np.sort(np.partition(rows, group.length - group.most, axis=1)[:, group.length - group.most :], axis=1)
        limits = np.maximum(np.take_along_axis(top, (group.most - counts)[:, None], axis=1), 1)
        positions = np.flatnonzero(rows >= limits)
        ends = np.searchsorted(positions, np.arange(len(rows) + 1) * group.length)
        if (np.diff(ends) > counts).any():  # of the elements that are equal to the limit some are too many
            pieces = [positions[a:b] for a, b in pairwise(ends)]
            flat = rows.reshape(-1)
            pieces = [p[_first(flat[p], c)] for p, c in zip(pieces, counts.tolist(), strict=True)]
            positions = np.concatenate(pieces)
            ends = np.searchsorted(positions, np.arange(len(rows) + 1) * group.length)
        row = np.repeat(np.arange(len(rows)), np.diff(ends))
        slots = np.arange(positions.size) + (group.first.numpy() - ends[:-1])[row]
        target[slots] = positions + (group.starts.numpy() - np.arange(len(rows)) * group.length)[row]
        unfilled[slots] = False
    source = bits.numpy()
    for part in plan.large:
        piece = source[part.start : part.start + part.size]
        limit = piece.dtype.type(1)
        if part.drawn:
            sampled = piece[part.sample()] & piece.dtype.type(mask)
            limit = max(limit, np.partition(sampled, -part.tail)[-part.tail])
        positions = reaching(piece, int(limit), part.count)
        positions = positions[_first(piece[positions] & piece.dtype.type(mask), part.count)]
        here = slice(part.slot, part.slot + positions.size)
        np.add(positions, part.start, out=target[here])
        unfilled[here] = False
    return indices, empty


def _first(magnitudes: Array, count: int) -> Array:
    """Where the ``count`` largest stand, ascending; all where there are no more."""
    if magnitudes.size <= count:
        return np.arange(magnitudes.size)
    limit = np.partition(magnitudes, -count)[-count]
    chosen = np.flatnonzero(magnitudes >= limit)
    if excess := chosen.size - count:
        equal = np.flatnonzero(magnitudes[chosen] == limit)
        chosen = np.delete(chosen, equal[-excess:])
    return chosen


def _bits(flat: Tensor) -> tuple[Tensor, int]:
    """The vector's bits as integers, and the mask that removes the sign."""
    if flat.element_size() == 8:
        return flat.view(torch.int64), (1 << 63) - 1
    return flat.view(torch.int32), (1 << 31) - 1


def _matrices(bits: Tensor, plan: Plan, mask: int) -> Iterator[tuple[Rows, Tensor]]:
    """The magnitudes of each group of parameters as the rows of a matrix, zeros behind them."""
    if not plan.rows:
        return
    views = torch.split(bits, list(plan.layout.sizes.values()))
    for group in plan.rows:
        rows = torch.empty((len(group.numbers), group.length), dtype=bits.dtype, device=bits.device).zero_()
        widths = [width for size in group.sizes for width in (size, group.length - size)]
        mine = list(torch.split(rows.view(-1), widths)[::2])
        torch._foreach_copy_(mine, [views[number] for number in group.numbers])
        yield group, rows.bitwise_and_(mask)


def reaching(bits: Array, limit: int, count: int) -> Array:
    """Positions of the elements whose magnitude is not below ``limit``, ascending; some more than ``count``, mostly.

    Args:
        bits: of float32 or float64 numbers, as integers of as many bytes.
    """
    mask = np.iinfo(bits.dtype).max
    if bits.itemsize == 4 and (native := compiled()):
        found = np.empty(2 * count + 64, np.int64)
        number = native.reaching(bits.ctypes.data, bits.size, limit, mask, found.ctypes.data, found.size)
        if number >= 0:
            return found[:number]
    magnitudes, chosen = np.empty(CHUNK, bits.dtype), np.empty(CHUNK, np.bool_)
    pieces = []
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        np.bitwise_and(chunk, mask, out=magnitudes[: chunk.size])
        np.greater_equal(magnitudes[: chunk.size], limit, out=chosen[: chunk.size])
        positions = np.flatnonzero(chosen[: chunk.size])
        positions += start
        pieces.append(positions)
    return np.concatenate(pieces)


def owners(counts: Tensor, total: int) -> Tensor:
    """Who has each slot, where the first ``counts[0]`` are the first's: int64 ``[total]``. The host does not wait.

    >>> owners(torch.tensor([2, 0, 1]), 3)
    tensor([0, 0, 2])
    """
    if counts.device.type == "cpu":
        return torch.repeat_interleave(counts, output_size=total)
    # A GPU's has one warp for each owner, see Layout.spread
    slots = torch.arange(total, dtype=torch.int64, device=counts.device)
    return torch.searchsorted(torch.cumsum(counts, 0), slots, right=True)


def shuffled(plan: Plan, seed: int, device: torch.device) -> Tensor:
    """Random elements of each parameter, all distinct, as many as the plan says, by (seed, name) alone.

    Slot i of a parameter of n elements holds image i of a keyed permutation of n, "swap or not" (Hoang, Morris,
    Rogaway 2012) after a random rotation: exactly uniform in each slot, and free of host waits.

    >>> layout = Layout({"a": (100,), "b": (3,)})
    >>> chosen = shuffled(Plan.of(layout, {"a": 50, "b": 3}, torch.device("cpu")), 1, torch.device("cpu"))
    >>> len(set(chosen[:50].tolist())), sorted(chosen[50:].tolist())
    (50, [100, 101, 102])
    """

    def make() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        layout = plan.layout
        check_indices(max(layout.sizes.values(), default=0), "a parameter", "partition(...) it out")
        sizes = torch.tensor([max(1, layout.sizes[name]) for name in layout.names], dtype=torch.int64, device=device)
        names = torch.tensor([key(name) for name in layout.names], dtype=torch.int64, device=device)
        counts = torch.tensor([plan.counts[name] for name in layout.names], dtype=torch.int64, device=device)
        first = torch.cumsum(counts, 0) - counts
        start = torch.tensor([layout.offsets[name] for name in layout.names], dtype=torch.int64, device=device)
        return sizes, names, counts, first.int(), start

    sizes, names, counts, first, start = plan.layout.derive(("shuffle", plan, device), make)
    owner = owners(counts, plan.total)
    # By round and parameter: 62 bits of pivot, 31 of salt.
    # As numbers, not as a tensor: bringing one to a GPU would wait for its stream
    drawn = _mixed(torch.stack([names ^ key(seed, round_) for round_ in range(ROUNDS + 1)]))
    pivots = ((drawn >> 1) & ((1 << 62) - 1)).remainder_(sizes).int()
    salts = (_mixed(drawn) & 0x7FFFFFFF).int()
    kernels = on_cuda(device) if device.type == "cuda" else None
    tables = owner, sizes.int(), first, pivots, salts
    images = kernels.shuffle(*tables) if kernels else None
    return start.index_select(0, owner).add_(swapped(*tables) if images is None else images)


def swapped(owner: Tensor, sizes: Tensor, first: Tensor, pivots: Tensor, salts: Tensor) -> Tensor:
    """Where the shuffle brings each slot's element, within its parameter: int32 ``[slots]``.

    Args:
        owner: the parameter of each slot, int64 ``[slots]``.
        sizes, first: elements and first slot of each parameter, int32 ``[parameters]``.
        pivots, salts: int32 ``[rounds + 1, parameters]``; the first pivot is the rotation, the first salt nothing.
    """
    size = sizes.index_select(0, owner)
    x = torch.arange(owner.numel(), dtype=torch.int32, device=owner.device) - first.index_select(0, owner)
    x = x.sub_(size).add_(pivots[0].index_select(0, owner))  # never more than an int32 holds
    x.add_((x >> 31).bitwise_and_(size))
    for pivot, salt in zip(pivots[1:], salts[1:], strict=True):
        other = pivot.index_select(0, owner).sub_(x)
        other.add_((other >> 31).bitwise_and_(size))
        swap = torch.maximum(x, other).add_(salt.index_select(0, owner)).mul_(-1640531535)
        swap.bitwise_xor_(swap >> 15).mul_(-2048144789)
        x = torch.where(swap < 0, other, x)
    return x


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
    return flags.masked_fill_(~layout.finite(flat), math.nan)


def pack_pairs(indices: Tensor, values: Tensor) -> Tensor:
    """One message of both: int32, ``[2 K]`` (``[3 K]`` for float64 values), values first.

    >>> unpack_pairs(pack_pairs(torch.tensor([3, 0]), torch.tensor([1.5, 0.])), torch.float32)
    (tensor([3, 0], dtype=torch.int32), tensor([1.5000, 0.0000]))
    """
    return torch.cat([values.view(torch.int32), indices.to(torch.int32)])


def unpack_pairs(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of messages ``[..., 2 K]`` the indices and the values of type ``dtype``, ``[..., K]``."""
    words = dtype.itemsize // 4
    count = message.shape[-1] // (words + 1)
    values = message[..., : count * words].reshape(-1)
    if words > 1:
        values = values.clone()  # where they lie aligned
    return message[..., count * words :], values.view(dtype).view(*message.shape[:-1], count)


def add_up(pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor) -> Tensor:
    """Zeros to which sparse vectors (indices and values) were added, in their order: in ``out``, flat, of their type.

    >>> first, second = (torch.tensor([0, 2]), torch.tensor([1., 2.])), (torch.tensor([2]), torch.tensor([4.]))
    >>> add_up([first, second], torch.empty(3))
    tensor([1., 0., 6.])
    """
    out.zero_()
    if out.numel():
        for indices, values in pairs:
            out.index_add_(0, indices, values)
    return out
