"""``hvdbridge install-horovod``: build the published Horovod against the torch that is installed.

Rules that hold in this file:

1. Before a build starts, one error lists all missing requirements, each with its remedy.
2. The environment changes once, at the end: the wheel first passes its smoke test in a directory outside of it.
   Therefore a build or a test that fails leaves the environment unchanged.
3. A wheel enters the cache by one rename, under a lock, after its smoke test. A wheel that fails the test is deleted.
4. A working Horovod that this command did not build is kept.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from rich.console import Console

from hvdbridge.config import Config
from hvdbridge.errors import BackendUnavailable, HvdbridgeError
from hvdbridge.tools import horovod_build, probe
from hvdbridge.tools.horovod_build import RUN_NEEDS, Recipe, call, environment_lacks

VERSION = "0.28.1"
SMOKE_SECONDS = 120
SMOKE = """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.size() == {size}, f"expected {size} ranks, Horovod sees {{hvd.size()}}"
assert hvd.gloo_built(), "built without Gloo"
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
assert total.eq(sum(range(1, {size} + 1))).all(), total
hvd.shutdown()
"""


class SmokeTestFailed(HvdbridgeError):
    """The wheel can be installed but does not work; the message contains the output of its ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdbridge install-horovod``."""
    option = parser.add_argument
    option("--with-nccl", action="store_true", help="GPU operations through the NCCL that torch uses")
    option("--version", default=VERSION, help=f"Horovod's release (default, and the one tested: {VERSION})")
    option("--rebuild", action="store_true", help="build even if a working Horovod or a wheel is there")
    option("--cache", type=Path, metavar="DIR", help="keep built wheels here (default: HVDBRIDGE_CACHE)")


def run(arguments: argparse.Namespace) -> int:
    """Check requirements, build the wheel or take it from the cache, test it and install it; return 0."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    torch = probe.ask(probe.TORCH)
    if isinstance(torch, probe.Missing):
        lack = f"torch, against which Horovod is built ({torch.why}). Run: pip install torch"
        raise _requirements_error([lack, *environment_lacks()])
    recipe = Recipe.of(arguments.version, torch, with_nccl=arguments.with_nccl)
    cache = (arguments.cache or Config.from_environment().cache).expanduser().absolute() / "horovod"
    wheel_dir = cache / recipe.key
    with _locked(cache, recipe.key, console), _terminable():
        if not arguments.rebuild and _usable_installed(wheel_dir, console):
            return 0
        wheel = None if arguments.rebuild else _cached(wheel_dir)
        if lacks := [*environment_lacks(), *(() if wheel else horovod_build.build_lacks(recipe, cache))]:
            raise _requirements_error(lacks)
        if wheel is not None:
            console.print(f"horovod {recipe.version}: wheel from {wheel_dir}")
            try:
                _install(wheel, console)
                return 0
            except SmokeTestFailed as error:
                console.print(f"The cached wheel does not work here and is dropped.\n{error}")
                wheel.unlink()
            if lacks := list(horovod_build.build_lacks(recipe, cache)):
                raise _requirements_error(lacks)
        with tempfile.TemporaryDirectory(prefix="hvdbridge-horovod-") as scratch:
            built = horovod_build.build(recipe, Path(scratch), wheel_dir / "build.log", console)
            _install(built, console, keep=wheel_dir)
    return 0


