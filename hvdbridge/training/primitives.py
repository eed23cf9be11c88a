"""The primitives of ``torch.distributed``, with its signatures, on every backend.

Rules:

1. ``src`` and ``dst`` are ranks of the job, whatever ``group``; results are written into the tensors that were passed.
2. A call returns None when it is over; with ``async_op=True`` at once, with a :class:`Handle`. Until that is waited
   for, the tensors belong to the operation.
3. All ranks of a group call its collectives in the same order. Each group has a channel and a thread of its own, so
   groups do not wait for each other, and no synchronizer's traffic is met.
4. Shapes and dtypes agree between ranks. To compare them would cost each operation a message, so of unequal lengths MPI
   makes wrong numbers in silence; ``HVDBRIDGE_DEBUG=1`` compares operations of all ranks, and raises.
5. ``send`` and ``recv`` are called by the two ranks concerned alone. A send may be over before it is received.
6. A rank outside of ``group`` takes no part: it is warned, and gets None, as in ``torch.distributed``.
7. What is wrong with arguments is said before anything travels.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hvdbridge.backends import registry
from hvdbridge.backends.communicator import DTYPES, Communicator, Work
from hvdbridge.backends.point_to_point import TAGS, Messages, Receipt
from hvdbridge.errors import CollectiveTimeout, ConfigurationError, Unsupported
from hvdbridge.execution.flow import Submission
from hvdbridge.execution.scheduler import Scheduler
from hvdbridge.policy.buffer_pool import overlaps
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvdbridge.reduction.context import ReductionContext
from hvdbridge.training import runtime

Steps = Generator[Collective, Tensor, None]

POLL_SECONDS, LONGEST_POLL_SECONDS = 2e-5, 1e-3


class ReduceOp(Enum):
    """How a reduction combines elements. ``torch.distributed.ReduceOp``'s values of these names are taken, too."""

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
        timeout: of what is waited for without a limit of its own; None: the job's.
        description: what ``new_group`` was told that it is.
    """

    ranks: tuple[int, ...]
    communicator: Communicator | None
    number: int
    timeout: timedelta | None = None
    description: str = ""
    _context: ReductionContext | None = field(default=None, repr=False)
    _messages: Messages | None = field(default=None, repr=False)

    def size(self) -> int:
        """How many ranks it has."""
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

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when it is over and its tensors may be used.

        Raises:
            CollectiveTimeout: it is not over after ``timeout``.
            HvdbridgeError: it failed; the cause.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        raise NotImplementedError


class _Collective(Handle):
    """Of ``steps``, which hold the user's tensors: a GPU may still read them when the flow has only been enqueued."""

    def __init__(
        self, pending: Submission[None], scheduler: Scheduler, what: str, timeout: timedelta | None, steps: object
    ) -> None:
        self._pending, self._scheduler, self._what, self._timeout = pending, scheduler, what, timeout
        self._steps = steps

    def is_completed(self) -> bool:
        return self._pending.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if (limit := self._timeout if timeout is None else timeout) is not None:
            _until(self.is_completed, limit, self._what)
        self._pending.wait()
        self._scheduler.order()
        self._steps = None
        return True


class _Message(Handle):
    """A send, or a receive that ends in a copy to where it was wanted."""

    def __init__(self, work: Work, what: str, group: Group, then: Callable[[], None] | None = None) -> None:
        self._work: Work = work
        self._what, self._group, self._then = what, group, then
        self._over = False
        self._dropped = _groups().dropped
        # A copy: done() may run what drops others
        self._dropped.difference_update([work for work in list(self._dropped) if work.done()])

    def __del__(self) -> None:
        if not self._over:
            self._dropped.add(self._work)

    def is_completed(self) -> bool:
        return self._over or self._work.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._over:
            return True
        with runtime.current().monitor.watch(self._what):
            if (limit := self._group.timeout if timeout is None else timeout) is not None:
                _until(self._work.done, limit, self._what)
            self._work.wait()
        self._over = True
        if self._then is not None:
            self._then()
        return True

    @property
    def source(self) -> int:
        """The rank that sent it, once it is over."""
        assert isinstance(self._work, Receipt)
        return self._group.ranks[self._work.source]


