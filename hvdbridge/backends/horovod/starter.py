"""Horovod: native under horovodrun, and under mpiexec if built with MPI; elsewhere rank 0 serves its rendezvous.

The server's secret travels in the address that Horovod is given: ``host:port/secret`` makes its HTTP client ask
``host:port`` for ``/secret:.../scope/key``, and a request without the secret gets 403.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import threading
from typing import Any

from hvdbridge.backends.mpi.starter import offers_mpi
from hvdbridge.backends.starter import Meeting, Numbers, Starter, Variables
from hvdbridge.config import LONGEST_SECONDS
from hvdbridge.errors import BackendUnavailable, RendezvousError
from hvdbridge.startup import network
from hvdbridge.startup.network import first_free
from hvdbridge.startup.world import World

LARGEST_VALUE = 2**20  # addresses of a full mesh are far smaller


class HorovodStarter(Starter):
    """``hvd.init()``, with what horovodrun would have set."""

    name = "horovod"
    started = False  # before, in this process

    def __init__(self) -> None:
        self._variables = Variables()
        self._server: Any = None

    @classmethod
    def running(cls) -> Numbers | None:
        hvd = sys.modules.get("horovod.torch")
        return (hvd.rank(), hvd.size()) if hvd is not None and hvd.is_initialized() else None

    def all_gather(self, value: str) -> list[Any]:
        import horovod.torch as hvd

        return list(hvd.allgather_object(value, name="hvdbridge.start"))

    def start(self, meeting: Meeting) -> None:
        import horovod.torch as hvd

        limit = str(round(LONGEST_SECONDS))
        # Process sets, which groups need, must be announced before Horovod starts.
        self._variables.set({"HOROVOD_GLOO_TIMEOUT_SECONDS": limit, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
        launcher = meeting.world.launcher
        native = launcher == "horovodrun"
        if native and HorovodStarter.started and os.environ.get("HOROVOD_ELASTIC") != "1":
            native = False  # horovodrun's server still has the addresses at which process sets met the first time
        HorovodStarter.started = True
        if not (native or (offers_mpi(meeting.world) and hvd.mpi_built())):
            self._bridge(meeting)
        if not hvd.mpi_enabled() and not network.is_loopback(meeting.address):
            _check_host_name()
        with meeting.monitor.phase("hvd.init"):
            try:
                hvd.init()
            except (RuntimeError, ValueError) as error:
                raise RendezvousError(f"rank {meeting.world.rank}: Horovod did not start: {error}") from error

    def _bridge(self, meeting: Meeting) -> None:
        world = meeting.world
        peers = [w for w in meeting.worlds if w.local_rank == world.local_rank]
        self._variables.remove(("HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_ELASTIC"))
        self._variables.set({
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_RANK": str(world.rank), "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(world.local_rank), "HOROVOD_LOCAL_SIZE": str(world.local_size),
            "HOROVOD_CROSS_RANK": str([w.rank for w in peers].index(world.rank)),
            "HOROVOD_CROSS_SIZE": str(len(peers)),
            "HOROVOD_HOSTNAME": host_name(world),
        })  # fmt: skip
        if world.size == 1:
            return
        key = f"{meeting.key}/horovod"
        if world.rank == 0:
            secret = secrets.token_hex(16)
            self._server = serve(meeting.address, secret, meeting.worlds, meeting.config.ports)
            meeting.monitor.store_set(key, f"{meeting.address}:{self._server.server_port}/{secret}".encode())
        self._variables.set({
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting.monitor.store_get(key).decode(),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",  # not read: the address has the port
        })  # fmt: skip
        interface = meeting.config.iface or network.interface_towards(meeting.address)
        self._variables.default({"HOROVOD_GLOO_IFACE": interface})

    def numbers(self) -> Numbers:
        import horovod.torch as hvd  # under hvdbridge.run the module of this name in sys.modules is hvdbridge.torch

        return hvd.rank(), hvd.size()

    def hint(self, world: World) -> str:
        return "If hvd.init() ran before hb.init(), leave it out: hb.init() starts Horovod under every launcher."

    def stop(self) -> None:
        """The server, and the variables that point to it, are needed until here: each process set meets there."""
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._variables.restore()


def _check_host_name() -> None:
    """Horovod's process sets, the one of all ranks included, do not heed HOROVOD_GLOO_IFACE: they listen at the address
    of the host's own name, and abort the process where others cannot reach that.

    Raises:
        BackendUnavailable: the name leads back to this host only.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if network.is_loopback(address) or address == "no address":
        raise BackendUnavailable(
            f"Horovod listens at the address of the host's own name, and {name!r} has {address} here, which other "
            f"hosts cannot reach. Put a line '<this host's address> {name}' before it in /etc/hosts, "
            "or use HVDBRIDGE_BACKEND=torch."
        )


def host_name(world: World) -> str:
    """Equal on the ranks of a host, different elsewhere: all that Horovod asks of it."""
    return f"node{world.node_rank}"


def serve(host: str, secret: str, worlds: tuple[World, ...], ports: range | None = None) -> Any:
    """Horovod's own rendezvous server, in a thread of this process: ``hvd.init()`` does not hold the GIL."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):  # type: ignore[misc]
        path: str

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            given, _, rest = self.path.lstrip("/").partition("/")
            if not hmac.compare_digest(given.partition(":")[0].encode(), secret.encode()) or rest.count("/") != 1:
                self.send_error(403)
                return False
            length = self.headers.get("Content-Length", "0")
            if not length.isdigit() or int(length) > LARGEST_VALUE:
                self.send_error(413)
                return False
            self.path = f"/{rest}"
            return True

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True
        request_queue_size = 1024

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore half-open and broken connections: the ranks try again."""

    server = first_free(lambda port: Server((host, port), Handler, 0), ports)
    server.init([
        SlotInfo(host_name(w), w.rank, w.local_rank, w.node_rank, w.size, w.local_size,
                 sum(peer.local_rank == w.local_rank for peer in worlds))
        for w in worlds
    ])  # fmt: skip
    threading.Thread(target=server.serve_forever, args=(0.05,), name="hvdbridge-horovod", daemon=True).start()
    return server
