"""How requests reach the coordinator on rank 0 and its decisions come back: a star of TCP connections.

Rules:

1. Requests are sent by the thread that submits or waits, so that a rank that computes needs no thread's turn; what
   comes back is read by a thread of its own, which sleeps while nothing comes.
2. Rank 0's own requests go to the coordinator directly, under the lock that keeps its messages in one order.
3. Rank 0's address and the secret of the star travel through the job's store; who does not know it is cut off.
4. The end of a connection without a goodbye: the job's monitor knows the cause, and tells. Only where it tells
   nothing for a while is the rank called lost here.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from hvdbridge.errors import RendezvousError
from hvdbridge.startup.network import first_free, listening
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.wire import (
    GUEST_FRAME,
    LENGTH,
    MEMBER_FRAME,
    FrameError,
    Message,
    keep_alive,
    length_of,
    pack,
    unpack,
)  # fmt: skip
from hvdbridge.torch.coordinator import Coordinator, Request

Deliver = Callable[[Message], None]
Steps = Sequence[tuple[int, str, int]]
"""Process set, channel, number."""

TICK = 0.2
LOST_SECONDS = 1.5
GUEST_SECONDS = 10.0


class Control:
    """Of a job of one, and the part that rank 0 adds its connections to."""

    def __init__(
        self, coordinator: Coordinator, deliver: Deliver, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._deliver = deliver
        self._lock = threading.Lock()

    def send(self, requests: Iterable[Request]) -> None:
        """Submit this rank's requests."""
        with self._lock:
            self._coordinator.submit(0, requests, self._clock())
            self._pass_on()

    def announce(self, steps: Steps) -> None:
        """This rank has begun these steps: of each channel the last one."""
        with self._lock:
            self._coordinator.begin(steps, self._clock())
            self._pass_on()

    def leave(self) -> None:
        """This rank will submit nothing more."""
        with self._lock:
            self._coordinator.leave(0, LEFT)
            self._pass_on()

    def fail(self, text: str) -> None:
        """An operation failed on this rank while its data travelled: everything ends on all ranks."""
        with self._lock:
            self._coordinator.fail(text)
            self._pass_on()

    def close(self) -> None:
        """Free what was opened. Harmless when repeated."""

    def _pass_on(self) -> None:
        for _, message in self._coordinator.take():
            self._deliver(message)


LEFT = "has called hvd.shutdown() or come to the end of its script"


class Hub(Control):
    """Rank 0 of several: listens, and carries the coordinator's messages to all."""

    def __init__(
        self, coordinator: Coordinator, deliver: Deliver, monitor: Monitor, host: str, key: str, seconds: float,
        ports: range | None = None,
    ) -> None:  # fmt: skip
        super().__init__(coordinator, deliver, monitor.clock)
        self._secret = secrets.token_hex(16)
        self._listener = first_free(lambda port: listening(host, port, 1024), ports)
        _close_in_children(self._listener)
        port = self._listener.getsockname()[1]
        monitor.store_set(key, f"{host},{port},{self._secret}".encode())
        self._size = coordinator.size
        self._socks: dict[int, socket.socket] = {}
        self._lost: dict[int, float] = {}
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        try:
            self._accept(time.monotonic() + seconds)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="hvdbridge-coordinator", daemon=True)
        self._thread.start()

    def _accept(self, deadline: float) -> None:
        while len(self._socks) < self._size - 1:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, self._size) if rank not in self._socks]
                raise RendezvousError(f"hvd.init() was not called in time by the ranks {missing}") from None
            try:
                sock.settimeout(GUEST_SECONDS)
                hello, _ = unpack(exactly(sock, length_of(exactly(sock, LENGTH.size), GUEST_FRAME)))
                rank = int(hello["rank"])
                if not hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()):
                    raise ValueError("not the secret of this job")
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                sock.close()
                continue
            keep_alive(sock)
            sock.settimeout(None)
            _close_in_children(sock)
            self._socks[rank] = sock
        self._listener.close()

    def _serve(self) -> None:
        """Until the end, whatever comes: without this thread every rank would wait for its own clock."""
        try:
            self._read_and_tick()
        except Exception as error:
            self.fail(f"the coordinator of operations, on rank 0, failed: {error!r}")
            raise

    def _read_and_tick(self) -> None:
        """Read what ranks submit; keep time."""
        buffers = {rank: bytearray() for rank in self._socks}
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._socks.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ)
            next_tick = time.monotonic() + TICK
            while not self._closed:
                for event, _ in selector.select(TICK):
                    rank = event.data
                    if rank is None:  # close()
                        return
                    if not self._read(rank, buffers[rank]):
                        selector.unregister(event.fileobj)
                        self._lost[rank] = time.monotonic() + LOST_SECONDS
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._tick()

    def _read(self, rank: int, buffer: bytearray) -> bool:
        try:
            chunk = self._socks[rank].recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            return False
        buffer += chunk
        with self._lock:
            try:
                for message in frames(buffer):
                    self._hear(rank, message)
            except FrameError:
                return False
            self._pass_on()
        return True

    def _hear(self, rank: int, message: Message) -> None:
        if "submit" in message:
            self._coordinator.submit(rank, [Request.unpack(each) for each in message["submit"]], self._clock())
        elif "begun" in message:
            self._coordinator.begin([tuple(each) for each in message["begun"]], self._clock())
        elif "fail" in message:
            self._coordinator.fail(message["fail"])
        else:
            self._coordinator.leave(rank, LEFT)

    def _tick(self) -> None:
        with self._lock:
            now = time.monotonic()
            for rank in [rank for rank, until in self._lost.items() if now >= until]:
                del self._lost[rank]
                self._coordinator.leave(rank, "is gone: its connection ended")
            self._coordinator.tick(self._clock())
            self._pass_on()

    def _pass_on(self) -> None:
        """Under the lock: the messages of all decisions leave in one order."""
        frames_: dict[int, bytes] = {}  # by identity: most messages go to several ranks
        for rank, message in self._coordinator.take():
            if rank == 0:
                self._deliver(message)
                continue
            frame = frames_.get(id(message)) or frames_.setdefault(id(message), pack(message))
            with suppress(OSError):  # the reader notices
                self._socks[rank].sendall(frame)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake.send(b"\0")
            self._thread.join(1.0)
            self._free()

    def _free(self) -> None:
        for sock in (self._listener, self._wake, self._woken, *self._socks.values()):
            sock.close()


