"""Groups of ranks, handles of operations in flight, and the start of an operation on a group's channel."""

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
from hvdbridge.backends.point_to_point import Messages, ReceiveWork
from hvdbridge.errors import CollectiveTimeout, ConfigurationError, Unsupported
from hvdbridge.execution.flow import Submission
from hvdbridge.policy.buffer_pool import overlaps
from hvdbridge.policy.collectives import Collective
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.training import runtime

OpFlow = Generator[Collective, Tensor, None]

MIN_POLL_SECONDS, MAX_POLL_SECONDS = 2e-5, 1e-3


class ReduceOp(Enum):
    """The elementwise function of a reduction. Operations also accept values of ``torch.distributed.ReduceOp``."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


@dataclass(eq=False)
class Group:
    """A group of the job's ranks, as :func:`new_group` returns it.

    Attributes:
        ranks: the group's members as ranks of the job, ascending.
        communicator: the group's channel; None on a rank outside of the group, after :meth:`close`, and in the group of
            all ranks before its first collective.
        number: 0 for the group of all ranks, otherwise the number of the ``new_group`` call, from 1.
        timeout: the limit of operations that set none themselves; None: the job's limit.
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
        """Return the number of ranks in the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return this process's rank in the group; -1 on a rank outside of the group."""
        job_rank = runtime.rank()
        return self.ranks.index(job_rank) if job_rank in self.ranks else -1

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}" + (f" ({self.description})" if self.description else "")

    def close(self) -> None:
        """Close the channel. Further calls have no effect."""
        if self._context is not None:
            self._context.close()
        elif self.communicator is not None:
            self.communicator.close()
        self._context = self.communicator = self._messages = None


