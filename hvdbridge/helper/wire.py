"""Frames between a rank and the helper.

Rules:

1. A frame is a 4-byte big-endian length and that many bytes: one JSON object, then, where bytes travel,
   a zero byte and the payload.
2. The receiver bounds the length before it reads the body; a guest's bound (no secret shown yet) is small.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Message = dict[str, Any]
LENGTH = struct.Struct("!I")
GUEST_FRAME = 1024
MEMBER_FRAME = 64 << 20


class FrameError(ValueError):
    """Bytes that are no frame of this protocol, or a frame above the bound."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    """One frame.

    >>> unpack(pack({"op": "set", "key": "a"}, b"b")[4:])
    ({'op': 'set', 'key': 'a'}, b'b')
    """
    head = json.dumps(message, separators=(",", ":")).encode()
    body = head + b"\0" + payload if payload else head
    if len(body) > MEMBER_FRAME:
        raise FrameError(f"a message of {len(body)} bytes; the helper carries at most {MEMBER_FRAME}")
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


def length_of(header: bytes, bound: int) -> int:
    """The length that a frame's header announces."""
    (length,) = LENGTH.unpack(header)
    if length > bound:
        raise FrameError(f"a frame of {length} bytes; at most {bound} are accepted")
    return int(length)
