"""``HOROVOD_TIMELINE``: a trace of the negotiation and execution of operations, for Chrome and Perfetto.

Each operation has a row with its negotiation (``NEGOTIATE_ALLREDUCE``: from this rank's call until all ranks have
called) and its execution (``ALLREDUCE``). Ranks do not negotiate gradients of a DistributedOptimizer: ``QUEUE`` is from
the arrival of a gradient until the optimizer submits its bucket. Only rank 0 writes a trace.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class Timeline:
    """An open trace file. It is complete JSON after :meth:`close`, and Chrome can read it before."""

    def __init__(self, path: str | Path, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._lock = threading.RLock()
        self._rows: dict[str, int] = {}
        self._start = time.monotonic()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  (open until close())
        self._separator = "[\n"  # written before the next event
        started = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "hvdbridge", **started}})

    def negotiated(self, name: str, kind: str, since: float, until: float) -> None:
        """Write the negotiation of an operation: submitted at ``since``, ready at ``until`` (monotonic seconds)."""
        self._span(name, f"NEGOTIATE_{kind.upper()}", since, until, {})

    def queued(self, name: str, since: float, until: float) -> None:
        """Write the waiting time of a gradient: arrived at ``since``, bucket submitted at ``until``."""
        self._span(name, "QUEUE", since, until, {})

    def executed(self, name: str, kind: str, since: float, args: dict[str, Any]) -> None:
        """Write the execution of an operation: begun at ``since``, complete now."""
        self._span(name, kind.upper(), since, time.monotonic(), args)

    def cycle(self) -> None:
        """Mark that requests are sent now."""
        if self.mark_cycles:
            now = self._micros(time.monotonic())
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": now})

    def close(self) -> None:
        """Complete and close the file. Harmless when repeated."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _span(self, name: str, activity: str, since: float, until: float, args: dict[str, Any]) -> None:
        with self._lock:  # several threads write spans
            if name not in self._rows:
                self._rows[name] = row = len(self._rows) + 1
                self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
        begin = self._micros(since)
        span = {"name": activity, "ph": "X", "pid": 0, "tid": self._rows[name], "ts": begin}
        span["dur"] = self._micros(until) - begin
        self._write(span | {"args": args} if args else span)

    def _micros(self, seconds: float) -> int:
        """Convert a monotonic time to microseconds since the start of the trace."""
        return max(int((seconds - self._start) * 1e6), 0)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(self._separator + json.dumps(event))
                self._separator = ",\n"
                self._file.flush()