class Handle:
    """An operation in flight, like ``torch.distributed.Work``."""

    def __init__(
        self, label: str, timeout: timedelta | None, is_done: Callable[[], bool], finish: Callable[[], object]
    ) -> None:
        self._label, self._timeout, self._is_done, self._finish = label, timeout, is_done, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete and its tensors may be used; return True.

        On CUDA, work that the caller enqueues afterwards runs after the operation.

        Raises:
            CollectiveTimeout: the operation is not complete after ``timeout``, or its own limit where that is None.
            HvdbridgeError: the operation failed, with the cause.
        """
        if (limit := self._timeout if timeout is None else timeout) is not None:
            seconds, pause = limit.total_seconds(), MIN_POLL_SECONDS
            deadline = time.monotonic() + seconds
            while not self._is_done():
                if time.monotonic() > deadline:
                    raise CollectiveTimeout(
                        f"rank {runtime.rank()}: {self._label} is not over after its timeout of {seconds:g} s; some "
                        "rank has not come to it"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, MAX_POLL_SECONDS)
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""
        return self._is_done()


class PointToPointHandle(Handle):
    """A send, or a receive; the first successful :meth:`wait` calls ``on_done``."""

    def __init__(self, work: Work, label: str, group: Group, on_done: Callable[[], None] | None = None) -> None:
        super().__init__(label, group.timeout, work.done, work.wait)
        self._work, self._group, self._on_done = work, group, on_done
        self._finished = False
        self._orphaned = session_groups().orphaned
        # Iterate over a copy: done() may trigger garbage collection, whose __del__ changes the set
        self._orphaned.difference_update([work for work in list(self._orphaned) if work.done()])

    def __del__(self) -> None:
        if not self._finished:
            self._orphaned.add(self._work)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._finished:
            with runtime.current().monitor.watch(self._label):
                super().wait(timeout)
            self._finished = True
            if self._on_done is not None:
                self._on_done()
        return True

    @property
    def source(self) -> int:
        """The rank of the job that sent the message; valid after :meth:`wait`."""
        assert isinstance(self._work, ReceiveWork)
        return self._group.ranks[self._work.source]


@dataclass(eq=False)
class _Groups:
    """The groups of one session.

    Attributes:
        orphaned: sends and receives in flight whose handle was garbage-collected. They are referenced here, because
            the library below still accesses their memory.
        exchange: the TCP connections of :mod:`.messages`, on backends that need them; None before the first message.
    """

    world: Group
    created: list[Group] = field(default_factory=list)
    orphaned: set[Work] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    exchange: Any = None

    def close(self) -> None:
        """Close all groups, and the TCP connections."""
        for group in (*self.created, self.world):
            group.close()
        self.orphaned.clear()
        if self.exchange is not None:
            self.exchange.close()


def session_groups() -> _Groups:
    """Return the groups of the current session."""
    session = runtime.current()
    if "primitives" not in session.opened:
        session.opened["primitives"] = created = _Groups(Group(tuple(range(session.world.size)), None, 0))
        session.at_shutdown(created.close)
    groups: _Groups = session.opened["primitives"]
    return groups


def new_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None,
    pg_options: Any = None, use_local_synchronization: bool = False, group_desc: str | None = None,
    device_id: torch.device | None = None, sort_ranks: bool = True,
) -> Group:  # fmt: skip
    """Create a group of ``ranks`` (None: all ranks of the job). Collective: every rank of the job must call it, also
    outside of the group, and several calls must come in the same order on all ranks.

    Args:
        ranks: distinct ranks of the job, in any order.
        timeout: the limit of the group's operations; None: ``HVDBRIDGE_TIMEOUT_SECONDS``, which is also the maximum.
        backend: None, or the job's backend, which ``hb.init`` has chosen.
        group_desc: a description for error messages.
        device_id: None, or this rank's device.
        pg_options, use_local_synchronization, sort_ranks: only the default values are supported.

    Raises:
        ConfigurationError: ``ranks`` is empty, repeats a rank, or has one outside of the job.
        RankMismatch: the ranks of the job pass different ``ranks``.
        Unsupported: another argument has a value that is not supported.
    """
    groups, session = session_groups(), runtime.current()
    size = session.world.size
    members = list(range(size)) if ranks is None else sorted(ranks)
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(size)):
        raise ConfigurationError(f"new_group({ranks}) needs distinct ranks of this job, 0 to {size - 1}")
    carriers = (session.backend, *session.communicator.capabilities.torch_backends)
    requested = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}  # "cpu:gloo,cuda:nccl"
    for supported, argument, remedy in (
        (backend is None or requested <= set(carriers), f"backend={backend!r}", f"this job has {', '.join(carriers)}"),
        (pg_options is None, "pg_options", "they belong to one library of torch's"),
        (not use_local_synchronization, "use_local_synchronization=True", "all ranks of the job call new_group"),
        (device_id in (None, session.device), f"device_id={device_id}", f"this rank's device is {session.device}"),
        (sort_ranks or ranks is None or list(ranks) == members, "sort_ranks=False", "ranks count in ascending order"),
    ):
        if not supported:
            raise Unsupported(f"new_group({argument}): {remedy}. Leave it out.")
    check_timeout(timeout, "new_group")
    number = next(groups.numbers)
    if size > 1:
        session.monitor.agree(f"new_group number {number}", str(members))
    channel = session.channel("primitives.groups").split([members])
    group = Group(tuple(members), channel, number, timeout, group_desc or "")
    groups.created = [other for other in groups.created if other.communicator is not None] + [group]
    return group


def check_timeout(timeout: timedelta | None, caller: str) -> None:
    """Raise Unsupported if ``timeout`` exceeds the job's limit, ``HVDBRIDGE_TIMEOUT_SECONDS``."""
    limit = runtime.current().config.timeout_seconds
    if timeout is not None and timeout.total_seconds() > limit:
        raise Unsupported(
            f"{caller}(timeout={timeout}): no operation of this job may take longer than {limit:g} s. "
            "Set HVDBRIDGE_TIMEOUT_SECONDS."
        )


def resolve_group(group: Group | None, caller: str) -> Group:
    """Return ``group``, or for None the group of all ranks; raise Unsupported for an object of another type."""
    if group is not None and not isinstance(group, Group):
        raise Unsupported(f"{caller}: group={group!r} must come from hvdbridge.new_group(); got {type(group).__name__}")
    return group or session_groups().world


def group_if_member(group: Group | None, caller: str) -> Group | None:
    """Return the resolved group. If this rank is not in it, warn (at the caller's caller) and return None."""
    resolved = resolve_group(group, caller)
    if resolved.rank() >= 0:
        return resolved
    text = f"{caller} on rank {runtime.rank()}, which is not in the group of {resolved}: nothing is done"
    warnings.warn(text, stacklevel=3)
    return None