def _until(done: Callable[[], bool], timeout: timedelta, what: str) -> None:
    end, pause = time.monotonic() + timeout.total_seconds(), POLL_SECONDS
    while not done():
        if time.monotonic() > end:
            raise CollectiveTimeout(
                f"rank {runtime.rank()}: {what} is not over after its timeout of {timeout.total_seconds():g} s; "
                "some rank has not come to it"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_POLL_SECONDS)


# -- Groups -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Groups:
    """The groups of one session."""

    everyone: Group
    made: list[Group] = field(default_factory=list)
    dropped: set[Work] = field(default_factory=set)
    """Of messages whose handle nobody keeps, while a library reads or writes their memory."""
    numbers: Any = field(default_factory=lambda: count(1))
    exchange: Any = None

    def close(self) -> None:
        """Free all channels. The world's is the session's own, closed by it."""
        for group in (*self.made, self.everyone):
            group.close()
        self.dropped.clear()
        if self.exchange is not None:
            self.exchange.close()


def _groups() -> _Groups:
    session = runtime.current()
    if "primitives" not in session.opened:
        ranks = tuple(range(session.world.size))
        session.opened["primitives"] = made = _Groups(Group(ranks, None, 0))
        session.at_shutdown(made.close)
    groups: _Groups = session.opened["primitives"]
    return groups


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Group:
    """A group of ``ranks`` (None: all). Collective: every rank of the job calls it, also those not in the group, and
    several calls in the same order.

    Args:
        ranks: of the job.
        timeout: how long an operation of the group is waited for; None: ``HVDBRIDGE_TIMEOUT_SECONDS``, the most.
        backend: None, or the job's own: what carries a group is chosen by ``hb.init``.
        group_desc: named in messages.
        device_id: None, or this rank's device.
        pg_options, use_local_synchronization, sort_ranks: as they are by default.

    Raises:
        ConfigurationError: a rank is there twice, or is none of the job's.
        RankMismatch: the ranks ask for different groups.
        Unsupported: an argument that cannot be honoured.
    """
    groups, session = _groups(), runtime.current()
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
    _check_limit(timeout, "new_group")
    number = next(groups.numbers)
    if size > 1:
        session.monitor.agree(f"new_group number {number}", str(wanted))
    channel = session.channel("primitives.groups").split([wanted])
    made = Group(tuple(wanted), channel, number, timeout, group_desc or "")
    groups.made = [each for each in groups.made if each.communicator is not None] + [made]
    return made


def _check_limit(timeout: timedelta | None, what: str) -> None:
    most = runtime.current().config.timeout_seconds
    if timeout is not None and timeout.total_seconds() > most:
        raise Unsupported(
            f"{what}(timeout={timeout}): no operation of this job may take longer than {most:g} s. "
            "Set HVDBRIDGE_TIMEOUT_SECONDS."
        )


def _meant(group: Group | None, what: str) -> Group:
    """The group that is meant; None: all ranks."""
    if group is None:
        return _groups().everyone
    if not isinstance(group, Group):
        raise Unsupported(f"{what}: group={group!r} must come from hvdbridge.new_group(); got {type(group).__name__}")
    return group


def _member(group: Group | None, what: str) -> Group | None:
    """The group that is meant; None, and a warning to the caller's caller, if this rank is not in it."""
    found = _meant(group, what)
    if found.rank() < 0:
        text = f"{what} on rank {runtime.rank()}, which is not in the group of {found}: nothing is done"
        warnings.warn(text, stacklevel=3)
        return None
    return found


def _still_open(group: Group, what: str) -> Communicator:
    if group.communicator is None:
        raise ConfigurationError(f"{what}: the group {list(group.ranks)} is closed; make it anew")
    return group.communicator


def _start(
    group: Group, steps: Callable[[], Steps], what: str, async_op: bool, timeout: timedelta | None = None
) -> Handle | None:
    """Run ``steps`` on the group's channel."""
    session = runtime.current()
    if group.communicator is None and group.number == 0:
        group.communicator = session.channel("primitives")
    communicator = _still_open(group, what)
    if group._context is None:
        check = session.check() if group.number == 0 else None
        group._context = ReductionContext(session, [communicator], session.device, check)
    scheduler = group._context.scheduler
    pending = scheduler.submit(Submission(steps(), communicator))
    handle = _Collective(pending, scheduler, what, group.timeout if timeout is None else timeout, steps)
    if async_op:
        return handle
    handle.wait()
    return None


