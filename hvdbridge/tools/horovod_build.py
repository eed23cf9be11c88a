"""Builds the published Horovod against the torch that is installed; what that needs, and how it is done.

Horovod's last release, 0.28.1 of June 2023, asks the compiler for C++11 and C++14; the headers of today's torch need
C++17 or C++20. The source compiles as either, so a wrapper around the compiler changes the flag. Whatever only the
build needs (CMake, setuptools, ...) lives in a temporary directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hvdbridge.startup.world import usable_cores
from hvdbridge.tools import probe
from hvdbridge.tools.process import before_pythonpath, call, pip

RUN_NEEDS = ("cffi>=1.4", "cloudpickle", "packaging", "psutil", "pyyaml")
BUILD_NEEDS = ("setuptools<81", "wheel")  # a setup.py of 2023: the setuptools that still has pkg_resources
CMAKE_OLDEST, CMAKE_TOO_NEW = (3, 13), (4,)  # 4.0 refuses the third-party projects' cmake_minimum_required
CMAKE_NEED = "cmake>=3.13,<4"
DISK_BYTES = 1 << 29  # sources, objects and tools take about 0.3 GB while the build runs
BYTES_PER_JOB = 2 << 30  # what one compiler process may take on torch's headers
FRAMEWORKS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    # Built with MPI, a plain `horovodrun` prefers MPI and stumbles over current releases of both MPICH and
    # Open MPI. hvdbridge reaches MPI by mpi4py.
    "HOROVOD_WITHOUT_MPI": "1",
}

# What of the user's environment changes the wheel (_WITH covers _WITHOUT); other HOROVOD_* are for runs.
BUILD_PREFIXES = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL", "HOROVOD_ROCM")
COMPILER_VARIABLES = ("CC", "CXX", "CXXFLAGS")

# The flag is changed where it stands: of several -std on one command line the last wins, and that is CMake's.
COMPILER_WRAPPER = """\
#!/bin/sh
for argument do
    shift
    case $argument in
        -std=c++11|-std=gnu++11|-std=c++14|-std=gnu++14) argument=-std=c++{standard} ;;
    esac
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""
# GCC 13 and later no longer include these by accident, on which Gloo and Horovod rely. A flag, not part of the
# wrapper: nvcc gives the wrapper what is preprocessed already.
COMPILER_FLAGS = "-include cstdint -include string"

# Horovod's CMake starts any CUDA compiler that it finds, and fails if that one fails, though torch is without CUDA.
CMAKE_WRAPPER = """\
#!/bin/sh
[ "$1" = --build ] || set -- "$@" {options}
exec {cmake} "$@"
"""
NO_CUDA = "-DCMAKE_CUDA_COMPILER= -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"


@dataclass(frozen=True)
class Recipe:
    """All that decides what the wheel contains."""

    version: str
    torch: probe.Torch
    options: Mapping[str, str]
    with_nccl: bool = False

    @classmethod
    def of(cls, version: str, torch: probe.Torch, with_nccl: bool = False) -> Recipe:
        """Our options, overruled by the user's own ``HOROVOD_*`` build variables and compiler flags."""
        ours = {**FRAMEWORKS, **(_nccl_of_torch() if with_nccl else {})}
        chosen = (k for k in os.environ if k.startswith(BUILD_PREFIXES) or k in COMPILER_VARIABLES)
        given = {k: os.environ[k] for k in chosen}
        # HOROVOD_WITH_MPI=1 of the user's beats our HOROVOD_WITHOUT_MPI, which CMake would otherwise prefer
        ours = {k: v for k, v in ours.items() if k.replace("WITHOUT", "WITH") not in given}
        return cls(version, torch, {**ours, **given}, with_nccl)

    @property
    def key(self) -> str:
        """The wheel's name in the cache: readable parts first, then a digest of what has no short name."""
        torch = self.torch
        built = [torch.git, torch.cxx11_abi, torch.cxx_standard, torch.cuda, platform.libc_ver()]
        scripts = [COMPILER_WRAPPER, COMPILER_FLAGS, CMAKE_WRAPPER, NO_CUDA]
        details = json.dumps([built, scripts, sorted(self.options.items())])
        digest = hashlib.sha256(details.encode()).hexdigest()
        operations = "gloo-nccl" if self.with_nccl else "gloo"
        python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        return f"horovod{self.version}-torch{torch.version}-{python}-{operations}-{digest[:8]}"


# -- before anything starts ------------------------------------------------------------------------


def environment_lacks() -> list[str]:
    """What is missing to install anything here, each with its remedy; empty if nothing is."""
    lacks = []
    if importlib.util.find_spec("pip") is None:
        lacks.append(f"pip in this environment. Run: {sys.executable} -m ensurepip")
    if not os.access(sysconfig.get_path("purelib"), os.W_OK) or _externally_managed():
        lacks.append(
            f"an environment that may be written to ({sys.prefix} may not). "
            "Run: python3 -m venv .venv, then install hvdbridge there"
        )
    return lacks


