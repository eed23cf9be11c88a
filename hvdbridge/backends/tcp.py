"""Messages over TCP connections between ranks, for a library that has none: Horovod.

Rules:

1. A rank listens from its first send or receive on; its address and a token stand in the job's store, which only the
   job's ranks can read. Whoever connects without the token is turned away.
2. One connection per direction of a pair, opened by the sender, written by one thread of its own and read by another.
3. A message whose receive is posted is read into its place; another one waits in memory. So a send is done when its
   bytes are on their way, and messages with other tags never wait behind it.
4. A receive from a rank whose connection broke fails; one from a rank that is silent is the job's monitor's affair.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from hvdbridge.backends.communicator import Communicator, Work
from hvdbridge.backends.point_to_point import Messages, Receipt, wrong_size
from hvdbridge.errors import HvdbridgeError, RankFailed
from hvdbridge.startup.ports import first_free, listening

HEADER = struct.Struct("<IIQ")  # group, tag, bytes
HELLO = struct.Struct("<32sI")  # token, rank
CHUNK = 1 << 20
HELLO_SECONDS = 10.0


class _Event(Receipt):
    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None
        self.source = -1

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._over.set()


class _Posted(_Event):
    """A receive: from ``wanted``, or from anyone."""

    def __init__(self, data: Tensor, wanted: int | None, group: int, tag: int) -> None:
        super().__init__()
        self.memory = _memory(data)
        self.wanted, self.group, self.tag = wanted, group, tag

    def takes(self, source: int, group: int, tag: int) -> bool:
        return (self.group, self.tag) == (group, tag) and self.wanted in (None, source)


class Exchange:
    """This rank's connections, shared by all groups. Ranks here are those of the job.

    Args:
        rank: this rank.
        host: the address of this host that other ranks reach.
        publish: puts a text into the job's store under a rank.
        look_up: the text of a rank; waits until it is there.
        ports: where to listen; None: where the system says.
    """

    def __init__(
        self, rank: int, host: str, publish: Callable[[int, str], None], look_up: Callable[[int], str],
        ports: range | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._look_up = look_up
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._posted: list[_Posted] = []
        self._arrived: list[tuple[int, int, int, bytearray]] = []  # source, group, tag
        self._broken: dict[int, Exception] = {}
        self._writers: dict[int, queue.SimpleQueue[tuple[_Event, int, int, memoryview] | None]] = {}
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._listener = first_free(lambda port: listening(host, port, 1024), ports)
        _thread("listen", self._listen)
        publish(rank, f"{host}:{self._listener.getsockname()[1]}/{self._token}")

    def send(self, data: Tensor, to: int, group: int, tag: int) -> Work:
        event = _Event()
        with self._lock:
            if to not in self._writers:
                self._writers[to] = queue.SimpleQueue()
                _thread(f"to {to}", lambda: self._write(to, self._writers[to]))
            self._writers[to].put((event, group, tag, _memory(data)))
        return event

    def receive(self, data: Tensor, source: int | None, group: int, tag: int) -> Receipt:
        posted = _Posted(data, source, group, tag)
        with self._lock:
            for i, (sender, their_group, their_tag, _) in enumerate(self._arrived):
                if posted.takes(sender, their_group, their_tag):
                    payload = self._arrived.pop(i)[3]
                    break
            else:
                if source in self._broken:
                    raise self._broken[source]
                self._posted.append(posted)
                return posted
        posted.source = sender
        if len(payload) == len(posted.memory):
            posted.memory[:] = payload
            posted.finish()
        else:
            posted.finish(wrong_size(sender, tag, len(payload), len(posted.memory)))
        return posted

    def close(self) -> None:
        """End all connections. Harmless when repeated."""
        self._closed = True
        for writer in self._writers.values():
            writer.put(None)
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def _write(self, to: int, waiting: queue.SimpleQueue[tuple[_Event, int, int, memoryview] | None]) -> None:
        failure: Exception | None = None
        sock: socket.socket | None = None
        while (item := waiting.get()) is not None:
            event, group, tag, memory = item
            try:
                if failure is None:
                    sock = sock or self._connect(to)
                    sock.sendall(HEADER.pack(group, tag, len(memory)))
                    sock.sendall(memory)
            except OSError as error:
                failure = RankFailed(f"rank {self.rank}: the connection to rank {to} broke while it sent: {error}")
                failure.__cause__ = error
            except HvdbridgeError as error:  # the store: nobody is there, or the job failed
                failure = error
            event.finish(failure)
            del event, memory, item
        if sock is not None:
            with suppress(OSError):
                sock.close()

    def _connect(self, to: int) -> socket.socket:
        address, _, token = self._look_up(to).partition("/")
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=60)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(HELLO.pack(token.encode(), self.rank))
        self._sockets.append(sock)
        return sock

    # -- receiving ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            _thread("from", partial(self._read, sock))

    def _read(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(HELLO_SECONDS)
                token, source = HELLO.unpack(_exactly(sock, HELLO.size))
            except OSError:
                return
            if not hmac.compare_digest(token, self._token.encode()):
                return
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            posted: _Posted | None = None
            try:
                while True:
                    group, tag, size = HEADER.unpack(_exactly(sock, HEADER.size))
                    posted = self._match(source, group, tag)
                    if posted is not None and len(posted.memory) == size:
                        _fill(sock, posted.memory)
                        posted.finish()
                    elif posted is not None:
                        posted.finish(wrong_size(source, tag, size, len(posted.memory)))
                        _exactly(sock, size)
                    else:
                        self._keep(source, group, tag, _exactly(sock, size))
                    posted = None
            except OSError as error:
                self._lost(source, error, posted)

    def _match(self, source: int, group: int, tag: int) -> _Posted | None:
        with self._lock:
            for i, posted in enumerate(self._posted):
                if posted.takes(source, group, tag):
                    del self._posted[i]
                    posted.source = source
                    return posted
        return None

    def _keep(self, source: int, group: int, tag: int, payload: bytearray) -> None:
        with self._lock:
            for i, posted in enumerate(self._posted):  # posted while the payload was read
                if posted.takes(source, group, tag):
                    del self._posted[i]
                    break
            else:
                self._arrived.append((source, group, tag, payload))
                return
        posted.source = source
        if len(payload) == len(posted.memory):
            posted.memory[:] = payload
            posted.finish()
        else:
            posted.finish(wrong_size(source, tag, len(payload), len(posted.memory)))

    def _lost(self, source: int, error: OSError, reading: _Posted | None) -> None:
        if self._closed:
            return
        failure = RankFailed(f"rank {self.rank}: the connection from rank {source} ended: {error}")
        with self._lock:
            self._broken[source] = failure
            lost = [posted for posted in self._posted if posted.wanted == source]
            self._posted = [posted for posted in self._posted if posted.wanted != source]
        for posted in (*lost, *([] if reading is None else [reading])):
            posted.finish(failure)


class TcpMessages(Messages):
    """See :class:`Messages`; ``communicator`` tells which ranks of the job are its own."""

    def __init__(self, communicator: Communicator, number: int, tcp: Callable[[], tuple[Exchange, list[int]]]) -> None:
        self._number = number
        self._exchange, self._ranks = tcp()

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return self._exchange.send(data, self._ranks[to], self._number, tag)

    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        wanted = None if source is None else self._ranks[source]
        return _InGroup(self._exchange.receive(data, wanted, self._number, tag), self._ranks)


class _InGroup(Receipt):
    """A receipt whose source is a rank of the group."""

    def __init__(self, receipt: Receipt, ranks: list[int]) -> None:
        self._receipt, self._ranks = receipt, ranks
        self.source = -1

    def done(self) -> bool:
        return self._receipt.done()

    def wait(self) -> None:
        self._receipt.wait()
        self.source = self._ranks.index(self._receipt.source)


def _memory(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _thread(what: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=f"hvdbridge-messages {what}", daemon=True).start()


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return data


def _fill(sock: socket.socket, memory: memoryview) -> None:
    at = 0
    while at < len(memory):
        got = sock.recv_into(memory[at : at + CHUNK])
        if not got:
            raise ConnectionResetError("closed by the other side")
        at += got