def _root(group: Group, rank: int | None, group_rank: int | None, what: str) -> int:
    """The rank within the group that a user means, by its number in the job or in the group."""
    if (rank is None) == (group_rank is None):
        raise ConfigurationError(f"{what}: give either the rank of the job or the rank of the group")
    if rank is not None:
        if rank not in group.ranks:
            raise ConfigurationError(f"{what}: rank {rank} is not in the group {list(group.ranks)}")
        return group.ranks.index(rank)
    assert group_rank is not None
    if not 0 <= group_rank < group.size():
        raise ConfigurationError(f"{what}: the group has the ranks 0 to {group.size() - 1}, not {group_rank}")
    return group_rank


# -- Arguments --------------------------------------------------------------------------------------------------------


def _tensor(value: Any, what: str) -> Tensor:
    """The tensor without its graph; complex ones as pairs of reals."""
    if not isinstance(value, Tensor):
        raise Unsupported(f"{what} takes a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise Unsupported(f"{what} takes a dense tensor, got layout {value.layout}. Call .to_dense() first")
    if value.is_conj() or value.is_neg():
        raise Unsupported(f"{what}: a lazily conjugated tensor has other bits than values. Call .clone() first")
    data = value.detach()
    if data.is_inference():  # then torch lets no other thread write it
        with torch.inference_mode(False):
            where = data.storage_offset(), data.shape, data.stride()
            data = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage(), *where)
    return torch.view_as_real(data) if data.is_complex() else data


def _tensors(values: Any, number: int, like: Tensor, what: str) -> list[Tensor]:
    """One tensor for each rank, of one shape and dtype."""
    if not isinstance(values, list | tuple) or len(values) != number:
        got = f"{len(values)} of them" if isinstance(values, list | tuple) else type(values).__name__
        raise ConfigurationError(f"{what} needs a list of {number} tensors, one for each rank of the group; got {got}")
    found = [_tensor(value, what) for value in values]
    for tensor in found:
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ConfigurationError(
                f"{what}: all tensors have one shape and dtype; got {list(tensor.shape)} {tensor.dtype} beside "
                f"{list(like.shape)} {like.dtype}"
            )
    return found


def _targets(tensors: Sequence[Tensor], what: str) -> None:
    """Raises ConfigurationError: one cannot be written."""
    for tensor in tensors:
        if overlaps(tensor):
            raise ConfigurationError(
                f"{what}: elements of a tensor that is written share memory (expanded?): shape {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}. Call .clone() or .contiguous() first"
            )


def _reduction(op: Any, tensor: Tensor, what: str) -> ReduceOp:
    """What ``op`` says, if it has a meaning for the user's own ``tensor``."""
    name = getattr(op, "name", None) or str(op)
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp[name.rpartition(".")[2].upper()]
    except KeyError:
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise ConfigurationError(f"{what}: op={op!r} is not known. Known: {known}.") from None
    if tensor.is_complex():
        if found not in (ReduceOp.SUM, ReduceOp.AVG):
            raise Unsupported(f"{what}: {found} has no meaning for {tensor.dtype} here. Use SUM or AVG, or gather")
        return found
    if tensor.dtype not in DTYPES:
        raise Unsupported(f"{what}: {tensor.dtype} is not reduced. Use one of {', '.join(map(str, DTYPES))}")
    if found is ReduceOp.AVG and not tensor.is_floating_point():
        raise Unsupported(f"{what}: the average of {tensor.dtype} is no {tensor.dtype}. Use ReduceOp.SUM and divide")
    if tensor.dtype is torch.bool and found not in (ReduceOp.MIN, ReduceOp.MAX):
        raise Unsupported(f"{what}: {found} has no meaning for bool. Use MAX (any) or MIN (all)")
    return found


def _put(target: Tensor, answer: Tensor) -> None:
    if target.data_ptr() != answer.data_ptr() or target.stride() != answer.stride():
        target.copy_(answer.reshape(target.shape))


def _wire(op: ReduceOp) -> str:
    return "sum" if op is ReduceOp.AVG else op.value


