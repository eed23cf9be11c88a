"""benchmarks/known_models.py: the models are the known ones, runs are stored and resumed, the table shows them."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "known_models.py"


@pytest.fixture(scope="module")
def known():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch is older than torch.optim.Muon, which the benchmark compares")
    before, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("known_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["known_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name in ("known_models", "convergence"):
            del sys.modules[name]


@pytest.fixture
def tiny(known, tmp_path, monkeypatch):
    """Both tasks with the smallest models, and images made here."""
    names = known.data.FASHION_MNIST
    for images, labels in names.values():
        rng = np.random.RandomState(0)
        classes = np.arange(200) % 10
        pixels = rng.randint(0, 60, (200, 28, 28)) + 19 * classes[:, None, None]  # brighter from class to class
        known.data.write_idx(tmp_path / images, pixels)
        known.data.write_idx(tmp_path / labels, classes)
    gpt = dataclasses.replace(
        known.TASKS["gpt"], model={"length": 16, "width": 32, "layers": 1, "heads": 2}, steps=20, test=8
    )
    resnet = dataclasses.replace(known.TASKS["resnet"], batch_size=4, steps=20, test=50)
    known.load.cache_clear()
    threads = torch.get_num_threads()
    monkeypatch.setattr(known, "TASKS", {"gpt": gpt, "resnet": resnet})
    monkeypatch.setattr(known, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    yield gpt, resnet
    torch.set_num_threads(threads)
    known.load.cache_clear()


def test_the_models_are_those_of_the_papers(known):
    def size(net):
        return sum(p.numel() for p in net.parameters())

    # He 2016, table 6: 0.27 million parameters for 20 layers, with three input channels (288 weights more)
    assert round((size(known.ResNet(3)) + 288) / 1e6, 2) == 0.27
    layers, width = 4, 192
    block = 12 * width**2 + 13 * width  # GPT-2's block: weights, biases and two norms
    assert size(known.model_of(known.TASKS["gpt"])) == layers * block + (256 + 128) * width + 2 * width

    net = known.GPT(16, 32, 2, 2)
    early, late = torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)
    late[0, 8:] = 7
    assert torch.equal(net(early)[..., :8], net(late)[..., :8])  # a byte sees no later one
    assert not torch.equal(net(early)[..., 8:], net(late)[..., 8:])


def test_muon_takes_the_matrices_of_hidden_layers(known):
    for task, hidden, total in (("gpt", 16, 52), ("resnet", 7, 23)):
        parameters = dict(known.model_of(known.TASKS[task]).named_parameters())
        muon, adamw = known.optimizers("muon", parameters, 0.01)
        assert (type(muon).__name__, type(adamw).__name__) == ("Muon", "AdamW")
        counts = [sum(len(group["params"]) for group in o.param_groups) for o in (muon, adamw)]
        assert counts == [hidden, total - hidden] == [hidden, len(parameters) - hidden]
        assert [len(known.optimizers(name, parameters, 0.01)) for name in ("sgd", "adamw")] == [1, 1]


def test_files_are_either_trained_on_or_held_out(known):
    train_set, test = known.library_source(128)
    assert torch.equal(train_set.characters[0, 1:], train_set.labels[0, :-1])
    trained_on, held_out = (part.characters.to(torch.uint8).numpy().tobytes() for part in (train_set, test))
    assert 0.02 < len(held_out) / len(trained_on) < 0.3
    for line in (b"class ArgumentParser(", b"class TextWrapper:", b"class Thread:", b"class Fraction("):
        assert (line in trained_on) != (line in held_out)


def test_training_learns_under_each_kind_of_policy(known, tiny, tmp_path):
    _, resnet = tiny
    for optimizer, row in zip(("sgd", "adamw", "muon"), known.ROWS[2:], strict=True):
        result = known.execute(known.Run(resnet, optimizer, row, 0.02, 0), tmp_path)
        assert result["equal"]
        assert result["loss"] < math.log(10) - 0.1


def test_runs_are_stored_and_resumed_and_compared_in_pairs(known, tiny, tmp_path, monkeypatch):
    gpt, _ = tiny
    rows = [known.ROWS[0], known.Row("topk:ratio=0.01,ef=false", "", optimizer="adamw", control=True)]
    monkeypatch.setattr(known, "ROWS", rows[:1])
    monkeypatch.setattr(known, "MORE", rows[1:])
    path = tmp_path / "results" / "known.json"
    wanted = list(known.all_runs([gpt]))
    assert len(wanted) == 3 * 3 + 3
    assert known.execute_all(wanted[:-1], known.Store(path), 1, tmp_path) == []
    store = known.Store(path)
    assert "1 runs are not stored yet" in list(known.faults([gpt], store))
    assert "2 of 3 seeds" in known.text([gpt], store)

    executed = []

    def execute(run, directory):
        executed.append(run.key)
        return {**store.result(wanted[-2]), "loss": 6.0}

    monkeypatch.setattr(known, "execute", execute)
    assert known.execute_all(wanted, store, 1, tmp_path) == []
    assert executed == [wanted[-1].key]  # what was missing, and nothing else
    (control,) = (line for line in known.lines(gpt, known.Store(path)) if line.row.control)
    baselines = [store.result(run)["loss"] for run in wanted if run.optimizer == "adamw" and run.row == rows[0]]
    assert control.losses[-1] == 6.0
    assert control.differences == [loss - mean for loss, mean in zip(control.losses, baselines, strict=True)]
    assert 0 < control.share < 0.1

    longer = dataclasses.replace(gpt, steps=30)
    with pytest.raises(ValueError, match=r"differ in steps\. Run with --again gpt"):
        known.execute_all(known.all_runs([longer]), store, 1, tmp_path)
    store.forget_task(gpt)
    assert known.Store(path).runs == {}


def test_a_failed_run_is_reported_and_repeated(known, tiny, tmp_path, monkeypatch):
    gpt, _ = tiny

    def execute(run, directory):
        raise RuntimeError("not today")

    monkeypatch.setattr(known, "execute", execute)
    store = known.Store(tmp_path / "known.json")
    run = next(known.all_runs([gpt]))
    assert known.execute_all([run], store, 1, tmp_path) == [f"{run.key}: RuntimeError: not today"]
    assert store.result(run) is None


def test_intervals_and_verdicts(known):
    found = doctest.testmod(known)
    assert (found.failed, found.attempted) == (0, 3)
    assert known.interval([0.1])[1] == math.inf
    assert known.verdict(0.1, math.inf, 2.0) == "undecided"


def test_the_page_gets_the_table(known, tmp_path):
    page = tmp_path / "convergence.md"
    page.write_text(f"before\n{known.BEGIN}\nstale\n{known.END}\nafter\n")
    known.write(page, "| a |\n")
    assert page.read_text() == f"before\n{known.BEGIN}\n\n| a |\n\n{known.END}\nafter\n"


def test_a_control_that_wins_and_unequal_ranks_are_faults(known, tmp_path):
    task, store = known.TASKS["gpt"], known.Store(tmp_path / "known.json")
    control = known.Row("int8", "", optimizer="sgd", control=True)
    for seed in range(3):
        (run,) = known.runs_of(task, control, seed)
        done = {"accuracy": 0.5, "per_step": 10, "bytes": 100, "equal": seed < 2}
        store.runs[run.key] = {"loss": 1.0 + seed, **done}
        store.runs[run.baseline().key] = {"loss": 1.01 + seed, **done}
    known_more = known.MORE
    try:
        known.MORE = [control]
        found = list(known.faults([task], store))
    finally:
        known.MORE = known_more
    assert "gpt: the control int8 must be worse than mean" in found
    assert "gpt: updates of int8 are not equal on all ranks" in found
