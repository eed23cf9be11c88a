"""The examples as a user starts them: accuracy, the same bits in every cell, checkpoints, uneven data, and trust."""

from __future__ import annotations

import doctest
import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jobs
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(EXAMPLES / "train.py")
TOKENS = str(SCRIPTS / "tokens.py")
SAMPLES = 1437


def results(backend: str | None, size: int, argv: Sequence[str], timeout: float = 120) -> dict[str, Any]:
    """Return the metrics that rank 0 of a successful job wrote."""
    metrics = jobs.folder() / f"{'-'.join([str(backend), str(size), *(Path(word).name for word in argv)])}.json"
    job = jobs.once("fork", backend, size, [*argv, f"--metrics={metrics}"], timeout)
    assert job.status == 0, job.output[-8000:]
    return dict(json.loads(metrics.read_text()))


def test_accuracy_at_the_defaults() -> None:
    result = results("mpi", 2, [TRAIN])
    assert result["accuracy"] >= 0.97
    assert result["steps"] == len(result["losses"]) == 20 * 45
    assert result["bytes_sent"] > 0
    assert (result["backend"], result["launcher"]) == ("mpi", "bare")


def test_one_process() -> None:
    result = results("torch", 1, [TRAIN, "--epochs=5"])
    assert result["accuracy"] >= 0.9
    assert result["bytes_sent"] == 0


@pytest.mark.parametrize(
    ("launcher", "backend", "epochs", "accuracy"),
    [("horovodrun", "horovod", 20, 97), ("torchrun", "torch", 5, 50), ("mpiexec", "mpi", 5, 50),
     ("torchrun", "mpi", 5, 50)],
)  # fmt: skip
def test_eight_ranks(launcher: str, backend: str, epochs: int, accuracy: int) -> None:
    """The commands of the README work with more ranks than cores. (Guessing has an accuracy of 10 %.)"""
    job = jobs.run(launcher, backend, 8, [TRAIN, f"--epochs={epochs}"], timeout=240)
    assert job.status == 0, job.output[-8000:]
    (last,) = [line for line in job.output.splitlines() if "digest" in line]
    assert float(last.split("accuracy ")[1].split("%")[0]) >= accuracy


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_uneven_data_is_one_process_on_the_union(backend: str) -> None:
    watched = str(SCRIPTS / "watched_train.py")
    ranks = jobs.run("fork", backend, 3, [watched, "--uneven", "--epochs=1"]).check().records
    (alone,) = jobs.once("fork", "torch", 1, [watched, "--batch-size=48", "--epochs=1"]).check().records

    (dealt,) = zip(*(rank["batches"] for rank in ranks), strict=True)
    assert sorted(chain(*chain(*dealt))) == list(range(SAMPLES))  # each sample once
    assert [sum(map(len, part)) for part in dealt] == sorted(sum(map(len, part)) for part in dealt)
    unions = [list(chain(*parts)) for parts in zip(*dealt, strict=True)]
    assert unions == alone["batches"][0]

    # The exact results are equal: sum_r n_r (1/n_r sum_i g_i) / sum_r n_r = 1/n sum_i g_i. In float32 each of the
    # 30 steps rounds a parameter at most twice (the momentum, the update), by 2^-24 of its magnitude, and the
    # gradients' own rounding is multiplied by a learning rate of at most 0.06. The mean without weights is off by
    # far more.
    largest = max(map(abs, alone["parameters"]))
    bound = len(unions) * 2 * 2**-24 * largest
    for rank in ranks:
        difference = max(abs(a - b) for a, b in zip(rank["parameters"], alone["parameters"], strict=True))
        assert difference <= bound


@pytest.mark.parametrize("backend", jobs.BACKENDS)
@pytest.mark.parametrize(("how", "steps"), [("dealt", (5, 5)), ("shards", (6, 3))])
def test_tokens_count_alike(backend: str, how: str, steps: tuple[int, int]) -> None:
    """Windows may have unequal micro-batches, the last may be short, and a rank may end long before the other."""
    ranks = jobs.run("fork", backend, 2, [TOKENS, how]).check().records
    (exact,) = jobs.once("fork", "torch", 1, [TOKENS, how, "float64"]).check().records
    assert tuple(rank["steps"] for rank in ranks) == steps
    assert ranks[0]["parameters"] == ranks[1]["parameters"]

    # A gradient is a mean over T <= 340 tokens: in float32 a sum of T terms is off by at most T 2^-24 of the sum of
    # their magnitudes (Higham 2002, section 4.2), here 2e-5 of a mean of magnitudes, which is below 0.3. With momentum
    # 0.9 each of S steps counts at most 10 times, with a learning rate of 0.25: 6 * 10 * 0.25 * 0.3 * 2e-5 = 9e-5,
    # and the bound allows earlier steps' rounding errors to grow. Equal weights in place of token counts exceed it.
    assert distance(ranks[0], exact) <= 9e-5
    (wrong, _) = jobs.once("fork", "torch", 2, [TOKENS, how, "unweighted"]).check().records
    assert distance(wrong, exact) > 3e-3


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["parameters"], other["parameters"], strict=True))


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_rank_without_samples_in_a_step(backend: str) -> None:
    """The last step has one of 1437 samples, so that rank 0 of two has none, and weight 0."""
    argv = [TRAIN, "--uneven", "--batch-size=2", "--epochs=1"]  # 359 steps of four samples, and one of one
    result = results(backend, 2, argv)
    assert result["steps"] == 360
    assert result["digest"] == results("torch", 2, argv)["digest"]


