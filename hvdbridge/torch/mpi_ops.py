"""Horovod's operations on tensors, on whatever backend runs.

Rules:

1. Names, arguments, defaults and results are those of ``horovod.torch`` 0.28; what Horovod rejects is rejected with the
   same type of exception. Where Horovod is wrong or refuses without need, docs/horovod.md says what is done here.
2. Operations without a name get running numbers per kind and process set. A gradient takes the name of its forward
   operation, so that it never meets the gradient of another one.
3. ``Average`` sums first and divides after, with the postscale factor in one multiplication; so the bits are Horovod's.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hvdbridge import runtime
from hvdbridge.memory import overlaps
from hvdbridge.torch import arithmetic
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import HorovodInternalError as HorovodInternalError
from hvdbridge.torch.exceptions import NoInitError, internal_error
from hvdbridge.torch.operations import Operations, Pending
from hvdbridge.torch.process_sets import ProcessSet, _init_process_sets, _setup, global_process_set
from hvdbridge.torch.process_sets import add_process_set as add_process_set
from hvdbridge.torch.process_sets import remove_process_set as remove_process_set
from hvdbridge.torch.settings import Settings, report_unheeded
from hvdbridge.torch.util import check_installed_version as check_installed_version
from hvdbridge.torch.util import get_average_backwards_compatibility_fun as get_average_backwards_compatibility_fun
from hvdbridge.torch.util import gpu_available as gpu_available
from hvdbridge.torch.util import num_rank_is_power_2 as num_rank_is_power_2


class ReduceOp(int):
    """A reduction: an integer, as in Horovod, that knows its name.

    >>> Average, int(Product)
    (Average, 5)
    """

    name: str

    def __new__(cls, value: int, name: str) -> ReduceOp:
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return _op_of, (int(self),)


def _op_of(value: int) -> ReduceOp:
    return _OPS[value]


Average = ReduceOp(0, "Average")
Sum = ReduceOp(1, "Sum")
Adasum = ReduceOp(2, "Adasum")
Min = ReduceOp(3, "Min")
Max = ReduceOp(4, "Max")
Product = ReduceOp(5, "Product")
_OPS = {int(op): op for op in (Average, Sum, Adasum, Min, Max, Product)}

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_operations: Operations | None = None
_owns_session = False
_handles: dict[int, Pending] = {}
_numbers = count(1)


# The session ------------------------------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Begin; collective. Calls ``hb.init()`` if that has not happened. Harmless when repeated.

    Args:
        comm: None, or all ranks (a list, or an mpi4py communicator). To work with some of them use process sets.
        process_sets: sets to register at once; ``"dynamic"`` is accepted, sets can always be added here.

    Raises:
        ValueError: a set is there twice, or has ranks that do not exist.
        NotImplementedError: ``comm`` is a part of the ranks.
        HvdbridgeError: of ``hb.init()``: ranks that do not find each other, a backend that is not installed.
    """
    global _operations, _owns_session
    if _operations is not None and not _operations.closed:
        return
    _handles.clear()
    owns = not runtime.is_initialized()
    if owns:
        with _without_native_timeline():
            runtime.init()
    session = runtime.current()
    if _size_of(comm) not in (0, session.world.size):
        if owns:
            runtime.shutdown()
        raise NotImplementedError(
            f"hvd.init(comm={comm!r}): of {session.world.size} ranks. hvdbridge starts all ranks of a job; "
            "use hvd.ProcessSet for operations of some of them"
        )
    settings = Settings.from_environment(session.config.stall_seconds, session.config.timeout_seconds)
    if session.backend != "horovod":  # the real Horovod below heeds its own variables
        report_unheeded(session.world.rank)
    elif not owns and settings.timeline:  # and writes this file already
        settings = replace(settings, timeline="")
    _operations = operations = Operations(session, settings)
    _owns_session = owns
    runtime.at_shutdown(_close)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    _setup(operations)
    global_process_set.ranks = list(range(operations.size))
    if process_sets is None or isinstance(process_sets, str):
        return
    _init_process_sets(process_sets)


def shutdown() -> None:
    """End; collective. Also closes the session, if :func:`init` opened it. Harmless without one.

    Operations of other ranks that wait for this one fail with HorovodInternalError.
    """
    if _operations is None:
        return
    _operations.leave()
    if _owns_session:
        runtime.shutdown()
        return
    if _operations.failure == "" and _operations.size > 1:
        _operations.session.monitor.agree("hvd.shutdown()", "")
    runtime.forget_at_shutdown(_close)
    _close()


