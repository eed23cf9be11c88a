"""The backends by name. Nothing below this package is imported before it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import BackendUnavailable, ConfigurationError, nearest


class Entry(NamedTuple):
    """Where a backend's class is, what it imports, and what brings that into an environment."""

    target: str
    package: str
    title: str
    remedy: str


BACKENDS = {
    "horovod": Entry(
        "hvdbridge.backends.horovod.communicator:HorovodCommunicator",
        "horovod", "Horovod", "Run: hvdbridge install-horovod",
    ),
    "mpi": Entry(
        "hvdbridge.backends.mpi.communicator:MpiCommunicator",
        "mpi4py", "mpi4py", "Run: pip install 'hvdbridge[mpich]' (for a site's own MPI: 'hvdbridge[mpi]')",
    ),
    "torch": Entry(
        "hvdbridge.backends.torch.communicator:TorchCommunicator",
        "torch", "PyTorch", "Run: pip install torch",
    ),
}  # fmt: skip


def installed(name: str) -> bool:
    """Whether the library of backend ``name`` is in this environment; imports nothing.

    >>> installed("torch")
    True
    """
    package = entry(name).package
    if package in sys.modules and sys.modules[package] is None:
        return False
    finders = [finder for finder in sys.meta_path if not getattr(finder, "stands_in", False)]  # hvdbridge.run's
    return any(finder.find_spec(package, None) is not None for finder in finders)


def entry(name: str) -> Entry:
    """The table's row for ``name``.

    >>> entry("mpj")
    Traceback (most recent call last):
    hvdbridge.errors.ConfigurationError: Unknown backend 'mpj'. Did you mean 'mpi'? Known: horovod, mpi, torch.
    """
    if name not in BACKENDS:
        raise ConfigurationError(f"Unknown backend {name!r}. {nearest(name, BACKENDS)}")
    return BACKENDS[name]


def require(name: str) -> Entry:
    """The table's row for ``name``, whose library is installed.

    Raises:
        BackendUnavailable: it is not; the message has the remedy.
    """
    row = entry(name)
    if not installed(name):
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {row.title} is not installed in this environment. {row.remedy}"
        )
    return row


def load(name: str) -> type[Communicator]:
    """Import the class of backend ``name``; for ``mpi`` this starts MPI.

    Raises:
        ConfigurationError: there is no such backend.
        BackendUnavailable: its library is missing or does not load; the message has the remedy.
    """
    row = require(name)
    module, _, attribute = row.target.partition(":")
    try:
        found: type[Communicator] = getattr(import_module(module), attribute)
    except (ImportError, OSError, RuntimeError) as cause:  # mpi4py without libmpi: RuntimeError; a torch that moved on
        raise BackendUnavailable(
            f"HVDBRIDGE_BACKEND={name} but {row.title} does not load in this environment: {cause}. {row.remedy}"
        ) from cause
    return found
