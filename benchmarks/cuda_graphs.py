"""Train with flows as CUDA graphs and without, and compare the parameters and the bytes that were sent.

    python benchmarks/cuda_graphs.py [--only SPEC ...] [--steps 26]     # one rank, whose collectives are really called
    torchrun --nproc-per-node 2 benchmarks/cuda_graphs.py               # any number of ranks
    PYTHONPATH=tests python benchmarks/cuda_graphs.py --tape            # on CPUs, with a stand-in for CUDA graphs

Each policy meets what a script may do between two steps: accumulation, a new loss scale, gradients that are not finite,
weights that add up to zero, a saved state that is loaded again, ranks that run out of data, and a second synchronizer.
Up to two ranks the bits must be equal. NCCL may sum more terms in another order; the relative error counts then.
Rank 0 prints one JSON line per policy, with the number of graphs and the verdict. Exit status 1: a verdict is WRONG.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hvdbridge as hb
from hvdbridge.backends.torch.communicator import TorchCommunicator

SPECS = [
    "mean", "mean:exact=true", "sum", "fp16", "bf16", "ef(bf16)", "int8", "int8:rounding=stochastic", "int4", "fp8",
    "natural", "qsgd", "terngrad", "onebit", "efsign", "sign:momentum=0.9", "topk:ratio=0.1",
    "topk:ratio=0.1,select=exact", "randomk:ratio=0.1", "dgc:ratio=0.1,warmup=3", "powersgd:rank=2",
    "powersgd:rank=2,alternate=true",
    "warmup(mean(exact=true), int8, steps=9)", "clip(ef(bf16))", "partition(1d=mean, rest=powersgd(rank=2))",
    "delayed(int8)",
]  # fmt: skip
NO_GRAPHS = ("mean False", "delayed(int8) False", "delayed(int8) True")
"""DDP aggregates the plain mean itself; a graph has no rest that runs later."""
STEPS = 26
MAX_ERROR = 1e-2
"""Relative error of parameters from which more than two ranks differ: a wrong graph differs by about 1e-1."""


def net(seed: int, device: str) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)


def batch(step: int, device: str) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + hb.rank())).to(device)


def train(spec: str, weighted: bool, steps: int, device: str) -> dict[str, Any]:
    """Return the parameters after training, the bytes of the last step, and the largest number of graphs."""
    models = [net(1, device), net(2, device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    options: dict[str, Any] = {"policy": spec, "weighted": weighted, "bucket_mb": 0.01}
    sync, other = (hb.GradientSynchronizer(m, o, **options) for m, o in zip(models, optimizers, strict=True))
    saved = sync.state_dict()
    captured = 0
    for step in range(steps):
        for one in (sync, other):
            if weighted:
                one.weight = 0.0 if step == 17 else 1.0 + (step * hb.rank()) % 3
            scale = 2.0 if one is sync and step in (11, 12) else 1.0
            if one is sync:
                sync.loss_scale = scale
            one.optimizer.zero_grad()
            if step == 13:
                with one.no_sync():
                    one.model(batch(1000, device)).square().mean().backward()
            loss = one.model(batch(step, device)).square().mean() * scale
            if step == 15 and hb.rank() == hb.size() - 1:
                loss = loss * float("nan")
            loss.backward()
            if step not in (11, 12, 15, 16):  # in step 16 a policy may deliver what it held back in step 15
                one.optimizer.step()
        if step == 19:
            saved = sync.state_dict()
        if step == 21:
            sync.load_state_dict(saved)
        if sync._context.graphs is not None:
            captured = max(captured, sync._context.graphs.captured)
            assert other._context.graphs is None, "one synchronizer at a time has graphs"
    with sync.join():
        for step in range(2 + 5 * hb.rank()):
            sync.optimizer.zero_grad()
            sync.model(batch(50 + step, device)).square().mean().backward()
            sync.optimizer.step()
    parameters = torch.cat([p.detach().reshape(-1).cpu() for model in models for p in model.parameters()])
    reason = sync._context.graphs and sync._context.graphs.off
    sent = sync.stats()["bytes_sent"]
    sync.close()
    other.close()
    return {"parameters": parameters, "bytes_sent": sent, "graphs": captured, "off": reason}


def verdict(name: str, plain: dict[str, Any], graphs: dict[str, Any], size: int) -> dict[str, Any]:
    """Compare the results of training without graphs and with them."""
    a, b = plain["parameters"], graphs["parameters"]
    error = float((a - b).double().norm() / a.double().norm())
    same = torch.equal(a, b) if size <= 2 else error < MAX_ERROR
    right = same and plain["bytes_sent"] == graphs["bytes_sent"] and plain["graphs"] == 0
    missing = (graphs["graphs"] == 0) != (name in NO_GRAPHS)
    text = "WRONG" if not right else "no graphs" if missing else "ok"
    return {"policy": name, "verdict": text, "graphs": graphs["graphs"], "off": graphs["off"], "error": error}


def rows(specs: Sequence[str], steps: int, device: str) -> list[dict[str, Any]]:
    """Train with each policy, first without graphs and then with them, in two sessions; return the verdicts."""
    TorchCommunicator.always_communicate = True
    results: dict[str, dict[str, dict[str, Any]]] = {}
    size = 1
    for graphs in ("off", "auto"):
        os.environ["HVDBRIDGE_GRAPHS"] = graphs
        with hb.session("torch"):
            size = hb.size()
            on = "cpu" if device == "cpu" else str(hb.device())
            for spec in specs:
                for weighted in (False, True):
                    results.setdefault(f"{spec} {weighted}", {})[graphs] = train(spec, weighted, steps, on)
    return [verdict(name, of["off"], of["auto"], size) for name, of in results.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tape", action="store_true", help="CPU tensors and the stand-in of tests/tape.py")
    arguments = parser.parse_args(argv)
    if arguments.tape:
        tape = importlib.import_module("tape")
        tape.as_on_a_device()
        tape.install()
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("benchmarks/cuda_graphs.py: torch sees no GPU here; --tape runs without one.", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    found = rows(arguments.only, arguments.steps, "cpu" if arguments.tape else "cuda")
    for row in found:
        if rank == 0 or row["verdict"] == "WRONG":
            print(json.dumps({"rank": rank} | row), flush=True)
    return int(any(row["verdict"] == "WRONG" for row in found))


if __name__ == "__main__":
    sys.exit(main())
