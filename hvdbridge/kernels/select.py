"""Sparse messages of fixed capacity: selection of elements of a flat vector per parameter, and sums of messages.

Rules:

1. The selection from a parameter depends on this parameter alone (name, values, count), not on its neighbors.
2. Shapes depend on the plan, never on values. A slot without an element holds index 0 and value 0.
3. Magnitudes are compared as integers: without the sign, a float's bits grow with its magnitude, inf is above all
   finite numbers, and NaN above inf. So NaN and inf are selected first, and reach the other ranks.
4. Vectors of several ranks are added in rank order.
5. Indices are sent as int32. Vectors that need larger indices are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdbridge.deprecated import moved_names
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.candidates import CHUNK, LargeParam, Search, large_param
from hvdbridge.kernels.fused import on_cuda
from hvdbridge.kernels.native import compiled
from hvdbridge.policy.bucket import Layout

Array = np.ndarray[Any, Any]

MAX_ROW = 32768
"""Parameters of at most this many elements are searched together, as rows of a matrix; larger ones separately."""
MAX_INDEX = 2**31 - 1
"""Largest int32."""


@dataclass(frozen=True)
class RowGroup:
    """Parameters of similar size, one per row of a matrix ``[parameters, length]``.

    Attributes:
        numbers: positions of the parameters in the layout.
        sizes: number of elements of each parameter.
        length: number of columns, the largest size.
        k: largest number of elements to select from a row.
        counts, starts, first: per row, number of elements to select, offset in the vector, and first message slot.
    """

    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    length: int
    k: int
    counts: Tensor
    starts: Tensor
    first: Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan to select ``counts[name]`` elements of each parameter. The message's slots are in the layout's order.

    Attributes:
        total: number of slots.
        rows, large: how each parameter is searched; see :data:`MAX_ROW`.
    """

    layout: Layout
    counts: dict[str, int]
    total: int
    rows: tuple[RowGroup, ...]
    large: tuple[LargeParam, ...]

    @staticmethod
    def of(layout: Layout, counts: Mapping[str, int], device: torch.device, exact: bool = False) -> Plan:
        """Return the plan for these arguments; it is cached with the layout.

        Args:
            counts: number of elements to select from each parameter, at most its size.
            exact: search large parameters without a sample.
        """
        ordered = tuple(counts[name] for name in layout.names)
        return layout.derive(("plan", ordered, device, exact), lambda: _plan(layout, ordered, device, exact))


def count_of(ratio: float, numel: int) -> int:
    """Return ``ceil(ratio * numel)``; products just above an integer, by rounding errors, count as that integer.

    >>> count_of(0.01, 1000), count_of(0.01, 1001), count_of(0.07, 100), count_of(0.5, 0)
    (10, 11, 7, 0)
    """
    return min(numel, math.ceil(ratio * numel * (1 - 1e-12)))


def _plan(layout: Layout, counts: Sequence[int], device: torch.device, exact: bool) -> Plan:
    classes: dict[int, list[tuple[int, int, int, int, int]]] = {}
    large: list[LargeParam] = []
    slot = 0
    for number, (name, count) in enumerate(zip(layout.names, counts, strict=True)):
        start, size = layout.offsets[name], layout.sizes[name]
        if size > MAX_ROW and count:
            large.append(large_param(start, size, count, slot, exact))
        elif count:
            classes.setdefault((size - 1).bit_length(), []).append((number, start, size, count, slot))
        slot += count
    rows: list[RowGroup] = []
    groups = [members for _, members in sorted(classes.items())]
    if device.type == "cpu":  # only as many rows per group as fit into the cache
        chunked = [(members, max(1, 2 * CHUNK >> bits)) for bits, members in sorted(classes.items())]
        groups = [members[i : i + step] for members, step in chunked for i in range(0, len(members), step)]
    for members in groups:
        max_count = max(count for *_, count, _ in members)
        numbers, sizes = tuple(m[0] for m in members), tuple(m[2] for m in members)
        row_counts, starts, first_slots = (torch.tensor([m[i] for m in members], device=device) for i in (3, 1, 4))
        rows.append(RowGroup(numbers, sizes, max(sizes), max_count, row_counts, starts, first_slots))
    return Plan(layout, dict(zip(layout.names, counts, strict=True)), slot, tuple(rows), tuple(large))


