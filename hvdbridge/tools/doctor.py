"""``hvdbridge doctor``: what is installed, what each launcher and backend would do here, what would help.

:func:`examine` looks at the machine, :func:`cells` only reasons about what it saw; printing comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdbridge.config import HOST, PREFIX, Config
from hvdbridge.errors import ConfigurationError
from hvdbridge.startup import network
from hvdbridge.startup.world import usable_cores
from hvdbridge.tools import probe, starts

LAUNCHERS = ("torchrun", "horovodrun", "mpiexec", "srun")
BACKENDS = ("torch", "horovod", "mpi")

INSTALL_TORCH = "pip install torch"
INSTALL_HOROVOD = "hvdbridge install-horovod"
INSTALL_MPICH = "pip install 'hvdbridge[mpich]'"
INSTALL_COMPILER = "install a C compiler, or name one in CC: compression takes a fraction of the time"
INSTALL_MPI4PY = "pip install 'hvdbridge[mpi]'"


@dataclass(frozen=True)
class Launcher:
    """A launcher's command: where it is, whether a shell finds it there, and whose it is."""

    path: str
    on_path: bool = True
    family: str = ""


@dataclass(frozen=True)
class Facts:
    """What :func:`examine` saw."""

    python: str
    system: str
    cores: int
    torch: probe.Torch | probe.Missing
    horovod: probe.Horovod | probe.Missing
    mpi: probe.Mpi | probe.Missing
    kernels: probe.Kernels | probe.Missing
    launchers: Mapping[str, Launcher] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    starts: Sequence[starts.Finding] = ()


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
        print(json.dumps({"facts": asdict(facts), "cells": [asdict(cell) for cell in table]}, indent=2))
    else:
        report(facts, table, Console(highlight=False, markup=False))
    return 0 if _why_not_torch(facts) is None else 1


def _compare_gpus() -> int:
    """Print what the kernels of each GPU get wrong; status 0 if there is a GPU, and nothing is wrong."""
    from torch import cuda, device

    from hvdbridge.tools.gpu_kernels import differences

    devices = [device("cuda", i) for i in range(cuda.device_count())]
    wrong = 0 if devices else 1
    for each in devices:
        try:
            import hvdbridge.kernels.cuda as kernels

            found = differences(kernels, each)
        except Exception as error:  # of any compiler
            found = f"{type(error).__name__}: {error}"
        wrong += bool(found)
        print(f"{each} ({cuda.get_device_name(each)}): {found or 'all kernels give the bits of the CPU'}")
    if not devices:
        print("torch sees no GPU here")
    return int(wrong > 0)


# -- looking ---------------------------------------------------------------------------------------


def examine() -> Facts:
    """Look at this machine and this interpreter's environment. Starts neither MPI nor Horovod."""
    return Facts(
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cores=len(usable_cores()),
        torch=probe.torch(),
        horovod=probe.horovod(),
        mpi=probe.mpi(),
        kernels=probe.kernels(),
        launchers={name: found for name in LAUNCHERS if (found := _launcher(name))},
        interfaces={name: str(address.ip) for name, address in network.interfaces().items()},
        variables=_variables(os.environ),
        starts=starts.findings(os.environ),
    )


def _launcher(name: str) -> Launcher | None:
    """Look on PATH, then beside the interpreter: the environment may not be activated."""
    on_path = shutil.which(name)
    path = on_path or shutil.which(name, path=os.path.dirname(sys.executable))
    if path is None:
        return None
    return Launcher(path, on_path is not None, _version_family(path) if name == "mpiexec" else "")


def _version_family(path: str) -> str:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return mpi_family(answer.stdout + answer.stderr)


def mpi_family(text: str) -> str:
    """Whose MPI wrote this version text. What shares MPICH's ABI and its PMI-1 counts as MPICH.

    >>> mpi_family("Open MPI v5.0.11"), mpi_family("HYDRA build details:"), mpi_family("LAM 7.1")
    ('Open MPI', 'MPICH', '')
    """
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return "Open MPI"
    if any(name in text for name in ("MPICH", "HYDRA", "MVAPICH", "Intel(R) MPI")):
        return "MPICH"
    return ""


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


