"""Environment variables of Horovod's runtime (``HOROVOD_*``): settings from them, and a report of ignored ones."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from hvdbridge.errors import ConfigurationError

log = logging.getLogger("hvdbridge")

IGNORED_VARIABLES = (
    "ADASUM_MPI_CHUNK_SIZE", "AUTOTUNE", "BATCH_D2D_MEMCOPIES", "CACHE_CAPACITY", "CCL_CACHE", "DISABLE_GROUP_FUSION",
    "ENABLE_ASYNC_COMPLETION", "HIERARCHICAL_ALLGATHER", "HIERARCHICAL_ALLREDUCE", "MPI_THREADS_DISABLE",
    "NUM_NCCL_STREAMS", "THREAD_AFFINITY", "TORUS_ALLREDUCE",
)  # fmt: skip
"""Variables without effect here, without the prefix ``HOROVOD_``; reported once if they are set."""


@dataclass(frozen=True)
class Settings:
    """Settings of raw operations and optimizers from the environment.

    Attributes:
        fusion_bytes: maximum size of a fused operation; 0 disables fusion (``HOROVOD_FUSION_THRESHOLD``).
        cycle_seconds: time for which a rank collects requests, unless it waits for one (``HOROVOD_CYCLE_TIME``, in ms).
        stall_seconds: time after which the coordinator reports an operation that has not started
            (``HOROVOD_STALL_CHECK_TIME_SECONDS``, ``HOROVOD_STALL_CHECK_DISABLE``; default:
            ``HVDBRIDGE_STALL_SECONDS``).
        timeout_seconds: time after which such an operation fails all operations
            (``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, if shorter than ``HVDBRIDGE_TIMEOUT_SECONDS``).
        timeline: path of the timeline (``HOROVOD_TIMELINE``), or empty.
        mark_cycles: whether the timeline shows when requests are sent (``HOROVOD_TIMELINE_MARK_CYCLES``).
        shutdown_seconds: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` if it determines ``timeout_seconds``, else 0.
        bucket_bytes: size of an optimizer's buckets, ``HOROVOD_FUSION_THRESHOLD`` if it is set, else None; 0: each
            gradient has its own bucket.
    """

    fusion_bytes: int = 128 << 20
    cycle_seconds: float = 1e-3
    stall_seconds: float = 30.0
    timeout_seconds: float = 300.0
    timeline: str = ""
    mark_cycles: bool = False
    shutdown_seconds: float = 0.0
    bucket_bytes: int | None = None

    @property
    def limit(self) -> str:
        """The environment variable that sets ``timeout_seconds``."""
        return "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" if self.shutdown_seconds else "HVDBRIDGE_TIMEOUT_SECONDS"

    @classmethod
    def from_environment(
        cls, stall_seconds: float, timeout_seconds: float, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Parse ``environ`` (default: ``os.environ``), with default limits in seconds.

        Raises:
            ConfigurationError: a variable is not a number, or is negative.

        >>> Settings.from_environment(30, 300, {"HOROVOD_CYCLE_TIME": "5"}).cycle_seconds
        0.005
        """
        env = os.environ if environ is None else environ
        shutdown = _number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        checks, timeline = not _flag(env, "STALL_CHECK_DISABLE"), env.get("HOROVOD_TIMELINE", "")
        fusion = int(_number(env, "FUSION_THRESHOLD", cls.fusion_bytes))
        return cls(
            fusion_bytes=fusion,
            cycle_seconds=_number(env, "CYCLE_TIME", 1e3 * cls.cycle_seconds) / 1e3,
            stall_seconds=_number(env, "STALL_CHECK_TIME_SECONDS", stall_seconds) if checks else math.inf,
            timeout_seconds=min(shutdown or math.inf, timeout_seconds),
            timeline="" if timeline.upper() == "DYNAMIC" else timeline,
            mark_cycles=_flag(env, "TIMELINE_MARK_CYCLES"),
            shutdown_seconds=shutdown if 0 < shutdown < timeout_seconds else 0.0,
            bucket_bytes=fusion if env.get("HOROVOD_FUSION_THRESHOLD", "").strip() else None,
        )


def ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of variables that are set and have no effect.

    >>> ignored_variables({"HOROVOD_AUTOTUNE_LOG": "a", "HOROVOD_CYCLE_TIME": "1"})
    ['HOROVOD_AUTOTUNE_LOG']
    """
    env = os.environ if environ is None else environ
    return sorted(name for name in env if name.startswith(tuple(f"HOROVOD_{part}" for part in IGNORED_VARIABLES)))


_reported: set[str] = set()


def report_ignored_variables(rank: int) -> None:
    """Log once, on rank 0, which variables are set and have no effect."""
    names = [name for name in ignored_variables() if name not in _reported]
    _reported.update(names)
    if names and rank == 0:
        text = "%s: set, but without effect: hvdbridge has no counterpart (docs/reference/horovod-api.md)"
        log.warning(text, ", ".join(names))


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"HOROVOD_{name}", "").strip() or str(default)
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ConfigurationError(f"HOROVOD_{name}={text} must be a number that is not negative")


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"HOROVOD_{name}", "").strip().lower() not in ("", "0", "false")
