"""``python -m hvdbridge.supervisor``: settings from stdin, ports to stdout, then a daemon until the job is over.

Rules:

1. It listens before it answers, and answers before it leaves its parent: the parent reads one JSON line.
2. The daemon holds nothing of its parent: own session, standard streams on /dev/null, working directory /.
   (HVDBRIDGE_LOG_LEVEL=DEBUG keeps stderr; the helper ends a second after the last rank, and with it the pipe.)
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from hvdbridge.startup.network import first_free, listening
from hvdbridge.supervisor.server import BACKLOG, Server


def listen(host: str, ports: list[int] | None) -> socket.socket:
    """A socket on ``host``, at one of ``ports`` (first and last) or where the system chooses."""
    sock = first_free(lambda port: listening(host, port, BACKLOG), range(ports[0], ports[1] + 1) if ports else None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # inherited: bounds what a guest can make us hold
    return sock


def become_daemon(debug: bool) -> None:
    """Go on in a child of our own session; the parent's wait is over."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1) if debug else (0, 1, 2):
        os.dup2(null, stream)


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    try:
        monitor, pmi = (listen(settings["host"], settings["ports"]) for _ in range(2))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    ports = {"port": monitor.getsockname()[1], "pmi_port": pmi.getsockname()[1]}
    try:
        print(json.dumps(ports), flush=True)
    except BrokenPipeError:  # the parent has ended meanwhile, and its job with it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Python flushes to, at last
        return
    become_daemon(settings["debug"])
    asyncio.run(Server(settings, monitor, pmi).run())


if __name__ == "__main__":
    main()