# -- reasoning -------------------------------------------------------------------------------------


def cells(facts: Facts) -> list[Cell]:
    """What each of the nine combinations of launcher and backend would do."""
    return [
        _cell(facts, launcher, backend) for launcher in ("torchrun", "horovodrun", "mpiexec") for backend in BACKENDS
    ]


def _cell(facts: Facts, launcher: str, backend: str) -> Cell:
    obstacles = (
        _why_not_torch(facts),  # the model and its gradients are torch's under every backend
        WHY_NOT_LAUNCHER[launcher](facts),
        WHY_NOT_BACKEND[backend](facts),
        _why_not_together(facts, launcher, backend),
    )
    for obstacle in obstacles:
        if obstacle is not None:
            return Cell(launcher, backend, False, *obstacle)
    return Cell(launcher, backend, True, _how(facts, launcher, backend))


Obstacle = tuple[str, str] | None  # why, remedy


def _why_not_torch(facts: Facts) -> Obstacle:
    if isinstance(facts.torch, probe.Missing):
        return f"torch cannot be imported: {facts.torch.why}", INSTALL_TORCH
    if not (facts.torch.distributed and facts.torch.gloo):
        return "this torch was built without torch.distributed or without Gloo", INSTALL_TORCH
    return None


def _why_not_horovod(facts: Facts) -> Obstacle:
    if isinstance(facts.horovod, probe.Missing):
        return f"Horovod cannot be imported: {facts.horovod.why}", INSTALL_HOROVOD
    return None


def _why_not_mpi(facts: Facts) -> Obstacle:
    if isinstance(facts.mpi, probe.Missing):
        # With a launcher there is an MPI of the site's own, and mpi4py alone is missing.
        remedy = INSTALL_MPI4PY if "mpiexec" in facts.launchers else INSTALL_MPICH
        return f"mpi4py or its MPI library cannot be loaded: {facts.mpi.why}", remedy
    return None


def _why_not_torchrun(facts: Facts) -> Obstacle:
    return None if "torchrun" in facts.launchers else ("torchrun was not found", INSTALL_TORCH)


def _why_not_horovodrun(facts: Facts) -> Obstacle:
    if missing := _why_not_horovod(facts):
        return missing  # without its library the launcher does not start, either
    return None if "horovodrun" in facts.launchers else ("horovodrun was not found", INSTALL_HOROVOD)


def _why_not_mpiexec(facts: Facts) -> Obstacle:
    if "mpiexec" not in facts.launchers:
        return "mpiexec was not found", INSTALL_MPICH
    if missing := _why_not_mpi(facts):
        return missing  # whatever the backend, the ranks find each other by an MPI broadcast
    family, library = facts.launchers["mpiexec"].family, _library_family(facts)
    if family and library and family != library:
        return (
            f"mpiexec is {family}'s and mpi4py loads {library}: each rank would be a job of size 1",
            f"put {library}'s mpiexec first on PATH, or let mpi4py load {family} (MPI4PY_LIBMPI)",
        )
    return None


def _why_not_together(facts: Facts, launcher: str, backend: str) -> Obstacle:
    carrier = _carrier(facts, launcher)
    if backend == "mpi" and carrier != "mpiexec" and _library_family(facts) != "MPICH":
        library = _library_family(facts) or "this MPI library"
        return (
            f"{library} does not speak PMI-1, by which {launcher}'s ranks would join MPI",
            f"mpiexec -n 2 python train.py; or, in an environment without {library}: {INSTALL_MPICH}",
        )
    if backend == "horovod" and carrier == "torchrun" and not getattr(facts.horovod, "gloo", False):
        return (
            "this Horovod was built without Gloo, by which torchrun's ranks would join it",
            f"mpiexec -n 2 python train.py; or {INSTALL_HOROVOD} --rebuild",
        )
    return None


def _carrier(facts: Facts, launcher: str) -> str:
    """Who starts the processes in truth: horovodrun of a Horovod built with MPI calls mpirun."""
    return "mpiexec" if launcher == "horovodrun" and getattr(facts.horovod, "mpi", False) else launcher


