"""``hvdbridge doctor``: report what is installed, what each launcher and backend would do here, and the remedies.

:func:`examine` inspects the machine, :func:`cells` derives the table from those facts alone, :func:`report` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdbridge.backends.mpi.starter import names_no_library
from hvdbridge.config import HOST, PREFIX, VARIABLES, Config
from hvdbridge.errors import ConfigurationError
from hvdbridge.startup import network
from hvdbridge.startup.world import usable_cores
from hvdbridge.tools import probe
from hvdbridge.tools.probe import Missing, mpi_family
from hvdbridge.tools.start_checks import Finding, findings

INSTALL_HOROVOD = "hvdbridge install-horovod"
INSTALL_MPICH = "pip install 'hvdbridge[mpich]'"
INSTALL = {"torchrun": "pip install torch", "horovodrun": INSTALL_HOROVOD, "mpiexec": INSTALL_MPICH, "srun": ""}
"""Launcher -> the command that installs it."""

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
    ("srun", "torch"): "address from the job's nodes and numbers",
    ("srun", "horovod"): "Horovod's rendezvous server on rank 0",
    ("srun", "mpi"): "PMI-1 server in the job's helper",
}
"""(launcher, backend) -> how the ranks find each other."""
SRUN_FOR = {"MPICH": "pmi2", "Open MPI": "pmix"}
"""MPI library -> the ``--mpi=`` by which srun starts it."""

@dataclass(frozen=True)
class Launcher:
    """A launcher's command: its path, and whether ``PATH`` has its directory.

    ``family`` is that of an mpiexec's MPI, ``plugins`` are the values of srun's ``--mpi=``; "" if unknown.
    """

    path: str
    on_path: bool = True
    family: str = ""
    plugins: str = ""


@dataclass(frozen=True)
class Facts:
    """The facts of :func:`examine`. ``torch`` to ``kernels`` are answers to :mod:`~hvdbridge.tools.probe`'s queries."""

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
    """The outcome for one backend under one launcher. ``remedy`` is empty if the combination works."""

    launcher: str
    backend: str
    works: bool
    how: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdbridge doctor``."""
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout, and nothing else")
    parser.add_argument("--gpu", action="store_true", help="compare the compression kernels of each GPU with the CPU")
    parser.add_argument("--variables", action="store_true", help="list the environment variables and their meanings")


def run(arguments: argparse.Namespace) -> int:
    """Print the report and return 0 if the torch backend works; with ``--gpu``, compare the GPUs' kernels instead.

    With ``--variables``, print :data:`hvdbridge.config.VARIABLES` and return 0.
    """
    if arguments.variables:
        return _list_variables(arguments.json)
    if arguments.gpu:
        return _compare_gpus(arguments.json)
    facts = examine()
    table = cells(facts)
    if arguments.json:
        print(json.dumps({"facts": facts, "cells": table}, indent=2, default=vars))
    else:
        report(facts, table, Console(highlight=False, markup=False))
    return int(_why_not_torch(facts) is not None)


def _list_variables(as_json: bool) -> int:
    """Print each environment variable, its values, default and meaning."""
    rows = {
        f"{PREFIX}{name}": {"default": v.default, "values": v.values, "meaning": v.meaning}
        for name, v in VARIABLES.items()
    }
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for name, row in rows.items():
        text = "\n".join([f"{row['values']} (default: {row['default']})", row["meaning"]]).replace("`", "")
        print(name, *(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    ")
                      for line in text.splitlines()), sep="\n")  # fmt: skip
    return 0


AGREE = "all kernels give the bits of the CPU"


def _compare_gpus(as_json: bool) -> int:
    """Compare each GPU's kernels with the CPU. Return status 0 if there is a GPU and all their bits agree."""
    from torch import cuda, device

    from hvdbridge.tools.gpu_kernels import differences

    found: dict[str, str] = {}
    for gpu in (device("cuda", i) for i in range(cuda.device_count())):
        try:
            difference = differences(gpu)
        except Exception as error:  # Triton and the compilers that it calls raise many types
            difference = f"{type(error).__name__}: {error}"
        found[f"{gpu} ({cuda.get_device_name(gpu)})"] = difference or AGREE
    texts = [f"{name}: {text}" for name, text in found.items()] or ["torch sees no GPU here"]
    print(json.dumps({"gpus": found}, indent=2) if as_json else "\n".join(texts))
    return int(set(found.values()) != {AGREE})


# -- the machine -----------------------------------------------------------------------------------


def examine() -> Facts:
    """Inspect this machine and this interpreter's environment, without starting MPI or Horovod."""
    return Facts(
        f"{platform.python_version()} ({sys.executable})",
        platform.platform(),
        len(usable_cores()),
        probe.ask(probe.TORCH),
        probe.ask(probe.HOROVOD),
        probe.ask(probe.MPI),
        probe.ask(probe.KERNELS),
        launchers={name: found for name in INSTALL if (found := _launcher(name))},
        interfaces={name: str(address.ip) for name, address in network.interfaces().items()},
        variables=_variables(os.environ),
        starts=findings(os.environ),
    )


