"""Entry point of the helper, ``python -m hvdbridge.supervisor``: reads settings from stdin and writes ports to stdout.

Rules:

1. The process opens its sockets, then writes one JSON line for its parent, then becomes a daemon until the job is over.
2. The daemon keeps no resource of its parent: own session, standard streams on /dev/null, working directory /.
   (HVDBRIDGE_LOG_LEVEL=DEBUG keeps stderr. The helper ends shortly after the last rank, which closes the pipe.)
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


def open_listener(host: str, ports: list[int] | None) -> socket.socket:
    """Return a socket that listens on ``host``, on a port from ``ports[0]`` to ``ports[1]``; None: any free port."""
    sock = first_free(lambda port: listening(host, port, BACKLOG), range(ports[0], ports[1] + 1) if ports else None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)  # connections inherit this limit of unread data
    return sock


def become_daemon(debug: bool) -> None:
    """Continue in a child process with a session of its own, and end this process, for which the parent waits."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1) if debug else (0, 1, 2):
        os.dup2(null, stream)


def main() -> None:
    """Read the settings that spawn.py sends, print the ports or an error as JSON, and serve the job."""
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    try:
        monitor_socket, pmi_socket = (open_listener(settings["host"], settings["ports"]) for _ in range(2))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    ports = {"port": monitor_socket.getsockname()[1], "pmi_port": pmi_socket.getsockname()[1]}
    try:
        print(json.dumps(ports), flush=True)
    except BrokenPipeError:  # the parent has ended, so there is no job
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit
        return
    become_daemon(settings["debug"])
    asyncio.run(Server(settings, monitor_socket, pmi_socket).run())


if __name__ == "__main__":
    main()
