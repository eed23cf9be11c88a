"""The primitives of ``torch.distributed``, with its signatures, on every backend.

Rules:

1. ``src`` and ``dst`` are ranks of the job, whatever ``group``. Results are written into the tensors that were passed.
2. A call returns None when the operation is over. With ``async_op=True`` it returns a :class:`Handle` at once. Until
   the caller waits for the handle, the tensors belong to the operation.
3. All ranks of a group call its collectives in the same order. Each group has a channel and a thread of its own, so
   groups do not wait for each other or for a synchronizer.
4. Shapes and dtypes agree between ranks. A comparison would cost each operation a message, so there is none: MPI turns
   unequal lengths into wrong numbers. ``HVDBRIDGE_DEBUG=1`` compares operations of all ranks, and raises.
5. Only the two ranks concerned call ``send`` and ``recv``. A send may be over before the message is received.
6. A rank outside of ``group`` takes no part: it is warned, and gets None, as in ``torch.distributed``.
7. Errors about arguments are raised before anything travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES
from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.training import groups, runtime
from hvdbridge.training.groups import Group, Handle, ReduceOp, Steps


def _reduction(op: Any, tensor: Tensor, group: Group, what: str) -> tuple[str, int]:
    """The reduction that travels, and the divisor of its answer.

    Raises:
        ConfigurationError: no such ``op``.
        Unsupported: ``op`` has no meaning for the dtype of the user's ``tensor``.
    """
    name = getattr(op, "name", None) or str(op)
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp[name.rpartition(".")[2].upper()]
    except KeyError:
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise ConfigurationError(f"{what}: op={op!r} is not known. Known: {known}.") from None
    average = found is ReduceOp.AVG
    if tensor.is_complex() and found not in (ReduceOp.SUM, ReduceOp.AVG):
        raise Unsupported(f"{what}: {found} has no meaning for {tensor.dtype} here. Use SUM or AVG, or gather")
    if tensor.dtype not in DTYPES and not tensor.is_complex():
        raise Unsupported(f"{what}: {tensor.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}")
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise Unsupported(f"{what}: the average of {tensor.dtype} is no {tensor.dtype}. Use ReduceOp.SUM and divide")
    if tensor.dtype is torch.bool and found not in (ReduceOp.MIN, ReduceOp.MAX):
        raise Unsupported(f"{what}: {found} has no meaning for bool. Use MAX (any) or MIN (all)")
    return ("sum", group.size()) if average else (found.value, 1)


def _run(
    group: Group, what: str, like: Tensor, request: Callable[[], Collective], into: Tensor | Sequence[Tensor],
    async_op: bool, divisor: int = 1,
) -> Handle | None:  # fmt: skip
    """Start one collective and write its answer over ``divisor`` into a tensor, or its rows into several.

    Args:
        like: the tensor that messages describe.
        request: makes the collective, on the scheduler's thread.
        into: empty on a rank that gets nothing.
    """

    def steps() -> Steps:
        answer = yield request()
        if divisor > 1:
            answer.div_(divisor)
        pairs = [(into, answer)] if isinstance(into, Tensor) else zip(into, answer, strict=False)
        for target, value in pairs:
            _put(target, value)

    return groups.start(group, steps, groups.title(what, like, group), async_op)


def _put(target: Tensor, answer: Tensor) -> None:
    if target.data_ptr() != answer.data_ptr() or target.stride() != answer.stride():
        target.copy_(answer.reshape(target.shape))


def broadcast(
    tensor: Tensor, src: int | None = None, group: Group | None = None, async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:  # fmt: skip
    """Copy rank ``src``'s ``tensor`` into that of all ranks: same shape and dtype, any dtype.

    Raises:
        ConfigurationError: ``src`` is not in the group.
        Unsupported: not a dense tensor.
    """
    if (found := groups.member(group, "broadcast")) is None:
        return None
    root = groups.root_of(found, src, group_src, "broadcast")
    data = groups.dense(tensor, "broadcast", written=found.rank() != root)
    return _run(found, "broadcast", data, lambda: Broadcast(data, root), data, async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Combine the ranks' ``tensor`` element by element, in place, the same bits on all.

    Raises:
        ConfigurationError: no such ``op``.
        Unsupported: the operation has no meaning for this dtype (an average of integers, a sum of bools, a product or
            an order of complex numbers).
    """
    if (found := groups.member(group, "all_reduce")) is None:
        return None
    data = groups.dense(tensor, "all_reduce", written=True)
    wire, divisor = _reduction(op, tensor, found, "all_reduce")
    return _run(found, "all_reduce", data, lambda: AllReduce(data, wire), data, async_op, divisor)


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:  # fmt: skip
    """As :func:`all_reduce`, but only rank ``dst``'s tensor changes."""
    if (found := groups.member(group, "reduce")) is None:
        return None
    mine = found.rank() == groups.root_of(found, dst, group_dst, "reduce")
    data = groups.dense(tensor, "reduce", written=mine)
    wire, divisor = _reduction(op, tensor, found, "reduce")
    if mine:
        return _run(found, "reduce", data, lambda: AllReduce(data, wire), data, async_op, divisor)
    return _run(found, "reduce", data, lambda: AllReduce(data.clone(), wire), (), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``tensor``, of one shape and dtype, into ``tensor_list`` in rank order.

    Raises:
        ConfigurationError: the list has not one tensor of that shape and dtype for each rank.
    """
    if (found := groups.member(group, "all_gather")) is None:
        return None
    data = groups.dense(tensor, "all_gather")
    targets = groups.dense_list(tensor_list, found.size(), data, "all_gather's tensor_list", written=True)
    return _run(found, "all_gather", data, lambda: AllGather(data), targets, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``input_tensor`` into one tensor, joined along the first axis or stacked: ``N`` times its size.

    Raises:
        ConfigurationError: ``output_tensor`` has another size or dtype.
    """
    if (found := groups.member(group, "all_gather_into_tensor")) is None:
        return None
    data = groups.dense(input_tensor, "all_gather_into_tensor")
    target = groups.dense(output_tensor, "all_gather_into_tensor: output_tensor", written=True)
    _check_whole(target, data, found.size(), "all_gather_into_tensor: output_tensor")
    return _run(found, "all_gather_into_tensor", data, lambda: AllGather(data), target, async_op)


def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None, group: Group | None = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Handle | None:  # fmt: skip
    """Every rank's ``tensor`` into rank ``dst``'s ``gather_list`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``gather_list`` is missing on ``dst``, is given elsewhere, or does not fit.
    """
    if (found := groups.member(group, "gather")) is None:
        return None
    data, root = groups.dense(tensor, "gather"), groups.root_of(found, dst, group_dst, "gather", default=0)
    targets = _list_on_root(gather_list, root, found, data, "gather's gather_list", written=True)
    return _run(found, "gather", data, lambda: AllGather(data), targets, async_op)


def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None, group: Group | None = None,
    async_op: bool = False, group_src: int | None = None,
) -> Handle | None:  # fmt: skip
    """Rank ``src``'s ``scatter_list[i]`` into the i-th rank's ``tensor`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``scatter_list`` is missing on ``src``, is given elsewhere, or does not fit.
    """
    if (found := groups.member(group, "scatter")) is None:
        return None
    data = groups.dense(tensor, "scatter", written=True)
    root = groups.root_of(found, src, group_src, "scatter", default=0)
    parts = _list_on_root(scatter_list, root, found, data, "scatter's scatter_list")

    def steps() -> Steps:
        rows = torch.stack(parts) if parts else data.new_empty(found.size(), *data.shape)
        _put(data, (yield Broadcast(rows, root))[found.rank()])

    return groups.start(found, steps, groups.title("scatter", data, found), async_op)


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """The i-th rank gets the ranks' ``input_list[i]``, combined, in ``output``.

    Raises:
        ConfigurationError: the list has not one tensor of the shape and dtype of ``output`` for each rank.
    """
    if (found := groups.member(group, what := "reduce_scatter")) is None:
        return None
    target = groups.dense(output, what, written=True)
    parts = groups.dense_list(input_list, found.size(), target, f"{what}'s input_list")
    wire, divisor = _reduction(op, output, found, what)
    return _run(found, what, target, lambda: ReduceScatter(torch.stack(parts), wire), target, async_op, divisor)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """As :func:`reduce_scatter`, of one tensor ``input`` that is the list joined or stacked.

    Raises:
        ConfigurationError: ``input`` has not ``N`` times the size of ``output``, or another dtype.
    """
    if (found := groups.member(group, what := "reduce_scatter_tensor")) is None:
        return None
    target, data = groups.dense(output, what, written=True), groups.dense(input, what)
    _check_whole(data, target, found.size(), f"{what}: input")
    wire, divisor = _reduction(op, output, found, what)
    rows = found.size(), *target.shape
    return _run(found, what, target, lambda: ReduceScatter(data.reshape(rows), wire), target, async_op, divisor)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """``input_tensor_list[i]`` goes to the i-th rank, ``output_tensor_list[i]`` comes from it. Shapes may differ from
    pair to pair, one dtype.

    Raises:
        ConfigurationError: a list has not one tensor for each rank, or dtypes differ.
    """
    if (found := groups.member(group, "all_to_all")) is None:
        return None
    size = found.size()
    targets = groups.dense_list(output_tensor_list, size, None, "all_to_all's output_tensor_list", written=True)
    parts = groups.dense_list(input_tensor_list, size, None, "all_to_all's input_tensor_list")
    if len({tensor.dtype for tensor in (*targets, *parts)}) > 1:
        raise ConfigurationError("all_to_all: all tensors have one dtype")
    what = groups.title("all_to_all", parts[0], found)
    return groups.start(found, partial(_exchange, targets, parts), what, async_op)


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: Group | None = None, async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """Rows of ``input`` go to the ranks in turn, those of ``output`` come from them: ``split_sizes[i]`` rows each, or
    equal parts where None on all ranks.

    Raises:
        ConfigurationError: splits do not add up to the rows, or do not divide them equally.
    """
    if (found := groups.member(group, what := "all_to_all_single")) is None:
        return None
    data, target, size = groups.dense(input, what), groups.dense(output, what, written=True), found.size()
    if data.dtype != target.dtype:
        raise ConfigurationError(f"all_to_all_single: input is {data.dtype}, output {target.dtype}")
    if input_split_sizes is None and output_split_sizes is None:
        if data.numel() != target.numel() or not data.dim() or data.shape[0] % size:
            raise ConfigurationError(
                f"all_to_all_single without splits: input {list(data.shape)} and output {list(target.shape)} must "
                f"have as many elements, and rows that {size} ranks share equally"
            )
        return _run(found, what, data, lambda: AllToAll(data.reshape(size, -1)), target, async_op)
    parts = _split(data, input_split_sizes, size, "input_split_sizes")
    targets = _split(target, output_split_sizes, size, "output_split_sizes")
    return groups.start(found, partial(_exchange, targets, parts), groups.title(what, data, found), async_op)


