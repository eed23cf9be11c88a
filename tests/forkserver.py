"""Fork the Python processes of jobs from a process that has already imported torch and hvdbridge.

A rank that ``python`` starts spends seconds on imports; a forked rank starts in milliseconds. It then runs its script
as ``python script.py`` would: as ``__main__``, up to the interpreter's own exit.

Rules:

1. A server has one thread and has started no backend: it never imports ``mpi4py.MPI`` or ``horovod.torch``.
2. A job's ranks come from two servers with different string hashes. Therefore even and odd ranks iterate over most sets
   in different orders, as ranks without a server do, and a collective whose order depends on a set still fails.
3. For each rank the server forks a keeper. The keeper forks the rank, forwards the signals that its client sends,
   waits, reports the exit status and the processes that the rank left in its process group, and kills those. If the
   client ends, the keeper kills the rank. The client is the test, or a process that a launcher started (``forked.py``).
4. The first job of a test session starts the servers. They end with the session's main process.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

HASH_SEEDS = ("1", "2")
START_SECONDS = 120.0
MOST_FILES, LENGTH = 250, 4
"""Most open files of a request; bytes of its length prefix."""
GRACE_SECONDS = 5.0
"""Time for other ranks to end after a failure, and for processes that end by themselves (a resource tracker)."""
MODULES = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.optim", "torch.multiprocessing",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch._dynamo", "torch._inductor.compile_fx",
    "hvdbridge", "hvdbridge.torch", "hvdbridge.training.synchronizer", "hvdbridge.training.primitives",
    "hvdbridge.execution.simulation", "numpy", "psutil", "pytest",
)  # fmt: skip
"""Modules that most ranks import. torch imports its compiler (1,000 modules) with the first optimizer."""
PYTHON = """#!/bin/sh
[ "$1" = -u ] && shift && export PYTHONUNBUFFERED=1
case "$1" in
-m|-c|[!-]*) {forked} "$@" ;;
*) exec {python} "$@" ;;
esac
"""
"""A ``python`` that forks; options other than -u, -m and -c start a new interpreter."""


# -- the client ------------------------------------------------------------------------------------------


def start(folder: Path, owner: int) -> None:
    """Start the servers, which listen in ``folder`` until process ``owner`` ends, unless they run already."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not any(folder.glob("*.failed")), "a fork server failed; the first test that needed it has its error"
        missing = [seed for seed in HASH_SEEDS if not (folder / seed).exists()]
        commands(folder / "bin")
        for seed in missing:
            code = f"import forkserver; exec(forkserver.serve({str(folder / seed)!r}, {owner}))"
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            own = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
            subprocess.Popen(  # the shell exits immediately: the server is no child of this process
                ["sh", "-c", '("$@" || touch "$0") &', f"{folder / seed}.failed", sys.executable, "-c", code],
                env=os.environ | own, stdin=subprocess.DEVNULL, start_new_session=True,
            ).wait()  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not all((folder / seed).exists() for seed in missing):
            over = time.monotonic() > deadline or any(folder.glob("*.failed"))
            assert not over, f"no fork server within {START_SECONDS:.0f} s, or it failed: its error stands above"
            time.sleep(0.02)


def commands(folder: Path) -> None:
    """Write the ``python``, ``torchrun``, ``horovodrun`` and ``hvdbridge`` that fork (``forked.py``), and mpiexec."""
    if folder.exists():
        return
    folder.mkdir()
    forked = f"exec {sys.executable} -S -E {Path(__file__).with_name('forked.py')}"
    for name in ("torchrun", "horovodrun", "hvdbridge"):
        (folder / name).write_text(f'#!/bin/sh\n{forked} {Path(sys.executable).with_name(name)} "$@"\n')
    (folder / "python").write_text(PYTHON.format(python=sys.executable, forked=forked))
    (folder / "mpiexec").write_text(f'#!/bin/sh\nexec {Path(sys.executable).with_name("mpiexec")} "$@"\n')
    for file in folder.iterdir():
        file.chmod(0o700)


class Rank:
    """A forked rank. ``status`` is None until the rank ends; ``left`` lists the processes that it left behind."""

    def __init__(self, folder: Path, rank: int, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.status: int | None = None
        self.left: list[str] = []
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(folder / HASH_SEEDS[rank % len(HASH_SEEDS)]))
        request = {
            "argv": list(argv), "env": dict(env), "cwd": os.getcwd(), "parent": os.getpid(),
            "files": [0, 1, 2], "namespaces": [],
        }  # fmt: skip
        text = json.dumps(request).encode()
        with open(os.devnull) as nothing, log.open("a") as output:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(self.connection, [len(text).to_bytes(LENGTH, "big")], files)
        self.connection.sendall(text)

    def receive(self) -> None:
        """Read the keeper's report."""
        with self.connection, self.connection.makefile() as stream:
            report = json.loads(stream.readline() or '{"status": -9, "left": []}')
        self.status, self.left = report["status"], report["left"]