def _launcher(name: str) -> Launcher | None:
    """Find a launcher on ``PATH``, else beside the interpreter, whose environment may not be activated."""
    on_path = shutil.which(name)
    path = on_path or shutil.which(name, path=os.path.dirname(sys.executable))
    family = mpi_family(probe.output(path, "--version")) if path and name == "mpiexec" else ""
    listed = probe.output(path, "--mpi=list") if path and name == "srun" else ""
    plugins = " ".join(listed.partition("types are...")[2].split())
    return Launcher(path, on_path is not None, family, plugins) if path else None


def starts_library(mpiexec: str, library: str) -> bool:
    """Return whether an mpiexec of one MPI family starts the ranks of another family's library. Unknown ones may.

    The mpiexec of Open MPI 4 starts the library of Open MPI 5, and not the reverse.

    >>> starts_library("Open MPI 4", "Open MPI 5"), starts_library("Open MPI 5", "Open MPI 4")
    (True, False)
    """
    if not (mpiexec and library):
        return True
    if mpiexec.startswith("Open MPI") != library.startswith("Open MPI"):
        return False
    unknown, *old = "Open MPI", "Open MPI 3", "Open MPI 4"
    return library not in old or mpiexec in (unknown, *old)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Map each ``HVDBRIDGE_*`` variable that is set to its parsed value or its error."""
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


# -- the table -------------------------------------------------------------------------------------


def cells(facts: Facts) -> list[Cell]:
    """Return the outcome for each combination of launcher and backend in :data:`HOW`; of srun only on a cluster."""
    cluster = "srun" in facts.launchers and facts.launchers["srun"].plugins
    return [_cell(facts, launcher, backend) for launcher, backend in HOW if launcher != "srun" or cluster]


def _cell(facts: Facts, launcher: str, backend: str) -> Cell:
    for why, remedy in _obstacles(facts, launcher, backend):
        return Cell(launcher, backend, False, why, remedy)
    starter = _starter(facts, launcher)
    native = backend == "horovod" and starter == "mpiexec" and getattr(facts.horovod, "mpi", False)
    if (launcher, backend) == ("srun", "mpi") and (way := _srun_way(facts)):
        return Cell(launcher, backend, True, f"srun --mpi={way}")
    return Cell(launcher, backend, True, "natively" if native else HOW[starter, backend])


def _srun_way(facts: Facts) -> str:
    """Return the ``--mpi=`` by which this Slurm starts mpi4py's library; "" if it has none."""
    way = SRUN_FOR.get(mpi_family(getattr(facts.mpi, "implementation", "")).rstrip(" 0123456789"), "")
    return way if way and way in facts.launchers["srun"].plugins.split() else ""


def _why_not_torch(facts: Facts) -> tuple[str, str] | None:
    """Return why no backend works here, and the remedy; None if torch works, which every backend needs."""
    if isinstance(facts.torch, Missing):
        return f"torch cannot be imported: {facts.torch.why}", INSTALL["torchrun"]
    if not (facts.torch.distributed and facts.torch.gloo):
        return "this torch was built without torch.distributed or without Gloo", INSTALL["torchrun"]
    return None


def _obstacles(facts: Facts, launcher: str, backend: str) -> Iterator[tuple[str, str]]:
    """Yield each reason why a backend does not run under a launcher, and its remedy, most fundamental first."""
    if obstacle := _why_not_torch(facts):
        yield obstacle
    if isinstance(facts.horovod, Missing) and "horovod" in (launcher.removesuffix("run"), backend):
        yield f"Horovod cannot be imported: {facts.horovod.why}", INSTALL_HOROVOD
    if launcher not in facts.launchers:
        yield f"{launcher} was not found", INSTALL[launcher]
    # Under mpiexec the ranks of every backend find each other by an MPI broadcast.
    if isinstance(facts.mpi, Missing) and (launcher == "mpiexec" or backend == "mpi"):
        # An mpiexec shows that the site has an MPI; then only mpi4py is missing.
        remedy = "pip install 'hvdbridge[mpi]'" if "mpiexec" in facts.launchers else INSTALL_MPICH
        if names_no_library(facts.mpi.why):
            remedy = "unset or correct MPI4PY_LIBMPI"
        yield f"mpi4py or its MPI library cannot be loaded: {facts.mpi.why}", remedy
    library, starter = mpi_family(getattr(facts.mpi, "implementation", "")), _starter(facts, launcher)
    family = facts.launchers[starter].family if starter in facts.launchers else ""
    if not starts_library(family, library):
        yield (
            f"mpiexec is {family}'s, which cannot start the ranks of mpi4py's {library}",
            f"put {library}'s mpiexec first on PATH, or let mpi4py load {family} (MPI4PY_LIBMPI)",
        )
    built = mpi_family(getattr(facts.horovod, "implementation", ""))
    if backend == "horovod" and starter == "mpiexec" and built and library and built != library:
        yield (
            f"Horovod was built with {built} and mpi4py loads {library}: one process cannot start both",
            f"let mpi4py load {built} (MPI4PY_LIBMPI); or {INSTALL_HOROVOD} --rebuild",
        )
    if backend == "mpi" and starter == "srun" and library.startswith("Open MPI"):
        if not _srun_way(facts):
            why = f"{library} needs srun --mpi=pmix, which this Slurm does not have"
            yield why, f"mpirun of {library} within the allocation; or MPICH: {INSTALL_MPICH}"
    elif backend == "mpi" and starter != "mpiexec" and library != "MPICH":
        library = library or "this MPI library"
        yield (
            f"{library} does not speak PMI-1, by which {launcher}'s ranks would join MPI",
            f"mpiexec -n 2 python train.py; or, in another environment: {INSTALL_MPICH}",
        )
    if backend == "horovod" and starter in ("torchrun", "srun") and not facts.horovod.gloo:
        yield (
            f"this Horovod was built without Gloo, by which {starter}'s ranks would join it",
            f"mpiexec -n 2 python train.py; or {INSTALL_HOROVOD} --rebuild",
        )


