"""Start of the job's helper process, and the address with which the other ranks connect to it.

Rules:

1. The process receives the secret through stdin, the other ranks receive it through the launcher's own channel. It is
   never in argv, in the environment or in a log.
2. The process is a daemon in its own session. It keeps no pipe of the rank that starts it, because launchers wait for
   the end of pipes. Signals to the ranks do not reach it, so it can clean up after them.
3. It runs isolated (-I -S), so that the user's directory, PYTHONPATH and site-packages neither change nor slow it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvdbridge.config import Config
from hvdbridge.errors import RendezvousError
from hvdbridge.supervisor.pmi import pmi_id
from hvdbridge.supervisor.processes import identity

START_SECONDS = 20.0
RUN_MODULE = """import runpy, sys
_, root, module, *arguments = sys.argv
sys.path.insert(0, root)
sys.argv[1:] = arguments
runpy.run_module(module, run_name="__main__")
"""


@dataclass(frozen=True)
class HelperAddress:
    """The helper's host and ports, and the job's secret. ``str()`` and :meth:`parse` convert it to text and back.

    >>> HelperAddress.parse(str(HelperAddress("::1", 5, 6, "s", "j"))).host
    '::1'
    """

    host: str
    port: int
    pmi_port: int
    secret: str = field(repr=False)
    job: str

    def __str__(self) -> str:
        return f"{self.host},{self.port},{self.pmi_port},{self.secret},{self.job}"

    @classmethod
    def parse(cls, text: str) -> HelperAddress:
        """Return the address that ``str()`` has converted to ``text``; raise RendezvousError for any other text."""
        try:
            host, port, pmi_port, secret, job = text.split(",")
            return cls(host, int(port), int(pmi_port), secret, job)
        except ValueError:  # the text is not shown: it may hold the secret
            raise RendezvousError("what came through the launcher is not the address of hvdbridge's helper") from None

    def pmi_environment(self, rank: int, size: int) -> dict[str, str]:
        """Return the variables with which an MPI library with PMI-1 (MPICH, Intel MPI) joins this job as ``rank``."""
        return {
            "PMI_PORT": f"{self.host}:{self.pmi_port}",
            "PMI_ID": str(pmi_id(self.secret, rank)),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(size),
        }


def isolated(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package as an isolated process (rule 3)."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", RUN_MODULE, root, module, *arguments]


def start_helper(host: str, size: int, config: Config) -> HelperAddress:
    """Start the helper of a job of ``size`` ranks, which listens on ``host`` only; return when it listens.

    Raises:
        RendezvousError: the helper cannot listen there, or does not start.
    """
    secret, job = secrets.token_hex(16), secrets.token_hex(8)
    settings = {
        "host": host, "size": size, "secret": secret, "job": job, "parent": identity(os.getpid()), "pid": os.getpid(),
        "timeout": config.timeout_seconds, "start": config.start_seconds, "stall": config.stall_seconds,
        "debug": config.log_level == "DEBUG",
        "ports": [config.ports[0], config.ports[-1]] if config.ports else None,
    }  # fmt: skip
    try:
        process = subprocess.run(
            isolated("hvdbridge.supervisor"),
            input=json.dumps(settings).encode(), stdout=subprocess.PIPE, timeout=START_SECONDS, check=False,
        )  # fmt: skip
        reply = json.loads(process.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise RendezvousError(f"rank 0 could not start hvdbridge's helper ({sys.executable}): {error}") from error
    if "error" in reply:
        text = f"hvdbridge's helper cannot listen on {host!r}: {reply['error']}"
        raise RendezvousError(f"{text}. It must be an address of rank 0's own host.")
    return HelperAddress(host, reply["port"], reply["pmi_port"], secret, job)
