"""``hvdbridge doctor``: what is installed, what each launcher and backend would do here, what would help.

:func:`examine` looks at the machine, :func:`cells` only reasons about what it saw; printing comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdbridge.config import HOST, PREFIX, Config
from hvdbridge.errors import ConfigurationError, HvdbridgeError
from hvdbridge.startup import channels, launchers, network
from hvdbridge.startup.world import usable_cores
from hvdbridge.tools import probe
from hvdbridge.tools.probe import Missing, ask

INSTALL_HOROVOD = "hvdbridge install-horovod"
INSTALL_MPICH = "pip install 'hvdbridge[mpich]'"
INSTALL_COMPILER = "install a C compiler, or name one in CC: compression takes a fraction of the time"
INSTALL = {"torchrun": "pip install torch", "horovodrun": INSTALL_HOROVOD, "mpiexec": INSTALL_MPICH, "srun": ""}
"""Launcher -> what installs it."""

HOW = {
    ("torchrun", "torch"): "natively",
    ("torchrun", "horovod"): "Horovod's rendezvous server on rank 0",
    ("torchrun", "mpi"): "PMI-1 server in the job's helper",
    ("horovodrun", "torch"): "address through horovodrun's key-value store",
    ("horovodrun", "horovod"): "natively",
    ("horovodrun", "mpi"): "PMI-1 server in the job's helper",
    ("mpiexec", "torch"): "address by an MPI broadcast",
    ("mpiexec", "horovod"): "Horovod's rendezvous server on rank 0, its address by an MPI broadcast",
    ("mpiexec", "mpi"): "natively",
}
"""Launcher and backend -> how the ranks find each other."""

CONTAINERS = ("docker", "br-", "cni", "virbr", "podman", "flannel", "cbr")
"""How the names of containers' and virtual machines' bridges begin, which have the same address on many hosts."""


@dataclass(frozen=True)
class Launcher:
    """A launcher's command: where it is, whether a shell finds it there, and whose MPI it is of."""

    path: str
    on_path: bool = True
    family: str = ""


@dataclass(frozen=True)
class Finding:
    """What a check looked at, and what it saw. ``remedy`` is empty where nothing stands in the way."""

    what: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What :func:`examine` saw; the libraries are answers to the questions of :mod:`~hvdbridge.tools.probe`."""

    python: str
    system: str
    cores: int
    torch: Any
    horovod: Any
    mpi: Any
    kernels: Any
    launchers: Mapping[str, Launcher] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    starts: Sequence[Finding] = ()


@dataclass(frozen=True)
class Cell:
    """What one backend would do under one launcher. ``remedy`` is empty where it works."""

    launcher: str
    backend: str
    works: bool
    how: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdbridge doctor``."""
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout, and nothing else")
    parser.add_argument("--gpu", action="store_true", help="compare the compression kernels of each GPU with the CPU")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; status 0 if at least the torch backend works."""
    if arguments.gpu:
        return _compare_gpus()
    facts = examine()
    table = cells(facts)
    if arguments.json:
        print(json.dumps({"facts": facts, "cells": table}, indent=2, default=vars))
    else:
        report(facts, table, Console(highlight=False, markup=False))
    return int(_why_not_torch(facts) is not None)


def _compare_gpus() -> int:
    """Print what the kernels of each GPU get wrong; status 0 if there is a GPU, and nothing is wrong."""
    from torch import cuda, device

    from hvdbridge.tools.gpu_kernels import differences

    devices = [device("cuda", i) for i in range(cuda.device_count())]
    if not devices:
        print("torch sees no GPU here")
    wrong = not devices
    for each in devices:
        try:
            import hvdbridge.kernels.cuda as kernels

            found = differences(kernels, each)
        except Exception as error:  # of any compiler
            found = f"{type(error).__name__}: {error}"
        wrong = wrong or found != ""
        print(f"{each} ({cuda.get_device_name(each)}): {found or 'all kernels give the bits of the CPU'}")
    return int(wrong)


# -- looking ---------------------------------------------------------------------------------------


def examine() -> Facts:
    """Look at this machine and this interpreter's environment. Starts neither MPI nor Horovod."""
    return Facts(
        f"{platform.python_version()} ({sys.executable})",
        platform.platform(),
        len(usable_cores()),
        ask(probe.TORCH),
        ask(probe.HOROVOD),
        ask(probe.MPI),
        ask(probe.KERNELS),
        launchers={name: found for name in INSTALL if (found := _launcher(name))},
        interfaces={name: str(address.ip) for name, address in network.interfaces().items()},
        variables=_variables(os.environ),
        starts=findings(os.environ),
    )


def _launcher(name: str) -> Launcher | None:
    """Look on PATH, then beside the interpreter: the environment may not be activated."""
    on_path = shutil.which(name)
    path = on_path or shutil.which(name, path=os.path.dirname(sys.executable))
    family = mpi_family(_output(path, "--version")) if path and name == "mpiexec" else ""
    return Launcher(path, on_path is not None, family) if path else None


