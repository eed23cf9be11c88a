"""What stands for ``horovod.common.basics``: the queries of ``hvd`` as methods of an object."""

from __future__ import annotations

from hvdbridge.torch import mpi_ops


class HorovodBasics:
    """``hvd``'s own functions; all objects are alike.

    Args:
        pkg_path, args: where Horovod's library lies; there is none here.
    """

    Average, Sum, Adasum = mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum
    Min, Max, Product = mpi_ops.Min, mpi_ops.Max, mpi_ops.Product

    init = staticmethod(mpi_ops.init)
    shutdown = staticmethod(mpi_ops.shutdown)
    is_initialized = staticmethod(mpi_ops.is_initialized)
    start_timeline = staticmethod(mpi_ops.start_timeline)
    stop_timeline = staticmethod(mpi_ops.stop_timeline)
    rank = staticmethod(mpi_ops.rank)
    size = staticmethod(mpi_ops.size)
    local_rank = staticmethod(mpi_ops.local_rank)
    local_size = staticmethod(mpi_ops.local_size)
    cross_rank = staticmethod(mpi_ops.cross_rank)
    cross_size = staticmethod(mpi_ops.cross_size)
    is_homogeneous = staticmethod(mpi_ops.is_homogeneous)
    mpi_threads_supported = staticmethod(mpi_ops.mpi_threads_supported)
    mpi_enabled = staticmethod(mpi_ops.mpi_enabled)
    mpi_built = staticmethod(mpi_ops.mpi_built)
    gloo_enabled = staticmethod(mpi_ops.gloo_enabled)
    gloo_built = staticmethod(mpi_ops.gloo_built)
    nccl_built = staticmethod(mpi_ops.nccl_built)
    ddl_built = staticmethod(mpi_ops.ddl_built)
    ccl_built = staticmethod(mpi_ops.ccl_built)
    cuda_built = staticmethod(mpi_ops.cuda_built)
    rocm_built = staticmethod(mpi_ops.rocm_built)

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass
