"""Every ``HVDBRIDGE_*`` variable, parsed once into a frozen :class:`Config`."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdbridge.errors import ConfigurationError, nearest

PREFIX = "HVDBRIDGE_"
LONGEST_SECONDS = 24 * 3600.0
"""The longest ``hb.patience``. Limits that libraries keep themselves, and that cannot be moved, are as long."""

BACKENDS = ("auto", "torch", "horovod", "mpi")
KERNELS = ("auto", "native", "torch")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
INJECTED = re.compile(r"(?P<service>(\w+?_)??)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes sets in each pod for a service named hvdbridge or hvdbridge-...: HOST, and others."""
HOST = "SERVICE_HOST"


@dataclass(frozen=True)
class Config:
    """The options that environment variables set. Arguments given in code replace them.

    Attributes:
        backend: ``auto``, ``torch``, ``horovod`` or ``mpi`` (``HVDBRIDGE_BACKEND``).
        policy: a policy spec string (``HVDBRIDGE_POLICY``).
        bucket_mb: size of a gradient bucket in MiB, or "auto" (``HVDBRIDGE_BUCKET_MB``); None: the usual one.
        debug: compare the signature of each collective across ranks before it starts (``HVDBRIDGE_DEBUG``).
        log_level: level of the ``hvdbridge`` logger (``HVDBRIDGE_LOG_LEVEL``).
        cache: directory for built wheels and kernels (``HVDBRIDGE_CACHE``).
        timeout_seconds: a collective that takes longer fails everywhere (``HVDBRIDGE_TIMEOUT_SECONDS``).
        start: the same for the start, and for a synchronizer until the end of its first step
            (``HVDBRIDGE_START_SECONDS``); None: as timeout_seconds.
        kernels: ``auto``, ``native`` or ``torch``: what computes codes (``HVDBRIDGE_KERNELS``).
        stall_seconds: report the missing ranks after this time (``HVDBRIDGE_STALL_SECONDS``).
        ports: where hvdbridge and MPI listen (``HVDBRIDGE_PORTS=25000-25999``); None: any free port.
        iface: the network interface by which hosts talk (``HVDBRIDGE_IFACE``); None: one that all hosts reach.
        injected: Kubernetes' variables, which are ignored.
    """

    backend: str = "auto"
    policy: str = "mean"
    bucket_mb: float | Literal["auto"] | None = None
    debug: bool = False
    log_level: str = "WARNING"
    cache: Path = Path("~/.cache/hvdbridge")
    timeout_seconds: float = 300.0
    start: float | None = None
    stall_seconds: float = 30.0
    kernels: str = "auto"
    ports: range | None = None
    iface: str | None = None
    injected: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Parse ``environ`` (default: ``os.environ``).

        Raises:
            ConfigurationError: a variable does not parse, or an unknown ``HVDBRIDGE_*`` is set.

        >>> Config.from_environment({"HVDBRIDGE_BACKEND": "mpi", "HVDBRIDGE_BUCKET_MB": "4"}).bucket_mb
        4.0
        """
        env = os.environ if environ is None else environ
        given = {k[len(PREFIX) :]: v.strip() for k, v in env.items() if k.startswith(PREFIX) and v.strip()}
        injected = {name for name in given if (found := INJECTED.fullmatch(name)) and found["service"] + HOST in given}
        values: dict[str, Any] = {"cache": _cache(given.pop("CACHE", None), env.get("XDG_CACHE_HOME"))}
        for name, text in given.items():
            if name in PARSERS:
                values["start" if name == "START_SECONDS" else name.lower()] = PARSERS[name](name, text)
            elif name not in injected and not name.startswith("INTERNAL_"):  # from one of our processes to another
                raise ConfigurationError(f"Unknown environment variable {PREFIX}{name}. {nearest(name, KNOWN)}")
        return cls(injected=tuple(sorted(PREFIX + name for name in injected)), **values)

    @property
    def start_seconds(self) -> float:
        """How long the start may take, and a synchronizer until its first step is through."""
        return self.start or self.timeout_seconds

    def fixed_bucket_mb(self, otherwise: float, where: str) -> float:
        """The size of a bucket in MiB where none is measured; ``otherwise`` if the variable is not set.

        Raises:
            ConfigurationError: the variable is "auto".
        """
        if self.bucket_mb == "auto":
            raise ConfigurationError(
                f"{PREFIX}BUCKET_MB=auto: only a GradientSynchronizer measures it, {where} does not. "
                f"Set a number of MiB, or unset {PREFIX}BUCKET_MB."
            )
        return self.bucket_mb or otherwise


def own_directory(path: Path | None = None) -> Path:
    """``path`` (default: one in the system's temporary directory), made if need be so that only this user may enter.

    Raises:
        ConfigurationError: it exists, and is another user's.
    """
    found = path or Path(tempfile.gettempdir()) / f"hvdbridge-{os.getuid()}"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if found.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{found} belongs to another user: set HVDBRIDGE_CACHE to a directory of your own")
    return found


def _cache(given: str | None, home: str | None) -> Path:
    try:
        return Path(given or Path(home or "~/.cache") / "hvdbridge").expanduser()
    except RuntimeError as error:  # a user id without an account, and no HOME, as in a container
        if given:
            raise ConfigurationError(f"{PREFIX}CACHE={given}: {error}") from None
        return own_directory()


def _text(name: str, text: str) -> str:
    return text


def _choice(name: str, text: str) -> str:
    known = {"BACKEND": BACKENDS, "KERNELS": KERNELS, "LOG_LEVEL": LOG_LEVELS}[name]
    value = text.upper() if name == "LOG_LEVEL" else text.lower()
    if value not in known:
        raise ConfigurationError(f"{PREFIX}{name}={text} is not known. {nearest(value, known)}")
    return value


def _flag(name: str, text: str) -> bool:
    if text.lower() not in FLAGS:
        raise ConfigurationError(f"{PREFIX}{name}={text} must be 0 or 1")
    return FLAGS[text.lower()]


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{PREFIX}{name}={text} must be a positive number, as in {PREFIX}{name}=25")
    return value


def _bucket_mb(name: str, text: str) -> float | Literal["auto"]:
    return "auto" if text.lower() == "auto" else _positive(name, text)


def _ports(name: str, text: str) -> range:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = map(int, found.groups()) if found else (0, 0)
    if not 0 < low <= high <= 65535:
        raise ConfigurationError(f"{PREFIX}{name}={text} must be a range of ports, as in {PREFIX}{name}=25000-25999")
    return range(low, high + 1)


FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
PARSERS: dict[str, Callable[[str, str], object]] = {
    "BACKEND": _choice, "POLICY": _text, "BUCKET_MB": _bucket_mb, "DEBUG": _flag, "LOG_LEVEL": _choice,
    "TIMEOUT_SECONDS": _positive, "START_SECONDS": _positive, "STALL_SECONDS": _positive, "KERNELS": _choice,
    "PORTS": _ports, "IFACE": _text,
}  # fmt: skip
KNOWN = ("CACHE", *PARSERS)
