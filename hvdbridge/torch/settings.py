"""The ``HOROVOD_*`` variables of Horovod's own runtime: those that have an effect here, and those that have none."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from hvdbridge.errors import ConfigurationError

log = logging.getLogger("hvdbridge")

WITHOUT_EFFECT = (
    "ADASUM_MPI_CHUNK_SIZE", "AUTOTUNE", "BATCH_D2D_MEMCOPIES", "CACHE_CAPACITY", "CCL_CACHE", "DISABLE_GROUP_FUSION",
    "ENABLE_ASYNC_COMPLETION", "HIERARCHICAL_ALLGATHER", "HIERARCHICAL_ALLREDUCE", "MPI_THREADS_DISABLE",
    "NUM_NCCL_STREAMS", "THREAD_AFFINITY", "TORUS_ALLREDUCE",
)  # fmt: skip
"""Knobs of Horovod's runtime that have no counterpart; reported once where they are set."""


@dataclass(frozen=True)
class Settings:
    """Settings of raw operations from the environment.

    Attributes:
        fusion_bytes: operations that are ready together travel together up to this size; 0: never
            (``HOROVOD_FUSION_THRESHOLD``).
        cycle_seconds: a rank collects requests for this time unless it waits for one (``HOROVOD_CYCLE_TIME``, in ms).
        stall_seconds: the coordinator reports an operation that has not started after this time
            (``HOROVOD_STALL_CHECK_TIME_SECONDS``, ``HOROVOD_STALL_CHECK_DISABLE``; default:
            ``HVDBRIDGE_STALL_SECONDS``).
        timeout_seconds: such an operation ends everything after this time (``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``, if
            that is shorter than ``HVDBRIDGE_TIMEOUT_SECONDS``).
        shutdown_seconds: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` itself where it is the shorter one, else 0.
        bucket_bytes: of an optimizer's buckets, if ``HOROVOD_FUSION_THRESHOLD`` is set; 0: each gradient by itself.
        timeline: the file of the timeline (``HOROVOD_TIMELINE``), or empty.
        mark_cycles: the timeline shows when requests are sent (``HOROVOD_TIMELINE_MARK_CYCLES``).
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
        """The variable that ``timeout_seconds`` is from."""
        return "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" if self.shutdown_seconds else "HVDBRIDGE_TIMEOUT_SECONDS"

    @classmethod
    def from_environment(
        cls, stall_seconds: float, timeout_seconds: float, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Parse ``environ`` (default: ``os.environ``).

        Raises:
            ConfigurationError: a variable is no number.

        >>> Settings.from_environment(30, 300, {"HOROVOD_CYCLE_TIME": "5"}).cycle_seconds
        0.005
        """
        env = os.environ if environ is None else environ
        end = _number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        checks, timeline = not _flag(env, "STALL_CHECK_DISABLE"), env.get("HOROVOD_TIMELINE", "")
        fusion = int(_number(env, "FUSION_THRESHOLD", cls.fusion_bytes))
        return cls(
            fusion_bytes=fusion,
            cycle_seconds=_number(env, "CYCLE_TIME", 1e3 * cls.cycle_seconds) / 1e3,
            stall_seconds=_number(env, "STALL_CHECK_TIME_SECONDS", stall_seconds) if checks else math.inf,
            timeout_seconds=min(end or math.inf, timeout_seconds),
            timeline="" if timeline.upper() == "DYNAMIC" else timeline,
            mark_cycles=_flag(env, "TIMELINE_MARK_CYCLES"),
            shutdown_seconds=end if 0 < end < timeout_seconds else 0.0,
            bucket_bytes=fusion if env.get("HOROVOD_FUSION_THRESHOLD", "").strip() else None,
        )


def unheeded(environ: Mapping[str, str] | None = None) -> list[str]:
    """The variables that are set and have no effect.

    >>> unheeded({"HOROVOD_AUTOTUNE_LOG": "a", "HOROVOD_CYCLE_TIME": "1"})
    ['HOROVOD_AUTOTUNE_LOG']
    """
    env = os.environ if environ is None else environ
    return sorted(name for name in env if name.startswith(tuple(f"HOROVOD_{part}" for part in WITHOUT_EFFECT)))


_reported: set[str] = set()


def report_unheeded(rank: int) -> None:
    """Say once, on rank 0, which variables have no effect."""
    names = [name for name in unheeded() if name not in _reported]
    _reported.update(names)
    if names and rank == 0:
        log.warning("%s: set, but without effect: hvdbridge has no counterpart (docs/horovod.md)", ", ".join(names))


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"HOROVOD_{name}", "").strip() or str(default)
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ConfigurationError(f"HOROVOD_{name}={text} must be a number that is not negative")


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"HOROVOD_{name}", "").strip().lower() not in ("", "0", "false")
