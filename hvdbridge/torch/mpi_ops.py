"""Horovod's operations on tensors (``horovod.torch.mpi_ops``), on any backend, with or without MPI.

Rules:

1. Names, arguments, defaults, results and types of exceptions are those of ``horovod.torch`` 0.28.
   docs/reference/horovod-api.md lists the differences, where Horovod is wrong or refuses without need.
2. The name of a backward operation is derived from its forward operation, so backwards of two operations never match.
3. ``Average`` sums first. One multiplication then divides and applies the postscale factor, as in Horovod, so results
   are equal bit by bit.
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
    _allreduce, _op_of, _reducescatter, _start, allgather_async, allreduce_, allreduce_async,
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
    """Reduce a tensor over the ranks into a new tensor of the same shape and dtype. Differentiable.

    Args:
        tensor: dense tensor of any shape and strides, of equal shape and dtype on all ranks; a floating-point, integer,
            bool or complex dtype.
        average: deprecated form of ``op``: True is Average, False is Sum.
        name: ranks match operations by it; None: a running number.
        compression: compressor of the data to send (:class:`Compression`).
        op: ``Average`` (default), ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``.
        prescale_factor, postscale_factor: factors that multiply the tensor before and after the reduction.
        process_set: the ranks that take part.

    Raises:
        ValueError: before ``init``; ``op`` does not support the dtype; this rank is not in the process set.
        NotImplementedError: Adasum on a process set, or with a number of ranks that is not a power of two.
        DuplicateNameError: the name is in flight (a ValueError and a HorovodInternalError).
        HorovodInternalError: shape, dtype, op or factors differ between ranks; another rank failed.
    """
    compressed, context = compression.compress(tensor)
    reduction, factors = _op_of(op, average), (prescale_factor, postscale_factor)
    (reduced,) = _allreduced([compressed], False, name, reduction, factors, process_set)
    return compression.decompress(reduced, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Reduce several tensors as one :func:`allreduce`, which succeeds or fails as a whole. Differentiable."""
    compressed, contexts = _compress_all(compression, tensors)
    reduction, factors = _op_of(op, average), (prescale_factor, postscale_factor)
    results = _allreduced(compressed, True, name, reduction, factors, process_set)
    return [compression.decompress(reduced, context) for reduced, context in zip(results, contexts, strict=True)]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Differentiable.

    Args:
        tensor: tensor of shape ``[n, ...]``; the dtype and all dimensions but ``n`` are equal on all ranks.
        name, process_set: as in :func:`allreduce`.

    Returns:
        A tensor of shape ``[sum of n, ...]``.

    Raises:
        HorovodInternalError: the tensor has no dimension; dtypes or the other dimensions differ between ranks.
        ValueError, DuplicateNameError: see :func:`allreduce`.
    """
    return _allgathered([tensor], False, name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Concatenate several tensors as one :func:`allgather`. Differentiable."""
    return _allgathered(tensors, True, name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a new tensor with the values of rank ``root_rank`` (a rank of the job). Differentiable.

    Args:
        tensor: dense tensor of equal shape and dtype on all ranks.
        name, process_set: as in :func:`allreduce`.

    Raises:
        ValueError: ``root_rank`` is not in the process set; see :func:`allreduce`.
        HorovodInternalError: shape, dtype or root differ between ranks; another rank failed.
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
        tensor: tensor of shape ``[n, ...]``; the other dimensions and the dtype are equal on all ranks.
        splits: the number of consecutive rows for each rank, in rank order: a list, or a 1D int32 tensor. Their sum is
            at most ``n``. Default: ``n / size`` rows for each.
        name, process_set: as in :func:`allreduce`.

    Returns:
        The received rows in rank order. With ``splits`` a pair: the rows, and an int32 tensor of their number by rank.

    Raises:
        ValueError: ``splits`` do not fit the tensor or the number of ranks; see :func:`allreduce`.
        HorovodInternalError: dtypes or the other dimensions differ between ranks; another rank failed.
    """

    def start(tensors: Sequence[Tensor]) -> int:
        return alltoall_async(tensors[0], splits, name, process_set)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        received = [counts[process_set.rank()] for counts in ctx.sizes]
        sent, _ = alltoall(gradients[0], received, ctx.name, process_set)
        unsent = sent.new_zeros(ctx.shapes[0][0] - sent.shape[0], *sent.shape[1:])
        return [torch.cat([sent, unsent]) if len(unsent) else sent]

    result, received = _apply(start, gradient, [tensor])
    if splits is None:
        return result
    return result, received.to(splits.device) if isinstance(splits, Tensor) else received


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Reduce a tensor over the ranks, and return this rank's rows of the result. Differentiable.

    Args:
        tensor: tensor of shape ``[n, ...]``, equal on all ranks. Rank 0 gets the first rows, and so on; if ``n`` is not
            a multiple of the number of ranks, the first ranks get one row more.
        op: ``Average`` (default) or ``Sum``.
        name, compression, process_set, prescale_factor, postscale_factor: as in :func:`allreduce`.

    Raises:
        ValueError: the tensor has no dimension; see :func:`allreduce`.
        HorovodInternalError: another ``op``; shape, dtype, op or factors differ between ranks; another rank failed.
    """
    compressed, context = compression.compress(tensor)
    (reduced,) = _reducescattered([compressed], False, name, op, (prescale_factor, postscale_factor), process_set)
    return compression.decompress(reduced, context)  # type: ignore[no-any-return]


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """Reduce several tensors as one :func:`reducescatter`. Differentiable."""
    compressed, contexts = _compress_all(compression, tensors)
    results = _reducescattered(compressed, True, name, op, (prescale_factor, postscale_factor), process_set)
    return [compression.decompress(reduced, context) for reduced, context in zip(results, contexts, strict=True)]


def _compress_all(compression: Any, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Return the compressed tensors and their contexts; raise ValueError if there are none."""
    if not tensors:
        raise ValueError("a grouped operation needs at least one tensor")
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    return compressed, contexts


Gradient = Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]
"""Backward function: takes a context and the gradients of the outputs, and returns the gradients of the inputs."""


class HorovodOperation(torch.autograd.Function):
    """A differentiable raw operation.

    ``forward`` calls ``start(tensors)`` and waits for the handle that it returns. ``backward`` calls ``gradient`` with
    the context, which holds a ``name`` for the backward operation, the decision's ``sizes``, the tensors' ``shapes``
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
    result = HorovodOperation.apply(start, gradient, saves, *tensors)  # type: ignore[no-untyped-call]
    return result if isinstance(result, tuple) else (result,)


def _allreduced(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: ReduceOp, factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a differentiable all-reduce of one tensor or a group."""
    nonlinear = op in (Min, Max, Product)

    def start(tensors: Sequence[Tensor]) -> int:
        return _allreduce(tensors, name, op, *factors, process_set, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if not nonlinear:
            return _allreduced(gradients, grouped, ctx.name, op, factors, process_set)
        return [
            _nonlinear_gradient(op, factors, tensor, gradient, f"{ctx.name}.{i}", process_set)
            for i, (tensor, gradient) in enumerate(zip(ctx.saved_tensors, gradients, strict=True))
        ]

    return _apply(start, gradient, tensors, saves=nonlinear)


def _nonlinear_gradient(
    op: ReduceOp, factors: tuple[float, float], tensor: Tensor, gradient: Tensor, name: str, process_set: ProcessSet
) -> Tensor:
    """Return the gradient of Min, Max or Product with respect to this rank's ``tensor``.

    Of Min and Max it goes, in equal shares, to the ranks that have the result; of Product it is multiplied by the other
    ranks' values.
    """
    total = allreduce(gradient, None, f"{name}.sum", Compression.none, Sum, process_set=process_set)
    inputs = allgather(tensor.detach().unsqueeze(0) * factors[0], f"{name}.inputs", process_set)
    index = process_set.rank()
    assert index is not None
    if op == Product:
        others = torch.cat([inputs[:index], inputs[index + 1 :]]).prod(0)
        return total * others * (factors[0] * factors[1])
    extremum = inputs.amin(0) if op == Min else inputs.amax(0)
    is_extremum = (inputs == extremum).to(total.dtype)
    return total * (is_extremum[index] / is_extremum.sum(0)) * (factors[0] * factors[1])


def _allgathered(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    def start(tensors: Sequence[Tensor]) -> int:
        return _start("allgather", tensors, name, process_set, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        means = _allreduced(gradients, grouped, ctx.name, Average, (1.0, 1.0), process_set)
        row_counts = zip(*ctx.sizes, strict=True)  # [tensor][member]
        return [mean.split(counts)[process_set.rank()] for mean, counts in zip(means, row_counts, strict=True)]

    return _apply(start, gradient, tensors)


def _reducescattered(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, factors: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[Tensor, ...]:  # fmt: skip
    def start(tensors: Sequence[Tensor]) -> int:
        return _reducescatter(tensors, name, op, process_set, *factors, grouped=grouped)

    def gradient(ctx: Any, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = process_set.size() if op == Sum else 1  # as in Horovod
        assert scale is not None
        factor = scale * factors[0] * factors[1]
        return _allgathered([gradient * factor for gradient in gradients], grouped, ctx.name, process_set)

    return _apply(start, gradient, tensors)