def build_lacks(recipe: Recipe, cache: Path) -> list[str]:
    """What is missing to compile, each with its remedy. A CMake is not: the registry has one."""
    lacks = []
    if shutil.which("make") is None:
        lacks.append("make. Debian/Ubuntu: apt install make; conda: make; macOS: xcode-select --install")
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None:
        lacks.append("a C compiler (CC, or cc on PATH). Debian/Ubuntu: apt install gcc; conda: gcc_linux-64")
    lacks += _compiler_lacks(recipe.torch.cxx_standard)
    for directory in {Path(tempfile.gettempdir()), cache}:
        free = shutil.disk_usage(directory).free
        if free < DISK_BYTES:
            lacks.append(
                f"space in {directory}: {free / 2**20:.0f} MiB free, {DISK_BYTES >> 20} needed. "
                "Set TMPDIR (or HVDBRIDGE_CACHE) to a larger disk"
            )
    return lacks + _cuda_lacks(recipe) + (_nccl_lacks(recipe) if recipe.with_nccl else [])


def _externally_managed() -> bool:
    in_venv = sys.prefix != sys.base_prefix
    return not in_venv and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()


def _compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX``, which may be several words (``ccache g++``), or a usual name."""
    if given := os.environ.get("CXX"):
        words = shlex.split(given)
        return words if shutil.which(words[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def _compiler_lacks(standard: int) -> list[str]:
    """Compiles a line, since a version number tells less; looks for Python's headers, too."""
    compiler = _compiler()
    if compiler is None:
        named = f"CXX={os.environ['CXX']} was not found" if os.environ.get("CXX") else "none on PATH"
        return [f"a C++ compiler ({named}). Debian/Ubuntu: apt install g++; conda: gxx_linux-64; or set CXX"]

    def compiles(source: str) -> bool:
        command = [*compiler, f"-std=c++{standard}", "-x", "c++", "-fsyntax-only", "-"]
        return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0

    lacks = []
    newest_header = {20: "concepts", 17: "optional"}.get(standard, "vector")
    if not compiles(f"#include <{newest_header}>\n"):
        lacks.append(
            f"a C++{standard} compiler for the headers of this torch ({shlex.join(compiler)} is too old or "
            "broken). GCC 11 and Clang 14 suffice; name one by CXX"
        )
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        lacks.append(f"Python's headers ({include}/Python.h). Debian/Ubuntu: apt install python3-dev")
    return lacks


def _cuda_home(recipe: Recipe) -> str:
    given = recipe.options.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    return given or (str(Path(nvcc).resolve().parents[1]) if nvcc else "/usr/local/cuda")


def _cuda_lacks(recipe: Recipe) -> list[str]:
    """Horovod compiles against the toolkit whenever torch has CUDA, without NCCL, too."""
    if recipe.torch.cuda is None:
        return []
    home = Path(_cuda_home(recipe))
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]
    if headers and (home / "bin" / "nvcc").exists():
        return []
    return [
        f"the CUDA {recipe.torch.cuda} toolkit (nvcc and cuda_runtime.h; looked in {home}). Install it and set "
        "CUDA_HOME; or, where GPUs are not used, install torch's CPU build"
    ]


