"""The CPU's kernels in C (native.c). A wheel contains them; elsewhere each node compiles them once and keeps them.

Rules:

1. The kernels give the bits of the torch operations, which run without a compiler, on other devices and for other
   types. So some ranks may lack a compiler, and tests compare both.
2. Codes and packing call these kernels through :mod:`.fused`, which also has the kernels for GPUs.
3. With ``HVDBRIDGE_KERNELS=torch`` no compiler runs. With ``native`` a failure to compile is an error; with ``auto``,
   the default, it is a warning.
4. One process of a node compiles, under a lock, and the others wait. Nodes share neither the result nor the lock,
   because network file systems may not support locks and their nodes' processors differ.
5. A failure to compile counts for the processes that have imported this module before it: the other ranks of the job.
   A later job tries again.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hvdbridge.config import Config, own_directory
from hvdbridge.errors import ConfigurationError
from hvdbridge.kernels import build

WAIT_SECONDS = 90.0
"""Time limit for a process that waits until another one of its node has compiled; :mod:`.build` allows that 60 s."""
COMPILER = "a C compiler, or name one in CC"
IMPORTED = time.time()
MOUNTS = Path("/proc/self/mounts")
NODE_FILE_SYSTEMS = (
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "fuse.fuse-overlayfs",
)  # fmt: skip
"""Types of file systems, as in :data:`MOUNTS`, that belong to one node."""
SHARED_FILE_SYSTEMS = (
    "nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "wekafs", "panfs", "pvfs2", "dvs", "gfs2", "ocfs2", "cifs",
    "smb3", "smbfs", "afs", "fuse.ceph", "fuse.ceph-fuse", "fuse.daos", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.mfs", "fuse.s3fs", "fuse.sshfs",
)  # fmt: skip
"""Types of file systems that nodes may share. A type in neither set may be a sandbox's own."""
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
        report_unavailable("hvdbridge/kernels/native.c", COMPILER, error)
        return None
    for name, (result, *parameters) in FUNCTIONS.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, parameters
    return native


def report_unavailable(name: str, remedy: str, error: Exception) -> None:
    """Warn that the kernels ``name`` do not work, so that torch's operations replace them.

    Args:
        remedy: what the user should install, unless ``error`` is a ConfigurationError.

    Raises:
        ConfigurationError: ``HVDBRIDGE_KERNELS=native``.
    """
    remedy = remedy_for(error, remedy)
    if Config.from_environment().kernels == "native":
        raise ConfigurationError(
            f"HVDBRIDGE_KERNELS=native: {name}: compilation failed: {reason(error)}. Either {remedy}, or unset "
            "the variable: torch's operations do the same, more slowly."
        ) from error
    logger.warning(
        "compression takes several times as long with torch's operations in place of %s (%s; or set "
        "HVDBRIDGE_KERNELS=torch): compilation failed: %s", name, remedy, reason(error),
    )  # fmt: skip


def remedy_for(error: Exception, install: str = COMPILER) -> str:
    """Return what the user should do: find a directory after a ConfigurationError, else install ``install``."""
    if isinstance(error, ConfigurationError):
        return "set HVDBRIDGE_CACHE to a directory of this node"
    return f"install {install}"


def reason(error: Exception) -> str:
    """Return a compiler's messages, or else the error's."""
    messages = getattr(error, "stderr", None)  # bytes after a timeout
    return messages if messages and isinstance(messages, str) else f"{type(error).__name__}: {error}"


def library(cache: Path) -> ctypes.CDLL:
    """Load the wheel's kernels, or those in ``cache``, after compiling them unless another process of this node did.

    Raises:
        OSError, subprocess.SubprocessError: there is no compiler, or it fails (``stderr`` has its output).
        ConfigurationError: no directory of this node can keep the kernels.
    """
    if prebuilt := _prebuilt(build.SOURCE.parent):
        return ctypes.CDLL(str(prebuilt))
    command = build.command(build.THIS_PROCESSOR)
    key = hashlib.sha256("\0".join([build.SOURCE.read_text(), *command, _processor()]).encode()).hexdigest()[:16]
    target = _node_folder(cache) / f"native-{key}.so"
    lock = target.with_suffix(".lock")
    if found := _loaded(target):
        return found
    with _locked(lock):
        if found := _loaded(target):
            return found
        if (failure := lock.read_text()) and lock.stat().st_mtime > IMPORTED:
            raise OSError(f"another process of this node could not compile: {failure}")
        try:
            return _compile(command, target)
        except (OSError, subprocess.SubprocessError) as error:
            lock.write_text(reason(error))
            raise


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Load the library ``path``; return None if it is missing or damaged."""
    if path.exists():
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


def _compile(command: list[str], target: Path) -> ctypes.CDLL:
    started = time.perf_counter()
    # Its own directory, in case that nodes share files after all, or that locks have no effect.
    prefix = f"partial-{socket.gethostname()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as own:
        build.run(command, Path(own, target.name))
        os.replace(Path(own, target.name), target)  # a process that does not wait sees the complete file or none
    logger.info("native.c took %.1f s to compile", time.perf_counter() - started)
    return ctypes.CDLL(str(target))


def _prebuilt(folder: Path) -> Path | None:
    """Return the library in ``folder`` with the most instruction-set extensions that this processor has, or None."""
    flags = set(_processor().split())
    supported = [path for path in folder.glob("libnative*.so") if flags.issuperset(path.stem.split("-")[1:])]
    return max(supported, key=lambda path: len(path.stem.split("-")), default=None)


def _node_folder(cache: Path) -> Path:
    """Return the directory of this node's compiled kernels, after creating it.

    It is below ``cache``, else below the temporary directory, else below /dev/shm. Each is used only if this user can
    write it, it is not mounted with noexec, and nodes do not share it. Of an unknown file system ``cache``, which is
    often on a network, is taken to be shared, and the others are not.

    Raises:
        ConfigurationError: none is possible, or the directory belongs to another user.
    """
    refused = []
    temporary, memory = (Path(root, f"hvdbridge-{os.getuid()}") for root in (tempfile.gettempdir(), "/dev/shm"))
    for base in (cache, temporary, memory):
        folder = base.absolute() / "kernels"
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        kind = _file_system(existing)
        if not os.access(existing, os.W_OK | os.X_OK):
            refused.append(f"{existing} cannot be written")
        elif os.statvfs(existing).f_flag & os.ST_NOEXEC:
            refused.append(f"{existing} is mounted with noexec")
        elif kind in SHARED_FILE_SYSTEMS or (base is cache and kind not in NODE_FILE_SYSTEMS):
            refused.append(f"{existing} is on {kind or 'an unknown file system'}, which nodes may share")
        else:
            if base is not cache:
                own_directory(base)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise ConfigurationError(f"No directory of this node can keep compiled kernels: {'; '.join(refused)}")


def _file_system(path: Path) -> str:
    """Return the type of the file system of ``path``, as in Linux's :data:`MOUNTS`; empty if it is not known."""
    try:
        mounts = [line.split() for line in MOUNTS.read_bytes().splitlines()]
    except OSError:
        return ""
    # A later mount hides an earlier one at the same point.
    types = {os.fsdecode(mount[1].replace(rb"\040", b" ")): os.fsdecode(mount[2]) for mount in mounts}
    resolved = path.resolve()
    return next((types[str(p)] for p in (resolved, *resolved.parents) if str(p) in types), "")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``. The system releases the lock of a process that ends.

    Raises:
        TimeoutError: another process has held it for :data:`WAIT_SECONDS`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    with path.open("a") as file:  # it may contain the last failure
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
