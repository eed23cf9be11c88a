"""A rank's connection to the helper: requests, which the helper answers, and notes, which it does not.

Rules:

1. One thread reads and keeps time (``on_tick`` every TICK); any thread writes, one frame at a time.
2. When the job fails or the helper is gone, every open request ends with that cause; none waits for ever.
3. A forked child (a DataLoader's worker) closes its copy: otherwise this rank's death would not be seen.
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

TICK = 0.1
Reply = tuple[Message, bytes]


class Link:
    """A job of one: the helper's rules in this process, without a socket. No other rank could answer later."""

    def __init__(self, timeout: float, stall: float) -> None:
        self._job = Job(1, timeout, stall)
        self._job.join(0, 1, "localhost", os.getpid())
        self._lock = threading.Lock()

    def ask(self, message: Message, payload: bytes = b"", timeout: float | None = None) -> Reply:
        """Send a request and wait for its answer.

        Raises:
            TimeoutError: no answer came within ``timeout`` seconds.
            HvdbridgeError: the cause that :meth:`fail` was given.
        """
        with self._lock:
            self._job.receive(0, {**message, "id": 0}, payload, time.monotonic())
            if not (replies := self._job.take()):
                self._job.tick(float("inf"))
                replies = self._job.take()
        return replies[-1][1:]

    def tell(self, message: Message) -> None:
        """Send a note. It is lost in silence if the helper is gone: the reading thread notices that."""

    def fail(self, cause: BaseException) -> None:
        """End every open request, and every later one, with ``cause``."""

    def own_address(self) -> str:
        """This host's address on the connection."""
        return "127.0.0.1"

    def close(self) -> None:
        """End the connection."""


class SocketLink(Link):
    """The connection of a job of several; the helper has accepted this rank already."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_tick: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._sock = sock
        self._on_message, self._on_tick, self._on_end = on_message, on_tick, on_end
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Reply]] = {}
        self._cause: BaseException | None = None
        self._closed = False
        self._writing = threading.Lock()
        os.register_at_fork(after_in_child=partial(_close_copy, weakref.ref(sock)))
        self._thread = threading.Thread(target=self._read, name="hvdbridge-monitor", daemon=True)

    def start(self) -> None:
        """Begin to read: the owner is ready for calls."""
        self._thread.start()

    def ask(self, message: Message, payload: bytes = b"", timeout: float | None = None) -> Reply:
        number, future = next(self._numbers), Future[Reply]()
        self._open[number] = future
        try:
            if self._cause is not None:  # looked at after the future is known to fail()
                raise self._cause
            self._write(pack({**message, "id": number}, payload))
            return future.result(timeout)
        finally:
            self._open.pop(number, None)

    def tell(self, message: Message) -> None:
        with suppress(OSError):
            self._write(pack(message))

    def fail(self, cause: BaseException) -> None:
        self._cause = self._cause or cause
        for future in list(self._open.values()):
            with suppress(Exception):  # answered in the same moment
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
        with self._writing:
            self._sock.sendall(frame)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        data, next_tick = bytearray(), 0.0
        while not self._closed:
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + TICK
                self._on_tick()
            if not poll.poll(TICK * 1000):
                continue
            try:  # a part of a frame, so that ticks go on while a long one comes
                chunk = self._sock.recv(1 << 18)
                data += chunk
                frames = list(take_frames(data, MEMBER_FRAME))
            except (OSError, ValueError):
                break
            for message, payload in frames:
                if "id" not in message:
                    self._on_message(message)
                elif future := self._open.get(message["id"]):
                    with suppress(Exception):  # it failed in the same moment
                        future.set_result((message, payload))
            if not chunk:
                break
        if not self._closed:
            self._on_end()
            while not self._closed:  # on_tick ends the process in time
                time.sleep(TICK)
                self._on_tick()


def _close_copy(sock: weakref.ref[socket.socket]) -> None:
    if (copy := sock()) is not None:
        copy.close()


def join(address: HelperAddress, hello: bytes, rank: int, timeout: float) -> socket.socket:
    """A socket on which the helper has accepted this rank."""
    deadline = time.monotonic() + timeout
    where = f"{address.host}:{address.port}"
    while True:
        try:
            sock = socket.create_connection((address.host, address.port), timeout=min(10.0, timeout))
            try:
                sock.sendall(hello)
                reply, _ = read_frame(sock, MEMBER_FRAME)
                if "error" in reply:
                    raise RendezvousError(f"rank {rank} was not let into the job at {where}: {reply['error']}")
                keep_alive(sock)
                sock.settimeout(None)
                return sock
            except BaseException:
                sock.close()
                raise
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {rank} on {socket.gethostname()} could not reach hvdbridge's helper at {where} within "
                    f"{timeout:g} s: {error}. The address must be reachable from this host (firewall? interface?)."
                ) from error
            time.sleep(0.1)
