"""Check the requirements of a Horovod build, and build the published Horovod against the torch that is installed.

Horovod's last release, 0.28.1 of June 2023, requests C++11 and C++14 from the compiler; the headers of current torch
need C++17 or C++20. The source compiles as either, so a wrapper around the compiler changes the flag. Tools that only
the build needs (CMake, setuptools, ...) are installed in a temporary directory.
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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

from rich.console import Console

from hvdbridge.errors import HvdbridgeError
from hvdbridge.startup.world import usable_cores

RUN_NEEDS = ("cffi>=1.4", "cloudpickle", "packaging", "psutil", "pyyaml")
BUILD_NEEDS = ("setuptools<81", "wheel")  # Horovod's setup.py imports pkg_resources
CMAKE_OLDEST, CMAKE_TOO_NEW = (3, 13), (4,)  # 4.0 refuses the third-party projects' cmake_minimum_required
CMAKE_NEED = "cmake>=3.13,<4"
DISK_BYTES = 1 << 29  # enough for sources, objects and build tools
BYTES_PER_JOB = 2 << 30  # memory that one compiler process may need for torch's headers
TAIL_LINES = 15
FRAMEWORKS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    # If Horovod is built with MPI, `horovodrun` prefers MPI and fails with current releases of MPICH and Open MPI.
    # hvdbridge uses MPI through mpi4py.
    "HOROVOD_WITHOUT_MPI": "1",
}

# Prefixes of the variables that change the wheel (_WITH covers _WITHOUT). Other HOROVOD_* variables affect runs.
BUILD_PREFIXES = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CUDA", "HOROVOD_NCCL", "HOROVOD_ROCM")
COMPILER_VARIABLES = ("CC", "CXX", "CXXFLAGS")

# The wrapper replaces the flag in place: of several -std flags the last one wins, and that is CMake's.
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
# Gloo and Horovod use these headers without including them; GCC 13 and later do not include them implicitly. These are
# flags and not part of the wrapper, because nvcc passes preprocessed source to the wrapper.
COMPILER_FLAGS = "-include cstdint -include string"

# Horovod's CMake runs any CUDA compiler that it finds, and fails if that compiler fails, even if torch has no CUDA.
CMAKE_WRAPPER = """\
#!/bin/sh
[ "$1" = --build ] || set -- "$@" {options}
exec {cmake} "$@"
"""
NO_CUDA = "-DCMAKE_CUDA_COMPILER= -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"


@dataclass(frozen=True)
class Recipe:
    """The inputs that determine a wheel; ``torch`` is the answer to :data:`~hvdbridge.tools.probe.TORCH`."""

    version: str
    torch: SimpleNamespace
    options: Mapping[str, str]
    with_nccl: bool = False

    @classmethod
    def of(cls, version: str, torch: SimpleNamespace, with_nccl: bool = False) -> Recipe:
        """Combine our options with the user's ``HOROVOD_*`` build variables and compiler flags, which override ours."""
        options = {**FRAMEWORKS, **(_nccl_of_torch() if with_nccl else {})}
        chosen = (k for k in os.environ if k.startswith(BUILD_PREFIXES) or k in COMPILER_VARIABLES)
        user = {k: os.environ[k] for k in chosen}
        # CMake prefers HOROVOD_WITHOUT_MPI, so a HOROVOD_WITH_MPI=1 of the user removes ours.
        options = {k: v for k, v in options.items() if k.replace("WITHOUT", "WITH") not in user}
        return cls(version, torch, {**options, **user}, with_nccl)

    @property
    def key(self) -> str:
        """The name of the wheel's cache directory: readable parts, then a digest of the other inputs."""
        torch = self.torch
        built = [torch.git, torch.cxx11_abi, torch.cxx_standard, torch.cuda, platform.libc_ver()]
        scripts = [COMPILER_WRAPPER, COMPILER_FLAGS, CMAKE_WRAPPER, NO_CUDA]
        details = json.dumps([built, scripts, sorted(self.options.items())])
        digest = hashlib.sha256(details.encode()).hexdigest()
        operations = "gloo-nccl" if self.with_nccl else "gloo"
        python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        return f"horovod{self.version}-torch{torch.version}-{python}-{operations}-{digest[:8]}"


# -- requirements ----------------------------------------------------------------------------------


def environment_lacks() -> Iterator[str]:
    """Yield each requirement that this environment lacks for an installation, with its remedy."""
    if importlib.util.find_spec("pip") is None:
        yield f"pip in this environment. Run: {sys.executable} -m ensurepip"
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists() and sys.prefix == sys.base_prefix
    if managed or not os.access(sysconfig.get_path("purelib"), os.W_OK):
        yield (
            f"an environment that may be written to ({sys.prefix} may not). "
            "Run: python3 -m venv .venv, then install hvdbridge there"
        )


