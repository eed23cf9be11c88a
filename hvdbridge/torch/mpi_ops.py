"""Horovod's operations on tensors, on whatever backend runs.

Rules:

1. Names, arguments, defaults, results and types of exceptions are those of ``horovod.torch`` 0.28. docs/horovod.md
   lists the differences, where Horovod is wrong or refuses without need.
2. A gradient's name is made of the name of its forward operation, so gradients of several operations never match.
3. ``Average`` sums first. One multiplication afterwards divides and applies the postscale factor, as in Horovod, so the
   bits are the same.
4. Autograd differentiates the sum of all ranks' losses: the gradient of a sum is the sum of all ranks' gradients. As in
   Horovod, the gradient of an average, a gather or a broadcast is the average of the ranks' gradients.
"""

# ruff: noqa: F401, I001 (scripts import all of these from here)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdbridge.torch.asynchronous import (
    _allreduce, _chosen, _reducescatter, _start, allgather_async, allreduce_, allreduce_async,
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
        name: ranks match operations by it.
        compression: of the data that travels (:class:`Compression`).
        op: ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``.
        prescale_factor, postscale_factor: before and after the reduction.
        process_set: the ranks that take part.

    Raises:
        ValueError: before ``init``; a dtype that ``op`` does not know; this rank is not in the set.
        DuplicateNameError: the name is in flight (a ValueError and a HorovodInternalError).
        HorovodInternalError: ranks disagree about shape, dtype, op or factors; or another rank failed.
    """
    small, context = compression.compress(tensor)
    chosen, factors = _chosen(op, average), (prescale_factor, postscale_factor)
    (answer,) = _allreduced([small], False, name, chosen, factors, process_set)
    return compression.decompress(answer, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """:func:`allreduce` of several tensors as one operation, which succeeds or fails as a whole. Differentiable."""
    small, contexts = zip(*map(compression.compress, tensors), strict=True)
    chosen, factors = _chosen(op, average), (prescale_factor, postscale_factor)
    answers = _allreduced(small, True, name, chosen, factors, process_set)
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors one after the other along the first dimension, which may differ. Differentiable.

    Args:
        tensor: ``[n, ...]``, ``n`` of this rank; the other dimensions and the dtype are the same on all ranks.
        name, process_set: as in :func:`allreduce`.

    Raises:
        HorovodInternalError: a tensor without dimensions, or other dimensions that differ; see :func:`allreduce`.
    """
    return _allgathered([tensor], False, name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """:func:`allgather` of several tensors as one operation. Differentiable."""
    return _allgathered(tensors, True, name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the values of rank ``root_rank`` (a rank of the job). Differentiable.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        HorovodInternalError: ranks disagree about shape, dtype or root; see :func:`allreduce`.
    """

    def start(tensors: Sequence[Tensor]) -> int:
        return broadcast_async(tensors[0], root_rank, name, process_set)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        (mean,) = _allreduced(gradients, False, ctx.name, Average, (1.0, 1.0), process_set)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return _apply(start, gradient, [tensor])[0]


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

    def start(tensors: Sequence[Tensor]) -> int:
        return alltoall_async(tensors[0], splits, name, process_set)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        received = [each[process_set.rank()] for each in ctx.sizes]
        mine, _ = alltoall(gradients[0], received, ctx.name, process_set)
        unsent = mine.new_zeros(ctx.shapes[0][0] - mine.shape[0], *mine.shape[1:])
        return [torch.cat([mine, unsent]) if len(unsent) else mine]

    result, received = _apply(start, gradient, [tensor])
    if splits is None:
        return result
    return result, received.to(splits.device) if isinstance(splits, Tensor) else received


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
    (answer,) = _reducescattered([small], False, name, op, (prescale_factor, postscale_factor), process_set)
    return compression.decompress(answer, context)  # type: ignore[no-any-return]


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """:func:`reducescatter` of several tensors as one operation. Differentiable."""
    small, contexts = zip(*map(compression.compress, tensors), strict=True)
    answers = _reducescattered(small, True, name, op, (prescale_factor, postscale_factor), process_set)
    return [compression.decompress(answer, context) for answer, context in zip(answers, contexts, strict=True)]


Gradient = Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]
"""Of a context and the gradients of an operation's results: the gradients of its tensors."""


class HorovodOperation(torch.autograd.Function):
    """A raw operation with a gradient.

    ``forward`` calls ``start`` with the tensors and waits for the handle that it returns. ``backward`` calls
    ``gradient`` with the context: a ``name`` for its own operation, the decision's ``sizes``, the tensors' ``shapes``
    and, if ``saves``, the tensors themselves.
    """

    @staticmethod
    def forward(
        ctx: Any, start: Callable[[Sequence[Tensor]], int], gradient: Gradient, saves: bool, *tensors: Tensor
    ) -> Any:
        handle = start(tensors)
        pending = _handles[handle]
        result = synchronize(handle)
        ctx.gradient, ctx.name, ctx.sizes = gradient, f"{pending.request.name}.gradient", pending.sizes
        ctx.shapes = [tensor.shape for tensor in tensors]
        if saves:
            ctx.save_for_backward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *ctx.gradient(ctx, gradients)


HorovodAllreduce = HorovodGroupedAllreduce = HorovodAllgather = HorovodGroupedAllgather = HorovodOperation
HorovodBroadcast = HorovodAlltoall = HorovodReducescatter = HorovodGroupedReducescatter = HorovodOperation


def _apply(
    start: Callable[[Sequence[Tensor]], int], gradient: Gradient, tensors: Sequence[Tensor], saves: bool = False
) -> tuple[Tensor, ...]:
    answer = HorovodOperation.apply(start, gradient, saves, *tensors)  # type: ignore[no-untyped-call]
    return answer if isinstance(answer, tuple) else (answer,)


def _allreduced(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: ReduceOp, factors: tuple[float, float],
    members: ProcessSet,
) -> tuple[Tensor, ...]:  # fmt: skip
    picking = op in (Min, Max, Product)

    def start(tensors: Sequence[Tensor]) -> int:
        return _allreduce(tensors, name, op, *factors, members, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if not picking:
            return _allreduced(gradients, grouped, ctx.name, op, factors, members)
        return [
            _picked_gradient(op, factors, tensor, gradient, f"{ctx.name}.{i}", members)
            for i, (tensor, gradient) in enumerate(zip(ctx.saved_tensors, gradients, strict=True))
        ]

    return _apply(start, gradient, tensors, saves=picking)


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


def _allgathered(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, members: ProcessSet
) -> tuple[Tensor, ...]:
    def start(tensors: Sequence[Tensor]) -> int:
        return _start("allgather", tensors, name, members, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        means = _allreduced(gradients, grouped, ctx.name, Average, (1.0, 1.0), members)
        rows = zip(*ctx.sizes, strict=True)  # of each tensor, by member
        return [mean.split(counts)[members.rank()] for mean, counts in zip(means, rows, strict=True)]

    return _apply(start, gradient, tensors)


def _reducescattered(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, factors: tuple[float, float],
    members: ProcessSet,
) -> tuple[Tensor, ...]:  # fmt: skip
    def start(tensors: Sequence[Tensor]) -> int:
        return _reducescatter(tensors, name, op, members, *factors, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        count = members.size() if op == Sum else 1  # Horovod's: what was summed counts for every rank
        assert count is not None
        factor = count * factors[0] * factors[1]
        return _allgathered([gradient * factor for gradient in gradients], grouped, ctx.name, members)

    return _apply(start, gradient, tensors)
