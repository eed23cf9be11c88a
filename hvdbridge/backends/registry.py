"""The registry of backends: one folder beside this file for each backend in :data:`hvdbridge.config.BACKENDS`.

Users add others by :func:`register`. The ``__init__`` of a folder declares a :class:`Backend`. Its communicator imports
the backend's library, so the registry imports it on demand. The starter imports the library within functions, since
``auto`` loads each starter.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, Literal, NamedTuple

from hvdbridge import config
from hvdbridge.errors import BackendUnavailable, ConfigurationError, nearest


class Backend(NamedTuple):
    """The declaration of a backend; its folder assigns one to ``BACKEND``.

    Attributes:
        title: name of the library in messages.
        package: the Python package whose presence means that the library is installed.
        remedy: sentence for error messages that explains how to install the library.
        communicator: subclass of :class:`.communicator.Communicator`, as ``".module:Class"`` relative to the folder, or
            with an absolute module name.
        starter: subclass of :class:`.starter.Starter`, in the same form.
        point_to_point: subclass of :class:`.point_to_point.Messages`, in the same form. Default: messages over TCP.
        front_end: source of gradients, a key of :data:`hvdbridge.reduction.source.FRONT_ENDS`.
    """

    title: str
    package: str
    remedy: str
    communicator: str
    starter: str
    point_to_point: str = "hvdbridge.backends.tcp:TcpMessages"
    front_end: Literal["ddp", "horovod", "hooks"] = "hooks"


def known() -> list[str]:
    """Return the names of all backends, sorted."""
    return sorted(in_order())


def in_order() -> list[str]:
    """Return the names of all backends in the order in which ``auto`` looks for a running library."""
    return [*config.BACKENDS[1:], *config.registered_backends]  # without "auto"


def register(name: str, module: str) -> None:
    """Add a backend under a name that ``HVDBRIDGE_BACKEND`` and ``hb.init(backend=...)`` accept.

    Call it before ``hb.init()``, on all ranks. Repeating a registration is harmless.

    Args:
        module: full name of the module or package that assigns a :class:`Backend` to ``BACKEND``. It is imported on
            first use.

    Raises:
        ConfigurationError: ``name`` is no lower-case identifier, or belongs to another backend.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(f"{name!r} cannot name a backend: use lower-case letters, digits and _")
    if name in config.BACKENDS or config.registered_backends.get(name, module) != module:
        owner = config.registered_backends.get(name, "hvdbridge")
        raise ConfigurationError(f"the name {name!r} is taken by {owner}; choose another")
    config.registered_backends[name] = module


def _package(name: str) -> str:
    return config.registered_backends.get(name, f"hvdbridge.backends.{name}")


def entry(name: str) -> Backend:
    """Return the declaration of backend ``name``. Its library is not imported.

    >>> entry("mpj")
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: Unknown backend 'mpj'. Did you mean 'mpi'? Known: ...
    """
    if name not in known():
        raise ConfigurationError(f"Unknown backend {name!r}. {nearest(name, known())}")
    backend: Backend = import_module(_package(name)).BACKEND
    return backend


def installed(name: str) -> bool:
    """Return whether the library of backend ``name`` is in this environment. The library is not imported.

    >>> installed("torch")
    True
    """
    package = entry(name).package
    if package in sys.modules and sys.modules[package] is None:
        return False
    # The finder of hvdbridge.run provides a module named horovod, whether or not Horovod is installed.
    finders = [finder for finder in sys.meta_path if not getattr(finder, "stands_in", False)]
    return any(finder.find_spec(package, None) is not None for finder in finders)


def require(name: str) -> Backend:
    """Return the declaration of backend ``name``, whose library must be installed.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the library is not installed; the message contains the remedy.
    """
    backend = entry(name)
    if not installed(name):
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {backend.title} is not installed in this environment. {backend.remedy}"
        )
    return backend


def load(name: str, part: Literal["communicator", "starter", "point_to_point"]) -> Any:
    """Import and return a class of backend ``name``. Import of the communicator of ``mpi`` may initialize MPI.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the library does not load, or its communicator is requested and the package is missing;
            the message contains the remedy.
    """
    backend = require(name) if part == "communicator" else entry(name)
    module, _, attribute = getattr(backend, part).partition(":")
    try:
        return getattr(import_module(module, _package(name)), attribute)
    except (ImportError, OSError, RuntimeError) as cause:  # RuntimeError: mpi4py without libmpi
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {backend.title} does not load in this environment: {cause}. {backend.remedy}"
        ) from cause