def build_lacks(recipe: Recipe, cache: Path) -> Iterator[str]:
    """Yield each missing requirement of the build, with its remedy; CMake comes from the registry."""
    if shutil.which("make") is None:
        yield "make. Debian/Ubuntu: apt install make; conda: make; macOS: xcode-select --install"
    if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None:
        yield "a C compiler (CC, or cc on PATH). Debian/Ubuntu: apt install gcc; conda: gcc_linux-64"
    yield from _compiler_lacks(recipe.torch.cxx_standard)
    for directory in {Path(tempfile.gettempdir()), cache}:
        free = shutil.disk_usage(directory).free
        if free < DISK_BYTES:
            yield (
                f"space in {directory}: {free / 2**20:.0f} MiB free, {DISK_BYTES >> 20} needed. "
                "Set TMPDIR (or HVDBRIDGE_CACHE) to a larger disk"
            )
    if recipe.torch.cuda is not None or recipe.with_nccl:
        yield from _cuda_lacks(recipe)


def _compiler() -> list[str] | None:
    """Return the C++ compiler's command: ``$CXX``, which may be several words (``ccache g++``), or a usual name."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((shlex.split(name) for name in names if shutil.which(shlex.split(name)[0])), None)


def _compiler_lacks(standard: int) -> Iterator[str]:
    """Check for Python's headers, and for C++ ``standard`` by compiling one line, whatever the compiler's version."""
    compiler = _compiler()
    if compiler is None:
        named = f"CXX={os.environ['CXX']} was not found" if os.environ.get("CXX") else "none on PATH"
        yield f"a C++ compiler ({named}). Debian/Ubuntu: apt install g++; conda: gxx_linux-64; or set CXX"
        return
    newest_header = {20: "concepts", 17: "optional"}.get(standard, "vector")
    command = [*compiler, f"-std=c++{standard}", "-x", "c++", "-fsyntax-only", "-"]
    if subprocess.run(command, input=f"#include <{newest_header}>\n", text=True, capture_output=True).returncode:
        yield (
            f"a C++{standard} compiler for the headers of this torch ({shlex.join(compiler)} is too old or "
            "broken). GCC 11 and Clang 14 suffice; name one by CXX"
        )
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        yield f"Python's headers ({include}/Python.h). Debian/Ubuntu: apt install python3-dev"


def _cuda_lacks(recipe: Recipe) -> Iterator[str]:
    """Check for the CUDA toolkit, which Horovod needs whenever torch has CUDA, and for NCCL's headers."""
    if recipe.torch.cuda is None:
        yield f"a torch with CUDA (this is {recipe.torch.version}), or leave out --with-nccl"
        return
    cuda_home = recipe.options.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc")
    home = Path(cuda_home or (Path(nvcc).resolve().parents[1] if nvcc else "/usr/local/cuda"))
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]
    if not (headers and (home / "bin" / "nvcc").exists()):
        yield (
            f"the CUDA {recipe.torch.cuda} toolkit (nvcc and cuda_runtime.h; looked in {home}). Install it and set "
            "CUDA_HOME; or, where GPUs are not used, install torch's CPU build"
        )
    named = any(recipe.options.get(name) for name in ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE"))
    candidates = (Path(root, "include", "nccl.h") for root in (home, "/usr", "/usr/local"))
    if recipe.with_nccl and not named and not any(header.exists() for header in candidates):
        yield "NCCL's headers (nccl.h). Install libnccl-dev, or set HOROVOD_NCCL_HOME"


def _nccl_of_torch() -> dict[str, str]:
    """Return the options that build GPU operations with torch's NCCL wheel, so that both load the same library.

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
        HvdbridgeError: the build failed; the message has the tail of the log and its path.
    """
    tools, wheels = scratch / "tools", scratch / "wheels"
    log.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"horovod {recipe.version} for torch {recipe.torch.version}; log: {log}\n  build tools")
    cmake = usable_cmake()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    environment = {
        **os.environ,
        **recipe.options,
        "CXX": compiler_wrapper(scratch, _compiler() or ["c++"], recipe.torch.cxx_standard),
        "CXXFLAGS": f"{COMPILER_FLAGS} {os.environ.get('CXXFLAGS', '')}",
        "HOROVOD_CMAKE": cmake_wrapper(scratch, cmake or str(tools / "bin" / "cmake"), recipe.torch.cuda),
        "PYTHONPATH": before_pythonpath(tools),
        "MAKEFLAGS": f"-j{max(1, min(len(usable_cores()), memory // BYTES_PER_JOB))}",
        "TMPDIR": str(scratch),
    }
    nccl = Path(recipe.options.get("HOROVOD_NCCL_LIB", ""))
    if recipe.with_nccl and (nccl / "libnccl.so.2").exists() and not (nccl / "libnccl.so").exists():
        # The linker needs libnccl.so, which NCCL's wheel lacks.
        (scratch / "nccl").mkdir()
        (scratch / "nccl" / "libnccl.so").symlink_to(nccl / "libnccl.so.2")
        environment["HOROVOD_NCCL_LIB"] = str(scratch / "nccl")
    quarters = {25, 50, 75, 100}

    def watch(line: str) -> None:
        percent = re.match(r"\s*\[ *(\d+)%\]", line)
        for quarter in sorted(quarter for quarter in quarters if percent and quarter <= int(percent[1])):
            console.print(f"  compiling {quarter} %")
            quarters.remove(quarter)

    needs = [*BUILD_NEEDS, *RUN_NEEDS, *([] if cmake else [CMAKE_NEED])]
    with log.open("w") as out:
        call([*pip("install"), "--no-compile", "--target", str(tools), *needs], log=out)
        console.print("  compiling")
        # --no-cache-dir: pip's cache may hold a wheel that was built against another torch.
        # --use-pep517: the only build path that all releases of pip support.
        command = [*pip("wheel"), "-v", "--no-cache-dir", "--no-deps", "--no-binary=horovod"]
        command += ["--no-build-isolation", "--use-pep517"]
        command += ["--wheel-dir", str(wheels), f"horovod=={recipe.version}"]
        call(command, environment, log=out, watch=watch)
    return next(wheels.glob("horovod-*.whl"))


