"""How elastic training outlives a lost rank, under each launcher.

=====================  =========================================  ==================================================
launcher               after a lost rank                          where the last commit is meanwhile
=====================  =========================================  ==================================================
torchrun               every process ends, the agent starts all   a file on each host, written at each commit
horovodrun (elastic)   survivors start over in their own          in memory; a file while the process starts over
                       process (exec), the launcher replaces
                       the lost ones
others                 the job ends                               nowhere
=====================  =========================================  ==================================================

Rules:

1. After a restart the newest commit that any rank has is given to all, whatever the ranks' numbers are now.
2. After a failed operation without a lost rank, where all ranks raise HorovodInternalError, each process restores,
   shuts down and starts again. A rank that does not raise counts as lost.
3. Files are in ``HVDBRIDGE_CACHE/elastic`` if that variable is set, else in the user's directory among the system's
   temporary files. Their directory's name lives as long as the job. Only the user may read them, because they are
   pickles. Each replaces the one before atomically; a script that ends without an error removes them.
4. A process starts over by exec: no library has to survive the failure of its peers, MPI included. The script runs
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
"""The errors by which a rank learns that another one is lost."""

AGREE_SECONDS = 5.0
"""For rule 2: a rank that does not raise within this time counts as lost."""

HANDED_ON = "HVDBRIDGE_INTERNAL_ELASTIC"
"""Names the file with the last commit, from a process to itself after exec."""

SLOT = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""The order of horovodrun's answer to a worker that asks for its new numbers."""


@dataclass
class Keeper:
    """The state of this process's elastic runs.

    Attributes:
        number: of commits, over all restarts.
        runs: calls of elastic functions in this process.
        resets: of this process.
    """

    number: int = 0
    runs: int = 0
    resets: int = 0
    directory: Path | None = None
    notifications: Any = None


_keeper = Keeper()


def hosts_may_change() -> bool:
    """Whether the launcher is horovodrun in its elastic mode."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" and runtime.launcher() == "horovodrun"


def writes_files() -> bool:
    return runtime.launcher() == "torchrun"


@contextmanager
def elastic(state: State) -> Iterator[None]:
    """Around an elastic function: listen for hosts that come and go, and let this process survive failures where it can
    start over."""
    _keeper.runs += 1
    if not hosts_may_change():
        yield
        return
    runtime.current().monitor.spare()
    if _keeper.notifications is None:
        from horovod.runner.elastic.worker import WorkerNotificationManager

        _keeper.notifications = WorkerNotificationManager()
        _keeper.notifications.init()
    _keeper.notifications.register_listener(state)
    try:
        yield
    finally:
        _keeper.notifications.remove_listener(state)


# Commits -----------------------------------------------------------------------------------------------


def keep(state: State) -> None:
    """Count a commit of ``state``, and write it where a restart reads files."""
    _keeper.number += 1
    if writes_files() and runtime.local_rank() == 0:
        write(commit_file(), state)


def write(file: Path, state: State) -> None:
    """Write the commit atomically: a process that is killed meanwhile leaves the commit before."""
    partial = file.with_suffix(f".{os.getpid()}")
    torch.save({"number": _keeper.number, "saved": state.saved()}, partial)
    os.replace(partial, file)


def resume(state: State) -> None:
    """Give all ranks the newest commit that outlived a restart, if there is one; collective."""
    mine = load() or {"number": -1, "saved": None}
    control = runtime.current().control
    numbers = control.all_gather_object(-1 if mine["saved"] is None else mine["number"])
    newest = max(numbers)
    if newest < 0:
        return
    root = numbers.index(newest)
    saved = control.broadcast_object(mine["saved"] if control.rank == root else None, root)
    _keeper.number = newest
    state.adopt(saved)
    state.on_reset()


def load() -> dict[str, Any] | None:
    """The commit that this process finds after a restart."""
    handed_on = os.environ.pop(HANDED_ON, None)
    if handed_on is None and not writes_files():
        return None
    file = Path(handed_on) if handed_on else commit_file()
    if not file.exists():
        return None
    if file.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{file} belongs to another user; a commit is a pickle. Set HVDBRIDGE_CACHE")
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    if handed_on:
        file.unlink()
    return found


def commit_file() -> Path:
    """The file of the elastic function that runs now: a script may call several in turn."""
    if _keeper.directory is None:
        _keeper.directory = directory(f"job-{token()}")
        if runtime.local_rank() == 0:  # a process that failed ends without this hook, and leaves its commits
            atexit.register(shutil.rmtree, _keeper.directory, ignore_errors=True)
    return _keeper.directory / f"commit-{_keeper.runs}.pt"


def directory(name: str) -> Path:
    """A directory that only this user may enter.

    Raises:
        ConfigurationError: it exists, and is another user's.
    """
    given = os.environ.get("HVDBRIDGE_CACHE")
    found = own_directory(Path(given).expanduser() if given else None) / "elastic" / name
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def token() -> str:
    """A text that is the same on all ranks and in all restarts of a job, and in no other job."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it lives as long as the job
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = channels.tcp_store(host, port, False, Config.from_environment(), f"rank {runtime.rank()}")
        found = store.compare_set("hvdbridge/elastic/token", "", uuid.uuid4().hex)
        return bytes(found).decode()
    agent = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {identity(os.getppid())}"
    return hashlib.sha256(agent.encode()).hexdigest()[:32]


# Failures ----------------------------------------------------------------------------------------------


def failed(state: State, failure: BaseException) -> None:
    """React to a failed operation. Returns where all ranks go on in their processes.

    Raises:
        HorovodInternalError, RankFailed, CollectiveTimeout: ``failure``, where this process ends.
    """
    monitor = runtime.current().monitor
    if monitor.failure is None:
        _keeper.resets += 1
        try:
            if monitor.size > 1:
                monitor.agree(f"elastic reset {_keeper.resets}", "", timeout=AGREE_SECONDS)
            return
        except HvdbridgeError:
            monitor.report(failure)
    if hosts_may_change():
        monitor.detach()
        start_over(state)
    raise failure


def hosts_changed(state: State) -> None:
    """React to a change of hosts, with nothing lost. Returns where the launcher cannot change the hosts."""
    if hosts_may_change():
        state.save()
        runtime.shutdown()
        start_over(state)


def start_over(state: State) -> None:
    """Wait for this worker's new numbers, and run the script again in this process; does not return."""
    file = directory("workers") / f"{hashlib.sha256(str(identity(os.getpid())).encode()).hexdigest()[:32]}.pt"
    write(file, state)
    numbers = new_numbers()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if numbers["RANK"] == "-1":  # this host is no longer wanted
        file.unlink()
        os._exit(0)
    os.environ.update({f"HOROVOD_{name}": value for name, value in numbers.items()})
    os.environ[HANDED_ON] = str(file)
    for name in os.listdir("/proc/self/fd"):  # exec closes what libraries opened
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def new_numbers() -> dict[str, str]:
    """Ask horovodrun for this worker's numbers among those that are left; returns when all of them have asked.

    Raises:
        RendezvousError: it is gone, or gives up.
    """
    url = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}".format(**os.environ)
    worker = "{HOROVOD_HOSTNAME}:{HOROVOD_LOCAL_RANK}".format(**os.environ)
    limit = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/rank_and_size/{worker}", timeout=limit) as reply:
            numbers = reply.read().decode().split(",")
    except OSError as error:
        raise RendezvousError(f"worker {worker}: horovodrun at {url} gave no new place: {error}") from error
    return dict(zip(SLOT, numbers, strict=True))
