"""``hvdbridge install-horovod``: builds the published Horovod against the torch that is installed.

Rules that hold in this file:

1. What is missing is named before anything starts, all of it at once, with the remedy.
2. The environment changes once, at the end: the wheel first passes its smoke test from a directory beside it.
   A build or a test that fails therefore leaves the environment as it was.
3. What only the build needs (CMake, setuptools, ...) lives in a temporary directory.
4. A wheel enters the cache by one rename, under a lock, after its smoke test. One that fails it is dropped.

Horovod's last release, 0.28.1 of June 2023, asks the compiler for C++11 and C++14; the headers of today's
torch need C++17 or C++20. The source compiles as either, so a wrapper around the compiler changes the flag.
"""

from __future__ import annotations

import argparse
import fcntl
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
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote, urlparse

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hvdbridge.cli import probe
from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable, HvdbridgeError

VERSION = "0.28.1"
RUN_NEEDS = ("cffi>=1.4", "cloudpickle", "packaging", "psutil", "pyyaml")
BUILD_NEEDS = ("setuptools<81", "wheel")  # a setup.py of 2023: the setuptools that still has pkg_resources
CMAKE_OLDEST, CMAKE_TOO_NEW = (3, 13), (4,)  # 4.0 refuses the third-party projects' cmake_minimum_required
CMAKE_NEED = "cmake>=3.13,<4"
DISK_BYTES = 1 << 29  # sources, objects and tools take about 0.3 GB while the build runs
BYTES_PER_JOB = 2 << 30  # what one compiler process may take on torch's headers
SMOKE_SECONDS = 120
TAIL_LINES = 15
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

SMOKE = """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.size() == {size}, f"expected {size} ranks, Horovod sees {{hvd.size()}}"
assert hvd.gloo_built(), "built without Gloo"
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
assert total.eq(sum(range(1, {size} + 1))).all(), total
hvd.shutdown()
"""

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
# GCC 13 and later no longer include <cstdint> by accident, on which Gloo relies. A flag, not part of the wrapper:
# nvcc gives the wrapper what is preprocessed already.
COMPILER_FLAGS = "-include cstdint"

# Horovod's CMake starts any CUDA compiler that it finds, and fails if that one fails, though torch is without CUDA.
CMAKE_WRAPPER = """\
#!/bin/sh
[ "$1" = --build ] || set -- "$@" {options}
exec {cmake} "$@"
"""
NO_CUDA = "-DCMAKE_CUDA_COMPILER= -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdbridge install-horovod``."""
    option = parser.add_argument
    option("--with-nccl", action="store_true", help="GPU operations through the NCCL that torch uses")
    option("--version", default=VERSION, help=f"Horovod's release (default, and the one tested: {VERSION})")
    option("--rebuild", action="store_true", help="build even if a working Horovod or a wheel is there")
    option("--cache", type=Path, metavar="DIR", help="keep built wheels here (default: HVDBRIDGE_CACHE)")


