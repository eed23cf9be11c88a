"""What is installed, asked in child processes.

A child asks because an import may start MPI, take seconds, or crash (a Horovod built against another torch
ends in an undefined symbol), and because the caller may have to ask again after an installation.
Each question is a source text that leaves a dictionary named ``answer``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# Variables of a launcher: a child that inherits them would take itself for one of its ranks.
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
import horovod, horovod.torch as hvd
answer = dict(version=horovod.__version__, location=horovod.__path__[0], gloo=bool(hvd.gloo_built()),
              mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
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
from hvdbridge.kernels.native import library
config = Config.from_environment()
answer = dict(setting=config.kernels, failure="")
if config.kernels != "torch":
    try:
        library(config.cache)
    except (OSError, subprocess.SubprocessError) as error:
        answer["failure"] = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
"""


@dataclass(frozen=True)
class Missing:
    """Something that cannot be imported, and the last line of why."""

    why: str


def ask(source: str) -> SimpleNamespace | Missing:
    """Run ``source`` in a child of this interpreter and return the ``answer`` that it leaves.

    >>> ask("answer = dict(sum=1 + 1)")
    namespace(sum=2)
    >>> ask("import no_such_module")
    Missing(why="ModuleNotFoundError: No module named 'no_such_module'")
    """
    command = [sys.executable, "-c", f"import json\n{source}\nprint(json.dumps(answer))"]
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
    # The last line only: a library may print when it is imported.
    return SimpleNamespace(**json.loads(child.stdout.strip().splitlines()[-1]))


def horovod_text(horovod: Any) -> str:
    """Version and operations of an answer to :data:`HOROVOD`."""
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(horovod, name)]
    return f"{horovod.version} ({', '.join(built)})"


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables by which a launcher tells its ranks who they are."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
