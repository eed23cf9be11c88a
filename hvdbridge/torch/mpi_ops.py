"""Horovod's operations on tensors, on whatever backend runs.

Rules:

1. Names, arguments, defaults and results are those of ``horovod.torch`` 0.28; what Horovod rejects is rejected with the
   same type of exception. Where Horovod is wrong or refuses without need, docs/horovod.md says what is done here.
2. A gradient takes the name of its forward operation, so that it never meets the gradient of another one.
3. ``Average`` sums first and divides after, with the postscale factor in one multiplication; so the bits are Horovod's.
4. Each rank's loss is a term of what is differentiated: the gradient of a sum is the sum of all ranks' gradients.
   Horovod's conventions are kept where an average is concerned: of an average, and of what was gathered or broadcast,
   the gradient is the average of the ranks' gradients.
"""

# ruff: noqa: F401, I001 (scripts import all of these from here)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdbridge.torch.asynchronous import (
    _allreduce_async, _chosen, _number, _reducescatter_async, allgather_async, allreduce_, allreduce_async,
    allreduce_async_, alltoall_async, barrier, broadcast_, broadcast_async, broadcast_async_, grouped_allgather_async,
    grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_, grouped_reducescatter_async,
    handle_average_backwards_compatibility, join, poll, reducescatter_async, sparse_allreduce_async, synchronize,
)
from hvdbridge.torch.basics import (
    Adasum, Average, HorovodBasics, Max, Min, Product, ReduceOp, Sum, _current, _handles, ccl_built, cross_rank,
    cross_size, cuda_built, ddl_built, gloo_built, gloo_enabled, init, is_homogeneous, is_initialized, local_rank,
    local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank, rocm_built, shutdown, size,
    start_timeline, stop_timeline,
)
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import HorovodInternalError
from hvdbridge.torch.operations import Pending
from hvdbridge.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdbridge.torch.util import (
    check_installed_version, get_average_backwards_compatibility_fun, gpu_available, num_rank_is_power_2,
)

