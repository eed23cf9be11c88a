"""Recovery of elastic training from a lost rank, under each launcher.

=====================  =========================================  ==================================================
launcher               after a lost rank                          storage of the last commit during the restart
=====================  =========================================  ==================================================
torchrun               every process ends, the agent starts all   a file on each host, written at each commit
horovodrun (elastic)   survivors restart in their own process     in memory; a file while the process restarts
                       (exec), the launcher replaces the lost
                       ones
others                 the job ends                               none
=====================  =========================================  ==================================================

Rules:

1. After a restart all ranks receive the newest commit that any rank has, although ranks may be numbered otherwise.
2. An operation may fail without a lost rank: all ranks raise HorovodInternalError. Then each process restores its last
   commit, shuts down and initializes again. A rank that does not raise counts as lost.
3. Files are in ``HVDBRIDGE_CACHE/elastic`` if that variable is set, else in the user's directory among the system's
   temporary files. Their directory's name is unique to the job. Only the user may read them, because they are
   pickles. A file replaces the previous one atomically. A script that ends without an error removes its files.
4. A process restarts by exec, so no library, MPI included, has to survive the failure of its peers. The script runs
   from its beginning, as in a new worker.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdbridge.config import Config, own_directory
from hvdbridge.errors import CollectiveTimeout, ConfigurationError, HvdbridgeError, RankFailed, RendezvousError
from hvdbridge.startup import channels
from hvdbridge.supervisor.processes import identity
from hvdbridge.torch.exceptions import HorovodInternalError
from hvdbridge.training import runtime

if TYPE_CHECKING:
    from hvdbridge.torch.elastic.state import State

FAILURES = (HorovodInternalError, RankFailed, CollectiveTimeout)
"""Errors that may mean that another rank is lost."""

AGREE_SECONDS = 5.0
"""Time within which all ranks must raise (rule 2)."""

COMMIT_PATH_VARIABLE = "HVDBRIDGE_INTERNAL_ELASTIC"
"""Environment variable by which a process passes the path of its last commit through exec."""

RANK_FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""Fields of horovodrun's reply to a worker that requests its new ranks, in order."""


@dataclass
class ElasticProcess:
    """The state of elastic training in this process.

    Attributes:
        number: number of commits of the job, over all restarts.
        runs: number of calls of elastic functions in this process.
        resets: number of failures without a lost rank (rule 2).
        directory: this job's directory of commit files, once it is needed.
        notifications: horovodrun's client, which reports changes of hosts.
    """

    number: int = 0
    runs: int = 0
    resets: int = 0
    directory: Path | None = None
    notifications: Any = None


_process = ElasticProcess()


