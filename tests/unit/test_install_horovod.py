"""`hvdbridge install-horovod` without compiling: what it asks for, keeps, restores and refuses."""

from __future__ import annotations

import configparser
import fcntl
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdbridge.errors import HvdbridgeError
from hvdbridge.tools import horovod_build, install_horovod, main, probe
from hvdbridge.tools.horovod_build import Recipe, call
from hvdbridge.tools.install_horovod import SmokeTestFailed

TORCH = SimpleNamespace(
    version="2.13.0+cpu", git="abc", cuda=None, cxx11_abi=True, cxx_standard=20, distributed=True, gloo=True,
    nccl=None, gpus=[],
)  # fmt: skip
WORKING = SimpleNamespace(version="0.28.1", location="/env/horovod", gloo=True, mpi=False, nccl=False)
NO_TORCH = probe.Missing("ModuleNotFoundError: No module named 'torch'")


def other(**changes: object) -> SimpleNamespace:
    """TORCH with other attributes."""
    return SimpleNamespace(**vars(TORCH) | changes)


# Stands in for pip: notes each call, and makes a wheel or fails as a compiler does.
PIP = """
import os, pathlib, sys, zipfile
pathlib.Path({calls!r}).open("a").write(" ".join(sys.argv[1:]) + chr(10))
if sys.argv[1] == "wheel":
    print("[ 50%] Building", flush=True)
    if {fails!r}:
        print("mpi_ops.cc:7:1: error: no such thing", *range(100), sep=chr(10))
        sys.exit(1)
    wheels = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "horovod-0.28.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [k for k in os.environ if k.startswith("HOROVOD_")] + ["CC", "CXX", "CXXFLAGS"]:
        monkeypatch.delenv(name, raising=False)


class Machine:
    """A machine on which everything but the build is real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.monkeypatch = monkeypatch
        self.calls_file = directory / "calls"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.cache = directory / "cache"
        self.installed = False
        self.smoke_failures: list[str] = []
        monkeypatch.setenv("HVDBRIDGE_CACHE", str(self.cache))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setattr(probe, "ask", {probe.TORCH: TORCH, probe.HOROVOD: WORKING}.get)
        monkeypatch.setattr(install_horovod, "distribution", self.distribution)
        monkeypatch.setattr(horovod_build, "build_lacks", lambda recipe, cache: [])
        monkeypatch.setattr(install_horovod, "smoke_test", self.smoke_test)
        self.pip(fails=False)

    def pip(self, fails: bool) -> None:
        script = PIP.format(calls=str(self.calls_file), fails=fails)
        self.monkeypatch.setattr(horovod_build, "pip", lambda action: [sys.executable, "-c", script, action])

    def distribution(self, name: str) -> None:
        raise PackageNotFoundError(name)

    def smoke_test(self, directory: Path) -> None:
        if self.smoke_failures:
            raise SmokeTestFailed(self.smoke_failures.pop())

    def calls(self) -> list[str]:
        """The actions asked of pip since the last time."""
        words = [line.split() for line in self.calls_file.read_text().splitlines()]
        self.calls_file.write_text("")
        return [action + (" --target" if "--target" in rest else "") for action, *rest in words]

    def wheels(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if "whl" in path.name]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_builds_once_and_then_takes_the_wheel(machine, capsys):
    assert main(["install-horovod"]) == 0
    assert machine.calls() == ["install --target", "wheel", "install --target", "install", "install"]
    assert len(machine.wheels()) == 1
    assert "compiling 50 %" in capsys.readouterr().out
    assert main(["install-horovod"]) == 0
    assert machine.calls() == ["install --target", "install", "install"]
    assert main(["install-horovod", "--rebuild"]) == 0
    assert "wheel" in machine.calls()
    assert not list(machine.temporary.iterdir())


def test_a_failed_build_leaves_nothing_but_its_log(machine, capsys):
    machine.pip(fails=True)
    assert main(["install-horovod"]) == 2
    assert machine.calls() == ["install --target", "wheel"]  # nothing entered the environment
    assert not machine.wheels()
    assert not list(machine.temporary.iterdir())
    message = capsys.readouterr().err
    assert "mpi_ops.cc:7:1: error: no such thing" in message  # far above the tail
    assert "\n99\n" in message
    log = Path(message.rstrip().rpartition("All of it: ")[2])
    assert "no such thing" in log.read_text()


