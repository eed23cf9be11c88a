"""What a test must not leave behind: a process, a thread, a process group, a file in /dev/shm, a changed default.

The fixture :func:`leaves_nothing` compares before and after each test and fails the test by name. At the session's end
no process of a job may be left, and no file in /dev/shm; a process is traced to its test by its environment, a file by
its time of change. (When a test ends, a job elsewhere may be about to remove its files.)
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist

import hvdbridge as hb

WAIT_SECONDS = 10.0
"""For threads and processes that are about to end; a job's helper ends a second after the last rank."""
SHARED = Path("/dev/shm")
TICK = 0.02
"""Seconds by which a file's age may lag behind the clock: the kernel stamps files by its timer's ticks."""
CHANGING = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "KMP_")
"""Environment variables that pytest, torch's compiler and scikit-learn set themselves."""
POOL = "fiber"
"""The name of the threads of ``hvdbridge.training.fiber``, which keeps idle ones for the next flow."""


def children() -> set[str]:
    """The processes that this one has started, zombies included, by number and name."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            for pid in (task / "children").read_text().split():
                found.add(f"{pid} {Path('/proc', pid, 'comm').read_text().strip()}")
    return found


def threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.name != POOL}


def defaults() -> dict[str, Any]:
    """The process-wide settings that a test could change."""
    found: dict[str, Any] = {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.distributed is initialized": dist.is_initialized(),
        "the working directory": os.getcwd(),
        "multiprocessing's start method": multiprocessing.get_start_method(allow_none=True),
        "torch's float32 products": torch.get_float32_matmul_precision(),
        "hvdbridge is initialized": hb.is_initialized(),
        "sys.exit": sys.exit,
    }
    found |= {f"the handler of {s.name}": signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    return found | {f"os.environ[{k!r}]": v for k, v in os.environ.items() if not k.startswith(CHANGING)}


def remaining(look: Callable[[], set[str]], before: set[str]) -> set[str]:
    """What ``look`` finds that was not there before, once it had time to go away."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (left := look() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind, and notes when the test ran."""
    began, had_children, had_threads, had = time.time(), children(), threads(), defaults()
    yield
    has = defaults()
    changed = [name for name in sorted(had.keys() | has.keys()) if had.get(name) != has.get(name)]
    wrong = [f"{name}: {had.get(name)!r} became {has.get(name)!r}" for name in changed]
    wrong += [f"a process: {text}" for text in remaining(children, had_children)]
    wrong += [f"a thread: {text}" for text in remaining(threads, had_threads)]
    with (jobs.folder() / f"times-{os.getpid()}").open("a") as times:
        times.write(f"{began} {time.time()} {request.node.nodeid}\n")
    if wrong:
        pytest.fail("this test leaves: " + "; ".join(wrong), pytrace=False)


# -- at the session's end --------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the session's main process, whose environment its workers inherit
        jobs.session()
        (jobs.folder() / "segments").write_text("\n".join(segments()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session whose jobs have left processes, or whose tests have left files in /dev/shm."""
    if hasattr(session.config, "workerinput"):
        return
    known = set((jobs.folder() / "segments").read_text().splitlines())
    left = remaining(lambda: {*of_session(), *of_tests(unmapped(segments() - known))}, set())
    for text in sorted(left):
        print(f"\nERROR: left behind: {text}", flush=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(jobs.folder(), ignore_errors=True)


def of_session() -> list[str]:
    """The command lines of the processes of this session's jobs, each behind the test that started it."""
    mark, found = f"{jobs.SERVERS}={os.environ[jobs.SERVERS]}", []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            command = (folder / "cmdline").read_text().replace("\0", " ")
            if mark in variables and "forkserver.serve" not in command and int(folder.name) != os.getpid():
                test = [v.partition("=")[2] for v in variables if v.startswith("PYTEST_CURRENT_TEST=")]
                found.append(f"{''.join(test)}: {command[:200]}")
    return found


def segments() -> set[str]:
    """The names in /dev/shm."""
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def unmapped(names: set[str]) -> set[str]:
    """Those of ``names`` that no process maps: another program of this machine maps its own."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with suppress(OSError):  # a process that has just ended, or another user's
            mapped = {line.rpartition("/")[2] for line in maps.read_text().splitlines() if f"{SHARED}/" in line}
            names = names - mapped
    return names


def of_tests(names: set[str]) -> set[str]:
    """The files in /dev/shm, each behind the tests that ran when it was made."""
    lines = [line for file in jobs.folder().glob("times-*") for line in file.read_text().splitlines()]
    found, ran = set(), [line.split(" ", 2) for line in lines]
    for name in names:
        with suppress(OSError):
            status = (SHARED / name).stat()
            made = status.st_mtime
            if status.st_uid != os.getuid():  # whether another user's process maps a file cannot be read
                continue
            tests = sorted(test for began, ended, test in ran if float(began) - TICK <= made <= float(ended))
            found.add(f"{' or '.join(tests)}: {SHARED / name}")
    return found
