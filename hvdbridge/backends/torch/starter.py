"""torch.distributed: Gloo, and NCCL where every rank has a GPU of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hvdbridge.backends.starter import Meeting, Numbers, Starter, Variables
from hvdbridge.config import LONGEST_SECONDS
from hvdbridge.startup import network
from hvdbridge.startup.channels import HashStore, PrefixStore, Store, tcp_store


class TorchStarter(Starter):
    """``init_process_group`` over the launcher's store, or over one that rank 0 serves."""

    name = "torch"

    def __init__(self) -> None:
        self._variables = Variables()
        self._store: Store | None = None

    @classmethod
    def running(cls) -> Numbers | None:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None

    def all_gather(self, value: str) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def start(self, meeting: Meeting) -> None:
        world, config = meeting.world, meeting.config
        # Gloo takes the address of the host's name, which on many machines is loopback or unreachable.
        interface = config.iface or network.interface_towards(meeting.address)
        nccl = config.iface and f"={config.iface}"  # NCCL takes a name for a prefix otherwise
        self._variables.default({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": nccl})
        with meeting.monitor.phase("init_process_group"):
            self._store = meeting.store or self._open_store(meeting)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if meeting.own_devices else "gloo",
                store=PrefixStore(f"{meeting.key}/torch", self._store),
                rank=world.rank, world_size=world.size, timeout=timedelta(seconds=LONGEST_SECONDS),
            )  # fmt: skip

    def _open_store(self, meeting: Meeting) -> Store:
        if meeting.world.size == 1:
            return HashStore()
        key, host, who = f"{meeting.key}/store", meeting.address, f"rank {meeting.world.rank}"
        if meeting.world.rank:
            port = int(meeting.monitor.store_get(key))
            return tcp_store(host, port, False, meeting.config, who, shared=False)
        store = tcp_store(host, 0, True, meeting.config, who, shared=False)
        meeting.monitor.store_set(key, str(store.port).encode())
        return store

    def stop(self) -> None:
        """Without this, torchrun's agent waits minutes for ranks that are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        self._variables.restore()
