"""What a start from this shell would use: checks of ``hvdbridge doctor`` that start no rank.

:func:`findings` runs all :data:`CHECKS`. Each yields what it looked at, what it found, and the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError, HvdbridgeError
from hvdbridge.startup import channels, launchers, network
from hvdbridge.tools import probe
from hvdbridge.tools.probe import Missing, mpi_family

CONTAINERS = ("docker", "br-", "cni", "virbr", "podman", "flannel", "cbr")
"""Name prefixes of container and virtual-machine bridges, which have the same address on many hosts."""


@dataclass(frozen=True)
class Finding:
    """The subject of a check and the text of its result.

    ``remedy`` is empty if nothing needs fixing. ``optional``: it serves only one backend, which the job may not need.
    """

    what: str
    text: str
    remedy: str = ""
    optional: bool = False


def findings(environ: Mapping[str, str]) -> list[Finding]:
    """Check, without starting ranks, what a start from this shell would use: variables, addresses, ports, cache."""
    try:
        config = Config.from_environment(environ)
    except ConfigurationError as error:
        return [Finding("variables", str(error), "mend or unset the variable that the first line names")]
    return [finding for check in CHECKS for finding in check(environ, config)]


def _world(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    try:
        world = launchers.detect(environ)
    except HvdbridgeError as error:
        yield Finding("this process", str(error), "start ranks by a launcher; for one process: RANK=0 WORLD_SIZE=1")
        return
    yield Finding("this process", f"rank {world.rank} of {world.size} (launcher: {world.launcher})")
    library = probe.ask(probe.MPI) if "PMIX_NAMESPACE" in environ else Missing("")
    if not isinstance(library, Missing) and library.implementation.startswith("MPICH") and not library.pmix:
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
    shown = probe.output("scontrol", "show", "config") if shutil.which("scontrol") and shutil.which("srun") else ""
    if default := re.search(r"MpiDefault\s*=\s*(\S+)", shown):
        kind, library = default[1], mpi_family(getattr(probe.ask(probe.MPI), "implementation", ""))
        backend, obstacle, remedy = "mpi" if library and kind != "none" else "torch", "", ""
        if library.startswith("Open MPI") and not kind.startswith("pmix"):
            obstacle = f". It cannot start mpi4py's {library}, which needs pmix"
            remedy = "srun --mpi=pmix, for MPI under Slurm"
            if "pmix" not in probe.output("srun", "--mpi=list"):
                remedy = f"mpirun of {library} within the allocation, for MPI: this Slurm has no pmix"
        elif library and kind == "none":
            remedy = "srun --mpi=pmi2, for MPI under Slurm"
        text = f"Slurm's MpiDefault is {kind}: srun python train.py takes the {backend} backend{obstacle}"
        yield Finding("srun", text, remedy, optional=True)
    if "SLURM_STEP_ID" in environ:
        yield Finding("Slurm's port", f"torch and Horovod meet at {channels.slurm_port(environ, config)}")


def _addresses(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    addresses = {name: str(address.ip) for name, address in network.interfaces().items()}
    others = {name: ip for name, ip in addresses.items() if not network.is_loopback(ip)}
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
            optional=True,
        )  # fmt: skip


def _ports(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    if config.ports:
        text = network.gloo_port_warning(config.ports)
        remedy = network.gloo_port_remedy(config.ports) if text else ""
        yield Finding("HVDBRIDGE_PORTS", text or f"all listen at {config.ports[0]}-{config.ports[-1]}", remedy)


def _cache(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    nearest = next(path for path in (config.cache, *config.cache.parents) if path.exists())
    text, remedy = str(config.cache), ""
    if not os.access(nearest, os.W_OK | os.X_OK):
        text += " cannot be written: install-horovod cannot keep its wheel there"
        remedy = "HVDBRIDGE_CACHE=<a directory of your own>"
    yield Finding("cache", text, remedy)


CHECKS = (_world, _slurm, _addresses, _ports, _cache)
