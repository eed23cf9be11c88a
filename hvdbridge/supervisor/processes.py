"""What /proc tells about the job's processes: identity, and the shared-memory segments that they map.

Rules:

1. A pid means nothing elsewhere: :func:`identity` also holds the kernel's boot, the pid namespace and the
   start time, so a process is never taken for another (other host, other container, pid used again).
2. A segment belongs to the job if one of its processes mapped it (or its name follows from the job's own PMI),
   AND its name is one that an MPI library gives. A user's own file in /dev/shm is never touched.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
OURS = re.compile(r"^(mpich_(shm|vci)_|ucx_shm_|fi_)\w+$")


def identity(pid: int) -> str | None:
    """A text that no other process on any host has; None if there is no such process here.

    >>> identity(os.getpid()) == identity(os.getpid()), identity(0)
    (True, None)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {fields[19]}"
    except OSError:  # gone, or a system without /proc
        return None


def segments_of(pid: int) -> set[str]:
    """Names in /dev/shm of an MPI library's segments that process ``pid`` maps now."""
    with suppress(OSError):
        mapped = re.findall(rf" {SHM}/(\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
        return {name for name in mapped if OURS.match(name)}
    return set()


def segments_of_kvs(kvsname: str) -> set[str]:
    """Names of the segments that MPICH ranks made under this PMI kvsname, by its hash in their names (FNV-1a)."""
    world = 2166136261
    for byte in kvsname.encode():
        world = (world ^ byte) * 16777619 & 0xFFFFFFFF
    with suppress(OSError):
        return {p.name for kind in ("shm", "vci") for p in SHM.glob(f"mpich_{kind}_{world:x}_*")}
    return set()


def all_segments() -> set[str]:
    """Names in /dev/shm of every MPI library's segments, whosever they are."""
    with suppress(OSError):
        return {name for name in os.listdir(SHM) if OURS.match(name)}
    return set()


def unlink_segments(names: set[str]) -> None:
    """Remove segments whose last process is gone; those that their library removed itself are no error."""
    for name in names:
        with suppress(OSError):
            (SHM / name).unlink()
