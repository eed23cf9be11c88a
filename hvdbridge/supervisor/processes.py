"""Identity of the job's processes, and the shared-memory segments that they map, from /proc.

Rules:

1. A pid identifies a process only in its pid namespace and only for its lifetime. So :func:`identity` also contains
   the boot id of the kernel, the pid namespace and the start time of the process.
2. A segment belongs to the job if its name is one that an MPI library gives, AND a process of the job maps it (or the
   name follows from the job's own PMI). Other files in /dev/shm are never removed.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

SHM = Path("/dev/shm")
MPI_SEGMENT = re.compile(r"^(mpich_(shm|vci)_|ucx_shm_|fi_)\w+$")


def identity(pid: int) -> str | None:
    """Return a text that identifies process ``pid`` among all processes of all hosts; None if it does not exist here.

    >>> identity(os.getpid()) == identity(os.getpid()), identity(0)
    (True, None)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {fields[19]}"
    except OSError:  # no such process, or a system without /proc
        return None


def segments_of(pid: int) -> set[str]:
    """Return the names in /dev/shm of the MPI libraries' segments that process ``pid`` maps now."""
    with suppress(OSError):
        mapped = re.findall(rf" {SHM}/(\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
        return {name for name in mapped if MPI_SEGMENT.match(name)}
    return set()


def segments_of_kvs(kvsname: str) -> set[str]:
    """Return the names of MPICH's segments for this PMI kvsname; they contain its hash (FNV-1a)."""
    digest = 2166136261
    for byte in kvsname.encode():
        digest = (digest ^ byte) * 16777619 & 0xFFFFFFFF
    with suppress(OSError):
        return {p.name for kind in ("shm", "vci") for p in SHM.glob(f"mpich_{kind}_{digest:x}_*")}
    return set()


def all_segments() -> set[str]:
    """Return the names in /dev/shm of all segments of MPI libraries, of any process."""
    with suppress(OSError):
        return {name for name in os.listdir(SHM) if MPI_SEGMENT.match(name)}
    return set()


def unlink_segments(names: set[str]) -> None:
    """Remove the segments ``names``, whose processes have ended; names that do not exist are ignored."""
    for name in names:
        with suppress(OSError):
            (SHM / name).unlink()
