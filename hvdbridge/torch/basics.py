"""Initialization, shutdown, ranks and build queries; the counterpart of ``horovod.common.basics``.

Functions that return a rank or a number of processes raise ValueError before :func:`init`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch

from hvdbridge.backends import registry
from hvdbridge.torch.actions import Pending
from hvdbridge.torch.exceptions import NoInitError, internal_error
from hvdbridge.torch.operations import Operations
from hvdbridge.torch.process_sets import ProcessSet, _setup, add_process_set, global_process_set
from hvdbridge.torch.settings import Settings, report_ignored_variables
from hvdbridge.training import runtime


class ReduceOp(IntEnum):
    """A reduction: an integer with Horovod's value, whose text is its name.

    >>> Average, int(Product)
    (Average, 5)
    """

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


Average, Sum, Adasum, Min, Max, Product = ReduceOp
_REDUCE_OPS = {int(op): op for op in ReduceOp}

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_operations: Operations | None = None
_owns_session = False
_handles: dict[int, Pending] = {}
"""Operations that were started and not synchronized yet, by handle."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize this API on all ranks; collective. Calls ``hb.init()`` if the script has not.

    A second call has no effect, unless :func:`shutdown` came between.

    Args:
        comm: None, or all ranks (a list, or an mpi4py communicator). For operations of some ranks use process sets.
        process_sets: sets to register; ``"dynamic"`` has no effect, because a script can always add sets.

    Raises:
        ValueError: two sets have the same ranks, or a set contains ranks that do not exist.
        NotImplementedError: ``comm`` contains only some of the ranks.
        HvdbridgeError: ``hb.init()`` failed: ranks do not find each other, or the backend is not installed.
    """
    global _operations, _owns_session
    if _operations is not None and not _operations.closed:
        return
    _handles.clear()
    owns = not runtime.is_initialized()
    if owns:
        path = os.environ.pop("HOROVOD_TIMELINE", None)  # the Horovod backend would write the same file
        try:
            runtime.init()
        finally:
            os.environ.update({} if path is None else {"HOROVOD_TIMELINE": path})
    session = runtime.current()
    if _comm_size(comm) not in (0, session.world.size):
        if owns:
            runtime.shutdown()
        raise NotImplementedError(
            f"hvd.init(comm={comm!r}): of {session.world.size} ranks. hvdbridge starts all ranks of a job; "
            "use hvd.ProcessSet for operations of some of them"
        )
    settings = Settings.from_environment(session.config.stall_seconds, session.config.timeout_seconds)
    if session.backend != "horovod":  # the Horovod backend reads these variables itself
        report_ignored_variables(session.world.rank)
    elif not owns and settings.timeline:  # the Horovod backend writes this file already
        settings = replace(settings, timeline="")
    _operations = operations = Operations(session, settings)
    _owns_session = owns
    session.at_shutdown(_close)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    _setup(operations)
    global_process_set.ranks = list(range(operations.size))
    if not isinstance(process_sets, str):
        for process_set in process_sets or ():
            add_process_set(process_set)


def shutdown() -> None:
    """End this API on all ranks; collective. No effect before :func:`init`.

    If :func:`init` called ``hb.init()``, this function also calls ``hb.shutdown()``. Operations of other ranks that
    wait for this rank fail with HorovodInternalError.
    """
    if _operations is None:
        return
    _operations.leave()
    if _owns_session:
        runtime.shutdown()
        return
    if _operations.failure == "" and _operations.size > 1:
        _operations.session.monitor.agree("hvd.shutdown()", "")
    _operations.session.forget_at_shutdown(_close)
    _close()


def _close() -> None:
    """Free the operations of this session. All ranks do so together, so closing their communicators is safe."""
    global _operations
    operations, _operations = _operations, None
    if operations is not None:
        operations.close()
    _setup(None)
    atexit.unregister(_leave_at_exit)


def _leave_at_exit() -> None:
    """Announce at exit that this rank submits nothing more. The session's own exit hook waits for all ranks later."""
    if _operations is not None and _operations.session._pid == os.getpid():
        _operations.leave()


def _comm_size(comm: Any) -> int:
    """Return the number of ranks in ``comm``; 0 if it is None."""
    if comm is None:
        return 0
    return int(comm.Get_size()) if hasattr(comm, "Get_size") else len(list(comm))


def _current() -> Operations:
    """Return the operations of the session; raise NoInitError before :func:`init`."""
    if _operations is None:
        raise internal_error(NOT_INITIALIZED, NoInitError)
    return _operations


def is_initialized() -> bool:
    """Return whether :func:`init` was called, and :func:`shutdown` was not called after it."""
    return _operations is not None


def rank() -> int:
    """Return this process's rank, from 0 to ``size() - 1``. Raises ValueError before :func:`init`."""
    return _current().rank


def size() -> int:
    """Return the number of processes of the job."""
    return _current().size


def local_rank() -> int:
    """Return this process's rank among the processes of its host."""
    return _current().session.world.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return _current().session.world.local_size


def cross_rank() -> int:
    """Return this process's rank among the processes of its local rank, one per host."""
    return _cross_peers().index(_current().rank)


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return len(_cross_peers())


def _cross_peers() -> list[int]:
    """Return the ranks of the processes of this local rank, one per host."""
    session = _current().session
    return [world.rank for world in session.worlds if world.local_rank == session.world.local_rank]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    return len({world.local_size for world in _current().session.worlds}) == 1


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at the same time (``MPI_THREAD_MULTIPLE``).

    Raises:
        ValueError: the backend is not MPI.
    """
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether the session's backend is MPI."""
    return runtime.is_initialized() and runtime.backend() == "mpi"


def mpi_built() -> bool:
    """Return whether the MPI backend is installed."""
    return registry.installed("mpi")


def gloo_enabled() -> bool:
    """Return whether the session's backend is torch.distributed or the real Horovod."""
    return runtime.is_initialized() and runtime.backend() != "mpi"


def gloo_built() -> bool:
    """Return whether torch.distributed was built with Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as an integer (21805 is 2.18.5), or 0 without NCCL or a GPU."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = (int(part) for part in (*torch.cuda.nccl.version(), 0, 0)[:3])
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """Return False: IBM's DDL is not supported."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to trace operations into ``file_path`` (Chrome's JSON trace format). Only rank 0 writes the file.

    Args:
        file_path: the file, which is overwritten. An open trace ends.
        mark_cycles: also trace when requests are sent.

    Raises:
        ValueError: before :func:`init`.
    """
    _current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the trace that :func:`start_timeline` or HOROVOD_TIMELINE started. No effect without one.

    Raises:
        ValueError: before :func:`init`.
    """
    _current().stop_timeline()


class HorovodBasics:
    """Horovod's class that has the functions of this module as static methods, and the reductions as attributes.

    Args:
        pkg_path, args: ignored; there is no native library to load.
    """

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass


for _function in (
    init, shutdown, is_initialized, start_timeline, stop_timeline, rank, size, local_rank, local_size, cross_rank,
    cross_size, is_homogeneous, mpi_threads_supported, mpi_enabled, mpi_built, gloo_enabled, gloo_built, nccl_built,
    ddl_built, ccl_built, cuda_built, rocm_built,
):  # fmt: skip
    setattr(HorovodBasics, _function.__name__, staticmethod(_function))
for _op in ReduceOp:
    setattr(HorovodBasics, _op.name, _op)
