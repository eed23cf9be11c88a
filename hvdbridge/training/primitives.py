"""The collectives of ``torch.distributed``, with its signatures, on every backend.

Rules:

1. ``src`` and ``dst`` are ranks of the job, also if ``group`` is given. Results are written into the tensors passed.
2. A call returns None after the operation is complete. With ``async_op=True`` the call returns a :class:`Handle` at
   once, and the caller must not access the tensors before the handle's ``wait()`` has returned.
3. All ranks of a group call its collectives in the same order. Each group has its own channel and thread, so
   operations of different groups, or of a synchronizer, do not wait for each other.
4. Shapes and dtypes must be equal on all ranks. They are not compared, because that needs a message per operation;
   MPI returns wrong values for unequal lengths. With ``HVDBRIDGE_DEBUG=1`` a mismatch raises an error.
5. Only the two ranks concerned call ``send`` and ``recv``. A send may complete before the message is received.
6. On a rank outside of ``group``, a call warns and returns None, as in ``torch.distributed``.
7. Errors about arguments are raised before any message is sent.
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
from hvdbridge.training.groups import Group, Handle, OpFlow, ReduceOp


def _reduction(op: Any, tensor: Tensor, group: Group, caller: str) -> tuple[str, int]:
    """Return the ``op`` of the request to send, and the divisor of its result: an average is a sum over the size.

    Raises:
        ConfigurationError: ``op`` is unknown.
        Unsupported: ``op`` is not defined for the dtype of the user's ``tensor``.
    """
    name = getattr(op, "name", None) or str(op)
    try:
        reduce_op = op if isinstance(op, ReduceOp) else ReduceOp[name.rpartition(".")[2].upper()]
    except KeyError:
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise ConfigurationError(f"{caller}: op={op!r} is not known. Known: {known}.") from None
    average = reduce_op is ReduceOp.AVG
    if tensor.is_complex() and reduce_op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise Unsupported(f"{caller}: {reduce_op} has no meaning for {tensor.dtype} here. Use SUM or AVG, or gather")
    if tensor.dtype not in DTYPES and not tensor.is_complex():
        raise Unsupported(f"{caller}: {tensor.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}")
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise Unsupported(f"{caller}: the average of {tensor.dtype} is no {tensor.dtype}. Use ReduceOp.SUM and divide")
    if tensor.dtype is torch.bool and reduce_op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise Unsupported(f"{caller}: {reduce_op} has no meaning for bool. Use MAX (any) or MIN (all)")
    return ("sum", group.size()) if average else (reduce_op.value, 1)


def _run(
    group: Group, caller: str, tensor: Tensor, request: Callable[[], Collective], output: Tensor | Sequence[Tensor],
    async_op: bool, divisor: int = 1,
) -> Handle | None:  # fmt: skip
    """Start one collective, and write its result, divided by ``divisor``, into ``output``.

    Args:
        tensor: the tensor that error messages describe.
        request: called on the scheduler's thread to make the collective.
        output: a tensor, or one tensor for each row of the result; empty on a rank that receives nothing.
    """

    def flow() -> OpFlow:
        result = yield request()
        if divisor > 1:
            result.div_(divisor)
        pairs = [(output, result)] if isinstance(output, Tensor) else zip(output, result, strict=False)
        for target, value in pairs:
            _copy_result(target, value)

    return groups.start(group, flow, groups.describe_op(caller, tensor, group), async_op)


def _copy_result(target: Tensor, result: Tensor) -> None:
    if target.data_ptr() != result.data_ptr() or target.stride() != result.stride():
        target.copy_(result.reshape(target.shape))


def broadcast(
    tensor: Tensor, src: int | None = None, group: Group | None = None, async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:  # fmt: skip
    """Copy ``tensor`` of rank ``src`` to all ranks, in place; one shape and dtype, any dtype.

    Raises:
        ConfigurationError: ``src`` is not in the group.
        Unsupported: ``tensor`` is not dense.
    """
    if (pg := groups.group_if_member(group, "broadcast")) is None:
        return None
    root = groups.find_rank(pg, src, group_src, "broadcast")
    data = groups.dense(tensor, "broadcast", written=pg.rank() != root)
    return _run(pg, "broadcast", data, lambda: Broadcast(data, root), data, async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Reduce ``tensor`` elementwise over the ranks, in place. The results are bitwise equal on all ranks.

    Raises:
        ConfigurationError: ``op`` is unknown.
        Unsupported: ``op`` is not defined for the dtype: AVG of integers; SUM, AVG or PRODUCT of bools; PRODUCT, MIN or
            MAX of complex numbers.
    """
    if (pg := groups.group_if_member(group, "all_reduce")) is None:
        return None
    data = groups.dense(tensor, "all_reduce", written=True)
    sent_op, divisor = _reduction(op, tensor, pg, "all_reduce")
    return _run(pg, "all_reduce", data, lambda: AllReduce(data, sent_op), data, async_op, divisor)


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:  # fmt: skip
    """Reduce as :func:`all_reduce`, but change only the tensor of rank ``dst``."""
    if (pg := groups.group_if_member(group, "reduce")) is None:
        return None
    is_dst = pg.rank() == groups.find_rank(pg, dst, group_dst, "reduce")
    data = groups.dense(tensor, "reduce", written=is_dst)
    sent_op, divisor = _reduction(op, tensor, pg, "reduce")
    if is_dst:
        return _run(pg, "reduce", data, lambda: AllReduce(data, sent_op), data, async_op, divisor)
    return _run(pg, "reduce", data, lambda: AllReduce(data.clone(), sent_op), (), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Gather ``tensor`` of all ranks, of one shape and dtype, into ``tensor_list``, in rank order.

    Raises:
        ConfigurationError: the list does not have one tensor of this shape and dtype for each rank.
    """
    if (pg := groups.group_if_member(group, "all_gather")) is None:
        return None
    data = groups.dense(tensor, "all_gather")
    targets = groups.dense_list(tensor_list, pg.size(), data, "all_gather's tensor_list", written=True)
    return _run(pg, "all_gather", data, lambda: AllGather(data), targets, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Gather ``input_tensor`` of all ``N`` ranks into one tensor, concatenated along dimension 0 or stacked.

    Raises:
        ConfigurationError: ``output_tensor`` has another dtype, or not ``N`` times as many elements.
    """
    if (pg := groups.group_if_member(group, "all_gather_into_tensor")) is None:
        return None
    data = groups.dense(input_tensor, "all_gather_into_tensor")
    target = groups.dense(output_tensor, "all_gather_into_tensor: output_tensor", written=True)
    _check_joined(target, data, pg.size(), "all_gather_into_tensor: output_tensor")
    return _run(pg, "all_gather_into_tensor", data, lambda: AllGather(data), target, async_op)


def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None, group: Group | None = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Handle | None:  # fmt: skip
    """Gather ``tensor`` of all ranks into ``gather_list`` of rank ``dst`` (default: rank 0); others pass no list.

    Raises:
        ConfigurationError: ``gather_list`` is missing on ``dst`` or does not fit there, or another rank passes one.
    """
    if (pg := groups.group_if_member(group, "gather")) is None:
        return None
    data, root = groups.dense(tensor, "gather"), groups.find_rank(pg, dst, group_dst, "gather", default=0)
    targets = _list_on_root(gather_list, root, pg, data, "gather's gather_list", written=True)
    return _run(pg, "gather", data, lambda: AllGather(data), targets, async_op)


def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None, group: Group | None = None,
    async_op: bool = False, group_src: int | None = None,
) -> Handle | None:  # fmt: skip
    """Copy ``scatter_list[i]`` of rank ``src`` (default: rank 0) into the i-th rank's ``tensor``; others pass no list.

    Raises:
        ConfigurationError: ``scatter_list`` is missing on ``src`` or does not fit there, or another rank passes one.
    """
    if (pg := groups.group_if_member(group, "scatter")) is None:
        return None
    data = groups.dense(tensor, "scatter", written=True)
    root = groups.find_rank(pg, src, group_src, "scatter", default=0)
    parts = _list_on_root(scatter_list, root, pg, data, "scatter's scatter_list")

    def flow() -> OpFlow:
        rows = torch.stack(parts) if parts else data.new_empty(pg.size(), *data.shape)
        _copy_result(data, (yield Broadcast(rows, root))[pg.rank()])

    return groups.start(pg, flow, groups.describe_op("scatter", data, pg), async_op)


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Reduce ``input_list[i]`` elementwise over the ranks into ``output`` of the i-th rank.

    Raises:
        ConfigurationError: the list does not have one tensor of the shape and dtype of ``output`` for each rank.
    """
    if (pg := groups.group_if_member(group, caller := "reduce_scatter")) is None:
        return None
    target = groups.dense(output, caller, written=True)
    parts = groups.dense_list(input_list, pg.size(), target, f"{caller}'s input_list")
    sent_op, divisor = _reduction(op, output, pg, caller)
    return _run(pg, caller, target, lambda: ReduceScatter(torch.stack(parts), sent_op), target, async_op, divisor)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Reduce as :func:`reduce_scatter`; ``input`` is the list, concatenated along dimension 0 or stacked.

    Raises:
        ConfigurationError: ``input`` has another dtype than ``output``, or not ``N`` times as many elements.
    """
    if (pg := groups.group_if_member(group, caller := "reduce_scatter_tensor")) is None:
        return None
    target, data = groups.dense(output, caller, written=True), groups.dense(input, caller)
    _check_joined(data, target, pg.size(), f"{caller}: input")
    sent_op, divisor = _reduction(op, output, pg, caller)
    rows = pg.size(), *target.shape
    return _run(pg, caller, target, lambda: ReduceScatter(data.reshape(rows), sent_op), target, async_op, divisor)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """Send ``input_tensor_list[i]`` to the i-th rank, and receive ``output_tensor_list[i]`` from it. Shapes may differ
    between pairs of ranks; all tensors have one dtype.

    Raises:
        ConfigurationError: a list does not have one tensor for each rank, or dtypes differ.
    """
    if (pg := groups.group_if_member(group, "all_to_all")) is None:
        return None
    size = pg.size()
    targets = groups.dense_list(output_tensor_list, size, None, "all_to_all's output_tensor_list", written=True)
    parts = groups.dense_list(input_tensor_list, size, None, "all_to_all's input_tensor_list")
    if len({tensor.dtype for tensor in (*targets, *parts)}) > 1:
        raise ConfigurationError("all_to_all: all tensors have one dtype")
    label = groups.describe_op("all_to_all", parts[0], pg)
    return groups.start(pg, partial(_padded_all_to_all, targets, parts), label, async_op)


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: Group | None = None, async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """Send ``input_split_sizes[i]`` rows of ``input`` to the i-th rank, and receive ``output_split_sizes[i]`` rows of
    ``output`` from it, in rank order; None on all ranks: equal numbers of rows.

    Raises:
        ConfigurationError: dtypes differ, the sizes do not add up to the rows, or the rows do not divide equally.
    """
    if (pg := groups.group_if_member(group, caller := "all_to_all_single")) is None:
        return None
    data, target, size = groups.dense(input, caller), groups.dense(output, caller, written=True), pg.size()
    if data.dtype != target.dtype:
        raise ConfigurationError(f"all_to_all_single: input is {data.dtype}, output {target.dtype}")
    if input_split_sizes is None and output_split_sizes is None:
        if data.numel() != target.numel() or not data.dim() or data.shape[0] % size:
            raise ConfigurationError(
                f"all_to_all_single without splits: input {list(data.shape)} and output {list(target.shape)} must "
                f"have as many elements, and rows that {size} ranks share equally"
            )
        return _run(pg, caller, data, lambda: AllToAll(data.reshape(size, -1)), target, async_op)
    parts = _split_rows(data, input_split_sizes, size, "input_split_sizes")
    targets = _split_rows(target, output_split_sizes, size, "output_split_sizes")
    return groups.start(pg, partial(_padded_all_to_all, targets, parts), groups.describe_op(caller, data, pg), async_op)