def _split(tensor: Tensor, sizes: Sequence[int] | None, size: int, name: str) -> list[Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    sizes = [rows // size] * size if sizes is None else list(sizes)
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigurationError(f"all_to_all_single: {name}={sizes} must divide {rows} rows among {size} ranks")
    return list(tensor.split(sizes))


def _exchange(targets: list[Tensor], parts: list[Tensor]) -> Steps:
    """Rows of unequal lengths, padded to the longest of all ranks."""
    longest = max(tensor.numel() for tensor in (*targets, *parts))
    width = int((yield AllReduce(torch.tensor([longest], device="cpu"), "max")).item())
    rows = parts[0].new_zeros(len(parts), width)
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()] = part.reshape(-1)
    for target, row in zip(targets, (yield AllToAll(rows)), strict=True):
        target.copy_(row[: target.numel()].view(target.shape))


def barrier(
    group: Group | None = None, async_op: bool = False, device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Handle | None:  # fmt: skip
    """Return when all ranks have come.

    Args:
        device_ids: without effect: no device takes part.
        timeout: how long this rank waits for the others; None: the group's.

    Raises:
        CollectiveTimeout: a rank has not come.
        Unsupported: ``timeout`` is longer than HVDBRIDGE_TIMEOUT_SECONDS.
    """
    if (found := groups.member(group, "barrier")) is None:
        return None
    groups.check_limit(timeout, "barrier")

    def steps() -> Steps:
        yield AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max")

    return groups.start(found, steps, groups.title("barrier", None, found), async_op, timeout)


def _list_on_root(
    values: Any, root: int, group: Group, like: Tensor, what: str, written: bool = False
) -> list[Tensor]:
    if group.rank() == root:
        return groups.dense_list(values, group.size(), like, what, written)
    if values:
        raise ConfigurationError(f"rank {runtime.rank()}: {what} is given by the one rank that it is for, only")
    return []


def _check_whole(whole: Tensor, part: Tensor, size: int, what: str) -> None:
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ConfigurationError(
            f"{what} must have {size} times {part.numel()} elements of {part.dtype}, "
            f"got {list(whole.shape)} {whole.dtype}"
        )
