"""Control connections: a hub on rank 0, which runs the coordinator, and a TCP connection to it from each other rank.

Rules:

1. The thread that submits or waits also sends, so sending does not depend on another thread. One thread per rank
   receives, and blocks while no message arrives.
2. Rank 0 passes its own messages to the coordinator directly. One lock serializes calls of the coordinator and the
   messages that it sends.
3. The hub publishes its address and a secret in the job's store. It closes a connection that does not send the secret.
4. A connection may end without a ``leave`` message. Normally the job's monitor reports the cause. If it reports none
   within LOST_SECONDS, this module reports the rank as lost.
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
from hvdbridge.supervisor.link import SocketLink, close_copy, join
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
from hvdbridge.torch.coordinator import CONNECTION_ENDED, Coordinator
from hvdbridge.torch.settings import Settings

OnMessage = Callable[[Message], None]

TICK = 0.2  # seconds between calls of Coordinator.tick
LOST_SECONDS = 1.5
HANDSHAKE_SECONDS = 1.0


class Control:
    """Connection to the coordinator in a job of one rank: direct calls. ``clock`` returns seconds."""

    def __init__(self, coordinator: Coordinator, on_message: OnMessage, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._on_message = on_message
        self._clock = clock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message of this rank to the coordinator (:meth:`Coordinator.receive`)."""
        self._receive(0, message)

    def _receive(self, rank: int, *messages: Message) -> None:
        with self._lock:
            for message in messages:
                self._coordinator.receive(rank, message, self._clock())
            self._send_replies()

    def _send_replies(self) -> None:
        """Deliver the coordinator's messages. The caller holds the lock."""
        for _, message in self._coordinator.take():
            self._on_message(message)

    def close(self) -> None:
        """Close the connection. Harmless when repeated."""


class Hub(Control):
    """Rank 0's end in a job of several ranks: accepts their connections, and sends the coordinator's messages.

    The constructor stores the hub's address under ``key``, and raises RendezvousError if a rank does not connect within
    ``timeout`` seconds.
    """

    def __init__(
        self, coordinator: Coordinator, on_message: OnMessage, monitor: Monitor, key: str, timeout: float,
        ports: range | None = None,
    ) -> None:  # fmt: skip
        super().__init__(coordinator, on_message, monitor.clock)
        self._socks: dict[int, socket.socket] = {}
        self._lost_at: dict[int, float] = {}  # when to report a rank whose connection ended
        self._closed = False
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._listener = first_free(lambda port: listening(monitor.host, port, 1024), ports)
        _close_in_children(self._listener)
        address = HelperAddress(monitor.host, self._listener.getsockname()[1], 0, secrets.token_hex(16), "hvd")
        monitor.store_set(key, str(address).encode())
        try:
            self._accept(address.secret, time.monotonic() + timeout)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="hvdbridge-coordinator", daemon=True)
        self._thread.start()

    def _accept(self, secret: str, deadline: float) -> None:
        """Accept one connection of each other rank until ``deadline`` (monotonic seconds)."""
        while missing := [rank for rank in range(1, self._coordinator.size) if rank not in self._socks]:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise RendezvousError(f"hvd.init() was not called in time by the ranks {missing}") from None
            try:
                sock.settimeout(HANDSHAKE_SECONDS)
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
        """Run until :meth:`close`. Report a failure to all ranks, which would otherwise wait for their own timeouts."""
        try:
            self._read_and_tick()
        except Exception as error:
            self.send({"fail": f"the coordinator of operations, on rank 0, failed: {error!r}"})
            raise

    def _read_and_tick(self) -> None:
        buffers = {rank: bytearray() for rank in self._socks}
        next_tick = 0.0
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._socks.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closed:
                for event, _ in selector.select(TICK):
                    if event.data is not None and not self._read(event.data, buffers[event.data]):
                        selector.unregister(event.fileobj)
                        self._lost_at[event.data] = time.monotonic() + LOST_SECONDS
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._tick()

    def _read(self, rank: int, buffer: bytearray) -> bool:
        """Handle the data that ``rank`` has sent; return False if its connection has ended."""
        try:
            buffer += (chunk := self._socks[rank].recv(1 << 16))
            self._receive(rank, *take_messages(buffer))
        except (OSError, FrameError):
            return False
        return bool(chunk)

    def _tick(self) -> None:
        with self._lock:
            for rank in [rank for rank, lost_at in self._lost_at.items() if time.monotonic() >= lost_at]:
                del self._lost_at[rank]
                self._coordinator.leave(rank, CONNECTION_ENDED)
            self._coordinator.tick(self._clock())
            self._send_replies()

    def _send_replies(self) -> None:
        """Send the coordinator's messages. The caller holds the lock, so all ranks get decisions in one order."""
        packed: dict[int, bytes] = {}  # frames by id(message), because most messages go to several ranks
        for rank, message in self._coordinator.take():
            if rank == 0:
                self._on_message(message)
                continue
            frame = packed.get(id(message)) or packed.setdefault(id(message), pack(message))
            with suppress(OSError):  # the receiving thread notices that the connection ended
                self._socks[rank].sendall(frame)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake_writer.send(b"\0")
            self._thread.join(1.0)
            self._free()

    def _free(self) -> None:
        for sock in (self._listener, self._wake_writer, self._wake_reader, *self._socks.values()):
            sock.close()


def connect_to_hub(on_message: OnMessage, monitor: Monitor, rank: int, key: str, timeout: float) -> SocketLink:
    """Connect another rank to the hub, and return its end of the connection."""

    def on_end() -> None:
        time.sleep(LOST_SECONDS)  # rule 4
        on_message({"failed": "the connection to rank 0, which coordinates the operations, ended"})

    address = HelperAddress.parse(monitor.store_get(key, timeout).decode())
    sock = join(address, pack({"secret": address.secret, "rank": rank}), rank, timeout)
    link = SocketLink(sock, on_message, lambda: None, on_end)
    link.start()
    return link


def open_control(session: Session, settings: Settings, on_message: OnMessage) -> Control | SocketLink:
    """Connect this rank to the coordinator; collective. ``on_message`` is called with each message to this rank."""
    monitor, rank, size = session.monitor, session.world.rank, session.world.size
    number = session.opened["hvd"] = session.opened.get("hvd", 0) + 1
    key, timeout = f"hvd/{number}", session.config.timeout_seconds
    if rank > 0:
        return connect_to_hub(on_message, monitor, rank, key, timeout)
    coordinator = Coordinator(
        size, settings.stall_seconds, settings.timeout_seconds, settings.fusion_bytes, settings.limit
    )
    if size == 1:
        return Control(coordinator, on_message, monitor.clock)
    return Hub(coordinator, on_message, monitor, key, timeout, session.config.ports)


def take_messages(buffer: bytearray) -> Iterator[Message]:
    """Remove the complete frames from ``buffer``, and yield their messages.

    >>> data = bytearray(pack({"leave": True}) + b"\\0")
    >>> list(take_messages(data)), len(data)
    ([{'leave': True}], 1)
    """
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + length_of(bytes(buffer[: LENGTH.size]), MEMBER_FRAME)
        if len(buffer) < end:
            break
        yield unpack(bytes(buffer[LENGTH.size : end]))[0]
        del buffer[:end]


def _close_in_children(sock: socket.socket) -> None:
    """Close the socket in forked children, such as DataLoader workers, whose copy would keep the connection open."""
    os.register_at_fork(after_in_child=partial(close_copy, weakref.ref(sock)))
