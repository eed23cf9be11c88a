"""PMI-1: its texts, its bad input, and real MPICH ranks that nothing but our helper brings together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

import pytest

from hvdbridge.config import Config
from hvdbridge.supervisor.pmi import Pmi, parse, pmi_id, process_mapping
from hvdbridge.supervisor.processes import segments_of_kvs
from hvdbridge.supervisor.spawn import HelperAddress, start_helper

pytestmark = pytest.mark.slow

needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
RANK = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
node = world.Split_type(MPI.COMM_TYPE_SHARED)
print(world.rank, world.size, total, node.size, flush=True)
"""


class Expect:
    """A Pmi, spoken to by hand."""

    def __init__(self, size: int, nodes: str | None = None) -> None:
        self.pmi = Pmi("kvs", size, "secret", lambda: nodes or "a" * size)
        for rank in range(size):
            assert self.pmi.open(f"cmd=initack pmiid={pmi_id('secret', rank)}\n") == rank

    def __call__(self, rank: int, line: str) -> dict[str, str]:
        [(to, reply)] = self.pmi.line(rank, line + "\n")
        assert to == rank
        assert reply.endswith("\n")
        return parse(reply)


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ("a", "(0,1,1)"),
        ("aaaa", "(0,1,4)"),
        ("aabbcc", "(0,3,2)"),
        ("abc", "(0,3,1)"),
        ("aaabb", "(0,1,3),(1,1,2)"),
        ("abab", "(0,2,1),(0,2,1)"),
        ("bbaabb", "(0,2,2),(0,1,2)"),
        ("aabbcddd", "(0,2,2),(2,1,1),(3,1,3)"),
    ],
)
def test_mapping_of_ranks_to_nodes(nodes, text):
    assert process_mapping(nodes) == f"(vector,{text})"
    back = []
    for triple in text.strip("()").split("),("):
        first, count, ranks = map(int, triple.split(","))
        back += [n for n in range(first, first + count) for _ in range(ranks)]
    numbers = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
    assert back == [numbers[n] for n in nodes]


def test_commands():
    ask = Expect(2, "ab")
    assert ask(0, "cmd=init pmi_version=1 pmi_subversion=1")["rc"] == "0"
    assert ask(0, "cmd=init pmi_version=2 pmi_subversion=0")["rc"] == "-1"
    assert int(ask(0, "cmd=get_maxes")["vallen_max"]) >= 1024
    assert ask(0, "cmd=get_appnum")["appnum"] == "0"
    assert ask(0, "cmd=get_my_kvsname")["kvsname"] == "kvs"
    assert ask(0, "cmd=get_universe_size")["size"] == "2"
    assert ask(0, "cmd=get kvsname=kvs key=PMI_process_mapping")["value"] == "(vector,(0,2,1))"
    assert ask(0, "cmd=get kvsname=kvs key=a")["rc"] == "-1"
    assert ask(1, "cmd=put kvsname=kvs key=a value=b=c d")["rc"] == "0"
    assert ask(0, "cmd=get kvsname=kvs key=a")["value"] == "b=c d"
    assert ask.pmi.line(0, "cmd=barrier_in\n") == []
    assert [r for r, _ in ask.pmi.line(1, "cmd=barrier_in\n")] == [0, 1]
    assert ask(0, "cmd=finalize")["cmd"] == "finalize_ack"
    ask.pmi.lost(0)
    assert not ask.pmi.closing
    ask.pmi.lost(1)
    assert ask.pmi.closing


@pytest.mark.parametrize(
    "line", ["", "nonsense", "cmd=", "cmd=spawn nprocs=3", "cmd=put", "cmd=put kvsname=other key=a value=b",
             "cmd=get kvsname=other key=a", "==== =", "cmd=__class__"],
)  # fmt: skip
def test_bad_commands_are_refused(line):
    assert Expect(1)(0, line)["rc"] == "-1"


