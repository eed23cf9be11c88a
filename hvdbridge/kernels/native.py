"""The CPU's kernels in C (native.c): compiled by this machine's compiler when first needed, and kept in the cache.

Rules:

1. The bits are those of the torch operations, which are what runs without a compiler, on other devices and for other
   types. So ranks need not agree on who has a compiler, and tests compare both. Products of a rank's own matrices have
   bits of their own: nobody else makes them again.
2. What codes and packs is asked for by way of :mod:`.fused`, which has it for GPUs, too.
3. ``HVDBRIDGE_KERNELS=torch`` leaves the compiler alone; ``native`` makes its failure an error; ``auto``, the default,
   warns if there is none.
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
F32, F64 = ctypes.c_float, ctypes.c_double
FUNCTIONS = {
    "lay_blocks": (None, P, I64, I64, P),
    "linear_encode": (None, P, P, I64, I64, I32, I32, I32, I32, I32, I32, U32, U32, P, I64, P, I64, I32),
    "linear_decode": (None, P, I64, P, I64, I64, I64, P, I64, I32, I32, P, I32),
    "sign_encode": (None, P, P, I64, I64, I32, P, I64, P, I64, I32),
    "sign_decode": (None, P, I64, P, I64, I64, I64, P, I64, I32, P, I32),
    "ternary_encode": (None, P, P, I64, P, U32, U32, P),
    "float8_encode": (None, P, P, I64, I32, I32, F32, I32, U32, U32, P, I64, P, I64, I32),
    "float8_decode": (None, P, I64, P, I64, I64, I64, P, I64, I32, I32, P, I32),
    "power_encode": (None, P, P, I64, U32, U32, P, I64, I64, I32),
    "power_decode": (None, P, I64, I64, I64, I64, P, I64, P, I32),
    "squeeze": (None, P, I64, I32, P),
    "spread": (None, P, I64, I32, P),
    "hash_bits": (None, P, I64, U32, U32, P),
    "project_rows": (None, P, I64, I64, I64, I64, P, I64, I64, P, I64),
    "project_columns": (None, P, I64, I64, I64, I64, P, I64, I64, P, I64),
    "outer": (None, P, I64, I64, I64, I64, P, I64, P, I64, I64, I32),
    "orthonormal": (None, P, I64, I64, F64, F64, F64, F64, P, P),
    "weigh_and_add": (None, P, F32, P, I64, P),
    "move_runs": (None, P, P, P, I64, I64, I32),
    "reaching": (I64, P, I64, I32, I32, P, I64),
}
"""Result and parameters."""
TYPES = (torch.float32, torch.uint8, torch.int8, torch.bool, torch.int32, torch.int64)
logger = logging.getLogger("hvdbridge")


def compiled(*tensors: Tensor) -> ctypes.CDLL | None:
    """The functions of native.c, if there are any and all ``tensors`` are as they expect: on a CPU, contiguous, of
    float32 where of floats.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``, and it cannot be compiled.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in TYPES:
            return None
    return _load()


def compiled_if_possible() -> ctypes.CDLL | None:
    """The functions of native.c, for those who lose little without: nobody hears of a compiler that is missing."""
    found = _found()
    return None if isinstance(found, Exception) else found


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    found = _found()
    if not isinstance(found, Exception):
        return found
    reason = getattr(found, "stderr", None) or found
    if Config.from_environment().kernels == "native":
        raise ConfigurationError(
            f"HVDBRIDGE_KERNELS=native: hvdbridge/kernels/native.c does not compile: {reason}. Install a C "
            "compiler, name one in CC, or unset the variable: torch's operations do the same, more slowly."
        ) from found
    logger.warning(
        "compression takes several times as long without a C compiler (install one, or set HVDBRIDGE_KERNELS=torch)"
        ": torch's operations, as native.c does not compile: %s", reason,
    )  # fmt: skip
    return None


@lru_cache(maxsize=1)
def _found() -> ctypes.CDLL | OSError | subprocess.SubprocessError | None:
    """None: it is not wanted. An error: why there is none."""
    config = Config.from_environment()
    if config.kernels == "torch":
        return None
    try:
        found = library(config.cache)
    except (OSError, subprocess.SubprocessError) as error:
        return error
    for name, (result, *parameters) in FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, parameters
    return found


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
