"""Horovod's asynchronous and in-place operations, which autograd does not differentiate.

An asynchronous operation starts at once and returns an integer handle. Operations without a name are numbered per kind
and process set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hvdbridge.policy.buffer_pool import overlaps
from hvdbridge.torch import arithmetic, basics
from hvdbridge.torch.basics import _REDUCE_OPS, Adasum, Average, ReduceOp, Sum, _current, _handles, size
from hvdbridge.torch.exceptions import internal_error
from hvdbridge.torch.process_sets import ProcessSet, global_process_set

_handle_numbers = count(1)


def _start(
    kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *,
    reduction: ReduceOp | None = None, in_place: bool = False, grouped: bool = False, **more: Any,
) -> int:  # fmt: skip
    """Submit an operation to :meth:`~hvdbridge.torch.operations.Operations.submit`, and return its handle.

    Args:
        more: further arguments of ``submit``.

    Raises:
        ValueError: the operation cannot take one of the tensors; the process set is not registered.
    """
    if not tensors:
        raise ValueError("a grouped operation needs at least one tensor")
    for tensor in tensors:
        _check_tensor(tensor, reduction, in_place)
    if reduction is not None:
        more["op"] = reduction.name
    label = "allreduce" if kind == "adasum" else kind
    pending = _current().submit(
        kind, name, tensors, label=f"grouped_{label}" if grouped and kind != "alltoall" else label, in_place=in_place,
        grouped=grouped, process_set=_process_set_id(process_set), **more,
    )  # fmt: skip
    handle = next(_handle_numbers)
    _handles[handle] = pending
    return handle


def _check_tensor(tensor: Any, reduction: ReduceOp | None = None, in_place: bool = False) -> None:
    """Raise ValueError if ``tensor`` cannot be sent, reduced by ``reduction`` or, with ``in_place``, overwritten."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"hvd's operations take tensors, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"Tensor type {tensor.type()} is not supported: use sparse_allreduce_async, or to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazily conjugated tensor has other bits than values: call .clone() first")
    if reduction is not None and (reason := arithmetic.unsupported_reason(tensor.dtype, reduction.name)):
        raise ValueError(reason)
    if in_place and overlaps(tensor):
        raise ValueError(
            f"a tensor that is expanded, or whose elements share memory, cannot be written in place: shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}"
        )


def poll(handle: Any) -> bool:
    """Return whether the operation has ended, so that :func:`synchronize` would not block.

    Raises:
        ValueError: ``handle`` is unknown, or was synchronized already.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _current().poll(_handles[handle])


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation, and return its result.

    Args:
        handle: the return value of an ``*_async`` function, :func:`sparse_allreduce_async` included.

    Returns:
        A tensor; a tuple of tensors for grouped operations and all-to-all; None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, here or on another rank.
    """
    if callable(handle):
        return handle()
    pending = _handles.pop(handle, None)
    if pending is None:
        return None
    if basics._operations is None:
        if pending.error or not pending.done.is_set():
            raise internal_error(pending.error or f"{pending.request.title}: hvd.shutdown() was called before it ended")
        return pending.result
    return basics._operations.wait(pending)


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' all-reduces and optimizer steps until all ranks have joined.

    A rank without further data calls this, while other ranks continue to train.

    Args:
        device: ignored; zeros are allocated on the device type of the other ranks' tensors.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: another rank started an operation that needs data of this rank, or ended.
    """
    return _current().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of the set have called this function."""
    operations = _current()
    operations.wait(operations.submit("barrier", None, [], process_set=_process_set_id(process_set)))


def _process_set_id(process_set: ProcessSet) -> int:
    """Return the set's number; raise ValueError if the set is not registered."""
    process_set_id = process_set.process_set_id
    if process_set_id is None:
        raise ValueError(f"{process_set} does not exist, or has not been registered: use hvd.add_process_set()")
    return process_set_id