def test_a_failed_smoke_test_leaves_nothing(machine, capsys):
    machine.smoke_failures = ["rank 1 saw 0"]
    assert main(["install-horovod"]) == 2
    assert machine.calls() == ["install --target", "wheel", "install --target"]
    assert not machine.wheels()
    assert "rank 1 saw 0" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"PK not a wheel", None])
def test_a_bad_cached_wheel_is_dropped_and_built_again(machine, damage):
    main(["install-horovod"])
    machine.calls()
    (wheel,) = machine.wheels()
    if damage is None:  # a sound archive that does not work
        machine.smoke_failures = ["undefined symbol"]
    else:
        wheel.write_bytes(damage)
    assert main(["install-horovod"]) == 0
    assert machine.calls().count("wheel") == 1
    (wheel,) = machine.wheels()
    assert zipfile.ZipFile(wheel).testzip() is None


def test_a_registry_that_does_not_answer_costs_no_cached_wheel(machine):
    main(["install-horovod"])
    machine.monkeypatch.setattr(horovod_build, "pip", lambda action: ["false"])
    assert main(["install-horovod"]) == 2
    assert len(machine.wheels()) == 1


def test_what_cannot_be_imported_afterwards_is_uninstalled(machine, capsys):
    answers = {probe.TORCH: TORCH, probe.HOROVOD: probe.Missing("ImportError: shadowed")}
    machine.monkeypatch.setattr(probe, "ask", answers.get)
    assert main(["install-horovod"]) == 2
    assert machine.calls()[-1] == "uninstall"
    assert "ImportError: shadowed" in capsys.readouterr().err


class Installed:
    """An installed distribution that came from ``url``."""

    version = "0.28.1"

    def __init__(self, url: str) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        return f'{{"url": "{self.url}"}}' if self.url else None


OURS = "file:///elsewhere/hvdbridge/horovod/{key}/horovod-0.28.1-py3-none-any.whl"


@pytest.mark.parametrize(
    ("url", "works", "said", "replaced"),
    [
        ("", True, "not built by this command, used as it is", False),
        ("file:///site/wheels/horovod-0.28.1.whl", True, "not built by this command, used as it is", False),
        ("", False, "undefined symbol); replacing it", True),
        (OURS, True, "already installed", False),
        (OURS.replace("{key}", "of-another-torch2.12"), True, "for another torch; replacing it", True),
    ],
)
def test_a_horovod_that_is_there(machine, capsys, url, works, said, replaced):
    url = url.format(key=Recipe.of("0.28.1", TORCH).key)  # of the compilers that this machine names
    found = iter([WORKING if works else probe.Missing("undefined symbol"), WORKING])
    machine.monkeypatch.setattr(install_horovod, "distribution", lambda name: Installed(url))
    machine.monkeypatch.setattr(probe, "ask", lambda source: TORCH if source == probe.TORCH else next(found))
    assert main(["install-horovod"]) == 0
    assert said in capsys.readouterr().out
    assert machine.calls_file.exists() == replaced


def test_names_all_that_is_missing_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probe, "ask", lambda source: TORCH)
    monkeypatch.setattr(install_horovod, "distribution", Machine.distribution.__get__(object()))
    monkeypatch.setattr(horovod_build, "DISK_BYTES", 1 << 60)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["install-horovod", "--cache", str(tmp_path / "cache")]) == 2
    message = capsys.readouterr().err
    for lack in ("make.", "a C compiler", "a C++ compiler (none on PATH)", f"space in {tmp_path}"):
        assert f"  - {lack}" in message
    assert "Traceback" not in message


