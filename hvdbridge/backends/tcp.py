"""Messages over TCP connections between ranks, for a library that has none: Horovod.

Rules:

1. A rank listens from its first send or receive on; its address and a token stand in the job's store, which only the
   job's ranks can read. Whoever connects without the token is turned away.
2. One connection per direction of a pair, opened by the sender, written by one thread of its own and read by another.
3. A message whose receive is posted is read into that tensor; any other is kept in memory until its receive comes. So
   a send is done when the kernel has its bytes, and messages with other tags never wait behind it.
4. A receive from a rank whose connection broke fails. The job's monitor handles ranks that are silent.
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
from hvdbridge.startup.network import first_free, listening
from hvdbridge.supervisor.wire import exactly, fill

HEADER = struct.Struct("<IIQ")  # group, tag, bytes
HELLO = struct.Struct("<32sI")  # token, rank
HELLO_SECONDS = 10.0


class _Transfer(Receipt):
    """A message on its way, in either direction. A receive is from rank ``wanted`` of the job (None: any) of ``ranks``,
    the group's."""

    def __init__(self, data: Tensor, group: int, tag: int, ranks: list[int], wanted: int | None = None) -> None:
        array: Any = data.numpy()
        self.memory = memoryview(array)
        self.key = (group, tag)
        self.ranks, self.wanted, self.source = ranks, wanted, -1
        self._over = threading.Event()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def finish(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._over.set()

    def takes(self, source: int, key: tuple[int, int]) -> bool:
        return self.key == key and self.wanted in (None, source)

    def fits(self, source: int, size: int) -> bool:
        """Whether a message of ``size`` bytes from ``source`` fits; the receive fails if not."""
        self.source = self.ranks.index(source)
        if size != len(self.memory):
            self.finish(wrong_size(self.source, self.key[1], size, len(self.memory)))
        return not self.done()

    def deliver(self, source: int, payload: bytearray) -> None:
        if self.fits(source, len(payload)):
            self.memory[:] = payload
            self.finish()


class Exchange:
    """This rank's connections, shared by all groups. Ranks here are those of the job.

    Args:
        rank: this rank.
        host: the address of this host that other ranks reach.
        publish: puts a text into the job's store under a rank.
        look_up: the text of a rank; waits until it is there.
        ports: where to listen; None: where the system chooses.
    """

    def __init__(
        self, rank: int, host: str, publish: Callable[[int, str], None], look_up: Callable[[int], str],
        ports: range | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self._look_up = look_up
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._posted: list[_Transfer] = []
        self._arrived: list[tuple[int, tuple[int, int], bytearray]] = []  # source, (group, tag), payload
        self._broken: dict[int, Exception] = {}
        self._writers: dict[int, queue.SimpleQueue[_Transfer | None]] = {}
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._listener = first_free(lambda port: listening(host, port, 1024), ports)
        _thread("listen", self._listen)
        publish(rank, f"{host}:{self._listener.getsockname()[1]}/{self._token}")

    def send(self, transfer: _Transfer, to: int) -> Work:
        with self._lock:
            if to not in self._writers:
                self._writers[to] = queue.SimpleQueue()
                _thread(f"to {to}", partial(self._write, to, self._writers[to]))
            self._writers[to].put(transfer)
        return transfer

    def receive(self, posted: _Transfer) -> Receipt:
        with self._lock:
            for i, (source, key, _) in enumerate(self._arrived):
                if posted.takes(source, key):
                    payload = self._arrived.pop(i)[2]
                    break
            else:
                if posted.wanted in self._broken:
                    raise self._broken[posted.wanted]
                self._posted.append(posted)
                return posted
        posted.deliver(source, payload)
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

    def _write(self, to: int, waiting: queue.SimpleQueue[_Transfer | None]) -> None:
        failure: Exception | None = None
        sock: socket.socket | None = None
        while (transfer := waiting.get()) is not None:
            try:
                if failure is None:
                    sock = sock or self._connect(to)
                    sock.sendall(HEADER.pack(*transfer.key, len(transfer.memory)))
                    sock.sendall(transfer.memory)
            except OSError as error:
                failure = RankFailed(f"rank {self.rank}: the connection to rank {to} broke while it sent: {error}")
                failure.__cause__ = error
            except HvdbridgeError as error:  # of the store: the rank is missing, or the job failed
                failure = error
            transfer.finish(failure)
            del transfer  # its tensor is free while this thread waits for the next
        if sock is not None:
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
                token, source = HELLO.unpack(exactly(sock, HELLO.size))
            except OSError:
                return
            if not hmac.compare_digest(token, self._token.encode()):
                return
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(sock)
            posted: _Transfer | None = None
            try:
                while True:
                    group, tag, size = HEADER.unpack(exactly(sock, HEADER.size))
                    posted = self._match(source, (group, tag))
                    if posted is not None and posted.fits(source, size):
                        fill(sock, posted.memory)
                        posted.finish()
                    else:
                        payload = exactly(sock, size)
                        if posted is None and (posted := self._match(source, (group, tag), payload)):
                            posted.deliver(source, payload)
                    posted = None
            except OSError as error:
                self._lost(source, error, posted)

    def _match(self, source: int, key: tuple[int, int], payload: bytearray | None = None) -> _Transfer | None:
        """Take out the receive that a message is for. If there is none, a ``payload`` waits for it."""
        with self._lock:
            for i, posted in enumerate(self._posted):
                if posted.takes(source, key):
                    return self._posted.pop(i)
            if payload is not None:
                self._arrived.append((source, key, payload))
        return None

    def _lost(self, source: int, error: OSError, reading: _Transfer | None) -> None:
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
    """See :class:`Messages`; ``tcp`` returns the exchange and the group's ranks."""

    def __init__(self, communicator: Communicator, number: int, tcp: Callable[[], tuple[Exchange, list[int]]]) -> None:
        self._number = number
        self._exchange, self._ranks = tcp()

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return self._exchange.send(_Transfer(data, self._number, tag, self._ranks), self._ranks[to])

    def receive(self, data: Tensor, source: int | None, tag: int) -> Receipt:
        wanted = None if source is None else self._ranks[source]
        return self._exchange.receive(_Transfer(data, self._number, tag, self._ranks, wanted))


def _thread(what: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=f"hvdbridge-messages {what}", daemon=True).start()
