"""Watches a rank through MPI_Init under MPI's own launcher, and until it has met the job's helper.

MPI_Init holds the GIL and waits for all ranks without a limit, so no thread of the rank can act: a process does.

Rules:

1. It ends when it is released, when the rank ends, or at the limit; then it prints why and ends the rank.
2. It ends the rank early when another rank of this host is gone: launchers do not mind a process that ends
   without having called MPI_Init, whatever its status.
3. A rank that ends before it is released leaves no shared-memory segment. Which are its own is only seen while it
   lives, and a launcher may kill it at any moment: MPI_Init begins when the guard watches, and what the rank's maps
   say is read as soon as a new name appears. A rank killed in the millisecond in which it makes one may still leave it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hvdbridge.errors import RendezvousError
from hvdbridge.supervisor.processes import all_segments, segments_of, unlink_segments
from hvdbridge.supervisor.spawn import isolated

POLL_SECONDS = 0.1
TICK_SECONDS = 0.001
LOOKS = 10  # ticks in which maps are read after a name appeared: it is created first, mapped then
GONE_SECONDS = 2.0  # a launcher that ends the job itself, with a message of its own, comes first
WATCHES = b"."
STARTED, MET = b"s", b"m"
PARENTS = ("hydra_pmi_proxy", "slurmstepd", "orted", "prted", "prterun", "mpirun", "mpiexec")
"""Processes whose children are this host's ranks, one each."""


class Guard:
    """Watches this process, one of ``local_size`` (-1: unknown) on this host, until :meth:`release`.

    Raises:
        RendezvousError: its process does not start.
    """

    def __init__(self, limit: float, who: str, local_size: int) -> None:
        self._process = subprocess.Popen(
            isolated(__name__, str(os.getpid()), str(os.getppid()), str(limit), who, str(local_size)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if not self._process.stdout.read(len(WATCHES)):
            raise RendezvousError(f"{who}: the process that watches MPI_Init ended at once; its error stands above")

    def started(self) -> None:
        """MPI runs; what follows is to meet the helper."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(STARTED)
            self._process.stdin.flush()

    def release(self) -> None:
        """All ranks have met. Harmless when repeated."""
        with suppress(BrokenPipeError, ValueError):
            self._process.communicate(MET)


def watch(pid: int, parent: int, limit: float, who: str, local_size: int) -> None:
    """The guard's process; the end of standard input is the rank's end."""
    segments: set[str] = set()
    names: set[str] = set()
    looks = 0
    waits = "MPI_Init did not return"
    os.write(1, WATCHES)
    started = complete = polled = time.monotonic()
    while True:
        if names != (names := all_segments()):
            looks = LOOKS
        if looks:
            looks -= 1
            segments |= segments_of(pid)
        if select.select([0], [], [], TICK_SECONDS)[0]:
            word = os.read(0, 1)
            if word == STARTED:
                waits = "hvdbridge's helper was not met by all ranks"
                continue
            if not word:
                unlink_segments(segments)
            return
        now = time.monotonic()
        if now < polled + POLL_SECONDS:
            continue
        polled = now
        segments |= segments_of(pid)
        if living_ranks(parent, local_size) >= local_size:
            complete = now
        if now >= started + limit or now >= complete + GONE_SECONDS:
            break
    why = (
        f"within {limit:g} s. Look for an earlier error of theirs; if they only start slowly, "
        "raise HVDBRIDGE_START_SECONDS."
        if now >= started + limit
        else f"because a rank is gone: of this host's {local_size} processes one has ended without hb.init(). "
        "Look for its error above."
    )
    os.write(2, f"hvdbridge: {who}: {waits} {why}\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    unlink_segments(segments)


def living_ranks(parent: int, unknown: int) -> int:
    """How many children of the launcher's ``parent`` process live; ``unknown`` where that cannot be told."""
    try:
        if Path(f"/proc/{parent}/comm").read_text().strip() not in PARENTS:
            return unknown
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return unknown
    return sum(_lives(child) for child in children)


def _lives(pid: str) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
