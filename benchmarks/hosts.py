"""Simulated hosts: network namespaces on a bridge, each with a name, an address and a link that can be slowed down.

    with hosts(2, mbits=100, delay_ms=1) as cluster:
        cluster.run(cluster.commands("torchrun", 1, ["train.py"]), env)

Launchers that start ranks by ssh find a substitute for it, which enters the namespaces. Everything is removed at the
end of the block, also after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
LEAVE_SECONDS = 10.0
_made = itertools.count()
SSH = """#!{python}
import os, sys
hosts = {hosts}
words = sys.argv[1:]
at = next(i for i, word in enumerate(words) if word in hosts)
(space, name), words = hosts[words[at]], words[at + 1:]
while words[0].startswith("-"):
    del words[:2]
command = f"hostname {{name}}; {{' '.join(words)}}"
os.execvp("ip", ["ip", "netns", "exec", space, "unshare", "--uts", "bash", "-c", command])
"""


class NoHosts(RuntimeError):
    """This machine cannot create such hosts; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """The namespaces and IPv4 addresses of existing hosts; ``folder`` contains the substitute for ssh."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path

    def commands(self, launcher: str, ranks_per_host: int, script: Sequence[str], port: int = 29500) -> list[list[str]]:
        """Return the command of each host, from the first on: one per host for torchrun, else one in all."""
        total = str(ranks_per_host * len(self.names))
        host_slots = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses)
        if launcher == "torchrun":
            return [
                ["torchrun", f"--nnodes={len(self.names)}", f"--node-rank={node}", f"--nproc-per-node={ranks_per_host}",
                 f"--master-addr={self.addresses[0]}", f"--master-port={port}", *script]
                for node in range(len(self.names))
            ]  # fmt: skip
        if launcher == "horovodrun":
            return [["horovodrun", "-np", total, "-H", host_slots, str(BIN / "python"), *script]]
        return [["mpiexec", "-hosts", host_slots, "-n", total, str(BIN / "python"), *script]]

    def run(
        self, lines: Sequence[Sequence[str]], env: Mapping[str, str], timeout: float | None = None, quiet: bool = True
    ) -> tuple[list[int], str]:
        """Run each command on its host. Return the exit statuses, and the output if ``quiet`` (else "")."""
        path = f"{self.folder}{os.pathsep}{BIN}{os.pathsep}{env.get('PATH', os.defpath)}"
        # All hosts share one kernel. MPICH's UCX would detect that and bypass the network.
        host_env = {"UCX_TLS": "tcp,self", **env, "PATH": path}
        stdout = subprocess.PIPE if quiet else None
        processes = [
            subprocess.Popen(
                [str(self.folder / "ssh"), address, shlex.join(line)],
                env=host_env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout and subprocess.STDOUT, text=True,
            )
            for address, line in zip(self.addresses, lines, strict=False)
        ]  # fmt: skip
        output = ""
        try:
            for process in processes:
                output += process.communicate(timeout=timeout)[0] or ""
        except KeyboardInterrupt:  # ranks receive it, too, and need time to write results
            for process in processes:
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.communicate(timeout=LEAVE_SECONDS)
            raise
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [process.returncode for process in processes], output

    def shape(self, mbits: float, delay_ms: float = 0.0) -> None:
        """Limit the rate at which every host sends, and delay each packet by ``delay_ms``."""
        for name in self.names:
            if delay_ms:
                # netem queues delayed packets: the limit is four times rate times delay, in packets of 1500 bytes
                limit = max(1000, round(4 * mbits * 1e6 / 8 / 1500 * delay_ms / 1e3))
                rule = ["netem", "delay", f"{delay_ms}ms", "rate", f"{mbits}mbit", "limit", str(limit)]
            else:
                rule = ["tbf", "rate", f"{mbits}mbit", "burst", "256kb", "latency", "200ms"]
            sh("tc", "-n", name, "qdisc", "replace", "dev", "net0", "root", *rule)


def sh(*command: str) -> None:
    """Run a command; raises NoHosts if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise NoHosts(f"this machine makes no such hosts: {shlex.join(command)}: {result.stderr.strip()}")


@contextmanager
def hosts(
    count: int, mbits: float | None = None, delay_ms: float = 0.0, host_names: Sequence[str] = ()
) -> Iterator[Hosts]:
    """Create ``count`` hosts on one bridge; without ``mbits`` their links are not limited.

    Args:
        host_names: the names of the hosts, by default those of their namespaces.

    Raises:
        NoHosts: not root, no iproute2, or the kernel cannot create bridges, namespaces or such links.
        ValueError: a number is out of range.
    """
    if not (1 <= count <= 26 and (mbits is None or 0 < mbits < math.inf) and 0 <= delay_ms < math.inf):
        raise ValueError(f"{count} hosts (1 to 26), {mbits} Mbit/s (above 0), {delay_ms} ms (not below 0)")
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoHosts("hosts of one's own need root and iproute2 (ip, tc), to make network namespaces")
    tag = f"hb{os.getpid() % 100000}" + (f"x{number}" if (number := next(_made)) else "")
    names = tuple(f"{tag}{chr(ord('a') + i)}" for i in range(count))
    addresses = tuple(f"10.231.77.{i + 1}" for i in range(count))
    host_names = tuple(host_names) or names
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if in_main_thread else None
    folder = Path(tempfile.mkdtemp(prefix="hvdbridge-"))
    try:
        sh("ip", "link", "add", tag, "type", "bridge")
        sh("ip", "link", "set", tag, "up")
        for name, address in zip(names, addresses, strict=True):
            etc = Path("/etc/netns") / name  # `ip netns exec` mounts its files over those of /etc
            etc.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *map(" ".join, zip(addresses, host_names, strict=True))]
            (etc / "hosts").write_text("\n".join(lines) + "\n")
            sh("ip", "netns", "add", name)
            sh("ip", "link", "add", f"{name}0", "type", "veth", "peer", "name", "net0", "netns", name)
            sh("ip", "link", "set", f"{name}0", "master", tag, "up")
            sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "net0")
            for device in ("lo", "net0"):
                sh("ip", "-n", name, "link", "set", device, "up")
        ssh = folder / "ssh"
        both = tuple(zip(names, host_names, strict=True))
        known = dict(zip((*addresses, *host_names), both * 2, strict=True))
        ssh.write_text(SSH.format(python=sys.executable, hosts=known))
        ssh.chmod(0o755)
        cluster = Hosts(names, addresses, folder)
        if mbits is not None:
            cluster.shape(mbits, delay_ms)
        yield cluster
    finally:
        for name in names:
            _end_all_in(name)
            # The link is deleted first, because the kernel deletes the devices of a namespace late.
            subprocess.run(["ip", "link", "delete", f"{name}0"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", tag], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        if previous_handler is not None:
            signal.signal(signal.SIGTERM, previous_handler)


def _end_all_in(name: str) -> None:
    """Kill the processes that still run in a namespace: the ranks of a killed launcher survive it."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
