"""The source distribution and its wheel, installed in an environment that lacks the repository.

Nothing comes from a network: the environment finds torch in this one. ``make test-dist`` (``tests/artifacts``)
installs what ``make dist`` has built, and torch, by pip.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
GENERATED = (".*", "build", "dist", "*.egg-info", "__pycache__", "shared")
JOB = """
import hashlib, json, os, sys, torch
import hvdbridge as hb
from hvdbridge.kernels import native

hb.init()
found = dict(rank=hb.rank(), size=hb.size(), package=hb.__file__, path=sys.path, digests={})
for policy in ("int8", "onebit", "topk:ratio=0.1", "qsgd"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 8))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    model, optimizer = sync.model, sync.optimizer
    for step in range(3):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step * hb.size() + hb.rank())
        model(torch.randn(16, 64, generator=draw)).square().mean().backward()
        optimizer.step()
    state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    found["digests"][policy] = hashlib.sha256(state).hexdigest()
loaded = native._load()
found["kernels"] = loaded and loaded._name
print("found " + json.dumps(found), flush=True)
hb.shutdown()
"""


def environment(**extra: str) -> dict[str, str]:
    """Return this environment without what lets Python find the repository, or changes hvdbridge."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HVDBRIDGE_"))} | extra


def build(kind: str, tree: Path, out: Path, **env: str) -> tuple[Path, str]:
    """Call setuptools as pip and build do, by the interface of PEP 517, without isolation and thus offline."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment(**env), text=True, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout
    return out / made.stdout.split()[-1], made.stdout


@dataclass
class Installed:
    """An environment with hvdbridge, and an empty directory.

    Attributes:
        variables: what its commands get beside this process's environment.
    """

    prefix: Path
    empty: Path
    variables: dict[str, str]

    def run(self, *command: str, **env: str) -> str:
        """Run a command of the environment in the empty directory. Return its standard output."""
        whole = environment(**self.variables, **env)
        program, *arguments = command
        call = [str(self.prefix / "bin" / program), *arguments]
        done = subprocess.run(call, cwd=self.empty, env=whole, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ranks(self, *launcher: str, **env: str) -> list[dict[str, Any]]:
        """Run :data:`JOB` on two ranks, which take hvdbridge from the environment. Return what each has found."""
        (self.empty / "job.py").write_text(JOB)
        lines = self.run(*launcher, "job.py", **env).splitlines()
        found = [json.loads(line.removeprefix("found ")) for line in lines if line.startswith("found ")]
        assert sorted((rank["rank"], rank["size"]) for rank in found) == [(0, 2), (1, 2)]
        for rank in found:
            assert Path(rank["package"]).is_relative_to(self.prefix)
            assert str(ROOT) not in rank["path"]
        return found

    def prebuilt(self, file: str) -> bool:
        """Return whether a library of kernels was installed, in place of compiled here."""
        return Path(file).is_relative_to(self.prefix) and Path(file).name.startswith("libnative")


@dataclass
class Built(Installed):
    """An environment with the wheel, and what it was built from."""

    sdist: Path
    tree: Path
    wheel: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*GENERATED))
    sdist, _ = build("sdist", folder / "checkout", folder / "out")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    wheel, _ = build("wheel", tree, folder / "out")
    prefix, empty = folder / "environment", folder / "empty"
    venv.create(prefix)
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=environment(), check=True, timeout=120)
    # Torch and what it needs come from this environment. Python does not process .pth files of a folder that is named
    # in one, so that an editable installation of hvdbridge there stays out.
    packages = next(prefix.glob("lib/python*/site-packages"))
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    variables = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "CC": "/bin/false", "HVDBRIDGE_CACHE": "cache",
                 "OMP_NUM_THREADS": "1"}  # fmt: skip
    return Built(prefix, empty, variables, sdist, tree, wheel)


def test_source_distribution(installed: Built) -> None:
    """It contains what the package, its tests and its documentation are made of."""
    sources = ("hvdbridge", "tests", "examples", "benchmarks", "docs")
    wanted = {path.relative_to(ROOT) for folder in sources for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    wanted = {path for path in wanted if "__pycache__" not in path.parts and path.suffix != ".so"}
    wanted |= {Path(name) for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "mkdocs.yml")}
    assert not [str(path) for path in sorted(wanted) if not (installed.tree / path).exists()]


def test_wheel(installed: Built) -> None:
    """It is for this platform and any Python, and contains each file of the package and the license."""
    assert installed.wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    package = [path for path in (ROOT / "hvdbridge").rglob("*.*") if path.suffix in (".py", ".pyi", ".typed", ".c")]
    assert names.issuperset(str(path.relative_to(ROOT)) for path in package)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    if platform.machine() == "x86_64":
        assert sum(name.endswith(".so") for name in names) == 4


def test_extras(installed: Built) -> None:
    """docs/how-to/install.md has a row for each extra."""
    with zipfile.ZipFile(installed.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        extras = message_from_bytes(archive.read(name)).get_all("Provides-Extra")
    text = (ROOT / "docs" / "how-to" / "install.md").read_text()
    table = text[text.index("| extra |") :].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(extras or [])


def test_doctor(installed: Built) -> None:
    kernels = json.loads(installed.run("hvdbridge", "doctor", "--json"))["facts"]["kernels"]
    assert installed.prebuilt(kernels["file"]), kernels


def test_two_ranks(installed: Built) -> None:
    """A job by torchrun uses the wheel's modules and its kernels, which give the bits of torch's operations."""
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    native, operations = (
        installed.ranks(*torchrun, HVDBRIDGE_KERNELS=kernels, HVDBRIDGE_BACKEND="torch")
        for kernels in ("native", "torch")
    )
    for rank in native + operations:
        assert rank["digests"] == native[0]["digests"]
    assert len(set(native[0]["digests"].values())) == 4, "each policy trains in its own way"
    for rank in native:
        assert installed.prebuilt(rank["kernels"])
    assert {rank["kernels"] for rank in operations} == {None}
    assert not (installed.empty / "cache" / "kernels").exists()


def test_wheel_without_a_compiler(installed: Built, tmp_path: Path) -> None:
    """It is for any platform, and has no kernels of an earlier build; a node compiles them at first use."""
    assert list((installed.tree / "build").rglob("libnative*.so"))
    wheel, output = build("wheel", installed.tree, tmp_path / "out", CC="/nowhere/cc")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "each node compiles it at first use: [Errno 2] No such file or directory: '/nowhere/cc'" in output
