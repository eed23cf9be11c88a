"""How much of the communication backward hides, on a link so slow that both take equally long.

    sudo python benchmarks/overlap.py            # needs the right to make network namespaces (Linux, iproute2)

Two hosts are two network namespaces, joined by a link that is shaped to carry the gradients in the time of one
backward. Compared in one run, in turn: serial (backward under ``no_sync``, then ``hb.average_gradients``) and
overlapped (a plain synchronized backward). Backends that spin while they wait compete with backward for a core.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hvdbridge as hb

HOSTS = ("hvdbridge-a", "hvdbridge-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
LAYERS, WIDTH, ROWS, STEPS = 16, 512, 3072, 6


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces with one link; gone afterwards."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "hvdb0", "netns", HOSTS[0], "type", "veth", "peer", "name", "hvdb1", "netns", HOSTS[1])
        for i, host in enumerate(HOSTS):
            table = Path("/etc/netns", host, "hosts")  # what a command in the namespace sees as /etc/hosts
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text(f"{ADDRESSES[i]} {socket.gethostname()}\n")
            ip("-n", host, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"hvdb{i}")
            ip("-n", host, "link", "set", f"hvdb{i}", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)


def shape(bits_per_second: float) -> None:
    """Let both directions carry that much."""
    for i, host in enumerate(HOSTS):
        rule = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", "256kb", "latency", "200ms"]
        words = ["tc", "-n", host, "qdisc", "replace", "dev", f"hvdb{i}", "root", *rule]
        subprocess.run(words, check=True, capture_output=True)


def job(backend: str) -> dict[str, float]:
    """Two ranks, one per host; the first measures and shapes the link."""
    ranks = []
    for i, host in enumerate(HOSTS):
        env = os.environ | {
            "RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29777",
            "HVDBRIDGE_BACKEND": backend, "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self",  # MPICH would find that both hosts are one kernel, and not use the link
        }  # fmt: skip
        command = ["ip", "netns", "exec", host, sys.executable, __file__, "rank"]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    output = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{backend}: a rank failed")
    return json.loads(output[0].splitlines()[-1])  # type: ignore[no-any-return]


def rank() -> None:
    hb.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=1e-4), bucket_mb=1.0)
    x = torch.randn(ROWS, WIDTH)

    def backward() -> None:
        sync.optimizer.zero_grad()
        sync.model(x).square().mean().backward()

    def timed(what: object) -> float:
        hb.barrier()
        started = time.perf_counter()
        what()  # type: ignore[operator]
        return time.perf_counter() - started

    def local() -> None:
        with sync.no_sync():
            backward()

    def serial() -> None:
        local()
        hb.average_gradients(model)

    for _ in range(3):
        backward()
    forward = statistics.median(timed(lambda: model(x)) for _ in range(5))
    compute = statistics.median(timed(local) for _ in range(5))
    size = sum(p.numel() * 4 for p in model.parameters())
    if hb.rank() == 0:
        shape(size * 8 / (compute - forward) * 1.04)  # 4 %: headers
    hb.barrier()
    times: dict[str, list[float]] = {"serial": [], "overlapped": []}
    for step in range(STEPS):
        for name, way in (("serial", serial), ("overlapped", backward))[:: 1 if step % 2 else -1]:
            times[name].append(timed(way))
    wire = statistics.median(timed(lambda: hb.average_gradients(model)) for _ in range(5))
    if hb.rank() == 0:
        found = {name: statistics.median(values) for name, values in times.items()}
        ratios = [b / a for a, b in zip(times["serial"], times["overlapped"], strict=True)]
        print(json.dumps(found | {"forward": forward, "backward": compute - forward, "communication": wire,
                                  "ratio": statistics.median(ratios)}), flush=True)  # fmt: skip
    sync.close()
    hb.shutdown()


def main() -> None:
    if os.geteuid() != 0:
        raise SystemExit("benchmarks/overlap.py makes network namespaces: run it as root")
    table = Table("backend", "forward ms", "backward ms", "communication ms", "serial ms", "overlapped ms", "ratio")
    for backend in sys.argv[1:] or ("torch", "horovod", "mpi"):
        with hosts():
            found = job(backend)
        columns = ("forward", "backward", "communication", "serial", "overlapped")
        table.add_row(backend, *(f"{found[c] * 1e3:.0f}" for c in columns), f"{found['ratio']:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
