"""The ``HVDBRIDGE_*`` environment variables, their parser, and the frozen :class:`Config` that it returns.

:data:`VARIABLES` is the one list of the variables, with their defaults and meanings. ``hvdbridge doctor --variables``
prints it, and the page ``docs/reference/environment.md`` is generated from it.
"""

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
class Variable:
    """An environment variable.

    Attributes:
        parse: returns the value of a text, and raises ConfigurationError. It gets the variable's name, without
            ``HVDBRIDGE_``, and the text.
        default: the value if the variable is not set, in words.
        values: the valid values, in words.
        meaning: the effect, in Markdown.
        field: the field of :class:`Config` that it sets; empty: the name in lower case.
    """

    parse: Callable[[str, str], object]
    default: str
    values: str
    meaning: str
    field: str = ""


@dataclass(frozen=True)
class Config:
    """Options that environment variables set. Arguments in code take precedence.

    Each variable of :data:`VARIABLES` sets the field of its name in lower case, and START_SECONDS sets ``start``.

    Attributes:
        cache: directory for built wheels and kernels, with the user's home directory in place of ``~``.
        start: the value of ``HVDBRIDGE_START_SECONDS``; None: not set. Use :attr:`start_seconds`.
        bucket_mb: size of buckets in MiB, or "auto"; None: the policy's default.
        ports: the range of ``HVDBRIDGE_PORTS``; None: any free port.
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
            if variable := VARIABLES.get(name):
                values[variable.field or name.lower()] = variable.parse(name, text)
            elif name not in injected and not name.startswith("INTERNAL_"):  # set by another process of hvdbridge
                raise ConfigurationError(f"Unknown environment variable {PREFIX}{name}. {nearest(name, [*VARIABLES])}")
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
        raise ConfigurationError(f"{PREFIX}{name}={text} must be a range of ports, as in {PREFIX}{name}=25000-28999")
    return range(low, high + 1)


FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
VARIABLES = {
    "BACKEND": Variable(
        _choice, "`auto`", "`auto`, `torch`, `horovod`, `mpi`",
        "The library that carries the collectives. `auto` takes Horovod under horovodrun and MPI where srun starts "
        "it, if they are installed, MPI under mpiexec, and torch otherwise. Under mpiexec this needs mpi4py, from the "
        "extra `mpich` or `mpi`; without mpi4py, set MASTER_ADDR and MASTER_PORT, and torch carries the data. The "
        "argument of `hb.init(backend=...)` takes precedence.",
    ),
    "POLICY": Variable(
        _text, "`mean`", "a policy spec",
        "The policy of a `GradientSynchronizer` that is made without the argument `policy`, and of an "
        "`hvd.DistributedOptimizer` that is made without `policy`, `op`, `compression` and "
        "`gradient_predivide_factor`.",
    ),
    "BUCKET_MB": Variable(
        _bucket_mb, "25, 10, 5 or 100", "a number of MiB, or `auto`",
        "Size of a gradient bucket. By default it is 25, and 10 for policies that compute between their collectives. "
        "On several nodes it is at most 10, and 5 for codes of a byte or more (`bf16`, `int8`). Over NCCL it is 100 "
        "for policies that compute between their collectives and 25 for others, on any number of nodes. With `auto`, "
        "a `GradientSynchronizer` measures several sizes when it is made.",
    ),
    "TIMEOUT_SECONDS": Variable(
        _positive, "300", "a number of seconds",
        "Time limit of a collective. One that takes longer fails on all ranks. `with hb.patience(3600):` extends the "
        "limit around work that one rank does alone.",
    ),
    "START_SECONDS": Variable(
        _positive, "`HVDBRIDGE_TIMEOUT_SECONDS`", "a number of seconds",
        "Time limit of the start, and of a synchronizer until the end of its first step.", field="start",
    ),
    "STALL_SECONDS": Variable(
        _positive, "30", "a number of seconds",
        "Time after which a waiting rank reports the missing ranks and the collective that it waits for.",
    ),
    "DEBUG": Variable(
        _flag, "0", "0 or 1", "With 1, ranks compare the signature of each collective before it starts."
    ),
    "LOG_LEVEL": Variable(
        _choice, "`WARNING`", "`DEBUG`, `INFO`, `WARNING`, `ERROR`, `CRITICAL`", "Level of the logger `hvdbridge`."
    ),
    "KERNELS": Variable(
        _choice, "`auto`", "`auto`, `native`, `torch`",
        "Implementation of the compression. `native` requires compiled kernels (C on CPUs, Triton on CUDA). `torch` "
        "uses torch's operations, with the same bits. `auto` uses compiled kernels where they work, and otherwise "
        "torch's operations with a warning.",
    ),
    "GRAPHS": Variable(
        _choice, "`off`", "`off`, `auto`",
        "With `auto`, each bucket's flow runs as a CUDA graph under NCCL. This is in development: it was tested on "
        "CPUs with a substitute for graphs, and never on a GPU. `torchrun --nproc-per-node N "
        "benchmarks/cuda_graphs.py` compares training with and without graphs.",
    ),
    "PORTS": Variable(
        _ports, "any", "a range such as `25000-28999`",
        "Ports on which hvdbridge and MPI listen. Gloo listens in the kernel's range, which `sysctl "
        "net.ipv4.ip_local_port_range` sets on each host, for all its connections.",
    ),
    "IFACE": Variable(
        _text, "one that all hosts reach", "the name of an interface", "Network interface for traffic between hosts."
    ),
    "CACHE": Variable(
        _text, "`~/.cache/hvdbridge`", "a directory",
        "Directory of built wheels, and of compiled kernels if its file system belongs to one node. If the variable is "
        "set, the commits of `hvd.elastic` are there, too. `XDG_CACHE_HOME` replaces `~/.cache`. A user without a home "
        "directory has it below the temporary directory.",
    ),
}  # fmt: skip
"""Name without ``HVDBRIDGE_`` -> the variable."""
