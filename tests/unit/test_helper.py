"""The helper process and the ranks' monitors: real sockets, and real processes where an end matters."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from hvdbridge.config import Config
from hvdbridge.errors import CollectiveMismatch, CollectiveTimeout, RankFailed, RankMismatch, RendezvousError
from hvdbridge.supervisor import client
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.job import Job
from hvdbridge.supervisor.processes import SHM
from hvdbridge.supervisor.spawn import HelperAddress, start_helper
from hvdbridge.supervisor.wire import FrameError, length_of, pack, take_frames, unpack

pytestmark = [pytest.mark.slow, pytest.mark.waits]

needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
QUICK = Config(timeout_seconds=2.0, stall_seconds=1.0)
PATIENT = Config(timeout_seconds=30.0, stall_seconds=30.0)


def helper_process(address: HelperAddress) -> psutil.Process:
    """The process that listens at ``address``."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ports = process.net_connections() if "hvdbridge.supervisor" in process.cmdline() else ()
            if any(c.laddr.port == address.port for c in ports):
                return process
    raise AssertionError("no helper listens")


def wait_gone(process: psutil.Process, seconds: float) -> None:
    """Until the helper has ended; whether its remains are collected is init's affair, and may take a second."""
    deadline = time.monotonic() + seconds
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the helper did not end"
            time.sleep(0.02)


class Team:
    """Ranks as threads of this process: each has its own monitor and connection."""

    def __init__(self, size: int, config: Config) -> None:
        self.size = size
        self.address = start_helper("127.0.0.1", size, config)
        self.process = helper_process(self.address)
        self.monitors = [Monitor.connect(self.address, r, size, config, host=f"node{r // 2}") for r in range(size)]
        self._pool = ThreadPoolExecutor(size)

    def all(self, call, ranks=None):
        """``call(monitor)`` on every rank at once: answers or exceptions, in rank order."""
        futures = [self._pool.submit(call, m) for m in self.monitors if ranks is None or m.rank in ranks]
        return [f.exception(30) or f.result() for f in futures]

    def close(self) -> None:
        self.all(Monitor.bye)
        for monitor in self.monitors:
            monitor._close()
        self._pool.shutdown()
        wait_gone(self.process, 8)


@pytest.fixture
def team(monkeypatch):
    teams = []
    ends: list[str] = []
    monkeypatch.setattr(client, "end_process", lambda status, text="": ends.append(text))
    monkeypatch.setattr(client, "UNWIND", 600.0)

    def make(size: int, config: Config = PATIENT) -> Team:
        teams.append(Team(size, config))
        return teams[-1]

    yield make
    for each in teams:
        each.close()


# Frames, address, store ------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"x", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b'"a"\0b'])
def test_no_frame(body):
    with pytest.raises(FrameError):
        unpack(body)


def test_frames():
    frame = pack({"op": "set"}, b"\0\1\0")
    assert unpack(frame[4:]) == ({"op": "set"}, b"\0\1\0")
    with pytest.raises(FrameError, match="at most 100"):
        length_of((101).to_bytes(4, "big"), 100)


def test_address():
    address = HelperAddress("10.0.0.1", 1, 2, "hidden", "job")
    assert HelperAddress.parse(str(address)) == address
    assert "hidden" not in repr(address)
    with pytest.raises(RendezvousError) as caught:
        HelperAddress.parse("10.0.0.1,1,hidden")
    assert "hidden" not in str(caught.value)


def test_an_address_that_is_not_ours():
    with pytest.raises(RendezvousError, match=r"cannot listen on '192\.0\.2\.1'.*rank 0's own host"):
        start_helper("192.0.2.1", 2, QUICK)


def test_the_secret_is_in_no_argument_or_environment(team):
    t = team(1)
    assert t.address.secret not in " ".join(t.process.cmdline())
    assert t.address.secret not in str(t.process.environ())
    assert t.process.cwd() == "/"
    assert os.getsid(t.process.pid) == t.process.pid
    assert {c.laddr.ip for c in t.process.net_connections()} == {"127.0.0.1"}


