"""The session of this process: ``init`` opens it, ``shutdown`` closes it, all other functions read it.

Rules:

1. A process has one session. ``init`` again with the same arguments returns it; with others ``init`` raises.
2. ``shutdown`` is collective. It closes only what hvdbridge opened, last opened first.
3. A script that ends without ``shutdown`` is closed at exit, after all ranks have said that they leave.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import hvdbridge
from hvdbridge.backends import registry
from hvdbridge.backends.starting import Started, start
from hvdbridge.config import LONGEST_SECONDS, Config
from hvdbridge.errors import ConfigurationError, NotInitialized
from hvdbridge.execution.scheduler import drive
from hvdbridge.policies import from_spec, label
from hvdbridge.policy.base import Policy
from hvdbridge.reduction.replicate import broadcast_tensors
from hvdbridge.reduction.session import Session
from hvdbridge.startup import launchers
from hvdbridge.startup.world import World

_session: Session | None = None
_starts = 0


def init(
    backend: str | None = None,
    policy: str | Policy | None = None,
    rank: int | None = None,
    size: int | None = None,
    init_method: str | None = None,
) -> Session:
    """Meet the other ranks and start the backend. Arguments replace the environment's. Collective.

    Args:
        backend: ``auto``, ``torch``, ``horovod`` or ``mpi`` (default: ``HVDBRIDGE_BACKEND``).
        policy: what :class:`GradientSynchronizer` uses by default (``HVDBRIDGE_POLICY``).
        rank, size: for processes without a launcher; else the launcher's.
        init_method: where such processes meet: ``tcp://host:port``, ``file:///path``, ``env://``
            (default: MASTER_ADDR and MASTER_PORT).

    Raises:
        ConfigurationError: a name, option or variable is not valid; or other arguments than last time.
        BackendUnavailable: the backend is not installed, or cannot run under this launcher.
        RendezvousError: the ranks did not find each other, or the library found another number of them.
        RankMismatch: ranks chose different backends, policies, timeouts or versions.
    """
    global _session, _starts
    arguments = (backend, policy, rank, size, init_method)
    if _session is not None:
        if any(new is not None and new != old for new, old in zip(arguments, _session._arguments, strict=True)):
            raise ConfigurationError(
                f"hb.init{arguments} after hb.init{_session._arguments}: a session is open, and cannot change. "
                "Call hb.shutdown() first."
            )
        return _session
    config = Config.from_environment()
    config = replace(config, backend=config.backend if backend is None else backend)
    _configure_log(config)
    if config.injected:
        logging.getLogger("hvdbridge").debug("Kubernetes' variables, ignored: %s", ", ".join(config.injected))
    default = config.policy if policy is None else policy
    spelled = label(from_spec(default))
    if (rank is None) != (size is None):
        raise ConfigurationError(f"hb.init(rank={rank}, size={size}): give both, or neither")
    world = launchers.detect() if rank is None or size is None else World(rank, size, launcher="bare")
    if _starts == 0:
        atexit.register(_close_at_exit)  # first, so that it runs last: after the monitor's goodbye
    _starts += 1
    settings = f"hvdbridge {hvdbridge.__version__}, policy {spelled}, "
    settings += f"timeouts {config.start_seconds:g} and {config.timeout_seconds:g} s"
    started = start(config, world, init_method, _starts, settings)
    try:
        _session = _open(started, config, default, arguments)
    except Exception as error:
        started.meeting.monitor.report(error)
        raise
    return _session


def _open(started: Started, config: Config, policy: str | Policy, arguments: tuple[Any, ...]) -> Session:
    meeting, device = started.meeting, torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", meeting.world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with meeting.monitor.phase("opening the communicators"):
        communicator = registry.load(started.backend, "communicator").world(meeting.monitor.watch, LONGEST_SECONDS)
        control = communicator.control()
    for each in (communicator, control):
        each.set_nodes([world.node_rank for world in meeting.worlds])
    meeting.monitor.starting = False
    return Session(
        meeting.world, meeting.worlds, started.backend, config, policy, device, communicator, control,
        meeting.monitor, arguments, started.stop,
    )  # fmt: skip


def shutdown() -> None:
    """Close the session; collective. Harmless without one.

    ``init`` works again afterwards. MPI stays up until the process ends, because it cannot start twice.
    While an exception is on its way (``finally: hb.shutdown()``) several ranks do not wait for each other, since
    the others may never come. The session stays open until the script ends, and the others then learn the cause.

    Raises:
        RankFailed, CollectiveTimeout: another rank failed, or does not come.
    """
    global _session
    session = _session
    if session is None or (session.world.size > 1 and sys.exc_info()[1] is not None):
        return
    if session.world.size > 1:
        # Nobody tears down what another rank still uses
        session.monitor.agree("hb.shutdown()", "", remedy="All ranks leave their loops after the same step: "
                              "sync.stop_requested says which, where one is told to stop.")  # fmt: skip
    _session = None
    session.close()
    session.monitor.bye()


def _close_at_exit() -> None:
    """Rule 3. The monitor's hook ran before: all ranks have come here, or this process has ended already."""
    global _session
    session, _session = _session, None
    if session is not None and session._pid == os.getpid():
        session.close()


