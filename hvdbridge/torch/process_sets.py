"""Process sets: the ranks that carry out an operation together.

Rules:

1. A set has the same number on every rank, because all ranks of the job take part in making and removing it, members
   or not.
2. Ranks in arguments and results (``root_rank``, ``ranks``) are ranks of the job. Only :meth:`ProcessSet.rank` is a
   number within the set.
3. Unlike under Horovod, sets may always be added after ``init``; HOROVOD_DYNAMIC_PROCESS_SETS is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdbridge.torch.exceptions import NoInitError, internal_error
from hvdbridge.torch.operations import Operations

_registry: Operations | None = None


def _setup(registry: Operations | None) -> None:
    """Take the operations of this session; None when it ends."""
    global _registry
    _registry = registry


def _registered() -> Operations:
    if _registry is None:
        raise internal_error("Horovod has not been initialized; use hvd.init().", NoInitError)
    return _registry


class ProcessSet:
    """Ranks that carry out operations together; give it to ``hvd.init`` or :func:`add_process_set`.

    Args:
        ranks_or_comm: rank numbers, or an mpi4py communicator.

    Attributes:
        process_set_id: the set's number; None before it is registered and after it was removed.
        ranks: ascending.

    Raises:
        ValueError: neither ranks nor a communicator.

    >>> even = ProcessSet([2, 0])
    >>> even.ranks, even.process_set_id, even.size()
    ([0, 2], None, None)
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        found = _ranks_of(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in found):
            raise ValueError(f"a ProcessSet is made of rank numbers or an mpi4py communicator, got {ranks_or_comm!r}")
        self.ranks = sorted(found)
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm

    def size(self) -> int | None:
        """The number of members; None if the set is not registered."""
        return None if self.process_set_id is None else len(_registered().members(self.process_set_id))

    def rank(self) -> int | None:
        """This process's number among the members; None if the set is not registered.

        Raises:
            ValueError: this process is no member.
        """
        if self.process_set_id is None:
            return None
        registry = _registered()
        members = registry.members(self.process_set_id)
        if registry.rank not in members:
            raise ValueError(f"Process is not part of provided process set: rank {registry.rank} is not in {members}")
        return members.index(registry.rank)

    def included(self) -> bool | None:
        """Whether this process is a member; None if the ranks are not known yet.

        Raises:
            ValueError: before ``hvd.init()``.
        """
        return None if self.ranks is None else _registered().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__


def _ranks_of(ranks_or_comm: Any) -> list[Any]:
    if hasattr(ranks_or_comm, "Get_group"):  # an mpi4py communicator: its ranks among those of COMM_WORLD
        from sys import modules

        mpi = modules["mpi4py.MPI"]
        return list(mpi.Group.Translate_ranks(ranks_or_comm.Get_group(), None, mpi.COMM_WORLD.Get_group()))
    try:
        return list(ranks_or_comm)
    except TypeError:
        return [ranks_or_comm, None]  # no rank number: refused by the caller with what was given


global_process_set = ProcessSet([])
"""All ranks; its ``ranks`` are known after ``hvd.init()``."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set, and return it. All ranks of the job must call this, members or not.

    Raises:
        ValueError: before ``hvd.init()``; the same ranks are a set already; or no such ranks.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert wanted.ranks is not None
    wanted.process_set_id = _registered().add_set(wanted.ranks)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks must call this. Returns whether it was removed: the global set and unknown sets are not.

    Raises:
        ValueError: before ``hvd.init()``.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    registry = _registered()
    process_set.process_set_id = None
    return registry.remove_set(number)
