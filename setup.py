"""Compile the kernels in C into wheels. All else is in setup.cfg.

Kernels are loaded by ctypes and use no interface of Python, so that a wheel is for a platform and any Python. Without
a C compiler the wheel is for any platform, and each node compiles at first use (hvdbridge/kernels/native.py).
"""

import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = "hvdbridge/kernels"


class BuildPy(build_py):
    """Compile the kernels beside the package's modules. Editable installations compile at first use."""

    def run(self):
        super().run()
        if self.editable_mode or sys.platform != "linux":
            return
        folder = Path(self.build_lib, KERNELS)
        for old in folder.glob("libnative*.so"):  # an earlier build in this tree, perhaps of other sources
            old.unlink()
        try:
            runpy.run_path(f"{KERNELS}/build.py")["prebuild"](folder)
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or error
            self.warn(f"native.c is not compiled, so that each node compiles it at first use: {reason}")


class Wheel(bdist_wheel):
    """Name the platform of a wheel that contains compiled kernels."""

    def get_tag(self):
        compiled = any(Path(self.bdist_dir, KERNELS).glob("libnative*.so"))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_") if compiled else "any"
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