@contextmanager
def session(
    backend: str | None = None,
    policy: str | Policy | None = None,
    rank: int | None = None,
    size: int | None = None,
    init_method: str | None = None,
) -> Iterator[Session]:
    """``with hb.session():`` is :func:`init` and, in the end, :func:`shutdown`."""
    opened = init(backend, policy, rank, size, init_method)
    try:
        yield opened
    finally:
        shutdown()


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Within the block no limit passes on any rank, for at most so many seconds: around what one rank does alone while
    others wait for it, such as preprocessing, a long evaluation or a checkpoint.

    Waits that have begun go on afterwards where they were. Libraries' own limits are a day; a process group of torch
    that the script itself started keeps the one that ``init_process_group`` was given.

    Raises:
        ConfigurationError: not a time from 0 to one day.
    """
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigurationError(f"hb.patience({seconds}) must be a time in seconds, at most {LONGEST_SECONDS:g}")
    with current().monitor.patience(seconds):
        yield


def current() -> Session:
    """The open session.

    Raises:
        NotInitialized: there is none.
    """
    if _session is None:
        raise NotInitialized("hvdbridge is not initialized: call hb.init() first (and before hb.shutdown())")
    return _session


def is_initialized() -> bool:
    """Whether a session is open."""
    return _session is not None


def rank() -> int:
    """This process among all."""
    return current().world.rank


def size() -> int:
    """How many processes there are."""
    return current().world.size


def local_rank() -> int:
    """This process among those of its host."""
    return current().world.local_rank


def local_size() -> int:
    """How many processes this host has."""
    return current().world.local_size


def node_rank() -> int:
    """This host among all."""
    return current().world.node_rank


def num_nodes() -> int:
    """How many hosts there are."""
    return current().world.num_nodes


def device() -> torch.device:
    """Where this rank computes: its GPU, or the CPU."""
    return current().device


def backend() -> str:
    """``torch``, ``horovod`` or ``mpi``."""
    return current().backend


def launcher() -> str:
    """``torchrun``, ``horovodrun``, ``mpiexec``, ``srun``, ``bare`` or ``none``."""
    return current().world.launcher


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Rank ``root``'s ``value`` (anything that pickles) on all ranks.

    Raises:
        ConfigurationError: there is no such rank.
    """
    return current().control.broadcast_object(value, _root(root))


def broadcast_parameters(source: torch.nn.Module | Mapping[str, Any] | Iterable[Any], root: int = 0) -> None:
    """Copy rank ``root``'s values into ``source`` in place: one message per dtype and device.

    ``source`` is a module (parameters and buffers), a state dict, or ``named_parameters()``.

    Raises:
        ConfigurationError: there is no such rank, or something in ``source`` is no tensor.
    """
    drive(broadcast_tensors(_tensors(source), _root(root)), current().communicator.execute)


def _tensors(source: torch.nn.Module | Mapping[str, Any] | Iterable[Any]) -> list[Tensor]:
    if isinstance(source, torch.nn.Module):
        return [*source.parameters(), *source.buffers()]
    items = source.values() if isinstance(source, Mapping) else source
    found: list[Any] = [item[1] if isinstance(item, tuple) else item for item in items]
    if strange := sorted({type(item).__name__ for item in found if not isinstance(item, Tensor)}):
        raise ConfigurationError(
            f"broadcast_parameters takes tensors, got {', '.join(strange)} (an optimizer's state?). "
            "GradientSynchronizer(model, optimizer) broadcasts an optimizer's state."
        )
    return found


def _root(root: int) -> int:
    if not 0 <= root < size():
        raise ConfigurationError(f"root={root} is no rank: there are {size()}, numbered from 0")
    return root


def _configure_log(config: Config) -> None:
    log = logging.getLogger("hvdbridge")
    log.setLevel(config.log_level)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hvdbridge %(levelname)s: %(message)s"))
        log.addHandler(handler)
