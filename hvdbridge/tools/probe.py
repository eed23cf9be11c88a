"""Queries about the installed packages, which run in child processes.

A child runs each query because an import may start MPI, take seconds, or crash: a Horovod built against another torch
ends with an undefined symbol. The caller may also have to repeat a query after an installation.
Each query is a source text that assigns a dictionary to the name ``answer``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# Prefixes of launchers' variables: a child that inherits such variables would start as one of the launcher's ranks.
LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PMI2_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")
TIMEOUT_SECONDS = 120

TORCH = """
import re, pathlib, torch, torch.distributed as dist
cpp_extension = (pathlib.Path(torch.__file__).parent / "utils" / "cpp_extension.py").read_text()
distributed = dist.is_available()
cuda = torch.cuda.is_available()
nccl = cuda and distributed and dist.is_nccl_available()
answer = dict(
    version=torch.__version__,
    git=str(torch.version.git_version),
    cuda=torch.version.cuda,
    cxx11_abi=torch.compiled_with_cxx11_abi(),
    cxx_standard=max(map(int, re.findall(r"-std=c\\+\\+(\\d\\d)", cpp_extension)), default=17),
    distributed=distributed,
    gloo=distributed and dist.is_gloo_available(),
    nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
)
"""

HOROVOD = """
import ctypes, pathlib, re, horovod, horovod.torch as hvd
answer = dict(version=horovod.__version__, location=horovod.__path__[0], gloo=bool(hvd.gloo_built()),
              mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()), implementation="")
maps = pathlib.Path("/proc/self/maps")
library = re.search(r"/\\S*/libmpi(ch|_abi)?\\.so\\S*", maps.read_text()) if answer["mpi"] and maps.exists() else None
if library:
    text = ctypes.create_string_buffer(8192)
    ctypes.CDLL(library[0]).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    answer["implementation"] = " ".join(text.value.decode().split("\\n")[0].split())
"""

MPI = """
import pathlib, mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
maps = pathlib.Path("/proc/self/maps")
library = MPI.Get_library_version().strip(" \\0\\n").splitlines()[0]
answer = dict(mpi4py=mpi4py.__version__, implementation=" ".join(library.split()),
              pmix=maps.exists() and "libpmix" in maps.read_text())
"""

KERNELS = """
import subprocess
from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels.native import library, reason, remedy_for
config = Config.from_environment()
answer = dict(setting=config.kernels, failure="", remedy="", file="")
if config.kernels != "torch":
    try:
        answer["file"] = library(config.cache)._name
    except (OSError, subprocess.SubprocessError, ConfigurationError) as error:
        answer |= dict(failure=reason(error).strip().splitlines()[-1], remedy=remedy_for(error))
"""


ANSWER = "hvdbridge's answer: "
"""Text before the answer in the output of a child."""


@dataclass(frozen=True)
class Missing:
    """A package that cannot be imported; ``why`` is the last line of the error."""

    why: str


def ask(source: str) -> SimpleNamespace | Missing:
    """Run the query ``source`` in a child of this interpreter and return its ``answer``.

    >>> ask("answer = dict(sum=1 + 1)")
    namespace(sum=2)
    >>> ask("import no_such_module")
    Missing(why="ModuleNotFoundError: No module named 'no_such_module'")
    """
    command = [sys.executable, "-c", f"import json\n{source}\nprint({ANSWER!r} + json.dumps(answer))"]
    try:
        child = subprocess.run(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Missing(f"no answer within {TIMEOUT_SECONDS} s")
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        return Missing(lines[-1].strip())
    # A library may print when it is imported, and when the child exits.
    _, marker, rest = child.stdout.partition(ANSWER)
    return SimpleNamespace(**json.loads(rest.splitlines()[0])) if marker else Missing("it ended without an answer")


def horovod_text(horovod: Any) -> str:
    """Return the version and the operations in an answer to :data:`HOROVOD`."""
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(horovod, name)]
    return f"{horovod.version} ({', '.join(built)})"


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables that launchers set for their ranks."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}


def output(*command: str) -> str:
    """Return a command's stdout and stderr; "" if the command cannot be started or takes more than 10 s."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def mpi_family(text: str) -> str:
    """Return the MPI family of a version text: Open MPI with its main release, or MPICH.

    Implementations with MPICH's ABI and PMI-1 count as MPICH.

    >>> mpi_family("Open MPI v5.0.11"), mpi_family("mpiexec (OpenRTE) 4.1.4"), mpi_family("LAM 7.1")
    ('Open MPI 5', 'Open MPI 4', '')
    >>> mpi_family("HYDRA build details:"), mpi_family("Intel(R) MPI Library 2021.17")
    ('MPICH', 'MPICH')
    """
    if re.search("Open MPI|OpenRTE|PRRTE", text):
        release = re.search(r"(?:Open MPI|OpenRTE)\)? v?(\d+)", text)
        return f"Open MPI {release[1]}" if release else "Open MPI"
    return "MPICH" if re.search(r"MPICH|HYDRA|MVAPICH|Intel\(R\) MPI", text) else ""
