"""The server side of PMI-1, with which MPICH and Intel MPI ranks connect under a launcher that is not their own.

Rules (from the behavior of the libraries):

1. This module has no I/O. It takes lines and returns (rank, lines). ``closing`` requests that the caller close all
   connections.
2. The protocol has no field for a secret, so PMI_ID serves as one: 31 random bits for each rank. A connection that
   does not start with ``cmd=initack pmiid=`` and such a number is closed. The number alone determines the rank.
3. The kvsname is unique for each job, since MPICH derives the names of its shared-memory segments from it.
4. The server must run until each rank's MPI_Finalize has returned. A rank without a server crashes in MPI_Finalize.
5. If a rank disconnects without ``finalize``, all others are disconnected. Their MPI_Init then fails; otherwise it
   would wait without end.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

MAX_LINE_BYTES = 4096  # of one command
MAX_TOTAL_BYTES = 16 << 20  # of all keys and values
Replies = list[tuple[int, str]]


def pmi_id(secret: str, rank: int) -> int:
    """Return the rank's secret PMI_ID, a positive int of 31 bits because MPICH parses it with atoi."""
    digest = hmac.new(secret.encode(), f"pmi {rank}".encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:4], "big") >> 1 | 1 << 16  # at least 65536, so it never equals a rank


def process_mapping(nodes: Sequence[object]) -> str:
    """Return PMI's text for "rank i is on node nodes[i]": triples (first node, consecutive nodes, ranks on each).

    >>> process_mapping(["a", "a", "b", "b"]), process_mapping("aab"), process_mapping("abab")
    ('(vector,(0,2,2))', '(vector,(0,1,2),(1,1,1))', '(vector,(0,2,1),(0,2,1))')
    """
    number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    runs: list[list[int]] = []  # [first node, consecutive nodes, ranks on each]
    for node in map(number.__getitem__, nodes):
        if runs and runs[-1][0] == node and runs[-1][1] == 1:
            runs[-1][2] += 1
        else:
            runs.append([node, 1, 1])
    merged: list[list[int]] = []
    for first, _, ranks in runs:
        if merged and merged[-1][2] == ranks and sum(merged[-1][:2]) == first:
            merged[-1][1] += 1
        else:
            merged.append([first, 1, ranks])
    return "(vector," + ",".join(f"({a},{b},{c})" for a, b, c in merged) + ")"


class Pmi:
    """The PMI-1 state of one job.

    Args:
        kvsname: name of the key-value space, unique for each job.
        size: number of ranks.
        secret: the job's secret, from which the PMI_IDs are derived.
        nodes: returns the node of each rank; called when a rank requests the process mapping.

    Attributes:
        closing: all connections must be closed, because a rank disconnected without finalize or aborted.
        aborted: (rank, exit code) of the first MPI_Abort, or None.
        seen: ranks that have ever connected.
    """

    def __init__(self, kvsname: str, size: int, secret: str, nodes: Callable[[], Sequence[object]]) -> None:
        self.kvsname = kvsname
        self.size = size
        self.closing = False
        self.aborted: tuple[int, str] | None = None
        self.seen: set[int] = set()
        self._nodes = nodes
        self._ranks = {pmi_id(secret, rank): rank for rank in range(size)}
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._connected: set[int] = set()
        self._finalized: set[int] = set()
        self._in_barrier: set[int] = set()

    def open(self, line: str) -> int | None:
        """Return the rank that the first line of a connection authenticates, or None to reject the connection.

        A rank may have one connection at a time.
        """
        command = parse(line)
        number = command.get("pmiid", "")
        if self.closing or command.get("cmd") != "initack" or not (number.isascii() and number.isdigit()):
            return None
        rank = self._ranks.get(int(number[:10]))
        if rank is None or rank in self._connected:
            return None
        self._connected.add(rank)
        self.seen.add(rank)
        return rank

    def greeting(self, rank: int) -> str:
        """Return the lines that the library expects after ``initack``, in this order."""
        return f"cmd=initack rc=0\ncmd=set size={self.size}\ncmd=set rank={rank}\ncmd=set debug=0\n"

    def line(self, rank: int, line: str) -> Replies:
        """Process one command of ``rank`` and return the replies. The last rank of a barrier causes replies to all."""
        command = parse(line)
        name = command.get("cmd", "")
        match name:
            case "put":
                return [(rank, f"cmd=put_result {self._put(command)}\n")]
            case "get":
                return [(rank, f"cmd=get_result {self._get(command)}\n")]
            case "barrier_in":
                self._in_barrier.add(rank)
                if len(self._in_barrier) < self.size:
                    return []
                self._in_barrier.clear()
                return [(other, "cmd=barrier_out rc=0\n") for other in range(self.size)]
            case "finalize":
                self._finalized.add(rank)
            case "abort":
                self.aborted = self.aborted or (rank, command.get("exitcode", "unknown"))
                self.closing = True
                return []
        rc = 0 if command.get("pmi_version", "1") == "1" else -1
        replies = {
            "init": f"response_to_init pmi_version=1 pmi_subversion=1 rc={rc}",
            "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
            "get_appnum": "appnum appnum=0 rc=0",
            "get_my_kvsname": f"my_kvsname kvsname={self.kvsname} rc=0",
            "get_universe_size": f"universe_size size={self.size} rc=0",
            "finalize": "finalize_ack rc=0",
        }
        refusal = f"{name or 'unknown'}_result rc=-1 msg=not_supported_by_hvdbridge"
        return [(rank, f"cmd={replies.get(name, refusal)}\n")]

    def lost(self, rank: int) -> None:
        """Handle the end of the connection of ``rank``."""
        self._connected.discard(rank)
        if rank not in self._finalized:
            self.closing = True

    def _put(self, command: dict[str, str]) -> str:
        key, value = command.get("key", ""), command.get("value", "")
        added_bytes = len(key) + len(value) - len(self._values.get(key, ""))
        if command.get("kvsname") != self.kvsname or not key or self._bytes + added_bytes > MAX_TOTAL_BYTES:
            return f"rc=-1 msg=cannot_put_key_{key or 'without_name'}"
        self._bytes += added_bytes
        self._values[key] = value
        return "rc=0 msg=success"

    def _get(self, command: dict[str, str]) -> str:
        key = command.get("key", "")
        if key == "PMI_process_mapping":
            return f"rc=0 msg=success value={process_mapping(self._nodes())}"
        if command.get("kvsname") != self.kvsname or key not in self._values:
            return f"rc=-1 msg=key_{key}_not_found value=unknown"
        return f"rc=0 msg=success value={self._values[key]}"


def parse(line: str) -> dict[str, str]:
    """Return the fields of a line such as ``cmd=put key=a value=b c``; ``value`` extends to the end of the line.

    >>> parse("cmd=put kvsname=k key=a value=b=c d")
    {'cmd': 'put', 'kvsname': 'k', 'key': 'a', 'value': 'b=c d'}
    """
    head, marker, value = line.strip().partition(" value=")
    fields = dict(word.split("=", 1) for word in head.split() if "=" in word)
    return fields | {"value": value} if marker else fields
