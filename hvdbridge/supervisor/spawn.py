"""Start the job's helper process, and the address by which the other ranks find it.

Rules:

1. The secret goes to the process through stdin, to other ranks through their launcher's own channel; it is
   never in argv, in an environment or in a log.
2. The process is a daemon in its own session: it keeps no pipe of the rank that started it (launchers wait
   for their end), and no signal to the ranks reaches it before it has cleaned up after them.
3. It runs isolated (-I -S): the user's directory, PYTHONPATH and site-packages cannot change or slow it.
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
RUN = """import runpy, sys
_, root, module, *arguments = sys.argv
sys.path.insert(0, root)
sys.argv[1:] = arguments
runpy.run_module(module, run_name="__main__")
"""


@dataclass(frozen=True)
class HelperAddress:
    """Where the helper listens and the secret that it demands; ``str()`` and :meth:`parse` take it to other ranks.

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
        """The address that ``str()`` wrote."""
        try:
            host, port, pmi_port, secret, job = text.split(",")
            return cls(host, int(port), int(pmi_port), secret, job)
        except ValueError:  # the text is not shown: it may hold the secret
            raise RendezvousError("what came through the launcher is not the address of hvdbridge's helper") from None

    def pmi_environment(self, rank: int, size: int) -> dict[str, str]:
        """What an MPI that speaks PMI-1 (MPICH, Intel MPI) needs to join this job as ``rank``."""
        return {
            "PMI_PORT": f"{self.host}:{self.pmi_port}",
            "PMI_ID": str(pmi_id(self.secret, rank)),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(size),
        }


def isolated(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules as a process of its own; rule 3."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", RUN, root, module, *arguments]


def start_helper(host: str, size: int, config: Config) -> HelperAddress:
    """Start the helper of a job of ``size`` ranks, listening on ``host`` only; returns when it listens.

    Raises:
        RendezvousError: it cannot listen there, or does not start.
    """
    secret, job = secrets.token_hex(16), secrets.token_hex(8)
    settings = {
        "host": host, "size": size, "secret": secret, "job": job, "parent": identity(os.getpid()), "pid": os.getpid(),
        "timeout": config.timeout_seconds, "start": config.start_seconds, "stall": config.stall_seconds,
        "debug": config.log_level == "DEBUG",
        "ports": [config.ports[0], config.ports[-1]] if config.ports else None,
    }  # fmt: skip
    try:
        done = subprocess.run(
            isolated("hvdbridge.supervisor"),
            input=json.dumps(settings).encode(), stdout=subprocess.PIPE, timeout=START_SECONDS, check=False,
        )  # fmt: skip
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise RendezvousError(f"rank 0 could not start hvdbridge's helper ({sys.executable}): {error}") from error
    if "error" in answer:
        text = f"hvdbridge's helper cannot listen on {host!r}: {answer['error']}"
        raise RendezvousError(f"{text}. It must be an address of rank 0's own host.")
    return HelperAddress(host, answer["port"], answer["pmi_port"], secret, job)
