"""Process groups for DDP communication hooks, whose ``torch.distributed`` collectives are requests of a flow.

Rules:

1. A collective of such a group is complete when the call returns, and so is its future. Callbacks therefore run in
   program order on every rank. Other process groups complete futures in an order that differs between ranks, so hooks
   with several rounds of collectives may abort or hang with them.
2. In the threads of hooks alone, such a group replaces the default group (``process_group=None``,
   ``dist.group.WORLD``), also if torch.distributed is not initialized. Other threads see torch's own state.
3. If a hook uses a group of some ranks, every rank calls the collective at the same point, with the group it is in.
"""

# The stubs of ProcessGroup are overloads. torch.distributed calls one form of each, the one that is overridden here.
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
from hvdbridge.training.fiber import execute

BACKEND = "hvdbridge"
OPS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "product", "MIN": "min", "MAX": "max"}
"""Name of a ``dist.ReduceOp`` -> ``op`` of a request; an average is a sum that is divided afterwards."""


class FlowGroup(dist.ProcessGroup):
    """A process group whose operations run as requests of the flow that runs the hook.

    It overrides each operation of :class:`torch.distributed.ProcessGroup` under its older and its newer name.

    Args:
        rank, size: this rank, and the number of ranks of the synchronizer.
        ranks: the synchronizer's ranks that are in the group; None: all.
        label: the ``group`` of requests; empty: the first collective determines it by an all-gather.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None, label: str = "") -> None:
        self.rank_and_size = (rank, size)
        self.ranks = list(range(size)) if ranks is None else list(ranks)
        self._label = label or ("world" if len(self.ranks) == size else "")
        super().__init__(self.ranks.index(rank), len(self.ranks))  # type: ignore[call-arg]

    def name(self) -> str:
        return BACKEND

    getBackendName = name  # the method's name in torch

    def new_group(self, *args: Any, **options: Any) -> None:
        raise Unsupported("dist.new_group() in a hook: make the group before training, with hvdbridge.new_group()")

    @property
    def label(self) -> str:
        if not self._label:
            rank, size = self.rank_and_size
            row = torch.tensor([r in self.ranks for r in range(size)], dtype=torch.uint8, device="cpu")
            rows = execute(AllGather(row)).tolist()
            groups = sorted({tuple(r for r, inside in enumerate(row) if inside) for row in rows})
            if sorted(r for group in groups for r in group) != list(range(size)):
                raise ConfigurationError(
                    f"rank {rank}: the hook's group has the ranks {self.ranks}, and together the ranks use the groups "
                    f"{groups}. Each rank must use one group that it is in, disjoint from those of others."
                )
            self._label = "ranks:" + "|".join(",".join(map(str, group)) for group in groups)
        return self._label

    # -- reductions -----------------------------------------------------------------------------------------------

    def _reduce_tensor(self, kind: type[AllReduce | ReduceScatter], tensor: Tensor, opts: Any) -> Tensor:
        op = getattr(opts, "reduceOp", opts)
        op_name = "sum" if op is None else next((OPS[name] for name in OPS if op == getattr(dist.ReduceOp, name)), None)
        if op_name is None:
            raise Unsupported(f"a hook's reduction {op} is not known here. Known: {', '.join(OPS)}.")
        result = execute(kind(tensor, "sum" if op_name == "avg" else op_name, self.label))
        return result.div_(self.size()) if op_name == "avg" else result

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        for tensor in tensors:
            _copy_result(tensor, self._reduce_tensor(AllReduce, tensor, opts))
        return _completed_work(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            total = self._reduce_tensor(AllReduce, tensor.clone(), opts)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return _completed_work(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: Sequence[Iterable[Tensor]], opts: Any = None) -> Any:
        for output, rows in zip(outputs, inputs, strict=True):
            stacked = torch.stack([row.reshape(-1) for row in rows])
            _copy_result(output, self._reduce_tensor(ReduceScatter, stacked, opts))
        return _completed_work(outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.reduce_scatter(outputs, [data.reshape(self.size(), -1) for data in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    _reduce_scatter_base = reduce_scatter_single

    # -- copies ---------------------------------------------------------------------------------------------------

    def _gather_rows(self, data: Tensor) -> Tensor:
        return execute(AllGather(data.clone(), self.label))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            _copy_result(tensor, execute(Broadcast(tensor, opts.rootRank, self.label)))
        return _completed_work(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        results = [self._gather_rows(data) for data in inputs]
        for output, rows in zip(outputs, results, strict=True):
            _copy_results(output, rows)
        return _completed_work(results)  # stacked rows, as in NCCL's futures; torch's hooks rely on that

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, data in zip(outputs, inputs, strict=True):
            _copy_result(output, self._gather_rows(data))
        return _completed_work(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [data])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        rows = self._gather_rows(inputs[0])
        if opts.rootRank == self.rank():
            _copy_results(outputs[0], rows)
        return _completed_work(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        output, is_root = outputs[0], opts.rootRank == self.rank()
        rows = torch.stack(inputs[0]) if is_root else output.new_empty(self.size(), *output.shape)
        _copy_result(output, execute(Broadcast(rows, opts.rootRank, self.label))[self.rank()])
        return _completed_work(outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        if len({tensor.shape for tensor in (*inputs, *outputs)}) > 1:
            raise Unsupported("a hook's all_to_all exchanges tensors of one shape; pad them")
        _copy_results(outputs, execute(AllToAll(torch.stack(inputs), self.label)))
        return _completed_work(outputs)

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> Any:
        if len({*(output_splits or ()), *(input_splits or ())}) > 1:
            raise Unsupported("a hook's all_to_all_single exchanges equal splits; pad them")
        _copy_result(output, execute(AllToAll(data.reshape(self.size(), -1).clone(), self.label)))
        return _completed_work([output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        execute(AllReduce(torch.zeros(1, dtype=torch.int32, device="cpu"), "max", self.label))
        return _completed_work([])

    def _unsupported(self, *args: Any, **options: Any) -> Any:
        raise Unsupported("send and recv have no place in a hook: all ranks run it alike. Use a collective.")

    send = recv = recv_anysource = _unsupported


def _copy_result(target: Tensor, result: Tensor) -> None:
    if target.data_ptr() != result.data_ptr() or target.stride() != result.stride():
        target.copy_(result.view(target.shape))


def _copy_results(targets: Iterable[Tensor], rows: Iterable[Tensor]) -> None:
    for target, row in zip(targets, rows, strict=True):
        _copy_result(target, row)


def _completed_work(value: Any) -> Any:
    """Return a completed work, whose future holds ``value``."""
    devices: Any = [tensor.device for tensor in tree_leaves(value)[:1] if tensor.is_cuda]
    future: Future[Any] = Future(devices=devices or None)
    future.set_result(value)
    return _create_work_from_future(future)


# -- The default group ------------------------------------------------------------------------------------------------


class HookWorld:
    """The state of ``torch.distributed`` in the threads of one hook: its default group and its tables of groups.

    Attributes:
        group: the default group.
        tables: values for the attributes of ``distributed_c10d._world``.
    """

    def __init__(self, group: FlowGroup) -> None:
        self.group = group
        self.tables: dict[str, Any] = {
            "default_pg": group, "pg_map": {}, "pg_names": {}, "pg_group_ranks": {}, "pg_backend_config": {},
            "pg_coalesce_state": {},
        }  # fmt: skip
        self.add(group)

    def add(self, group: FlowGroup) -> FlowGroup:
        """Register a group in the tables, and return it."""
        self.tables["pg_map"][group] = (BACKEND, None)
        self.tables["pg_names"][group] = f"{BACKEND}/{len(self.tables['pg_names'])}"
        self.tables["pg_group_ranks"][group] = {rank: i for i, rank in enumerate(group.ranks)}
        self.tables["pg_backend_config"][group] = f"cpu:{BACKEND},cuda:{BACKEND}"
        return group

    def run(self, function: Callable[[], Any]) -> Any:
        """Return ``function()``; during the call, ``torch.distributed`` uses this state in the current thread."""
        if not isinstance(c10d._world, _WorldByThread):
            c10d._world.__class__ = _WorldByThread
        _thread_local.tables = self.tables
        try:
            return function()
        finally:
            _thread_local.tables = {}


_thread_local = threading.local()


class _WorldByThread(c10d._World):
    """The state of ``torch.distributed``, which in the threads of hooks reads a :class:`HookWorld` instead."""

    def __getattribute__(self, name: str) -> Any:
        tables = getattr(_thread_local, "tables", {})
        return tables[name] if name in tables else super().__getattribute__(name)
