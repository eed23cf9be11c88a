"""Predicted bytes against what a link carried: two hosts that are network namespaces, by their interfaces' counters."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import jobs
import pytest
from launch import test_hosts
from launch.test_hosts import Hosts, hosts  # noqa: F401  (a fixture)

SCRIPT = str(Path(__file__).parent / "scripts" / "traffic.py")
SPECS = ["mean", "int8", "topk:ratio=0.01", "powersgd:rank=4", "onebit"]
HEADERS = 66 / 1448
"""Ethernet, IP and TCP with time stamps, by what a packet of 1500 bytes carries; segments that a device would cut
are counted whole here, with fewer headers."""
ANSWERS = 66 / 2896
"""An acknowledgement of at least every second packet that the other side sent, and it sent as much."""
STEADY = 8_000
"""Per step: barriers, handshakes of messages, the helper's signs of life."""


@pytest.fixture(scope="module", params=["torch", "mpi"])
def job(request: pytest.FixtureRequest, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:  # noqa: F811
    backend, out = request.param, tmp_path_factory.mktemp("records")
    env = jobs.environment(backend, JOB_RECORDS=str(out))
    env["UCX_TLS"] = "tcp,self"
    env["PATH"] = f"{hosts.path}{os.pathsep}{env['PATH']}"
    lines = test_hosts.command(jobs.NATIVE[backend], hosts, 1, 29511)
    lines = [
        [word for w in line for word in ([SCRIPT, "net0", *SPECS] if w == test_hosts.SCRIPT else [w])] for line in lines
    ]
    typed = [
        subprocess.Popen(
            [f"{hosts.path}/ssh", address, shlex.join(line)],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for address, line in zip(hosts.addresses, lines, strict=False)
    ]  # fmt: skip
    output = ""
    try:
        for process in typed:
            output += process.communicate(timeout=60)[0]
    finally:
        for process in typed:
            process.kill()
    assert all(process.returncode == 0 for process in typed), output[-8000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("spec", SPECS)
def test_a_link_carries_what_was_predicted(spec: str, job: list[dict]) -> None:
    for record in job:
        sent, predicted = record[spec]["sent"], record[spec]["predicted"]
        assert abs(record[spec]["counted"] - predicted) <= 0.01 * predicted  # DDP cuts buckets a little differently
        assert 0.95 * predicted <= sent <= predicted * (1.05 + HEADERS + ANSWERS) + STEADY, record[spec]
