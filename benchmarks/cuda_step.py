"""Measure the time that a policy adds to a step on one GPU (NCCL, one rank), and that of torch's own DDP hooks.

    python benchmarks/cuda_step.py [--model gpt2|small] [--batch 4 --length 512] [--only mean,fp16,...] [--bucket-mb 25]

The model has GPT-2-small's shape (124 M parameters, 496 MB of gradients) and runs under bf16 autocast. With --batch 4
--length 512 the host limits a step, with --batch 16 --length 1024 the GPU. Steps of each way alternate with those of
plain DDP. The output is one JSON line per way: median step in milliseconds, that of plain DDP, the median difference,
the peak of the device's memory, and launches and operations of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import hvdbridge as hb
from hvdbridge.backends.torch.communicator import TorchCommunicator

POLICIES = {
    "mean": "mean", "fp16": "fp16", "bf16": "bf16", "int8": "int8", "onebit": "onebit", "topk": "topk:ratio=0.01",
    "powersgd": "powersgd:rank=4",
}  # fmt: skip
WARM_UP = 12
"""Steps before the first that is timed: DDP times its own first ten, and graphs are compared in the first six."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks, self.norm = nn.Sequential(*[Block(width, 12) for _ in range(layers)]), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


@dataclass
class Way:
    """A model and its optimizer, wrapped in one of the compared ways, with functions for batch and loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Run one training step and return its milliseconds."""
        x = self.batch()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.model(x)
        self.loss(y.float(), x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)


def build(args: argparse.Namespace, device: torch.device) -> Way:
    torch.manual_seed(0)
    if args.model == "small":
        layers = [layer for _ in range(150) for layer in (nn.Linear(64, 64), nn.ReLU())]
        model: nn.Module = nn.Sequential(*layers).to(device)
        batch, loss = (lambda: torch.randn(64, 64, device=device)), (lambda y, _: y.square().mean())
    else:
        model = Gpt().to(device)
        batch = lambda: torch.randint(0, 50257, (args.batch, args.length), device=device)  # noqa: E731
        loss = lambda y, x: functional.cross_entropy(y.view(-1, y.shape[-1]), x.view(-1))  # noqa: E731
    return Way(model, torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True), batch, loss)


def synchronized(way: Way, policy: str, bucket_mb: float | None) -> Way:
    sync = hb.GradientSynchronizer(way.model, way.optimizer, policy=policy, bucket_mb=bucket_mb)
    return Way(sync.model, sync.optimizer, way.batch, way.loss, sync.close)


def ddp(way: Way, device: torch.device, hook: tuple[Any, Any] | None = None) -> Way:
    wrapped = DistributedDataParallel(way.model, device_ids=[device.index or 0], gradient_as_bucket_view=True)
    if hook is not None:
        wrapped.register_comm_hook(*hook)
    return Way(wrapped, way.optimizer, way.batch, way.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt2", "small"], default="gpt2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", default="", help="ways, by commas (default: all)")
    parser.add_argument("--bucket-mb", type=float)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    TorchCommunicator.always_communicate = True  # NCCL runs its kernels for one rank, too
    with hb.session("torch", rank=0, size=1):
        device = hb.device()
        power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        )
        ways: dict[str, Callable[[], Way]] = {
            "torch fp16 hook": lambda: ddp(build(args, device), device, (None, default_hooks.fp16_compress_hook)),
            "torch PowerSGD hook": lambda: ddp(build(args, device), device, (power, powerSGD_hook.powerSGD_hook)),
            **{
                name: lambda policy=policy: synchronized(build(args, device), policy, args.bucket_mb)  # type: ignore[misc]
                for name, policy in POLICIES.items()
            },
        }
        chosen = args.only.split(",") if args.only else list(ways)
        base = ddp(build(args, device), device)
        for _ in range(WARM_UP):
            base.step()
        for name in chosen:
            before = torch.cuda.memory_allocated()
            way = ways[name]()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(WARM_UP):
                way.step()
            pairs = [(way.step(), base.step()) for _ in range(args.steps)]
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                way.step()
            events = [event.name for event in profiled.events()]
            print(json.dumps({
                "way": name, "bucket_mb": args.bucket_mb,
                "ms": round(statistics.median(own for own, _ in pairs), 2),
                "ddp_ms": round(statistics.median(plain for _, plain in pairs), 2),
                "difference_ms": round(statistics.median(own - plain for own, plain in pairs), 2),
                "peak_mb": round((torch.cuda.max_memory_allocated() - before) / 2**20),
                "launches": sum("aunchKernel" in event for event in events),
                "graph_launches": sum("GraphLaunch" in event for event in events),
                "operations": sum(event.startswith("aten::") for event in events),
            }), flush=True)  # fmt: skip
            way.close()
            del way
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
