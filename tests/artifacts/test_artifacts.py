"""What ``make dist`` has built, installed by pip in new environments as users install it: ``make test-dist``.

The wheel is installed without a C compiler, and the source distribution with one. Neither is there when they run. Pip
takes its settings from PIP_* variables: the home directory, and with it pip's configuration, is empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.test_dist import ROOT, Installed, environment

LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "2"),
    "mpiexec": ("mpiexec", "-n", "2", "python"),
}
BACKENDS = ("torch", "mpi")


@pytest.fixture(scope="session")
def pip_cache() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hvdbridge-pip-") as folder:
        yield folder


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, pip_cache: str) -> Iterator[Installed]:
    (archive,) = (ROOT / "dist").glob("*.whl" if request.param == "wheel" else "*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="hvdbridge-dist-") as folder:
        prefix, empty, home = (Path(folder, name) for name in ("environment", "empty", "home"))
        venv.create(prefix, with_pip=True)
        empty.mkdir()
        home.mkdir()
        bare = {"PATH": f"{prefix}/bin", "CC": "", "HOME": str(home), "XDG_CACHE_HOME": "", "OMP_NUM_THREADS": "1"}
        compiler = {} if request.param == "wheel" else {"PATH": f"{prefix}/bin:{os.environ['PATH']}"}
        install = [f"{prefix}/bin/pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{archive}[mpich]"]
        pip = environment(**bare | {"PIP_CACHE_DIR": pip_cache} | compiler)
        done = subprocess.run(install, cwd=empty, env=pip, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Installed(prefix, empty, bare)


def test_requirements(installed: Installed) -> None:
    installed.run("pip", "check")


def test_doctor(installed: Installed) -> None:
    """It finds the installed kernels, and that both backends work under both launchers."""
    found = json.loads(installed.run("hvdbridge", "doctor", "--json"))
    assert installed.prebuilt(found["facts"]["kernels"]["file"]), found["facts"]["kernels"]
    works = {(cell["launcher"], cell["backend"]) for cell in found["cells"] if cell["works"]}
    assert works.issuperset((launcher, backend) for launcher in LAUNCHERS for backend in BACKENDS)


def test_two_ranks(installed: Installed) -> None:
    """All kernels are the installed ones, and all jobs end with the same bits. Nothing is compiled."""
    found = {
        (launcher, backend): installed.ranks(*words, HVDBRIDGE_BACKEND=backend)
        for launcher, words in LAUNCHERS.items()
        for backend in BACKENDS
    }
    (digests,) = {json.dumps(rank["digests"]) for ranks in found.values() for rank in ranks}
    assert len(set(json.loads(digests).values())) == 4, "each policy trains in its own way"
    for ranks in found.values():
        for rank in ranks:
            assert installed.prebuilt(rank["kernels"])
    assert not list(Path(installed.variables["HOME"]).rglob("*.so"))
