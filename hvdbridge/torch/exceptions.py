"""The errors of ``hvdbridge.torch``: Horovod's own types, also where Horovod is not installed.

::

    HorovodInternalError (HvdbridgeError, RuntimeError)   an operation failed; elastic training restores
    ├── DuplicateNameError (ValueError)                   an operation of the same name is in flight
    ├── DifferentParameters (RankMismatch)                ranks gave an optimizer different parameters or options
    └── NoInitError (NotInitialized, ValueError)          hvd.init() was not called
    HostsUpdatedInterrupt (RuntimeError)                  the set of hosts changed; elastic training continues
    HorovodVersionMismatchError (ImportError)             never raised by hvdbridge; for except clauses of scripts

If the real Horovod is imported (``HVDBRIDGE_BACKEND=horovod``), these errors are also instances of its
``HorovodInternalError``, so an ``except`` clause with either name catches them.
"""

from __future__ import annotations

import sys
from typing import Any

from hvdbridge.errors import HvdbridgeError, NotInitialized, RankMismatch


class HorovodInternalError(HvdbridgeError):
    """A collective operation failed, here or on another rank. Elastic training restores the last commit."""


class DuplicateNameError(HorovodInternalError, ValueError):
    """This rank started a second operation of a name before the first was complete.

    Horovod raises a ValueError in this case, so this class is one.
    """


class DifferentParameters(HorovodInternalError, RankMismatch):
    """Ranks gave one ``DistributedOptimizer`` different parameters or options."""


class NoInitError(HorovodInternalError, NotInitialized, ValueError):
    """``hvd.init()`` was not called. Horovod raises a ValueError or a HorovodInternalError; this class is both."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts of an elastic job changed; no state is lost.

    Attributes:
        skip_sync: whether the state needs no broadcast before training continues, because no host was added.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job changed")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the message of :class:`HorovodVersionMismatchError`."""
    return f"{name} {version} is installed, and Horovod was built for {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of the framework. hvdbridge is not built for any version."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def internal_error(text: str, kind: type[HorovodInternalError] = HorovodInternalError) -> HorovodInternalError:
    """Return a ``kind`` with this text. If the real Horovod is imported, it is an instance of its error, too.

    >>> str(internal_error("allreduce 'a' failed"))
    "allreduce 'a' failed"
    """
    real: Any = getattr(sys.modules.get("horovod.common.exceptions"), "HorovodInternalError", None)
    if real is None or issubclass(kind, real) or issubclass(real, HorovodInternalError):
        return kind(text)
    both: Any = type(kind.__name__, (kind, real), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    return both(text)  # type: ignore[no-any-return]