def test_helper_does_not_import_heavy_modules():
    code = "import sys, hvdbridge.supervisor.client, hvdbridge.supervisor.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "mpi4py", "horovod", "numpy"} & set(loaded)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_store(team, size):
    t = team(size)

    def use(m: Monitor):
        if m.rank == size - 1:
            time.sleep(0.1)
            m.store_set("a/key", bytes(range(256)))
        assert m.store_get("a/key") == bytes(range(256))
        with pytest.raises(RendezvousError, match=r"no rank stored 'a/other'.* at most 0\.1 s"):
            m.store_get("a/other", timeout=0.1)
        m.store_set("empty", b"")
        return m.store_get("empty")

    assert t.all(use) == [b""] * size


def test_store_takes_large_values_and_refuses_larger(team):
    t = team(2)
    value = os.urandom(20 << 20)
    t.monitors[0].store_set("big", value)
    assert t.monitors[1].store_get("big") == value
    with pytest.raises(RendezvousError, match="store takes"):
        t.monitors[0].store_set("big", bytes(33 << 20))


def test_alone():
    before = set(threading.enumerate())
    m = Monitor.alone(QUICK)
    m.install_exit_hooks()
    m.store_set("a", b"1")
    assert (m.store_get("a"), m.rank, m.size) == (b"1", 0, 1)
    with pytest.raises(RendezvousError, match="no rank stored 'b'"):
        m.store_get("b")
    m.agree("backend", "mpi")
    m.check(1, "AllReduce")
    with m.watch("x"), m.phase("MPI_Init", 5):
        pass
    with pytest.raises(ConnectionResetError), m.watch("x"):
        raise ConnectionResetError
    m.leave()
    m.bye()
    m.bye()
    assert set(threading.enumerate()) <= before


# Agreement -------------------------------------------------------------------------------------------


def test_disagreement_is_told_to_every_rank(team):
    t = team(4)
    for error in t.all(lambda m: m.agree("HVDBRIDGE_BACKEND", "mpi" if m.rank == 2 else "torch")):
        assert isinstance(error, RankMismatch)
        assert "HVDBRIDGE_BACKEND: ranks 0-1, 3: torch; rank 2: mpi" in str(error)


def test_absence_is_told_to_every_rank_that_came(team):
    t = team(3)
    for error in t.all(lambda m: m.agree("start", "x", timeout=0.3), ranks=(0, 2)):
        assert isinstance(error, RendezvousError)
        assert "Missing: rank 1 (node0, pid" in str(error)


def test_check(team):
    t = team(2)
    for number in range(50):
        assert t.all(lambda m, n=number: m.check(n, "AllReduce[3]")) == [None, None]
    for error in t.all(lambda m: m.check(50, f"AllReduce[{m.rank}]")):
        assert isinstance(error, CollectiveMismatch)
        assert "number 50: rank 0: AllReduce[0]; rank 1: AllReduce[1]" in str(error)


def test_check_names_the_missing(team):
    t = team(2, QUICK)
    [error] = t.all(lambda m: m.check(1, "AllReduce[3]"), ranks=(0,))
    assert isinstance(error, CollectiveTimeout)
    assert "AllReduce[3]" in str(error)
    assert "rank 1" in str(error)


def test_answered_requests_are_forgotten():
    job = Job(2, 10, 10)
    for rank in range(2):
        assert job.join(rank, 2, "h", 1) is None
    for n in range(100):
        for rank in range(2):
            job.receive(rank, {"op": "gather", "id": n, "name": f"c{n}", "value": "s", "timeout": 5}, b"", 0)
            job.receive(rank, {"op": "waiting", "token": n, "label": "x", "age": 1}, b"", 0)
            job.receive(rank, {"op": "waited", "token": n}, b"", 0)
    assert len(job.take()) == 200
    assert not job._gatherings
    assert not any(m.waits for m in job.members.values())


