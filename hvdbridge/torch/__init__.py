"""Horovod's API for PyTorch on any backend: ``import hvdbridge.torch as hvd``.

The names, arguments and results are those of ``horovod.torch`` 0.28; Horovod need not be installed. Data travels by the
backend that ``HVDBRIDGE_BACKEND`` names (torch.distributed, the real Horovod, or MPI), under any launcher.
docs/horovod.md has a table of every name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdbridge.torch.compression import Compression as Compression
from hvdbridge.torch.exceptions import HorovodInternalError as HorovodInternalError
from hvdbridge.torch.functions import allgather_object as allgather_object
from hvdbridge.torch.functions import broadcast_object as broadcast_object
from hvdbridge.torch.functions import broadcast_object_fn as broadcast_object_fn
from hvdbridge.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from hvdbridge.torch.functions import broadcast_parameters as broadcast_parameters
from hvdbridge.torch.mpi_ops import Adasum as Adasum
from hvdbridge.torch.mpi_ops import Average as Average
from hvdbridge.torch.mpi_ops import Max as Max
from hvdbridge.torch.mpi_ops import Min as Min
from hvdbridge.torch.mpi_ops import Product as Product
from hvdbridge.torch.mpi_ops import Sum as Sum
from hvdbridge.torch.mpi_ops import allgather as allgather
from hvdbridge.torch.mpi_ops import allgather_async as allgather_async
from hvdbridge.torch.mpi_ops import allreduce as allreduce
from hvdbridge.torch.mpi_ops import allreduce_ as allreduce_
from hvdbridge.torch.mpi_ops import allreduce_async as allreduce_async
from hvdbridge.torch.mpi_ops import allreduce_async_ as allreduce_async_
from hvdbridge.torch.mpi_ops import alltoall as alltoall
from hvdbridge.torch.mpi_ops import alltoall_async as alltoall_async
from hvdbridge.torch.mpi_ops import barrier as barrier
from hvdbridge.torch.mpi_ops import broadcast as broadcast
from hvdbridge.torch.mpi_ops import broadcast_ as broadcast_
from hvdbridge.torch.mpi_ops import broadcast_async as broadcast_async
from hvdbridge.torch.mpi_ops import broadcast_async_ as broadcast_async_
from hvdbridge.torch.mpi_ops import ccl_built as ccl_built
from hvdbridge.torch.mpi_ops import cross_rank as cross_rank
from hvdbridge.torch.mpi_ops import cross_size as cross_size
from hvdbridge.torch.mpi_ops import cuda_built as cuda_built
from hvdbridge.torch.mpi_ops import ddl_built as ddl_built
from hvdbridge.torch.mpi_ops import gloo_built as gloo_built
from hvdbridge.torch.mpi_ops import gloo_enabled as gloo_enabled
from hvdbridge.torch.mpi_ops import grouped_allgather as grouped_allgather
from hvdbridge.torch.mpi_ops import grouped_allgather_async as grouped_allgather_async
from hvdbridge.torch.mpi_ops import grouped_allreduce as grouped_allreduce
from hvdbridge.torch.mpi_ops import grouped_allreduce_ as grouped_allreduce_
from hvdbridge.torch.mpi_ops import grouped_allreduce_async as grouped_allreduce_async
from hvdbridge.torch.mpi_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from hvdbridge.torch.mpi_ops import grouped_reducescatter as grouped_reducescatter
from hvdbridge.torch.mpi_ops import grouped_reducescatter_async as grouped_reducescatter_async
from hvdbridge.torch.mpi_ops import init as init
from hvdbridge.torch.mpi_ops import is_homogeneous as is_homogeneous
from hvdbridge.torch.mpi_ops import is_initialized as is_initialized
from hvdbridge.torch.mpi_ops import join as join
from hvdbridge.torch.mpi_ops import local_rank as local_rank
from hvdbridge.torch.mpi_ops import local_size as local_size
from hvdbridge.torch.mpi_ops import mpi_built as mpi_built
from hvdbridge.torch.mpi_ops import mpi_enabled as mpi_enabled
from hvdbridge.torch.mpi_ops import mpi_threads_supported as mpi_threads_supported
from hvdbridge.torch.mpi_ops import nccl_built as nccl_built
from hvdbridge.torch.mpi_ops import poll as poll
from hvdbridge.torch.mpi_ops import rank as rank
from hvdbridge.torch.mpi_ops import reducescatter as reducescatter
from hvdbridge.torch.mpi_ops import reducescatter_async as reducescatter_async
from hvdbridge.torch.mpi_ops import rocm_built as rocm_built
from hvdbridge.torch.mpi_ops import shutdown as shutdown
from hvdbridge.torch.mpi_ops import size as size
from hvdbridge.torch.mpi_ops import sparse_allreduce_async as sparse_allreduce_async
from hvdbridge.torch.mpi_ops import start_timeline as start_timeline
from hvdbridge.torch.mpi_ops import stop_timeline as stop_timeline
from hvdbridge.torch.mpi_ops import synchronize as synchronize
from hvdbridge.torch.process_sets import ProcessSet as ProcessSet
from hvdbridge.torch.process_sets import add_process_set as add_process_set
from hvdbridge.torch.process_sets import global_process_set as global_process_set
from hvdbridge.torch.process_sets import remove_process_set as remove_process_set
from hvdbridge.torch.util import check_extension as check_extension

if TYPE_CHECKING:
    from hvdbridge.torch import elastic as elastic
    from hvdbridge.torch.optimizer import DistributedOptimizer as DistributedOptimizer
    from hvdbridge.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

_LATER = {"DistributedOptimizer": "optimizer", "SyncBatchNorm": "sync_batch_norm"}
"""Imported on first use: they build on what is here."""


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return import_module("hvdbridge.torch.elastic")
    if name not in _LATER:
        raise AttributeError(f"module 'hvdbridge.torch' has no attribute {name!r}")
    value = getattr(import_module(f"hvdbridge.torch.{_LATER[name]}"), name)
    globals()[name] = value
    return value