def _output(*command: str) -> str:
    """What a command prints; nothing where it cannot be started, or has not ended after 10 s."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def mpi_family(text: str) -> str:
    """Whose MPI wrote this version text. What shares MPICH's ABI and its PMI-1 counts as MPICH.

    >>> mpi_family("Open MPI v5.0.11"), mpi_family("HYDRA build details:"), mpi_family("LAM 7.1")
    ('Open MPI', 'MPICH', '')
    """
    if re.search("Open MPI|OpenRTE|PRRTE", text):
        return "Open MPI"
    return "MPICH" if re.search(r"MPICH|HYDRA|MVAPICH|Intel\(R\) MPI", text) else ""


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Each ``HVDBRIDGE_*`` that is set, with the value it parses to or what is wrong with it."""
    parsed = {}
    kubernetes = {k: v for k, v in environ.items() if k.startswith(PREFIX) and k.endswith(HOST)}
    for name in sorted(k for k in environ if k.startswith(PREFIX)):
        try:
            config = Config.from_environment(kubernetes | {name: environ[name]})
        except ConfigurationError as error:
            parsed[name] = f"error: {error}"
        else:
            value = str(getattr(config, name.removeprefix(PREFIX).lower(), environ[name]))
            parsed[name] = "ignored: set by Kubernetes for a service" if name in config.injected else value
    return parsed


# -- a start from this shell -----------------------------------------------------------------------


def findings(environ: Mapping[str, str]) -> list[Finding]:
    """All that can be known before a start: the rank that the launcher's variables name, addresses, ports, cache."""
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
    library = ask(probe.MPI) if "PMIX_NAMESPACE" in environ else Missing("")
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
    shown = _output("scontrol", "show", "config") if shutil.which("scontrol") and shutil.which("srun") else ""
    if found := re.search(r"MpiDefault\s*=\s*(\S+)", shown):
        backend, remedy = "mpi", ""
        if found[1] == "none":
            backend = "torch"
            remedy = "srun --mpi=pmi2 (MPICH, Intel MPI) or srun --mpi=pmix (Open MPI), for MPI under Slurm"
        taken = f"srun python train.py takes the {backend} backend"
        yield Finding("srun", f"Slurm's MpiDefault is {found[1]}: {taken}", remedy)
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
        )  # fmt: skip


