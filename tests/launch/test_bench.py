"""``hvdbridge bench`` in real jobs reports the figures of the models and policies that ran."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

import benchmarks.hosts
from benchmarks import cuda_check
from benchmarks.hosts import NoHosts, hosts
from hvdbridge.policies import bytes_per_step, from_spec
from hvdbridge.startup.world import usable_cores
from hvdbridge.tools import main
from hvdbridge.tools.bench.models import model

SMALL = ["--models", "small:8", "--samples", "4", "--steps", "3"]


def read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def test_three_backends_in_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    words = ["-m", "hvdbridge", "bench", *SMALL, "--backends", "torch,mpi,horovod", "--policies", "mean", "int8"]
    job = jobs.run("mpiexec", None, 2, [*words, "--json", str(out), "--plot", str(picture)], timeout=120)
    assert job.status == 0, job.output
    rows = read(out)
    assert [(row["backend"], row["policy"]) for row in rows] == [
        (backend, policy) for backend in ("torch", "mpi", "horovod") for policy in ("mean", "int8")
    ]
    params = dict(model("small:8")[0].named_parameters())
    cores = json.loads(out.read_text())["network"]["cores"]
    for row in rows:
        assert (row["launcher"], row["ranks"], row["steps"]) == ("mpiexec", 2, 3)
        assert row["parameters"] == sum(p.numel() for p in params.values())
        # The model fits into one bucket, so DDP's buckets are the predicted ones.
        assert row["bytes_sent"] == bytes_per_step(from_spec(row["policy"]), params, 2)
        assert row["step"] >= max(row["compression"], row["communication"]) > 0
        overlapped = row["compression"] if cores < 2 else 0
        assert row["exposed"] == pytest.approx(max(0, row["step"] - row["compute"] - overlapped))
        assert row["ratio"] == sorted(row["ratio"])
        assert row["limit"] > 0
        assert row["bandwidth"] == row["bytes_sent"] / row["communication"]
        cell = f"{row['backend']} · small:8 · {row['policy']}"  # progress is printed without a terminal, too
        assert job.output.index(cell) < job.output.index(f"{cell}: {1e3 * row['step']:.1f} ms a step")
        assert 0 < row["compute_cpu"] < row["cpu"] < row["step"] * (os.cpu_count() or 1)
    assert "milliseconds per step" in job.output
    assert picture.stat().st_size > 1000
    plan = ["plan", "--model", "small:8", "--from", str(out), "--policies", "mean", "int8", "--ranks", "2", "--json"]
    assert main([*plan, str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"predicted\W+measured\W+ratio", printed)
    assert re.search(r"int8\W+2\W+[\d.]+\W+[\d.]+\W+[\d.]+", printed)
    mean, int8 = (row["step"] for row in read(tmp_path / "plan.json"))  # either may be faster
    assert f"2 ranks: {'mean' if mean <= 1.05 * int8 else 'int8'}: " in printed


@pytest.mark.parametrize(("backend", "way"), [("torch", "ddp-hook"), ("torch", "ddp-fp16"), ("torch", "ddp-powersgd"),
                                              ("torch", "ddp-topk"), ("mpi", "mpi-loop")])  # fmt: skip
def test_other_native_ways(backend: str, way: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["-m", "hvdbridge", "bench", *SMALL, "--policies", "mean", "--against", way, "--json", str(out)]
    job = jobs.run("fork", backend, 2, words)
    assert job.status == 0, job.output
    assert [row["against"] for row in read(out)] == [way]


def test_without_a_launcher_each_backend_has_its_own(tmp_path: Path) -> None:
    words = ["bench", *SMALL, "--policies", "mean", "--bucket-mb", "auto", "--json", str(tmp_path / "b.json")]
    job = jobs.run(None, None, 2, ["-m", "hvdbridge", *words], timeout=240)  # three jobs in sequence
    assert job.status == 0, job.output
    found = {path.stem: read(path)[0]["launcher"] for path in tmp_path.glob("*.json")}
    assert found == {"b-torch": "torchrun", "b-horovod": "horovodrun", "b-mpi": "mpiexec"}


def test_what_is_due_in_some_steps_has_its_share_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    policies = ["local_sgd:every=2", "krum:f=1", "local_sgd:every=100", "warmup(steps=9, then=int8)", "mean"]
    words = ["-m", "hvdbridge", "bench", *SMALL, "--policies", *policies, "--json", str(out)]
    job = jobs.run("fork", "torch", 2, words)
    assert job.status == 0, job.output
    rows = {row["policy"]: row for row in read(out)}
    assert list(rows) == ["local_sgd:every=2", "mean"]
    params = dict(model("small:8")[0].named_parameters())
    both = [bytes_per_step(from_spec("local_sgd:every=2"), params, 2, step) for step in (0, 1)]
    assert rows["local_sgd:every=2"]["bytes_sent"] == sum(both) / 2
    assert min(both) == 0 < max(both)
    assert "krum:f=1: left out: " in job.output
    assert "local_sgd:every=100: left out: " in job.output
    assert "Raise --steps" in job.output
    assert "warmup(steps=9, then=int8): left out: " in job.output


def test_a_model_of_ones_own_lies_where_one_stands(tmp_path: Path) -> None:
    own = "import torch\ndef make(): return torch.nn.Linear(3, 4), lambda module: module(torch.ones(2, 3)).sum()\n"
    (tmp_path / "own_model.py").write_text(own)
    words = ["plan", "--model", "own_model:make", "--gbits", "1", "--ranks", "2", "--policies", "mean"]
    script = Path(sys.executable).with_name("hvdbridge")
    result = subprocess.run([script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


ODD = """
import torch
from torch import nn
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        self.kept = self.used(x)  # as a loss beside the loss is: it has no copy
        return self.kept.sum()
    def loss(self, x):
        return self(x)
