"""The order of a start, the same for every launcher and every library.

Rules:

1. The order: launcher's channel -> the job's helper, whose address rank 0 publishes -> agreement about version,
   backend, policy, timeout and threads -> the library -> its rank and size are the launcher's.
2. Whatever fails, fails on every rank: rank 0 publishes its own failure as well, later ones go through the helper.
3. A library that the user started is used as it is, and is its own channel.
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
from hvdbridge.backends.mpi.starter import misfit, offers_mpi
from hvdbridge.backends.starter import Meeting, Starter
from hvdbridge.config import BACKENDS, Config
from hvdbridge.errors import BackendUnavailable, ConfigurationError, RendezvousError
from hvdbridge.startup import channels, launchers, network
from hvdbridge.startup.channels import Channel, ObjectChannel
from hvdbridge.startup.world import World
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.spawn import HelperAddress, start_helper

log = logging.getLogger("hvdbridge")


def starter(name: str) -> type[Starter]:
    """The starter of a backend.

    Raises:
        ConfigurationError: no backend has this name.
    """
    found: type[Starter] = registry.load(name, "starter")
    return found


@dataclass(frozen=True)
class Started:
    """A library that runs: ``stop()`` undoes it, unless the user had started it."""

    backend: str
    meeting: Meeting
    stop: Callable[[], None]


def start(config: Config, world: World, init_method: str | None, number: int, settings: str) -> Started:
    """Meet the other ranks and start ``config.backend`` among them.

    ``number`` counts the starts of this process; ``settings`` is a text that must be equal on all ranks.

    Raises:
        ConfigurationError: the backend, ``init_method`` or a variable of the launcher cannot be meant.
        BackendUnavailable: the backend is not installed, or cannot run under this launcher.
        RendezvousError: ranks do not come, or the library found another number of them than the launcher.
        RankMismatch: ranks chose different backends or settings.
    """
    name, adopted = choose(config.backend, world)
    chosen = starter(name)()
    numbers = chosen.running() if adopted else None
    if numbers is not None and world.launcher == "none":
        world = World(*numbers, launcher="none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun restarts the ranks, but not its store
    key = f"hvdbridge/{attempt}/{number}"
    if adopted:
        chosen.compare(world)
        channel: Channel = ObjectChannel(chosen.all_gather) if world.size > 1 else ObjectChannel()
    else:
        chosen.check(world)
        channel = chosen.native_channel(world, config) or open_channel(world, init_method, key, config)
    if world.rank == 0 and config.backend == "auto":
        log.info("backend %s: auto under %s%s", name, world.launcher, ", found running" if adopted else "")
    meeting = meet(config, world, channel, key)
    monitor = meeting.monitor
    try:
        if any(each.local_size > 1 for each in meeting.worlds) and not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(1)  # as torchrun does where ranks share a host: the last bits depend on it
        threads = f"{torch.get_num_threads()} threads (OMP_NUM_THREADS)"
        if world.size > 1:
            monitor.agree("the job's settings", f"{settings}, backend {name}, {threads}")
        if not adopted:
            left = network.gloo_leaves(config.ports)
            if left and name != "mpi" and world.rank == 0 and not network.is_loopback(meeting.address):
                log.warning("%s", left)
            chosen.start(meeting)
            chosen.compare(meeting.world)
    except Exception as error:
        monitor.report(error)
        raise
    monitor.install_exit_hooks()  # again: they must run before those that the library installed
    return Started(name, meeting, (lambda: None) if adopted else chosen.stop)


def choose(backend: str, world: World) -> tuple[str, bool]:
    """The backend's name, and whether the user has started it: what runs, else the launcher's favourite, else torch."""
    if backend != "auto":
        return backend, starter(backend).running() is not None
    for name in BACKENDS[1:]:  # those of ours, without "auto"
        found = starter(name).running()
        # One that found other numbers than the launcher's is not meant: some package imported it on the way.
        if found is not None and (world.launcher == "none" or found == (world.rank, world.size)):
            return name, True
    favourite = "mpi" if offers_mpi(world) else "horovod" if world.launcher == "horovodrun" else "torch"
    return favourite if registry.installed(favourite) else "torch", False


def open_channel(world: World, init_method: str | None, key: str, config: Config) -> Channel:
    """The launcher's own channel.

    Raises:
        RendezvousError, ConfigurationError: the launcher's variables are incomplete, or no process answers there.
    """
    if world.size == 1:
        return ObjectChannel()
    if init_method is not None:
        return channels.from_url(init_method, world, key, config)
    launcher, installed = launchers.named(world.launcher), registry.installed("mpi")
    if launcher.by_mpi and installed and (found := starter("mpi")().native_channel(world, config)) is not None:
        return found
    try:
        return launcher.channel(world, key, config)
    except RendezvousError as error:
        if not launcher.by_mpi:
            raise
        why = misfit(world) if installed else "mpi4py is not installed. " + registry.entry("mpi").remedy
        raise BackendUnavailable(
            f"Under {world.launcher} the ranks meet by MPI, but {why}, or set MASTER_ADDR and MASTER_PORT to the host "
            "of rank 0 and a free port there."
        ) from error


def meet(config: Config, world: World, channel: Channel, key: str) -> Meeting:
    """Exchange places over ``channel``, start the job's helper on rank 0, and connect to it.

    Raises:
        RendezvousError: ranks do not come, or the helper cannot be started or reached.
    """
    identity = network.host_identity()
    place: dict[str, Any] = {
        "world": asdict(world), "network": network.network_identity(), "devices": _devices(), "host": _host_name(world),
    }  # fmt: skip
    try:
        found = [network.chosen_interface(config.iface)] if config.iface else network.interfaces().values()
        place["addresses"] = [str(each) for each in found]
    except ConfigurationError as error:
        place["error"] = str(error)
    places = [json.loads(text) for text in channel.gather(json.dumps(place))]
    answer = json.loads(channel.broadcast(_answer(config, places, channel.address) if world.rank == 0 else ""))
    if "error" in answer:
        raise RendezvousError(answer["error"])
    worlds = tuple(World(**fields) for fields in answer["worlds"])
    helper = HelperAddress.parse(answer["helper"]) if answer["helper"] else None
    monitor = Monitor.connect(helper, world.rank, world.size, config, identity) if helper else Monitor.alone(config)
    monitor.install_exit_hooks()
    channel.close()
    mine = replace(worlds[world.rank], launcher=world.launcher)
    return Meeting(
        config, monitor, worlds, mine, answer["address"], answer["own_devices"], helper, channel.store, key
    )  # fmt: skip


def _answer(config: Config, places: Sequence[Any], asked: str | None) -> str:
    """What rank 0 makes of all places, as JSON; ``asked`` is the address at which the launcher reaches it."""
    try:
        partial = [World(**place["world"]) for place in places]
        worlds = [world.completed([place["host"] for place in places]) for world in partial]
        if [(w.rank, w.size) for w in worlds] != [(r, len(places)) for r in range(len(places))]:
            raise RendezvousError(f"the ranks do not fit together: {[(w.rank, w.size) for w in worlds]}")
        mine = places[0]
        wrong = [place["error"] for place in places if "error" in place]
        if wrong:
            raise RendezvousError(wrong[0])
        own = mine["addresses"]
        others = [place["addresses"] for place in places if place["network"] != mine["network"]]
        address = network.common_address(own, others, None if config.iface else asked) if others else network.LOOPBACK
        if address is None:
            raise RendezvousError(
                f"rank 0's host has no IPv4 address that other hosts reach: it has {', '.join(own) or 'none'}, another "
                f"has {', '.join(others[0]) or 'none'}. IPv6 alone, and addresses that several hosts have, do not "
                "serve; HVDBRIDGE_IFACE names an interface"
            )
        helper = str(start_helper(address, len(places), config)) if len(places) > 1 else ""
    except RendezvousError as error:
        return json.dumps({"error": str(error)})
    visible = [place["devices"] for place in places]
    used = [ids and ids[world.local_rank % len(ids)] for ids, world in zip(visible, worlds, strict=True)]
    return json.dumps({
        "worlds": [asdict(world) for world in worlds], "address": address, "helper": helper,
        "own_devices": all(used) and len(set(used)) == len(used),
    })  # fmt: skip


def _host_name(world: World) -> str:
    """What ranks of one host share, as the launcher sees hosts, where it numbers them; else as the network does."""
    if world.launcher == "horovodrun":
        return os.environ.get("HOROVOD_HOSTNAME") or network.host_identity()
    return network.host_identity() if world.node_rank < 0 else f"node {world.node_rank}"


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