@pytest.mark.parametrize("number", ["0", "1", "-1", "x", "", "٣", "9" * 5000])
def test_only_the_secret_number_opens(number):
    pmi = Pmi("kvs", 2, "secret", lambda: "aa")
    assert pmi.open(f"cmd=initack pmiid={number}\n") is None
    right = f"cmd=initack pmiid={pmi_id('secret', 1)}\n"
    assert pmi.open(right.replace("initack", "init")) is None
    assert pmi.open(right) == 1
    assert pmi.open(right) is None, "a second connection for the same rank"


def open_pmi(address: HelperAddress, rank: int) -> socket.socket:
    """A connection that is ``rank``'s, past the greeting."""
    s = socket.create_connection((address.host, address.pmi_port), timeout=5.0)
    s.sendall(f"cmd=initack pmiid={pmi_id(address.secret, rank)}\n".encode())
    greeting = b""
    while greeting.count(b"\n") < 4:
        greeting += s.recv(1000)
    assert f"cmd=set rank={rank}\n".encode() in greeting
    return s


def start(address: HelperAddress, size: int, code: str = RANK, **env: str) -> list[subprocess.Popen[str]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "HYDRA"))}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=clean | address.pmi_environment(rank, size) | env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen[str]], seconds: float = 40.0) -> list[tuple[int, str]]:
    deadline = time.monotonic() + seconds
    try:
        return [(p.returncode, text) for p in ranks for text in [p.communicate(timeout=deadline - time.monotonic())[0]]]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def wait_for_end(address: HelperAddress, seconds: float = 5.0) -> None:
    """Until the helper listens no more; it must have removed its segments by then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as s:
            if s.connect_ex((address.host, address.pmi_port)):
                break
        time.sleep(0.05)
    else:
        raise AssertionError("the helper did not end")
    time.sleep(0.1)
    assert not segments_of_kvs(f"hvdbridge_{address.job}")


@needs_mpi
@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_real_ranks(size, tcp):
    address = start_helper("127.0.0.1", size, Config())
    results = finish(start(address, size, **(TCP if tcp else {})))
    total = size * (size + 1) // 2
    nodesize = 1 if tcp else size
    assert results == [(0, f"{rank} {size} {total} {nodesize}\n") for rank in range(size)]
    wait_for_end(address)


@needs_mpi
def test_three_jobs_at_once():
    addresses = [start_helper("127.0.0.1", 2, Config()) for _ in range(3)]
    jobs = [start(address, 2) for address in addresses]
    for job in jobs:
        assert finish(job) == [(0, "0 2 3 2\n"), (0, "1 2 3 2\n")]
    for address in addresses:
        wait_for_end(address)


def test_a_rank_that_goes_without_finalize_cuts_off_the_others():
    address = start_helper("127.0.0.1", 2, Config())
    with open_pmi(address, 0) as other:
        open_pmi(address, 1).close()
        assert other.recv(100) == b""
    wait_for_end(address)


def test_the_port_survives_nonsense():
    address = start_helper("127.0.0.1", 1, Config())
    half_open = [socket.create_connection((address.host, address.pmi_port)) for _ in range(100)]
    for number in range(300):
        with socket.create_connection((address.host, address.pmi_port)) as s, suppress(ConnectionError):
            s.sendall(os.urandom(1 + number * 100))
    with open_pmi(address, 0) as mine:
        mine.sendall(b"cmd=get_my_kvsname\n\xff\xfe\n")
        assert mine.recv(100).startswith(b"cmd=my_kvsname kvsname=hvdbridge_")
    for s in half_open:
        s.close()
    wait_for_end(address)


@needs_mpi
def test_killed_ranks_leave_no_segment():
    code = RANK + "\nimport os, time\nif world.rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(30)"
    address = start_helper("127.0.0.1", 2, Config())
    ranks = start(address, 2, code)
    ranks[1].wait(30)
    assert segments_of_kvs(f"hvdbridge_{address.job}"), "the hash in MPICH's names is not what we think"
    ranks[0].send_signal(signal.SIGKILL)
    finish(ranks)
    wait_for_end(address)