def _op_of(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that ``op`` or the deprecated ``average`` selects; Average if both are None."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if int(op) not in _REDUCE_OPS:
            raise ValueError(f"op={op!r} is no reduction: use one of {', '.join(map(repr, _REDUCE_OPS.values()))}")
        return _REDUCE_OPS[int(op)]
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Average if average else Sum


handle_average_backwards_compatibility = _op_of


def _allreduce(
    tensors: Sequence[Tensor], name: str | None, op: ReduceOp, prescale_factor: float, postscale_factor: float,
    process_set: ProcessSet, *, in_place: bool = False, grouped: bool = False,
) -> int:  # fmt: skip
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if size() & (size() - 1):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    return _start(
        "adasum" if op == Adasum else "allreduce", tensors, name, process_set, reduction=op, in_place=in_place,
        grouped=grouped, factors=(float(prescale_factor), float(postscale_factor)),
    )  # fmt: skip


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`allreduce` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    return _allreduce([tensor], name, _op_of(op, average), prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`allreduce_` and return a handle for :func:`poll` and :func:`synchronize`."""
    reduction = _op_of(op, average)
    return _allreduce([tensor], name, reduction, prescale_factor, postscale_factor, process_set, in_place=True)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Reduce ``tensor`` in place as :func:`allreduce` does, and return it. Not differentiable."""
    handle = allreduce_async_(tensor, None, name, _op_of(op, average), prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`grouped_allreduce` and return a handle, whose result is a tuple. Not differentiable."""
    return _allreduce(tensors, name, _op_of(op, average), prescale_factor, postscale_factor, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`grouped_allreduce_` and return a handle, whose result is a tuple."""
    return _allreduce(
        tensors, name, _op_of(op, average), prescale_factor, postscale_factor, process_set, in_place=True, grouped=True
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Reduce tensors in place as :func:`grouped_allreduce` does, and return them. Not differentiable."""
    handle = grouped_allreduce_async_(
        tensors, None, name, _op_of(op, average), prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of sparse COO tensors, by all-gathers of their indices and values.

    Returns:
        A function without arguments that waits for the result and returns it: an uncoalesced sparse COO tensor of the
        same shape.

    Raises:
        ValueError: ``op`` is neither Average nor Sum.
    """
    reduction = _op_of(op, None)
    if reduction not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async takes Average and Sum, got {reduction!r}")
    prefix = name or None
    indices_handle = allgather_async(tensor._indices().t().contiguous(), prefix and f"{prefix}.indices", process_set)
    values_handle = allgather_async(tensor._values(), prefix and f"{prefix}.values", process_set)
    members = process_set.size()

    def handle() -> Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if reduction == Average:
            values = values / members
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), check_invariants=False)

    return handle


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    return _start("allgather", [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather` and return a handle, whose result is a tuple. Not differentiable."""
    return _start("allgather", tensors, name, process_set, grouped=True)


def _broadcast_async(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool) -> int:
    root = _checked_root("broadcast", root_rank, process_set)
    return _start("broadcast", [tensor], name, process_set, in_place=in_place, root=root)


def _checked_root(kind: str, root_rank: int, process_set: ProcessSet) -> int:
    """Return ``root_rank``; raise ValueError if it is not a member of the set."""
    members = _current().members(_process_set_id(process_set))
    if root_rank not in members:
        raise ValueError(f"{kind} received invalid root rank {root_rank} for provided process set {members}")
    return int(root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_` and return a handle for :func:`poll` and :func:`synchronize`."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite ``tensor`` with the values of rank ``root_rank``, and return it. Not differentiable."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`alltoall` and return a handle, whose result is always ``(tensor, received_splits)``."""
    _check_tensor(tensor)
    counts = _row_counts(tensor, splits, len(_current().members(_process_set_id(process_set))))
    return _start("alltoall", [tensor], name, process_set, grouped=True, splits=counts)


def _row_counts(tensor: Tensor, splits: Any, members: int) -> tuple[int, ...]:
    """Return how many rows of ``tensor`` go to each member; raise ValueError if ``splits`` do not fit."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None or (hasattr(splits, "__len__") and len(splits) == 0):
        if rows % members:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers: "
                f"{rows} rows, {members} ranks"
            )
        return (rows // members,) * members
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits, dtype=torch.int32, device="cpu")
    if given.dim() > 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if given.dtype != torch.int32:
        raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, got {given.dtype}")
    counts = tuple(int(count) for count in given.tolist())
    if len(counts) != members:
        raise ValueError(f"Number of entries in splits does not equal number of workers: {len(counts)}, {members}")
    if min(counts) < 0:
        raise ValueError(f"splits must not be negative, got {list(counts)}")
    if sum(counts) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor: {sum(counts)}, {rows} rows"
        )
    return counts


def _reducescatter(
    tensors: Sequence[Tensor], name: str | None, op: int, process_set: ProcessSet, prescale_factor: float,
    postscale_factor: float, grouped: bool = False,
) -> int:  # fmt: skip
    reduction = _op_of(op, None)
    if reduction not in (Average, Sum):
        raise internal_error(f"Reducescatter currently only supports AVERAGE and SUM, got {reduction!r}")
    if any(getattr(tensor, "ndim", 1) == 0 for tensor in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    factors = float(prescale_factor), float(postscale_factor)
    return _start("reducescatter", tensors, name, process_set, reduction=reduction, grouped=grouped, factors=factors)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start :func:`reducescatter` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    return _reducescatter([tensor], name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start :func:`grouped_reducescatter` and return a handle, whose result is a tuple. Not differentiable."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, grouped=True)
