"""Child processes that do not outlive this one, and whose failure says what went wrong."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hvdbridge.errors import HvdbridgeError

TAIL_LINES = 15


def pip(action: str) -> list[str]:
    """The beginning of a pip command for this interpreter's environment."""
    return [sys.executable, "-m", "pip", action, "--disable-pip-version-check", "--no-input"]


def before_pythonpath(directory: Path) -> str:
    """``PYTHONPATH`` with ``directory`` in front of what the user has there (a site's torch, say)."""
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def call(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    log: TextIO | None = None,
    watch: Callable[[str], None] = lambda line: None,
    timeout: float | None = None,
) -> None:
    """Run a command, its output to ``log`` and line by line to ``watch``.

    The command gets its own process group, which ends with this call however that comes about: by an
    exception, a timeout or Ctrl-C.

    Raises:
        HvdbridgeError: it failed or took too long; the message has the first error and the tail of its output.
    """
    error: list[str] = []
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    child = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late = threading.Event()

    def expire() -> None:
        late.set()
        _end(child)

    alarm = threading.Timer(timeout or threading.TIMEOUT_MAX, expire)
    alarm.daemon = True
    alarm.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line)
            if len(error) < TAIL_LINES and (error or re.search(r"(?i)(^|\s)(fatal |cmake )?error( at|:)", line)):
                error.append(line)
            if log is not None:
                log.write(line)
                log.flush()
            watch(line)
        status = child.wait()
    finally:
        alarm.cancel()
        _end(child)
        if child.stdout is not None:
            child.stdout.close()
    if status:
        how = f"took more than {timeout:g} s" if late.is_set() else f"failed with status {status}"
        shown = "".join(tail)
        if error and error[0] not in tail:
            shown = f"{''.join(error)}[...]\n{shown}"
        where = f"\nAll of it: {log.name}" if log is not None else ""
        raise HvdbridgeError(f"{shlex.join(command)} {how}:\n\n{shown}{where}")


def _end(child: subprocess.Popen[str]) -> None:
    """End the child's process group: politely, so that horovodrun ends its ranks, then by force."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
