"""Real ranks whose flows run as graphs train to the same bits as ranks whose flows run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "graphs.py")
NO_GRAPHS = ("mean False", "delayed(int8) False", "delayed(int8) True")
"""DDP aggregates the plain mean itself; a graph has no rest that runs later."""


def train(*arguments: str, graphs: str = "auto") -> list[dict[str, Any]]:
    return jobs.run("fork", "torch", 2, [SCRIPT, *arguments], 240.0, {"HVDBRIDGE_GRAPHS": graphs}).check().records


def test_training_with_graphs_gives_the_same_bits() -> None:
    records, expected = train("--tape"), train(graphs="off")
    for rank in range(2):
        assert records[rank].keys() == expected[rank].keys()
        for name, (digest, sent, captured) in records[rank].items():
            assert [digest, sent, 0] == expected[rank][name], name
            assert (captured == 0) == (name in NO_GRAPHS), name