def test_killed_and_resumed_elsewhere(tmp_path: Path) -> None:
    """A run killed three times within an epoch, and resumed on other backends, ends like an uninterrupted one."""
    options = ["--epochs=3", "--policy=ef(bf16)", "--uneven"]
    uninterrupted = results("torch", 2, [TRAIN, *options])
    checkpoint = tmp_path / "checkpoint"
    options += [f"--checkpoint={checkpoint}", "--checkpoint-every=13", "--resume"]
    for backend in ("torch", "mpi", "horovod"):  # 45 steps per epoch; each job makes 30 steps, and keeps 26
        job = jobs.run("fork", backend, 2, [str(SCRIPTS / "killed_train.py"), "30", *options])
        assert job.status != 0
        assert checkpoint.exists(), job.output[-8000:]
    result = results("horovod", 2, [TRAIN, *options])
    assert len(result["losses"]) == 3 * 45 - 3 * 26
    assert result["losses"] == uninterrupted["losses"][3 * 26 :]
    assert result["digest"] == uninterrupted["digest"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    options = [f"--checkpoint={tmp_path / 'checkpoint'}", "--checkpoint-every=5", "--resume", "--steps=5"]
    assert jobs.run("fork", "torch", 2, [TRAIN, *options]).status == 0
    job = jobs.run("fork", "torch", 2, [TRAIN, *options, "--seed=1"])
    assert job.status != 0
    assert "is of another run" in job.output


@pytest.mark.parametrize("size", [1, 2])
def test_missing_fashion_mnist(size: int, tmp_path: Path) -> None:
    job = jobs.run("fork", "torch", size, [TRAIN, "--data=fashion-mnist", f"--data-dir={tmp_path}"])
    assert job.status != 0
    assert "lacks: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte" in job.output


def test_parity() -> None:
    argv = [str(ROOT / "benchmarks" / "parity.py"), "--steps=3", "--batch-size=2"]
    job = jobs.run(None, None, 1, argv, timeout=240)
    assert job.status == 0, job.output[-8000:]
    assert job.output.count("3 of 3") == 4


def test_weights_keep_wrong_labels_out() -> None:
    argv = [str(EXAMPLES / "trust.py"), "--epochs=5"]
    result = results("mpi", 3, argv, timeout=360)  # six trainings
    assert result["trust 0"] > 0.9
    assert result["trust 0.1"] > 0.9
    assert result["plain mean"] < 0.85


@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_weights_elsewhere(backend: str) -> None:
    """At two ranks other backends have the same bits."""
    argv = [str(EXAMPLES / "trust.py"), "--epochs=1"]
    assert results(backend, 2, argv) == results("mpi", 2, argv)


def test_trust_needs_two_ranks() -> None:
    job = jobs.run("fork", "torch", 1, [str(EXAMPLES / "trust.py")])
    assert job.status != 0
    assert "two ranks or more" in job.output


def test_a_cell_of_the_demo_trains_with_every_policy() -> None:
    found = results("torch", 2, [str(EXAMPLES / "demo.py"), "--steps=10"])
    assert len(found) == 3
    assert found["mean"]["digest"] == results("torch", 2, [TRAIN, "--steps=10"])["digest"]


def test_the_demo_says_which_job_failed() -> None:
    """The demo reports digests that differ, and the excerpts of failed jobs' output are right."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import cells as starter

        from examples import demo
    finally:
        sys.path.remove(str(EXAMPLES))
    tried = doctest.testmod(starter)
    assert tried.attempted
    assert not tried.failed
    cells = {(launcher, backend, "mean"): {"digest": "a" * 64} for launcher, backend in jobs.CELLS}
    assert demo.differences(cells) == []
    cells[demo.PLAIN] = {"digest": "b" * 64}
    (problem,) = demo.differences(cells)
    assert problem.endswith("bbbbbbbbbbbb: torchrun x plain DDP")
