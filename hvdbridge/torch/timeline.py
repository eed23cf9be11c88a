"""``HOROVOD_TIMELINE``: a trace of each operation's waiting and execution, which Chrome and Perfetto show.

One row per operation shows its negotiation (``NEGOTIATE_ALLREDUCE``: from this rank's call until all ranks have called)
and its execution (``ALLREDUCE``). Ranks do not negotiate gradients of a DistributedOptimizer: ``QUEUE`` is from the
arrival of a gradient until the optimizer hands in its bucket. Only rank 0 writes a trace.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class Timeline:
    """An open trace; the file is complete JSON after :meth:`close`, and readable by Chrome before."""

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._start = time.monotonic()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (open until close())
        self._before = "[\n"  # the next event
        started = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "hvdbridge", **started}})

    def negotiated(self, name: str, kind: str, since: float, until: float) -> None:
        """The operation was submitted at ``since`` (monotonic clock) and found ready at ``until``."""
        self._span(name, f"NEGOTIATE_{kind.upper()}", since, until, {})

    def queued(self, name: str, since: float, until: float) -> None:
        """A gradient arrived at ``since``; its bucket was handed in at ``until``."""
        self._span(name, "QUEUE", since, until, {})

    def executed(self, name: str, kind: str, since: float, args: dict[str, Any]) -> None:
        """The operation began at ``since`` and is complete now."""
        self._span(name, kind.upper(), since, time.monotonic(), args)

    def cycle(self) -> None:
        """Requests are sent now."""
        if self.mark_cycles:
            at = self._micros(time.monotonic())
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at})

    def close(self) -> None:
        """End the file. Harmless when repeated."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _span(self, name: str, activity: str, since: float, until: float, args: dict[str, Any]) -> None:
        if name not in self._rows:
            self._rows[name] = row = len(self._rows) + 1
            self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
        begin = self._micros(since)
        span = {"name": activity, "ph": "X", "pid": 0, "tid": self._rows[name], "ts": begin}
        span["dur"] = self._micros(until) - begin
        self._write(span | {"args": args} if args else span)

    def _micros(self, at: float) -> int:
        return max(int((at - self._start) * 1e6), 0)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(self._before + json.dumps(event))
                self._before = ",\n"
                self._file.flush()