@pytest.mark.parametrize(
    ("rank", "size", "text"), [(0, 2, "two processes were given rank 0"), (1, 3, "one of 3 ranks, rank 0 as one of 2"),
                               (2, 2, "rank 2 does not exist")],
)  # fmt: skip
def test_who_may_not_join(team, rank, size, text):
    t = team(2)
    with pytest.raises(RendezvousError, match=text):
        Monitor.connect(t.address, rank, size, QUICK)


def test_a_wrong_secret_and_a_wrong_port(team):
    t = team(1)
    wrong = HelperAddress(t.address.host, t.address.port, t.address.pmi_port, "guess", t.address.job)
    with pytest.raises(RendezvousError, match="secret is not this job's"):
        Monitor.connect(wrong, 0, 1, QUICK)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = HelperAddress("127.0.0.1", s.getsockname()[1], 1, "s", "j")
        with pytest.raises(RendezvousError, match=r"could not reach hvdbridge's helper at.*HVDBRIDGE_PORTS"):
            Monitor.connect(nobody, 0, 1, Config(timeout_seconds=0.3))


# Waiting and failing, ranks as threads ----------------------------------------------------------------


def test_a_stall_is_told_once_to_rank_0_and_those_who_wait(team, caplog):
    t = team(4, Config(timeout_seconds=30.0, stall_seconds=0.6))

    def wait(m: Monitor):
        with m.watch("barrier" if m.rank == 3 else "AllReduce[7]"):
            time.sleep(1.6)

    with caplog.at_level(logging.WARNING, logger="hvdbridge"):
        t.all(wait, ranks=(1, 2, 3))
    reports = [r.getMessage() for r in caplog.records if "AllReduce[7] is not finished" in r.getMessage()]
    assert sorted(r[:7] for r in reports) == ["rank 0:", "rank 1:", "rank 2:"]
    for text in reports:
        assert "ranks 1-2 wait in AllReduce[7]; not in it: rank 0 (node0, pid" in text
        assert "busy elsewhere or asleep; rank 3 (node1, pid" in text
        assert "waits in barrier" in text
    assert all(m.failure is None for m in t.monitors)


def test_a_timeout_ends_every_rank_and_names_the_missing(team):
    t = team(3, QUICK)
    heard = threading.Event()
    t.monitors[1].on_failure(lambda failure: heard.set())
    began = time.monotonic()

    def wait(m: Monitor):
        with m.watch("AllReduce[7]"):
            assert m._failed.wait(10)

    t.all(wait, ranks=(0, 2))
    assert time.monotonic() - began > 1.9
    assert heard.wait(2)
    for m in t.monitors:
        assert isinstance(m.failure, CollectiveTimeout)
        assert "ranks 0, 2 wait in AllReduce[7]; not in it: rank 1 (node0" in str(m.failure)
        with pytest.raises(CollectiveTimeout), m.watch("next"):
            raise AssertionError("entered")


def test_a_phase_that_takes_too_long(team):
    t = team(2)
    with suppress(CollectiveTimeout), t.monitors[0].phase("MPI_Init", 0.5):
        assert t.monitors[1]._failed.wait(5)
    assert "MPI_Init is not finished after" in str(t.monitors[1].failure)


@pytest.mark.parametrize("everybody", [True, False])
def test_the_hint_of_a_phase_in_which_every_rank_waits(everybody, team):
    """The hint is a likely cause only if no rank does work of its own."""
    t = team(2)

    def start(m: Monitor):
        with suppress(CollectiveTimeout), m.phase("start", 1.0, hint="a firewall" if m.rank else ""):
            assert m._failed.wait(5)

    t.all(start, ranks=(0, 1) if everybody else (1,))
    text = str(t.monitors[0].failure)
    assert text.endswith("s: ranks 0-1 wait in start. a firewall") is everybody
    assert ("a firewall" in text) is everybody
    assert ("busy elsewhere" in text) is not everybody


