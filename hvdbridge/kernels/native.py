"""The CPU's kernels in C (native.c): this machine's compiler compiles them at first use, and the cache keeps them.

Rules:

1. The bits are those of the torch operations, which run without a compiler, on other devices and for other types. So
   ranks need not agree on who has a compiler, and tests compare both.
2. Codes and packing use them by way of :mod:`.fused`, which has the kernels of GPUs, too.
3. ``HVDBRIDGE_KERNELS=torch`` leaves the compiler alone; ``native`` makes its failure an error; ``auto``, the default,
   warns.
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
# Without trapping-math and errno a rounding is one instruction; neither changes a result.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
P, I32, I64, U32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
F32 = ctypes.c_float
LINEAR, TERNARY, SIGN, FLOAT8, POWER = range(5)
"""Kinds of codes."""
Fields = Mapping[str, int]
"""What kernels must know of a code, by the names of :class:`Job`; empty: kernels do not know it."""


class Job(ctypes.Structure):
    """native.c's ``struct job``: what to encode or decode; 0 where it says nothing."""

    _fields_ = (
        *((name, P) for name in ("vector", "table", "codes", "scales")),
        *((name, I64) for name in ("blocks", "width", "rows", "messages", "length", "code_stride", "scale_stride")),
        *((name, I32) for name in ("kind", "bits", "levels", "offset", "mask", "l2", "random")),
        *((name, I32) for name in ("digits", "bias", "top", "keep_rest", "add")),
        *((name, U32) for name in ("low", "high")),
    )


FUNCTIONS = {
    "lay_blocks": (None, P, I64, I64, P),
    "encode": (None, P),
    "decode": (None, P),
    "squeeze": (None, P, I64, I32, P),
    "spread": (None, P, I64, I32, P),
    "hash_bits": (None, P, I64, U32, U32, P),
    "outer": (None, P, I64, I64, P, P, I64, I32),
    "weigh_and_add": (None, P, F32, P, I64, P),
    "move_runs": (None, P, P, P, I64, I64, I32),
    "reaching": (I64, P, I64, I32, I32, P, I64),
}
"""Result and parameters."""
TYPES = (torch.float32, torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64)
logger = logging.getLogger("hvdbridge")


def compiled(*tensors: Tensor) -> ctypes.CDLL | None:
    """The functions of native.c, if they compile and all ``tensors`` suit them: on a CPU, contiguous, of float32 where
    of floats.

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
        found = library(config.cache)
    except (OSError, subprocess.SubprocessError) as error:
        does_not_work("hvdbridge/kernels/native.c", "a C compiler, or name one in CC", error)
        return None
    for name, (result, *parameters) in FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, parameters
    return found


def does_not_work(what: str, remedy: str, error: Exception) -> None:
    """Warn that torch's operations do the work of ``what``.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``.
    """
    reason = getattr(error, "stderr", None) or f"{type(error).__name__}: {error}"
    if Config.from_environment().kernels == "native":
        raise ConfigurationError(
            f"HVDBRIDGE_KERNELS=native: {what}: compilation failed: {reason}. Install {remedy}, or unset the variable: "
            "torch's operations do the same, more slowly."
        ) from error
    logger.warning(
        "compression takes several times as long with torch's operations in place of %s (install %s; or set "
        "HVDBRIDGE_KERNELS=torch): compilation failed: %s", what, remedy, reason,
    )  # fmt: skip


def library(folder: Path) -> ctypes.CDLL:
    """Load what was compiled; whoever comes first compiles it, and puts it in its place in one move.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails (its words are in ``stderr``).
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    words = [*compiler, *FLAGS, native, "-x", "c", str(SOURCE), "-lm"]
    key = hashlib.sha256("\0".join([SOURCE.read_text(), *words, _processor()]).encode()).hexdigest()[:16]
    target = folder / "kernels" / f"native-{key}.so"
    if target.exists():
        return ctypes.CDLL(str(target))
    with tempfile.TemporaryDirectory(prefix="hvdbridge-") as place:
        made, started = Path(place) / target.name, time.perf_counter()
        subprocess.run([*words, "-o", str(made)], check=True, capture_output=True, text=True, timeout=60)
        logger.info("native.c took %.1f s to compile", time.perf_counter() - started)
        found = ctypes.CDLL(str(made))
        with suppress(OSError):  # a home that cannot be written: then everybody compiles
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix=f"{target.name}.", dir=target.parent)
            os.close(handle)
            shutil.copy(made, partial)
            os.replace(partial, target)
    return found


def _processor() -> str:
    """What a home that several machines share must tell apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # x86; ARM
    return "\n".join(next((line for line in lines if line.startswith(what)), "") for what in names)