def _averaged(answer: Tensor, op: ReduceOp, size: int) -> Tensor:
    return answer.div_(size) if op is ReduceOp.AVG else answer


def _label(what: str, tensor: Tensor, group: Group) -> str:
    shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{what}{shape}" + (f" among {group}" if group.number else "")


# -- Collectives ------------------------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """Copy rank ``src``'s ``tensor`` into that of all ranks: same shape and dtype, any dtype.

    Raises:
        ConfigurationError: ``src`` is not in the group.
        Unsupported: not a dense tensor.
    """
    if (found := _member(group, "broadcast")) is None:
        return None
    data, root = _tensor(tensor, "broadcast"), _root(found, src, group_src, "broadcast")
    if found.rank() != root:
        _targets([data], "broadcast")

    def steps() -> Steps:
        _put(data, (yield Broadcast(data, root)))

    return _start(found, steps, _label("broadcast", data, found), async_op)


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Combine the ranks' ``tensor`` element by element, in place, the same bits on all.

    Raises:
        ConfigurationError: no such ``op``.
        Unsupported: the operation has no meaning for this dtype (an average of integers, a sum of bools, a product or
            an order of complex numbers).
    """
    if (found := _member(group, "all_reduce")) is None:
        return None
    data = _tensor(tensor, "all_reduce")
    kind = _reduction(op, tensor, "all_reduce")
    _targets([data], "all_reduce")

    def steps() -> Steps:
        answer = yield AllReduce(data, _wire(kind))
        _put(data, _averaged(answer, kind, found.size()))

    return _start(found, steps, _label("all_reduce", data, found), async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """As :func:`all_reduce`, but only rank ``dst``'s tensor changes."""
    if (found := _member(group, "reduce")) is None:
        return None
    data, root = _tensor(tensor, "reduce"), _root(found, dst, group_dst, "reduce")
    kind, mine = _reduction(op, tensor, "reduce"), found.rank() == root
    if mine:
        _targets([data], "reduce")

    def steps() -> Steps:
        answer = yield AllReduce(data if mine else data.clone(), _wire(kind))
        if mine:
            _put(data, _averaged(answer, kind, found.size()))

    return _start(found, steps, _label("reduce", data, found), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``tensor``, of one shape and dtype, into ``tensor_list`` in rank order.

    Raises:
        ConfigurationError: the list has not one tensor of that shape and dtype for each rank.
    """
    if (found := _member(group, "all_gather")) is None:
        return None
    data = _tensor(tensor, "all_gather")
    targets = _tensors(tensor_list, found.size(), data, "all_gather's tensor_list")
    _targets(targets, "all_gather's tensor_list")

    def steps() -> Steps:
        for target, row in zip(targets, (yield AllGather(data)), strict=True):
            _put(target, row)

    return _start(found, steps, _label("all_gather", data, found), async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """Every rank's ``input_tensor`` into one tensor, joined along the first axis or stacked: ``N`` times its size.

    Raises:
        ConfigurationError: ``output_tensor`` has another size or dtype.
    """
    if (found := _member(group, "all_gather_into_tensor")) is None:
        return None
    data, target = _tensor(input_tensor, "all_gather_into_tensor"), _tensor(output_tensor, "all_gather_into_tensor")
    _check_whole(target, data, found.size(), "all_gather_into_tensor: output_tensor")
    _targets([target], "all_gather_into_tensor: output_tensor")

    def steps() -> Steps:
        _put(target, (yield AllGather(data)))

    return _start(found, steps, _label("all_gather_into_tensor", data, found), async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """Every rank's ``tensor`` into rank ``dst``'s ``gather_list`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``gather_list`` is missing on ``dst``, is given elsewhere, or does not fit.
    """
    if (found := _member(group, "gather")) is None:
        return None
    data = _tensor(tensor, "gather")
    root = _root(found, *_first(found, dst, group_dst), "gather")
    mine = found.rank() == root
    targets = _list_on_root(gather_list, mine, found, data, "gather's gather_list")
    _targets(targets, "gather's gather_list")

    def steps() -> Steps:
        rows = yield AllGather(data)
        for target, row in zip(targets, rows if mine else (), strict=True):
            _put(target, row)

    return _start(found, steps, _label("gather", data, found), async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """Rank ``src``'s ``scatter_list[i]`` into the i-th rank's ``tensor`` (default: rank 0); others give no list.

    Raises:
        ConfigurationError: ``scatter_list`` is missing on ``src``, is given elsewhere, or does not fit.
    """
    if (found := _member(group, "scatter")) is None:
        return None
    data = _tensor(tensor, "scatter")
    root = _root(found, *_first(found, src, group_src), "scatter")
    mine = found.rank() == root
    parts = _list_on_root(scatter_list, mine, found, data, "scatter's scatter_list")
    _targets([data], "scatter")

    def steps() -> Steps:
        rows = torch.stack(parts) if mine else data.new_empty(found.size(), *data.shape)
        _put(data, (yield Broadcast(rows, root))[found.rank()])

    return _start(found, steps, _label("scatter", data, found), async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:
    """The i-th rank gets the ranks' ``input_list[i]``, combined, in ``output``.

    Raises:
        ConfigurationError: the list has not one tensor of the shape and dtype of ``output`` for each rank.
    """
    if (found := _member(group, "reduce_scatter")) is None:
        return None
    target = _tensor(output, "reduce_scatter")
    parts = _tensors(input_list, found.size(), target, "reduce_scatter's input_list")
    kind = _reduction(op, output, "reduce_scatter")
    return _reduce_scatter(found, target, lambda: torch.stack(parts), kind, "reduce_scatter", async_op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Handle | None:
    """As :func:`reduce_scatter`, of one tensor ``input`` that is the list joined or stacked.

    Raises:
        ConfigurationError: ``input`` has not ``N`` times the size of ``output``, or another dtype.
    """
    if (found := _member(group, "reduce_scatter_tensor")) is None:
        return None
    target, data = _tensor(output, "reduce_scatter_tensor"), _tensor(input, "reduce_scatter_tensor")
    _check_whole(data, target, found.size(), "reduce_scatter_tensor: input")
    kind = _reduction(op, output, "reduce_scatter_tensor")
    rows = found.size(), *target.shape
    return _reduce_scatter(found, target, lambda: data.reshape(rows), kind, "reduce_scatter_tensor", async_op)


def _reduce_scatter(
    group: Group, target: Tensor, rows: Callable[[], Tensor], kind: ReduceOp, what: str, async_op: bool
) -> Handle | None:
    _targets([target], what)

    def steps() -> Steps:
        answer = yield ReduceScatter(rows(), _wire(kind))
        _put(target, _averaged(answer, kind, group.size()))

    return _start(group, steps, _label(what, target, group), async_op)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:  # fmt: skip
    """``input_tensor_list[i]`` goes to the i-th rank, ``output_tensor_list[i]`` comes from it. Shapes may differ from
    pair to pair, one dtype.

    Raises:
        ConfigurationError: a list has not one tensor for each rank, or dtypes differ.
    """
    if (found := _member(group, "all_to_all")) is None:
        return None
    lists: list[list[Tensor]] = []
    for name, values in (("output_tensor_list", output_tensor_list), ("input_tensor_list", input_tensor_list)):
        if not isinstance(values, list | tuple) or len(values) != found.size():
            raise ConfigurationError(f"all_to_all: {name} needs one tensor for each of {found.size()} ranks")
        lists.append([_tensor(value, "all_to_all") for value in values])
    targets, parts = lists
    if len({tensor.dtype for tensor in (*targets, *parts)}) > 1:
        raise ConfigurationError("all_to_all: all tensors have one dtype")
    _targets(targets, "all_to_all's output_tensor_list")
    return _start(found, lambda: _exchange(targets, parts), _label("all_to_all", parts[0], found), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Handle | None:
    """Rows of ``input`` go to the ranks in turn, those of ``output`` come from them: ``split_sizes[i]`` rows each, or
    equal parts where None on all ranks.

    Raises:
        ConfigurationError: splits do not add up to the rows, or do not divide them equally.
    """
    if (found := _member(group, "all_to_all_single")) is None:
        return None
    data, target = _tensor(input, "all_to_all_single"), _tensor(output, "all_to_all_single")
    if data.dtype != target.dtype:
        raise ConfigurationError(f"all_to_all_single: input is {data.dtype}, output {target.dtype}")
    _targets([target], "all_to_all_single: output")
    what = _label("all_to_all_single", data, found)
    if input_split_sizes is None and output_split_sizes is None:
        if data.numel() != target.numel() or not data.dim() or data.shape[0] % found.size():
            raise ConfigurationError(
                f"all_to_all_single without splits: input {list(data.shape)} and output {list(target.shape)} must "
                f"have as many elements, and rows that {found.size()} ranks share equally"
            )

        def steps() -> Steps:
            _put(target, (yield AllToAll(data.reshape(found.size(), -1))))

        return _start(found, steps, what, async_op)
    parts = _split(data, input_split_sizes, found.size(), "input_split_sizes")
    targets = _split(target, output_split_sizes, found.size(), "output_split_sizes")
    return _start(found, lambda: _exchange(targets, parts), what, async_op)


def _split(tensor: Tensor, sizes: Sequence[int] | None, size: int, name: str) -> list[Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    sizes = [rows // size] * size if sizes is None else list(sizes)
    if len(sizes) != size or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigurationError(f"all_to_all_single: {name}={sizes} must divide {rows} rows among {size} ranks")
    return list(tensor.split(sizes))


def _exchange(targets: list[Tensor], parts: list[Tensor]) -> Steps:
    """Rows of unequal lengths, padded to the longest of all ranks."""
    longest = max(tensor.numel() for tensor in (*targets, *parts))
    width = int((yield AllReduce(torch.tensor([longest], device="cpu"), "max")).item())
    rows = parts[0].new_zeros(len(parts), width)
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()] = part.reshape(-1)
    for target, row in zip(targets, (yield AllToAll(rows)), strict=True):
        target.copy_(row[: target.numel()].view(target.shape))


def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Handle | None:
    """Return when all ranks have come.

    Args:
        device_ids: without effect: no device takes part.
        timeout: how long the others are waited for; None: the group's.

    Raises:
        CollectiveTimeout: they have not come.
        Unsupported: ``timeout`` is longer than HVDBRIDGE_TIMEOUT_SECONDS.
    """
    if (found := _member(group, "barrier")) is None:
        return None
    _check_limit(timeout, "barrier")

    def steps() -> Steps:
        yield AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max")

    what = "barrier" + (f" among {found}" if found.number else "")
    return _start(found, steps, what, async_op, timeout)


def _first(group: Group, rank: int | None, group_rank: int | None) -> tuple[int | None, int | None]:
    """torch's default for gather and scatter: rank 0."""
    return (0, None) if rank is None and group_rank is None else (rank, group_rank)


def _list_on_root(values: Any, mine: bool, group: Group, like: Tensor, what: str) -> list[Tensor]:
    if not mine:
        if values:
            raise ConfigurationError(f"rank {runtime.rank()}: {what} is given by the one rank that it is for, only")
        return []
    return _tensors(values, group.size(), like, what)


def _check_whole(whole: Tensor, part: Tensor, size: int, what: str) -> None:
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ConfigurationError(
            f"{what} must have {size} times {part.numel()} elements of {part.dtype}, "
            f"got {list(whole.shape)} {whole.dtype}"
        )


# -- Messages ---------------------------------------------------------------------------------------------------------


def isend(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> Handle | None:
    """Start to send ``tensor`` to rank ``dst``; any dtype. It stays as it is until the handle is waited for.

    Raises:
        ConfigurationError: ``dst`` is this rank, or not in the group; or a tag that is none.
    """
    found = _member(group, "isend")
    return None if found is None else _isend(found, tensor, dst, tag, group_dst)


def _isend(found: Group, tensor: Tensor, dst: int | None, tag: int, group_dst: int | None = None) -> _Message:
    data, to = _tensor(tensor, "send"), _root(found, dst, group_dst, "send")
    _check_peer(found, to, tag, "send to")
    what = f"{_label('send', data, found)} to rank {found.ranks[to]}, tag {tag}"
    return _Message(_messages(found).send(_payload(data), to, tag), what, found)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Handle | None:
    """Start to receive into ``tensor`` from rank ``src``; None: from whoever sends with this tag.

    Raises:
        ConfigurationError: ``src`` is this rank, or not in the group; or a tag that is none. From ``wait``, on
            Horovod and MPI: the message has another size.
    """
    found = _member(group, "irecv")
    return None if found is None else _irecv(found, tensor, src, tag, group_src)


def _irecv(found: Group, tensor: Tensor, src: int | None, tag: int, group_src: int | None = None) -> _Message:
    data = _tensor(tensor, "recv")
    _targets([data], "recv")
    source = None if src is None and group_src is None else _root(found, src, group_src, "recv")
    _check_peer(found, source, tag, "receive from")
    whom = "any rank" if source is None else f"rank {found.ranks[source]}"
    what = f"{_label('recv', data, found)} from {whom}, tag {tag}"
    direct = data.is_contiguous() and not data.is_cuda and data.numel() > 0
    payload = _payload(data) if direct else torch.empty(max(data.nbytes, 1), dtype=torch.uint8, device="cpu")

    def land() -> None:
        if not direct and data.numel():
            data.copy_(payload.view(data.dtype).view(data.shape))

    return _Message(_messages(found).receive(payload, source, tag), what, found, land)


def send(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """:func:`isend`, waited for: ``tensor`` may be changed afterwards."""
    if (found := _member(group, "send")) is not None:
        _isend(found, tensor, dst, tag, group_dst).wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """:func:`irecv`, waited for; returns the rank that sent (-1 on a rank outside of the group)."""
    if (found := _member(group, "recv")) is None:
        return -1
    handle = _irecv(found, tensor, src, tag, group_src)
    handle.wait()
    return handle.source


@dataclass(eq=False)
class P2POp:
    """One operation of :func:`batch_isend_irecv`.

    Attributes:
        op: :func:`isend` or :func:`irecv`.
        peer, group_peer: the other rank, by its number in the job or in the group: one of the two.

    Raises:
        ConfigurationError: another ``op``; no peer, both, or one that is not in the group.
        Unsupported: ``tensor`` is none, or not dense.
    """

    op: Callable[..., Handle | None]
    tensor: Tensor
    peer: int | None = None
    group: Group | None = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if self.op not in (isend, irecv):
            raise ConfigurationError(f"P2POp: op={self.op!r} must be hvdbridge.isend or hvdbridge.irecv")
        _tensor(self.tensor, "P2POp")
        group = _meant(self.group, "P2POp")
        self.group_peer = _root(group, self.peer, self.group_peer, "P2POp")
        self.peer = group.ranks[self.group_peer]


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Handle]:
    """Start all of them; returns their handles, in order."""
    handles: list[Handle] = []
    for each in p2p_op_list:
        if (found := _member(each.group, "batch_isend_irecv")) is not None:
            start = _isend if each.op is isend else _irecv
            handles.append(start(found, each.tensor, each.peer, each.tag))
    return handles


def _check_peer(group: Group, peer: int | None, tag: int, what: str) -> None:
    if peer == group.rank():
        raise ConfigurationError(f"rank {runtime.rank()} cannot {what} itself")
    if not 0 <= tag < TAGS:
        raise ConfigurationError(f"tag={tag} must be at least 0 and below {TAGS}")


def _payload(data: Tensor) -> Tensor:
    """The tensor's bytes on the host, one row; of an empty one a single byte, which says that it came."""
    if not data.numel():
        return torch.zeros(1, dtype=torch.uint8, device="cpu")
    flat = data.cpu().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _messages(group: Group) -> Messages:
    if group._messages is None:
        session = runtime.current()
        # The session's own channel: making another one would need all ranks. Collectives on it meet no messages.
        communicator = session.communicator if group.number == 0 else _still_open(group, "send and recv")
        carrier = registry.load(session.backend, "point_to_point")
        group._messages = carrier(communicator, group.number, lambda: _tcp(group))
    return group._messages


def _tcp(group: Group) -> tuple[Any, list[int]]:
    groups = _groups()
    if groups.exchange is None:
        from hvdbridge.backends.tcp import Exchange

        session = runtime.current()
        store, key = session.monitor, f"messages/{runtime._starts}"
        groups.exchange = Exchange(
            session.world.rank,
            store.own_address(),
            lambda rank, text: store.store_set(f"{key}/{rank}", text.encode()),
            lambda rank: store.store_get(f"{key}/{rank}").decode(),
            session.config.ports,
        )
    return groups.exchange, list(group.ranks)