def test_waits_that_end_are_withdrawn(team):
    t = team(2, QUICK)
    for _ in range(3):
        with t.monitors[0].watch("a slow one"):
            time.sleep(0.8)
    time.sleep(1.5)
    assert t.monitors[0].failure is None


def test_the_first_cause_reaches_every_rank_and_pending_requests(team):
    t = team(4)
    getting = t._pool.submit(t.monitors[2].store_get, "never")
    time.sleep(0.2)
    error = ValueError("bad\nbatch")
    assert t.monitors[1].report(error) is error
    assert isinstance(getting.exception(2), RankFailed)
    for m in t.monitors:
        assert m._failed.wait(2)
        assert "rank 1 (node0, pid" in str(m.failure)
        assert "failed: ValueError: bad batch" in str(m.failure)
    later = t.monitors[3].report(KeyError("consequence"))
    assert later is t.monitors[3].failure


def test_a_secondary_error_waits_for_its_cause(team):
    t = team(3)
    first = t._pool.submit(t.monitors[0].report, RuntimeError("Connection closed by peer"))
    time.sleep(0.2)
    t.monitors[2].report(MemoryError("the cause"))
    assert "rank 2" in str(first.result(2))
    assert t.monitors[1]._failed.wait(1)
    assert "MemoryError: the cause" in str(t.monitors[1].failure)


def test_a_secondary_error_is_believed_where_no_better_comes(team):
    t = team(2)
    error = ConnectionResetError("by nobody knows")
    assert t.monitors[0].report(error) is error
    assert t.monitors[1]._failed.wait(1)
    assert "ConnectionResetError" in str(t.monitors[1].failure)


def test_watch_replaces_a_connection_error_by_its_cause(team):
    t = team(2)

    def collective(m: Monitor):
        with m.watch("AllReduce"):
            time.sleep(0.3)
            raise RuntimeError("Connection reset by peer")

    waiting = t._pool.submit(collective, t.monitors[0])
    time.sleep(0.1)
    t.monitors[1].report(ZeroDivisionError("cause"))
    error = waiting.exception(5)
    assert isinstance(error, RankFailed)
    assert "ZeroDivisionError: cause" in str(error)
    assert "reset by peer" in str(error.__cause__)


def test_callbacks(team):
    t = team(2)
    calls = []

    def removed(failure):
        calls.append("removed")

    t.monitors[1].on_failure(removed)
    t.monitors[1].remove_on_failure(removed)
    t.monitors[1].remove_on_failure(removed)
    t.monitors[1].on_failure(lambda failure: 1 / 0)
    t.monitors[1].on_failure(lambda failure: calls.append(str(failure)))
    t.monitors[0].report(ValueError("x"))
    assert t.monitors[1]._failed.wait(2)
    time.sleep(0.2)
    assert len(calls) == 1
    t.monitors[1].on_failure(lambda failure: calls.append("late"))
    assert calls[1:] == ["late"]


def test_a_dead_helper_is_a_clear_cause(team):
    t = team(2)
    t.process.kill()
    for m in t.monitors:
        assert m._failed.wait(2)
        assert "helper process, on rank 0's host, ended before the job did" in str(m.failure)
    with pytest.raises(RankFailed):
        t.monitors[0].store_get("a")


def test_after_bye_an_end_is_no_failure(team):
    t = team(3)
    t.monitors[1].bye()
    t.monitors[1].bye()
    time.sleep(0.5)
    assert t.monitors[0].failure is None
    [error] = t.all(lambda m: m.agree("more", "", timeout=0.3), ranks=(0,))
    assert "has shut down" in str(error)


# The helper's own end ---------------------------------------------------------------------------------


def test_it_ends_after_all_said_bye_and_not_before(team):
    t = team(2)
    t.monitors[0].bye()
    time.sleep(1.0)
    assert t.process.is_running()
    t.monitors[1].bye()
    wait_gone(t.process, 3)


def test_it_ends_when_nobody_comes():
    process = helper_process(start_helper("127.0.0.1", 2, Config(timeout_seconds=1.0)))
    wait_gone(process, 4)


