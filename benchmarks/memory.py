"""Measure the peak memory of a rank under each policy, relative to training under plain DistributedDataParallel.

    python benchmarks/memory.py [--backend torch|horovod|mpi] [--layers 64] [--holes] [SPEC ...]

The figure is the resident memory (Linux) of rank 0 of two from the fourth step on, with one job per policy. The model
has linear layers of 4 MiB. The policy's state is subtracted, so that buckets and messages remain. Holes in glibc's heap
vary between jobs by more than that. Therefore blocks of 1 MiB and more get their own pages here, also with plain DDP.
With --holes glibc allocates them as usual.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import hvdbridge as hb

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from cells import NATIVE, JobFailed, run

POLICIES = [
    "mean", "mean:exact=true", "ef(bf16)", "int8", "topk", "powersgd:rank=4", "onebit", "dgc", "median:f=0",
    "clip(mean)", "clip(ef(bf16))", "geometric_median",
]  # fmt: skip
BEFORE, STEPS = 3, 6
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", metavar="SPEC", default=POLICIES)
    parser.add_argument("--backend", choices=sorted(NATIVE), default="torch")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--holes", action="store_true", help="count holes in the C library's heap, too")
    parser.add_argument("--rank", metavar="SPEC", help=argparse.SUPPRESS)
    parser.add_argument("--metrics", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        measure(args.rank, args.layers, args.metrics)
        return 0
    if args.holes:
        os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    else:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    console = Console()
    title = f"{4 * args.layers} MiB of gradients"
    table = Table("policy", "bucket MiB", "state MiB", "above plain DDP MiB", title=title)
    options = [f"--layers={args.layers}"]
    status = 0
    try:
        plain = run("torchrun", "torch", Path(__file__), ["--rank=plain", *options])
        for spec in args.policies:
            with console.status(spec):
                result = run(NATIVE[args.backend], args.backend, Path(__file__), [f"--rank={spec}", *options])
            above = result["peak"] - result["state"] - plain["peak"]
            table.add_row(spec, f"{result['bucket_mb']:g}", f"{result['state']:.0f}", f"{above:.0f}")
    except JobFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        status = 1
    console.print(table)
    return status


def measure(spec: str, layers: int, metrics: Path) -> None:
    """Train in a rank, and write the memory of rank 0 (MiB) to ``metrics``. The spec ``plain`` is torch's own DDP."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    hb.init()
    sync = None
    if spec == "plain":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        sync = hb.GradientSynchronizer(model, optimizer, policy=spec)
        model, optimizer = sync.model, sync.optimizer
    x = torch.randn(4, 1024)
    for step in range(BEFORE + STEPS):
        if step == BEFORE:
            hb.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
    result = {"peak": peak}
    if sync is not None:
        result |= {"state": sync.stats()["state_bytes"] / MIB, "bucket_mb": sync.bucket_mb}
    if hb.rank() == 0:
        metrics.write_text(json.dumps(result))
    hb.shutdown()


if __name__ == "__main__":
    sys.exit(main())
