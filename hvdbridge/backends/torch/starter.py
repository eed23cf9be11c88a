"""The start of torch.distributed: Gloo, and NCCL where each rank has a GPU of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdbridge.backends.starter import EnvironmentOverrides, RankAndSize, RendezvousInfo, Starter
from hvdbridge.config import LONGEST_SECONDS
from hvdbridge.startup import network
from hvdbridge.startup.channels import HashStore, PrefixStore, Store, tcp_store


class TorchStarter(Starter):
    """Calls ``init_process_group`` on the launcher's store, or on one that rank 0 hosts."""

    name = "torch"

    def __init__(self) -> None:
        self._environment = EnvironmentOverrides()
        self._store: Store | None = None

    @classmethod
    def running(cls) -> RankAndSize | None:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None

    def all_gather(self, value: str) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered

    def start(self, rendezvous: RendezvousInfo) -> None:
        world, config = rendezvous.world, rendezvous.config
        # By default Gloo uses the address of the host's name, which is often loopback or unreachable.
        interface = config.iface or network.interface_towards(rendezvous.address)
        nccl = config.iface and f"={config.iface}"  # "=": NCCL matches names by prefix otherwise
        self._environment.set_defaults({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": nccl})
        with rendezvous.monitor.phase("init_process_group", hint=rendezvous.check_gloo_ports()):
            self._store = rendezvous.store or self._open_store(rendezvous)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if rendezvous.own_devices else "gloo",
                store=PrefixStore(f"{rendezvous.key}/torch", self._store),
                rank=world.rank, world_size=world.size, timeout=timedelta(seconds=LONGEST_SECONDS),
            )  # fmt: skip

    def _open_store(self, rendezvous: RendezvousInfo) -> Store:
        """Return a store on rank 0, whose port the ranks exchange through the job's helper."""
        if rendezvous.world.size == 1:
            return HashStore()
        key, host, rank_text = f"{rendezvous.key}/store", rendezvous.address, f"rank {rendezvous.world.rank}"
        if rendezvous.world.rank:
            port = int(rendezvous.monitor.store_get(key))
            return tcp_store(host, port, False, rendezvous.config, rank_text, shared=False)
        store = tcp_store(host, 0, True, rendezvous.config, rank_text, shared=False)
        rendezvous.monitor.store_set(key, str(store.port).encode())
        return store

    def stop(self) -> None:
        """Destroy the default group; otherwise torchrun's agent waits minutes for ranks that have ended."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        self._environment.restore()
