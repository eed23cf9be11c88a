"""Random frames and half-open connections: ``attack.py HOST PORT...``; ends when its standard input does."""

import random
import socket
import sys
from contextlib import suppress

FRAMES, HALF_OPEN = 1000, 100

host, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
draw = random.Random(0)
held = [socket.create_connection((host, port), 10) for port in ports for _ in range(HALF_OPEN // len(ports))]
for number in range(FRAMES):
    with suppress(OSError), socket.create_connection((host, ports[number % len(ports)]), 10) as sock:
        sock.sendall(draw.randbytes(draw.choice([1, 4, 60, 4000])))
for number, sock in enumerate(held):  # half a frame, half a request, then silence
    with suppress(OSError):
        sock.sendall(b"GET /" if number % 2 else b"\x00\x00\x00\x40{")
print(f"{FRAMES} frames", flush=True)
sys.stdin.read()
