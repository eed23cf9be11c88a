"""Forks a job's Python processes from a process that has imported torch and hvdbridge already.

A rank that ``python`` starts spends 3 to 6 s of a core on imports. A rank forked here begins after some 10 ms, and then
runs its script as ``python script.py`` would: as ``__main__``, up to the interpreter's own exit, which takes 0.3 s.

Rules:

1. A server has one thread and has started no backend: it never imports ``mpi4py.MPI`` or ``horovod.torch``.
2. A job's ranks come from two servers with different string hashes. Even and odd ranks therefore iterate over most sets
   in different orders, as ranks do without a server, and a collective whose order depends on a set still fails.
3. For each rank the server forks a keeper. The keeper forks the rank, passes on the signals that its client names,
   waits, reports the exit status and the processes that the rank left in its process group, and ends those. It ends the
   rank when the client is gone. The client is the test, or what a launcher has started (``forked.py``).
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
"""The files that a request may come with; the bytes of its length."""
GRACE_SECONDS = 5.0
"""For the other ranks once one has failed, and for processes that end by themselves, such as a resource tracker."""
MODULES = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.optim", "torch.multiprocessing",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "torch._dynamo", "torch._inductor.compile_fx",
    "hvdbridge", "hvdbridge.torch", "hvdbridge.training.synchronizer", "hvdbridge.training.primitives",
    "hvdbridge.execution.simulation", "numpy", "psutil", "pytest",
)  # fmt: skip
"""What most ranks import. torch's compiler (1,000 modules) is among it: torch imports it with the first optimizer."""
PYTHON = """#!/bin/sh
[ "$1" = -u ] && shift && export PYTHONUNBUFFERED=1
case "$1" in
-m|-c|[!-]*) {forked} "$@" ;;
*) exec {python} "$@" ;;
esac
"""
"""Options other than -u, -m and -c start an interpreter."""


# -- the client ------------------------------------------------------------------------------------------


def start(folder: Path, owner: int) -> None:
    """Start the servers that listen in ``folder`` until process ``owner`` ends, unless they run already."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not any(folder.glob("*.failed")), "a fork server failed; the first test that needed it has its error"
        missing = [seed for seed in HASH_SEEDS if not (folder / seed).exists()]
        commands(folder / "bin")
        for seed in missing:
            code = f"import forkserver; exec(forkserver.serve({str(folder / seed)!r}, {owner}))"
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            own = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
            subprocess.Popen(  # the shell ends at once, so that the server is no child of this process
                ["sh", "-c", '("$@" || touch "$0") &', f"{folder / seed}.failed", sys.executable, "-c", code],
                env=os.environ | own, stdin=subprocess.DEVNULL, start_new_session=True,
            ).wait()  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not all((folder / seed).exists() for seed in missing):
            late = time.monotonic() > deadline or any(folder.glob("*.failed"))
            assert not late, f"no fork server within {START_SECONDS:.0f} s, or it failed: its error stands above"
            time.sleep(0.02)


def commands(folder: Path) -> None:
    """Make the ``python``, ``torchrun``, ``horovodrun`` and ``hvdbridge`` that fork (``forked.py``), beside mpiexec."""
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
    """A forked rank. ``status`` is None until the rank has ended; ``left`` lists the processes that it left."""

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


def run(
    folder: Path, argv: Sequence[str], envs: Sequence[Mapping[str, str]], log: Path, timeout: float
) -> tuple[int | None, list[str]]:
    """Run ``argv`` once in each of ``envs``, the ranks' environments.

    Returns:
        The status of the first rank that failed, 0 if none did, None if the limit passed before any did; and the
        command lines of the processes that ranks left.
    """
    ranks = [Rank(folder, rank, argv, env, log) for rank, env in enumerate(envs)]
    deadline = time.monotonic() + timeout
    first = 0
    while running := [rank for rank in ranks if rank.status is None]:
        ready = select.select([r.connection for r in running], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            for rank in running:
                rank.connection.close()  # their keepers end them
            return first or None, [text for rank in ranks for text in rank.left]
        for rank in running:
            if rank.connection in ready:
                rank.receive()
                if rank.status and not first:
                    first = rank.status
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return first, [text for rank in ranks for text in rank.left]


# -- the server ------------------------------------------------------------------------------------------


def serve(path: str, owner: int) -> CodeType:
    """Fork ranks until process ``owner`` ends. Returns in ranks only, with the code that the rank runs."""
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()  # else a rank's collections, and its end, go through these modules' 400,000 objects: a second
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
    """Wait for the rank, or for the client's end, and pass signals on; report and leave."""
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
    """End a rank and its process group."""
    for end in (os.killpg, os.kill):  # it leads no group in its first moments
        with suppress(ProcessLookupError):
            end(leader, signal.SIGKILL)


def group(leader: int) -> list[str]:
    """The command lines of the living processes of a group."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == leader and state not in "ZX":
                found.append((stat.parent / "cmdline").read_text().replace("\0", " "))
    return found


def prepare(request: dict[str, Any], files: list[int], python: Path) -> CodeType:
    """Make this process what ``python`` is before it runs the first line of the request's script, module or text."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts by &
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for name in reversed(request["namespaces"]):  # a host that is one
        if os.stat(file := files.pop()).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            assert not ctypes.CDLL(None).setns(file, 0), name
        os.close(file)
    os.chdir(request["cwd"])
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for copy, target in zip(aside, request["files"], strict=True):
        os.dup2(copy, target)
        os.close(copy)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable, parent = str(python), request["parent"]
    os.getppid = lambda: parent  # whose other children are this host's other ranks
    sys.orig_argv[:] = [sys.executable, *request["argv"]]
    tempfile.tempdir = None  # TMPDIR may be another one
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    sys.modules["numpy"].random.seed()  # each process draws its own
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