def run(arguments: argparse.Namespace) -> int:
    """Check, build or take from the cache, test, install."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    torch = probe.torch()
    if isinstance(torch, probe.Missing):
        lack = f"torch, against which Horovod is built ({torch.why}). Run: pip install torch"
        raise _missing([lack, *environment_lacks()])
    recipe = Recipe.of(arguments.version, torch, with_nccl=arguments.with_nccl)
    cache = (arguments.cache or Config.from_environment().cache).expanduser().absolute() / "horovod"
    shelf = cache / recipe.key
    with _locked(cache, recipe.key, console), _terminable():
        if not arguments.rebuild and _nothing_to_do(shelf, console):
            return 0
        if lacks := environment_lacks():
            raise _missing([*lacks, *build_lacks(recipe, cache)])
        wheel = None if arguments.rebuild else _cached(shelf)
        if wheel is not None:
            console.print(f"horovod {recipe.version}: wheel from {shelf}")
            try:
                _install(wheel, console)
                return 0
            except HvdbridgeError as error:
                console.print(f"The cached wheel does not work here and is dropped.\n{error}")
                wheel.unlink()
        if lacks := build_lacks(recipe, cache):
            raise _missing(lacks)
        with tempfile.TemporaryDirectory(prefix="hvdbridge-horovod-") as scratch:
            built = build(recipe, Path(scratch), shelf / "build.log", console)
            _install(built, console, keep=shelf)
    return 0


def _missing(lacks: Sequence[str]) -> BackendUnavailable:
    return BackendUnavailable("\n  - ".join(["Horovod cannot be installed yet. Missing:", *lacks]))


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM (a batch system's time limit) unwinds like Ctrl-C, so that nothing temporary is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    return lacks + (_nccl_lacks(recipe) if recipe.with_nccl else [])


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


def _nccl_lacks(recipe: Recipe) -> list[str]:
    if recipe.torch.cuda is None:
        return [f"a torch with CUDA (this is {recipe.torch.version}), or leave out --with-nccl"]
    lacks = []
    home = recipe.options.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not Path(home, "bin", "nvcc").exists():
        lacks.append(f"the CUDA {recipe.torch.cuda} toolkit (nvcc). Install it and set CUDA_HOME")
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


# -- what is there already -------------------------------------------------------------------------


def _nothing_to_do(shelf: Path, console: Console) -> bool:
    """Is a Horovod installed that works, and that is either a site's own or ours from the same recipe?"""
    try:
        installed = distribution("horovod")
    except PackageNotFoundError:
        return False
    working = probe.horovod()
    if isinstance(working, probe.Missing):
        console.print(f"horovod {installed.version} does not work here ({working.why}); replacing it")
        return False
    # pip notes the file that a package came from (PEP 610); the shelf's name tells if we built it, and how.
    url = json.loads(installed.read_text("direct_url.json") or "{}").get("url", "")
    origin = Path(unquote(urlparse(url).path)).parent
    if origin.name == shelf.name:
        console.print(f"horovod {working}: already installed")
    elif origin.parent.name == shelf.parent.name and "-torch" in origin.name:
        console.print(f"horovod {working}: built with other options or for another torch; replacing it")
        return False
    else:
        console.print(f"horovod {working}: not built by this command, used as it is (--rebuild replaces it)")
    console.print(f"  {working.location}")
    return True


