"""Horovod's session: start, end, ranks, what was built; and ``horovod.common.basics``."""

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
from hvdbridge.torch.settings import Settings, report_unheeded
from hvdbridge.training import runtime


class ReduceOp(IntEnum):
    """A reduction: an integer, as in Horovod, whose text is its name.

    >>> Average, int(Product)
    (Average, 5)
    """

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


Average, Sum, Adasum, Min, Max, Product = ReduceOp
_OPS = {int(op): op for op in ReduceOp}

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_operations: Operations | None = None
_owns_session = False
_handles: dict[int, Pending] = {}
"""The operations that were started and not waited for, by handle."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Begin; collective. Calls ``hb.init()`` if the script has not. Harmless when repeated.

    Args:
        comm: None, or all ranks (a list, or an mpi4py communicator). To work with some of them use process sets.
        process_sets: sets to register at once; ``"dynamic"`` is accepted, since a script can always add sets here.

    Raises:
        ValueError: a set is given twice, or has ranks that do not exist.
        NotImplementedError: ``comm`` has a part of the ranks only.
        HvdbridgeError: of ``hb.init()``: ranks that do not find each other, a backend that is not installed.
    """
    global _operations, _owns_session
    if _operations is not None and not _operations.closed:
        return
    _handles.clear()
    owns = not runtime.is_initialized()
    if owns:
        path = os.environ.pop("HOROVOD_TIMELINE", None)  # the real Horovod below must not write that file, too
        try:
            runtime.init()
        finally:
            os.environ.update({} if path is None else {"HOROVOD_TIMELINE": path})
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
    session.at_shutdown(_close)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)
    _setup(operations)
    global_process_set.ranks = list(range(operations.size))
    if not isinstance(process_sets, str):
        for each in process_sets or ():
            add_process_set(each)


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
    _operations.session.forget_at_shutdown(_close)
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
    """The script has ended; the session closes after this and waits for all ranks."""
    if _operations is not None and _operations.session._pid == os.getpid():
        _operations.leave()


def _size_of(comm: Any) -> int:
    """The number of ranks in ``comm``; 0: all."""
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
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether data travels by MPI now."""
    return runtime.is_initialized() and runtime.backend() == "mpi"


def mpi_built() -> bool:
    """Whether the MPI backend is installed."""
    return registry.installed("mpi")


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


class HorovodBasics:
    """The session's functions and reductions as members of an object; all objects are alike.

    Args:
        pkg_path, args: of Horovod's library; there is none here.
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
