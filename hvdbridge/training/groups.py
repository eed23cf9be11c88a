"""Groups of ranks, handles, and how an operation of a group starts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.backends.point_to_point import Messages, Receipt
from hvdbridge.errors import CollectiveTimeout, ConfigurationError, Unsupported
from hvdbridge.execution.flow import Submission
from hvdbridge.policy.buffer_pool import overlaps
from hvdbridge.policy.collectives import Collective
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.training import runtime

Steps = Generator[Collective, Tensor, None]

POLL_SECONDS, LONGEST_POLL_SECONDS = 2e-5, 1e-3


class ReduceOp(Enum):
    """How a reduction combines elements. Operations also take ``torch.distributed.ReduceOp``'s values."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


@dataclass(eq=False)
class Group:
    """Some of the job's ranks; see :func:`new_group`.

    Attributes:
        ranks: of the job, ascending.
        communicator: the group's channel; None on a rank that is not in it.
        timeout: of operations without a limit of their own; None: the job's.
        description: the ``group_desc`` of ``new_group``.
    """

    ranks: tuple[int, ...]
    communicator: Communicator | None
    number: int
    timeout: timedelta | None = None
    description: str = ""
    _context: ReductionContext | None = field(default=None, repr=False)
    _messages: Messages | None = field(default=None, repr=False)

    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """This process's number in the group; -1 outside of it."""
        mine = runtime.rank()
        return self.ranks.index(mine) if mine in self.ranks else -1

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}" + (f" ({self.description})" if self.description else "")

    def close(self) -> None:
        """Free the channel. Harmless when repeated."""
        if self._context is not None:
            self._context.close()
        elif self.communicator is not None:
            self.communicator.close()
        self._context = self.communicator = self._messages = None