def usable_cmake() -> str | None:
    """Return a CMake that can build Horovod, from ``$HOROVOD_CMAKE`` or ``PATH``; None: pip must install one."""
    for name in (os.environ.get("HOROVOD_CMAKE"), "cmake"):
        path = shutil.which(name) if name else None
        output = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
        version = re.search(r"version (\d+)\.(\d+)", output)
        if version and CMAKE_OLDEST <= (int(version[1]), int(version[2])) < CMAKE_TOO_NEW:
            return path
    return None


def compiler_wrapper(directory: Path, compiler: Sequence[str], standard: int) -> str:
    """Write a script that calls ``compiler`` with C++``standard`` instead of C++11 or C++14."""
    return _script(directory / "c++", COMPILER_WRAPPER.format(compiler=shlex.join(compiler), standard=standard))


def cmake_wrapper(directory: Path, cmake: str, cuda: str | None) -> str:
    """Write a script that calls ``cmake``, with CUDA disabled if torch has no CUDA (``cuda`` is None)."""
    script = CMAKE_WRAPPER.format(cmake=shlex.quote(cmake), options="" if cuda else NO_CUDA)
    return _script(directory / "cmake", script)


def _script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# -- commands --------------------------------------------------------------------------------------


def pip(action: str) -> list[str]:
    """Return the first words of a pip command for this interpreter's environment."""
    return [sys.executable, "-m", "pip", action, "--disable-pip-version-check", "--no-input"]


def before_pythonpath(directory: Path) -> str:
    """Return ``PYTHONPATH`` with ``directory`` first and the user's entries (a site's torch, say) after it."""
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def call(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    log: TextIO | None = None,
    watch: Callable[[str], None] | None = None,
    timeout: float | None = None,
) -> None:
    """Run a command, and pass each line of its output to ``log`` and ``watch``.

    The command has its own process group. This call ends the group, also on an exception, a timeout (s) or Ctrl-C.

    Raises:
        HvdbridgeError: the command failed or timed out; the message has its first error and the tail of its output.
    """
    child = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + (timeout or threading.TIMEOUT_MAX)
    alarm = threading.Timer(timeout or threading.TIMEOUT_MAX, _end, [child])
    alarm.daemon = True
    alarm.start()
    lines: list[str] = []
    with child, ExitStack() as stack:
        stack.callback(_end, child)
        stack.callback(alarm.cancel)
        for line in child.stdout or ():
            lines.append(line)
            if log is not None:
                log.write(line)
                log.flush()
            if watch is not None:
                watch(line)
        status = child.wait()
    if status:
        failure = f"took more than {timeout:g} s" if time.monotonic() >= deadline else f"failed with status {status}"
        shown = "".join(lines[-TAIL_LINES:])
        errors = [i for i, line in enumerate(lines) if re.search(r"(?i)(^|\s)(fatal |cmake )?error( at|:)", line)]
        if errors and errors[0] < len(lines) - TAIL_LINES:
            shown = f"{''.join(lines[errors[0] : errors[0] + TAIL_LINES])}[...]\n{shown}"
        log_path = f"\nAll of it: {log.name}" if log is not None else ""
        raise HvdbridgeError(f"{shlex.join(command)} {failure}:\n\n{shown}{log_path}")


def _end(child: subprocess.Popen[str]) -> None:
    """End the child's process group by SIGTERM, so that horovodrun ends its ranks, and after 5 s by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
