"""The CPU's kernels in C (native.c), compiled by this machine's compiler at first use and cached on disk.

Rules:

1. The kernels give the bits of the torch operations, which run without a compiler, on other devices and for other
   types. So some ranks may lack a compiler, and tests compare both.
2. Codes and packing call these kernels through :mod:`.fused`, which also has the kernels for GPUs.
3. With ``HVDBRIDGE_KERNELS=torch`` no compiler runs. With ``native`` a failure to compile is an error; with ``auto``,
   the default, it is a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hvdbridge.config import Config
from hvdbridge.errors import ConfigurationError

SOURCE = Path(__file__).with_name("native.c")
# Without trapping math and errno, rounding is one instruction. Neither option changes a result.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
P, I32, I64, U32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
F32 = ctypes.c_float
LINEAR, TERNARY, SIGN, FLOAT8, POWER = range(5)
"""Kinds of codes, as in native.c."""
Fields = Mapping[str, int]
"""Parameters of a code for the kernels, by the names of :class:`Job`. Empty: no kernel supports the code."""


class Job(ctypes.Structure):
    """native.c's ``struct job``: the arguments of ``encode`` and ``decode``. Fields that are not given are 0."""

    _fields_ = (
        *((name, P) for name in ("vector", "table", "codes", "scales")),
        *((name, I64) for name in ("blocks", "width", "rows", "messages", "length", "code_stride", "scale_stride")),
        *((name, I32) for name in ("kind", "bits", "levels", "offset", "mask", "l2", "random")),
        *((name, I32) for name in ("digits", "bias", "top", "keep_rest", "add")),
        *((name, U32) for name in ("low", "high")),
    )


FUNCTIONS = {
    "fill_block_table": (None, P, I64, I64, P),
    "encode": (None, P),
    "decode": (None, P),
    "pack_codes": (None, P, I64, I32, P),
    "unpack_codes": (None, P, I64, I32, P),
    "hash_bits": (None, P, I64, U32, U32, P),
    "outer": (None, P, I64, I64, P, P, I64, I32),
    "weigh_and_add": (None, P, F32, P, I64, P),
    "copy_runs": (None, P, P, P, I64, I64, I32),
    "threshold_positions": (I64, P, I64, I32, I32, P, I64),
}
"""Result type and parameter types of each function."""
TYPES = (torch.float32, torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64)
logger = logging.getLogger("hvdbridge")


def compiled(*tensors: Tensor) -> ctypes.CDLL | None:
    """Return native.c's functions if they compile and support all ``tensors``, else None.

    They support contiguous CPU tensors whose dtype is in :data:`TYPES`.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and native.c does not compile.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in TYPES:
            return None
    return _load()


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    config = Config.from_environment()
    if config.kernels == "torch":
        return None
    try:
        native = library(config.cache)
    except (OSError, subprocess.SubprocessError) as error:
        report_unavailable("hvdbridge/kernels/native.c", "a C compiler, or name one in CC", error)
        return None
    for name, (result, *parameters) in FUNCTIONS.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, parameters
    return native


def report_unavailable(name: str, remedy: str, error: Exception) -> None:
    """Warn that the kernels ``name`` do not work, so that torch's operations replace them.

    Args:
        remedy: what the user should install.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``.
    """
    reason = getattr(error, "stderr", None) or f"{type(error).__name__}: {error}"
    if Config.from_environment().kernels == "native":
        raise ConfigurationError(
            f"HVDBRIDGE_KERNELS=native: {name}: compilation failed: {reason}. Install {remedy}, or unset the variable: "
            "torch's operations do the same, more slowly."
        ) from error
    logger.warning(
        "compression takes several times as long with torch's operations in place of %s (install %s; or set "
        "HVDBRIDGE_KERNELS=torch): compilation failed: %s", name, remedy, reason,
    )  # fmt: skip


def library(folder: Path) -> ctypes.CDLL:
    """Load native.c from ``folder/kernels``, after compiling it unless an earlier process did.

    The compiled file is moved there atomically, so several processes may compile at once.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails (``stderr`` has its output).
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [*compiler, *FLAGS, native, "-x", "c", str(SOURCE), "-lm"]
    key = hashlib.sha256("\0".join([SOURCE.read_text(), *command, _processor()]).encode()).hexdigest()[:16]
    target = folder / "kernels" / f"native-{key}.so"
    if target.exists():
        return ctypes.CDLL(str(target))
    with tempfile.TemporaryDirectory(prefix="hvdbridge-") as directory:
        built, started = Path(directory) / target.name, time.perf_counter()
        subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, text=True, timeout=60)
        logger.info("native.c took %.1f s to compile", time.perf_counter() - started)
        loaded = ctypes.CDLL(str(built))
        with suppress(OSError):  # the folder may not be writable; then each process compiles
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix=f"{target.name}.", dir=target.parent)
            os.close(handle)
            shutil.copy(built, partial)
            os.replace(partial, target)
    return loaded


def _processor() -> str:
    """Describe this processor, as machines with different processors may share the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # x86; ARM
    return "\n".join(next((line for line in lines if line.startswith(prefix)), "") for prefix in names)