class Handle:
    """An operation under way."""

    def __init__(
        self, what: str, timeout: timedelta | None, done: Callable[[], bool], end: Callable[[], object]
    ) -> None:
        self._what, self._timeout, self._done, self._end = what, timeout, done, end

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is over and its tensors may be used.

        Raises:
            CollectiveTimeout: it is not over after ``timeout``.
            HvdbridgeError: it failed; the cause.
        """
        if (limit := self._timeout if timeout is None else timeout) is not None:
            seconds, pause = limit.total_seconds(), POLL_SECONDS
            end = time.monotonic() + seconds
            while not self._done():
                if time.monotonic() > end:
                    raise CollectiveTimeout(
                        f"rank {runtime.rank()}: {self._what} is not over after its timeout of {seconds:g} s; some "
                        "rank has not come to it"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_POLL_SECONDS)
        self._end()
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._done()


class Message(Handle):
    """A send, or a receive that ends with ``then``."""

    def __init__(self, work: Work, what: str, group: Group, then: Callable[[], None] | None = None) -> None:
        super().__init__(what, group.timeout, work.done, work.wait)
        self._work, self._group, self._then = work, group, then
        self._over = False
        self._dropped = opened().dropped
        # A copy: done() may run the collector, which drops others
        self._dropped.difference_update([work for work in list(self._dropped) if work.done()])

    def __del__(self) -> None:
        if not self._over:
            self._dropped.add(self._work)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over:
            with runtime.current().monitor.watch(self._what):
                super().wait(timeout)
            self._over = True
            if self._then is not None:
                self._then()
        return True

    @property
    def source(self) -> int:
        """The rank that sent it, once it is over."""
        assert isinstance(self._work, Receipt)
        return self._group.ranks[self._work.source]


@dataclass(eq=False)
class _Groups:
    """The groups of one session.

    Attributes:
        dropped: sends and receives whose handle nobody keeps, while a library reads or writes their memory.
    """

    everyone: Group
    made: list[Group] = field(default_factory=list)
    dropped: set[Work] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    exchange: Any = None

    def close(self) -> None:
        """Free all channels. The world's is the session's own, closed by it."""
        for group in (*self.made, self.everyone):
            group.close()
        self.dropped.clear()
        if self.exchange is not None:
            self.exchange.close()


def opened() -> _Groups:
    """The groups of the running session."""
    session = runtime.current()
    if "primitives" not in session.opened:
        session.opened["primitives"] = made = _Groups(Group(tuple(range(session.world.size)), None, 0))
        session.at_shutdown(made.close)
    groups: _Groups = session.opened["primitives"]
    return groups


def new_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None,
    pg_options: Any = None, use_local_synchronization: bool = False, group_desc: str | None = None,
    device_id: torch.device | None = None, sort_ranks: bool = True,
) -> Group:  # fmt: skip
    """A group of ``ranks`` (None: all). Collective: every rank of the job calls it, also those not in the group, and
    several calls in the same order.

    Args:
        ranks: of the job.
        timeout: the longest that an operation of the group may take; None: ``HVDBRIDGE_TIMEOUT_SECONDS``, the maximum.
        backend: None, or the job's own: ``hb.init`` has chosen what carries a group.
        group_desc: named in error messages.
        device_id: None, or this rank's device.
        pg_options, use_local_synchronization, sort_ranks: as they are by default.

    Raises:
        ConfigurationError: ranks are given twice, or are not the job's.
        RankMismatch: the ranks ask for different groups.
        Unsupported: an argument that cannot be honoured.
    """
    groups, session = opened(), runtime.current()
    size = session.world.size
    wanted = list(range(size)) if ranks is None else sorted(ranks)
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(range(size)):
        raise ConfigurationError(f"new_group({ranks}) needs distinct ranks of this job, 0 to {size - 1}")
    carriers = (session.backend, *session.communicator.capabilities.carriers)
    asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}  # "cpu:gloo,cuda:nccl"
    for honoured, argument, remedy in (
        (backend is None or asked <= set(carriers), f"backend={backend!r}", f"this job has {', '.join(carriers)}"),
        (pg_options is None, "pg_options", "they belong to one library of torch's"),
        (not use_local_synchronization, "use_local_synchronization=True", "all ranks of the job call new_group"),
        (device_id in (None, session.device), f"device_id={device_id}", f"this rank's device is {session.device}"),
        (sort_ranks or ranks is None or list(ranks) == wanted, "sort_ranks=False", "ranks count in ascending order"),
    ):
        if not honoured:
            raise Unsupported(f"new_group({argument}): {remedy}. Leave it out.")
    check_limit(timeout, "new_group")
    number = next(groups.numbers)
    if size > 1:
        session.monitor.agree(f"new_group number {number}", str(wanted))
    channel = session.channel("primitives.groups").split([wanted])
    made = Group(tuple(wanted), channel, number, timeout, group_desc or "")
    groups.made = [each for each in groups.made if each.communicator is not None] + [made]
    return made


def check_limit(timeout: timedelta | None, what: str) -> None:
    """Raise Unsupported if ``timeout`` is longer than the job's."""
    most = runtime.current().config.timeout_seconds
    if timeout is not None and timeout.total_seconds() > most:
        raise Unsupported(
            f"{what}(timeout={timeout}): no operation of this job may take longer than {most:g} s. "
            "Set HVDBRIDGE_TIMEOUT_SECONDS."
        )


def meant(group: Group | None, what: str) -> Group:
    """``group``, or that of all ranks for None."""
    if group is not None and not isinstance(group, Group):
        raise Unsupported(f"{what}: group={group!r} must come from hvdbridge.new_group(); got {type(group).__name__}")
    return group or opened().everyone


def member(group: Group | None, what: str) -> Group | None:
    """:func:`meant`; None, and a warning to the caller's caller, if this rank is not in that group."""
    found = meant(group, what)
    if found.rank() >= 0:
        return found
    text = f"{what} on rank {runtime.rank()}, which is not in the group of {found}: nothing is done"
    warnings.warn(text, stacklevel=3)
    return None