def _starter(facts: Facts, launcher: str) -> str:
    """Return the launcher that starts the processes: horovodrun calls mpirun if its Horovod was built with MPI."""
    return "mpiexec" if launcher == "horovodrun" and getattr(facts.horovod, "mpi", False) else launcher


# -- printing --------------------------------------------------------------------------------------


def report(facts: Facts, table: Sequence[Cell], console: Console) -> None:
    """Print the tables, then the remedies."""
    console.print(_grid("Found here", [(row, None) for row in _rows(facts)]))
    outcomes = [((cell.launcher, cell.backend, "works" if cell.works else "cannot", cell.how), cell) for cell in table]
    headings = ("launcher", "backend", "", "how, or why not")
    console.print(_grid("What each launcher and backend would do here", outcomes, headings))
    console.print(_grid("A start from this shell", [((one.what, one.text), one) for one in facts.starts]))
    subjects: list[Cell | Finding] = [*table, *facts.starts]
    remedies = dict.fromkeys(subject.remedy for subject in subjects if subject.remedy and not _optional(subject))
    optional = dict.fromkeys(subject.remedy for subject in subjects if subject.remedy and _optional(subject))
    if remedy := getattr(facts.kernels, "remedy", ""):
        remedies[f"{remedy}: compression takes a fraction of the time"] = None
    hidden = [name for name, launcher in facts.launchers.items() if not launcher.on_path]
    if hidden:
        environment = os.path.dirname(facts.launchers[hidden[0]].path)
        remedies[f'export PATH="{environment}:$PATH"    # {", ".join(hidden)}'] = None
    if remedies:
        console.print("Remedies:", *(f"  {remedy}" for remedy in remedies), sep="\n", soft_wrap=True)
    others = [remedy for remedy in optional if remedy not in remedies]
    if others:
        heading = "Only if you want the launcher or backend concerned (torchrun with torch needs none of them):"
        console.print(heading, *(f"  {remedy}" for remedy in others), sep="\n", soft_wrap=True)


def _optional(subject: Cell | Finding) -> bool:
    """Return whether a remedy serves only a launcher or backend beside torchrun and torch, which suffice for a job."""
    if isinstance(subject, Finding):
        return subject.optional
    return (subject.launcher, subject.backend) != ("torchrun", "torch")


def _grid(
    title: str, rows: Sequence[tuple[Sequence[str], Cell | Finding | None]], headings: Sequence[str] = ()
) -> Table:
    """Build a table. The rows of subjects with a remedy are yellow."""
    grid = Table(*headings, title=title, title_justify="left", show_header=bool(headings))
    if not headings:
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
    for row, subject in rows:
        grid.add_row(*row, style="yellow" if subject and subject.remedy else None)
    return grid


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each fact."""
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


def _described(answer: Any, text: Callable[[Any], str]) -> str:
    return f"no ({answer.why})" if isinstance(answer, Missing) else text(answer)


def _torch_text(torch: Any) -> str:
    parts = [torch.version, f"CUDA {torch.cuda}" if torch.cuda else "CPU", "Gloo" if torch.gloo else "no Gloo"]
    return ", ".join([*parts, *([f"NCCL {torch.nccl}"] if torch.nccl else [])])


def _kernels_text(kernels: Any) -> str:
    if kernels.failure:
        without = "an error" if kernels.setting == "native" else "torch's operations, several times slower"
        return f"{without}: no compiled kernels ({kernels.failure})"
    if kernels.setting == "torch":
        return "torch's operations (HVDBRIDGE_KERNELS=torch)"
    return f"C, for this processor\n{kernels.file}"


def _launcher_text(launcher: Launcher) -> str:
    family = f" ({launcher.family})" if launcher.family else ""
    return launcher.path + family + ("" if launcher.on_path else ", not on PATH")