class Spoke(Control):
    """Another rank: one connection to rank 0."""

    def __init__(self, deliver: Deliver, monitor: Monitor, rank: int, key: str, seconds: float) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._closed = False
        host, port, secret = monitor.store_get(key, seconds).decode().split(",")
        self._sock = socket.create_connection((host, int(port)), timeout=seconds)
        _close_in_children(self._sock)
        keep_alive(self._sock)
        self._sock.settimeout(None)
        self._write({"secret": secret, "rank": rank})
        self._thread = threading.Thread(target=self._listen, name="hvdbridge-decisions", daemon=True)
        self._thread.start()

    def send(self, requests: Iterable[Request]) -> None:
        self._write({"submit": [request.pack() for request in requests]})

    def announce(self, steps: Steps) -> None:
        self._write({"begun": list(map(list, steps))})

    def leave(self) -> None:
        self._write({"leave": True})

    def fail(self, text: str) -> None:
        self._write({"fail": text})

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join(1.0)
            self._sock.close()

    def _write(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # the reader notices
            self._sock.sendall(pack(message))

    def _listen(self) -> None:
        buffer = bytearray()
        while not self._closed:
            try:
                chunk = self._sock.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                break
            buffer += chunk
            for message in frames(buffer):
                self._deliver(message)
        if not self._closed:
            time.sleep(LOST_SECONDS)  # rule 4
            self._deliver({"failed": "the connection to rank 0, which coordinates the operations, ended"})


def frames(buffer: bytearray) -> Iterable[Message]:
    """Take the complete frames out of ``buffer``.

    >>> data = bytearray(pack({"leave": True}) + b"\\0")
    >>> list(frames(data)), len(data)
    ([{'leave': True}], 1)
    """
    start = 0
    try:
        while len(buffer) - start >= LENGTH.size:
            end = start + LENGTH.size + length_of(bytes(buffer[start : start + LENGTH.size]), MEMBER_FRAME)
            if len(buffer) < end:
                break
            message, _ = unpack(bytes(buffer[start + LENGTH.size : end]))
            start = end
            yield message
    finally:
        del buffer[:start]


def exactly(sock: socket.socket, count: int) -> bytes:
    """``count`` bytes from ``sock``.

    Raises:
        EOFError: it ended before.
    """
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _close_in_children(sock: socket.socket) -> None:
    """A forked child (a DataLoader's worker) must not keep the connection open."""
    os.register_at_fork(after_in_child=partial(_close, weakref.ref(sock)))


def _close(reference: weakref.ref[socket.socket]) -> None:
    if (sock := reference()) is not None:
        sock.close()
