"""Calls of each backend's own library without hvdbridge: the only code of the suite that depends on a backend."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jobs import leave_torch
from torch import Tensor

import hvdbridge as hb


class Torch:
    def start(self) -> None:
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo")

    def stop(self) -> None:
        leave_torch()

    def size(self) -> int:
        return int(self.dist.get_world_size())

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place on the library's default channel, as a user would."""
        self.dist.all_reduce(tensor)

    def group(self, ranks: Sequence[int]) -> Any:
        """Create a group of the library's own type. Collective."""
        return self.dist.new_group(list(ranks))


class Horovod:
    def start(self) -> None:
        hb.init()  # no launcher of Horovod started the ranks
        import horovod.torch as hvd

        self.hvd = hvd

    def stop(self) -> None:
        hb.shutdown()

    def size(self) -> int:
        return int(self.hvd.size())

    def all_reduce(self, tensor: Tensor) -> None:
        handle = self.hvd.allreduce_async_(tensor, op=self.hvd.Sum, name="the user's own")
        while not self.hvd.poll(handle):  # synchronize() would spin and keep the GIL from the rank's other thread
            time.sleep(1e-4)
        self.hvd.synchronize(handle)

    def group(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == self.hvd.size():
            return self.hvd.global_process_set
        return self.hvd.add_process_set(list(ranks))


class Mpi:
    def start(self) -> None:
        hb.init()  # before the import of mpi4py.MPI, which needs the address where ranks meet
        from mpi4py import MPI

        self.MPI = MPI

    def stop(self) -> None:
        hb.shutdown()

    def size(self) -> int:
        return int(self.MPI.COMM_WORLD.size)

    def all_reduce(self, tensor: Tensor) -> None:
        self.MPI.COMM_WORLD.Allreduce(self.MPI.IN_PLACE, tensor.numpy())

    def group(self, ranks: Sequence[int]) -> Any:
        comm = self.MPI.COMM_WORLD
        subset = comm.Split(0 if comm.rank in ranks else 1)
        return subset if comm.rank in ranks else None


class Mesh:
    """The backend of examples/mesh.py, which has no calls of its own."""

    def start(self) -> None:
        sys.path.append(str(Path(__file__).parents[2] / "examples"))
        import mesh

        assert mesh.BACKEND.package == "mesh"
        hb.init()

    def stop(self) -> None:
        hb.shutdown()

    def size(self) -> int:
        return hb.size()

    def all_reduce(self, tensor: Tensor) -> None:
        hb.all_reduce(tensor)

    def group(self, ranks: Sequence[int]) -> Any:
        return list(ranks)


NATIVES = {"torch": Torch, "horovod": Horovod, "mpi": Mpi, "mesh": Mesh}


def start(backend: str) -> Any:
    torch.set_num_threads(1)
    native = NATIVES[backend]()
    native.start()
    return native