_basics = HorovodBasics(__file__)


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce a tensor of the same shape and dtype on all ranks; returns a new one. Differentiable.

    Args:
        tensor: dense, any shape, contiguous or not; float, int, bool and complex types.
        average: old form of ``op``: True is Average, False is Sum.
        name: by which ranks match operations.
        compression: what travels instead (:class:`Compression`).
        op: ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``.
        prescale_factor, postscale_factor: before and after the reduction.
        process_set: the ranks that take part.

    Raises:
        ValueError: before ``init``; a dtype that ``op`` does not know; this rank is not in the set.
        DuplicateNameError: the name is in flight (a ValueError and a HorovodInternalError).
        HorovodInternalError: ranks disagree about shape, dtype, op or factors; or another rank failed.
    """
    small, context = compression.compress(tensor)
    answer = HorovodAllreduce.apply(  # type: ignore[no-untyped-call]
        small, name, _chosen(op, average), prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(answer, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """:func:`allreduce` of several tensors as one operation: all or none of them. Differentiable."""
    small, contexts = zip(*map(compression.compress, tensors), strict=True)
    answers = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
        name, _chosen(op, average), prescale_factor, postscale_factor, process_set, *small
    )
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors one after the other along the first dimension, which may differ. Differentiable.

    Args:
        tensor: ``[n, ...]``, ``n`` of this rank; the other dimensions and the dtype are the same on all ranks.
        name, process_set: as in :func:`allreduce`.

    Raises:
        HorovodInternalError: a tensor without dimensions, or other dimensions that differ; see :func:`allreduce`.
    """
    return HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """:func:`allgather` of several tensors as one operation. Differentiable."""
    return HorovodGroupedAllgather.apply(  # type: ignore[no-untyped-call, no-any-return]
        name, process_set, *tensors
    )


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the values of rank ``root_rank`` (a rank of the job). Differentiable.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        HorovodInternalError: ranks disagree about shape, dtype or root; see :func:`allreduce`.
    """
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send rows to each rank and receive rows from each. Differentiable.

    Args:
        tensor: ``[n, ...]``; the other dimensions and the dtype are the same on all ranks.
        splits: how many of the first rows go to rank 0, how many of the next to rank 1, and so on: a list, or an int32
            tensor. Default: as many to each.
        name, process_set: as in :func:`allreduce`.

    Returns:
        The received rows in rank order; with ``splits`` a pair of them and of how many came from each rank (int32).

    Raises:
        ValueError: splits that do not fit the tensor or the number of ranks.
    """
    return HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's part of the reduction, divided along the first dimension. Differentiable.

    Args:
        tensor: ``[n, ...]``, the same shape on all ranks; where ``n`` cannot be divided evenly, the first ranks get one
            row more.
        op: ``Average`` (default) or ``Sum``.
        name, compression, process_set, prescale_factor, postscale_factor: as in :func:`allreduce`.

    Raises:
        ValueError: a tensor without dimensions; see :func:`allreduce`.
        HorovodInternalError: another op; ranks disagree; see :func:`allreduce`.
    """
    small, context = compression.compress(tensor)
    answer = HorovodReducescatter.apply(  # type: ignore[no-untyped-call]
        small, name, op, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(answer, context)  # type: ignore[no-any-return]


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """:func:`reducescatter` of several tensors as one operation. Differentiable."""
    small, contexts = zip(*map(compression.compress, tensors), strict=True)
    answers = HorovodGroupedReducescatter.apply(  # type: ignore[no-untyped-call]
        name, op, process_set, prescale_factor, postscale_factor, *small
    )
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


def _carried_out(ctx: Any, handle: int) -> tuple[Pending, Any]:
    """Wait; leaves the name for the gradient in ``ctx``."""
    pending = _handles[handle]
    ctx.name = f"{pending.request.name}.gradient"
    return pending, synchronize(handle)


class HorovodAllreduce(torch.autograd.Function):
    """:func:`allreduce` with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, op: ReduceOp, before: float, after: float, members: ProcessSet
    ) -> Any:
        handle = _allreduce_async([tensor], False, False, name, op, before, after, members)
        ctx.op, ctx.factors, ctx.members = op, (before, after), members
        _, result = _carried_out(ctx, handle)
        if op in _PICKING:
            ctx.save_for_backward(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        before, after = ctx.factors
        if ctx.op in _PICKING:
            picked = _picked_gradient(ctx.op, ctx.factors, ctx.saved_tensors[0], gradient, ctx.name, ctx.members)
        else:
            picked = allreduce(gradient, None, ctx.name, Compression.none, ctx.op, before, after, ctx.members)
        return picked, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    """:func:`grouped_allreduce` with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: ReduceOp, before: float, after: float, members: ProcessSet, *tensors: Tensor
    ) -> Any:
        handle = _allreduce_async(tensors, False, True, name, op, before, after, members)
        ctx.op, ctx.factors, ctx.members = op, (before, after), members
        _, result = _carried_out(ctx, handle)
        if op in _PICKING:
            ctx.save_for_backward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        before, after = ctx.factors
        if ctx.op in _PICKING:
            answer = [
                _picked_gradient(ctx.op, ctx.factors, tensor, gradient, f"{ctx.name}.{i}", ctx.members)
                for i, (tensor, gradient) in enumerate(zip(ctx.saved_tensors, gradients, strict=True))
            ]
        else:
            answer = grouped_allreduce(gradients, None, ctx.name, Compression.none, ctx.op, before, after, ctx.members)
        return None, None, None, None, None, *answer


_PICKING = (Min, Max, Product)
"""Ops whose gradient depends on the inputs."""


def _picked_gradient(
    op: ReduceOp, factors: tuple[float, float], tensor: Tensor, gradient: Tensor, name: str, members: ProcessSet
) -> Tensor:
    """Min, Max: to the ranks that have the result, in equal parts. Product: times the other ranks' values."""
    total = allreduce(gradient, None, f"{name}.sum", Compression.none, Sum, process_set=members)
    rows = allgather(tensor.detach().unsqueeze(0) * factors[0], f"{name}.inputs", members)
    mine = members.rank()
    assert mine is not None
    if op == Product:
        others = torch.cat([rows[:mine], rows[mine + 1 :]]).prod(0)
        return total * others * (factors[0] * factors[1])
    best = rows.amin(0) if op == Min else rows.amax(0)
    winners = (rows == best).to(total.dtype)
    return total * (winners[mine] / winners.sum(0)) * (factors[0] * factors[1])


class HorovodAllgather(torch.autograd.Function):
    """:func:`allgather` with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, members: ProcessSet) -> Any:
        pending, result = _carried_out(ctx, allgather_async(tensor, name, members))
        ctx.members, ctx.rows = members, [each[0] for each in pending.sizes]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = allreduce(gradient, None, ctx.name, Compression.none, Average, process_set=ctx.members)
        return mean.split(ctx.rows)[ctx.members.rank()], None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """:func:`grouped_allgather` with a gradient."""

    @staticmethod
    def forward(ctx: Any, name: str | None, members: ProcessSet, *tensors: Tensor) -> Any:
        pending, result = _carried_out(ctx, grouped_allgather_async(tensors, name, members))
        ctx.members, ctx.rows = members, list(zip(*pending.sizes, strict=True))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        means = grouped_allreduce(gradients, None, ctx.name, Compression.none, Average, process_set=ctx.members)
        mine = ctx.members.rank()
        return None, None, *(mean.split(rows)[mine] for mean, rows in zip(means, ctx.rows, strict=True))


class HorovodBroadcast(torch.autograd.Function):
    """:func:`broadcast` with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, members: ProcessSet) -> Any:
        _, result = _carried_out(ctx, broadcast_async(tensor, root_rank, name, members))
        ctx.members, ctx.root = members, root_rank
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mean = allreduce(gradient, None, ctx.name, Compression.none, Average, process_set=ctx.members)
        return (mean if rank() == ctx.root else torch.zeros_like(mean)), None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """:func:`alltoall` with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, members: ProcessSet) -> Any:
        _, (result, received) = _carried_out(ctx, alltoall_async(tensor, splits, name, members))
        ctx.members, ctx.received = members, received
        ctx.rows = tensor.shape[0]
        if splits is None:
            return result
        if isinstance(splits, Tensor):
            received = received.to(splits.device)
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        mine, _ = alltoall(gradient, ctx.received, ctx.name, ctx.members)
        unsent = mine.new_zeros(ctx.rows - mine.shape[0], *mine.shape[1:])
        return torch.cat([mine, unsent]) if len(unsent) else mine, None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """:func:`reducescatter` with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str | None, op: int, members: ProcessSet, before: float, after: float
    ) -> Any:
        handle = _reducescatter_async([tensor], False, name, op, members, before, after)
        ctx.members, ctx.factor = members, _scatter_factor(op, members, before, after)
        return _carried_out(ctx, handle)[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return allgather(gradient * ctx.factor, ctx.name, ctx.members), None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """:func:`grouped_reducescatter` with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, members: ProcessSet, before: float, after: float, *tensors: Tensor
    ) -> Any:
        handle = _reducescatter_async(tensors, True, name, op, members, before, after)
        ctx.members, ctx.factor = members, _scatter_factor(op, members, before, after)
        return _carried_out(ctx, handle)[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        return None, None, None, None, None, *grouped_allgather(scaled, ctx.name, ctx.members)


def _scatter_factor(op: int, members: ProcessSet, before: float, after: float) -> float:
    """Horovod's: what was summed counts for every rank."""
    count_ = members.size() if op == Sum else 1
    assert count_ is not None
    return count_ * before * after