def check_indices(numel: int, what: str, remedy: str) -> None:
    """Check that int32 indices suffice. The check depends on the size alone, so all ranks get the same result.

    Raises:
        ConfigurationError: ``numel`` exceeds the largest int32.
    """
    if numel > MAX_INDEX:
        raise ConfigurationError(f"{what} of {numel:,} elements: more than 32-bit indices can count. {remedy}")


def largest(flat: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Select the elements of largest magnitude of each parameter, as many as the plan says.

    Zeros are never selected; their slots stay empty. The selection among equal magnitudes is the same in every run.
    CPUs select the first ones, and so do a device's kernels. For parameters that these do not search, a device may
    select others, in any order.

    Returns:
        ``(indices, values)``, ``[plan.total]`` each: int64 indices into ``flat``, and values of its type (float32 for
        half types).

    Raises:
        ConfigurationError: the indices into ``flat`` do not fit into int32, in which they are sent.

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
        fits = bits.is_cuda and bits.dtype == torch.int32 and bits.is_contiguous()
        listed = any(part.listed for part in plan.large)
        indices, empty = _largest(bits, plan, mask, bool(fits and listed and on_cuda(bits.device)))
    return indices, flat.index_select(0, indices).masked_fill_(empty, 0)


def _largest(bits: Tensor, plan: Plan, mask: int, kernels: bool = False) -> tuple[Tensor, Tensor]:
    """Return indices, and which slots are empty, both ``[plan.total]``, without a device-to-host synchronization.

    Large parameters that are :attr:`~.LargeParam.listed` are searched by Triton's kernels, if ``kernels``; all others
    by ``torch.topk``.
    """
    # The slot after the message's last receives the columns beyond a row's count.
    indices = torch.empty(plan.total + 1, dtype=torch.int64, device=bits.device)
    magnitudes = torch.empty(plan.total + 1, dtype=bits.dtype, device=bits.device)
    row_slots = plan.layout.derive(("row slots", plan), lambda: _row_slots(plan))
    for (group, rows), slots in zip(_matrices(bits, plan, mask), row_slots, strict=True):
        top = torch.topk(rows, group.k, dim=1)
        magnitudes[slots] = top.values
        indices[slots] = top.indices.add_(group.starts[:, None])
    done = kernels and _search_listed(bits, plan, mask, magnitudes, indices)
    for part in plan.large:
        if not (done and part.listed):
            own_slots, values = slice(part.slot, part.slot + part.count), bits[part.start : part.start + part.size]
            torch.topk(values & mask, part.count, sorted=False, out=(magnitudes[own_slots], indices[own_slots]))
            indices[own_slots] += part.start
    indices, empty = indices[: plan.total], magnitudes[: plan.total] == 0
    return indices.masked_fill_(empty, 0), empty


def _row_slots(plan: Plan) -> list[Tensor]:
    """Return for each group of rows the slots of its elements, ``[parameters, k]``; ``total`` beyond a row's count."""
    columns = [(group, torch.arange(group.k, device=group.counts.device)) for group in plan.rows]
    return [torch.where(i < g.counts[:, None], g.first[:, None] + i, plan.total) for g, i in columns]


def _search_listed(bits: Tensor, plan: Plan, mask: int, magnitudes: Tensor, indices: Tensor) -> bool:
    """Write the largest elements of the large parameters that are listed. Returns False if no kernel compiles."""
    from hvdbridge.kernels import cuda_select

    parts = [part for part in plan.large if part.listed]
    if not parts:
        return False
    search = plan.layout.derive(("listed", plan), lambda: Search(parts, bits.device))
    if (found := search.largest(bits, mask, cuda_select)) is None:
        return False
    counts = [part.count for part in search.parts]
    for target, values in ((magnitudes, found[0]), (indices, found[1].to(torch.int64))):
        slots = [target[part.slot : part.slot + part.count] for part in search.parts]
        torch._foreach_copy_(slots, list(values.split(counts)))
    return True


def _largest_on_cpu(bits: Tensor, plan: Plan, mask: int) -> tuple[Tensor, Tensor]:
    """Like :func:`_largest`, by numpy, which searches and partitions faster than torch; the host may read values."""
    indices = torch.zeros(plan.total, dtype=torch.int64, device=bits.device)
    empty = torch.ones(plan.total, dtype=torch.bool, device=bits.device)
    target, empty_flags = indices.numpy(), empty.numpy()
    for group, matrix in _matrices(bits, plan, mask):
        rows, counts = matrix.numpy(), group.counts.numpy()
        top = np.sort(np.partition(rows, group.length - group.k, axis=1)[:, group.length - group.k :], axis=1)
        limits = np.maximum(np.take_along_axis(top, (group.k - counts)[:, None], axis=1), 1)
        positions = np.flatnonzero(rows >= limits)
        ends = np.searchsorted(positions, np.arange(len(rows) + 1) * group.length)
        if (np.diff(ends) > counts).any():  # too many elements are equal to a limit
            row_parts = [positions[a:b] for a, b in pairwise(ends)]
            flat = rows.reshape(-1)
            row_parts = [p[_top_positions(flat[p], c)] for p, c in zip(row_parts, counts.tolist(), strict=True)]
            positions = np.concatenate(row_parts)
            ends = np.searchsorted(positions, np.arange(len(rows) + 1) * group.length)
        row = np.repeat(np.arange(len(rows)), np.diff(ends))
        slots = np.arange(positions.size) + (group.first.numpy() - ends[:-1])[row]
        target[slots] = positions + (group.starts.numpy() - np.arange(len(rows)) * group.length)[row]
        empty_flags[slots] = False
    source = bits.numpy()
    for part in plan.large:
        values = source[part.start : part.start + part.size]
        threshold = values.dtype.type(1)
        if part.sample_size:
            sample = values[part.sample_positions()] & values.dtype.type(mask)
            threshold = max(threshold, np.partition(sample, -part.tail)[-part.tail])
        positions = threshold_positions(values, int(threshold), part.count)
        positions = positions[_top_positions(values[positions] & values.dtype.type(mask), part.count)]
        own_slots = slice(part.slot, part.slot + positions.size)
        np.add(positions, part.start, out=target[own_slots])
        empty_flags[own_slots] = False
    return indices, empty


def _top_positions(magnitudes: Array, count: int) -> Array:
    """Return the positions of the ``count`` largest, ascending; of equal ones the first; all if there are no more."""
    if magnitudes.size <= count:
        return np.arange(magnitudes.size)
    limit = np.partition(magnitudes, -count)[-count]
    selected = np.flatnonzero(magnitudes >= limit)
    if excess := selected.size - count:
        equal = np.flatnonzero(magnitudes[selected] == limit)
        selected = np.delete(selected, equal[-excess:])
    return selected


def _bits(flat: Tensor) -> tuple[Tensor, int]:
    """Return the vector's bits as integers of the same size, and the mask that removes the sign."""
    if flat.element_size() == 8:
        return flat.view(torch.int64), (1 << 63) - 1
    return flat.view(torch.int32), (1 << 31) - 1


def _matrices(bits: Tensor, plan: Plan, mask: int) -> Iterator[tuple[RowGroup, Tensor]]:
    """Yield each group of small parameters with their magnitudes as a matrix's rows, padded with zeros."""
    if not plan.rows:
        return
    views = torch.split(bits, list(plan.layout.sizes.values()))
    for group in plan.rows:
        rows = torch.empty((len(group.numbers), group.length), dtype=bits.dtype, device=bits.device).zero_()
        widths = [width for size in group.sizes for width in (size, group.length - size)]
        targets = list(torch.split(rows.view(-1), widths)[::2])
        torch._foreach_copy_(targets, [views[number] for number in group.numbers])
        yield group, rows.bitwise_and_(mask)


def threshold_positions(bits: Array, limit: int, count: int) -> Array:
    """Return the positions of the elements whose magnitude is at least ``limit``, ascending.

    Args:
        bits: float32 or float64 numbers as integers of the same size.
        limit: bits of a magnitude.
        count: expected number of positions, for the size of a buffer; there may be more.
    """
    mask = np.iinfo(bits.dtype).max
    if bits.itemsize == 4 and (native := compiled()):
        buffer = np.empty(2 * count + 64, np.int64)
        size = native.threshold_positions(bits.ctypes.data, bits.size, limit, mask, buffer.ctypes.data, buffer.size)
        if size >= 0:
            return buffer[:size]
    magnitudes, flags = np.empty(CHUNK, bits.dtype), np.empty(CHUNK, np.bool_)
    parts = []
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        np.bitwise_and(chunk, mask, out=magnitudes[: chunk.size])
        np.greater_equal(magnitudes[: chunk.size], limit, out=flags[: chunk.size])
        positions = np.flatnonzero(flags[: chunk.size])
        positions += start
        parts.append(positions)
    return np.concatenate(parts)


def owners(counts: Tensor, total: int) -> Tensor:
    """Return each slot's segment, int64 ``[total]``: segment i owns the next ``counts[i]`` slots. No host wait.

    >>> owners(torch.tensor([2, 0, 1]), 3)
    tensor([0, 0, 2])
    """
    if counts.device.type == "cpu":
        return torch.repeat_interleave(counts, output_size=total)
    # On a GPU repeat_interleave uses one warp per segment, see Layout.spread
    slots = torch.arange(total, dtype=torch.int64, device=counts.device)
    return torch.searchsorted(torch.cumsum(counts, 0), slots, right=True)


def poison(flat: Tensor, layout: Layout) -> Tensor:
    """Return 0 for each parameter, or NaN if one of its elements is not finite: ``[parameters]``, type of ``flat``.

    A message that may lack that element adds this number, so that all ranks get NaN.

    >>> poison(torch.tensor([1., math.inf, 2.]), Layout({"a": (2,), "b": (1,)}))
    tensor([nan, 0.])
    """
    flags = torch.zeros(len(layout.names), dtype=flat.dtype, device=flat.device)
    if Layout.readable(flat):  # a finite sum has finite terms
        if not math.isfinite(flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32)).item()):
            parameters = torch.split(flat, list(layout.sizes.values()))
            flags.masked_fill_(~torch.stack([torch.isfinite(parameter).all() for parameter in parameters]), math.nan)
        return flags
    return flags.masked_fill_(~layout.finite(flat), math.nan)


