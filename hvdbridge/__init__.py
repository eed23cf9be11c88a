"""One training script; torch.distributed, Horovod or MPI below it; the same gradient aggregation on all.

::

    import hvdbridge as hb

    hb.init()                                   # HVDBRIDGE_BACKEND = auto | torch | horovod | mpi
    sync = hb.GradientSynchronizer(model, optimizer, policy="bf16")
    model, optimizer = sync.model, sync.optimizer

Names are imported on first use: ``import hvdbridge`` alone brings in neither torch, mpi4py nor Horovod.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

HOME = {
    "bridges.comm_hook": "to_comm_hook",
    "bridges.compression": "from_horovod_compression to_horovod_compression",
    "bridges.ddp": "DistributedDataParallel",
    "bridges.foreign_hook": "from_comm_hook",
    "bridges.fsdp": "set_all_reduce_hook",
    "bucket": "Bucket",
    "collectives": "AllGather AllReduce AllToAll Broadcast Collective ReduceScatter",
    "errors": (
        "BackendUnavailable CollectiveMismatch CollectiveTimeout ConfigurationError HvdbridgeError "
        "NotInitialized RankFailed RankMismatch RendezvousError SpecError StepError Unsupported "
        "WeightError"
    ),
    "launching": "launch",
    "policy": "Aggregated Early Flow Policy Slot State",
    "primitives": (
        "Group Handle P2POp ReduceOp all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single barrier "
        "batch_isend_irecv broadcast gather irecv isend new_group recv reduce reduce_scatter reduce_scatter_tensor "
        "scatter send"
    ),
    "runtime": (
        "Session backend broadcast_object broadcast_parameters current device init "
        "is_initialized launcher local_rank local_size node_rank num_nodes patience rank session shutdown size"
    ),
    "sampler": "DistributedSampler",
    "simulation": "Simulation simulate",
    "stopping": "stop stop_on_signals",
    "sync_batchnorm": "SyncBatchNorm",
    "synchronizer": "GradientSynchronizer average_gradients",
}
"""The module of each public name."""

if TYPE_CHECKING:
    from hvdbridge import policies as policies
    from hvdbridge.bridges.comm_hook import to_comm_hook as to_comm_hook
    from hvdbridge.bridges.compression import from_horovod_compression as from_horovod_compression
    from hvdbridge.bridges.compression import to_horovod_compression as to_horovod_compression
    from hvdbridge.bridges.ddp import DistributedDataParallel as DistributedDataParallel
    from hvdbridge.bridges.foreign_hook import from_comm_hook as from_comm_hook
    from hvdbridge.bridges.fsdp import set_all_reduce_hook as set_all_reduce_hook
    from hvdbridge.bucket import Bucket as Bucket
    from hvdbridge.collectives import AllGather as AllGather
    from hvdbridge.collectives import AllReduce as AllReduce
    from hvdbridge.collectives import AllToAll as AllToAll
    from hvdbridge.collectives import Broadcast as Broadcast
    from hvdbridge.collectives import Collective as Collective
    from hvdbridge.collectives import ReduceScatter as ReduceScatter
    from hvdbridge.errors import BackendUnavailable as BackendUnavailable
    from hvdbridge.errors import CollectiveMismatch as CollectiveMismatch
    from hvdbridge.errors import CollectiveTimeout as CollectiveTimeout
    from hvdbridge.errors import ConfigurationError as ConfigurationError
    from hvdbridge.errors import HvdbridgeError as HvdbridgeError
    from hvdbridge.errors import NotInitialized as NotInitialized
    from hvdbridge.errors import RankFailed as RankFailed
    from hvdbridge.errors import RankMismatch as RankMismatch
    from hvdbridge.errors import RendezvousError as RendezvousError
    from hvdbridge.errors import SpecError as SpecError
    from hvdbridge.errors import StepError as StepError
    from hvdbridge.errors import Unsupported as Unsupported
    from hvdbridge.errors import WeightError as WeightError
    from hvdbridge.launching import launch as launch
    from hvdbridge.policy import Aggregated as Aggregated
    from hvdbridge.policy import Early as Early
    from hvdbridge.policy import Flow as Flow
    from hvdbridge.policy import Policy as Policy
    from hvdbridge.policy import Slot as Slot
    from hvdbridge.policy import State as State
    from hvdbridge.primitives import Group as Group
    from hvdbridge.primitives import Handle as Handle
    from hvdbridge.primitives import P2POp as P2POp
    from hvdbridge.primitives import ReduceOp as ReduceOp
    from hvdbridge.primitives import all_gather as all_gather
    from hvdbridge.primitives import all_gather_into_tensor as all_gather_into_tensor
    from hvdbridge.primitives import all_reduce as all_reduce
    from hvdbridge.primitives import all_to_all as all_to_all
    from hvdbridge.primitives import all_to_all_single as all_to_all_single
    from hvdbridge.primitives import barrier as barrier
    from hvdbridge.primitives import batch_isend_irecv as batch_isend_irecv
    from hvdbridge.primitives import broadcast as broadcast
    from hvdbridge.primitives import gather as gather
    from hvdbridge.primitives import irecv as irecv
    from hvdbridge.primitives import isend as isend
    from hvdbridge.primitives import new_group as new_group
    from hvdbridge.primitives import recv as recv
    from hvdbridge.primitives import reduce as reduce
    from hvdbridge.primitives import reduce_scatter as reduce_scatter
    from hvdbridge.primitives import reduce_scatter_tensor as reduce_scatter_tensor
    from hvdbridge.primitives import scatter as scatter
    from hvdbridge.primitives import send as send
    from hvdbridge.runtime import Session as Session
    from hvdbridge.runtime import backend as backend
    from hvdbridge.runtime import broadcast_object as broadcast_object
    from hvdbridge.runtime import broadcast_parameters as broadcast_parameters
    from hvdbridge.runtime import current as current
    from hvdbridge.runtime import device as device
    from hvdbridge.runtime import init as init
    from hvdbridge.runtime import is_initialized as is_initialized
    from hvdbridge.runtime import launcher as launcher
    from hvdbridge.runtime import local_rank as local_rank
    from hvdbridge.runtime import local_size as local_size
    from hvdbridge.runtime import node_rank as node_rank
    from hvdbridge.runtime import num_nodes as num_nodes
    from hvdbridge.runtime import patience as patience
    from hvdbridge.runtime import rank as rank
    from hvdbridge.runtime import session as session
    from hvdbridge.runtime import shutdown as shutdown
    from hvdbridge.runtime import size as size
    from hvdbridge.sampler import DistributedSampler as DistributedSampler
    from hvdbridge.simulation import Simulation as Simulation
    from hvdbridge.simulation import simulate as simulate
    from hvdbridge.stopping import stop as stop
    from hvdbridge.stopping import stop_on_signals as stop_on_signals
    from hvdbridge.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from hvdbridge.synchronizer import GradientSynchronizer as GradientSynchronizer
    from hvdbridge.synchronizer import average_gradients as average_gradients

_HOME_OF = {name: module for module, names in HOME.items() for name in names.split()}
__all__ = ["policies", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name == "policies":
        return import_module("hvdbridge.policies")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdbridge' has no attribute {name!r}")
    value = getattr(import_module(f"hvdbridge.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