def test_it_ends_when_its_parent_vanishes_before_anybody_came():
    code = "from hvdbridge.supervisor import spawn; print(spawn.start_helper('127.0.0.1', 2, spawn.Config()))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    address = HelperAddress.parse(done.stdout.strip())
    with suppress(AssertionError):  # it may have ended already
        wait_gone(helper_process(address), 3)


def test_it_survives_nonsense(team):
    """1,000 random frames and 100 half-open connections during start-up; its memory stays bounded."""
    address = start_helper("127.0.0.1", 2, PATIENT)
    process = helper_process(address)
    before = process.memory_info().rss
    first = Monitor.connect(address, 0, 2, PATIENT)
    half_open = [socket.create_connection((address.host, address.port)) for _ in range(100)]
    for s in half_open[:50]:
        s.sendall(b"\0\0")
    for n in range(1000):
        with socket.create_connection((address.host, address.port)) as s, suppress(ConnectionError):
            body = os.urandom(n % 700)
            s.sendall((len(body).to_bytes(4, "big") + body) if n % 3 else os.urandom(100_000))
    second = Monitor.connect(address, 1, 2, PATIENT)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda m: m.agree("start", "x"), (first, second))) == [None, None]
    assert process.memory_info().rss - before < 32 << 20
    first.bye()
    second.bye()
    wait_gone(process, 3)
    for s in half_open:
        s.close()


# Real processes ---------------------------------------------------------------------------------------

RANK = """
import os, sys, time, signal, threading
from hvdbridge.config import Config
from hvdbridge.supervisor import client
from hvdbridge.supervisor.client import Monitor
from hvdbridge.supervisor.spawn import HelperAddress
rank, size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
monitor = Monitor.connect(HelperAddress.parse(sys.stdin.readline()), rank, size, Config(timeout_seconds=timeout))
monitor.install_exit_hooks()
monitor.agree("start", "")
client.UNWIND = 0.5
def collective(seconds=60):
    with monitor.watch("AllReduce[3]"):
        time.sleep(seconds)
"""


class Ranks:
    """Ranks as processes; ``code[i]`` (the last one for the rest) runs after they met."""

    def __init__(self, *code: str, timeout: float = 100.0) -> None:
        self.address = start_helper("127.0.0.1", len(code), Config(timeout_seconds=timeout))
        self.helper = helper_process(self.address)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK + text, str(rank), str(len(code)), str(timeout)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, text in enumerate(code)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{self.address}\n")
            process.stdin.flush()

    def end(self, seconds: float = 40.0) -> tuple[list[int], list[str]]:
        """Exit statuses and outputs; every process, the helper too, is gone afterwards."""
        deadline = time.monotonic() + seconds
        try:
            outputs = [p.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for p in self.processes]
            wait_gone(self.helper, 20)
            return [p.returncode for p in self.processes], outputs
        finally:
            for process in self.processes:
                process.kill()
                process.communicate()


def test_a_rank_raises():
    ranks = Ranks("collective()", "raise ValueError('bad batch')", "collective()")
    statuses, outputs = ranks.end()
    assert statuses == [1, 1, 1]
    assert "Traceback" in outputs[1]
    assert outputs[1].count("bad batch") == 1
    for text in (outputs[0], outputs[2]):
        assert text.startswith("hvdbridge: rank ")
        assert "failed: ValueError: bad batch" in text


def test_a_rank_unwinds_with_the_cause():
    wait = "monitor.store_get('never')"
    statuses, outputs = Ranks(wait, "raise ValueError('bad batch')").end()
    assert statuses == [1, 1]
    assert "Traceback" in outputs[0]
    assert "RankFailed: rank 1" in outputs[0]
    assert "failed: ValueError: bad batch" in outputs[0]


def test_a_rank_is_killed():
    ranks = Ranks("collective()", "os.kill(os.getpid(), signal.SIGKILL)")
    statuses, outputs = ranks.end()
    assert statuses == [1, -9]
    assert "rank 0 ends: rank 1 (" in outputs[0]
    assert "died without a word" in outputs[0]


