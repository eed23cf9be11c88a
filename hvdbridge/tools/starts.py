"""What a start from this shell would meet: the rank that the launcher's variables name, this host's addresses and
ports, and the cache of kernels. :func:`findings` looks, and starts nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError, HvdbridgeError
from hvdbridge.startup import channels, launchers, network
from hvdbridge.tools import probe

CONTAINERS = ("docker", "br-", "cni", "virbr", "podman", "flannel", "cbr")
"""How the bridges of containers and virtual machines are called, which have the same address on many hosts."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what was seen. ``remedy`` is empty where nothing stands in the way."""

    what: str
    text: str
    remedy: str = ""


def findings(environ: Mapping[str, str]) -> list[Finding]:
    """All that can be known before a start."""
    try:
        config = Config.from_environment(environ)
    except ConfigurationError as error:
        return [Finding("variables", str(error), "mend or unset the variable that the first line names")]
    return [*_world(environ), *_slurm(environ, config), *_addresses(config), *_ports(config), *_cache(config)]


def _world(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        world = launchers.detect(environ)
    except HvdbridgeError as error:
        yield Finding("this process", str(error), "start ranks by a launcher; for one process: RANK=0 WORLD_SIZE=1")
        return
    yield Finding("this process", f"rank {world.rank} of {world.size} (launcher: {world.launcher})")
    if "PMIX_NAMESPACE" in environ:
        library = probe.mpi()
        if isinstance(library, probe.Mpi) and library.implementation.startswith("MPICH") and not library.pmix:
            yield Finding(
                "MPI", f"this launcher speaks PMIx, and mpi4py's library, {library.implementation}, does not: MPI "
                "joins the helper instead, for which ranks need a place to meet",
                "set MASTER_ADDR and MASTER_PORT, start by MPICH's mpiexec or srun --mpi=pmi2, or let mpi4py take the "
                "launcher's MPI (MPI4PY_LIBMPI)",
            )  # fmt: skip
    address = environ.get("MASTER_ADDR", "")
    if ":" in address:
        yield Finding("MASTER_ADDR", f"{address}: ranks meet there by IPv6; across hosts they also need IPv4")


def _slurm(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    if shutil.which("scontrol") and shutil.which("srun"):
        try:
            shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            shown = ""
        if found := re.search(r"MpiDefault\s*=\s*(\S+)", shown):
            way = found[1]
            if way == "none":
                yield Finding(
                    "srun", "Slurm's MpiDefault is none: srun python train.py takes the torch backend",
                    "srun --mpi=pmi2 (MPICH, Intel MPI) or srun --mpi=pmix (Open MPI), for MPI under Slurm",
                )  # fmt: skip
            else:
                yield Finding("srun", f"Slurm's MpiDefault is {way}: srun python train.py takes the mpi backend")
    if "SLURM_STEP_ID" in environ:
        yield Finding("Slurm's port", f"torch and Horovod meet at {channels.slurm_port(environ, config)}")


def _addresses(config: Config) -> Iterator[Finding]:
    found = {name: str(address.ip) for name, address in network.interfaces().items()}
    others = {name: ip for name, ip in found.items() if not network.is_loopback(ip)}
    if config.iface:
        try:
            yield Finding("HVDBRIDGE_IFACE", f"hosts talk by {network.chosen_interface(config.iface).ip}")
        except ConfigurationError as error:
            yield Finding("HVDBRIDGE_IFACE", str(error), "HVDBRIDGE_IFACE=<a name that this host has>, or unset it")
    if not others:
        yield Finding("addresses", "no IPv4 address but loopback: jobs of this host alone")
    bridges = [f"{name} {ip}" for name, ip in others.items() if name.startswith(CONTAINERS)]
    if bridges and not config.iface:
        yield Finding(
            "addresses", f"{', '.join(bridges)}: of containers, on many hosts the same. Between hosts an address that "
            "another host has, too, is passed over",
        )  # fmt: skip
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if others and (address == "no address" or network.is_loopback(address)):
        yield Finding(
            "host name", f"{name} has {address}: Horovod between hosts listens at the name's address",
            f"a line '<this host's address> {name}' before others in /etc/hosts, for Horovod between hosts",
        )  # fmt: skip


def _ports(config: Config) -> Iterator[Finding]:
    if config.ports:
        text = network.gloo_leaves(config.ports)
        low, high = config.ports[0], config.ports[-1]
        remedy = f"sysctl net.ipv4.ip_local_port_range='{low} {high}', or HVDBRIDGE_BACKEND=mpi" if text else ""
        yield Finding("HVDBRIDGE_PORTS", text or f"all listen at {low}-{high}", remedy)


def _cache(config: Config) -> Iterator[Finding]:
    place = config.cache
    while not place.exists():
        place = place.parent
    if os.access(place, os.W_OK | os.X_OK):
        yield Finding("cache", str(config.cache))
    else:
        yield Finding(
            "cache", f"{config.cache} cannot be written: each process compiles the kernels anew",
            "HVDBRIDGE_CACHE=<a directory of your own>",
        )  # fmt: skip
