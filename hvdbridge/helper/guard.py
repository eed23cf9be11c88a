"""Watches a rank through MPI_Init under MPI's own launcher, where the job's helper is still to come.

MPI_Init holds the GIL and waits for all ranks without a limit, so no thread of the rank can act: a process does.

Rules:

1. It ends when it is released, when the rank ends, or at the limit; then it says so and ends the rank.
2. A rank that ends before it is released leaves no shared-memory segment.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from hvdbridge.helper.processes import segments_of, unlink_segments
from hvdbridge.helper.start import isolated

POLL_SECONDS = 0.1


class Guard:
    """Starts to watch this process; ``text`` is said if :meth:`release` does not come within ``limit`` seconds."""

    def __init__(self, limit: float, text: str) -> None:
        self._process = subprocess.Popen(
            isolated("hvdbridge.helper.guard", str(os.getpid()), str(limit), text),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def release(self) -> None:
        """Harmless when repeated."""
        with suppress(BrokenPipeError, ValueError):
            self._process.communicate(b"released")


def watch(pid: int, limit: float, text: str) -> None:
    """The guard's process; standard input is the rank's end of the rope."""
    segments: set[str] = set()
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        segments |= segments_of(pid)
        if select.select([0], [], [], POLL_SECONDS)[0]:
            if not os.read(0, 1):
                unlink_segments(segments)
            return
    os.write(2, f"hvdbridge: {text}\n".encode())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    unlink_segments(segments)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
