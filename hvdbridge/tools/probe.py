"""What is installed, asked in child processes.

A child asks because an import may start MPI, take seconds, or crash (a Horovod built against another torch
ends in an undefined symbol), and because the caller may have to ask again after an installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Variables of a launcher: a child that inherits them would take itself for one of its ranks.
LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PMI2_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")
TIMEOUT_SECONDS = 120

TORCH = """
import json, re, pathlib, torch, torch.distributed as dist
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
import json, horovod, horovod.torch as hvd
answer = dict(version=horovod.__version__, location=horovod.__path__[0], gloo=bool(hvd.gloo_built()),
              mpi=bool(hvd.mpi_built()), nccl=bool(hvd.nccl_built()))
"""

MPI = """
import json, pathlib, mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
maps = pathlib.Path("/proc/self/maps")
library = MPI.Get_library_version().strip(" \\0\\n").splitlines()[0]
answer = dict(mpi4py=mpi4py.__version__, implementation=" ".join(library.split()),
              pmix=maps.exists() and "libpmix" in maps.read_text())
"""

KERNELS = """
import json, subprocess
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
class Torch:
    """The installed torch and how it was built."""

    version: str
    git: str
    cuda: str | None
    cxx11_abi: bool
    cxx_standard: int
    distributed: bool
    gloo: bool
    nccl: str | None
    gpus: list[str]


@dataclass(frozen=True)
class Horovod:
    """A Horovod whose torch binding can be imported, and what it was built with."""

    version: str
    location: str
    gloo: bool
    mpi: bool
    nccl: bool

    def __str__(self) -> str:
        built = [name for name in ("gloo", "mpi", "nccl") if getattr(self, name)]
        return f"{self.version} ({', '.join(built)})"


@dataclass(frozen=True)
class Mpi:
    """mpi4py and the MPI library that it loads, which may have been built with PMIx."""

    mpi4py: str
    implementation: str
    pmix: bool = False

    def __str__(self) -> str:
        return f"{self.mpi4py} with {self.implementation}"


@dataclass(frozen=True)
class Kernels:
    """``HVDBRIDGE_KERNELS``, and why native.c does not compile (empty: it does, or is not asked to)."""

    setting: str
    failure: str

    def __str__(self) -> str:
        if self.failure:
            without = "an error" if self.setting == "native" else "torch's operations, several times slower"
            return f"{without}: no C compiler that works ({self.failure})"
        return "torch's operations (HVDBRIDGE_KERNELS=torch)" if self.setting == "torch" else "C, for this processor"


@dataclass(frozen=True)
class Missing:
    """Something that cannot be imported, and the last line of why."""

    why: str


def torch() -> Torch | Missing:
    """The installed torch."""
    answer = ask(TORCH)
    return answer if isinstance(answer, Missing) else Torch(**answer)


def horovod(environ: Mapping[str, str] | None = None) -> Horovod | Missing:
    """The installed Horovod, if its torch binding works."""
    answer = ask(HOROVOD, environ)
    return answer if isinstance(answer, Missing) else Horovod(**answer)


def mpi() -> Mpi | Missing:
    """mpi4py and its library, without MPI_Init."""
    answer = ask(MPI)
    return answer if isinstance(answer, Missing) else Mpi(**answer)


def kernels() -> Kernels | Missing:
    """What computes a policy's hot loops on a CPU; missing where torch or the configuration is."""
    answer = ask(KERNELS)
    return answer if isinstance(answer, Missing) else Kernels(**answer)


def ask(source: str, environ: Mapping[str, str] | None = None) -> dict[str, Any] | Missing:
    """Run ``source`` in a child of this interpreter and return the ``answer`` that it leaves.

    >>> ask("import json; answer = dict(sum=1 + 1)")
    {'sum': 2}
    >>> ask("import no_such_module")
    Missing(why="ModuleNotFoundError: No module named 'no_such_module'")
    """
    # The last line only: a library may print when it is imported.
    command = [sys.executable, "-c", f"{source}\nprint(json.dumps(answer))"]
    try:
        child = subprocess.run(
            command,
            env=clean_environment() if environ is None else environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Missing(f"no answer within {TIMEOUT_SECONDS} s")
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        return Missing(lines[-1].strip())
    answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return answer


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables by which a launcher tells its ranks who they are."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
