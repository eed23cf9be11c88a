"""Messages over TCP connections between ranks, for Horovod, which has no point-to-point operations.

Rules:

1. A rank listens from its first send or receive on. It publishes its address and a token in the job's store, which only
   the job's ranks can read. A connection that does not present the token is closed.
2. Each direction between two ranks has one connection. The sender opens it. One thread of the sender writes to it, and
   one thread of the receiver reads from it.
3. If the receive of an arriving message is posted, the message is read into its tensor. Otherwise it is buffered until
   the receive is posted. So a send is done when the kernel has its bytes, and never blocks messages with other tags.
4. A receive from a rank whose connection broke fails. The job's monitor detects ranks that do not respond.
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
from hvdbridge.backends.point_to_point import Messages, ReceiveWork, size_mismatch
from hvdbridge.errors import HvdbridgeError, RankFailed
from hvdbridge.startup.network import first_free, listening
from hvdbridge.supervisor.wire import receive_exactly, receive_into

HEADER = struct.Struct("<IIQ")  # group, tag, bytes
HELLO = struct.Struct("<32sI")  # token, rank
HELLO_SECONDS = 10.0  # time limit for the token of a new connection


class _Transfer(ReceiveWork):
    """A message in flight, sent or received. ``ranks`` are the group's ranks in the job.

    ``sender`` is, for a receive, the sender's rank in the job, or None for any rank.
    """

    def __init__(self, data: Tensor, group: int, tag: int, ranks: list[int], sender: int | None = None) -> None:
        array: Any = data.numpy()
        self.memory = memoryview(array)
        self.key = (group, tag)
        self.ranks, self.sender, self.source = ranks, sender, -1
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

    def matches(self, source: int, key: tuple[int, int]) -> bool:
        """Return whether this receive accepts a message from ``source`` with ``key``, its group and tag."""
        return self.key == key and self.sender in (None, source)

    def fits(self, source: int, size: int) -> bool:
        """Return whether a message of ``size`` bytes from ``source`` fits the tensor. If not, the receive fails."""
        self.source = self.ranks.index(source)
        if size != len(self.memory):
            self.finish(size_mismatch(self.source, self.key[1], size, len(self.memory)))
        return not self.done()

    def deliver(self, source: int, payload: bytearray) -> None:
        """Complete this receive with a buffered message."""
        if self.fits(source, len(payload)):
            self.memory[:] = payload
            self.finish()


class Transport:
    """This rank's connections, shared by all groups. Ranks are those of the job.

    Args:
        rank: this rank.
        host: the address of this host that other ranks reach.
        publish: stores a text for a rank in the job's store.
        look_up: returns the text of a rank; blocks until it is stored.
        ports: range of ports to listen on; None lets the system choose.
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
        self._disconnected: dict[int, Exception] = {}
        self._send_queues: dict[int, queue.SimpleQueue[_Transfer | None]] = {}
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._listener = first_free(lambda port: listening(host, port, 1024), ports)
        _start_thread("listen", self._listen)
        publish(rank, f"{host}:{self._listener.getsockname()[1]}/{self._token}")

    def send(self, transfer: _Transfer, to: int) -> Work:
        """Queue a message for rank ``to``; the first one starts the rank's writer thread."""
        with self._lock:
            if to not in self._send_queues:
                self._send_queues[to] = queue.SimpleQueue()
                _start_thread(f"to {to}", partial(self._write, to, self._send_queues[to]))
            self._send_queues[to].put(transfer)
        return transfer

    def receive(self, posted: _Transfer) -> ReceiveWork:
        """Post a receive, or complete it with a buffered message. Raise RankFailed if the connection has broken."""
        with self._lock:
            for i, (source, key, _) in enumerate(self._arrived):
                if posted.matches(source, key):
                    payload = self._arrived.pop(i)[2]
                    break
            else:
                if posted.sender in self._disconnected:
                    raise self._disconnected[posted.sender]
                self._posted.append(posted)
                return posted
        posted.deliver(source, payload)
        return posted

    def close(self) -> None:
        """Close all connections. Further calls do nothing."""
        self._closed = True
        for send_queue in self._send_queues.values():
            send_queue.put(None)
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def _write(self, to: int, transfers: queue.SimpleQueue[_Transfer | None]) -> None:
        """Send queued messages to rank ``to`` until the queue yields None; the body of a writer thread."""
        failure: Exception | None = None
        sock: socket.socket | None = None
        while (transfer := transfers.get()) is not None:
            try:
                if failure is None:
                    sock = sock or self._connect(to)
                    sock.sendall(HEADER.pack(*transfer.key, len(transfer.memory)))
                    sock.sendall(transfer.memory)
            except OSError as error:
                failure = RankFailed(f"rank {self.rank}: the connection to rank {to} broke while it sent: {error}")
                failure.__cause__ = error
            except HvdbridgeError as error:  # raised by the store: the rank is missing, or the job failed
                failure = error
            transfer.finish(failure)
            del transfer  # frees its tensor while this thread waits for the next message
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
            except OSError:  # close() closed the listener
                return
            _start_thread("from", partial(self._read, sock))

    def _read(self, sock: socket.socket) -> None:
        """Check the token of a connection and receive its messages; the body of a reader thread."""
        with sock:
            try:
                sock.settimeout(HELLO_SECONDS)
                token, source = HELLO.unpack(receive_exactly(sock, HELLO.size))
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
                    group, tag, size = HEADER.unpack(receive_exactly(sock, HEADER.size))
                    posted = self._match(source, (group, tag))
                    if posted is not None and posted.fits(source, size):
                        receive_into(sock, posted.memory)
                        posted.finish()
                    else:
                        payload = receive_exactly(sock, size)
                        if posted is None and (posted := self._match(source, (group, tag), payload)):
                            posted.deliver(source, payload)
                    posted = None
            except OSError as error:
                self._on_disconnect(source, error, posted)

    def _match(self, source: int, key: tuple[int, int], payload: bytearray | None = None) -> _Transfer | None:
        """Remove and return the posted receive that a message matches. If none does, buffer ``payload``, if given."""
        with self._lock:
            for i, posted in enumerate(self._posted):
                if posted.matches(source, key):
                    return self._posted.pop(i)
            if payload is not None:
                self._arrived.append((source, key, payload))
        return None

    def _on_disconnect(self, source: int, error: OSError, reading: _Transfer | None) -> None:
        """Fail the receives from ``source``, and ``reading``, the receive whose message was cut off."""
        if self._closed:
            return
        failure = RankFailed(f"rank {self.rank}: the connection from rank {source} ended: {error}")
        with self._lock:
            self._disconnected[source] = failure
            failed = [posted for posted in self._posted if posted.sender == source]
            self._posted = [posted for posted in self._posted if posted.sender != source]
        for posted in (*failed, *([] if reading is None else [reading])):
            posted.finish(failure)


class TcpMessages(Messages):
    """Messages over a :class:`Transport`; ``tcp`` returns the transport and the group's ranks in the job."""

    def __init__(self, communicator: Communicator, number: int, tcp: Callable[[], tuple[Transport, list[int]]]) -> None:
        self._number = number
        self._transport, self._ranks = tcp()

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        return self._transport.send(_Transfer(data, self._number, tag, self._ranks), self._ranks[to])

    def receive(self, data: Tensor, source: int | None, tag: int) -> ReceiveWork:
        sender = None if source is None else self._ranks[source]
        return self._transport.receive(_Transfer(data, self._number, tag, self._ranks, sender))


def _start_thread(label: str, run: Callable[[], None]) -> None:
    """Start a daemon thread."""
    threading.Thread(target=run, name=f"hvdbridge-messages {label}", daemon=True).start()