def test_torch_must_be_there(monkeypatch, capsys):
    monkeypatch.setattr(probe, "ask", lambda source: NO_TORCH)
    assert main(["install-horovod"]) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_to(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(probe, "ask", lambda source: TORCH)
    (tmp_path / "file").touch()
    assert main(["install-horovod", "--cache", str(tmp_path / "file")]) == 2
    assert "--cache DIR" in capsys.readouterr().err


def test_nccl_needs_a_torch_with_cuda():
    recipe = Recipe.of("0.28.1", TORCH, with_nccl=True)
    assert recipe.options["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert "a torch with CUDA" in next(horovod_build._cuda_lacks(recipe))


def test_a_torch_with_cuda_needs_the_toolkit(monkeypatch, tmp_path):
    """With and without NCCL; a compiler without headers, as a wheel brings it, is no toolkit."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    recipe = Recipe.of("0.28.1", other(cuda="13.0"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    (lack,) = horovod_build.build_lacks(recipe, tmp_path)
    assert f"the CUDA 13.0 toolkit (nvcc and cuda_runtime.h; looked in {tmp_path})" in lack
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert not list(horovod_build.build_lacks(recipe, tmp_path))


def test_a_compiler_that_is_too_old_is_named(monkeypatch, tmp_path):
    old = tmp_path / "g++-4"
    old.write_text("#!/bin/sh\necho unrecognized option >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    (lack,) = horovod_build._compiler_lacks(20)
    assert f"{old} is too old" in lack


def test_the_key_has_all_that_changes_the_wheel(monkeypatch):
    def key(torch=TORCH, version="0.28.1", with_nccl=False):
        return Recipe.of(version, torch, with_nccl).key

    plain = key()
    assert plain.startswith("horovod0.28.1-torch2.13.0+cpu-")
    assert key() == plain
    others = {
        key(version="0.28.0"),
        key(with_nccl=True),
        key(other(version="2.12.0+cpu")),
        key(other(cxx11_abi=False)),
    }
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")  # for runs, not for builds
    assert key() == plain
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert len({plain, key()} | others) == 6


def test_the_users_own_build_variables_win(monkeypatch):
    assert Recipe.of("0.28.1", TORCH).options["HOROVOD_WITHOUT_MPI"] == "1"
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    options = Recipe.of("0.28.1", TORCH).options
    assert options["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in options


def run(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_compiler_wrapper_changes_the_standard_and_nothing_else(tmp_path):
    wrapper = horovod_build.compiler_wrapper(tmp_path, ["printf", "%s\\n", "two words"], 20)
    given = ["-std=c++11", "-std=gnu++14", "-std=c++17", "-DX=a b", "*", "", "-std=c++14"]
    assert run([wrapper, *given]) == [
        "two words", "-std=c++20", "-std=c++20", "-std=c++17", "-DX=a b", "*", "", "-std=c++20"
    ]  # fmt: skip


def test_cmake_does_not_see_cuda_where_torch_has_none(tmp_path):
    echo = horovod_build.cmake_wrapper(tmp_path, "/bin/echo", cuda=None)
    assert "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON" in run([echo, "..", "-DA=1"])[0]
    assert run([echo, "--build", "."]) == ["--build ."]
    echo = horovod_build.cmake_wrapper(tmp_path, "/bin/echo", cuda="13.0")
    assert run([echo, ".."]) == [".."]


@pytest.mark.parametrize(
    ("version", "usable"),
    [("3.12.4", False), ("3.13.0", True), ("3.31.10", True), ("4.0.1", False)],
)
def test_a_cmake_of_the_wrong_age_is_not_used(monkeypatch, tmp_path, version, usable):
    cmake = tmp_path / "cmake"
    cmake.write_text(f"#!/bin/sh\necho cmake version {version}\n")
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert horovod_build.usable_cmake() == (str(cmake) if usable else None)


def test_a_second_installation_waits_for_the_first(machine, monkeypatch, capsys):
    take = fcntl.flock

    def flock(file, operation):
        if operation == fcntl.LOCK_EX:  # it waits, so the first may end now
            take(lock, fcntl.LOCK_UN)
        take(file, operation)

    key = Recipe.of("0.28.1", TORCH).key
    (machine.cache / "horovod").mkdir(parents=True)
    with (machine.cache / "horovod" / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        assert main(["install-horovod"]) == 0
    assert "waiting for it" in capsys.readouterr().out


def test_a_command_that_takes_too_long_is_ended_with_its_children():
    start = time.monotonic()
    with pytest.raises(HvdbridgeError, match=r"took more than 0\.5 s"):
        call(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.5)
    assert time.monotonic() - start < 10


def test_the_extra_lists_what_the_build_brings():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(Path(__file__).parents[2] / "setup.cfg")
    extra = set(parser["options.extras_require"]["horovod"].split())
    assert extra == {*horovod_build.RUN_NEEDS, *horovod_build.BUILD_NEEDS, horovod_build.CMAKE_NEED}
