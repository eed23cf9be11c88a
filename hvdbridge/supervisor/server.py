"""The helper's server: connections of guests, members (ranks) and PMI ranks, and the end of the helper.

Rules:

1. A connection is a guest until it has shown the secret. At most MAX_GUESTS exist, each for HELLO_SECONDS and with a
   buffer of a few KiB. If there are more, the oldest guest is disconnected, but not within its first GRACE_TICKS: a
   rank sends its secret at once, but this process may not have read it yet. The limit counts ticks instead of seconds,
   because this process may have had no core. MPICH crashes if its first connection is closed. Further connections wait
   in the kernel's queue.
2. job.py and pmi.py make all decisions. This module moves bytes and measures time.
3. After a failure each rank has KILL_SECONDS to end by itself. Then ranks on this host that have not ended (stopped, or
   holding the GIL in C) are killed. PMI connections are closed, so that MPI_Init on other hosts fails.
4. The helper ends LINGER_SECONDS after the last monitor AND the last PMI connection have ended, since a session may end
   long before MPI_Finalize. It also ends if no rank connects. Then it unlinks the job's segments on this host.
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
from hvdbridge.supervisor.pmi import MAX_LINE_BYTES, Pmi
from hvdbridge.supervisor.processes import identity, segments_of, segments_of_kvs, unlink_segments
from hvdbridge.supervisor.wire import GUEST_FRAME, LENGTH, MEMBER_FRAME, Message, keep_alive, length_of, pack, unpack

BACKLOG = 512
MAX_GUESTS = 128
HELLO_SECONDS = 10.0
GRACE_TICKS = 5
BUFFER_BYTES = 8 << 10
TICK_SECONDS = 0.1
LINGER_SECONDS = 0.3
KILL_SECONDS = 4.0
PEER_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, asyncio.TimeoutError, asyncio.LimitOverrunError)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_frame(reader: asyncio.StreamReader, bound: int) -> tuple[Message, bytes]:
    """Receive one frame of at most ``bound`` bytes and return its message and payload."""
    length = length_of(await reader.readexactly(LENGTH.size), bound)
    return unpack(await reader.readexactly(length))


class Server:
    """Serves one job with the ``settings`` that spawn.py sends, on two sockets that already listen."""

    def __init__(self, settings: dict[str, Any], monitor: socket.socket, pmi: socket.socket) -> None:
        self._settings = settings
        self._sockets: list[tuple[socket.socket, Serve]] = [(monitor, self._serve_member), (pmi, self._serve_pmi_rank)]
        self._job = Job(settings["size"], settings["timeout"], settings["stall"], settings["start"])
        self._pmi = Pmi(f"hvdbridge_{settings['job']}", settings["size"], settings["secret"], self._nodes)
        self._ticks = 0
        self._guests: dict[asyncio.StreamWriter, int] = {}  # tick of the connection, oldest first
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._pmi_ranks: dict[int, asyncio.StreamWriter] = {}
        self._local_processes: dict[int, tuple[int, int]] = {}  # (pid, pidfd) of ranks on this host
        self._segments: set[str] = set()

    async def run(self) -> None:
        """Serve until the job is over."""
        with suppress(ValueError, OSError):
            hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        acceptors = [asyncio.create_task(self._accept(sock, serve)) for sock, serve in self._sockets]
        try:
            started = idle_since = time.monotonic()
            while (now := time.monotonic()) < idle_since + LINGER_SECONDS:
                await asyncio.sleep(TICK_SECONDS)
                self._tick(now)
                if not self._idle(now - started):
                    idle_since = time.monotonic()
        finally:
            for acceptor in acceptors:
                acceptor.cancel()
            unlink_segments(self._segments | segments_of_kvs(self._pmi.kvsname))

    def _idle(self, age: float) -> bool:
        """Return whether no rank is connected and none is expected, ``age`` seconds after the start."""
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
        if starting:  # one rank per tick, since reading maps is slow and the ranks share their segments
            self._record_segments(starting[int(now / TICK_SECONDS) % len(starting)])
        if self._job.failure:
            self._pmi.closing = True
            if now > self._job.failed_at + KILL_SECONDS:
                for rank in self._members.keys() & self._local_processes.keys():
                    with suppress(OSError):
                        signal.pidfd_send_signal(self._local_processes[rank][1], signal.SIGKILL)
        self._flush()

    def _flush(self) -> None:
        """Send the pending messages of job.py; close the PMI connections if pmi.py requests it."""
        for rank, message, payload in self._job.take():
            if writer := self._members.get(rank):
                writer.write(pack(message, payload))
                if writer.transport.get_write_buffer_size() > 4 * MEMBER_FRAME:  # the rank does not read
                    writer.transport.abort()
        if self._pmi.aborted and not self._job.failure:
            rank, code = self._pmi.aborted
            self._job.fail(f"rank {rank} called MPI_Abort({code})", time.monotonic())
        if self._pmi.closing:
            for writer in self._pmi_ranks.values():
                writer.transport.abort()

    # Connections -------------------------------------------------------------------------------------

    async def _accept(self, sock: socket.socket, serve: Serve) -> None:
        """Accept connections on ``sock`` and run ``serve`` for each in a task of its own."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        tasks = set()  # keeps references, since the event loop refers to its tasks weakly
        while True:
            await self._wait_for_guest_slot()
            try:
                connection, _ = await loop.sock_accept(sock)
                reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER_BYTES)
            except OSError:  # the peer has closed, or no file descriptors are left
                await asyncio.sleep(TICK_SECONDS)
                continue
            self._guests[writer] = self._ticks
            tasks.add(task := asyncio.create_task(self._serve_connection(serve, reader, writer)))
            task.add_done_callback(tasks.discard)

    async def _wait_for_guest_slot(self) -> None:
        """Wait until one more guest may connect (rule 1)."""
        while len(self._guests) >= MAX_GUESTS:
            oldest, since = next(iter(self._guests.items()))
            if self._ticks > since + GRACE_TICKS:
                del self._guests[oldest]
                oldest.transport.abort()
            else:
                await asyncio.sleep(TICK_SECONDS / 10)

    async def _serve_connection(self, serve: Serve, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run ``serve`` for one connection; an invalid message or a lost connection ends this connection alone."""
        try:
            await serve(reader, writer)
        except PEER_ERRORS as error:
            if self._settings["debug"]:
                print(f"hvdbridge helper: a connection ends: {error!r}", file=sys.stderr, flush=True)
        finally:
            self._guests.pop(writer, None)
            writer.close()

    async def _serve_member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the connection of a rank's monitor."""
        hello, _ = await asyncio.wait_for(read_frame(reader, GUEST_FRAME), HELLO_SECONDS)
        if not hmac.compare_digest(str(hello.get("secret")).encode(), self._settings["secret"].encode()):
            writer.write(pack({"error": "the secret is not this job's: the address is another job's or an old one"}))
            return
        rank, pid = int(hello["rank"]), int(hello["pid"])
        if writer not in self._guests:  # closed by rule 1 while its first message came
            return
        refusal = self._job.join(rank, int(hello["size"]), str(hello["host"]), pid)
        writer.write(pack({"error": refusal} if refusal else {"ok": True}))
        if refusal:
            return
        del self._guests[writer]
        keep_alive(writer.get_extra_info("socket"))
        self._members[rank] = writer
        try:
            if hello["process"] and hello["process"] == identity(pid):
                with suppress(OSError):
                    self._local_processes[rank] = (pid, os.pidfd_open(pid))
            self._record_segments(rank)  # under mpiexec MPI is running already
            self._flush()
            while True:
                message, payload = await read_frame(reader, MEMBER_FRAME)
                self._job.receive(rank, message, payload, time.monotonic())
                if "phase" in message or message["op"] == "report":
                    self._record_segments(rank)
                self._flush()
        finally:
            del self._members[rank]
            if self._job.members[rank].state == "here":  # it died; living ranks still map its shared segments
                for other in self._members:
                    self._record_segments(other)
            self._job.lost(rank, time.monotonic())
            self._flush()

    async def _serve_pmi_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the PMI-1 connection of a rank's MPI library."""
        first = await asyncio.wait_for(reader.readuntil(b"\n"), HELLO_SECONDS)
        rank = self._pmi.open(first[:MAX_LINE_BYTES].decode("ascii"))
        if rank is None:
            return
        self._guests.pop(writer)
        keep_alive(writer.get_extra_info("socket"))
        self._pmi_ranks[rank] = writer
        try:
            writer.write(self._pmi.greeting(rank).encode())
            while line := await reader.readline():
                for target, reply in self._pmi.line(rank, line.decode("ascii")):
                    if other := self._pmi_ranks.get(target):
                        other.write(reply.encode())
        finally:
            del self._pmi_ranks[rank]
            self._pmi.lost(rank)
            self._flush()

    # This host ---------------------------------------------------------------------------------------

    def _nodes(self) -> list[str]:
        """Return each rank's node for PMI, as the monitors have sent it; ranks without monitor share one node."""
        members = self._job.members
        return [members[r].host if r in members else "" for r in range(self._job.size)]

    def _record_segments(self, rank: int) -> None:
        """Record the shared-memory segments that ``rank`` maps now, if it runs on this host."""
        if rank in self._local_processes:
            self._segments |= segments_of(self._local_processes[rank][0])
