"""The backends: a folder beside this file for each name in :data:`hvdbridge.config.BACKENDS`.

A folder's ``__init__`` declares :class:`Backend`; its modules are imported when they are needed, for they import the
library below.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Literal, NamedTuple

from hvdbridge import config
from hvdbridge.errors import BackendUnavailable, ConfigurationError, nearest


class Backend(NamedTuple):
    """What a backend's folder declares as ``BACKEND``.

    Attributes:
        title: the library's name in messages.
        package: what is imported of it.
        remedy: what installs it.
        communicator, starter, point_to_point: ``.module:class`` in the folder, of :class:`.communicator.Communicator`,
            :class:`.starter.Starter` and :class:`.point_to_point.Messages` (default: over TCP).
        front_end: where gradients come from, see :data:`hvdbridge.reduction.source.FRONT_ENDS`.
    """

    title: str
    package: str
    remedy: str
    communicator: str
    starter: str
    point_to_point: str = "..tcp:TcpMessages"
    front_end: Literal["ddp", "horovod", "hooks"] = "hooks"


def known() -> list[str]:
    """The names, sorted."""
    return sorted({*config.BACKENDS} - {"auto"})


def entry(name: str) -> Backend:
    """What backend ``name`` declares; imports nothing of its library.

    >>> entry("mpj")
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: Unknown backend 'mpj'. Did you mean 'mpi'? Known: horovod, mpi, torch.
    """
    if name not in known():
        raise ConfigurationError(f"Unknown backend {name!r}. {nearest(name, known())}")
    found: Backend = import_module(f"hvdbridge.backends.{name}").BACKEND
    return found


def installed(name: str) -> bool:
    """Whether the library of backend ``name`` is in this environment; imports nothing of it.

    >>> installed("torch")
    True
    """
    package = entry(name).package
    if package in sys.modules and sys.modules[package] is None:
        return False
    finders = [finder for finder in sys.meta_path if not getattr(finder, "stands_in", False)]  # hvdbridge.run's
    return any(finder.find_spec(package, None) is not None for finder in finders)


def require(name: str) -> Backend:
    """What backend ``name`` declares, whose library is installed.

    Raises:
        BackendUnavailable: it is not; the message has the remedy.
    """
    backend = entry(name)
    if not installed(name):
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {backend.title} is not installed in this environment. {backend.remedy}"
        )
    return backend


def load(name: str, part: Literal["communicator", "starter", "point_to_point"]) -> Any:
    """Import a class of backend ``name``: ``mpi``'s communicator starts MPI.

    Raises:
        ConfigurationError: there is no such backend.
        BackendUnavailable: its library is missing or does not load; the message has the remedy.
    """
    backend = require(name) if part == "communicator" else entry(name)
    module, _, attribute = getattr(backend, part).partition(":")
    try:
        return getattr(import_module(module, f"hvdbridge.backends.{name}"), attribute)
    except (ImportError, OSError, RuntimeError) as cause:  # mpi4py without libmpi: RuntimeError; a torch that moved on
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {backend.title} does not load in this environment: {cause}. {backend.remedy}"
        ) from cause