def _cached(shelf: Path) -> Path | None:
    """The wheel on the shelf. A damaged one is removed."""
    for wheel in shelf.glob("horovod-*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                damaged = archive.testzip() is not None
        except zipfile.BadZipFile:
            damaged = True
        if not damaged:
            return wheel
        wheel.unlink()
    return None


@contextmanager
def _locked(cache: Path, key: str, console: Console) -> Iterator[None]:
    """One installation per recipe at a time; a second one waits, and then finds the first one's wheel."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{key}.lock").open("w")
    except OSError as error:
        raise HvdbridgeError(
            f"The cache {cache} cannot be written to ({error.strerror}). "
            "Name another: --cache DIR or HVDBRIDGE_CACHE"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another installation of the same wheel is running; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
        "PYTHONPATH": _before_pythonpath(tools),
        "MAKEFLAGS": f"-j{_jobs()}",
        "TMPDIR": str(scratch),
    }
    if recipe.with_nccl and "HOROVOD_NCCL_LIB" in recipe.options:
        environment["HOROVOD_NCCL_LIB"] = _linkable_nccl(Path(recipe.options["HOROVOD_NCCL_LIB"]), scratch)
    needs = [*BUILD_NEEDS, *RUN_NEEDS, *([] if cmake else [CMAKE_NEED])]
    with log.open("w") as out, _progress(console) as report:
        report("build tools", None)
        _call([*_pip("install"), "--no-compile", "--target", str(tools), *needs], log=out)
        report("compiling", 0)

        def watch(line: str) -> None:
            if percent := re.match(r"\s*\[ *(\d+)%\]", line):
                report("compiling", int(percent[1]))

        # --no-cache-dir: pip would take a wheel that it once built against another torch.
        # --use-pep517: the one way that all releases of pip have in common.
        command = [*_pip("wheel"), "-v", "--no-cache-dir", "--no-deps", "--no-binary=horovod"]
        command += ["--no-build-isolation", "--use-pep517"]
        command += ["--wheel-dir", str(wheels), f"horovod=={recipe.version}"]
        _call(command, environment, log=out, watch=watch)
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // BYTES_PER_JOB))


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


# -- the environment -------------------------------------------------------------------------------


def _install(wheel: Path, console: Console, keep: Path | None = None) -> None:
    """Test the wheel beside the environment, keep it on the shelf, then install it."""
    with tempfile.TemporaryDirectory(prefix="hvdbridge-stage-") as directory:
        console.print("  smoke test: 1 rank, then 2 under horovodrun")
        _call([*_pip("install"), "--no-compile", "--target", f"{directory}/site", str(wheel)])
        smoke_test(Path(directory))
    if keep is not None:
        wheel = _shelve(wheel, keep)
    _call([*_pip("install"), *RUN_NEEDS])
    _call([*_pip("install"), "--no-deps", "--force-reinstall", str(wheel)])
    working = probe.horovod()
    if isinstance(working, probe.Missing):
        _call([*_pip("uninstall"), "-y", "horovod"])
        raise HvdbridgeError(
            f"Horovod passed its smoke test but cannot be imported from {sys.prefix} ({working.why}), and "
            "was uninstalled again. Look for another package named horovod on sys.path or PYTHONPATH"
        )
    console.print(f"horovod {working}: installed\n  {working.location}")


def smoke_test(directory: Path) -> None:
    """All-reduce at size 1, and at 2 ranks under horovodrun, with the Horovod in ``directory/site``.

    Raises:
        HvdbridgeError: with what the ranks printed.
    """
    environment = {**probe.clean_environment(), "PYTHONPATH": _before_pythonpath(directory / "site")}
    launch = ["-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2", sys.executable]
    for size, command in ((1, [sys.executable]), (2, [sys.executable, *launch])):
        script = directory / f"smoke{size}.py"
        script.write_text(SMOKE.format(size=size))
        _call([*command, str(script)], environment, timeout=SMOKE_SECONDS)


def _shelve(wheel: Path, shelf: Path) -> Path:
    """Put the wheel into the cache: copied, then renamed, so that nobody ever sees half of it."""
    shelf.mkdir(parents=True, exist_ok=True)
    partial = shelf / f".{wheel.name}.{os.getpid()}"
    try:
        shutil.copyfile(wheel, partial)
        partial.replace(shelf / wheel.name)
    finally:
        partial.unlink(missing_ok=True)
    return shelf / wheel.name


def _pip(action: str) -> list[str]:
    return [sys.executable, "-m", "pip", action, "--disable-pip-version-check", "--no-input"]


def _before_pythonpath(directory: Path) -> str:
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def _call(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    log: TextIO | None = None,
    watch: Callable[[str], None] = lambda line: None,
    timeout: float | None = None,
) -> None:
    """Run a command, its output to ``log`` and line by line to ``watch``.

    The command gets its own process group, which ends with this call however that comes about: by an
    exception, a timeout or Ctrl-C.

    Raises:
        HvdbridgeError: it failed or took too long; the message has the first error and the tail of its output.
    """
    error: list[str] = []
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    alarm = threading.Timer(timeout or threading.TIMEOUT_MAX, _end, [child])
    alarm.daemon = True
    alarm.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line)
            if len(error) < TAIL_LINES and (error or re.search(r"(?i)(^|\s)(fatal |cmake )?error( at|:)", line)):
                error.append(line)
            if log is not None:
                log.write(line)
                log.flush()
            watch(line)
        status = child.wait()
    finally:
        late = not alarm.is_alive()
        alarm.cancel()
        _end(child)
        if child.stdout is not None:
            child.stdout.close()
    if status:
        how = f"took more than {timeout:g} s" if late and timeout else f"failed with status {status}"
        shown = "".join(tail)
        if error and error[0] not in tail:
            shown = f"{''.join(error)}[...]\n{shown}"
        where = f"\nAll of it: {log.name}" if log is not None else ""
        raise HvdbridgeError(f"{shlex.join(command)} {how}:\n\n{shown}{where}")


def _end(child: subprocess.Popen[str]) -> None:
    """End the child's process group: politely, so that horovodrun ends its ranks, then by force."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
