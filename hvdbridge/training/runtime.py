"""The session of this process: ``init`` opens it, ``shutdown`` closes it, and the other functions read it.

Rules:

1. A process has one session. A further ``init`` returns it if its arguments are None or in force, else raises.
2. ``shutdown`` is collective. It closes only what hvdbridge has opened, in reverse order.
3. The session of a script that ends without ``shutdown`` is closed at exit, when all ranks have reached their exit.
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
start_count = 0


def init(
    backend: str | None = None,
    policy: str | Policy | None = None,
    rank: int | None = None,
    size: int | None = None,
    init_method: str | None = None,
) -> Session:
    """Connect this process with the other ranks, start the backend, and open the session. Collective.

    Arguments take precedence over environment variables.

    Args:
        backend: ``auto``, ``torch``, ``horovod`` or ``mpi`` (default: ``HVDBRIDGE_BACKEND``).
        policy: default policy of :class:`GradientSynchronizer` (default: ``HVDBRIDGE_POLICY``).
        rank, size: for processes without a launcher; None: the launcher's.
        init_method: rendezvous address of such processes: ``tcp://host:port``, ``file:///path`` or ``env://``
            (default: MASTER_ADDR and MASTER_PORT).

    Raises:
        ConfigurationError: an argument or environment variable is invalid, or a session with other arguments is open.
        BackendUnavailable: the backend is not installed, or cannot run under this launcher.
        RendezvousError: the ranks did not connect, or the library reports another number of them.
        RankMismatch: ranks chose different backends, policies, timeouts or versions.
    """
    global _session, start_count
    arguments = (backend, policy, rank, size, init_method)
    if _session is not None:
        world, given = _session.world, _session._arguments
        actual = (_session.backend, given[1], world.rank, world.size, given[4])
        if any(new not in (None, old, now) for new, old, now in zip(arguments, given, actual, strict=True)):
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
    policy_spec = label(from_spec(default))
    if (rank is None) != (size is None):
        raise ConfigurationError(f"hb.init(rank={rank}, size={size}): give both, or neither")
    world = launchers.detect() if rank is None or size is None else World(rank, size, launcher="bare")
    if warning := launchers.allocation_warning(world):
        logging.getLogger("hvdbridge").warning("%s", warning)
    if start_count == 0:
        atexit.register(_close_at_exit)  # registered first, so that it runs last, after the monitor's hook
    start_count += 1
    settings = f"hvdbridge {hvdbridge.__version__}, policy {policy_spec}, "
    settings += f"timeouts {config.start_seconds:g} and {config.timeout_seconds:g} s"
    started = start(config, world, init_method, start_count, settings)
    try:
        _session = _open(started, config, default, arguments)
    except Exception as error:
        started.rendezvous.monitor.report(error)
        raise
    return _session


def _open(started: Started, config: Config, policy: str | Policy, arguments: tuple[Any, ...]) -> Session:
    info, device = started.rendezvous, torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", info.world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with info.monitor.phase("opening the communicators"):
        communicator = registry.load(started.backend, "communicator").world(info.monitor.watch, LONGEST_SECONDS)
        control = communicator.control()
    for opened in (communicator, control):
        opened.set_nodes([world.node_rank for world in info.worlds])
    info.monitor.starting = False
    return Session(
        info.world, info.worlds, started.backend, config, policy, device, communicator, control,
        info.monitor, arguments, started.stop,
    )  # fmt: skip


def shutdown() -> None:
    """Close the session. Collective; without a session it has no effect.

    ``init`` works again afterwards. MPI stays initialized until the process ends, because it cannot start twice.
    While an exception propagates (``finally: hb.shutdown()``) and there are other ranks, this does nothing, because
    the others may never call it. The session then stays open until the script ends, which reports the cause to them.

    Raises:
        RankFailed, CollectiveTimeout: another rank failed, or did not call ``shutdown`` in time.
    """
    global _session
    session = _session
    if session is None or (session.world.size > 1 and sys.exc_info()[1] is not None):
        return
    if session.world.size > 1:
        # Wait for all ranks, because closing breaks operations that other ranks still run
        session.monitor.agree("hb.shutdown()", "", remedy="All ranks leave their loops after the same step: "
                              "sync.stop_requested says which, where one is told to stop.")  # fmt: skip
    _session = None
    session.close()
    session.monitor.bye()


def _close_at_exit() -> None:
    """Close the session at exit (rule 3); the monitor's hook, which runs before, has waited for all ranks."""
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
    """Open a session as :func:`init` does, for ``with hb.session():``; the end of the block calls :func:`shutdown`.

    Args:
        backend, policy, rank, size, init_method: as in :func:`init`.
    """
    opened = init(backend, policy, rank, size, init_method)
    try:
        yield opened
    finally:
        shutdown()


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Suspend the time limits on all ranks within the block, for at most ``seconds``.

    Use it around work of one rank for which the others wait: preprocessing, a long evaluation or a checkpoint.
    Afterwards the time of waits in progress continues from where it was. The libraries' own limits are a day, but a
    process group of torch that the script started keeps the limit given to ``init_process_group``.

    Raises:
        ConfigurationError: ``seconds`` is not positive, or more than a day.
    """
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigurationError(f"hb.patience({seconds}) must be a time in seconds, at most {LONGEST_SECONDS:g}")
    with current().monitor.patience(seconds):
        yield


def current() -> Session:
    """Return the open session.

    Raises:
        NotInitialized: no session is open.
    """
    if _session is None:
        raise NotInitialized("hvdbridge is not initialized: call hb.init() first (and before hb.shutdown())")
    return _session


def is_initialized() -> bool:
    """Return whether a session is open."""
    return _session is not None


def rank() -> int:
    """Return this process's rank, from 0 to ``size() - 1``."""
    return current().world.rank


