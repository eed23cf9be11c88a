"""benchmarks/convergence.py: its table covers every policy, its runs are kept, its page is what the runs say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import hvdbridge as hb
from hvdbridge import policies

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "convergence.py"


@pytest.fixture(scope="module")
def convergence():
    spec = importlib.util.spec_from_file_location("convergence", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["convergence"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules["convergence"]


def used(policy):
    yield policies.name_of(type(policy))
    for inner in policy.inners().values():
        yield from used(inner)


def test_every_policy_has_a_row(convergence):
    rows = [policies.from_spec(row.policy()) for row in convergence.ROWS]
    assert rows[0] == policies.from_spec("mean")
    assert set(policies.BUILT_IN) <= {name for policy in rows for name in used(policy)}
    assert len({row.spec for row in convergence.ROWS}) == len(rows)
    assert all(row.use for row in convergence.ROWS)


def test_simulated_ranks_are_what_one_process_computes(convergence):
    """Four ranks of 8 samples under mean: the loss of one rank on the same 32, to rounding."""
    torch = convergence.torch
    task, row, steps = convergence.TASKS["text"], convergence.Row("mean", ""), 3
    result = convergence.simulate(row, task, seed=1, steps=steps)
    assert result["equal"]
    args = convergence.train.arguments(task.options(row, 1, steps))
    samples, _ = convergence.data.load("text")
    net, optimizer = convergence.train.build(args, samples, torch.device("cpu"))
    for step, parts in zip(range(steps), convergence.batches(args, len(samples.labels)), strict=False):
        indices = [index for part in parts for index in part]
        convergence.train.set_learning_rate(optimizer, args.lr, step / steps)
        optimizer.zero_grad()
        loss = convergence.F.cross_entropy(net(samples.characters[indices]), samples.labels[indices])
        loss.backward()
        optimizer.step()
        assert sum(result["losses"][step]) / 4 == pytest.approx(loss.item(), rel=1e-4)
    numel = sum(p.numel() for p in net.parameters())
    # A ring among four sends 2 * 3/4 of each float32.
    assert result["bytes"] == [(step + 1) * 6 * numel for step in range(steps)]


def test_runs_are_kept_and_resumed(convergence, tmp_path, monkeypatch):
    calls = []

    def simulate(row, task, seed, steps):
        calls.append((row.spec, task.data, seed))
        if row.spec == "bf16" and not failures:
            raise hb.errors.ConfigurationError("impossible\nhere")
        return {"loss": 1.0, "accuracy": 0.5, "state": 0.0, "losses": [[1.0] * 4] * 50,
                "bytes": [100 * (step + 1) for step in range(50)],
                "outside": [50 * (step + 1) for step in range(50)], "equal": True}  # fmt: skip

    failures: list[str] = []
    monkeypatch.setattr(convergence, "simulate", simulate)
    rows, lengths = [convergence.Row("mean", "x"), convergence.Row("bf16", "x")], {"text": 50, "digits": 50}
    console = convergence.Console(quiet=True)
    path = tmp_path / "build" / "kept.json"
    convergence.train_all(rows, 2, lengths, convergence.Runs(path), console)
    found, problems = convergence.summarise(rows, 2, lengths, convergence.Runs(path))
    assert [one.row.spec for one in found] == ["mean"]
    assert problems == ["bf16: ConfigurationError: impossible"]

    failures.append("none")
    calls.clear()
    convergence.train_all(rows, 2, lengths, convergence.Runs(path), console)  # what failed, and nothing else
    assert sorted(calls) == [("bf16", task, seed) for task in ("digits", "text") for seed in (0, 1)]
    found, problems = convergence.summarise(rows, 2, lengths, convergence.Runs(path))
    assert not problems
    assert (found[1].ratio, found[1].wire, found[1].within) == (1.0, 1.0, True)

    kept = convergence.Runs(path)
    kept.forget(rows[1])
    assert {key for key in convergence.Runs(path).runs if '"bf16"' in key} == set()
    assert len(kept.runs) == 4


def test_the_page_says_what_the_table_may_not(convergence, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "PAGE", tmp_path / "convergence.md")
    monkeypatch.setattr(convergence, "PLOT", tmp_path / "images" / "convergence.svg")
    convergence.PAGE.write_text(f"before\n{convergence.BEGIN}\nstale lines\n{convergence.END}\nafter\n")
    row = convergence.Row

    def summary(row, ratio):
        return convergence.Summary(row, 0.5, 0.5, 4.0, 1.5 * ratio, 0.01, ratio, 0.1, 0.97, True)

    found = [
        summary(convergence.ROWS[0], 1.0), summary(row("fp16", "use", control=True), 1.01),
        summary(row("bf16", "use"), 1.03), summary(row("sum", "use", why="told"), 1.03),
    ]  # fmt: skip
    assert [fault.split(":")[0] for fault in convergence.faults(found)] == ["fp16", "bf16"]
    convergence.write(found, ["int8: failed"], 3, {"text": 10, "digits": 10})
    page = convergence.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "stale" not in page
    assert "| `sum` | – | 50 % | 4 | 1.545 ± 0.010 | 1.030 | no | 0.100 | 97.0% | use. Not within 2 %: told |" in page
    assert "- int8: failed" in page
    assert [convergence.share(x) for x in (1.0, 0.27, 0.0414, 0.0)] == ["100 %", "27 %", "4.1 %", "0 %"]
    picture = convergence.PLOT.read_text()
    table = convergence.charts.tables(page)["convergence"]
    assert convergence.charts.digest(table) in picture
    assert all(f"{one.row.spec}</text>" in picture for one in found)
    convergence.write(found, [], 3, {"text": 10, "digits": 10})  # its own output is no obstacle
    assert convergence.PAGE.read_text().count(convergence.BEGIN) == 1