def test_a_rank_is_killed_while_its_forked_children_live():
    fork = "\nif os.fork() == 0: time.sleep(40); os._exit(0)\nos.close(1); os.close(2); os.kill(os.getpid(), 9)"
    ranks = Ranks("collective()", "sys.stdout.flush(); os.dup2(os.open(os.devnull, 2), 1); os.dup2(1, 2)" + fork)
    assert ranks.processes[0].wait(30) == 1
    ranks.end()


def test_a_rank_falls_asleep():
    ranks = Ranks("collective()", "time.sleep(60)", "collective()", timeout=3.0)
    statuses, outputs = ranks.end()
    assert statuses == [1, 1, 1]
    for text in outputs:
        assert "ranks 0, 2 wait in AllReduce[3]; not in it: rank 1 (" in text


HOLD_GIL = "import ctypes; ctypes.PyDLL(None).sleep(60)"


@pytest.mark.parametrize("asleep", [HOLD_GIL, "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_cannot_hear_is_killed(asleep):
    """It holds the GIL, as MPI_Init does, or is stopped."""
    ranks = Ranks("collective()", asleep, timeout=3.0)
    statuses, _ = ranks.end()
    assert statuses == [1, -9]


def test_a_phase_ends_a_process_whose_helper_died_with_it():
    ranks = Ranks(f"os.kill(int(sys.stdin.readline()), 9)\nwith monitor.phase('MPI_Init', 0.5): {HOLD_GIL}")
    ranks.processes[0].stdin.write(f"{ranks.helper.pid}\n")
    [status], [text] = ranks.end()
    assert status == 1
    assert "Timeout" in text


@pytest.mark.parametrize("call", ["sys.exit(3)", "exit(3)"])
def test_sys_exit_with_a_status(call):
    statuses, outputs = Ranks("collective()", call).end()
    assert statuses == [1, 3]
    assert "left with sys.exit(3)" in outputs[0]


SLOWLY = """
from hvdbridge.supervisor import exits
client.UNWIND = 5
at_once = exits.end_process
exits.end_process = lambda *words: (time.sleep(0.5), at_once(*words))
"""


@pytest.mark.parametrize("other", ["monitor.store_get('never')", "pass"])
def test_the_rank_whose_failure_it_is_ends_first(other):
    """mpiexec kills the others when the first has ended, and torchrun names the first as the cause."""
    ranks = Ranks("client.UNWIND = 5; " + other, SLOWLY + "sys.exit(3)")
    while ranks.processes[0].poll() is None:
        time.sleep(0.001)
    assert ranks.processes[1].poll() == 3
    assert ranks.end()[0] == [1, 3]


def test_sys_exit_with_a_text():
    statuses, outputs = Ranks("collective()", "sys.exit('no data')").end()
    assert statuses == [1, 1]
    assert "no data" in outputs[1]


def test_a_caught_sys_exit_is_none():
    code = "\ntry: sys.exit(3)\nexcept SystemExit: pass\n"
    assert Ranks(code, code + "sys.exit(0)").end()[0] == [0, 0]


def test_one_rank_leaves_while_the_others_wait():
    ranks = Ranks("collective()", "pass", "collective()")
    statuses, outputs = ranks.end()
    assert statuses == [1, 1, 1]
    for text in outputs:
        assert "rank 1 (" in text
        assert "left without hb.shutdown() while ranks 0, 2 wait in AllReduce[3]" in text


def test_all_ranks_leave_at_different_times():
    statuses, outputs = Ranks("time.sleep(0.5)", "pass", "time.sleep(2)").end()
    assert statuses == [0, 0, 0]
    assert outputs == ["", "", ""]


def test_all_ranks_shut_down():
    statuses, outputs = Ranks("monitor.bye(); sys.exit(3)", "monitor.bye()", "time.sleep(1); monitor.bye()").end()
    assert statuses == [3, 0, 0]
    assert outputs == ["", "", ""]


def test_a_broken_excepthook_of_somebody_else():
    code = "sys.excepthook = lambda *e: print('mine')\nraise KeyError('x')"
    statuses, outputs = Ranks("collective()", code).end()
    assert statuses == [1, 1]
    assert "failed: KeyError" in outputs[0]


def test_os_exit_and_signals_need_no_hook():
    statuses, outputs = Ranks("collective()", "os._exit(0)").end()
    assert statuses == [1, 0]
    assert "died without a word" in outputs[0]


@needs_mpi
@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "raise ValueError('x')"])
def test_a_rank_ends_before_the_other_has_left_mpi_init(ends):
    """Rank 0 spins in MPI_Init, in shared memory, with the GIL held."""
    join = "os.environ |= HelperAddress.parse(ADDRESS).pmi_environment(rank, size)\n"
    ranks = Ranks(
        "ADDRESS = sys.stdin.readline()\n" + join + "with monitor.phase('MPI_Init'): from mpi4py import MPI",
        "time.sleep(1.5)\n" + ends,
    )
    ranks.processes[0].stdin.write(f"{ranks.address}\n")
    ranks.processes[0].stdin.flush()
    statuses, _ = ranks.end()
    assert statuses[0] != 0


