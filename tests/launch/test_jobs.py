"""The start of test jobs: forked ranks behave like ``python script.py``, and leave no processes behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jobs
import leaks
import pytest

SEES = """
import os, sys, threading
import jobs
rank = int(os.environ["RANK"])
jobs.record(rank, {
    "hash": hash("a string"), "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0],
    "threads": threading.active_count(), "backends": sorted({"mpi4py.MPI", "horovod.torch"} & set(sys.modules)),
    "input": sys.stdin.read(), "torch": "torch" in sys.modules,
})
print("printed")
"""


def test_a_forked_rank_is_what_python_would_start(tmp_path: Path) -> None:
    script = tmp_path / "sees.py"
    script.write_text(SEES)
    job = jobs.run("fork", None, 2, [str(script), "word"]).check()
    hashes = [seen.pop("hash") for seen in job.records]
    assert hashes[0] != hashes[1], "else ranks would iterate over sets in one order"
    assert job.records == 2 * [
        {"name": "__main__", "file": str(script), "argv": [str(script), "word"], "path": str(tmp_path), "threads": 1,
         "backends": [], "input": "", "torch": True}
    ]  # fmt: skip
    assert job.output.count("printed") == 2


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit"),
    ],
)
@pytest.mark.parametrize("launcher", ["fork", None])
def test_a_forked_rank_ends_as_python_does(launcher: str | None, code: str, status: int, message: str) -> None:
    job = jobs.run(launcher, None, 1, ["-c", code])
    assert job.status == status
    assert message in job.output


def test_modules_and_their_arguments(tmp_path: Path) -> None:
    job = jobs.run("fork", None, 1, ["-m", "timeit", "-n", "1", "-r", "1", "print('measured')"])
    assert job.status == 0
    assert "measured" in job.output


@pytest.mark.waits
def test_a_failed_rank_ends_the_others() -> None:
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    job = jobs.run("fork", None, 2, ["-c", code], timeout=50)
    assert job.status == 3
    assert job.seconds < 40


@pytest.mark.waits
def test_the_limit_ends_a_job() -> None:
    job = jobs.run("fork", None, 2, ["-c", "import time; print('begun', flush=True); time.sleep(60)"], timeout=2)
    assert job.status == -1
    assert job.output.count("begun") == 2
    assert "its limit of 2 s" in job.output


LEAVES = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"


@pytest.mark.waits
def test_a_process_that_a_forked_rank_leaves_is_named() -> None:
    with pytest.raises(AssertionError, match=r"processes that ranks left: .*time\.sleep\(60\)"):
        jobs.run("fork", None, 1, ["-c", LEAVES])


@pytest.mark.waits
def test_a_process_that_a_launched_rank_leaves_fails_the_job() -> None:
    job = jobs.run("mpiexec", None, 2, ["-c", LEAVES])
    assert job.status != 0
    assert re.search(r"processes that this rank left: .*time\.sleep\(60\)", job.output)


def test_a_launched_rank_has_what_its_launcher_gives(tmp_path: Path) -> None:
    """A forked rank has its launcher's open files and variables, and runs sitecustomize; its children fork, too."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    code = (
        "import jobs, os, subprocess, sys; child = subprocess.run([sys.executable, '-c', 'import sys; "
        "print(\"torch\" in sys.modules)'], capture_output=True, text=True); jobs.record(int(os.environ['PMI_RANK']), "
        "[os.fstat(int(os.environ['PMI_FD'])).st_ino > 0, sys.modules['horovod'], child.stdout])"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), jobs.environment()["PYTHONPATH"]])}
    for real in (False, True):
        job = jobs.run("mpiexec", None, 2, ["-c", code], env=env, real=real).check()
        assert job.records == [[True, None, f"{not real}\n"]] * 2


def test_a_daemon_that_a_job_leaves_is_named_with_the_test() -> None:
    daemon = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env=os.environ)
    try:
        time.sleep(0.1)
        found = leaks.of_session()
    finally:
        daemon.kill()
        daemon.wait()
    named = [text for text in found if "test_a_daemon_that_a_job_leaves_is_named_with_the_test" in text]
    assert len(named) == 1
    assert "time.sleep(60)" in named[0]


def test_a_job_that_several_tests_share_runs_once(tmp_path: Path) -> None:
    code = f"import jobs, os, uuid; jobs.record(0, str(uuid.uuid4())) or {str(tmp_path)!r}"
    first, second = (jobs.once("fork", None, 1, ["-c", code]).check().records for _ in range(2))
    assert first == second
