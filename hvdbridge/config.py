"""Parser of the ``HVDBRIDGE_*`` environment variables, and the frozen :class:`Config` that it returns."""

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
"""Maximum of ``hb.patience``. It is also the time limit of libraries whose limits cannot be changed at run time."""

BACKENDS = ("auto", "torch", "horovod", "mpi")
registered_backends: dict[str, str] = {}
"""Backends that :func:`hvdbridge.backends.registry.register` has added: name -> module."""
KERNELS = ("auto", "native", "torch")
GRAPHS = ("auto", "off")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
INJECTED = re.compile(r"(?P<service>(\w+?_)??)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes sets in each pod for a service named hvdbridge or hvdbridge-..., without the prefix."""
HOST = "SERVICE_HOST"


@dataclass(frozen=True)
class Config:
    """Options that environment variables set. Arguments in code take precedence.

    Attributes:
        backend: ``auto``, ``torch``, ``horovod`` or ``mpi`` (``HVDBRIDGE_BACKEND``).
        policy: a policy spec string (``HVDBRIDGE_POLICY``).
        bucket_mb: size of gradient buckets in MiB, or "auto" (``HVDBRIDGE_BUCKET_MB``); None: the policy's default.
        debug: compare the signature of each collective across ranks before it starts (``HVDBRIDGE_DEBUG``).
        log_level: level of the ``hvdbridge`` logger (``HVDBRIDGE_LOG_LEVEL``).
        cache: directory for built wheels and kernels (``HVDBRIDGE_CACHE``).
        timeout_seconds: a collective that takes longer fails on all ranks (``HVDBRIDGE_TIMEOUT_SECONDS``).
        start: time limit of start-up, and of each synchronizer's first step (``HVDBRIDGE_START_SECONDS``); None:
            timeout_seconds.
        stall_seconds: time after which missing ranks are reported (``HVDBRIDGE_STALL_SECONDS``).
        kernels: implementation of the codecs: ``auto``, ``native`` or ``torch`` (``HVDBRIDGE_KERNELS``).
        graphs: run policies' flows as CUDA graphs where possible: ``auto`` or ``off`` (``HVDBRIDGE_GRAPHS``).
        ports: ports on which hvdbridge and MPI listen (``HVDBRIDGE_PORTS=25000-25999``); None: any free port.
        iface: network interface for traffic between hosts (``HVDBRIDGE_IFACE``); None: one that all hosts can reach.
        injected: variables that Kubernetes has set, which are ignored.
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
    graphs: str = "off"
    ports: range | None = None
    iface: str | None = None
    injected: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Parse ``environ`` (default: ``os.environ``).

        Raises:
            ConfigurationError: the value of a variable is not valid, or an ``HVDBRIDGE_*`` variable is unknown.

        >>> Config.from_environment({"HVDBRIDGE_BACKEND": "mpi", "HVDBRIDGE_BUCKET_MB": "4"}).bucket_mb
        4.0
        """
        env = os.environ if environ is None else environ
        given = {k[len(PREFIX) :]: v.strip() for k, v in env.items() if k.startswith(PREFIX) and v.strip()}
        injected = {name for name in given if (match := INJECTED.fullmatch(name)) and match["service"] + HOST in given}
        values: dict[str, Any] = {"cache": _cache(given.pop("CACHE", None), env.get("XDG_CACHE_HOME"))}
        for name, text in given.items():
            if name in PARSERS:
                values["start" if name == "START_SECONDS" else name.lower()] = PARSERS[name](name, text)
            elif name not in injected and not name.startswith("INTERNAL_"):  # set by another process of hvdbridge
                raise ConfigurationError(f"Unknown environment variable {PREFIX}{name}. {nearest(name, KNOWN)}")
        return cls(injected=tuple(sorted(PREFIX + name for name in injected)), **values)

    @property
    def start_seconds(self) -> float:
        """Time limit of start-up, and of a synchronizer until the end of its first step, in seconds."""
        return self.start or self.timeout_seconds

    def fixed_bucket_mb(self, otherwise: float, where: str) -> float:
        """Return the bucket size in MiB for a caller that cannot measure it; ``otherwise`` if it is not set.

        Args:
            where: name of the caller, for the error.

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
    """Return ``path`` (default: in the system's temporary directory), created for this user alone if it is missing.

    Raises:
        ConfigurationError: the directory belongs to another user.
    """
    directory = path or Path(tempfile.gettempdir()) / f"hvdbridge-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise ConfigurationError(f"{directory} belongs to another user: set HVDBRIDGE_CACHE to a directory of your own")
    return directory


def _cache(given: str | None, home: str | None) -> Path:
    try:
        return Path(given or Path(home or "~/.cache") / "hvdbridge").expanduser()
    except RuntimeError as error:  # no HOME, and a user id without an account, as in containers
        if given:
            raise ConfigurationError(f"{PREFIX}CACHE={given}: {error}") from None
        return own_directory()


def _text(name: str, text: str) -> str:
    return text


def _choice(name: str, text: str) -> str:
    backends = (*BACKENDS, *registered_backends)
    known = {"BACKEND": backends, "KERNELS": KERNELS, "GRAPHS": GRAPHS, "LOG_LEVEL": LOG_LEVELS}[name]
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
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    low, high = map(int, match.groups()) if match else (0, 0)
    if not 0 < low <= high <= 65535:
        raise ConfigurationError(f"{PREFIX}{name}={text} must be a range of ports, as in {PREFIX}{name}=25000-25999")
    return range(low, high + 1)


FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
PARSERS: dict[str, Callable[[str, str], object]] = {
    "BACKEND": _choice, "POLICY": _text, "BUCKET_MB": _bucket_mb, "DEBUG": _flag, "LOG_LEVEL": _choice,
    "TIMEOUT_SECONDS": _positive, "START_SECONDS": _positive, "STALL_SECONDS": _positive, "KERNELS": _choice,
    "GRAPHS": _choice, "PORTS": _ports, "IFACE": _text,
}  # fmt: skip
KNOWN = ("CACHE", *PARSERS)