def still_open(group: Group, what: str) -> Communicator:
    """The channel of ``group``."""
    if group.communicator is None:
        raise ConfigurationError(f"{what}: the group {list(group.ranks)} is closed; make it anew")
    return group.communicator


def start(
    group: Group, steps: Callable[[], Steps], what: str, async_op: bool, timeout: timedelta | None = None
) -> Handle | None:
    """Run ``steps`` on the group's channel; a handle if ``async_op``, else None at the end."""
    session = runtime.current()
    if group.communicator is None and group.number == 0:
        group.communicator = session.channel("primitives")
    communicator = still_open(group, what)
    if group._context is None:
        check = session.check() if group.number == 0 else None
        group._context = ReductionContext(session, [communicator], session.device, check)
    scheduler = group._context.scheduler
    pending = scheduler.submit(Submission(steps(), communicator))
    tensors = [steps]  # a GPU may read the user's tensors until the flow's end, not only until it is enqueued

    def end() -> None:
        pending.wait()
        scheduler.order()
        tensors.clear()

    handle = Handle(what, group.timeout if timeout is None else timeout, lambda: pending.done, end)
    if async_op:
        return handle
    handle.wait()
    return None


def root_of(group: Group, rank: int | None, group_rank: int | None, what: str, default: int | None = None) -> int:
    """The rank within the group that a user means by its number in the job or in the group.

    Args:
        default: the rank of the job if the user gives neither.
    """
    if rank is None and group_rank is None:
        rank = default
    if (rank is None) == (group_rank is None):
        raise ConfigurationError(f"{what}: give either the rank of the job or the rank of the group")
    known = group.ranks if group_rank is None else range(group.size())
    wanted = rank if group_rank is None else group_rank
    if wanted is None or wanted not in known:
        raise ConfigurationError(f"{what}: rank {wanted} is not in the group {list(known)}")
    return known.index(wanted)


def dense(value: Any, what: str, written: bool = False) -> Tensor:
    """The tensor without its graph; complex ones as pairs of reals.

    Raises:
        Unsupported: not a dense tensor.
        ConfigurationError: the operation writes it (``written``), and its elements share memory.
    """
    if not isinstance(value, Tensor):
        raise Unsupported(f"{what} takes a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise Unsupported(f"{what} takes a dense tensor, got layout {value.layout}. Call .to_dense() first")
    if value.is_conj() or value.is_neg():
        raise Unsupported(f"{what}: a lazily conjugated tensor has other bits than values. Call .clone() first")
    if written and overlaps(value):
        raise ConfigurationError(
            f"{what}: elements of a tensor that is written share memory (expanded?): shape {list(value.shape)}, "
            f"strides {list(value.stride())}. Call .clone() or .contiguous() first"
        )
    data = value.detach()
    if data.is_inference():  # torch lets no other thread write it
        with torch.inference_mode(False):
            where = data.storage_offset(), data.shape, data.stride()
            data = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage(), *where)
    return torch.view_as_real(data) if data.is_complex() else data


def dense_list(values: Any, number: int, like: Tensor | None, what: str, written: bool = False) -> list[Tensor]:
    """:func:`dense` of one tensor for each rank, of the shape and dtype of ``like`` if given."""
    if not isinstance(values, list | tuple) or len(values) != number:
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else type(values).__name__
        raise ConfigurationError(f"{what} needs a list of {number} tensors, one for each rank of the group; got {got}")
    found = [dense(value, what, written) for value in values]
    for tensor in found:
        if like is not None and (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ConfigurationError(
                f"{what}: all tensors have one shape and dtype; got {list(tensor.shape)} {tensor.dtype} beside "
                f"{list(like.shape)} {like.dtype}"
            )
    return found


def title(what: str, tensor: Tensor | None, group: Group) -> str:
    """How messages call an operation of the group on ``tensor``."""
    shape = "" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{what}{shape}" + (f" among {group}" if group.number else "")
