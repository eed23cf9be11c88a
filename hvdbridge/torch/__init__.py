"""Horovod's API for PyTorch on any backend: ``import hvdbridge.torch as hvd``.

The names, signatures and results are those of ``horovod.torch`` 0.28. Horovod need not be installed. The backend that
``HVDBRIDGE_BACKEND`` selects (torch.distributed, the real Horovod, or MPI) carries the data.
docs/how-to/several-hosts.md says which launchers start which backend; docs/reference/horovod-api.md lists every name.
"""

# ruff: noqa: I001
from __future__ import annotations

from hvdbridge.torch import elastic
from hvdbridge.torch.asynchronous import (
    allgather_async, allreduce_, allreduce_async, allreduce_async_, alltoall_async, barrier, broadcast_,
    broadcast_async, broadcast_async_, grouped_allgather_async, grouped_allreduce_, grouped_allreduce_async,
    grouped_allreduce_async_, grouped_reducescatter_async, join, poll, reducescatter_async, sparse_allreduce_async,
    synchronize,
)
from hvdbridge.torch.basics import (
    Adasum, Average, Max, Min, Product, Sum, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_built,
    gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_size, mpi_built, mpi_enabled,
    mpi_threads_supported, nccl_built, rank, rocm_built, shutdown, size, start_timeline, stop_timeline,
)
from hvdbridge.torch.compression import Compression
from hvdbridge.torch.exceptions import HorovodInternalError
from hvdbridge.torch.functions import (
    allgather_object, broadcast_object, broadcast_object_fn, broadcast_optimizer_state, broadcast_parameters,
)
from hvdbridge.torch.mpi_ops import (
    allgather, allreduce, alltoall, broadcast, grouped_allgather, grouped_allreduce, grouped_reducescatter,
    reducescatter,
)
from hvdbridge.torch.optimizer import DistributedOptimizer
from hvdbridge.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdbridge.torch.sync_batch_norm import SyncBatchNorm
from hvdbridge.torch.util import check_extension

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_object_fn",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "check_extension", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip
