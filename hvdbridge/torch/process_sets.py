"""Process sets: groups of ranks that execute an operation together.

Rules:

1. A set has the same number on every rank, because all ranks of the job, members or not, create and remove it together.
2. Ranks in arguments and results (``root_rank``, ``ranks``) are ranks of the job. Only :meth:`ProcessSet.rank` is a
   rank within the set.
3. Unlike in Horovod, a script may add sets at any time after ``init``, without HOROVOD_DYNAMIC_PROCESS_SETS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdbridge.torch.exceptions import NoInitError, internal_error
from hvdbridge.torch.operations import Operations

_registry: Operations | None = None


def _setup(registry: Operations | None) -> None:
    """Set the operations of the session; None when it ends."""
    global _registry
    _registry = registry


def _registered() -> Operations:
    """Return the operations of the session; raise NoInitError before ``hvd.init()``."""
    if _registry is None:
        raise internal_error("Horovod has not been initialized; use hvd.init().", NoInitError)
    return _registry


class ProcessSet:
    """A group of ranks that execute operations together. Register it by ``hvd.init`` or :func:`add_process_set`.

    Args:
        ranks_or_comm: ranks of the job, or an mpi4py communicator.

    Attributes:
        process_set_id: the set's number; None before its registration and after its removal.
        ranks: the members, ascending.

    Raises:
        ValueError: the argument is neither ranks nor a communicator.

    >>> even = ProcessSet([2, 0])
    >>> even.ranks, even.process_set_id, even.size()
    ([0, 2], None, None)
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        ranks = _ranks_of(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of rank numbers or an mpi4py communicator, got {ranks_or_comm!r}")
        self.ranks = sorted(ranks)
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm

    def size(self) -> int | None:
        """Return the number of members; None if the set is not registered."""
        return None if self.process_set_id is None else len(_registered().members(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process's rank among the members; None if the set is not registered.

        Raises:
            ValueError: this process is not a member.
        """
        if self.process_set_id is None:
            return None
        registry = _registered()
        members = registry.members(self.process_set_id)
        if registry.rank not in members:
            raise ValueError(f"Process is not part of provided process set: rank {registry.rank} is not in {members}")
        return members.index(registry.rank)

    def included(self) -> bool | None:
        """Return whether this process is a member; None if the set's ranks are not known yet.

        Raises:
            ValueError: before ``hvd.init()``.
        """
        return None if self.ranks is None else _registered().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def _ranks_of(ranks_or_comm: Any) -> list[Any]:
    """Return ranks of the job, unchecked; those of an mpi4py communicator are translated to COMM_WORLD's."""
    if hasattr(ranks_or_comm, "Get_group"):
        from sys import modules

        mpi = modules["mpi4py.MPI"]
        return list(mpi.Group.Translate_ranks(ranks_or_comm.Get_group(), None, mpi.COMM_WORLD.Get_group()))
    try:
        return list(ranks_or_comm)
    except TypeError:
        return [ranks_or_comm, None]  # None makes the caller raise an error that shows the argument


global_process_set = ProcessSet([])
"""The set of all ranks. Its ``ranks`` are known after ``hvd.init()``."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set, and return it. All ranks of the job must call this function, members or not.

    Args:
        process_set: a :class:`ProcessSet`, or its ranks.

    Raises:
        ValueError: before ``hvd.init()``; a set of the same ranks exists; a rank does not exist.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert added.ranks is not None
    added.process_set_id = _registered().add_set(added.ranks)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set, and return whether it was removed. All ranks of the job must call this function.

    The global set and sets that are not registered are not removed.

    Raises:
        ValueError: before ``hvd.init()``.
    """
    process_set_id = process_set.process_set_id
    if process_set_id is None or process_set_id == 0:
        return False
    registry = _registered()
    process_set.process_set_id = None
    return registry.remove_set(process_set_id)
