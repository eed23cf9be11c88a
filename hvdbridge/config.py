"""Every ``HVDBRIDGE_*`` variable, parsed once into a frozen :class:`Config`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdbridge.errors import ConfigurationError, nearest

PREFIX = "HVDBRIDGE_"
BACKENDS = ("auto", "torch", "horovod", "mpi")
KERNELS = ("auto", "native", "torch")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
Fold = Callable[[str], str]


@dataclass(frozen=True)
class Config:
    """What the environment says; arguments given in code beat it.

    Attributes:
        backend: ``auto``, ``torch``, ``horovod`` or ``mpi`` (``HVDBRIDGE_BACKEND``).
        policy: a policy spec string (``HVDBRIDGE_POLICY``).
        bucket_mb: size of a gradient bucket in MiB, or "auto" (``HVDBRIDGE_BUCKET_MB``); None: the usual one.
        debug: compare the signature of each collective across ranks before it starts (``HVDBRIDGE_DEBUG``).
        log_level: level of the ``hvdbridge`` logger (``HVDBRIDGE_LOG_LEVEL``).
        cache: directory for built wheels and kernels (``HVDBRIDGE_CACHE``).
        timeout_seconds: a collective or a start-up that takes longer fails everywhere
            (``HVDBRIDGE_TIMEOUT_SECONDS``).
        kernels: ``auto``, ``native`` or ``torch``: what computes codes (``HVDBRIDGE_KERNELS``).
        stall_seconds: report who is missing after this time (``HVDBRIDGE_STALL_SECONDS``).
    """

    backend: str = "auto"
    policy: str = "mean"
    bucket_mb: float | Literal["auto"] | None = None
    debug: bool = False
    log_level: str = "WARNING"
    cache: Path = Path("~/.cache/hvdbridge")
    timeout_seconds: float = 300.0
    stall_seconds: float = 30.0
    kernels: str = "auto"

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
        known = (
            "BACKEND",
            "POLICY",
            "BUCKET_MB",
            "DEBUG",
            "LOG_LEVEL",
            "CACHE",
            "TIMEOUT_SECONDS",
            "STALL_SECONDS",
            "KERNELS",
        )
        for name in given:
            if name not in known and not name.startswith(
                "INTERNAL_"
            ):  # INTERNAL_: from one of our processes to another
                raise ConfigurationError(f"Unknown environment variable {PREFIX}{name}. {nearest(name, known)}")
        home = env.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(
            backend=_choice(given, "BACKEND", "auto", BACKENDS),
            policy=given.get("POLICY", "mean"),
            bucket_mb=_bucket_mb(given),
            debug=_flag(given, "DEBUG"),
            log_level=_choice(given, "LOG_LEVEL", "WARNING", LOG_LEVELS, fold=str.upper),
            cache=Path(given.get("CACHE") or Path(home) / "hvdbridge").expanduser(),
            timeout_seconds=_positive(given, "TIMEOUT_SECONDS", 300.0),
            stall_seconds=_positive(given, "STALL_SECONDS", 30.0),
            kernels=_choice(given, "KERNELS", "auto", KERNELS),
        )

    def fixed_bucket_mb(self, otherwise: float, where: str) -> float:
        """The size of a bucket in MiB where none is measured; ``otherwise`` if nothing is said.

        Raises:
            ConfigurationError: it says "auto".
        """
        if self.bucket_mb == "auto":
            raise ConfigurationError(
                f"{PREFIX}BUCKET_MB=auto: only a GradientSynchronizer measures it, {where} does not. "
                f"Set a number of MiB, or unset {PREFIX}BUCKET_MB."
            )
        return self.bucket_mb or otherwise


def _bucket_mb(given: Mapping[str, str]) -> float | Literal["auto"] | None:
    if "BUCKET_MB" not in given:
        return None
    return "auto" if given["BUCKET_MB"].lower() == "auto" else _positive(given, "BUCKET_MB", 25.0)


def _choice(given: Mapping[str, str], name: str, default: str, known: tuple[str, ...], fold: Fold = str.lower) -> str:
    value = fold(given.get(name, default))
    if value not in known:
        raise ConfigurationError(f"{PREFIX}{name}={given[name]} is not known. {nearest(value, known)}")
    return value


def _positive(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{PREFIX}{name}={text} must be a positive number, as in {PREFIX}{name}={default:g}")
    return value


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "0").lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{PREFIX}{name}={given[name]} must be 0 or 1")
