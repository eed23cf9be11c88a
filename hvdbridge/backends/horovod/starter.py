"""The start of Horovod.

Under horovodrun, and under mpiexec if Horovod is built with MPI, Horovod starts by itself. Under other launchers rank 0
runs Horovod's rendezvous server, and its address is set in the environment.

The address contains the server's secret: with ``host:port/secret`` Horovod's HTTP client requests
``/secret:.../scope/key`` from ``host:port``. The server answers requests without the secret with status 403.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import threading
from typing import Any

from hvdbridge.backends.mpi.starter import launcher_starts_mpi
from hvdbridge.backends.starter import EnvironmentOverrides, RankAndSize, RendezvousInfo, Starter
from hvdbridge.config import LONGEST_SECONDS
from hvdbridge.errors import BackendUnavailable, RendezvousError
from hvdbridge.startup import network
from hvdbridge.startup.network import first_free
from hvdbridge.startup.world import World

MAX_VALUE_BYTES = 2**20  # limit of a value in the rendezvous store; addresses of a full mesh are far smaller


class HorovodStarter(Starter):
    """Calls ``hvd.init()`` with the environment variables that horovodrun would have set."""

    name = "horovod"
    has_started = False  # whether this process has started Horovod before

    def __init__(self) -> None:
        self._environment = EnvironmentOverrides()
        self._server: Any = None

    @classmethod
    def running(cls) -> RankAndSize | None:
        hvd = sys.modules.get("horovod.torch")
        return (hvd.rank(), hvd.size()) if hvd is not None and hvd.is_initialized() else None

    def all_gather(self, value: str) -> list[Any]:
        import horovod.torch as hvd

        return list(hvd.allgather_object(value, name="hvdbridge.start"))

    def start(self, rendezvous: RendezvousInfo) -> None:
        import horovod.torch as hvd

        limit = str(round(LONGEST_SECONDS))
        # Groups need process sets, which must be enabled before Horovod starts.
        self._environment.set({"HOROVOD_GLOO_TIMEOUT_SECONDS": limit, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
        launcher = rendezvous.world.launcher
        native = launcher == "horovodrun"
        if native and HorovodStarter.has_started and os.environ.get("HOROVOD_ELASTIC") != "1":
            native = False  # horovodrun's server still has the addresses of the first start's process sets
        HorovodStarter.has_started = True
        if not (native or (launcher_starts_mpi(rendezvous.world) and hvd.mpi_built())):
            self._set_up_gloo(rendezvous)
        gloo = not hvd.mpi_enabled()
        if gloo and not network.is_loopback(rendezvous.address):
            _check_host_name()
        with rendezvous.monitor.phase("hvd.init", hint=rendezvous.check_gloo_ports() if gloo else ""):
            try:
                hvd.init()
            except (RuntimeError, ValueError) as error:
                raise RendezvousError(f"rank {rendezvous.world.rank}: Horovod did not start: {error}") from error

    def _set_up_gloo(self, rendezvous: RendezvousInfo) -> None:
        """Set the variables with which Horovod starts over Gloo, and run the rendezvous server on rank 0."""
        world = rendezvous.world
        peers = [w for w in rendezvous.worlds if w.local_rank == world.local_rank]
        self._environment.unset(("HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_ELASTIC"))
        self._environment.set({
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_RANK": str(world.rank), "HOROVOD_SIZE": str(world.size),
            "HOROVOD_LOCAL_RANK": str(world.local_rank), "HOROVOD_LOCAL_SIZE": str(world.local_size),
            "HOROVOD_CROSS_RANK": str([w.rank for w in peers].index(world.rank)),
            "HOROVOD_CROSS_SIZE": str(len(peers)),
            "HOROVOD_HOSTNAME": host_name(world),
        })  # fmt: skip
        if world.size == 1:
            return
        key = f"{rendezvous.key}/horovod"
        if world.rank == 0:
            secret = secrets.token_hex(16)
            self._server = serve(rendezvous.address, secret, rendezvous.worlds, rendezvous.config.ports)
            rendezvous.monitor.store_set(key, f"{rendezvous.address}:{self._server.server_port}/{secret}".encode())
        self._environment.set({
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous.monitor.store_get(key).decode(),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",  # not used, since the address contains the port
        })  # fmt: skip
        interface = rendezvous.config.iface or network.interface_towards(rendezvous.address)
        self._environment.set_defaults({"HOROVOD_GLOO_IFACE": interface})

    def rank_and_size(self) -> RankAndSize:
        import horovod.torch as hvd  # under hvdbridge.run sys.modules has hvdbridge.torch under this name

        return hvd.rank(), hvd.size()

    def hint(self, world: World) -> str:
        return "If hvd.init() ran before hb.init(), leave it out: hb.init() starts Horovod under every launcher."

    def stop(self) -> None:
        """Shut Horovod down, then the server and its variables: each new process set needs them for its rendezvous."""
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._environment.restore()


def _check_host_name() -> None:
    """Check that this host's own name does not resolve to a loopback address.

    All process sets of Horovod ignore HOROVOD_GLOO_IFACE and listen on the address of the host's own name. They abort
    the process if other hosts cannot reach this address.

    Raises:
        BackendUnavailable: the name resolves to loopback or to no address.
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
    """Return a text that is equal on the ranks of one host and differs among hosts. Horovod needs no real name."""
    return f"node{world.node_rank}"


def serve(host: str, secret: str, worlds: tuple[World, ...], ports: range | None = None) -> Any:
    """Start Horovod's own rendezvous server and return it. A thread suffices: ``hvd.init()`` releases the GIL."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Handler(RendezvousHandler):  # type: ignore[misc]
        path: str

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            credential, _, rest = self.path.lstrip("/").partition("/")
            if not hmac.compare_digest(credential.partition(":")[0].encode(), secret.encode()) or rest.count("/") != 1:
                self.send_error(403)
                return False
            length = self.headers.get("Content-Length", "0")
            if not length.isdigit() or int(length) > MAX_VALUE_BYTES:
                self.send_error(413)
                return False
            self.path = f"/{rest}"
            return True

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True
        request_queue_size = 1024

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore half-open and broken connections, since ranks retry."""

    server = first_free(lambda port: Server((host, port), Handler, 0), ports)
    server.init([
        SlotInfo(host_name(w), w.rank, w.local_rank, w.node_rank, w.size, w.local_size,
                 sum(peer.local_rank == w.local_rank for peer in worlds))
        for w in worlds
    ])  # fmt: skip
    threading.Thread(target=server.serve_forever, args=(0.05,), name="hvdbridge-horovod", daemon=True).start()
    return server