@needs_mpi
@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "time.sleep(60)"])
def test_no_segment_stays_under_mpiexec_whose_kvsname_we_do_not_know(ends, tmp_path):
    """A rank is killed; or the launcher and all ranks are, at once."""
    address = start_helper("127.0.0.1", 2, PATIENT)
    helper = helper_process(address)
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys, os; sys.argv[1:] = [os.environ['PMI_RANK'], '2', '30']; sys.stdin = open('address')\n"
        + RANK
        + "with monitor.phase('MPI_Init'): from mpi4py import MPI\n"
        + "from hvdbridge.supervisor.processes import segments_of\nnames = ' '.join(segments_of(os.getpid()))\n"
        + "open(f'part{rank}', 'w').write(names); os.rename(f'part{rank}', f'up{rank}')\n"
        + "until = time.time() + 30\n"
        + "while rank and not os.path.exists('up0') and time.time() < until: time.sleep(0.01)\n"
        + f"if rank: {ends}\n"
        + "MPI.COMM_WORLD.barrier()"
    )
    (tmp_path / "address").write_text(f"{address}\n")
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable, str(script)]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    family = psutil.Process(launcher.pid)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "up0").exists() and (tmp_path / "up1").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if "sleep" in ends:
        for process in [*family.children(recursive=True), family]:
            with suppress(psutil.Error):
                process.kill()
    assert launcher.wait(20) != 0
    wait_gone(helper, 6)
    segments = (tmp_path / "up0").read_text().split()
    assert segments
    assert not [name for name in segments if (SHM / name).exists()]


def test_descriptors_are_returned():
    before = len(os.listdir("/proc/self/fd"))
    t = Team(3, PATIENT)
    t.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("call", "waits"), [("", "MPI_Init did not return"), ("guard.started()", "hvdbridge's helper was not met")]
)
def test_the_guard_says_what_it_waited_for(call: str, waits: str) -> None:
    code = f"""
import time
from hvdbridge.supervisor.guard import Guard
guard = Guard(0.5, "rank 1 of 2", -1)
{call}
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == -signal.SIGKILL
    assert "rank 1 of 2" in done.stderr
    assert waits in done.stderr
    assert "within 0.5 s" in done.stderr


def test_frames_are_taken_when_they_are_complete():
    """So that the monitor's thread keeps time while a long frame comes."""
    stream, data, taken = pack({"op": "a"}, b"xyz") + pack({"op": "b"}), bytearray(), []
    for byte in stream:
        data.append(byte)
        taken += [(message["op"], payload) for message, payload in take_frames(data, 1000)]
    assert taken == [("a", b"xyz"), ("b", b"")]
    assert not data