def size() -> int:
    """Return the number of processes."""
    return current().world.size


def local_rank() -> int:
    """Return this process's rank among those on its host."""
    return current().world.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current().world.local_size


def node_rank() -> int:
    """Return the number of this host, from 0 to ``num_nodes() - 1``."""
    return current().world.node_rank


def num_nodes() -> int:
    """Return the number of hosts."""
    return current().world.num_nodes


def device() -> torch.device:
    """Return this rank's device: its GPU, or the CPU."""
    return current().device


def backend() -> str:
    """Return the name of the backend: ``torch``, ``horovod`` or ``mpi``."""
    return current().backend


def launcher() -> str:
    """Return the launcher: ``torchrun``, ``horovodrun``, ``mpiexec``, ``srun``, ``bare`` or ``none``."""
    return current().world.launcher


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return rank ``root``'s ``value``, which must be picklable, on all ranks. Collective.

    Raises:
        ConfigurationError: ``root`` is not a rank.
    """
    return current().control.broadcast_object(value, _root(root))


def broadcast_parameters(source: torch.nn.Module | Mapping[str, Any] | Iterable[Any], root: int = 0) -> None:
    """Copy rank ``root``'s values into ``source`` in place, in flat messages per dtype and device. Collective.

    ``source`` is a module (parameters and buffers), a state dict, or ``named_parameters()``.

    Raises:
        ConfigurationError: ``root`` is not a rank, or an item of ``source`` is not a tensor.
    """
    drive(broadcast_tensors(_tensors(source), _root(root)), current().communicator.execute)


def _tensors(source: torch.nn.Module | Mapping[str, Any] | Iterable[Any]) -> list[Tensor]:
    if isinstance(source, torch.nn.Module):
        return [*source.parameters(), *source.buffers()]
    items = source.values() if isinstance(source, Mapping) else source
    tensors: list[Any] = [item[1] if isinstance(item, tuple) else item for item in items]
    if others := sorted({type(item).__name__ for item in tensors if not isinstance(item, Tensor)}):
        raise ConfigurationError(
            f"broadcast_parameters takes tensors, got {', '.join(others)} (an optimizer's state?). "
            "GradientSynchronizer(model, optimizer) broadcasts an optimizer's state."
        )
    return tensors


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
