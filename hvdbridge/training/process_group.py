"""The ``torch.distributed`` that a foreign hook finds: process groups whose collectives are requests of a flow.

Rules:

1. A collective of such a group is over when the call returns: its future is complete, so callbacks run in the order
   of the hook's lines, on every rank alike. Completion callbacks of the libraries below run in another order on each
   rank, which is why hooks of several rounds abort or hang there.
2. The default group (``process_group=None``, ``dist.group.WORLD``) stands in for the real one, or for none, in the
   threads of hooks alone; all other threads see what they have always seen.
3. Groups of some of the ranks: every rank uses one of its own at the same place of the hook, as SPMD code does.
"""

# The stubs of ProcessGroup are overloads; torch.distributed calls one form of each, which is written here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from hvdbridge.training.fiber import ask

BACKEND = "hvdbridge"


class FlowGroup(dist.ProcessGroup):
    """A process group inside of a hook. ``ranks`` are those of the synchronizer; None: all of them.

    Each operation of :class:`torch.distributed.ProcessGroup` is here under both its older and its newer name.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        self.whole = (rank, size)
        self.ranks = list(range(size)) if ranks is None else list(ranks)
        mine = self.ranks.index(rank)
        super().__init__(mine, len(self.ranks))  # type: ignore[call-arg]
        self._place = (mine, len(self.ranks))
        self._name = "world" if len(self.ranks) == size else ""

    @classmethod
    def named(cls, name: str, place: tuple[int, int]) -> FlowGroup:
        """A group that communicators know by name, in which this rank has ``place``: its number, and how many."""
        group = cls(*place)
        group._name = name
        return group

    def size(self) -> int:
        return self._place[1]

    def rank(self) -> int:
        return self._place[0]

    def name(self) -> str:
        return BACKEND

    getBackendName = name  # torch's name

    def shutdown(self) -> None:
        """There is nothing to shut down."""

    abort = shutdown

    @property
    def label(self) -> str:
        """The group's name in requests; of some of the ranks: found out in its first use."""
        if not self._name:
            rank, size = self.whole
            row = torch.tensor([r in self.ranks for r in range(size)], dtype=torch.uint8, device="cpu")
            rows = ask(AllGather(row)).tolist()
            groups = sorted({tuple(r for r, inside in enumerate(row) if inside) for row in rows})
            if sorted(r for group in groups for r in group) != list(range(size)):
                raise ConfigurationError(
                    f"rank {rank}: the hook's group has the ranks {self.ranks}, and together the ranks use the groups "
                    f"{groups}. Each rank must use one group that it is in, disjoint from those of others."
                )
            self._name = partition(groups)
        return self._name

    # -- reductions -----------------------------------------------------------------------------------------------

    def _reduced(self, tensor: Tensor, op: Any) -> Tensor:
        kind = _op(op)
        answer = ask(AllReduce(tensor, "sum" if kind == "avg" else kind, self.label))
        return answer.div_(self.size()) if kind == "avg" else answer

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        op = getattr(opts, "reduceOp", opts)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            _put(tensor, self._reduced(tensor, op))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            total = self._reduced(tensor.clone(), opts.reduceOp)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return _done(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        for output, rows in zip(outputs, inputs, strict=True):
            self._scattered(output, torch.stack([row.reshape(-1) for row in rows]), opts)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        self._scattered(output, data.reshape(self.size(), -1).clone(), opts)
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, data in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, data, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattered(self, output: Tensor, rows: Tensor, opts: Any) -> None:
        kind = _op(getattr(opts, "reduceOp", None))
        answer = ask(ReduceScatter(rows, "sum" if kind == "avg" else kind, self.label))
        _put(output, answer.div_(self.size()) if kind == "avg" else answer)

    # -- copies ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            _put(tensor, ask(Broadcast(tensor, opts.rootRank, self.label)))
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        answers = []
        for output, data in zip(outputs, inputs, strict=True):
            rows = ask(AllGather(data.clone(), self.label))
            answers.append(rows)
            for target, row in zip(output, rows, strict=True):
                _put(target, row)
        return _done(answers)  # stacked rows, as NCCL's futures have them and torch's hooks want them

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        _put(output, ask(AllGather(data.clone(), self.label)))
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, data in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, data)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for i, data in enumerate(inputs):
            for row, answer in zip(outputs, ask(AllGather(data.clone(), self.label)), strict=True):
                _put(row[i], answer)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        rows = ask(AllGather(inputs[0].clone(), self.label))
        if opts.rootRank == self.rank():
            for target, row in zip(outputs[0], rows, strict=True):
                _put(target, row)
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        output, own = outputs[0], opts.rootRank == self.rank()
        rows = torch.stack(inputs[0]) if own else output.new_empty(self.size(), *output.shape)
        _put(output, ask(Broadcast(rows, opts.rootRank, self.label))[self.rank()])
        return _done(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if len({tensor.shape for tensor in (*inputs, *outputs)}) > 1:
            raise Unsupported("a hook's all_to_all exchanges tensors of one shape; pad them")
        for target, row in zip(outputs, ask(AllToAll(torch.stack(inputs), self.label)), strict=True):
            _put(target, row)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> Any:
        if len({*(output_splits or ()), *(input_splits or ())}) > 1:
            raise Unsupported("a hook's all_to_all_single exchanges equal splits; pad them")
        _put(output, ask(AllToAll(data.reshape(self.size(), -1).clone(), self.label)))
        return _done([output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        ask(AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max", self.label))
        return _done([])

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise Unsupported("send and recv have no place in a hook: all ranks run it alike. Use a collective.")

    send = recv = recv_anysource = _refuse

    # -- groups ---------------------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], *args: Any, **options: Any) -> FlowGroup | None:
        """What ``dist.new_group(ranks)`` makes inside of a hook; None for a rank that is not in it."""
        rank, size = self.whole
        return FlowGroup(rank, size, ranks) if rank in ranks else None


def partition(groups: Sequence[Sequence[int]]) -> str:
    """The name by which communicators know a division of all ranks.

    >>> partition([[0, 2], [1, 3]])
    'ranks:0,2|1,3'
    """
    return "ranks:" + "|".join(",".join(map(str, group)) for group in groups)


OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max"}


def _op(op: Any) -> str:
    if op is None:
        return "sum"
    for name, ours in OPS.items():
        if op == getattr(dist.ReduceOp, name):
            return ours
    raise Unsupported(f"a hook's reduction {op} is not known here. Known: {', '.join(OPS)}.")


def _put(target: Tensor, answer: Tensor) -> None:
    if target.data_ptr() != answer.data_ptr() or target.stride() != answer.stride():
        target.copy_(answer.view(target.shape))


def _done(value: Any) -> Any:
    """A work that is over, whose future has ``value``."""
    first = value[0] if value else None
    while isinstance(first, list):
        first = first[0] if first else None
    devices: Any = [first.device] if isinstance(first, Tensor) and first.is_cuda else None
    future: Future[Any] = Future(devices=devices)
    future.set_result(value)
    return _create_work_from_future(future)


# -- The default group ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HookWorld:
    """What ``torch.distributed`` keeps of groups, for the threads of one hook."""

    default_pg: FlowGroup
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    group_count: int = 0

    def __post_init__(self) -> None:
        self.add(self.default_pg, "default")

    def add(self, group: FlowGroup, name: str | None = None) -> FlowGroup:
        """Make a group known under its ranks; returns it."""
        self.pg_map[group] = (BACKEND, None)
        self.pg_names[group] = name or f"{BACKEND}/{len(self.pg_names)}"
        self.pg_group_ranks[group] = {rank: i for i, rank in enumerate(group.ranks)}
        self.pg_backend_config[group] = f"cpu:{BACKEND},cuda:{BACKEND}"
        return group


_seen = threading.local()


def _by_thread(name: str) -> property:
    def get(self: Any) -> Any:
        world = getattr(_seen, "world", None)
        return getattr(c10d._World, name).fget(self) if world is None else getattr(world, name)

    def put(self: Any, value: Any) -> None:
        world = getattr(_seen, "world", None)
        if world is None:
            getattr(c10d._World, name).fset(self, value)
        else:
            setattr(world, name, value)

    return property(get, put)


class _WorldByThread(c10d._World):
    """``torch.distributed``'s own books, except in the threads of hooks."""


for _name in HookWorld.__dataclass_fields__:
    if isinstance(getattr(c10d._World, _name, None), property):
        setattr(_WorldByThread, _name, _by_thread(_name))


def inside(world: HookWorld, function: Callable[[], Any]) -> Any:
    """``function()`` with ``world`` as this thread's ``torch.distributed``."""
    if not isinstance(c10d._world, _WorldByThread):
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _no_backend, devices=["cpu", "cuda"])
        c10d._world.__class__ = _WorldByThread
    before = getattr(_seen, "world", None)
    _seen.world = world
    try:
        return function()
    finally:
        _seen.world = before


def _no_backend(*args: Any) -> Any:
    raise Unsupported(f"the backend {BACKEND!r} exists inside of a hook that hvdbridge runs; use backend='gloo'")