def _ports(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    if config.ports:
        text = network.gloo_leaves(config.ports)
        low, high = config.ports[0], config.ports[-1]
        remedy = f"sysctl net.ipv4.ip_local_port_range='{low} {high}', or HVDBRIDGE_BACKEND=mpi" if text else ""
        yield Finding("HVDBRIDGE_PORTS", text or f"all listen at {low}-{high}", remedy)


def _cache(environ: Mapping[str, str], config: Config) -> Iterator[Finding]:
    nearest = next(path for path in (config.cache, *config.cache.parents) if path.exists())
    text, remedy = str(config.cache), ""
    if not os.access(nearest, os.W_OK | os.X_OK):
        text += " cannot be written: each process compiles the kernels anew"
        remedy = "HVDBRIDGE_CACHE=<a directory of your own>"
    yield Finding("cache", text, remedy)


CHECKS = (_world, _slurm, _addresses, _ports, _cache)


# -- reasoning -------------------------------------------------------------------------------------


def cells(facts: Facts) -> list[Cell]:
    """What each of the nine combinations of launcher and backend would do."""
    return [_cell(facts, launcher, backend) for launcher, backend in HOW]


def _cell(facts: Facts, launcher: str, backend: str) -> Cell:
    for why, remedy in _obstacles(facts, launcher, backend):
        return Cell(launcher, backend, False, why, remedy)
    carrier = _carrier(facts, launcher)
    native = backend == "horovod" and carrier == "mpiexec" and getattr(facts.horovod, "mpi", False)
    return Cell(launcher, backend, True, "natively" if native else HOW[carrier, backend])


def _why_not_torch(facts: Facts) -> tuple[str, str] | None:
    """Why no backend works here, and the remedy: the model and its gradients are torch's under every backend."""
    if isinstance(facts.torch, Missing):
        return f"torch cannot be imported: {facts.torch.why}", INSTALL["torchrun"]
    if not (facts.torch.distributed and facts.torch.gloo):
        return "this torch was built without torch.distributed or without Gloo", INSTALL["torchrun"]
    return None


def _obstacles(facts: Facts, launcher: str, backend: str) -> Iterator[tuple[str, str]]:
    """Why a backend does not run under a launcher, and the remedy; the first is the one to mend."""
    if obstacle := _why_not_torch(facts):
        yield obstacle
    if isinstance(facts.horovod, Missing) and "horovod" in (launcher.removesuffix("run"), backend):
        yield f"Horovod cannot be imported: {facts.horovod.why}", INSTALL_HOROVOD
    if launcher not in facts.launchers:
        yield f"{launcher} was not found", INSTALL[launcher]
    # Under mpiexec the ranks find each other by an MPI broadcast, whatever the backend
    if isinstance(facts.mpi, Missing) and (launcher == "mpiexec" or backend == "mpi"):
        # With a launcher there is an MPI of the site's own, and mpi4py alone is missing.
        remedy = "pip install 'hvdbridge[mpi]'" if "mpiexec" in facts.launchers else INSTALL_MPICH
        yield f"mpi4py or its MPI library cannot be loaded: {facts.mpi.why}", remedy
    library, carrier = mpi_family(getattr(facts.mpi, "implementation", "")), _carrier(facts, launcher)
    family = facts.launchers[launcher].family if launcher in facts.launchers else ""
    if launcher == "mpiexec" and family and library and family != library:
        yield (
            f"mpiexec is {family}'s and mpi4py loads {library}: each rank would be a job of size 1",
            f"put {library}'s mpiexec first on PATH, or let mpi4py load {family} (MPI4PY_LIBMPI)",
        )
    if backend == "mpi" and carrier != "mpiexec" and library != "MPICH":
        library = library or "this MPI library"
        yield (
            f"{library} does not speak PMI-1, by which {launcher}'s ranks would join MPI",
            f"mpiexec -n 2 python train.py; or, in an environment without {library}: {INSTALL_MPICH}",
        )
    if backend == "horovod" and carrier == "torchrun" and not facts.horovod.gloo:
        yield (
            "this Horovod was built without Gloo, by which torchrun's ranks would join it",
            f"mpiexec -n 2 python train.py; or {INSTALL_HOROVOD} --rebuild",
        )


def _carrier(facts: Facts, launcher: str) -> str:
    """The command that starts the processes: horovodrun of a Horovod built with MPI calls mpirun."""
    return "mpiexec" if launcher == "horovodrun" and getattr(facts.horovod, "mpi", False) else launcher


# -- printing --------------------------------------------------------------------------------------


def report(facts: Facts, table: Sequence[Cell], console: Console) -> None:
    """Print the tables, then the remedies."""
    console.print(_grid("Found here", [(row, None) for row in _rows(facts)]))
    marks = [((cell.launcher, cell.backend, "works" if cell.works else "cannot", cell.how), cell) for cell in table]
    headings = ("launcher", "backend", "", "how, or why not")
    console.print(_grid("What each launcher and backend would do here", marks, headings))
    console.print(_grid("A start from this shell", [((one.what, one.text), one) for one in facts.starts]))
    found: list[Cell | Finding] = [*table, *facts.starts]
    remedies = dict.fromkeys(one.remedy for one in found if one.remedy)
    if getattr(facts.kernels, "failure", ""):
        remedies[INSTALL_COMPILER] = None
    hidden = [name for name, launcher in facts.launchers.items() if not launcher.on_path]
    if hidden:
        environment = os.path.dirname(facts.launchers[hidden[0]].path)
        remedies[f'export PATH="{environment}:$PATH"    # {", ".join(hidden)}'] = None
    if remedies:
        console.print("Remedies:", *(f"  {remedy}" for remedy in remedies), sep="\n", soft_wrap=True)


def _grid(
    title: str, rows: Sequence[tuple[Sequence[str], Cell | Finding | None]], headings: Sequence[str] = ()
) -> Table:
    """A table; what has a remedy is yellow."""
    grid = Table(*headings, title=title, title_justify="left", show_header=bool(headings))
    if not headings:
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
    for row, of in rows:
        grid.add_row(*row, style="yellow" if of and of.remedy else None)
    return grid


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """What was found, a line each."""
    yield from (("python", facts.python), ("system", facts.system), ("CPU cores", str(facts.cores)))
    yield "torch", _described(facts.torch, _torch_text)
    yield "GPUs", "\n".join(getattr(facts.torch, "gpus", ())) or "none that torch can use"
    yield "horovod", _described(facts.horovod, probe.horovod_text)
    yield "mpi4py", _described(facts.mpi, lambda mpi: f"{mpi.mpi4py} with {mpi.implementation}")
    yield "CPU kernels", _described(facts.kernels, _kernels_text)
    for name in INSTALL:
        yield name, _launcher_text(facts.launchers[name]) if name in facts.launchers else "not found"
    yield "interfaces", ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())
    yield from facts.variables.items()


def _described(found: Any, text: Callable[[Any], str]) -> str:
    return f"no ({found.why})" if isinstance(found, Missing) else text(found)


def _torch_text(torch: Any) -> str:
    parts = [torch.version, f"CUDA {torch.cuda}" if torch.cuda else "CPU", "Gloo" if torch.gloo else "no Gloo"]
    return ", ".join([*parts, *([f"NCCL {torch.nccl}"] if torch.nccl else [])])


def _kernels_text(kernels: Any) -> str:
    if kernels.failure:
        without = "an error" if kernels.setting == "native" else "torch's operations, several times slower"
        return f"{without}: no C compiler that works ({kernels.failure})"
    return "torch's operations (HVDBRIDGE_KERNELS=torch)" if kernels.setting == "torch" else "C, for this processor"


def _launcher_text(launcher: Launcher) -> str:
    family = f" ({launcher.family})" if launcher.family else ""
    return launcher.path + family + ("" if launcher.on_path else ", not on PATH")
