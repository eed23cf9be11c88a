"""The CPU's kernels in C (native.c). A wheel contains them; elsewhere each node compiles them once and keeps them.

Rules:

1. The kernels give the bits of the torch operations, which run without a compiler, on other devices and for other
   types. So some ranks may lack a compiler, and tests compare both.
2. Codes and packing call these kernels through :mod:`.fused`, which also has the kernels for GPUs.
3. With ``HVDBRIDGE_KERNELS=torch`` no compiler runs. With ``native`` a failure to compile is an error; with ``auto``,
   the default, it is a warning.
4. One process of a node compiles, under a lock, and the others wait. Nodes share neither the result nor the lock,
   because network file systems may not support locks and their nodes' processors differ.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hvdbridge.config import Config, own_directory
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels import build

WAIT_SECONDS = 90.0
"""Time limit for a process that waits until another one of its node has compiled; :mod:`.build` allows that 60 s."""
NODE_FILE_SYSTEMS = {
    0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xF2F52010: "f2fs",
    0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x794C7630: "overlay",
}  # fmt: skip
"""File systems that belong to one node, by the number that Linux's ``statfs`` returns."""
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
    except (OSError, subprocess.SubprocessError, ConfigurationError) as error:
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


def library(cache: Path) -> ctypes.CDLL:
    """Load the wheel's kernels, or those in ``cache``, after compiling them unless another process of this node did.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails (``stderr`` has its output).
        ConfigurationError: the directory that it needs below the temporary directory belongs to another user.
    """
    if prebuilt := _prebuilt(build.SOURCE.parent):
        return ctypes.CDLL(str(prebuilt))
    command = build.command(build.THIS_PROCESSOR)
    key = hashlib.sha256("\0".join([build.SOURCE.read_text(), *command, _processor()]).encode()).hexdigest()[:16]
    target = _node_folder(cache) / f"native-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                partial, started = target.with_suffix(".partial"), time.perf_counter()
                build.run(command, partial)
                os.replace(partial, target)  # a process that does not wait sees the complete file or none
                logger.info("native.c took %.1f s to compile", time.perf_counter() - started)
    return ctypes.CDLL(str(target))


def _prebuilt(folder: Path) -> Path | None:
    """Return the library in ``folder`` with the most instruction-set extensions that this processor has, or None."""
    flags = set(_processor().split())
    supported = [path for path in folder.glob("libnative*.so") if flags.issuperset(path.stem.split("-")[1:])]
    return max(supported, key=lambda path: len(path.stem.split("-")), default=None)


def _node_folder(cache: Path) -> Path:
    """Return where this node keeps compiled kernels: below ``cache``, or else below the temporary directory.

    It is the temporary directory if ``cache`` cannot be written, or may be on a file system that nodes share.
    """
    existing = next(path for path in (cache, *cache.parents) if os.path.exists(path))
    usable = os.access(existing, os.W_OK | os.X_OK) and _file_system(existing) in NODE_FILE_SYSTEMS
    return (cache if usable else own_directory()) / "kernels"


def _file_system(path: Path) -> int:
    """Return the file system's number in Linux's ``struct statfs``; another number on other systems."""
    statfs = (ctypes.c_long * 512)()  # larger than any system's struct
    return statfs[0] if ctypes.CDLL(None).statfs(os.fsencode(path), statfs) == 0 else 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``. The system releases the lock of a process that ends.

    Raises:
        TimeoutError: another process has held it for :data:`WAIT_SECONDS`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {WAIT_SECONDS:g} s") from None
                time.sleep(0.05)
        yield


def _processor() -> str:
    """Describe this processor. On Linux the words include the extensions of its instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # x86; ARM
    return "\n".join(next((line for line in lines if line.startswith(prefix)), "") for prefix in names)
