"""PMI-1, the server's side: how MPICH and Intel MPI ranks find each other under a launcher that is not theirs.

Rules (they were learned from the libraries):

1. Logic without I/O: lines in, (rank, lines) out; ``closing`` says that all connections must be closed.
2. The wire has no room for a secret, so PMI_ID is one: 31 unguessable bits per rank. Who does not open with
   ``cmd=initack pmiid=`` and such a number is cut off; the rank follows from it and is answered, never believed.
3. The kvsname is unique per job: MPICH names its shared-memory segments after it.
4. The server outlives every rank's MPI_Finalize: a rank whose server is gone crashes in it.
5. A rank that goes without ``finalize`` cuts the others off: their MPI_Init fails instead of waiting for ever.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

LINE = 4096
VALUES = 16 << 20
Replies = list[tuple[int, str]]


def pmi_id(secret: str, rank: int) -> int:
    """The rank's secret PMI_ID: MPICH reads it with atoi, so it is a positive int of 31 bits."""
    digest = hmac.new(secret.encode(), f"pmi {rank}".encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:4], "big") >> 1 | 1 << 16  # at least 65536: never taken for a rank


def process_mapping(nodes: Sequence[object]) -> str:
    """PMI's text for "rank i is on node nodes[i]": triples (first node, nodes in a row, ranks on each).

    >>> process_mapping(["a", "a", "b", "b"]), process_mapping("aab"), process_mapping("abab")
    ('(vector,(0,2,2))', '(vector,(0,1,2),(1,1,1))', '(vector,(0,2,1),(0,2,1))')
    """
    number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    runs: list[list[int]] = []  # [first node, nodes in a row, ranks on each]
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
    """One job's PMI: ``nodes()`` tells each rank's node when the first rank asks.

    Attributes:
        closing: a rank went without finalize, or aborted: close every connection.
        aborted: (rank, its exit code) of an MPI_Abort.
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
        self._open: set[int] = set()
        self._finalized: set[int] = set()
        self._barrier: set[int] = set()

    def open(self, line: str) -> int | None:
        """The rank that this first line proves to be, or None. One connection per rank at a time."""
        command = parse(line)
        number = command.get("pmiid", "")
        if self.closing or command.get("cmd") != "initack" or not (number.isascii() and number.isdigit()):
            return None
        rank = self._ranks.get(int(number[:10]))
        if rank is None or rank in self._open:
            return None
        self._open.add(rank)
        self.seen.add(rank)
        return rank

    def greeting(self, rank: int) -> str:
        """What the library reads after ``initack``, in this order."""
        return f"cmd=initack rc=0\ncmd=set size={self.size}\ncmd=set rank={rank}\ncmd=set debug=0\n"

    def line(self, rank: int, line: str) -> Replies:
        """Answer one command of ``rank``; a barrier's last rank brings answers for all."""
        command = parse(line)
        name = command.get("cmd", "")
        match name:
            case "put":
                return [(rank, f"cmd=put_result {self._put(command)}\n")]
            case "get":
                return [(rank, f"cmd=get_result {self._get(command)}\n")]
            case "barrier_in":
                self._barrier.add(rank)
                if len(self._barrier) < self.size:
                    return []
                self._barrier.clear()
                return [(each, "cmd=barrier_out rc=0\n") for each in range(self.size)]
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
        """The connection of ``rank`` is at its end."""
        self._open.discard(rank)
        if rank not in self._finalized:
            self.closing = True

    def _put(self, command: dict[str, str]) -> str:
        key, value = command.get("key", ""), command.get("value", "")
        more = len(key) + len(value) - len(self._values.get(key, ""))
        if command.get("kvsname") != self.kvsname or not key or self._bytes + more > VALUES:
            return f"rc=-1 msg=cannot_put_key_{key or 'without_name'}"
        self._bytes += more
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
    """``cmd=put key=a value=b c`` as a dict; the value of a put is the rest of its line.

    >>> parse("cmd=put kvsname=k key=a value=b=c d")
    {'cmd': 'put', 'kvsname': 'k', 'key': 'a', 'value': 'b=c d'}
    """
    head, marker, value = line.strip().partition(" value=")
    fields = dict(word.split("=", 1) for word in head.split() if "=" in word)
    return fields | {"value": value} if marker else fields
