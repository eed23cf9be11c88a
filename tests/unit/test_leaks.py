"""A test that leaves something behind fails, and the failure says what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
LEAKING = """
import os, subprocess, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist

def test_nothing():
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()

def test_a_process():
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(8)"])

def test_a_thread():
    threading.Thread(target=time.sleep, args=(4,), name="the leaked one", daemon=True).start()

def test_a_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_a_segment():
    Path("/dev/shm/hvdbridge-leaked-SELF").write_text("")

def test_a_default():
    torch.set_default_dtype(torch.float64)

def test_a_variable():
    os.environ["LEAKED"] = "yes"
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By test: the line of the summary that names it, empty where it passed."""
    folder = tmp_path_factory.mktemp("leaking")
    segment = Path(f"/dev/shm/hvdbridge-leaked-{os.getpid()}")
    (folder / "test_leaking.py").write_text(LEAKING.replace("SELF", str(os.getpid())))
    (folder / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "2000"}
    main = "import leaks, pytest, sys; leaks.WAIT_SECONDS = 0.5; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-rA", "-p", "leaks", "-p", "no:cacheprovider", f"--rootdir={folder}", str(folder)]
    words = [sys.executable, "-c", main, *options]
    try:
        output = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=100).stdout
    finally:
        segment.unlink(missing_ok=True)
    found: dict[str, str] = {}
    found["at the end"] = "\n".join(line for line in output.splitlines() if "ERROR: left behind: " in line)
    for line in output.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("PASSED", "ERROR") and "::" in rest:
            name, _, text = rest.partition("::")[2].partition(" - ")
            found[name] = text if verdict == "ERROR" else found.get(name, "")
    assert len(found) == 8, output
    return found


def test_what_ends_by_itself_is_no_leak(outcomes: dict[str, str]) -> None:
    assert outcomes["test_nothing"] == ""


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_a_process", "a process: "),
        ("test_a_thread", "a thread: the leaked one"),
        ("test_a_process_group", "torch.distributed is initialized: False became True"),
        ("test_a_default", "torch's default dtype: torch.float32 became torch.float64"),
        ("test_a_variable", "os.environ['LEAKED']: None became 'yes'"),
    ],
)
def test_a_leak_is_named(test: str, said: str, outcomes: dict[str, str]) -> None:
    assert "this test leaves: " in outcomes[test]
    assert said in outcomes[test]


def test_a_file_in_shared_memory_is_named_with_the_test_that_made_it(outcomes: dict[str, str]) -> None:
    """Or with several, of which one did, where tests are shorter than the kernel's ticks."""
    (line,) = [line for line in outcomes["at the end"].splitlines() if "/dev/shm/hvdbridge-leaked-" in line]
    assert "test_leaking.py::test_a_segment" in line


def test_a_process_that_outlives_the_session_is_named_with_its_test(outcomes: dict[str, str]) -> None:
    assert "test_leaking.py::test_a_process (call): " in outcomes["at the end"]