def _nccl_lacks(recipe: Recipe) -> list[str]:
    if recipe.torch.cuda is None:
        return [f"a torch with CUDA (this is {recipe.torch.version}), or leave out --with-nccl"]
    lacks = []
    home = _cuda_home(recipe)
    named = any(recipe.options.get(name) for name in ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE"))
    headers = (Path(root, "include", "nccl.h") for root in (home, "/usr", "/usr/local"))
    if not named and not any(header.exists() for header in headers):
        lacks.append("NCCL's headers (nccl.h). Install libnccl-dev, or set HOROVOD_NCCL_HOME")
    return lacks


def _nccl_of_torch() -> dict[str, str]:
    """GPU operations through the NCCL wheel that torch depends on: both then load one and the same library.

    A torch built from source has no such wheel; CMake then looks for the system's NCCL.
    """
    options = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    if home := os.environ.get("CUDA_HOME"):
        options["HOROVOD_CUDA_HOME"] = home
    root = Path(sysconfig.get_path("purelib"), "nvidia", "nccl")
    if (root / "include" / "nccl.h").exists():
        options["HOROVOD_NCCL_INCLUDE"] = str(root / "include")
        options["HOROVOD_NCCL_LIB"] = str(root / "lib")
        options["HOROVOD_NCCL_LINK"] = "SHARED"
    return options


# -- the build -------------------------------------------------------------------------------------


def build(recipe: Recipe, scratch: Path, log: Path, console: Console) -> Path:
    """Build the wheel in ``scratch`` and return its path.

    Raises:
        HvdbridgeError: with the tail of the log, and where all of it is.
    """
    tools, wheels = scratch / "tools", scratch / "wheels"
    log.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"horovod {recipe.version} for torch {recipe.torch.version}; log: {log}")
    cmake = usable_cmake()
    environment = {
        **os.environ,
        **recipe.options,
        "CXX": compiler_wrapper(scratch, _compiler() or ["c++"], recipe.torch.cxx_standard),
        "CXXFLAGS": f"{COMPILER_FLAGS} {os.environ.get('CXXFLAGS', '')}",
        "HOROVOD_CMAKE": cmake_wrapper(scratch, cmake or str(tools / "bin" / "cmake"), recipe.torch.cuda),
        "PYTHONPATH": before_pythonpath(tools),
        "MAKEFLAGS": f"-j{_jobs()}",
        "TMPDIR": str(scratch),
    }
    if recipe.with_nccl and "HOROVOD_NCCL_LIB" in recipe.options:
        environment["HOROVOD_NCCL_LIB"] = _linkable_nccl(Path(recipe.options["HOROVOD_NCCL_LIB"]), scratch)
    needs = [*BUILD_NEEDS, *RUN_NEEDS, *([] if cmake else [CMAKE_NEED])]
    with log.open("w") as out, _progress(console) as report:
        report("build tools", None)
        call([*pip("install"), "--no-compile", "--target", str(tools), *needs], log=out)
        report("compiling", 0)

        def watch(line: str) -> None:
            if percent := re.match(r"\s*\[ *(\d+)%\]", line):
                report("compiling", int(percent[1]))

        # --no-cache-dir: pip would take a wheel that it once built against another torch.
        # --use-pep517: the one way that all releases of pip have in common.
        command = [*pip("wheel"), "-v", "--no-cache-dir", "--no-deps", "--no-binary=horovod"]
        command += ["--no-build-isolation", "--use-pep517"]
        command += ["--wheel-dir", str(wheels), f"horovod=={recipe.version}"]
        call(command, environment, log=out, watch=watch)
        report("compiling", 100)
    return next(wheels.glob("horovod-*.whl"))


def usable_cmake() -> str | None:
    """A CMake that can build Horovod: ``$HOROVOD_CMAKE``, else PATH, else None (the registry has one)."""
    for name in (os.environ.get("HOROVOD_CMAKE"), "cmake"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        answer = subprocess.run([path, "--version"], capture_output=True, text=True)
        found = re.search(r"version (\d+)\.(\d+)", answer.stdout)
        if found and CMAKE_OLDEST <= (int(found[1]), int(found[2])) < CMAKE_TOO_NEW:
            return path
    return None


def compiler_wrapper(directory: Path, compiler: Sequence[str], standard: int) -> str:
    """Write a script that calls ``compiler`` with C++``standard`` where C++11 or C++14 is asked for."""
    script = COMPILER_WRAPPER.format(compiler=shlex.join(compiler), standard=standard)
    return _script(directory / "c++", script)


def cmake_wrapper(directory: Path, cmake: str, cuda: str | None) -> str:
    """Write a script that calls ``cmake``, and hides a CUDA toolkit from it if torch is without CUDA."""
    script = CMAKE_WRAPPER.format(cmake=shlex.quote(cmake), options="" if cuda else NO_CUDA)
    return _script(directory / "cmake", script)


def _script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _linkable_nccl(directory: Path, scratch: Path) -> str:
    """The NCCL wheel has libnccl.so.2 alone; a linker looks for libnccl.so."""
    library = directory / "libnccl.so.2"
    if not library.exists() or (directory / "libnccl.so").exists():
        return str(directory)
    links = scratch / "nccl"
    links.mkdir()
    (links / "libnccl.so").symlink_to(library)
    return str(links)


def _jobs() -> int:
    """Compilers at a time: as many as there are cores, fewer if memory is short."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(usable_cores()), memory // BYTES_PER_JOB))


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int | None], None]]:
    """``report(phase, percent)``: a bar on a terminal, else one line per phase and quarter."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=None)

            def draw(phase: str, percent: int | None) -> None:
                total = None if percent is None else 100
                bar.update(task, description=phase, total=total, completed=percent or 0)

            yield draw
        return
    said: set[tuple[str, int | None]] = set()

    def say(phase: str, percent: int | None) -> None:
        quarter = None if percent is None else percent // 25 * 25
        if (phase, quarter) not in said:
            said.add((phase, quarter))
            console.print(f"  {phase}" + ("" if quarter is None else f" {quarter} %"))

    yield say
