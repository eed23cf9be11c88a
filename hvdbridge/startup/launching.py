"""``hb.launch(func, np=2)`` calls a function on several ranks of this host, and returns the results of all.

It replaces ``horovod.run`` in scripts and notebooks. For several hosts use torchrun, mpiexec or horovodrun.

Rules:

1. Every rank is a process, ``python -m hvdbridge.startup.launching``. ``func`` calls ``hb.init()`` or ``hvd.init()``.
2. If a rank fails, ``launch`` ends the others and raises its error.
3. Functions, arguments and results pass through files that only this user can read. Cloudpickle writes them if it is
   installed, else pickle.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdbridge.errors import ConfigurationError, RankFailed, Unsupported
from hvdbridge.run import stand_in, stands_in
from hvdbridge.startup import network

GRACE_SECONDS = 5.0
"""Time that the other ranks have after the first failure to end by themselves."""

STAND_IN = "HVDBRIDGE_INTERNAL_STAND_IN"
"""Variable that is set for ranks of a script under ``hvdbridge.run``, so that they also import hvdbridge as Horovod."""

LOCAL = ("localhost", "127.0.0.1")
WITHOUT_EFFECT = {
    "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "verbose", "mpi_args",
    "network_interface", "network_interfaces",
}  # fmt: skip
"""Arguments of ``horovod.run`` that concern other hosts. They are accepted with a warning."""

ELASTIC = {
    "min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range",
    "host_discovery_script",
}  # fmt: skip
"""Arguments of ``horovod.run`` for its elastic mode. They are refused, since elastic jobs need a launcher."""


def launch(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    output_filename: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    backend: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` ranks of this host, and return their results in rank order.

    Accepts the arguments of ``horovod.run``. Those that concern ssh and network interfaces have no effect.

    Args:
        func, args, kwargs: must be picklable. With cloudpickle installed, functions of a notebook are.
        num_proc, np: number of ranks.
        hosts, hostfile: may name this host alone.
        output_filename: directory in which rank r writes ``rank.r/stdout`` and ``rank.r/stderr``.
        use_gloo, use_mpi: same as ``backend="torch"`` and ``backend="mpi"``.
        executable: path of the Python interpreter.
        env: environment variables of the ranks, in addition to this process's.
        backend: as ``HVDBRIDGE_BACKEND``.
        others: further arguments of ``horovod.run``. They have no effect, with a warning; its elastic mode is refused.

    Raises:
        ConfigurationError: the number of ranks is not valid or exceeds the slots of ``hosts``, or an argument or a
            result cannot be pickled.
        Unsupported: other hosts or the elastic mode are requested, which need a launcher.
        TypeError: ``horovod.run`` has no such argument.
        RankFailed: a rank failed. The message has its traceback.
    """
    size = num_proc if np is None else np
    if not isinstance(size, int) or size < 1:
        raise ConfigurationError(f"hb.launch: num_proc={size!r} must be a number of ranks from 1")
    unknown = sorted(set(others) - WITHOUT_EFFECT - ELASTIC)
    if unknown:
        raise TypeError(f"launch() got unexpected arguments: {', '.join(unknown)}")
    elastic = [name for name in sorted(ELASTIC & set(others)) if others[name] is not None]
    if elastic:
        raise Unsupported(f"hb.launch({', '.join(elastic)}=...): elastic jobs need torchrun or horovodrun")
    ignored = [name for name in sorted(WITHOUT_EFFECT & set(others)) if others[name] is not None]
    if ignored:
        warnings.warn(f"hb.launch: without effect on one host: {', '.join(ignored)}", stacklevel=2)
    _check_hosts(hosts, hostfile, size)
    chosen = backend or ("mpi" if use_mpi else "torch" if use_gloo else None)
    with tempfile.TemporaryDirectory(prefix="hvdbridge-launch-") as folder:
        task = Path(folder)
        (task / "task").write_bytes(_pack((func, tuple(args), dict(kwargs or {}))))
        environment = {**os.environ, **(env or {}), **({"HVDBRIDGE_BACKEND": chosen} if chosen else {})}
        _run_ranks(task, size, environment, executable or sys.executable, output_filename)
        return [pickle.loads((task / f"result.{rank}").read_bytes()) for rank in range(size)]


