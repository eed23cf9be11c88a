"""The nine cells on two hosts: two namespaces joined by a bridge, each with a name and addresses of its own.

A stand-in for ssh enters them, for the launchers that start ranks by ssh.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jobs
import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "places.py")
SSH = """#!{python}
import os, sys
hosts = {hosts}
words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if word in hosts)
name, words = hosts[words[at]], words[at + 1:]
while words[0].startswith("-"):
    del words[:2]
command = f"hostname {{name}}; {{' '.join(words)}}"
os.execvp("ip", ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", command])
"""


@dataclass
class Hosts:
    """Two namespaces; ``path`` is the folder of the stand-in for ssh."""

    names: list[str]
    addresses: list[str]
    path: str


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two hosts need root and iproute2, to make network namespaces")
    tag = f"hb{os.getpid() % 100000}"
    names, addresses = [f"{tag}a", f"{tag}b"], ["10.231.77.1", "10.231.77.2"]
    bin_folder = tmp_path_factory.mktemp("bin")
    try:
        try:
            sh("ip", "link", "add", tag, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network bridge: {error.stderr.strip()}")
        sh("ip", "link", "set", tag, "up")
        for name, address in zip(names, addresses, strict=True):
            etc = Path("/etc/netns") / name  # `ip netns exec` lays it over /etc
            etc.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *map(" ".join, zip(addresses, names, strict=True))]
            (etc / "hosts").write_text("\n".join(lines) + "\n")
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", f"{name}0", "type", "veth", "peer", "name", "net0", "netns", name)
            sh("ip", "link", "set", f"{name}0", "master", tag, "up")
            sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "net0")
            for device in ("lo", "net0"):
                sh("ip", "-n", name, "link", "set", device, "up")
        ssh = bin_folder / "ssh"
        ssh.write_text(SSH.format(python=sys.executable, hosts=dict(zip(addresses, names, strict=True))))
        ssh.chmod(0o755)
        yield Hosts(names, addresses, str(bin_folder))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", tag], capture_output=True, check=False)


def command(launcher: str, hosts: Hosts, ranks_per_host: int, port: int) -> list[list[str]]:
    """What is typed, on each host."""
    a, b = hosts.addresses
    n, total = ranks_per_host, str(2 * ranks_per_host)
    if launcher == "torchrun":
        return [
            ["torchrun", "--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={n}",
             f"--master-addr={a}", f"--master-port={port}", SCRIPT]
            for node in range(2)
        ]  # fmt: skip
    if launcher == "horovodrun":
        return [["horovodrun", "-np", total, "-H", f"{a}:{n},{b}:{n}", sys.executable, SCRIPT]]
    return [["mpiexec", "-hosts", f"{a}:{n},{b}:{n}", "-n", total, sys.executable, SCRIPT]]


@pytest.mark.parametrize(("launcher", "backend"), jobs.CELLS)
def test_two_hosts(launcher: str, backend: str, hosts: Hosts, tmp_path: Path) -> None:
    env = jobs.environment(backend, JOB_RECORDS=str(tmp_path))
    env["UCX_TLS"] = "tcp,self"  # MPICH's UCX would find that both hosts are one kernel, and not use the network
    env["PATH"] = f"{hosts.path}{os.pathsep}{env['PATH']}"
    lines = command(launcher, hosts, 2, 29500)
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
    for rank in range(4):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen["rank"], seen["size"], seen["sum"]) == (rank, 4, 10)
        assert (seen["local_rank"], seen["local_size"]) == (rank % 2, 2)
        assert (seen["node_rank"], seen["num_nodes"]) == (rank // 2, 2)
        assert (seen["backend"], seen["launcher"]) == (backend, launcher)