def open_communicator(group: Group, caller: str) -> Communicator:
    """Return the channel of ``group``; raise ConfigurationError if the group is closed."""
    if group.communicator is None:
        raise ConfigurationError(f"{caller}: the group {list(group.ranks)} is closed; make it anew")
    return group.communicator


def start(
    group: Group, make_flow: Callable[[], OpFlow], label: str, async_op: bool, timeout: timedelta | None = None
) -> Handle | None:
    """Run a new flow on the group's channel. Return a handle if ``async_op``, otherwise None after completion."""
    session = runtime.current()
    if group.communicator is None and group.number == 0:
        group.communicator = session.channel("primitives")
    communicator = open_communicator(group, label)
    if group._context is None:
        check = session.check() if group.number == 0 else None
        group._context = ReductionContext(session, [communicator], session.device, check)
    scheduler = group._context.scheduler
    pending = scheduler.submit(Submission(make_flow(), communicator))
    keep_alive = [make_flow]  # a GPU may access the user's tensors after the flow has enqueued its work

    def finish() -> None:
        pending.wait()
        scheduler.order()
        keep_alive.clear()

    handle = Handle(label, group.timeout if timeout is None else timeout, lambda: pending.done, finish)
    if async_op:
        return handle
    handle.wait()
    return None


def find_rank(group: Group, rank: int | None, group_rank: int | None, caller: str, default: int | None = None) -> int:
    """Convert a rank of the job (``rank``) or of the group (``group_rank``) to a rank of the group.

    Args:
        default: the rank of the job to use if the user passes neither.

    Raises:
        ConfigurationError: both are given, or neither and no default; or the rank is not in the group.
    """
    if rank is None and group_rank is None:
        rank = default
    if (rank is None) == (group_rank is None):
        raise ConfigurationError(f"{caller}: give either the rank of the job or the rank of the group")
    candidates = group.ranks if group_rank is None else range(group.size())
    requested = rank if group_rank is None else group_rank
    if requested is None or requested not in candidates:
        raise ConfigurationError(f"{caller}: rank {requested} is not in the group {list(candidates)}")
    return candidates.index(requested)


def dense(value: Any, name: str, written: bool = False) -> Tensor:
    """Check a user's tensor, and return it detached; a complex tensor as real pairs (``view_as_real``).

    Raises:
        Unsupported: ``value`` is not a dense tensor, or is lazily conjugated.
        ConfigurationError: the operation writes the tensor (``written``), whose elements share memory.
    """
    if not isinstance(value, Tensor):
        raise Unsupported(f"{name} takes a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise Unsupported(f"{name} takes a dense tensor, got layout {value.layout}. Call .to_dense() first")
    if value.is_conj() or value.is_neg():
        raise Unsupported(f"{name}: a lazily conjugated tensor has other bits than values. Call .clone() first")
    if written and overlaps(value):
        raise ConfigurationError(
            f"{name}: elements of a tensor that is written share memory (expanded?): shape {list(value.shape)}, "
            f"strides {list(value.stride())}. Call .clone() or .contiguous() first"
        )
    data = value.detach()
    if data.is_inference():  # the scheduler's thread, outside of inference mode, may not write such a tensor
        with torch.inference_mode(False):
            geometry = data.storage_offset(), data.shape, data.stride()
            data = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage(), *geometry)
    return torch.view_as_real(data) if data.is_complex() else data


def dense_list(values: Any, size: int, like: Tensor | None, name: str, written: bool = False) -> list[Tensor]:
    """Check a list of one :func:`dense` tensor per rank, of the shape and dtype of ``like`` if given; return them."""
    if not isinstance(values, list | tuple) or len(values) != size:
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else type(values).__name__
        raise ConfigurationError(f"{name} needs a list of {size} tensors, one for each rank of the group; got {got}")
    tensors = [dense(value, name, written) for value in values]
    for tensor in tensors:
        if like is not None and (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ConfigurationError(
                f"{name}: all tensors have one shape and dtype; got {list(tensor.shape)} {tensor.dtype} beside "
                f"{list(like.shape)} {like.dtype}"
            )
    return tensors


def describe_op(op_name: str, tensor: Tensor | None, group: Group) -> str:
    """Return the text by which error messages name an operation of ``group`` on ``tensor``."""
    shape = "" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{op_name}{shape}" + (f" among {group}" if group.number else "")
