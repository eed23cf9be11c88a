"""Frames between a rank and the helper.

Rules:

1. A frame is a 4-byte big-endian length and that many bytes: one JSON object, then, where bytes travel,
   a zero byte and the payload.
2. The receiver bounds the length before it reads the body; a guest's bound (no secret shown yet) is small.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
LENGTH = struct.Struct("!I")
GUEST_FRAME = 1024
VALUE = 32 << 20
MEMBER_FRAME = VALUE + (1 << 20)
CHUNK = 1 << 20


class FrameError(ValueError):
    """Bytes that are no frame of this protocol, or a frame above the bound."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    """One frame.

    >>> unpack(pack({"op": "set", "key": "a"}, b"b")[4:])
    ({'op': 'set', 'key': 'a'}, b'b')
    """
    head = json.dumps(message, separators=(",", ":")).encode()
    body = head + b"\0" + payload if payload else head
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[Message, bytes]:
    """Message and payload of a frame's body."""
    head, _, payload = body.partition(b"\0")
    try:
        message = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise FrameError("not a message: no JSON object")
    return message, payload


def length_of(header: bytes | bytearray, bound: int) -> int:
    """The length that a frame's header announces."""
    (length,) = LENGTH.unpack(header)
    if length > bound:
        raise FrameError(f"a frame of {length} bytes; at most {bound} are accepted")
    return int(length)


def exactly(sock: socket.socket, size: int) -> bytearray:
    """``size`` bytes from ``sock``, which blocks.

    Raises:
        ConnectionResetError: the connection ended before.
    """
    data = bytearray(size)
    fill(sock, memoryview(data))
    return data


def fill(sock: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` from ``sock``; raises as :func:`exactly` does."""
    at = 0
    while at < len(memory):
        got = sock.recv_into(memory[at : at + CHUNK])
        if not got:
            raise ConnectionResetError("closed by the other side")
        at += got


def read_frame(sock: socket.socket, bound: int) -> tuple[Message, bytes]:
    """Message and payload of the next frame from ``sock``."""
    return unpack(bytes(exactly(sock, length_of(exactly(sock, LENGTH.size), bound))))


def take_frames(data: bytearray, bound: int) -> Iterator[tuple[Message, bytes]]:
    """Message and payload of each frame that is complete in ``data``, which loses it."""
    while len(data) >= LENGTH.size:
        end = LENGTH.size + length_of(data[: LENGTH.size], bound)
        if len(data) < end:
            return
        yield unpack(bytes(data[LENGTH.size : end]))
        del data[:end]


def keep_alive(sock: socket.socket) -> None:
    """Notice within 20 s that the other host is gone (no power, no network), and send small frames at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 8), ("TCP_KEEPINTVL", 4), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