def _close() -> None:
    """All ranks close."""
    global _operations
    operations, _operations = _operations, None
    if operations is not None:
        operations.close()
    _setup(None)
    atexit.unregister(_leave_at_exit)


def _leave_at_exit() -> None:
    """The script has come to its end; the session, which waits for all ranks, closes after this."""
    if _operations is not None and _operations.session._pid == os.getpid():
        _operations.leave()


@contextmanager
def _without_native_timeline() -> Iterator[None]:
    """The real Horovod below must not write the file that we write."""
    path = os.environ.pop("HOROVOD_TIMELINE", None)
    try:
        yield
    finally:
        if path is not None:
            os.environ["HOROVOD_TIMELINE"] = path


def _size_of(comm: Any) -> int:
    """Of the ranks that are meant; 0: all."""
    if comm is None:
        return 0
    return int(comm.Get_size()) if hasattr(comm, "Get_size") else len(list(comm))


def _current() -> Operations:
    if _operations is None:
        raise internal_error(NOT_INITIALIZED, NoInitError)
    return _operations


def is_initialized() -> bool:
    """Whether :func:`init` was called, and :func:`shutdown` not."""
    return _operations is not None


def rank() -> int:
    """This process among all. Raises ValueError before :func:`init`, as all of these do."""
    return _current().rank


def size() -> int:
    """How many processes there are."""
    return _current().size


def local_rank() -> int:
    """This process among those of its host."""
    return _current().session.world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return _current().session.world.local_size


def cross_rank() -> int:
    """This host among those that have a process of this local rank."""
    return _cross_peers().index(_current().rank)


def cross_size() -> int:
    """How many hosts have a process of this local rank."""
    return len(_cross_peers())


def _cross_peers() -> list[int]:
    session = _current().session
    return [world.rank for world in session.worlds if world.local_rank == session.world.local_rank]


def is_homogeneous() -> bool:
    """Whether every host has as many processes as the others."""
    return len({world.local_size for world in _current().session.worlds}) == 1


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises:
        ValueError: MPI is not the backend.
    """
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    from sys import modules

    mpi = modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether data travels by MPI now."""
    return runtime.is_initialized() and runtime.backend() == "mpi"


def mpi_built() -> bool:
    """Whether the MPI backend is installed."""
    from hvdbridge.communicators import installed

    return installed("mpi")


def gloo_enabled() -> bool:
    """Whether data travels by Gloo now (torch.distributed's, or the real Horovod's)."""
    return runtime.is_initialized() and runtime.backend() != "mpi"


def gloo_built() -> bool:
    """Whether torch.distributed has Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as an integer (21805 is 2.18.5), 0 without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = (int(part) for part in (*torch.cuda.nccl.version(), 0, 0)[:3])
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Intel's oneCCL: never."""
    return False


def cuda_built() -> bool:
    """Whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch has ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes a trace of the operations from now on to ``file_path`` (Chrome's JSON).

    Raises:
        ValueError: before :func:`init`.
    """
    _current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the trace that :func:`start_timeline` or HOROVOD_TIMELINE began.

    Raises:
        ValueError: before :func:`init`.
    """
    _current().stop_timeline()


# Handles ----------------------------------------------------------------------------------------------------


def _handle(pending: Pending) -> int:
    number = next(_numbers)
    _handles[number] = pending
    return number


def poll(handle: Any) -> bool:
    """Whether :func:`synchronize` would not block.

    Raises:
        ValueError: no such handle, or it was synchronized.
    """
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _current().poll(_handles[handle])


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation; its result: a tensor, or a tuple of tensors (grouped, all-to-all).

    A handle of :func:`sparse_allreduce_async` is called; an unknown one gives None.

    Raises:
        HorovodInternalError: the operation failed, here or on another rank.
    """
    if callable(handle):
        return handle()
    pending = _handles.pop(handle, None)
    if pending is None:
        return None
    if _operations is None:
        if pending.error or not pending.done.is_set():
            raise internal_error(pending.error or f"{pending.request.title}: hvd.shutdown() was called before it ended")
        return pending.result
    return _operations.wait(pending)


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the others' all-reduces, and in the steps of their
    DistributedOptimizers, with zeros until all have joined.

    Args:
        device: not used; zeros are made where the others' tensors are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: an operation other than an all-reduce was started meanwhile, or a rank ended.
    """
    return _current().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the set have come."""
    operations = _current()
    operations.wait(operations.submit("barrier", "barrier", None, [], process_set=_number(process_set)))


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} does not exist, or has not been registered: use hvd.add_process_set()")
    return number


