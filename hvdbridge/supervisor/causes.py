"""Classification of errors: original causes, and consequences of another rank's failure."""

from __future__ import annotations

import re

SECONDARY = re.compile(
    r"connection (was )?(reset|refused|closed|aborted|lost)|(closed|reset) by (remote )?peer|broken pipe|timed? ?out|"
    r"socket (was )?closed|peer (has )?(closed|failed)|been shut ?down|unexpected end of|remote process exited",
    re.IGNORECASE,
)


def secondary(error: BaseException) -> bool:
    """Return whether ``error`` looks like a consequence of another rank's end, by its type and text in each backend.

    >>> secondary(RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:5123")), secondary(KeyError("x"))
    (True, False)
    """
    below = type(error).__module__.partition(".")[0] in ("horovod", "mpi4py")
    return below or isinstance(error, (ConnectionError, TimeoutError)) or bool(SECONDARY.search(str(error)))


OUT_OF_TIME = re.compile(r"Timed out waiting \d+ms|collective operation timeout")

FOREIGN_LIMIT = (
    " (The limit of a process group that the script itself made, which hb.patience and HVDBRIDGE_TIMEOUT_SECONDS do "
    "not move. Give init_process_group or new_group a longer timeout, or leave the start to hb.init().)"
)
"""Hint for timeouts of torch's Gloo and NCCL. Groups that hvdbridge creates have a limit of a day."""


def describe(error: BaseException) -> str:
    """Return a one-line description of the error for the other ranks, with a hint for a foreign time limit."""
    text = " ".join(str(error).split())
    hint = FOREIGN_LIMIT if OUT_OF_TIME.search(text) else ""
    return f"failed: {type(error).__name__}{': ' if text else ''}{text[:1000]}{hint}"
