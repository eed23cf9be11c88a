"""Hosts of one's own: network namespaces on a bridge, each with a name, an address and a link that can be made slow.

    with hosts(2, mbits=100, delay_ms=1) as made:
        made.run(made.commands("torchrun", 1, ["train.py"]), env)

A stand-in for ssh enters them, for the launchers that start ranks by ssh. They are gone afterwards, after Ctrl-C and
SIGTERM, too.
"""

from __future__ import annotations

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


class NoHosts(RuntimeError):
    """This machine makes no namespaces; the message says what it lacks."""


@dataclass(frozen=True)
class Hosts:
    """Namespaces that exist; ``folder`` has the stand-in for ssh."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path

    def commands(self, launcher: str, ranks_per_host: int, words: Sequence[str], port: int = 29500) -> list[list[str]]:
        """What is typed, on the first hosts: one line per host for torchrun, one in all for the others."""
        total = str(ranks_per_host * len(self.names))
        places = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses)
        if launcher == "torchrun":
            return [
                ["torchrun", f"--nnodes={len(self.names)}", f"--node-rank={node}", f"--nproc-per-node={ranks_per_host}",
                 f"--master-addr={self.addresses[0]}", f"--master-port={port}", *words]
                for node in range(len(self.names))
            ]  # fmt: skip
        if launcher == "horovodrun":
            return [["horovodrun", "-np", total, "-H", places, str(BIN / "python"), *words]]
        return [["mpiexec", "-hosts", places, "-n", total, str(BIN / "python"), *words]]

    def run(
        self, lines: Sequence[Sequence[str]], env: Mapping[str, str], timeout: float | None = None, quiet: bool = True
    ) -> tuple[list[int], str]:
        """Type each line on its host; their exit statuses, and their output (``quiet``) or none."""
        path = f"{self.folder}{os.pathsep}{BIN}{os.pathsep}{env.get('PATH', os.defpath)}"
        # MPICH's UCX would find that all hosts are one kernel, and not use the network
        inside = {"UCX_TLS": "tcp,self", **env, "PATH": path}
        out = subprocess.PIPE if quiet else None
        typed = [
            subprocess.Popen(
                [str(self.folder / "ssh"), address, shlex.join(line)],
                env=inside, stdin=subprocess.DEVNULL, stdout=out, stderr=out and subprocess.STDOUT, text=True,
            )
            for address, line in zip(self.addresses, lines, strict=False)
        ]  # fmt: skip
        output = ""
        try:
            for process in typed:
                output += process.communicate(timeout=timeout)[0] or ""
        except KeyboardInterrupt:  # the ranks have it, too, and leave what they have so far
            for process in typed:
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.communicate(timeout=LEAVE_SECONDS)
            raise
        finally:
            for process in typed:
                process.kill()
                process.communicate()
        return [process.returncode for process in typed], output

    def shape(self, mbits: float, delay_ms: float = 0.0) -> None:
        """Let every host send that many Mbit/s, each packet ``delay_ms`` later."""
        for name in self.names:
            if delay_ms:
                # netem keeps what is on its way: room for the rate times the delay, in packets, and twice over
                room = max(1000, round(4 * mbits * 1e6 / 8 / 1500 * delay_ms / 1e3))
                rule = ["netem", "delay", f"{delay_ms}ms", "rate", f"{mbits}mbit", "limit", str(room)]
            else:
                rule = ["tbf", "rate", f"{mbits}mbit", "burst", "256kb", "latency", "200ms"]
            sh("tc", "-n", name, "qdisc", "replace", "dev", "net0", "root", *rule)


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"this machine makes no such hosts: {shlex.join(words)}: {done.stderr.strip()}")


@contextmanager
def hosts(count: int, mbits: float | None = None, delay_ms: float = 0.0) -> Iterator[Hosts]:
    """``count`` hosts on one bridge.

    Raises:
        NoHosts: not root, no iproute2, or a kernel that makes no bridge, namespace or such links.
        ValueError: a number that cannot be.
    """
    if not (1 <= count <= 26 and (mbits is None or 0 < mbits < math.inf) and 0 <= delay_ms < math.inf):
        raise ValueError(f"{count} hosts (1 to 26), {mbits} Mbit/s (above 0), {delay_ms} ms (not below 0)")
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoHosts("hosts of one's own need root and iproute2 (ip, tc), to make network namespaces")
    tag = f"hb{os.getpid() % 100000}"
    names = tuple(f"{tag}{chr(ord('a') + i)}" for i in range(count))
    addresses = tuple(f"10.231.77.{i + 1}" for i in range(count))
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) if main else None
    folder = Path(tempfile.mkdtemp(prefix="hvdbridge-"))
    try:
        sh("ip", "link", "add", tag, "type", "bridge")
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
        ssh = folder / "ssh"
        ssh.write_text(SSH.format(python=sys.executable, hosts=dict(zip(addresses, names, strict=True))))
        ssh.chmod(0o755)
        made = Hosts(names, addresses, folder)
        if mbits is not None:
            made.shape(mbits, delay_ms)
        yield made
    finally:
        for name in names:
            _end_all_in(name)
            # by itself: the kernel takes its time over a namespace and what lies in it
            subprocess.run(["ip", "link", "delete", f"{name}0"], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", tag], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end_all_in(name: str) -> None:
    """End what still runs in a namespace: a launcher that was killed leaves its ranks."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
