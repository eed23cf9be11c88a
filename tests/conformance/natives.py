"""How each backend's own library is started and used without hvdbridge: all that the suite must know of a backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from jobs import leave_torch
from torch import Tensor


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
        """The user's own sum, in place, on the library's default channel."""
        self.dist.all_reduce(tensor)

    def group(self, ranks: Sequence[int]) -> Any:
        """The library's own kind of group; collective."""
        return self.dist.new_group(list(ranks))


class Horovod:
    def start(self) -> None:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # else Horovod makes no groups after its start
        os.environ["HOROVOD_CYCLE_TIME"] = "0.1"  # milliseconds; only for speed
        import horovod.torch as hvd

        self.hvd = hvd
        hvd.init()

    def stop(self) -> None:
        self.hvd.shutdown()

    def size(self) -> int:
        return int(self.hvd.size())

    def all_reduce(self, tensor: Tensor) -> None:
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="the user's own")

    def group(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == self.hvd.size():
            return self.hvd.global_process_set
        return self.hvd.add_process_set(list(ranks))


class Mpi:
    def start(self) -> None:
        from mpi4py import MPI

        self.MPI = MPI

    def stop(self) -> None:
        pass

    def size(self) -> int:
        return int(self.MPI.COMM_WORLD.size)

    def all_reduce(self, tensor: Tensor) -> None:
        self.MPI.COMM_WORLD.Allreduce(self.MPI.IN_PLACE, tensor.numpy())

    def group(self, ranks: Sequence[int]) -> Any:
        comm = self.MPI.COMM_WORLD
        made = comm.Split(0 if comm.rank in ranks else 1)
        return made if comm.rank in ranks else None


NATIVES = {"torch": Torch, "horovod": Horovod, "mpi": Mpi}


def start(backend: str) -> Any:
    torch.set_num_threads(1)
    native = NATIVES[backend]()
    native.start()
    return native
