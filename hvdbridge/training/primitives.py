"""The primitives of ``torch.distributed``, with its signatures, on every backend.

Rules:

1. ``src`` and ``dst`` are ranks of the job, whatever ``group``; results are written into the tensors that were passed.
2. A call returns None when it is over; with ``async_op=True`` at once, with a :class:`Handle`. Until that is waited
   for, the tensors belong to the operation.
3. All ranks of a group call its collectives in the same order. Each group has a channel and a thread of its own, so
   groups do not wait for each other, and no synchronizer's traffic is met.
4. Shapes and dtypes agree between ranks. To compare them would cost each operation a message, so of unequal lengths MPI
   makes wrong numbers in silence; ``HVDBRIDGE_DEBUG=1`` compares operations of all ranks, and raises.
5. ``send`` and ``recv`` are called by the two ranks concerned alone. A send may be over before it is received.
6. A rank outside of ``group`` takes no part: it is warned, and gets None, as in ``torch.distributed``.
7. What is wrong with arguments is said before anything travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import DTYPES
from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from hvdbridge.training import runtime
from hvdbridge.training.groups import (
    Group,
    Handle,
    ReduceOp,
    Steps,
    _check_limit,
    _label,
    _member,
    _root,
    _start,
    _targets,
    _tensor,
    _tensors,
)


def _reduction(op: Any, tensor: Tensor, what: str) -> ReduceOp:
    """What ``op`` says, if it has a meaning for the user's own ``tensor``."""
    name = getattr(op, "name", None) or str(op)
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp[name.rpartition(".")[2].upper()]
    except KeyError:
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise ConfigurationError(f"{what}: op={op!r} is not known. Known: {known}.") from None
    if tensor.is_complex():
        if found not in (ReduceOp.SUM, ReduceOp.AVG):
            raise Unsupported(f"{what}: {found} has no meaning for {tensor.dtype} here. Use SUM or AVG, or gather")
        return found
    if tensor.dtype not in DTYPES:
        raise Unsupported(f"{what}: {tensor.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}")
    if found is ReduceOp.AVG and not tensor.is_floating_point():
        raise Unsupported(f"{what}: the average of {tensor.dtype} is no {tensor.dtype}. Use ReduceOp.SUM and divide")
    if tensor.dtype is torch.bool and found not in (ReduceOp.MIN, ReduceOp.MAX):
        raise Unsupported(f"{what}: {found} has no meaning for bool. Use MAX (any) or MIN (all)")
    return found


def _put(target: Tensor, answer: Tensor) -> None:
    if target.data_ptr() != answer.data_ptr() or target.stride() != answer.stride():
        target.copy_(answer.reshape(target.shape))


def _wire(op: ReduceOp) -> str:
    return "sum" if op is ReduceOp.AVG else op.value


