"""The names of hvdbridge, for type checkers, and the module that defines each of them."""

# ruff: noqa: I001
from hvdbridge import policies as policies
from hvdbridge.errors import (
    BackendUnavailable as BackendUnavailable, CollectiveMismatch as CollectiveMismatch,
    CollectiveTimeout as CollectiveTimeout, ConfigurationError as ConfigurationError,
    HvdbridgeError as HvdbridgeError, NotInitialized as NotInitialized, RankFailed as RankFailed,
    RankMismatch as RankMismatch, RendezvousError as RendezvousError, SpecError as SpecError,
    StepError as StepError, Unsupported as Unsupported, WeightError as WeightError,
)
from hvdbridge.execution.simulation import Simulation as Simulation, simulate as simulate
from hvdbridge.policy.base import (
    Aggregated as Aggregated, Early as Early, Flow as Flow, Policy as Policy, Slot as Slot, State as State,
)
from hvdbridge.policy.bucket import Bucket as Bucket
from hvdbridge.policy.collectives import (
    AllGather as AllGather, AllReduce as AllReduce, AllToAll as AllToAll, Broadcast as Broadcast,
    Collective as Collective, ReduceScatter as ReduceScatter,
)
from hvdbridge.reduction.session import Session as Session
from hvdbridge.startup.launching import launch as launch
from hvdbridge.training.comm_hook import to_comm_hook as to_comm_hook
from hvdbridge.training.data_parallel import DistributedDataParallel as DistributedDataParallel
from hvdbridge.training.distributed_sampler import DistributedSampler as DistributedSampler
from hvdbridge.training.foreign_hook import from_comm_hook as from_comm_hook
from hvdbridge.training.fsdp import set_all_reduce_hook as set_all_reduce_hook
from hvdbridge.training.groups import Group as Group, Handle as Handle, ReduceOp as ReduceOp, new_group as new_group
from hvdbridge.training.horovod_compression import (
    from_horovod_compression as from_horovod_compression, to_horovod_compression as to_horovod_compression,
)
from hvdbridge.training.messages import (
    P2POp as P2POp, batch_isend_irecv as batch_isend_irecv, irecv as irecv, isend as isend, recv as recv,
    send as send,
)
from hvdbridge.training.primitives import (
    all_gather as all_gather, all_gather_into_tensor as all_gather_into_tensor, all_reduce as all_reduce,
    all_to_all as all_to_all, all_to_all_single as all_to_all_single, barrier as barrier, broadcast as broadcast,
    gather as gather, reduce as reduce, reduce_scatter as reduce_scatter,
    reduce_scatter_tensor as reduce_scatter_tensor, scatter as scatter,
)
from hvdbridge.training.runtime import (
    backend as backend, broadcast_object as broadcast_object, broadcast_parameters as broadcast_parameters,
    current as current, device as device, init as init, is_initialized as is_initialized, launcher as launcher,
    local_rank as local_rank, local_size as local_size, node_rank as node_rank, num_nodes as num_nodes,
    patience as patience, rank as rank, session as session, shutdown as shutdown, size as size,
)
from hvdbridge.training.stopping import stop as stop, stop_on_signals as stop_on_signals
from hvdbridge.training.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from hvdbridge.training.synchronizer import GradientSynchronizer as GradientSynchronizer
from hvdbridge.training.average import average_gradients as average_gradients

__version__: str
__all__: list[str]
