"""The sequence of a start, the same for each launcher and each library. :mod:`hvdbridge.startup.channels` has the
channels that it uses.

Rules:

1. The launcher's channel opens. Rank 0 starts the job's helper and publishes its address. All ranks check that version,
   backend, policy, timeout and threads agree. The library starts. Its rank and size must equal the launcher's.
2. A failure on one rank fails all. Until the helper runs, rank 0 publishes failures over the channel, its own and those
   that ranks have sent; later the helper reports them.
3. A library that the user has started is used as it is, and serves as the channel.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hvdbridge.backends import registry
from hvdbridge.backends.mpi.starter import incompatibility, launcher_starts_mpi
from hvdbridge.backends.starter import RendezvousInfo, Starter
from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable, ConfigurationError, RendezvousError
from hvdbridge.startup import channels, launchers, network
from hvdbridge.startup.channels import Channel, ObjectChannel
from hvdbridge.startup.world import World
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.spawn import HelperAddress, start_helper

log = logging.getLogger("hvdbridge")


def starter(name: str) -> type[Starter]:
    """Return the starter of a backend.

    Raises:
        ConfigurationError: no backend has this name.
    """
    kind: type[Starter] = registry.load(name, "starter")
    return kind


@dataclass(frozen=True)
class Started:
    """A running library. ``stop()`` shuts it down, unless the user has started it."""

    backend: str
    rendezvous: RendezvousInfo
    stop: Callable[[], None]


def start(config: Config, world: World, init_method: str | None, number: int, settings: str) -> Started:
    """Run the rendezvous of all ranks and start ``config.backend``. Collective.

    ``number`` counts the starts of this process; ``settings`` is a text that must be equal on all ranks.

    Raises:
        ConfigurationError: the backend, ``init_method`` or a variable of the launcher is invalid.
        BackendUnavailable: the backend is not installed, or cannot run under this launcher.
        RendezvousError: ranks are missing, or the library reports another rank or size than the launcher.
        RankMismatch: backends or settings differ among ranks.
    """
    name, user_started = choose(config.backend, world)
    library = starter(name)()
    rank_and_size = library.running() if user_started else None
    if rank_and_size is not None and world.launcher == "none":
        world = World(*rank_and_size, launcher="none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun restarts the ranks, not its store
    key = f"hvdbridge/{attempt}/{number}"
    if user_started:
        library.verify_rank_and_size(world)
        channel: Channel = ObjectChannel(library.all_gather) if world.size > 1 else ObjectChannel()
    else:
        library.check(world)
        channel = library.native_channel(world, config) or open_channel(world, init_method, key, config)
    if world.rank == 0 and config.backend == "auto":
        log.info("backend %s: auto under %s%s", name, world.launcher, ", found running" if user_started else "")
    rendezvous = run_rendezvous(config, world, channel, key)
    monitor = rendezvous.monitor
    try:
        if any(w.local_size > 1 for w in rendezvous.worlds) and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(1)  # as torchrun does where ranks share a host: rounding depends on the number
        threads = f"{torch.get_num_threads()} threads (OMP_NUM_THREADS)"
        if world.size > 1:
            monitor.agree("the job's settings", f"{settings}, backend {name}, {threads}")
        if not user_started:
            library.start(rendezvous)
            library.verify_rank_and_size(rendezvous.world)
    except Exception as error:
        monitor.report(error)
        raise
    monitor.install_exit_hooks()  # again, since these hooks must run before those that the library installed
    return Started(name, rendezvous, (lambda: None) if user_started else library.stop)


def choose(backend: str, world: World) -> tuple[str, bool]:
    """Return the backend's name, and whether the user has started it.

    For ``"auto"``: the first running library, else the launcher's preferred backend if it is installed, else torch.
    """
    if backend != "auto":
        return backend, starter(backend).running() is not None
    for name in registry.in_order():
        rank_and_size = starter(name).running()
        # A library with another rank or size is ignored: an imported package may have initialized it.
        if rank_and_size is not None and (world.launcher == "none" or rank_and_size == (world.rank, world.size)):
            return name, True
    name = "mpi" if launcher_starts_mpi(world) else "horovod" if world.launcher == "horovodrun" else "torch"
    return name if registry.installed(name) else "torch", False


def open_channel(world: World, init_method: str | None, key: str, config: Config) -> Channel:
    """Open the channel that ``init_method`` or the launcher provides.

    Raises:
        RendezvousError, ConfigurationError: the launcher's variables are incomplete, or no process listens there.
        BackendUnavailable: ranks of this launcher connect over MPI, and MPI cannot start.
    """
    if world.size == 1:
        return ObjectChannel()
    if init_method is not None:
        return channels.from_url(init_method, world, key, config)
    launcher, installed = launchers.named(world.launcher), registry.installed("mpi")
    if launcher.by_mpi and installed and (channel := starter("mpi")().native_channel(world, config)) is not None:
        return channel
    try:
        return launcher.channel(world, key, config)
    except RendezvousError as error:
        if not launcher.by_mpi:
            raise
        why = incompatibility(world) if installed else "mpi4py is not installed. " + registry.entry("mpi").remedy
        raise BackendUnavailable(
            f"Under {world.launcher} the ranks meet by MPI, but {why}, or set MASTER_ADDR and MASTER_PORT to the host "
            "of rank 0 and a free port there."
        ) from error


def run_rendezvous(config: Config, world: World, channel: Channel, key: str) -> RendezvousInfo:
    """Gather facts about all ranks over ``channel``, start the job's helper on rank 0, and connect to it. Collective.

    Raises:
        RendezvousError: ranks are missing, or the helper cannot start or be reached.
    """
    identity = network.host_identity()
    info: dict[str, Any] = {
        "world": asdict(world), "network": network.network_identity(), "devices": _devices(), "host": _host_key(world),
    }  # fmt: skip
    try:
        interfaces = [network.chosen_interface(config.iface)] if config.iface else network.interfaces().values()
        info["addresses"] = [str(interface) for interface in interfaces]
    except ConfigurationError as error:
        info["error"] = str(error)
    infos = [json.loads(text) for text in channel.gather(json.dumps(info))]
    reply = json.loads(channel.broadcast(_rank_0_reply(config, infos, channel.address) if world.rank == 0 else ""))
    if "error" in reply:
        raise RendezvousError(reply["error"])
    worlds = tuple(World(**fields) for fields in reply["worlds"])
    helper = HelperAddress.parse(reply["helper"]) if reply["helper"] else None
    monitor = Monitor.connect(helper, world.rank, world.size, config, identity) if helper else Monitor.alone(config)
    monitor.install_exit_hooks()
    channel.close()
    mine = replace(worlds[world.rank], launcher=world.launcher)
    return RendezvousInfo(
        config, monitor, worlds, mine, reply["address"], reply["own_devices"], helper, channel.store, key
    )  # fmt: skip


def _rank_0_reply(config: Config, infos: Sequence[Any], default: str | None) -> str:
    """Start the helper on rank 0 and return rank 0's reply to all ranks, as JSON: worlds and addresses, or an error.

    ``infos`` has the facts of each rank, in rank order; ``default`` is rank 0's address as the launcher gives it.
    """
    try:
        partial = [World(**info["world"]) for info in infos]
        worlds = [world.completed([info["host"] for info in infos]) for world in partial]
        if [(w.rank, w.size) for w in worlds] != [(r, len(infos)) for r in range(len(infos))]:
            raise RendezvousError(f"the ranks do not fit together: {[(w.rank, w.size) for w in worlds]}")
        mine = infos[0]
        errors = [info["error"] for info in infos if "error" in info]
        if errors:
            raise RendezvousError(errors[0])
        own = mine["addresses"]
        others = [info["addresses"] for info in infos if info["network"] != mine["network"]]
        address = network.common_address(own, others, None if config.iface else default) if others else network.LOOPBACK
        if address is None:
            raise RendezvousError(
                f"rank 0's host has no IPv4 address that other hosts reach: it has {', '.join(own) or 'none'}, another "
                f"has {', '.join(others[0]) or 'none'}. IPv6 alone, and addresses that several hosts have, do not "
                "serve; HVDBRIDGE_IFACE names an interface"
            )
        helper = str(start_helper(address, len(infos), config)) if len(infos) > 1 else ""
    except RendezvousError as error:
        return json.dumps({"error": str(error)})
    visible = [info["devices"] for info in infos]
    used = [ids and ids[world.local_rank % len(ids)] for ids, world in zip(visible, worlds, strict=True)]
    return json.dumps({
        "worlds": [asdict(world) for world in worlds], "address": address, "helper": helper,
        "own_devices": all(used) and len(set(used)) == len(used),
    })  # fmt: skip


def _host_key(world: World) -> str:
    """Return a text that is equal on the ranks of one host, and only there: the host's name by horovodrun, the
    launcher's number of the node, or an identity of the host."""
    if world.launcher == "horovodrun":
        return os.environ.get("HOROVOD_HOSTNAME") or network.host_identity()
    return network.host_identity() if world.node_rank < 0 else f"node {world.node_rank}"


def _devices() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
