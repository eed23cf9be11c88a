"""Real ranks whose flows run as graphs train to the same bits as ranks whose flows run as they are."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "cuda_graphs.py")
SPECS = [
    "mean", "int8:rounding=stochastic", "onebit", "topk:ratio=0.1", "dgc:ratio=0.1,warmup=3",
    "powersgd:rank=2,alternate=true", "sign:momentum=0.9", "warmup(mean(exact=true), int8, steps=9)",
    "clip(ef(bf16))", "delayed(int8)",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_with_graphs_gives_the_same_bits(ranks: int) -> None:
    specs = SPECS if ranks == 2 else SPECS[:3]
    job = jobs.run("fork", "torch", ranks, [SCRIPT, "--tape", "--only", *specs], timeout=240)
    assert job.status == 0, job.output
    rows = [json.loads(line) for line in job.output.splitlines() if line.startswith("{")]
    assert [row["policy"] for row in rows] == [f"{spec} {weighted}" for spec in specs for weighted in (False, True)]
    assert {row["verdict"] for row in rows} == {"ok"}, rows
