"""The ``torch.distributed`` that a foreign hook finds: process groups whose collectives are requests of a flow.

Rules:

1. A collective of such a group is over when the call returns. Its future is complete, so callbacks run in the order of
   the hook's lines, on every rank alike. Libraries complete futures in another order on each rank, which is why hooks
   of several rounds abort or hang there.
2. The default group (``process_group=None``, ``dist.group.WORLD``) takes the real one's place, or that of none, in the
   threads of hooks alone. All other threads see torch's own.
3. Where a group has some of the ranks, every rank uses a group of its own at the same line of the hook.
"""

# The stubs of ProcessGroup are overloads; torch.distributed calls one form of each, which is written here.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from hvdbridge.errors import ConfigurationError, Unsupported
from hvdbridge.policy.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from hvdbridge.training.fiber import ask

BACKEND = "hvdbridge"
OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max"}


class FlowGroup(dist.ProcessGroup):
    """A process group inside of a hook.

    Each operation of :class:`torch.distributed.ProcessGroup` is here under both its older and its newer name.

    Args:
        rank, size: this rank and the number of ranks of the synchronizer.
        ranks: which of them are in the group; None: all.
        label: the group's name in requests; empty: the group's first use finds it.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None, label: str = "") -> None:
        self.whole = (rank, size)
        self.ranks = list(range(size)) if ranks is None else list(ranks)
        self._label = label or ("world" if len(self.ranks) == size else "")
        super().__init__(self.ranks.index(rank), len(self.ranks))  # type: ignore[call-arg]

    def name(self) -> str:
        return BACKEND

    getBackendName = name  # torch's name

    def new_group(self, *args: Any, **options: Any) -> None:
        raise Unsupported("dist.new_group() in a hook: make the group before training, with hvdbridge.new_group()")

    @property
    def label(self) -> str:
        if not self._label:
            rank, size = self.whole
            row = torch.tensor([r in self.ranks for r in range(size)], dtype=torch.uint8, device="cpu")
            rows = ask(AllGather(row)).tolist()
            groups = sorted({tuple(r for r, inside in enumerate(row) if inside) for row in rows})
            if sorted(r for group in groups for r in group) != list(range(size)):
                raise ConfigurationError(
                    f"rank {rank}: the hook's group has the ranks {self.ranks}, and together the ranks use the groups "
                    f"{groups}. Each rank must use one group that it is in, disjoint from those of others."
                )
            self._label = "ranks:" + "|".join(",".join(map(str, group)) for group in groups)
        return self._label

    # -- reductions -----------------------------------------------------------------------------------------------

    def _reduced(self, kind: type[AllReduce | ReduceScatter], tensor: Tensor, opts: Any) -> Tensor:
        op = getattr(opts, "reduceOp", opts)
        ours = "sum" if op is None else next((OPS[name] for name in OPS if op == getattr(dist.ReduceOp, name)), None)
        if ours is None:
            raise Unsupported(f"a hook's reduction {op} is not known here. Known: {', '.join(OPS)}.")
        answer = ask(kind(tensor, "sum" if ours == "avg" else ours, self.label))
        return answer.div_(self.size()) if ours == "avg" else answer

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            _put(tensor, self._reduced(AllReduce, tensor, opts))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            total = self._reduced(AllReduce, tensor.clone(), opts)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return _done(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Sequence[Iterable[Tensor]], opts: Any = None) -> Any:
        for output, rows in zip(outputs, inputs, strict=True):
            stacked = torch.stack([row.reshape(-1) for row in rows])
            _put(output, self._reduced(ReduceScatter, stacked, opts))
        return _done(outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.reduce_scatter(outputs, [data.reshape(self.size(), -1) for data in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    _reduce_scatter_base = reduce_scatter_single

    # -- copies ---------------------------------------------------------------------------------------------------

    def _gathered(self, data: Tensor) -> Tensor:
        return ask(AllGather(data.clone(), self.label))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            _put(tensor, ask(Broadcast(tensor, opts.rootRank, self.label)))
        return _done(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        answers = [self._gathered(data) for data in inputs]
        for output, rows in zip(outputs, answers, strict=True):
            _put_all(output, rows)
        return _done(answers)  # stacked rows, as NCCL's futures have them and torch's hooks want them

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, data in zip(outputs, inputs, strict=True):
            _put(output, self._gathered(data))
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [data])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        rows = self._gathered(inputs[0])
        if opts.rootRank == self.rank():
            _put_all(outputs[0], rows)
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        output, own = outputs[0], opts.rootRank == self.rank()
        rows = torch.stack(inputs[0]) if own else output.new_empty(self.size(), *output.shape)
        _put(output, ask(Broadcast(rows, opts.rootRank, self.label))[self.rank()])
        return _done(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if len({tensor.shape for tensor in (*inputs, *outputs)}) > 1:
            raise Unsupported("a hook's all_to_all exchanges tensors of one shape; pad them")
        _put_all(outputs, ask(AllToAll(torch.stack(inputs), self.label)))
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


def _put(target: Tensor, answer: Tensor) -> None:
    if target.data_ptr() != answer.data_ptr() or target.stride() != answer.stride():
        target.copy_(answer.view(target.shape))


def _put_all(targets: Iterable[Tensor], rows: Iterable[Tensor]) -> None:
    for target, row in zip(targets, rows, strict=True):
        _put(target, row)


def _done(value: Any) -> Any:
    """A work that is over, whose future has ``value``."""
    devices: Any = [tensor.device for tensor in tree_leaves(value)[:1] if tensor.is_cuda]
    future: Future[Any] = Future(devices=devices or None)
    future.set_result(value)
    return _create_work_from_future(future)


# -- The default group ------------------------------------------------------------------------------------------------


class HookWorld:
    """What ``torch.distributed`` keeps of groups, in the threads of one hook.

    Attributes:
        group: the default group.
    """

    def __init__(self, group: FlowGroup) -> None:
        self.group = group
        self.books: dict[str, Any] = {
            "default_pg": group, "pg_map": {}, "pg_names": {}, "pg_group_ranks": {}, "pg_backend_config": {},
            "pg_coalesce_state": {},
        }  # fmt: skip
        self.add(group)

    def add(self, group: FlowGroup) -> FlowGroup:
        """Make a group known under its ranks; returns it."""
        self.books["pg_map"][group] = (BACKEND, None)
        self.books["pg_names"][group] = f"{BACKEND}/{len(self.books['pg_names'])}"
        self.books["pg_group_ranks"][group] = {rank: i for i, rank in enumerate(group.ranks)}
        self.books["pg_backend_config"][group] = f"cpu:{BACKEND},cuda:{BACKEND}"
        return group

    def run(self, function: Callable[[], Any]) -> Any:
        """``function()``, for which this is ``torch.distributed``'s world as long as it runs in this thread."""
        if not isinstance(c10d._world, _WorldByThread):
            c10d._world.__class__ = _WorldByThread
        _seen.books = self.books
        try:
            return function()
        finally:
            _seen.books = {}


_seen = threading.local()


class _WorldByThread(c10d._World):
    """``torch.distributed``'s own books, except in the threads of hooks."""

    def __getattribute__(self, name: str) -> Any:
        books = getattr(_seen, "books", {})
        return books[name] if name in books else super().__getattribute__(name)