def _averaged(answer: Tensor, op: ReduceOp, size: int) -> Tensor:
    return answer.div_(size) if op is ReduceOp.AVG else answer


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """Copy rank ``src``'s ``tensor`` into that of all ranks: same shape and dtype, any dtype.

    Raises:
        ConfigurationError: ``src`` is not in the group.
        Unsupported: not a dense tensor.
    """
    if (found := _member(group, "broadcast")) is None:
        return None
    data, root = _tensor(tensor, "broadcast"), _root(found, src, group_src, "broadcast")
    if found.rank() != root:
        _targets([data], "broadcast")

    def steps() -> Steps:
        _put(data, (yield Broadcast(data, root)))

    return _start(found, steps, _label("broadcast", data, found), async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Combine the ranks' ``tensor`` element by element, in place, the same bits on all.

    Raises:
        ConfigurationError: no such ``op``.
        Unsupported: the operation has no meaning for this dtype (an average of integers, a sum of bools, a product or
            an order of complex numbers).
    """
    if (found := _member(group, "all_reduce")) is None:
        return None
    data = _tensor(tensor, "all_reduce")
    kind = _reduction(op, tensor, "all_reduce")
    _targets([data], "all_reduce")

    def steps() -> Steps:
        answer = yield AllReduce(data, _wire(kind))
        _put(data, _averaged(answer, kind, found.size()))

    return _start(found, steps, _label("all_reduce", data, found), async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """As :func:`all_reduce`, but only rank ``dst``'s tensor changes."""
    if (found := _member(group, "reduce")) is None:
        return None
    data, root = _tensor(tensor, "reduce"), _root(found, dst, group_dst, "reduce")
    kind, mine = _reduction(op, tensor, "reduce"), found.rank() == root
    if mine:
        _targets([data], "reduce")

    def steps() -> Steps:
        answer = yield AllReduce(data if mine else data.clone(), _wire(kind))
        if mine:
            _put(data, _averaged(answer, kind, found.size()))

    return _start(found, steps, _label("reduce", data, found), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``tensor``, of one shape and dtype, into ``tensor_list`` in rank order.

    Raises:
        ConfigurationError: the list has not one tensor of that shape and dtype for each rank.
    """
    if (found := _member(group, "all_gather")) is None:
        return None
    data = _tensor(tensor, "all_gather")
    targets = _tensors(tensor_list, found.size(), data, "all_gather's tensor_list")
    _targets(targets, "all_gather's tensor_list")

    def steps() -> Steps:
        for target, row in zip(targets, (yield AllGather(data)), strict=True):
            _put(target, row)

    return _start(found, steps, _label("all_gather", data, found), async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``input_tensor`` into one tensor, joined along the first axis or stacked: ``N`` times its size.

    Raises:
        ConfigurationError: ``output_tensor`` has another size or dtype.
    """
    if (found := _member(group, "all_gather_into_tensor")) is None:
        return None
    data, target = _tensor(input_tensor, "all_gather_into_tensor"), _tensor(output_tensor, "all_gather_into_tensor")
    _check_whole(target, data, found.size(), "all_gather_into_tensor: output_tensor")
    _targets([target], "all_gather_into_tensor: output_tensor")

    def steps() -> Steps:
        _put(target, (yield AllGather(data)))

    return _start(found, steps, _label("all_gather_into_tensor", data, found), async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """Every rank's ``tensor`` into rank ``dst``'s ``gather_list`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``gather_list`` is missing on ``dst``, is given elsewhere, or does not fit.
    """
    if (found := _member(group, "gather")) is None:
        return None
    data = _tensor(tensor, "gather")
    root = _root(found, *_first(found, dst, group_dst), "gather")
    mine = found.rank() == root
    targets = _list_on_root(gather_list, mine, found, data, "gather's gather_list")
    _targets(targets, "gather's gather_list")

    def steps() -> Steps:
        rows = yield AllGather(data)
        for target, row in zip(targets, rows if mine else (), strict=True):
            _put(target, row)

    return _start(found, steps, _label("gather", data, found), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """Rank ``src``'s ``scatter_list[i]`` into the i-th rank's ``tensor`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``scatter_list`` is missing on ``src``, is given elsewhere, or does not fit.
    """
    if (found := _member(group, "scatter")) is None:
        return None
    data = _tensor(tensor, "scatter")
    root = _root(found, *_first(found, src, group_src), "scatter")
    mine = found.rank() == root
    parts = _list_on_root(scatter_list, mine, found, data, "scatter's scatter_list")
    _targets([data], "scatter")

    def steps() -> Steps:
        rows = torch.stack(parts) if mine else data.new_empty(found.size(), *data.shape)
        _put(data, (yield Broadcast(rows, root))[found.rank()])

    return _start(found, steps, _label("scatter", data, found), async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:
    """The i-th rank gets the ranks' ``input_list[i]``, combined, in ``output``.

    Raises:
        ConfigurationError: the list has not one tensor of the shape and dtype of ``output`` for each rank.
    """
    if (found := _member(group, "reduce_scatter")) is None:
        return None
    target = _tensor(output, "reduce_scatter")
    parts = _tensors(input_list, found.size(), target, "reduce_scatter's input_list")
    kind = _reduction(op, output, "reduce_scatter")
    return _reduce_scatter(found, target, lambda: torch.stack(parts), kind, "reduce_scatter", async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """As :func:`reduce_scatter`, of one tensor ``input`` that is the list joined or stacked.

    Raises:
        ConfigurationError: ``input`` has not ``N`` times the size of ``output``, or another dtype.
    """
    if (found := _member(group, "reduce_scatter_tensor")) is None:
        return None
    target, data = _tensor(output, "reduce_scatter_tensor"), _tensor(input, "reduce_scatter_tensor")
    _check_whole(data, target, found.size(), "reduce_scatter_tensor: input")
    kind = _reduction(op, output, "reduce_scatter_tensor")
    rows = found.size(), *target.shape
    return _reduce_scatter(found, target, lambda: data.reshape(rows), kind, "reduce_scatter_tensor", async_op)


def _reduce_scatter(
    group: Group, target: Tensor, rows: Callable[[], Tensor], kind: ReduceOp, what: str, async_op: bool
) -> Handle | None:
    _targets([target], what)

    def steps() -> Steps:
        answer = yield ReduceScatter(rows(), _wire(kind))
        _put(target, _averaged(answer, kind, group.size()))

    return _start(group, steps, _label(what, target, group), async_op)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """``input_tensor_list[i]`` goes to the i-th rank, ``output_tensor_list[i]`` comes from it. Shapes may differ from
    pair to pair, one dtype.

    Raises:
        ConfigurationError: a list has not one tensor for each rank, or dtypes differ.
    """
    if (found := _member(group, "all_to_all")) is None:
        return None
    lists: list[list[Tensor]] = []
    for name, values in (("output_tensor_list", output_tensor_list), ("input_tensor_list", input_tensor_list)):
        if not isinstance(values, list | tuple) or len(values) != found.size():
            raise ConfigurationError(f"all_to_all: {name} needs one tensor for each of {found.size()} ranks")
        lists.append([_tensor(value, "all_to_all") for value in values])
    targets, parts = lists
    if len({tensor.dtype for tensor in (*targets, *parts)}) > 1:
        raise ConfigurationError("all_to_all: all tensors have one dtype")
    _targets(targets, "all_to_all's output_tensor_list")
    return _start(found, lambda: _exchange(targets, parts), _label("all_to_all", parts[0], found), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:
    """Rows of ``input`` go to the ranks in turn, those of ``output`` come from them: ``split_sizes[i]`` rows each, or
    equal parts where None on all ranks.

    Raises:
        ConfigurationError: splits do not add up to the rows, or do not divide them equally.
    """
    if (found := _member(group, "all_to_all_single")) is None:
        return None
    data, target = _tensor(input, "all_to_all_single"), _tensor(output, "all_to_all_single")
    if data.dtype != target.dtype:
        raise ConfigurationError(f"all_to_all_single: input is {data.dtype}, output {target.dtype}")
    _targets([target], "all_to_all_single: output")
    what = _label("all_to_all_single", data, found)
    if input_split_sizes is None and output_split_sizes is None:
        if data.numel() != target.numel() or not data.dim() or data.shape[0] % found.size():
            raise ConfigurationError(
                f"all_to_all_single without splits: input {list(data.shape)} and output {list(target.shape)} must "
                f"have as many elements, and rows that {found.size()} ranks share equally"
            )

        def steps() -> Steps:
            _put(target, (yield AllToAll(data.reshape(found.size(), -1))))

        return _start(found, steps, what, async_op)
    parts = _split(data, input_split_sizes, found.size(), "input_split_sizes")
    targets = _split(target, output_split_sizes, found.size(), "output_split_sizes")
    return _start(found, lambda: _exchange(targets, parts), what, async_op)


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
    group: Group | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Handle | None:
    """Return when all ranks have come.

    Args:
        device_ids: without effect: no device takes part.
        timeout: how long the others are waited for; None: the group's.

    Raises:
        CollectiveTimeout: they have not come.
        Unsupported: ``timeout`` is longer than HVDBRIDGE_TIMEOUT_SECONDS.
    """
    if (found := _member(group, "barrier")) is None:
        return None
    _check_limit(timeout, "barrier")

    def steps() -> Steps:
        yield AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max")

    what = "barrier" + (f" among {found}" if found.number else "")
    return _start(found, steps, what, async_op, timeout)


def _first(group: Group, rank: int | None, group_rank: int | None) -> tuple[int | None, int | None]:
    """torch's default for gather and scatter: rank 0."""
    return (0, None) if rank is None and group_rank is None else (rank, group_rank)


def _list_on_root(values: Any, mine: bool, group: Group, like: Tensor, what: str) -> list[Tensor]:
    if not mine:
        if values:
            raise ConfigurationError(f"rank {runtime.rank()}: {what} is given by the one rank that it is for, only")
        return []
    return _tensors(values, group.size(), like, what)


def _check_whole(whole: Tensor, part: Tensor, size: int, what: str) -> None:
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ConfigurationError(
            f"{what} must have {size} times {part.numel()} elements of {part.dtype}, "
            f"got {list(whole.shape)} {whole.dtype}"
        )