X = torch.ones(2, 8)
def unused(): return Half(), lambda module: module(X)
def sparse(): return nn.Embedding(8, 4, sparse=True), lambda module: module(torch.arange(4)).sum()
def method(): return Half(), lambda module: module.loss(X)
"""


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_what_cannot_be_measured_leaves_the_rest(backend: str, tmp_path: Path) -> None:
    """Bench leaves out models with sparse gradients, and losses that need a method which a wrapper hides."""
    odd, out = tmp_path / "odd.py", tmp_path / "bench.json"
    odd.write_text(ODD)
    models = [f"{odd}:sparse", f"{odd}:method", f"{odd}:unused", "small:4"]
    policies = ["hierarchical(hierarchical(mean))", "mean", "int8"]
    words = ["-m", "hvdbridge", "bench", "--models", ",".join(models), "--policies", *policies, "--steps=3"]
    job = jobs.run("fork", backend, 2, [*words, "--json", str(out)])
    assert job.status == 0, job.output
    wrapped = models[1:2] if backend != "torch" else []  # only DDP hides methods
    measured = [(model, policy) for model in [*wrapped, *models[2:]] for policy in ("mean", "int8")]
    assert [(row["model"], row["policy"]) for row in read(out)] == measured
    assert f"{models[0]} · mean: left out: Embedding makes sparse gradients" in job.output
    if backend == "torch":
        assert f"{models[1]} · mean: left out: " in job.output
        assert "A loss calls the module that it is given" in job.output
    assert f"small:4 · {policies[0]}: left out: " in job.output


def test_a_backend_that_is_not_installed_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    out = tmp_path / "bench.json"
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    words = ["-m", "hvdbridge", "bench", *SMALL, "--backends", "horovod,torch", "--policies", "mean"]
    job = jobs.run("torchrun", None, 2, [*words, "--json", str(out)], env=env)
    assert job.status == 0, job.output
    assert [row["backend"] for row in read(out)] == ["torch"]
    assert "horovod: left out: " in job.output


def test_a_wrong_policy_ends_the_job_with_its_reason() -> None:
    job = jobs.run("fork", "mpi", 2, ["-m", "hvdbridge", "bench", *SMALL, "--policies", "int9"])
    assert job.status != 0
    assert "int9" in job.output


OWN_POLICY = Path(__file__).parents[1] / "own_policy.py"


def test_a_policy_of_ones_own_is_one_that_the_models_file_registers(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", "--models", f"{OWN_POLICY}:make,small:4", "--steps=3"]
    words += ["--policies", "own_of_tests:share=0.75", "mean"]
    job = jobs.run("fork", "torch", 2, ["-m", "hvdbridge", *words, "--json", str(out)])
    assert job.status == 0, job.output
    assert [row["policy"] for row in read(out)] == ["own_of_tests:share=0.75", "mean"] * 2


def test_a_rank_that_breaks_says_so_once() -> None:
    """A rank that waits in its exception hook prints nothing when the launcher sends SIGTERM."""
    words = ["-m", "hvdbridge", "bench", "--models", f"small:4,{OWN_POLICY}:breaks", "--steps=9", "--policies", "mean"]
    job = jobs.run("torchrun", "torch", 2, words)
    assert job.status != 0
    assert "RuntimeError: bad batch" in job.output
    assert "KeyboardInterrupt" not in job.output
    assert "milliseconds per step" in job.output, "the rows so far"


def test_a_file_that_rank_0_cannot_write_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    words = ["-m", "hvdbridge", "bench", *SMALL, "--policies", "mean", "--json", str(tmp_path)]
    job = jobs.run("fork", "torch", 2, words)
    assert job.status != 0
    assert job.output.count(f"hvdbridge bench: --json {tmp_path} cannot be written: ") == 2, job.output
    assert "probing" not in job.output
    assert "IsADirectoryError" not in job.output


OWN = """
import torch
class Net(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.used, self.frozen = torch.nn.Linear(64, 64, dtype=dtype), torch.nn.Linear(64, 64, dtype=dtype)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        return self.frozen(self.used(x))
def make(dtype=torch.float64): return Net(dtype), lambda module: module(torch.ones(2, 64, dtype=dtype)).sum()
def half(): return make(torch.bfloat16)
"""


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_frozen_parameters_and_other_types(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan predicts the bytes that bench sends: none for frozen parameters, and those of each dtype for others."""
    (tmp_path / "other_types.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    out, planned = tmp_path / "bench.json", tmp_path / "plan.json"
    words = ["--models", "other_types:make,other_types:half", "--policies", "mean", "--steps", "2"]
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    line = ["-m", "hvdbridge", "bench", *words, "--json", str(out)]
    job = jobs.run("fork", backend, 2, line, env=env)
    assert job.status == 0, job.output
    sent = {row["model"]: row["bytes_sent"] for row in read(out)}
    numel = 64 * 64 + 64
    used_map = 0 if backend == "torch" else 8  # an upper limit; DDP's own map is not counted
    assert numel * 8 <= sent["other_types:make"] <= numel * 8 + used_map
    native = {row["model"]: row["native"] for row in read(out)}
    assert native["other_types:make"] is not None
    if backend == "torch":
        assert sent["other_types:half"] == numel * 2
        assert native["other_types:half"] is not None
    else:  # hvdbridge sends dtypes that the native way refuses
        assert sent["other_types:half"] > 0
        assert native["other_types:half"] is None
        reason = {"mpi": "the hand-written loops over MPI are for", "horovod": "horovod.torch takes no bfloat16"}
        assert f"native: none: {reason[backend]}" in job.output
    plan = ["plan", "--model", "other_types:make", "--gbits", "1", "--ranks", "2", "--policies", "mean"]
    assert main([*plan, "--json", str(planned)]) == 0
    capsys.readouterr()
    assert [row["bytes_sent"] for row in read(planned)] == [numel * 8]


UNLIKE = """
import torch
import hvdbridge as hb
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        found = self.always(x)
        return self.sometimes(found) if hb.rank() == 0 else found
def make(): return Net(), lambda module: module(torch.ones(2, 8)).sum()
def not_on_mpi():
    if hb.backend() == "mpi":
        raise RuntimeError("this model does not like MPI")
    return make()
"""


def test_what_one_rank_leaves_out(tmp_path: Path) -> None:
    """All ranks learn that a parameter has no gradient on one rank."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    words = ["-m", "hvdbridge", "bench", "--models", f"{tmp_path}/unlike.py:make", "--policies", "mean", "--steps", "2"]
    job = jobs.run("fork", "mpi", 2, words, env={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert job.status == 0, job.output


def test_one_backend_that_fails_is_the_status_of_all(tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    words = ["bench", "--models", f"{tmp_path}/unlike.py:not_on_mpi", "--policies", "mean", "--steps", "2"]
    job = jobs.run(None, None, 1, ["-m", "hvdbridge", *words, "--backends", "mpi,torch"])
    assert job.status != 0
    assert "this model does not like MPI" in job.output
    assert "torch" in job.output.splitlines()[-2], job.output  # whose rows were printed after it


@pytest.mark.parametrize(("launcher", "backend"), [(None, "torch"), ("horovodrun", "torch"), ("mpiexec", "mpi")])
def test_ctrl_c_leaves_the_rows_so_far(launcher: str | None, backend: str, tmp_path: Path) -> None:
    """Ctrl-C leaves the finished rows in the file; without a launcher bench starts torchrun."""
    out = tmp_path / "bench.json"
    models = "small:8,resnet50"  # the second row takes a minute and is interrupted
    words = ["bench", "--models", models, "--samples", "4", "--policies", "mean", "--json", str(out)]
    line = jobs.command(launcher, 2, ["-m", "hvdbridge", *words], real=True)  # a terminal's signals reach a whole group
    job = subprocess.Popen(
        line, env=jobs.environment(backend), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not out.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(job.pid, signal.SIGINT)  # what a terminal does
        output = job.communicate(timeout=60)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert [row["model"] for row in read(out)] == ["small:8"]
    assert job.returncode != 0
    if backend != "mpi":  # rank 0 may block in MPI, where it handles no signal
        assert "milliseconds per step" in output


def test_a_slow_network_is_what_the_step_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 30 Mbit/s between two hosts, the bytes sent limit the step, except for those in buffers; int8 is faster."""
    policies = ["mean", "int8", "delayed(mean)"]
    out = tmp_path / "bench.json"
    words = ["-m", "hvdbridge", "bench", "--models", "small:60", "--samples", "4", "--steps", "2"]
    monkeypatch.setattr(benchmarks.hosts, "BIN", jobs.forking())
    try:
        with hosts(2, mbits=30) as cluster:
            lines = cluster.commands("torchrun", 1, [*words, "--policies", *policies, "--json", str(out)])
            statuses, output = cluster.run(lines, jobs.environment("torch"), timeout=90)
    except NoHosts as error:
        pytest.skip(str(error))
    assert statuses == [0, 0], output[-4000:]
    mean, int8, delayed = read(out)
    cores = json.loads(out.read_text())["network"]["cores"]
    assert cores == len(usable_cores()) / 2, "of one machine, whatever hosts say"
    burst = 256_000 * 2  # bytes that the token bucket passes at once, and those in a queue
    assert mean["step"] > (mean["bytes_sent"] - burst) * 8 / 30e6
    assert int8["step"] < mean["step"]
    assert delayed["step"] > (delayed["bytes_sent"] - burst) * 8 / 30e6, (
        "behind the step, and before the next one's end"
    )


def test_hosts_leave_nothing(tmp_path: Path) -> None:
    """After SIGTERM while ranks run, namespaces, bridge and ranks no longer exist."""
    script = tmp_path / "sleeps.py"
    script.write_text("import os, time; os.write(1, b'here\\n'); time.sleep(600)")  # one write per line
    code = (
        "import os, sys; from benchmarks.hosts import *\n"
        "try:\n"
        "    with hosts(2) as made:\n"
        "        print(made.names[0], flush=True)\n"
        f"        made.run([[sys.executable, {str(script)!r}]] * 2, os.environ, quiet=False)\n"
        "except NoHosts as error: print(error)\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert job.stdout is not None
    try:
        name = job.stdout.readline().strip()
        if " " in name:
            pytest.skip(name)
        assert [job.stdout.readline().strip() for _ in range(2)] == ["here", "here"]
        job.terminate()
        assert job.wait(30) == 143
    finally:
        job.kill()
        job.communicate()
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not Path("/etc/netns", name).exists()
    assert str(script) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_the_check_for_cuda_passes_without_it(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    script = Path(__file__).parents[2] / "benchmarks" / "cuda_check.py"
    specs = ["mean", "int8", "topk:ratio=0.05", "sign:momentum=0.9", "powersgd:rank=2", "local_sgd:every=2"]
    line = [str(script), "--device", "cpu", "--json", str(out), "--specs", *specs]
    job = jobs.run(None, None, 1, line, timeout=240)
    assert job.status == 0, job.output
    verdicts = {(row["part"], row["what"]): row["verdict"] for row in json.loads(out.read_text())}
    assert "WRONG" not in verdicts.values()
    assert verdicts["waits", "all"] == "missing"
    for part in ("policy", "torch, 1 rank", "torch, 2 ranks", "mpi, 2 ranks", "horovod, 2 ranks"):
        assert verdicts[part, "powersgd:rank=2"] == "ok"
    assert verdicts["kernel", "1 bit"] == "ok"


@pytest.mark.parametrize(("wrong", "verdict"), [(0.0, "ok"), (0.1, "WRONG"), (float("nan"), "WRONG")])
def test_what_the_check_calls_wrong(wrong: float, verdict: str) -> None:
    right = {"w": torch.ones(8)}
    found = [right, {"w": torch.ones(8) + wrong}, right]
    assert cuda_check.compared("policy", "mean", found, [right] * 3).verdict == verdict


def test_elements_of_the_other_sign_are_few() -> None:
    right = torch.ones(5000)
    for flips, verdict in ((2, "ok"), (3, "WRONG")):
        found = right.clone()
        found[:flips] = -1
        assert cuda_check.compared("job", "sign", [{"w": found}], [{"w": right}], flips=2).verdict == verdict


def test_a_policy_that_breaks_a_job_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(backend: str, ranks: int, device: str, specs: Sequence[str], deadline: float) -> tuple[dict[str, str], str]:
        before_failure = [*specs, "int8"][: [*specs, "int8"].index("int8")]
        return dict.fromkeys(before_failure, "not here"), "int8 broke" if "int8" in specs else ""

    monkeypatch.setattr(cuda_check, "job", job)
    monkeypatch.setattr(cuda_check, "CALLS", [])
    monkeypatch.setattr(cuda_check, "IN_JOBS", ["mean", "int8", "onebit"])
    found = [(row.what, row.verdict, row.detail) for row in cuda_check.jobs("cpu") if row.part == "torch, 1 rank"]
    assert found == [
        ("mean", "missing", "not here"),
        ("int8", "WRONG", "int8 broke"),
        ("onebit", "missing", "not here"),
    ]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_waits_are_those_within_the_step() -> None:
    events = [
        ("cudaDeviceSynchronize", 5, 1), (cuda_check.INTERVAL, 10, 20), ("cudaStreamSynchronize", 12, 3),
        ("cudaMemcpyAsync", 13, 1), ("cudaMemcpy", 30, 9), ("cuStreamSynchronize", 31, 1),
    ]  # fmt: skip
    assert cuda_check.waits_in(events) == {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}
    assert cuda_check.waited(lambda: torch.ones(3).sum().item()) == {}, "the interval is found, and a CPU has no waits"
