"""horovodrun's store, as it behaves on a machine that is busy: it drops connections that are silent for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hvdbridge.errors import RendezvousError
from hvdbridge.rendezvous.channels import ATTEMPTS, HorovodChannel
from hvdbridge.world import World


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