def _requirements_error(lacks: Sequence[str]) -> BackendUnavailable:
    return BackendUnavailable("\n  - ".join(["Horovod cannot be installed yet. Missing:", *lacks]))


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM (a batch system's time limit), so that temporary files are removed."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# -- installed and cached --------------------------------------------------------------------------


def _usable_installed(wheel_dir: Path, console: Console) -> bool:
    """Return True if the installed Horovod works and is the site's own, or built here by the same recipe."""
    try:
        installed = distribution("horovod")
    except PackageNotFoundError:
        return False
    working = probe.ask(probe.HOROVOD)
    if isinstance(working, probe.Missing):
        console.print(f"horovod {installed.version} does not work here ({working.why}); replacing it")
        return False
    # pip records the file that a package came from (PEP 610). Its directory identifies the recipe of our wheels.
    url = json.loads(installed.read_text("direct_url.json") or "{}").get("url", "")
    origin = Path(unquote(urlparse(url).path)).parent
    state, replace = "not built by this command, used as it is (--rebuild replaces it)", False
    if origin.name == wheel_dir.name:
        state = "already installed"
    elif origin.parent.name == wheel_dir.parent.name and "-torch" in origin.name:
        state, replace = "built with other options or for another torch; replacing it", True
    where = "" if replace else f"\n  {working.location}"
    console.print(f"horovod {probe.horovod_text(working)}: {state}{where}")
    return not replace


def _cached(wheel_dir: Path) -> Path | None:
    """Return the cached wheel of a recipe, or None. Damaged wheels are deleted."""
    for wheel in wheel_dir.glob("horovod-*.whl"):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
        wheel.unlink()
    return None


@contextmanager
def _locked(cache: Path, key: str, console: Console) -> Iterator[None]:
    """Hold the lock of a recipe, so that a second installation waits and then uses the first one's wheel."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{key}.lock").open("w")
    except OSError as error:
        raise HvdbridgeError(
            f"The cache {cache} cannot be written to ({error.strerror}). Name another: --cache DIR or HVDBRIDGE_CACHE"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another installation of the same wheel is running; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# -- the environment -------------------------------------------------------------------------------


def _install(wheel: Path, console: Console, keep: Path | None = None) -> None:
    """Test the wheel outside of the environment, copy it to the directory ``keep``, then install it."""
    with tempfile.TemporaryDirectory(prefix="hvdbridge-stage-") as directory:
        console.print("  smoke test: 1 rank, then 2 under horovodrun")
        dependencies = ["--no-deps"] if _dependencies_installed() else []
        target = ["--no-compile", *dependencies, "--target", f"{directory}/site"]
        call([*horovod_build.pip("install"), *target, str(wheel)])
        smoke_test(Path(directory))
    if keep is not None:
        wheel = _store(wheel, keep)
    call([*horovod_build.pip("install"), *RUN_NEEDS])
    call([*horovod_build.pip("install"), "--no-deps", "--force-reinstall", str(wheel)])
    working = probe.ask(probe.HOROVOD)
    if isinstance(working, probe.Missing):
        call([*horovod_build.pip("uninstall"), "-y", "horovod"])
        raise HvdbridgeError(
            f"Horovod passed its smoke test but cannot be imported from {sys.prefix} ({working.why}), and "
            "was uninstalled again. Look for another package named horovod on sys.path or PYTHONPATH"
        )
    console.print(f"horovod {probe.horovod_text(working)}: installed\n  {working.location}")


def _dependencies_installed() -> bool:
    """Return True if Horovod's dependencies are installed: no registry is needed then, as on a compute node."""
    try:
        return all(distribution(re.split("[<>=]", need)[0]) for need in RUN_NEEDS)
    except PackageNotFoundError:
        return False


def smoke_test(directory: Path) -> None:
    """All-reduce on 1 rank, and on 2 ranks under horovodrun, with the Horovod in ``directory/site``.

    Raises:
        SmokeTestFailed: with the output of the ranks.
    """
    environment = {**probe.clean_environment(), "PYTHONPATH": horovod_build.before_pythonpath(directory / "site")}
    launch = ["-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2", sys.executable]
    for size, command in ((1, [sys.executable]), (2, [sys.executable, *launch])):
        script = directory / f"smoke{size}.py"
        script.write_text(SMOKE.format(size=size))
        try:
            call([*command, str(script)], environment, timeout=SMOKE_SECONDS)
        except HvdbridgeError as error:
            raise SmokeTestFailed(str(error)) from error


def _store(wheel: Path, wheel_dir: Path) -> Path:
    """Put the wheel into the cache by a copy and a rename, so that no process sees a partial file."""
    wheel_dir.mkdir(parents=True, exist_ok=True)
    partial = wheel_dir / f".{wheel.name}.{os.getpid()}"
    try:
        shutil.copyfile(wheel, partial)
        partial.replace(wheel_dir / wheel.name)
    finally:
        partial.unlink(missing_ok=True)
    return wheel_dir / wheel.name
