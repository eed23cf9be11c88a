"""A guard process that watches one rank during MPI_Init under MPI's own launcher, until it reaches the job's helper.

MPI_Init holds the GIL and waits for all ranks without a time limit. No thread of the rank can act meanwhile, so a
separate process watches.

Rules:

1. The guard ends when the rank releases it or ends. At the time limit it prints the reason and kills the rank.
2. It kills the rank early when another rank of this host has ended. Launchers ignore a process that ends without a call
   of MPI_Init, whatever its status.
3. A rank that ends before its release leaves no shared-memory segment. Only the maps of a live process show its
   segments, and a launcher may kill the rank at any moment. So MPI_Init begins after the guard has started, and the
   guard reads the maps when a new segment appears. A rank killed within a tick after that may still leave one.
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
MAP_READS = 10  # ticks in which maps are read after a segment appears, since it is created first and mapped later
LOST_RANK_SECONDS = 2.0  # gives a launcher time to end the job itself, with its own message
WATCHING = b"."
MPI_RUNS, RELEASED = b"s", b"m"
LAUNCHER_PROCESSES = ("hydra_pmi_proxy", "slurmstepd", "orted", "prted", "prterun", "mpirun", "mpiexec")
"""Names of launcher processes whose children are the ranks of this host, one process for each rank."""


class Guard:
    """Watches this process, one of ``local_size`` (-1: unknown) on this host, for ``limit`` seconds or until released.

    Raises:
        RendezvousError: the guard process does not start.
    """

    def __init__(self, limit: float, label: str, local_size: int) -> None:
        self._process = subprocess.Popen(
            isolated(__name__, str(os.getpid()), str(os.getppid()), str(limit), label, str(local_size)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if not self._process.stdout.read(len(WATCHING)):
            raise RendezvousError(f"{label}: the process that watches MPI_Init ended at once; its error stands above")

    def started(self) -> None:
        """Notify the guard that MPI_Init has returned; the connection to the helper comes next."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(MPI_RUNS)
            self._process.stdin.flush()

    def release(self) -> None:
        """End the guard: all ranks are connected. Further calls do nothing."""
        with suppress(BrokenPipeError, ValueError):
            self._process.communicate(RELEASED)


def watch(pid: int, parent: int, limit: float, label: str, local_size: int) -> None:
    """Watch process ``pid``, a child of ``parent``; the guard's main loop. The end of stdin is the end of the rank."""
    segments: set[str] = set()
    names: set[str] = set()
    reads_left = 0
    unfinished = "MPI_Init did not return"
    os.write(1, WATCHING)
    started = last_complete = last_poll = time.monotonic()
    while True:
        if names != (names := all_segments()):
            reads_left = MAP_READS
        if reads_left:
            reads_left -= 1
            segments |= segments_of(pid)
        if select.select([0], [], [], TICK_SECONDS)[0]:
            message = os.read(0, 1)
            if message == MPI_RUNS:
                unfinished = "hvdbridge's helper was not met by all ranks"
                continue
            if not message:
                unlink_segments(segments)
            return
        now = time.monotonic()
        if now < last_poll + POLL_SECONDS:
            continue
        last_poll = now
        segments |= segments_of(pid)
        if count_living_ranks(parent, local_size) >= local_size:
            last_complete = now
        if now >= started + limit or now >= last_complete + LOST_RANK_SECONDS:
            break
    reason = (
        f"within {limit:g} s. Look for an earlier error of theirs; if they only start slowly, "
        "raise HVDBRIDGE_START_SECONDS."
        if now >= started + limit
        else f"because a rank is gone: of this host's {local_size} processes one has ended without hb.init(). "
        "Look for its error above."
    )
    os.write(2, f"hvdbridge: {label}: {unfinished} {reason}\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    unlink_segments(segments)


def count_living_ranks(parent: int, default: int) -> int:
    """Return how many children of the launcher process ``parent`` are alive, or ``default`` if that is unknown."""
    try:
        if Path(f"/proc/{parent}/comm").read_text().strip() not in LAUNCHER_PROCESSES:
            return default
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return default
    return sum(_is_alive(child) for child in children)


def _is_alive(pid: str) -> bool:
    """Return whether a process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