def pack_pairs(indices: Tensor, values: Tensor) -> Tensor:
    """Pack indices and values ``[K]`` into one message, int32 ``[2 K]`` (``[3 K]`` for float64), values first.

    >>> unpack_pairs(pack_pairs(torch.tensor([3, 0]), torch.tensor([1.5, 0.])), torch.float32)
    (tensor([3, 0], dtype=torch.int32), tensor([1.5000, 0.0000]))
    """
    return torch.cat([values.view(torch.int32), indices.to(torch.int32)])


def unpack_pairs(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices, and the values of type ``dtype``, of messages ``[..., 2 K]``: ``[..., K]`` each."""
    words = dtype.itemsize // 4
    count = message.shape[-1] // (words + 1)
    values = message[..., : count * words].reshape(-1)
    if words > 1:
        values = values.clone()  # aligned memory
    return message[..., count * words :], values.view(dtype).view(*message.shape[:-1], count)


def add_up(pairs: Iterable[tuple[Tensor, Tensor]], out: Tensor) -> Tensor:
    """Sum sparse vectors (indices and values) in their order into ``out``, flat and of their type, and return it.

    >>> first, second = (torch.tensor([0, 2]), torch.tensor([1., 2.])), (torch.tensor([2]), torch.tensor([4.]))
    >>> add_up([first, second], torch.empty(3))
    tensor([1., 0., 6.])
    """
    out.zero_()
    if out.numel():
        for indices, values in pairs:
            out.index_add_(0, indices, values)
    return out


__getattr__ = moved_names(__name__)