def _split_rows(tensor: Tensor, sizes: Sequence[int] | None, size: int, name: str) -> list[Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    sizes = [rows // size] * size if sizes is None else list(sizes)
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigurationError(f"all_to_all_single: {name}={sizes} must divide {rows} rows among {size} ranks")
    return list(tensor.split(sizes))


def _padded_all_to_all(targets: list[Tensor], parts: list[Tensor]) -> OpFlow:
    """Exchange tensors of unequal lengths, as rows padded to the longest tensor of any rank."""
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
    """Wait until all ranks of the group have called it.

    Args:
        device_ids: ignored, since no device takes part.
        timeout: how long this rank waits for the others; None: the group's timeout.

    Raises:
        CollectiveTimeout: some rank has not called it in time.
        Unsupported: ``timeout`` is longer than HVDBRIDGE_TIMEOUT_SECONDS.
    """
    if (pg := groups.group_if_member(group, "barrier")) is None:
        return None
    groups.check_timeout(timeout, "barrier")

    def flow() -> OpFlow:
        yield AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max")

    return groups.start(pg, flow, groups.describe_op("barrier", None, pg), async_op, timeout)


def _list_on_root(values: Any, root: int, group: Group, like: Tensor, name: str, written: bool = False) -> list[Tensor]:
    if group.rank() == root:
        return groups.dense_list(values, group.size(), like, name, written)
    if values:
        raise ConfigurationError(f"rank {runtime.rank()}: {name} is given by the one rank that it is for, only")
    return []


def _check_joined(joined: Tensor, part: Tensor, size: int, name: str) -> None:
    if joined.dtype != part.dtype or joined.numel() != size * part.numel():
        raise ConfigurationError(
            f"{name} must have {size} times {part.numel()} elements of {part.dtype}, "
            f"got {list(joined.shape)} {joined.dtype}"
        )
