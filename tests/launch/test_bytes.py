"""A link carries the predicted bytes, as the interfaces' counters of two simulated hosts show."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from launch.test_hosts import hosts  # noqa: F401  (a fixture)

from benchmarks.hosts import Hosts

SCRIPT = str(Path(__file__).parent / "scripts" / "traffic.py")
SPECS = ["mean", "int8", "topk:ratio=0.01", "powersgd:rank=4", "onebit"]
HEADERS = 66 / 1448
"""Headers of Ethernet, IP and TCP with time stamps, relative to the payload of a packet of 1500 bytes. Segments that a
device would split count as one here, with fewer headers."""
ANSWERS = 66 / 2896
"""Acknowledgements: one for two packets of the other side, which sends as much."""
STEADY = 8_000
"""Bytes per step of barriers, message handshakes and the helper's heartbeats."""


@pytest.fixture(scope="module", params=["torch", "mpi"])
def job(request: pytest.FixtureRequest, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:  # noqa: F811
    backend, out = request.param, tmp_path_factory.mktemp("records")
    env = jobs.environment(backend, JOB_RECORDS=str(out))
    lines = hosts.commands(jobs.NATIVE[backend], 1, [SCRIPT, "net0", *SPECS])
    statuses, output = hosts.run(lines, env, timeout=60)
    assert not any(statuses), output[-8000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_link_carries_what_was_predicted(spec: str, job: list[dict]) -> None:
    for record in job:
        sent, predicted = record[spec]["sent"], record[spec]["predicted"]
        assert abs(record[spec]["counted"] - predicted) <= 0.01 * predicted  # DDP cuts buckets a little differently
        assert 0.95 * predicted <= sent <= predicted * (1.05 + HEADERS + ANSWERS) + STEADY, record[spec]