def hosts_may_change() -> bool:
    """Return whether the launcher is horovodrun in its elastic mode."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" and runtime.launcher() == "horovodrun"


def writes_commits() -> bool:
    """Return whether each commit is written to a file, because torchrun restarts processes."""
    return runtime.launcher() == "torchrun"


@contextmanager
def elastic(state: State) -> Iterator[None]:
    """Run an elastic function in this context. Under elastic horovodrun, the launcher reports changes of hosts to
    ``state``, and the failure of another rank does not end this process."""
    _process.runs += 1
    if not hosts_may_change():
        yield
        return
    runtime.current().monitor.survive_failure()
    if _process.notifications is None:
        from horovod.runner.elastic.worker import WorkerNotificationManager

        _process.notifications = WorkerNotificationManager()
        _process.notifications.init()
    _process.notifications.register_listener(state)
    try:
        yield
    finally:
        _process.notifications.remove_listener(state)


# Commits -----------------------------------------------------------------------------------------------


def record_commit(state: State) -> None:
    """Count a commit of ``state``, and write it to a file if restarts read files."""
    _process.number += 1
    if writes_commits() and runtime.local_rank() == 0:
        write_commit(commit_file(), state)


def write_commit(file: Path, state: State) -> None:
    """Write the last commit atomically: a process that is killed meanwhile leaves the previous file."""
    partial = file.with_suffix(f".{os.getpid()}")
    torch.save({"number": _process.number, "saved": state.saved()}, partial)
    os.replace(partial, file)


def resume(state: State) -> None:
    """Load the newest commit that any rank kept through a restart, on all ranks; collective. No effect without one."""
    commit = load_commit() or {"number": -1, "saved": None}
    control = runtime.current().control
    commit_numbers = control.all_gather_object(-1 if commit["saved"] is None else commit["number"])
    newest = max(commit_numbers)
    if newest < 0:
        return
    root = commit_numbers.index(newest)
    saved = control.broadcast_object(commit["saved"] if control.rank == root else None, root)
    _process.number = newest
    state.adopt(saved)
    state.on_reset()


def load_commit() -> dict[str, Any] | None:
    """Read the commit that this process, or its predecessor, wrote before a restart; None without one.

    Raises:
        ConfigurationError: the file belongs to another user.
    """
    path = os.environ.pop(COMMIT_PATH_VARIABLE, None)
    if path is None and not writes_commits():
        return None
    file = Path(path) if path else commit_file()
    if not file.exists():
        return None
    if file.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{file} belongs to another user; a commit is a pickle. Set HVDBRIDGE_CACHE")
    commit: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    if path:
        file.unlink()
    return commit


def commit_file() -> Path:
    """Return the commit file of the elastic function that runs now, because a script may call several in turn."""
    if _process.directory is None:
        _process.directory = directory(f"job-{job_id()}")
        if runtime.local_rank() == 0:  # not run by a process that fails, so its commits remain
            atexit.register(shutil.rmtree, _process.directory, ignore_errors=True)
    return _process.directory / f"commit-{_process.runs}.pt"


def directory(name: str) -> Path:
    """Create and return a directory for files that only this user may read.

    Raises:
        ConfigurationError: it exists, and belongs to another user.
    """
    cache = os.environ.get("HVDBRIDGE_CACHE")
    path = own_directory(Path(cache).expanduser() if cache else None) / "elastic" / name
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def job_id() -> str:
    """Return a text that is equal on all ranks and in all restarts of this job, and differs between jobs."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the agent's store exists as long as the job
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = channels.tcp_store(host, port, False, Config.from_environment(), f"rank {runtime.rank()}")
        stored = store.compare_set("hvdbridge/elastic/token", "", uuid.uuid4().hex)
        return bytes(stored).decode()
    agent = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {identity(os.getppid())}"
    return hashlib.sha256(agent.encode()).hexdigest()[:32]


# Failures ----------------------------------------------------------------------------------------------


def handle_failure(state: State, failure: BaseException) -> None:
    """Handle the failure of an operation. Returns only if no rank is lost, and all ranks continue in their processes.

    Under elastic horovodrun, a lost rank makes this process restart.

    Raises:
        HorovodInternalError, RankFailed, CollectiveTimeout: ``failure``, if this process must end.
    """
    monitor = runtime.current().monitor
    if monitor.failure is None:
        _process.resets += 1
        try:
            if monitor.size > 1:
                monitor.agree(f"elastic reset {_process.resets}", "", timeout=AGREE_SECONDS)
            return
        except HvdbridgeError:
            monitor.report(failure)
    if hosts_may_change():
        monitor.detach()
        restart_process(state)
    raise failure


def handle_host_change(state: State) -> None:
    """Restart this process after a change of hosts. Returns only if the launcher cannot change the hosts."""
    if hosts_may_change():
        state.save()
        runtime.shutdown()
        restart_process(state)


def restart_process(state: State) -> None:
    """Write the last commit, wait for new ranks, and run the script again by exec. Does not return."""
    file = directory("workers") / f"{hashlib.sha256(str(identity(os.getpid())).encode()).hexdigest()[:32]}.pt"
    write_commit(file, state)
    ranks = request_ranks()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if ranks["RANK"] == "-1":  # the launcher has removed this host
        file.unlink()
        os._exit(0)
    os.environ.update({f"HOROVOD_{name}": value for name, value in ranks.items()})
    os.environ[COMMIT_PATH_VARIABLE] = str(file)
    for name in os.listdir("/proc/self/fd"):  # exec must close the files and sockets that libraries opened
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def request_ranks() -> dict[str, str]:
    """Request this worker's new ranks from horovodrun. Blocks until all remaining workers have requested theirs.

    Returns:
        The values of :data:`RANK_FIELDS`; RANK is -1 on a host that the launcher has removed.

    Raises:
        RendezvousError: horovodrun does not answer, or gives up.
    """
    url = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}".format(**os.environ)
    worker = "{HOROVOD_HOSTNAME}:{HOROVOD_LOCAL_RANK}".format(**os.environ)
    limit = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/rank_and_size/{worker}", timeout=limit) as reply:
            ranks = reply.read().decode().split(",")
    except OSError as error:
        raise RendezvousError(f"worker {worker}: horovodrun at {url} gave no new rank: {error}") from error
    return dict(zip(RANK_FIELDS, ranks, strict=True))
