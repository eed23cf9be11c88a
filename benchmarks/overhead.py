"""What ``mean`` costs over the native way: paired steps in one run, native and ours in turn, medians and quartiles.

    python benchmarks/overhead.py                                  # all three backends, 2 ranks
    torchrun --nproc-per-node 2 benchmarks/overhead.py             # one backend, under its launcher
    horovodrun -np 2 python benchmarks/overhead.py
    mpiexec -n 2 python benchmarks/overhead.py

The native way is plain DistributedDataParallel, plain ``hvd.DistributedOptimizer``, and on MPI one flat Allreduce
after backward. Models: few large layers, and 300 small ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hvdbridge as hb
from hvdbridge.world import World

LAUNCH = {
    "torch": ["torchrun", "--nproc-per-node", "2", "--standalone"],
    "horovod": ["horovodrun", "-np", "2", sys.executable],
    "mpi": ["mpiexec", "-n", "2", sys.executable],
}


def large() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def small() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(150) for layer in (nn.Linear(64, 64), nn.Tanh())))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "large": (large, 1024, 32),
    "small": (small, 64, 256),
}


def native_torch(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Callable[[], None], Callable[[], None]]:
    return nn.parallel.DistributedDataParallel(model), optimizer.zero_grad, optimizer.step


def native_horovod(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Callable[[], None], Callable[[], None]]:
    import horovod.torch as hvd

    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, wrapped.zero_grad, wrapped.step


def native_mpi(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Callable[[], None], Callable[[], None]]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    params = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in params))

    def step() -> None:
        grads = [p.grad for p in params]
        torch.cat([g.view(-1) for g in grads], out=flat)
        flat.div_(comm.size)
        comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        pieces = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)])
        optimizer.step()

    return model, optimizer.zero_grad, step


NATIVE = {"torch": native_torch, "horovod": native_horovod, "mpi": native_mpi}


def measure(name: str, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each native step and of each of ours, in turn."""
    make, width, rows = MODELS[name]
    torch.manual_seed(0)
    theirs, mine = make(), make()
    mine.load_state_dict(theirs.state_dict())
    sync = hb.GradientSynchronizer(mine, torch.optim.SGD(mine.parameters(), lr=1e-4), policy="mean")
    ways = [
        NATIVE[hb.backend()](theirs, torch.optim.SGD(theirs.parameters(), lr=1e-4)),
        (sync.model, sync.optimizer.zero_grad, sync.optimizer.step),
    ]
    x = torch.randn(rows, width)
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 5):
        for i in (0, 1) if step % 2 else (1, 0):
            model, zero_grad, update = ways[i]
            hb.barrier()
            started = time.perf_counter()
            zero_grad()
            model(x).square().mean().backward()
            update()
            if step >= 5:  # buckets are rebuilt, caches are warm
                seconds[i].append(time.perf_counter() - started)
    sync.close()
    return seconds


def run_one(steps: int) -> None:
    hb.init()
    table = Table("backend", "model", "native ms", "hvdbridge ms", "ratio: median", "quartiles")
    for name in MODELS:
        native, ours = measure(name, steps)
        ratios = [b / a for a, b in zip(native, ours, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        table.add_row(
            hb.backend(), name, f"{statistics.median(native) * 1e3:.2f}", f"{statistics.median(ours) * 1e3:.2f}",
            f"{statistics.median(ours) / statistics.median(native):.3f}", f"{low:.2f} .. {high:.2f}",
        )  # fmt: skip
    if hb.rank() == 0:
        Console(width=100).print(table)
    hb.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if World.from_environment().launcher != "none":
        run_one(args.steps)
        return
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for backend, launch in LAUNCH.items():
        line = [*launch, __file__, "--steps", str(args.steps)]
        subprocess.run(line, env=env | {"HVDBRIDGE_BACKEND": backend}, check=True)


if __name__ == "__main__":
    main()
