"""horovodrun's store, as it behaves on a machine that is busy: it drops connections that are silent for a while. And
the ports at which we listen, and at which Slurm's ranks meet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hvdbridge.backends.horovod.starter import serve
from hvdbridge.backends.tcp import Transport
from hvdbridge.config import Config
from hvdbridge.errors import RendezvousError
from hvdbridge.startup.channels import ATTEMPTS, HorovodChannel, slurm_port, tcp_store
from hvdbridge.startup.network import first_free, free_port, listening
from hvdbridge.startup.world import World


class Store(ThreadingHTTPServer):
    """PUT and GET, of which the first ``drops`` are dropped without an answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.drops = 0
        self.values: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Store

    def _dropped(self) -> bool:
        self.server.drops -= 1
        return self.server.drops >= 0

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._dropped():
            self.server.values[self.path] = value
            self._answer(200)

    def do_GET(self) -> None:
        if not self._dropped():
            value = self.server.values.get(self.path)
            self._answer(404 if value is None else 200, value or b"")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def channel(store: Store, rank: int) -> HorovodChannel:
    return HorovodChannel(World(rank, 2), "job/1", 30.0, "127.0.0.1", str(store.server_port), "lo")


@pytest.mark.parametrize("drops", [0, 1, ATTEMPTS - 1])
def test_places_and_the_answer_survive_dropped_connections(store: Store, drops: int) -> None:
    first, second = channel(store, 0), channel(store, 1)
    store.drops = drops
    assert second.gather("there") == []
    store.drops = drops
    assert first.gather("here") == ["here", "there"]
    store.drops = drops
    assert first.broadcast("go") == "go"
    store.drops = drops
    assert second.broadcast("") == "go"


def test_a_store_that_answers_nobody_is_named(store: Store) -> None:
    store.drops = ATTEMPTS
    with pytest.raises(RendezvousError, match=f"rank 1 cannot reach horovodrun's store at .*:{store.server_port}"):
        channel(store, 1).gather("there")
    assert store.values == {}


def test_all_that_listens_keeps_to_the_range() -> None:
    low = free_port()
    ports, told = range(low, low + 40), {}
    exchange = Transport(0, "127.0.0.1", told.__setitem__, str, ports)
    store = tcp_store("127.0.0.1", 0, True, Config(ports=ports), "rank 0", shared=False)
    server = serve("127.0.0.1", "secret", (World(0, 1, 0, 1, 0, 1),), ports)
    try:
        found = {int(told[0].partition("/")[0].rpartition(":")[2]), store.port, server.server_port}
        assert len(found) == 3
        assert found <= set(ports)
    finally:
        exchange.close()
        server.shutdown()
        server.server_close()


def test_a_range_that_is_taken_is_named() -> None:
    with listening("127.0.0.1", 0, 1) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"HVDBRIDGE_PORTS={port}-{port}"):
            first_free(lambda free: listening("127.0.0.1", free, 1), range(port, port + 1))


def test_a_port_that_is_taken_is_named() -> None:
    with listening("127.0.0.1", 0, 1) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"rank 0 cannot listen at 127.0.0.1:{port}"):
            tcp_store("127.0.0.1", port, True, Config(), "rank 0")


@pytest.mark.parametrize("serve", [True, False])
def test_a_name_that_is_not_known_is_named(serve: bool) -> None:
    with pytest.raises(RendezvousError, match=r"does not know the name node1\.invalid: give MASTER_ADDR an address"):
        tcp_store("node1.invalid", 29500, serve, Config(start=0.5), "rank 0")


def test_steps_and_jobs_that_follow_each_other_meet_elsewhere() -> None:
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(700, 704) for step in range(20)]
    assert len({slurm_port(step, Config()) for step in steps}) == len(steps)
    assert len({slurm_port(step, Config(ports=range(25000, 25100))) for step in steps[:20]}) == 20
    assert all(slurm_port(step, Config(ports=range(9, 12))) in range(9, 12) for step in steps)
