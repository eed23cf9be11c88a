"""A rank's connection to the helper: requests, which get a reply, and notes, which do not.

Rules:

1. One thread reads and calls ``on_tick`` every TICK_SECONDS. Any thread may write, one frame at a time.
2. When the job fails or the helper ends, each pending request raises that cause. So no request waits without end, but
   for ``leave``, which waits for the other ranks.
3. A forked child (a DataLoader's worker) closes its copy of the socket. Otherwise the helper would not detect the end
   of this rank.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from hvdbridge.errors import RendezvousError
from hvdbridge.supervisor.job import Job
from hvdbridge.supervisor.spawn import HelperAddress
from hvdbridge.supervisor.wire import MEMBER_FRAME, Message, keep_alive, pack, read_frame, take_frames

TICK_SECONDS = 0.1
Reply = tuple[Message, bytes]


class Link:
    """The link of a job of one rank: the helper's :class:`.Job` in this process, which answers at once.

    :class:`SocketLink` documents what the methods do in larger jobs. Here notes and :meth:`fail` have no effect.
    """

    def __init__(self, timeout: float, stall: float) -> None:
        self._job = Job(1, timeout, stall)
        self._job.join(0, 1, "localhost", os.getpid())
        self._lock = threading.Lock()

    def request(self, message: Message, payload: bytes = b"", timeout: float | None = None) -> Reply:
        """Send a request and return its reply.

        Raises:
            TimeoutError: no reply arrived within ``timeout`` seconds.
            HvdbridgeError: the cause that was passed to :meth:`fail`.
        """
        with self._lock:
            self._job.receive(0, {**message, "id": 0}, payload, time.monotonic())
            if not (replies := self._job.take()):  # no other rank can complete the request: let it time out
                self._job.tick(float("inf"))
                replies = self._job.take()
        return replies[-1][1:]

    def send(self, message: Message) -> None:
        """Send a note. Errors are ignored, since the reading thread detects the end of the helper."""

    def fail(self, cause: BaseException) -> None:
        """Make each pending and each later request raise ``cause``."""

    def own_address(self) -> str:
        """Return this host's address on the connection."""
        return "127.0.0.1"

    def close(self) -> None:
        """Close the connection."""


class SocketLink(Link):
    """The link of a job of several ranks.

    Args:
        sock: a connection on which the helper has accepted this rank.
        on_message: called with each message that is no reply.
        on_tick: called every TICK_SECONDS.
        on_disconnect: called when the connection ends before :meth:`close`.

    The reading thread makes these calls.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_tick: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:  # fmt: skip
        self._sock = sock
        self._on_message, self._on_tick, self._on_disconnect = on_message, on_tick, on_disconnect
        self._request_ids = itertools.count(1)
        self._pending: dict[int, Future[Reply]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._write_lock = threading.Lock()
        os.register_at_fork(after_in_child=partial(close_copy, weakref.ref(sock)))
        self._thread = threading.Thread(target=self._read, name="hvdbridge-monitor", daemon=True)

    def start(self) -> None:
        """Start the reading thread, once the owner is ready for calls."""
        self._thread.start()

    def request(self, message: Message, payload: bytes = b"", timeout: float | None = None) -> Reply:
        request_id, future = next(self._request_ids), Future[Reply]()
        self._pending[request_id] = future
        try:
            if self._failure is not None:  # checked after fail() can see the future
                raise self._failure
            self._write(pack({**message, "id": request_id}, payload))
            return future.result(timeout)
        finally:
            self._pending.pop(request_id, None)

    def send(self, message: Message) -> None:
        with suppress(OSError):
            self._write(pack(message))

    def fail(self, cause: BaseException) -> None:
        self._failure = self._failure or cause
        for future in list(self._pending.values()):
            with suppress(Exception):  # the reply has just arrived
                future.set_exception(cause)

    def own_address(self) -> str:
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._sock.close()

    def _write(self, frame: bytes) -> None:
        with self._write_lock:
            self._sock.sendall(frame)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        data, next_tick = bytearray(), 0.0
        while not self._closed:
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + TICK_SECONDS
                self._on_tick()
            if not poll.poll(TICK_SECONDS * 1000):
                continue
            try:  # receive a part of a frame, so that ticks continue during a long one
                chunk = self._sock.recv(1 << 18)
                data += chunk
                frames = list(take_frames(data, MEMBER_FRAME))
            except (OSError, ValueError):
                break
            for message, payload in frames:
                if "id" not in message:
                    self._on_message(message)
                elif future := self._pending.get(message["id"]):
                    with suppress(Exception):  # fail() has just failed it
                        future.set_result((message, payload))
            if not chunk:
                break
        if not self._closed:
            self._on_disconnect()
            while not self._closed:  # on_tick ends the process after a while
                time.sleep(TICK_SECONDS)
                self._on_tick()


def close_copy(sock: weakref.ref[socket.socket]) -> None:
    """Close a forked child's copy of a socket."""
    if (copy := sock()) is not None:
        copy.close()


def join(address: HelperAddress, hello: bytes, rank: int, timeout: float) -> socket.socket:
    """Connect to the helper and return a socket on which it has accepted this rank; retry for ``timeout`` seconds.

    Raises:
        RendezvousError: the helper cannot be reached in time, or rejects this rank.
    """
    deadline = time.monotonic() + timeout
    target = f"{address.host}:{address.port}"
    while True:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=min(10.0, timeout))
            try:
                sock.sendall(hello)
                reply, _ = read_frame(sock, MEMBER_FRAME)
                if "error" in reply:
                    raise RendezvousError(f"rank {rank} was not let into the job at {target}: {reply['error']}")
                keep_alive(sock)
                sock.settimeout(None)
                return sock
            except BaseException:
                sock.close()
                raise
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {rank} on {socket.gethostname()} could not reach hvdbridge's helper at {target} within "
                    f"{timeout:g} s: {error}. The address must be reachable from this host. For a firewall, "
                    "HVDBRIDGE_PORTS sets the ports; for another network, HVDBRIDGE_IFACE sets the interface."
                ) from error
            time.sleep(0.1)