def _run_ranks(task: Path, size: int, environment: dict[str, str], executable: str, output: str | None) -> None:
    """Start all ranks and wait for them. Raises RankFailed if one failed."""
    for name in [n for n in environment if n.startswith(("TORCHELASTIC_", "OMPI_COMM_", "PMI_", "HOROVOD_"))]:
        del environment[name]  # set by a launcher that started this process
    main = sys.modules["__main__"]
    origin = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(network.free_port()), "WORLD_SIZE": str(size)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    ranks = []
    try:
        for rank in range(size):
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            rank_variables |= {STAND_IN: "1"} if stands_in() else {}
            streams = _streams(output, rank)
            command = [executable, "-m", "hvdbridge.startup.launching", str(task), str(rank), origin or "", sys.argv[0]]
            ranks.append(subprocess.Popen(command, env={**environment, **rank_variables}, **streams))
            for stream in streams.values():
                stream.close()
        failed = _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed is not None:
        _raise_error_of(task, ranks, failed)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks, or for :data:`GRACE_SECONDS` after a failure. Return the rank that failed first, or None."""
    failed: int | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        states = [process.poll() for process in ranks]
        failures = [rank for rank, state in enumerate(states) if state]
        if failures and failed is None:
            failed, deadline = failures[0], time.monotonic() + GRACE_SECONDS
        if None not in states:
            break
        time.sleep(0.02)
    return failed


def _raise_error_of(task: Path, ranks: Sequence[subprocess.Popen[bytes]], failed: int) -> None:
    """Raise RankFailed for the rank whose error came first, else for the rank ``failed``."""
    errors = {rank: task / f"error.{rank}" for rank in range(len(ranks))}
    with_error = [rank for rank in errors if errors[rank].exists()]
    # The rank whose error is the oldest is the cause. Its process need not have ended first.
    first = min(with_error, key=lambda rank: errors[rank].stat().st_mtime_ns) if with_error else failed
    status = ranks[first].returncode
    how = f"was ended by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
    text = errors[first].read_text() if first in with_error else ""
    raise RankFailed(f"hb.launch: rank {first} of {len(ranks)} {how}\n{text}".rstrip())


def _streams(output: str | None, rank: int) -> dict[str, Any]:
    """Open the files for stdout and stderr of a rank; empty if the rank inherits the streams."""
    if output is None:
        return {}
    folder = Path(output) / f"rank.{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return {name: open(folder / name, "wb") for name in ("stdout", "stderr")}


def _check_hosts(hosts: str | None, hostfile: str | None, size: int) -> None:
    """Check that all hosts are this host, and that they have enough slots for ``size`` ranks."""
    if hostfile is not None:
        lines = [line.split("#")[0].split() for line in Path(hostfile).read_text().splitlines()]
        hosts = ",".join(
            ":".join([words[0], *(w[6:] for w in words[1:] if w.startswith("slots="))]) for words in lines if words
        )
    if hosts is None:
        return
    slots = 0
    for host in hosts.split(","):
        name, _, number = host.partition(":")
        if name not in (*LOCAL, socket.gethostname()):
            raise Unsupported(
                f"hb.launch starts ranks on this host, not on {name!r}: use torchrun, mpiexec or horovodrun"
            )
        if not (number or "1").isdigit():
            raise ConfigurationError(f"hb.launch: {host!r} in hosts={hosts!r} must be HOST or HOST:SLOTS")
        slots += int(number or 1)
    if slots < size:
        raise ConfigurationError(f"hb.launch: {size} ranks do not fit into hosts={hosts!r}")


def _pack(value: Any) -> bytes:
    """Pickle a value, with cloudpickle if it is installed."""
    pickler: Any = importlib.import_module("cloudpickle") if find_spec("cloudpickle") else pickle
    try:
        return bytes(pickler.dumps(value))
    except Exception as cause:
        remedy = "" if pickler is not pickle else " Run: pip install cloudpickle, or define it at a module's top level."
        raise ConfigurationError(
            f"hb.launch: cannot pickle the function, its arguments or its result: {cause}.{remedy}"
        ) from cause


def _run_rank(task: Path, rank: int, origin: str, program: str) -> None:
    """Run the function in the process of one rank, and write its result or error to a file."""
    sys.argv[:] = [program]
    if os.environ.pop(STAND_IN, None):
        stand_in()
    try:
        if origin and not find_spec("cloudpickle"):  # pickle finds the launching script's functions there by name
            from multiprocessing import spawn

            spawn._fixup_main_from_path(origin)  # type: ignore[attr-defined]
        func, args, kwargs = pickle.loads((task / "task").read_bytes())
        result = _pack(func(*args, **kwargs))
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            with suppress(OSError):
                (task / f"error.{rank}").write_text(traceback.format_exc())
        raise
    partial = task / f"result.{rank}.partial"
    partial.write_bytes(result)
    partial.rename(task / f"result.{rank}")


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
