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
2. A failed operation without a lost rank (all ranks raise HorovodInternalError) is mended in the process: restore,
   shut down, start again. If some rank does not raise, it is treated as a lost rank.
3. Files lie in ``HVDBRIDGE_CACHE/elastic``, if that variable is set, else in a directory of the user in the system's
   directory for temporary files; under a name that lives as long as the job, and only the user may read them, because
   they are pickles. They replace each other atomically, and go when the script ends well.
4. A process starts over by exec: no library has to survive the failure of its peers, MPI included. The script runs
   from its beginning, as in a new worker.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import urllib.request
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
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
"""What a lost rank looks like to the others."""

AGREE_SECONDS = 5.0
"""For rule 2: within this time all ranks raise, or one is taken for lost."""

HANDED_ON = "HVDBRIDGE_INTERNAL_ELASTIC"
"""Names the file with the last commit, from a process to itself after exec."""

SLOT = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
"""What horovodrun answers to a worker that asks for its new place, in this order."""


class Keeper:
    """What this process keeps of the run that is under way."""

    def __init__(self) -> None:
        self.number = 0  # of commits, over all restarts
        self.runs = 0  # calls of elastic functions in this process
        self.resets = 0  # in this process
        self.directory: Path | None = None
        self.notifications: Any = None


_keeper = Keeper()


def hosts_may_change() -> bool:
    """Whether the launcher is horovodrun in its elastic mode."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" and runtime.launcher() == "horovodrun"


def writes_files() -> bool:
    return runtime.launcher() == "torchrun"


@contextmanager
def elastic(state: State) -> Iterator[None]:
    """Around an elastic function: who listens for hosts that come and go, and that a failure does not end this
    process where it can start over."""
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
    """``state`` was committed."""
    _keeper.number += 1
    if writes_files() and runtime.local_rank() == 0:
        write(commit_file(), state)


def write(file: Path, state: State) -> None:
    """Atomically: whoever is killed meanwhile leaves the commit before."""
    partial = file.with_suffix(f".{os.getpid()}")
    torch.save({"number": _keeper.number, "saved": state.saved()}, partial)
    os.replace(partial, file)


def resume(state: State) -> None:
    """Give all ranks the newest commit that outlived a restart, if there is one; collective."""
    mine = load()
    control = runtime.current().control
    numbers = control.all_gather_object(-1 if mine is None or mine["saved"] is None else mine["number"])
    newest = max(numbers)
    if newest < 0:
        return
    root = numbers.index(newest)
    saved = control.broadcast_object(mine["saved"] if mine is not None and control.rank == root else None, root)
    _keeper.number = newest
    state.adopt(saved)
    state.on_reset()


def load() -> dict[str, Any] | None:
    """What this process finds of an earlier life."""
    handed_on = os.environ.pop(HANDED_ON, None)
    if handed_on is not None:
        found = read(Path(handed_on))
        Path(handed_on).unlink(missing_ok=True)
        return found
    return read(commit_file()) if writes_files() else None


def read(file: Path) -> dict[str, Any] | None:
    try:
        if file.stat().st_uid != os.getuid():
            raise ConfigurationError(f"{file} belongs to another user; a commit is a pickle. Set HVDBRIDGE_CACHE")
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    except FileNotFoundError:
        return None
    return found


def commit_file() -> Path:
    """Of the elastic function that runs now: a script may call several in turn."""
    if _keeper.directory is None:
        _keeper.directory = directory(f"job-{token()}")
        if runtime.local_rank() == 0:
            atexit.register(_clean, _keeper.directory)
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
    """The same on all ranks and in all restarts of a job, and in no other job."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it lives as long as the job
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = channels.tcp_store(host, port, False, Config.from_environment(), f"rank {runtime.rank()}")
        found = store.compare_set("hvdbridge/elastic/token", "", uuid.uuid4().hex)
        return bytes(found).decode()
    agent = f"{os.environ.get('TORCHELASTIC_RUN_ID')} {identity(os.getppid())}"
    return hashlib.sha256(agent.encode()).hexdigest()[:32]


def _clean(found: Path) -> None:
    """At a good end; a process that failed ends without its exit hooks, and leaves the commits to the next."""
    for file in found.glob("commit-*"):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        found.rmdir()


# Failures ----------------------------------------------------------------------------------------------


def failed(state: State, failure: BaseException) -> None:
    """An operation failed. Returns where all ranks are here and go on in their processes.

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
    """All ranks are here, and their work is not lost. Returns where the launcher cannot change the hosts."""
    if hosts_may_change():
        state.save()
        runtime.shutdown()
        start_over(state)


def start_over(state: State) -> None:
    """Wait for this worker's new place, and run the script anew in this process; does not return."""
    file = directory("workers") / f"{hashlib.sha256(str(identity(os.getpid())).encode()).hexdigest()[:32]}.pt"
    write(file, state)
    environment = os.environ
    place = new_place(environment)
    if place["RANK"] == "-1":  # this host is no longer wanted
        file.unlink()
        _exec_or_exit(None)
    environment.update({f"HOROVOD_{name}": value for name, value in place.items()})
    environment[HANDED_ON] = str(file)
    _exec_or_exit([sys.executable, *sys.orig_argv[1:]])


def new_place(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Ask horovodrun for this worker's place among those that are left; returns when all of them have asked.

    Raises:
        RendezvousError: it is gone, or gives up.
    """
    url = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}".format(**environment)
    worker = "{HOROVOD_HOSTNAME}:{HOROVOD_LOCAL_RANK}".format(**environment)
    limit = float(environment.get("HOROVOD_ELASTIC_TIMEOUT", "600"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/rank_and_size/{worker}", timeout=limit) as reply:
            numbers = reply.read().decode().split(",")
    except OSError as error:
        raise RendezvousError(f"worker {worker}: horovodrun at {url} gave no new place: {error}") from error
    return dict(zip(SLOT, numbers, strict=True))


def _exec_or_exit(command: list[str] | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if command is None:
        os._exit(0)
    for name in os.listdir("/proc/self/fd"):  # what libraries opened is not for the new life
        with suppress(OSError):
            if int(name) > 2:
                os.set_inheritable(int(name), False)
    os.execv(command[0], command)
