"""A backend of one's own: ranks exchange messages over TCP, with one connection for each pair of ranks.

::

    cd examples
    HVDBRIDGE_BACKEND=mesh torchrun --nproc-per-node 2 mesh.py
    HVDBRIDGE_BACKEND=mesh horovodrun -np 2 python mesh.py
    HVDBRIDGE_BACKEND=mesh mpiexec -n 2 python mesh.py

docs/how-to/write-a-backend.md explains it. The conformance suite of the bundled backends runs on it, too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch
from torch import Tensor

import hvdbridge as hb
from hvdbridge.backends import registry
from hvdbridge.backends.bridge import Bridged
from hvdbridge.backends.communicator import Communicator, Watch, Work, unwatched
from hvdbridge.backends.starter import RankAndSize, RendezvousInfo, Starter
from hvdbridge.errors import NotInitialized

Key = tuple[str, int]
"""The name of a communicator and the number of an operation, which tell messages apart."""


class Mesh:
    """The connections of this process to all other ranks, and the messages that have arrived."""

    def __init__(self, rendezvous: RendezvousInfo) -> None:
        self.rank, self.size = rendezvous.world.rank, rendezvous.world.size
        self.peers: dict[int, Connection] = {}
        self.inbox: dict[tuple[int, Key], bytes] = {}
        self.changed = threading.Condition()
        if self.size == 1:
            return
        monitor, prefix = rendezvous.monitor, rendezvous.key  # the job's key-value store, and a prefix for its keys
        if self.rank == 0:
            monitor.store_set(f"{prefix}/secret", secrets.token_bytes(16))
        secret = monitor.store_get(f"{prefix}/secret")
        with Listener((monitor.own_address(), 0), backlog=self.size, authkey=secret) as listener:
            host, port = listener.address
            monitor.store_set(f"{prefix}/{self.rank}", f"{host} {port}".encode())
            for rank in range(self.rank):
                host, port = monitor.store_get(f"{prefix}/{rank}").decode().split()
                self.peers[rank] = Client((host, int(port)), authkey=secret)
                self.peers[rank].send(self.rank)
            for _ in range(self.rank + 1, self.size):
                peer = listener.accept()
                self.peers[peer.recv()] = peer
        for rank, peer in self.peers.items():
            threading.Thread(target=self._read, args=(rank, peer), daemon=True).start()

    def _read(self, rank: int, peer: Connection) -> None:
        """Store the messages of one peer until its connection closes."""
        try:
            while True:
                key, data = peer.recv()
                with self.changed:
                    self.inbox[rank, key] = data
                    self.changed.notify_all()
        except (EOFError, OSError):
            with self.changed:
                del self.peers[rank]
                self.changed.notify_all()

    def send(self, rank: int, key: Key, data: bytes) -> None:
        if rank not in self.peers:
            raise ConnectionError(f"the connection to rank {rank} is closed")
        self.peers[rank].send((key, data))

    def receive(self, rank: int, key: Key, seconds: float) -> bytes:
        def ready() -> bool:
            return (rank, key) in self.inbox or rank not in self.peers

        with self.changed:
            if not self.changed.wait_for(ready, seconds):
                raise TimeoutError(f"timed out: rank {rank} sent nothing")
            if (rank, key) not in self.inbox:
                raise ConnectionError(f"the connection to rank {rank} is closed")
            return self.inbox.pop((rank, key))

    def close(self) -> None:
        for peer in list(self.peers.values()):
            peer.close()


class Exchange(Work):
    """An operation that waits for one message from each rank in ``outputs``, and copies it there."""

    def __init__(self, mesh: Mesh, key: Key, outputs: Mapping[int, Tensor], seconds: float) -> None:
        self._mesh, self._key, self._outputs, self._seconds = mesh, key, outputs, seconds

    def done(self) -> bool:
        return all((rank, self._key) in self._mesh.inbox for rank in self._outputs)

    def wait(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for rank, output in outputs.items():
            data = self._mesh.receive(rank, self._key, self._seconds)
            output.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class MeshCommunicator(Bridged):
    """Moves bytes among ``ranks`` of the job. The base class reduces, because ``reduced_dtypes`` is empty."""

    failures = (ConnectionError, TimeoutError)

    def __init__(
        self, mesh: Mesh, name: str, ranks: Sequence[int], timeout_seconds: float, watch: Watch = unwatched
    ) -> None:
        super().__init__(name, ranks.index(mesh.rank), len(ranks), timeout_seconds, watch)
        self._mesh, self._ranks, self._numbers = mesh, ranks, count()

    @classmethod
    def world(cls, watch: Watch = unwatched, timeout_seconds: float = 300.0) -> MeshCommunicator:
        mesh = MeshStarter.mesh
        if mesh is None:
            raise NotInitialized("the mesh is not started; call hb.init() first")
        return cls(mesh, f"world {next(MeshStarter.worlds)}", range(mesh.size), timeout_seconds, watch)

    def _start(self, to_send: Mapping[int, Tensor], to_receive: Mapping[int, Tensor]) -> Work:
        key = self.name, next(self._numbers)
        for rank, data in to_send.items():
            self._mesh.send(self._ranks[rank], key, data.numpy().tobytes())
        outputs = {self._ranks[rank]: output for rank, output in to_receive.items()}
        return Exchange(self._mesh, key, outputs, self.timeout_seconds)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _all_gather(self, data: Tensor, output: Tensor) -> Work:
        output[self.rank].copy_(data)
        return self._start(dict.fromkeys(self._others(), data), {rank: output[rank] for rank in self._others()})

    def _all_to_all(self, rows: Tensor, output: Tensor) -> Work:
        output[self.rank].copy_(rows[self.rank])
        others = self._others()
        return self._start({rank: rows[rank] for rank in others}, {rank: output[rank] for rank in others})

    def _send_to_all(self, data: Tensor, root: int) -> Work:
        if self.rank == root:
            return self._start(dict.fromkeys(self._others(), data), {})
        return self._start({}, {root: data})

    def _reduce_in_place(self, flat: Tensor, op: str) -> Work:
        raise AssertionError("reduced_dtypes is empty")

    def _split(self, name: str, groups: list[list[int]], mine: int | None) -> Communicator | None:
        if mine is None:
            return None
        ranks = [self._ranks[rank] for rank in groups[mine]]
        return MeshCommunicator(self._mesh, f"{name}.{mine}", ranks, self.timeout_seconds, self.watch)

    def _close(self) -> None:
        """Nothing to free: the connections belong to the starter."""


class MeshStarter(Starter):
    """Connects the ranks."""

    name = "mesh"
    mesh: ClassVar[Mesh | None] = None
    worlds: ClassVar[count[int]] = count()

    @classmethod
    def running(cls) -> RankAndSize | None:
        return None  # no script starts it by itself

    def all_gather(self, value: str) -> list[Any]:
        raise AssertionError("only for a library that a script has started")

    def start(self, rendezvous: RendezvousInfo) -> None:
        MeshStarter.mesh = Mesh(rendezvous)

    def rank_and_size(self) -> RankAndSize:
        assert MeshStarter.mesh is not None
        return MeshStarter.mesh.rank, MeshStarter.mesh.size

    def stop(self) -> None:
        if MeshStarter.mesh is not None:
            MeshStarter.mesh.close()
        MeshStarter.mesh = None


BACKEND = registry.Backend("the mesh", "mesh", "It is the file mesh.py.", "mesh:MeshCommunicator", "mesh:MeshStarter")
registry.register("mesh", "mesh")


def main() -> None:
    hb.init()
    total = torch.tensor([float(hb.rank() + 1)])
    hb.all_reduce(total)
    if hb.rank() == 0:
        print(f"{hb.size()} ranks on {hb.backend()}: {total.item():g}", flush=True)
    hb.shutdown()


if __name__ == "__main__":
    main()
