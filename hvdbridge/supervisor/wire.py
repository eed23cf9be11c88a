"""The frames that ranks and the helper exchange.

Rules:

1. A frame is a 4-byte big-endian length and a body of that many bytes. The body is one JSON object. If the frame has a
   payload, a zero byte and the payload follow.
2. The receiver checks the length before it reads the body. A guest, a connection that has not yet shown the secret, may
   send short frames only.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
LENGTH = struct.Struct("!I")
GUEST_FRAME = 1024  # maximum bytes of a frame from a guest
VALUE = 32 << 20  # maximum bytes of a value in the store
MEMBER_FRAME = VALUE + (1 << 20)  # maximum bytes of a frame from a rank
CHUNK = 1 << 20  # bytes of one read from a socket


class FrameError(ValueError):
    """Raised for bytes that are not a frame of this protocol, or for a frame above the limit."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Return one frame: header and body.

    >>> unpack(pack({"op": "set", "key": "a"}, b"b")[4:])
    ({'op': 'set', 'key': 'a'}, b'b')
    """
    head = json.dumps(message, separators=(",", ":")).encode()
    body = head + b"\0" + payload if payload else head
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[Message, bytes]:
    """Return message and payload of a frame's body; raise FrameError if it has no JSON object."""
    head, _, payload = body.partition(b"\0")
    try:
        message = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise FrameError("not a message: no JSON object")
    return message, payload


def length_of(header: bytes | bytearray, bound: int) -> int:
    """Return the length of the body from a frame's header; raise FrameError if it exceeds ``bound``."""
    (length,) = LENGTH.unpack(header)
    if length > bound:
        raise FrameError(f"a frame of {length} bytes; at most {bound} are accepted")
    return int(length)


def receive_exactly(sock: socket.socket, size: int) -> bytearray:
    """Receive ``size`` bytes from ``sock``; block until they have arrived.

    Raises:
        ConnectionResetError: the connection ended early.
    """
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` from ``sock``; raise as :func:`receive_exactly` does."""
    offset = 0
    while offset < len(memory):
        count = sock.recv_into(memory[offset : offset + CHUNK])
        if not count:
            raise ConnectionResetError("closed by the other side")
        offset += count


def read_frame(sock: socket.socket, bound: int) -> tuple[Message, bytes]:
    """Receive one frame from ``sock`` and return its message and payload."""
    return unpack(bytes(receive_exactly(sock, length_of(receive_exactly(sock, LENGTH.size), bound))))


def take_frames(data: bytearray, bound: int) -> Iterator[tuple[Message, bytes]]:
    """Yield message and payload of each complete frame in ``data``, and remove the frame from ``data``."""
    while len(data) >= LENGTH.size:
        end = LENGTH.size + length_of(data[: LENGTH.size], bound)
        if len(data) < end:
            return
        yield unpack(bytes(data[LENGTH.size : end]))
        del data[:end]


def keep_alive(sock: socket.socket) -> None:
    """Detect within 20 s that the other host is unreachable (no power, no network); send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 8), ("TCP_KEEPINTVL", 4), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