class Limit:
    """Limit on the seconds of a job. A pause of the whole machine counts as :attr:`MOST_PER_LOOK` seconds: a virtual
    machine may be stopped for minutes, and its clock goes on."""

    MOST_PER_LOOK = 2.0

    def __init__(self, seconds: float) -> None:
        self.left, self._looked_at = seconds, time.monotonic()

    def wait_for(self) -> float:
        """Return for how many seconds to wait until the next call. Then :attr:`left` is up to date; at most 0: over."""
        now = time.monotonic()
        self.left -= min(now - self._looked_at, self.MOST_PER_LOOK)
        self._looked_at = now
        return max(0.0, min(self.left, self.MOST_PER_LOOK / 2))


def run(
    folder: Path, argv: Sequence[str], envs: Sequence[Mapping[str, str]], log: Path, timeout: float
) -> tuple[int | None, list[str]]:
    """Run ``argv`` once in each of ``envs``, the environments of the ranks.

    Returns:
        The status of the first failed rank, 0 if none failed, None if ``timeout`` passed before a failure; and the
        command lines of the processes that ranks left behind.
    """
    ranks = [Rank(folder, rank, argv, env, log) for rank, env in enumerate(envs)]
    limit = Limit(timeout)
    first_failure = 0
    while running := [rank for rank in ranks if rank.status is None]:
        ready = select.select([rank.connection for rank in running], [], [], limit.wait_for())[0]
        if not ready and limit.left <= 0:
            for rank in running:
                rank.connection.close()  # their keepers kill them
            return first_failure or None, [text for rank in ranks for text in rank.left]
        for rank in running:
            if rank.connection in ready:
                rank.receive()
                if rank.status and not first_failure:
                    first_failure = rank.status
                    limit.left = min(limit.left, GRACE_SECONDS)
    return first_failure, [text for rank in ranks for text in rank.left]


# -- the server ------------------------------------------------------------------------------------------


def serve(path: str, owner: int) -> CodeType:
    """Fork ranks until process ``owner`` ends. Only ranks return from it, with the code to run."""
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()  # otherwise garbage collections and the exit of each rank traverse all these modules
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a process with several cannot be forked safely"
    assert not {"mpi4py.MPI", "horovod.torch"} & set(sys.modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no zombies
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    session = os.pidfd_open(owner)
    while session not in select.select([listener, session], [], [])[0]:
        connection = listener.accept()[0]
        if os.fork():
            connection.close()
            continue
        listener.close()
        os.close(session)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, files, *_ = socket.recv_fds(connection, LENGTH, MOST_FILES)
        request = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        if rank := os.fork():
            for file in files:
                os.close(file)
            keep(rank, connection)
        connection.close()
        return prepare(request, files, Path(path).with_name("bin") / "python")
    os._exit(0)


def keep(rank: int, connection: socket.socket) -> NoReturn:
    """Forward signals until the rank or its client ends; report the rank's status and exit."""
    ended = os.pidfd_open(rank)
    while ended not in select.select([ended, connection], [], [])[0]:
        for number in (signals := connection.recv(100)):
            signal.pidfd_send_signal(ended, number)
        if not signals:
            kill(rank)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := group(rank)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        with suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)
    with suppress(OSError):
        connection.sendall(json.dumps({"status": status, "left": left}).encode() + b"\n")
    os._exit(0)


def kill(leader: int) -> None:
    """Kill a rank and its process group."""
    for end in (os.killpg, os.kill):  # just after the fork the rank leads no group yet
        with suppress(ProcessLookupError):
            end(leader, signal.SIGKILL)


def group(leader: int) -> list[str]:
    """Return the command lines of the living processes of a group."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    commands = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == leader and state not in "ZX":
                commands.append((stat.parent / "cmdline").read_text().replace("\0", " "))
    return commands


def prepare(request: dict[str, Any], files: list[int], python: Path) -> CodeType:
    """Bring this process into the state in which ``python`` starts a script, module or text; return its code."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell with & had it ignored
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for name in reversed(request["namespaces"]):  # simulated hosts are namespaces
        if os.stat(file := files.pop()).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            assert not ctypes.CDLL(None).setns(file, 0), name
        os.close(file)
    os.chdir(request["cwd"])
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = request["cwd"]  # where `spawn` looks for the script
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for copy, target in zip(copies, request["files"], strict=True):
        os.dup2(copy, target)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable, parent = str(python), request["parent"]
    os.getppid = lambda: parent  # the other ranks of this host are children of the same parent
    sys.orig_argv[:] = [sys.executable, *request["argv"]]
    tempfile.tempdir = None  # the request may have another TMPDIR
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.modules["numpy"].random.seed()  # each process has its own random numbers
    sys.path[1:1] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.modules.pop("sitecustomize", None)
    with suppress(ModuleNotFoundError):
        __import__("sitecustomize")
    main = sys.modules["__main__"].__dict__
    del main["forkserver"]
    script, *arguments = request["argv"]
    if script == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = arguments
        return compile(f"import runpy; runpy._run_module_as_main({arguments[0]!r})", "<rank>", "exec")
    if script == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        return compile(arguments[0], "<string>", "exec")
    sys.path[0] = str(Path(script).parent)
    sys.argv[:] = [script, *arguments]
    main["__file__"] = script
    return compile(Path(script).read_text(), script, "exec")