# All-reduce -------------------------------------------------------------------------------------------------


def _chosen(op: int | None, average: bool | None) -> ReduceOp:
    """The reduction of a caller that may give either, or neither."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if int(op) not in _OPS:
            raise ValueError(f"op={op!r} is no reduction: use one of {', '.join(map(repr, _OPS.values()))}")
        return _OPS[int(op)]
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Average if average else Sum


handle_average_backwards_compatibility = _chosen


def _allreduce_async(
    tensors: Sequence[Tensor], in_place: bool, grouped: bool, name: str | None, op: ReduceOp,
    prescale_factor: float, postscale_factor: float, process_set: ProcessSet,
) -> int:  # fmt: skip
    _check_tensors(tensors, op.name)
    if in_place:
        _check_targets(tensors)
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if size() & (size() - 1):
            raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    label = "grouped_allreduce" if grouped else "allreduce"
    return _handle(_current().submit(
        "adasum" if op == Adasum else "allreduce", label, name, tensors, targets=tensors if in_place else None,
        grouped=grouped, process_set=_number(process_set), op=op.name,
        factors=(float(prescale_factor), float(postscale_factor)),
    ))  # fmt: skip


def _check_tensors(tensors: Sequence[Tensor], op: str = "") -> None:
    if not tensors:
        raise ValueError("a grouped operation needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"hvd's operations take tensors, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"Tensor type {tensor.type()} is not supported: use sparse_allreduce_async, or to_dense()")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError("a lazily conjugated tensor has other bits than values: call .clone() first")
        reason = arithmetic.refusal(tensor.dtype, op) if op else ""
        if reason:
            raise ValueError(reason)


def _check_targets(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if overlaps(tensor):
            raise ValueError(
                f"a tensor that is expanded, or whose elements share memory, cannot be written in place: shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}"
            )


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`allreduce`; a handle for :func:`poll` and :func:`synchronize`. No gradient flows."""
    chosen = _chosen(op, average)
    return _allreduce_async([tensor], False, False, name, chosen, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`allreduce_`; a handle for :func:`poll` and :func:`synchronize`."""
    chosen = _chosen(op, average)
    return _allreduce_async([tensor], True, False, name, chosen, prescale_factor, postscale_factor, process_set)


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


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """:func:`allreduce` in place; returns ``tensor``. No gradient flows."""
    chosen = _chosen(op, average)
    handle = _allreduce_async([tensor], True, False, name, chosen, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`grouped_allreduce`; a handle whose result is a tuple."""
    chosen = _chosen(op, average)
    return _allreduce_async(tensors, False, True, name, chosen, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start :func:`grouped_allreduce_`; a handle whose result is a tuple."""
    chosen = _chosen(op, average)
    return _allreduce_async(tensors, True, True, name, chosen, prescale_factor, postscale_factor, process_set)


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


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:  # fmt: skip
    """:func:`grouped_allreduce` in place; returns the tensors. No gradient flows."""
    chosen = _chosen(op, average)
    handle = _allreduce_async(tensors, True, True, name, chosen, prescale_factor, postscale_factor, process_set)
    return synchronize(handle)  # type: ignore[no-any-return]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of sparse (COO) tensors: indices and values are gathered.

    Returns:
        What gives the result when called: a sparse tensor, not coalesced.

    Raises:
        ValueError: an op other than Average and Sum.
    """
    chosen = _chosen(op, None)
    if chosen not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async takes Average and Sum, got {chosen!r}")
    title = name or None
    indices = allgather_async(tensor._indices().t().contiguous(), title and f"{title}.indices", process_set)
    values = allgather_async(tensor._values(), title and f"{title}.values", process_set)
    members = process_set.size()

    def handle() -> Tensor:
        total, where = synchronize(values), synchronize(indices)
        if chosen == Average:
            total = total / members
        return torch.sparse_coo_tensor(where.t(), total, tensor.size(), check_invariants=False)

    return handle


# Gather, broadcast ------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather`; a handle for :func:`poll` and :func:`synchronize`. No gradient flows."""
    _check_tensors([tensor])
    return _handle(_current().submit("allgather", "allgather", name, [tensor], process_set=_number(process_set)))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors one after the other along the first dimension, which may differ. Differentiable.

    Args:
        tensor: ``[n, ...]``, ``n`` of this rank; the other dimensions and the dtype are the same on all ranks.
        name, process_set: as in :func:`allreduce`.

    Raises:
        HorovodInternalError: a tensor without dimensions, or other dimensions that differ; see :func:`allreduce`.
    """
    return HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`; a handle whose result is a tuple."""
    _check_tensors(tensors)
    operations = _current()
    number = _number(process_set)
    return _handle(operations.submit("allgather", "grouped_allgather", name, tensors, grouped=True, process_set=number))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """:func:`allgather` of several tensors as one operation. Differentiable."""
    return HorovodGroupedAllgather.apply(  # type: ignore[no-untyped-call, no-any-return]
        name, process_set, *tensors
    )


def _broadcast_async(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool) -> int:
    _check_tensors([tensor])
    if in_place:
        _check_targets([tensor])
    operations, number = _current(), _number(process_set)
    if root_rank not in operations.members(number):
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set {operations.members(number)}"
        )
    targets = [tensor] if in_place else None
    return _handle(operations.submit(
        "broadcast", "broadcast", name, [tensor], targets=targets, process_set=number, root=int(root_rank)
    ))  # fmt: skip


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`; a handle for :func:`poll` and :func:`synchronize`. No gradient flows."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`; a handle for :func:`poll` and :func:`synchronize`."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=True)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the values of rank ``root_rank`` (a rank of the job). Differentiable.

    Raises:
        ValueError: ``root_rank`` is not in the process set.
        HorovodInternalError: ranks disagree about shape, dtype or root; see :func:`allreduce`.
    """
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call, no-any-return]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """:func:`broadcast` in place; returns ``tensor``. No gradient flows."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


# All-to-all, reduce-scatter ---------------------------------------------------------------------------------


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`alltoall`; a handle whose result is ``(tensor, received_splits)``, with and without splits."""
    _check_tensors([tensor])
    operations, number = _current(), _number(process_set)
    counts = _splits(tensor, splits, len(operations.members(number)))
    return _handle(operations.submit(
        "alltoall", "alltoall", name, [tensor], grouped=True, process_set=number, splits=counts
    ))  # fmt: skip


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


def _splits(tensor: Tensor, splits: Any, members: int) -> tuple[int, ...]:
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
    counts = tuple(int(each) for each in given.tolist())
    if len(counts) != members:
        raise ValueError(f"Number of entries in splits does not equal number of workers: {len(counts)}, {members}")
    if min(counts) < 0:
        raise ValueError(f"splits must not be negative, got {list(counts)}")
    if sum(counts) > rows:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor: {sum(counts)}, {rows} rows"
        )
    return counts


def _reducescatter_async(
    tensors: Sequence[Tensor], grouped: bool, name: str | None, op: int, process_set: ProcessSet,
    prescale_factor: float, postscale_factor: float,
) -> int:  # fmt: skip
    chosen = _chosen(op, None)
    if chosen not in (Average, Sum):
        raise internal_error(f"Reducescatter currently only supports AVERAGE and SUM, got {chosen!r}")
    _check_tensors(tensors, chosen.name)
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("Reducescatter does not support scalar inputs")
    return _handle(_current().submit(
        "reducescatter", "grouped_reducescatter" if grouped else "reducescatter", name, tensors, grouped=grouped,
        process_set=_number(process_set), op=chosen.name, factors=(float(prescale_factor), float(postscale_factor)),
    ))  # fmt: skip


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start :func:`reducescatter`; a handle for :func:`poll` and :func:`synchronize`. No gradient flows."""
    return _reducescatter_async([tensor], False, name, op, process_set, prescale_factor, postscale_factor)


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


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start :func:`grouped_reducescatter`; a handle whose result is a tuple."""
    return _reducescatter_async(tensors, True, name, op, process_set, prescale_factor, postscale_factor)


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


# Gradients --------------------------------------------------------------------------------------------------
#
# Each rank's loss is a term of what is differentiated: so the gradient of a sum is the sum of all ranks' gradients.
# Horovod's conventions are kept where an average is concerned: of an average, and of what was gathered or broadcast,
# the gradient is the average of the ranks' gradients.


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


def __getattr__(name: str) -> Any:
    if name != "_basics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdbridge.torch.basics import HorovodBasics  # which is made of what is here

    globals()[name] = basics = HorovodBasics(__file__)
    return basics
