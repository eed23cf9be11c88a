"""The nine cells work on two simulated hosts: namespaces on a bridge, each with its own name and addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

import benchmarks.hosts
from benchmarks.hosts import Hosts, NoHosts, sh
from benchmarks.hosts import hosts as make

SCRIPT = Path(__file__).parent / "scripts" / "places.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with make(2) as cluster, pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmarks.hosts, "BIN", jobs.forking())
            yield cluster
    except NoHosts as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("launcher", "backend"), jobs.CELLS)
def test_two_hosts(launcher: str, backend: str, hosts: Hosts, tmp_path: Path) -> None:
    """Each host has two ranks in the native cells, and one rank in the others."""
    per_host = 2 if launcher == jobs.NATIVE[backend] else 1
    env = jobs.environment(backend, JOB_RECORDS=str(tmp_path))
    statuses, output = hosts.run(hosts.commands(launcher, per_host, [str(SCRIPT), "buckets"]), env, timeout=60)
    assert not any(statuses), output[-8000:]
    size = 2 * per_host
    for rank in range(size):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen["rank"], seen["size"], seen["sum"]) == (rank, size, size * (size + 1) / 2)
        assert (seen["local_rank"], seen["local_size"]) == (rank % per_host, per_host)
        assert (seen["node_rank"], seen["num_nodes"]) == (rank // per_host, 2)
        assert (seen["backend"], seen["launcher"]) == (backend, launcher)
        assert seen["buckets"] == [[10, 2], [25, 2]], "smaller ones on a network, and a small first one"


def test_the_port_range_and_interface_that_were_asked_for(hosts: Hosts, tmp_path: Path) -> None:
    """MPI's own sockets follow the settings, too. A container bridge has the same address on both hosts."""
    for name in hosts.names:
        sh("ip", "-n", name, "link", "add", "docker0", "type", "bridge")
        sh("ip", "-n", name, "address", "add", "172.17.0.1/16", "dev", "docker0")
        sh("ip", "-n", name, "link", "set", "docker0", "up")
    script = str(SCRIPT.parent / "ports.py")
    env = jobs.environment("mpi", JOB_RECORDS=str(tmp_path), HVDBRIDGE_PORTS="25000-25019", HVDBRIDGE_IFACE="net0")
    statuses, output = hosts.run(hosts.commands("torchrun", 1, [script]), env, timeout=60)
    assert not any(statuses), output[-8000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    found = first["own"] + first["helper"] + second["own"]
    assert len(first["helper"]) == 2
    assert first["own"]
    assert all(25000 <= port < 25020 for port in found), found


def test_each_host_compares_its_own_port_range(hosts: Hosts, tmp_path: Path) -> None:
    """Gloo takes the kernel's ports, which only the first host sets to the range."""
    setting = "net.ipv4.ip_local_port_range"
    sh("ip", "netns", "exec", hosts.names[0], "sysctl", "-qw", f"{setting}=25000 25999")
    env = jobs.environment("torch", JOB_RECORDS=str(tmp_path), HVDBRIDGE_PORTS="25000-25999")
    statuses, output = hosts.run(hosts.commands("torchrun", 2, [str(SCRIPT)], port=25999), env, timeout=60)
    assert not any(statuses), output[-8000:]
    assert output.count("Gloo, below torch and Horovod, listens where the kernel of") == 1
    assert f"listens where the kernel of {hosts.names[1]} says" in output
    assert f"{setting}='25000 25999'" in output


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"count": 27}, {"count": 2, "mbits": 0.0}, {"count": 2, "delay_ms": -1.0}]
)
def test_hosts_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="hosts"), make(**wrong):  # type: ignore[arg-type]
        pass
