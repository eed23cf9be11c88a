"""The helper's sockets: guests, members, PMI ranks, and the end of it all.

Rules:

1. A connection is a guest until it showed the secret: at most GUESTS of them, each for HELLO_SECONDS and with a
   buffer of a few KiB. When all seats are taken, the oldest goes, but not before GRACE: a rank shows its secret at
   once, yet what it sent may still be unread (ticks are counted, not seconds: this process may have had no core),
   and MPICH crashes when its first connection is cut. Until then the next ones wait in the kernel's queue.
2. Everything that decides stands in job.py and pmi.py; this file moves bytes and keeps time.
3. After a failure every rank has KILL_SECONDS to end by itself; those on this host that do not (stopped, or
   holding the GIL in C) are killed. PMI connections are cut: an MPI_Init elsewhere fails instead of waiting.
4. It ends LINGER after the last monitor AND the last PMI connection ended (a session may be shut down long
   before MPI_Finalize), or when no rank came; then it unlinks the job's segments on this host.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from hvdbridge.supervisor.job import Job
from hvdbridge.supervisor.pmi import LINE, Pmi
from hvdbridge.supervisor.processes import identity, segments_of, segments_of_kvs, unlink_segments
from hvdbridge.supervisor.wire import GUEST_FRAME, LENGTH, MEMBER_FRAME, Message, keep_alive, length_of, pack, unpack

BACKLOG = 512
GUESTS = 128
HELLO_SECONDS = 10.0
GRACE = 5  # ticks
BUFFER = 8 << 10
TICK = 0.1
LINGER = 0.3
KILL_SECONDS = 4.0
BROKEN = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.TimeoutError, asyncio.LimitOverrunError)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_frame(reader: asyncio.StreamReader, bound: int) -> tuple[Message, bytes]:
    length = length_of(await reader.readexactly(LENGTH.size), bound)
    return unpack(await reader.readexactly(length))


class Server:
    """Serves one job; ``settings`` are those that spawn.py sends; the sockets listen already."""

    def __init__(self, settings: dict[str, Any], monitor: socket.socket, pmi: socket.socket) -> None:
        self._settings = settings
        self._sockets: list[tuple[socket.socket, Serve]] = [(monitor, self._member), (pmi, self._pmi_rank)]
        self._job = Job(settings["size"], settings["timeout"], settings["stall"], settings["start"])
        self._pmi = Pmi(f"hvdbridge_{settings['job']}", settings["size"], settings["secret"], self._nodes)
        self._ticks = 0
        self._guests: dict[asyncio.StreamWriter, int] = {}  # since which tick, oldest first
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._pmi_ranks: dict[int, asyncio.StreamWriter] = {}
        self._local: dict[int, tuple[int, int]] = {}  # ranks on this host: pid and pidfd
        self._segments: set[str] = set()

    async def run(self) -> None:
        """Serve until the job is over."""
        with suppress(ValueError, OSError):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        doors = [asyncio.create_task(self._accept(sock, serve)) for sock, serve in self._sockets]
        try:
            started = idle_since = time.monotonic()
            while (now := time.monotonic()) < idle_since + LINGER:
                await asyncio.sleep(TICK)
                self._tick(now)
                if not self._idle(now - started):
                    idle_since = time.monotonic()
        finally:
            for door in doors:
                door.cancel()
            unlink_segments(self._segments | segments_of_kvs(self._pmi.kvsname))

    def _idle(self, age: float) -> bool:
        if self._members or self._pmi_ranks:
            return False
        seen = self._job.members.keys() | self._pmi.seen
        if len(seen) == self._job.size or self._job.failure or age > self._settings["start"]:
            return True
        return not seen and identity(self._settings["pid"]) != self._settings["parent"]

    def _tick(self, now: float) -> None:
        self._ticks += 1
        self._job.tick(now)
        starting = [m.rank for m in self._job.members.values() if any(w.phase for w in m.waits.values())]
        if starting:  # one per tick, in turn: they share their segments, and reading maps takes a millisecond
            self._look_for_segments(starting[int(now / TICK) % len(starting)])
        if self._job.failure:
            self._pmi.closing = True
            if now > self._job.failed_at + KILL_SECONDS:
                for rank in self._members.keys() & self._local.keys():
                    with suppress(OSError):
                        signal.pidfd_send_signal(self._local[rank][1], signal.SIGKILL)
        self._flush()

    def _flush(self) -> None:
        """Send what job.py wants sent; cut the PMI connections when pmi.py wants it."""
        for rank, message, payload in self._job.take():
            if writer := self._members.get(rank):
                writer.write(pack(message, payload))
                if writer.transport.get_write_buffer_size() > 4 * MEMBER_FRAME:  # it does not read: it is stuck
                    writer.transport.abort()
        if self._pmi.aborted and not self._job.failure:
            rank, code = self._pmi.aborted
            self._job.fail(f"rank {rank} called MPI_Abort({code})", time.monotonic())
        if self._pmi.closing:
            for writer in self._pmi_ranks.values():
                writer.transport.abort()

    # Connections -------------------------------------------------------------------------------------

    async def _accept(self, sock: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        served = set()  # a loop holds its tasks weakly
        while True:
            await self._seat()
            try:
                connection, _ = await loop.sock_accept(sock)
                reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER)
            except OSError:  # it went again, or no file descriptors are left
                await asyncio.sleep(TICK)
                continue
            self._guests[writer] = self._ticks
            served.add(task := asyncio.create_task(self._guarded(serve, reader, writer)))
            task.add_done_callback(served.discard)

    async def _seat(self) -> None:
        """Wait until one more guest may come in (rule 1)."""
        while len(self._guests) >= GUESTS:
            oldest, since = next(iter(self._guests.items()))
            if self._ticks > since + GRACE:
                del self._guests[oldest]
                oldest.transport.abort()
            else:
                await asyncio.sleep(TICK / 10)

    async def _guarded(self, serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An error in what a connection sends ends that connection alone."""
        try:
            await serve(reader, writer)
        except BROKEN as error:
            if self._settings["debug"]:
                print(f"hvdbridge helper: a connection ends: {error!r}", file=sys.stderr, flush=True)
        finally:
            self._guests.pop(writer, None)
            writer.close()

    async def _member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello, _ = await asyncio.wait_for(read_frame(reader, GUEST_FRAME), HELLO_SECONDS)
        if not hmac.compare_digest(str(hello.get("secret")).encode(), self._settings["secret"].encode()):
            writer.write(pack({"error": "the secret is not this job's: the address is another job's or an old one"}))
            return
        rank, pid = int(hello["rank"]), int(hello["pid"])
        refusal = self._job.join(rank, int(hello["size"]), str(hello["host"]), pid)
        writer.write(pack({"error": refusal} if refusal else {"ok": True}))
        if refusal:
            return
        del self._guests[writer]
        keep_alive(writer.get_extra_info("socket"))
        self._members[rank] = writer
        if hello["process"] and hello["process"] == identity(pid):
            with suppress(OSError):
                self._local[rank] = (pid, os.pidfd_open(pid))
        self._look_for_segments(rank)  # under mpiexec MPI runs by now
        try:
            self._flush()
            while True:
                message, payload = await read_frame(reader, MEMBER_FRAME)
                self._job.receive(rank, message, payload, time.monotonic())
                if "phase" in message or message["op"] == "report":
                    self._look_for_segments(rank)
                self._flush()
        finally:
            del self._members[rank]
            if self._job.members[rank].state == "here":  # it died; what it shared, those that live still map
                for other in self._members:
                    self._look_for_segments(other)
            self._job.lost(rank, time.monotonic())
            self._flush()

    async def _pmi_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await asyncio.wait_for(reader.readuntil(b"\n"), HELLO_SECONDS)
        rank = self._pmi.open(first[:LINE].decode("ascii"))
        if rank is None:
            return
        self._guests.pop(writer)
        keep_alive(writer.get_extra_info("socket"))
        self._pmi_ranks[rank] = writer
        try:
            writer.write(self._pmi.greeting(rank).encode())
            while line := await reader.readline():
                for to, reply in self._pmi.line(rank, line.decode("ascii")):
                    if other := self._pmi_ranks.get(to):
                        other.write(reply.encode())
        finally:
            del self._pmi_ranks[rank]
            self._pmi.lost(rank)
            self._flush()

    # This host ---------------------------------------------------------------------------------------

    def _nodes(self) -> list[str]:
        """Each rank's node for PMI, as the ranks named it; without monitors all are on one."""
        members = self._job.members
        return [members[r].host if r in members else "" for r in range(self._job.size)]

    def _look_for_segments(self, rank: int) -> None:
        if rank in self._local:
            self._segments |= segments_of(self._local[rank][0])
