"""How messages reach the coordinator on rank 0 and its messages come back: a star of TCP connections.

Rules:

1. The thread that submits or waits sends, so a rank that computes needs no other thread's turn. One thread per rank
   receives, and sleeps while nothing comes.
2. Rank 0's own messages go to the coordinator directly, under the lock that keeps the coordinator's messages in order.
3. Rank 0's address and the secret of the star travel through the job's store. A guest without the secret is cut off.
4. A connection may end without a goodbye. The job's monitor knows the cause, and reports it. Only if it reports
   nothing for LOST_SECONDS, the rank is called lost here.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from hvdbridge.errors import RendezvousError
from hvdbridge.reduction.session import Session
from hvdbridge.startup.network import first_free, listening
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.link import SocketLink, _close_copy, join
from hvdbridge.supervisor.spawn import HelperAddress
from hvdbridge.supervisor.wire import (
    GUEST_FRAME,
    LENGTH,
    MEMBER_FRAME,
    FrameError,
    Message,
    keep_alive,
    length_of,
    pack,
    read_frame,
    unpack,
)  # fmt: skip
from hvdbridge.torch.coordinator import GONE, Coordinator
from hvdbridge.torch.settings import Settings

Deliver = Callable[[Message], None]

TICK = 0.2
LOST_SECONDS = 1.5
GUEST_SECONDS = 1.0


class Control:
    """The coordinator's end in a job of one."""

    def __init__(self, coordinator: Coordinator, deliver: Deliver, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._deliver = deliver
        self._clock = clock
        self._lock = threading.Lock()

    def tell(self, message: Message) -> None:
        """Send a message of this rank to the coordinator (:meth:`Coordinator.receive`)."""
        self._hear(0, message)

    def _hear(self, rank: int, *messages: Message) -> None:
        with self._lock:
            for message in messages:
                self._coordinator.receive(rank, message, self._clock())
            self._pass_on()

    def _pass_on(self) -> None:
        for _, message in self._coordinator.take():
            self._deliver(message)

    def close(self) -> None:
        """Free what was opened. Harmless when repeated."""


class Hub(Control):
    """Rank 0 of several: listens, and carries the coordinator's messages to all."""

    def __init__(
        self, coordinator: Coordinator, deliver: Deliver, monitor: Monitor, key: str, seconds: float,
        ports: range | None = None,
    ) -> None:  # fmt: skip
        super().__init__(coordinator, deliver, monitor.clock)
        self._socks: dict[int, socket.socket] = {}
        self._lost: dict[int, float] = {}
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._listener = first_free(lambda port: listening(monitor.host, port, 1024), ports)
        _close_in_children(self._listener)
        address = HelperAddress(monitor.host, self._listener.getsockname()[1], 0, secrets.token_hex(16), "hvd")
        monitor.store_set(key, str(address).encode())
        try:
            self._accept(address.secret, time.monotonic() + seconds)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="hvdbridge-coordinator", daemon=True)
        self._thread.start()

    def _accept(self, secret: str, deadline: float) -> None:
        while missing := [rank for rank in range(1, self._coordinator.size) if rank not in self._socks]:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise RendezvousError(f"hvd.init() was not called in time by the ranks {missing}") from None
            try:
                sock.settimeout(GUEST_SECONDS)
                hello, _ = read_frame(sock, GUEST_FRAME)
                rank = int(hello["rank"])
                if not hmac.compare_digest(str(hello["secret"]).encode(), secret.encode()):
                    raise ValueError("not the secret of this job")
                sock.sendall(pack({"ok": True}))
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
            self.tell({"fail": f"the coordinator of operations, on rank 0, failed: {error!r}"})
            raise

    def _read_and_tick(self) -> None:
        buffers = {rank: bytearray() for rank in self._socks}
        next_tick = 0.0
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._socks.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                for event, _ in selector.select(TICK):
                    if event.data is not None and not self._read(event.data, buffers[event.data]):
                        selector.unregister(event.fileobj)
                        self._lost[event.data] = time.monotonic() + LOST_SECONDS
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._tick()

    def _read(self, rank: int, buffer: bytearray) -> bool:
        """Whether the connection goes on."""
        try:
            buffer += (chunk := self._socks[rank].recv(1 << 16))
            self._hear(rank, *frames(buffer))
        except (OSError, FrameError):
            return False
        return bool(chunk)

    def _tick(self) -> None:
        with self._lock:
            for rank in [rank for rank, until in self._lost.items() if time.monotonic() >= until]:
                del self._lost[rank]
                self._coordinator.leave(rank, GONE)
            self._coordinator.tick(self._clock())
            self._pass_on()

    def _pass_on(self) -> None:
        """Under the lock: the messages of all decisions leave in one order."""
        packed: dict[int, bytes] = {}  # by identity: most messages go to several ranks
        for rank, message in self._coordinator.take():
            if rank == 0:
                self._deliver(message)
                continue
            frame = packed.get(id(message)) or packed.setdefault(id(message), pack(message))
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


def spoke(deliver: Deliver, monitor: Monitor, rank: int, key: str, seconds: float) -> SocketLink:
    """The connection of another rank to rank 0."""

    def on_end() -> None:
        time.sleep(LOST_SECONDS)  # rule 4
        deliver({"failed": "the connection to rank 0, which coordinates the operations, ended"})

    address = HelperAddress.parse(monitor.store_get(key, seconds).decode())
    sock = join(address, pack({"secret": address.secret, "rank": rank}), rank, seconds)
    link = SocketLink(sock, deliver, lambda: None, on_end)
    link.start()
    return link


def open_control(session: Session, settings: Settings, deliver: Deliver) -> Control | SocketLink:
    """This rank's end of the negotiation; collective. ``deliver`` takes the coordinator's messages."""
    monitor, rank, size = session.monitor, session.world.rank, session.world.size
    number = session.opened["hvd"] = session.opened.get("hvd", 0) + 1
    key, seconds = f"hvd/{number}", session.config.timeout_seconds
    if rank > 0:
        return spoke(deliver, monitor, rank, key, seconds)
    coordinator = Coordinator(
        size, settings.stall_seconds, settings.timeout_seconds, settings.fusion_bytes, settings.limit
    )
    if size == 1:
        return Control(coordinator, deliver, monitor.clock)
    return Hub(coordinator, deliver, monitor, key, seconds, session.config.ports)


def frames(buffer: bytearray) -> Iterator[Message]:
    """Take the complete frames out of ``buffer``.

    >>> data = bytearray(pack({"leave": True}) + b"\\0")
    >>> list(frames(data)), len(data)
    ([{'leave': True}], 1)
    """
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + length_of(bytes(buffer[: LENGTH.size]), MEMBER_FRAME)
        if len(buffer) < end:
            break
        yield unpack(bytes(buffer[LENGTH.size : end]))[0]
        del buffer[:end]


def _close_in_children(sock: socket.socket) -> None:
    """A forked child (a DataLoader's worker) must not keep the connection open."""
    os.register_at_fork(after_in_child=partial(_close_copy, weakref.ref(sock)))
