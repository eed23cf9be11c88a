"""Check that tests leave nothing behind: no process, thread, process group, file in /dev/shm or changed default.

The fixture :func:`leaves_nothing` compares the state before and after each test, and fails the test if they differ. At
the end of the session no process of a job and no file in /dev/shm may remain. Their tests are found by the environment
of a process and by the modification time of a file. (At the end of a test, another job may be removing its files.)
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
"""Time for threads and processes to end; a job's helper ends a second after the last rank."""
SHARED = Path("/dev/shm")
TICK = 0.02
"""Seconds by which a file's time stamp may lag behind the clock: the kernel uses its timer ticks."""
CHANGING = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "KMP_")
"""Prefixes of environment variables that pytest, torch's compiler and scikit-learn set themselves."""
POOL = "fiber"
"""Name of the threads of ``hvdbridge.training.fiber``, which keeps idle threads for the next flow."""


def children() -> set[str]:
    """Return the pid and name of each child of this process, including zombies."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            for pid in (task / "children").read_text().split():
                found.add(f"{pid} {Path('/proc', pid, 'comm').read_text().strip()}")
    return found


def threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if thread.name != POOL}


def defaults() -> dict[str, Any]:
    """Return the process-wide settings that a test could change."""
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
    """Return the items that ``look`` finds and ``before`` lacks, after waiting for them to disappear."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (left := look() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something behind, and store when the test ran."""
    started, old_children, old_threads, before = time.time(), children(), threads(), defaults()
    yield
    after = defaults()
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    leaks = [f"{name}: {before.get(name)!r} became {after.get(name)!r}" for name in changed]
    leaks += [f"a process: {text}" for text in remaining(children, old_children)]
    leaks += [f"a thread: {text}" for text in remaining(threads, old_threads)]
    with (jobs.folder() / f"times-{os.getpid()}").open("a") as times:
        times.write(f"{started} {time.time()} {request.node.nodeid}\n")
    if leaks:
        pytest.fail("this test leaves: " + "; ".join(leaks), pytrace=False)


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
    """Return the command lines of this session's job processes, each after the test that started it."""
    variable, found = f"{jobs.SERVERS}={os.environ[jobs.SERVERS]}", []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (folder / "environ").read_text(errors="replace").split("\0")
            command = (folder / "cmdline").read_text().replace("\0", " ")
            if variable in variables and "forkserver.serve" not in command and int(folder.name) != os.getpid():
                test = [v.partition("=")[2] for v in variables if v.startswith("PYTEST_CURRENT_TEST=")]
                found.append(f"{''.join(test)}: {command[:200]}")
    return found


def segments() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def unmapped(names: set[str]) -> set[str]:
    """Return those of ``names`` that no process maps: other programs of this machine map their files."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with suppress(OSError):  # a process that has just ended, or another user's
            mapped = {line.rpartition("/")[2] for line in maps.read_text().splitlines() if f"{SHARED}/" in line}
            names = names - mapped
    return names


def of_tests(names: set[str]) -> set[str]:
    """Return the files in /dev/shm, each after the tests that ran when it was last changed."""
    lines = [line for file in jobs.folder().glob("times-*") for line in file.read_text().splitlines()]
    found, runs = set(), [line.split(" ", 2) for line in lines]
    for name in names:
        with suppress(OSError):
            status = (SHARED / name).stat()
            modified = status.st_mtime
            if status.st_uid != os.getuid():  # the maps of another user's processes cannot be read
                continue
            tests = sorted(test for began, ended, test in runs if float(began) - TICK <= modified <= float(ended))
            found.add(f"{' or '.join(tests)}: {SHARED / name}")
    return found