WHY_NOT_LAUNCHER = {
    "torchrun": _why_not_torchrun,
    "horovodrun": _why_not_horovodrun,
    "mpiexec": _why_not_mpiexec,
}
WHY_NOT_BACKEND = {"torch": _why_not_torch, "horovod": _why_not_horovod, "mpi": _why_not_mpi}


def _how(facts: Facts, launcher: str, backend: str) -> str:
    """How the ranks find each other, once nothing stands in the way."""
    carrier = _carrier(facts, launcher)
    if backend == "horovod" and carrier == "mpiexec" and getattr(facts.horovod, "mpi", False):
        return "natively"
    return HOW[carrier, backend]


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


def _library_family(facts: Facts) -> str:
    return "" if isinstance(facts.mpi, probe.Missing) else mpi_family(facts.mpi.implementation)


# -- printing --------------------------------------------------------------------------------------


def report(facts: Facts, table: Sequence[Cell], console: Console) -> None:
    """Print both tables, then the remedies."""
    found = Table(title="Found here", title_justify="left", show_header=False)
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    for name, value in _rows(facts):
        found.add_row(name, value)
    console.print(found)

    grid = Table(title="What each launcher and backend would do here", title_justify="left")
    for heading in ("launcher", "backend", "", "how, or why not"):
        grid.add_column(heading)
    for cell in table:
        mark = "works" if cell.works else "cannot"
        grid.add_row(cell.launcher, cell.backend, mark, cell.how, style=None if cell.works else "yellow")
    console.print(grid)

    outlook = Table(title="A start from this shell", title_justify="left", show_header=False)
    outlook.add_column(no_wrap=True)
    outlook.add_column(overflow="fold")
    for finding in facts.starts:
        outlook.add_row(finding.what, finding.text, style="yellow" if finding.remedy else None)
    console.print(outlook)

    remedies = dict.fromkeys(cell.remedy for cell in table if cell.remedy)
    remedies |= dict.fromkeys(finding.remedy for finding in facts.starts if finding.remedy)
    if getattr(facts.kernels, "failure", ""):
        remedies[INSTALL_COMPILER] = None
    hidden = [name for name, launcher in facts.launchers.items() if not launcher.on_path]
    if hidden:
        environment = os.path.dirname(facts.launchers[hidden[0]].path)
        remedies[f'export PATH="{environment}:$PATH"    # {", ".join(hidden)}'] = None
    if remedies:
        console.print("Remedies:", *(f"  {remedy}" for remedy in remedies), sep="\n", soft_wrap=True)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    rows = [("python", facts.python), ("system", facts.system), ("CPU cores", str(facts.cores))]
    rows += [("torch", _describe_torch(facts.torch))]
    gpus: Sequence[str] = [] if isinstance(facts.torch, probe.Missing) else facts.torch.gpus
    rows += [("GPUs", "\n".join(gpus) or "none that torch can use")]
    rows += [("horovod", _describe(facts.horovod))]
    rows += [("mpi4py", _describe(facts.mpi)), ("CPU kernels", _describe(facts.kernels))]
    for name in LAUNCHERS:
        rows.append((name, _describe_launcher(facts.launchers.get(name))))
    rows.append(("interfaces", ", ".join(f"{name} {address}" for name, address in facts.interfaces.items())))
    return rows + [(name, value) for name, value in facts.variables.items()]


def _describe_torch(torch: probe.Torch | probe.Missing) -> str:
    if isinstance(torch, probe.Missing):
        return _describe(torch)
    parts: list[Any] = [f"CUDA {torch.cuda}" if torch.cuda else "CPU", "Gloo" if torch.gloo else "no Gloo"]
    return ", ".join([torch.version, *parts, *([f"NCCL {torch.nccl}"] if torch.nccl else [])])


def _describe(found: probe.Horovod | probe.Mpi | probe.Kernels | probe.Missing) -> str:
    return f"no ({found.why})" if isinstance(found, probe.Missing) else str(found)


def _describe_launcher(launcher: Launcher | None) -> str:
    if launcher is None:
        return "not found"
    family = f" ({launcher.family})" if launcher.family else ""
    return launcher.path + family + ("" if launcher.on_path else ", not on PATH")
