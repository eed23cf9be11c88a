"""Compile native.c: at first use on a node, and in setup.py for wheels.

setup.py runs this file alone, before torch is installed. Therefore it imports the standard library only.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
# Without trapping math and errno, rounding is one instruction. Neither option changes a result. Contraction would: it
# rounds a product and a sum once, and torch's operations round them one after the other. So would -ffast-math, which
# icx has by default and CC may contain. -fno-fast-math precedes the other options, because it resets them.
FLAGS = ("-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
X86 = platform.machine() == "x86_64"
THIS_PROCESSOR = "-march=native" if X86 else "-mcpu=native"
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = (("avx",), ("avx2", "bmi2"), AVX512, (*AVX512, "avx512vbmi")) if X86 else ((),)
"""Instruction-set extensions of each library in a wheel, by names that compilers and /proc/cpuinfo share. A node whose
processor has none of them compiles."""
TUNING = ("-mtune=skylake",) if X86 else ()
"""By the default tuning some loops of these libraries take longer than those that are compiled for the processor."""


def command(*options: str) -> list[str]:
    """Return the command that compiles native.c with the compiler in ``CC`` (default: cc), without its output."""
    return [*(shlex.split(os.environ.get("CC", "")) or ["cc"]), *FLAGS, *options, "-x", "c", str(SOURCE), "-lm"]


def run(command: list[str], output: Path) -> None:
    """Compile to ``output``.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails (``stderr`` has its output).
    """
    call = [*command, "-o", str(output)]
    subprocess.run(call, check=True, capture_output=True, text=True, errors="replace", timeout=60)


def prebuild(folder: Path) -> None:
    """Compile a library for each of :data:`LEVELS`. Its name contains the extensions, for ``native._prebuilt``."""
    for level in LEVELS:
        name = "-".join(("libnative", *level))  # Python would import native.so in place of native.py
        run(command(*TUNING, *(f"-m{extension}" for extension in level)), folder / f"{name}.so")
