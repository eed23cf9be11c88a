"""Measure how much communication overlaps with backward, on a link so slow that both take equally long.

    sudo "$(command -v python)" benchmarks/overlap.py

The script needs the right to create network namespaces (Linux, iproute2).

Two network namespaces simulate two hosts. Their link is limited such that it carries the gradients in the time of one
backward. One run alternates serial steps (backward under ``no_sync``, then ``hb.average_gradients``) and overlapped
ones (a synchronized backward). Backends that spin while they wait compete with backward for a core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from hosts import Hosts, NoHosts, hosts
from rich.console import Console
from rich.table import Table
from torch import nn

import hvdbridge as hb

LAYERS, WIDTH, ROWS, STEPS = 16, 512, 3072, 6


def job(backend: str) -> dict[str, float]:
    """Run two ranks, one per host, and return rank 0's medians in seconds. Rank 0 sets the rate of the link."""
    with hosts(2) as cluster:
        commands = []
        for i in range(2):
            env = {
                "RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": cluster.addresses[0], "MASTER_PORT": "29777",
                "HVDBRIDGE_BACKEND": backend, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            variables = [f"{name}={value}" for name, value in env.items()]
            commands.append(["env", *variables, sys.executable, os.path.abspath(__file__), "rank", *cluster.names])
        statuses, output = cluster.run(commands, os.environ, timeout=300)
    if any(statuses):
        raise SystemExit(f"{backend}: a rank failed\n{output}")
    line = next(line for line in output.splitlines() if line.startswith("{"))
    return json.loads(line)  # type: ignore[no-any-return]


def rank() -> None:
    hb.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=1e-4), bucket_mb=1.0)
    x = torch.randn(ROWS, WIDTH)

    def backward() -> None:
        sync.optimizer.zero_grad()
        sync.model(x).square().mean().backward()

    def timed(work: object) -> float:
        hb.barrier()
        started = time.perf_counter()
        work()  # type: ignore[operator]
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
        link = Hosts(tuple(sys.argv[2:]), (), Path())
        link.shape(size * 8 / (compute - forward) * 1.04 / 1e6)  # 4 % for packet headers
    hb.barrier()
    times: dict[str, list[float]] = {"serial": [], "overlapped": []}
    for step in range(STEPS):
        for name, work in (("serial", serial), ("overlapped", backward))[:: 1 if step % 2 else -1]:
            times[name].append(timed(work))
    communication = statistics.median(timed(lambda: hb.average_gradients(model)) for _ in range(5))
    if hb.rank() == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = [b / a for a, b in zip(times["serial"], times["overlapped"], strict=True)]
        print(json.dumps(medians | {"forward": forward, "backward": compute - forward, "communication": communication,
                                  "ratio": statistics.median(ratios)}), flush=True)  # fmt: skip
    sync.close()
    hb.shutdown()


def main() -> None:
    table = Table("backend", "forward ms", "backward ms", "communication ms", "serial ms", "overlapped ms", "ratio")
    for backend in sys.argv[1:] or ("torch", "horovod", "mpi"):
        try:
            result = job(backend)
        except NoHosts as error:
            raise SystemExit(f"benchmarks/overlap.py: {error}") from error
        columns = ("forward", "backward", "communication", "serial", "overlapped")
        table.add_row(backend, *(f"{result[c] * 1e3:.0f}" for c in columns), f"{result['ratio']:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    rank() if sys.argv[1:2] == ["rank"] else main()
