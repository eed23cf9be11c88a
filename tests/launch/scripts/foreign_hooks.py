"""Every hook that torch ships, in small buckets through the bridge; with ``plain``: under DDP itself, in one bucket."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jobs import record
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)

PLAIN = "plain" in sys.argv
STEPS = 6
POWER = powerSGD_hook

if PLAIN:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
else:
    import hvdbridge as hb

    hb.init()
    RANK, SIZE = hb.rank(), hb.size()


def own_group() -> Any:
    """A group of this rank alone, from whoever is there to make it."""
    if PLAIN:
        return [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    return [hb.new_group([rank]) for rank in range(SIZE)][RANK]


def power(**options: Any) -> PowerSGDState:
    defaults = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    return PowerSGDState(None, **(defaults | options))


def halves(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own types
    """A user's own: two rounds, of which the second begins in a callback, and all that a bucket offers."""
    state["steps"] += bucket.is_last()
    state["parameters"].update(id(p) for p in bucket.parameters())
    assert len(bucket.gradients()) == len(bucket.parameters())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    flat = bucket.buffer()
    largest = flat.abs().max()
    future = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).get_future()

    def then(done):  # type: ignore[no-untyped-def]
        scale = done.value()[0] / 127
        small = (flat / scale).round().clamp(-127, 127) / dist.get_world_size()
        dist.all_reduce(small)
        return small * scale

    return future.then(then)


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "allreduce of WORLD": lambda: (dist.group.WORLD, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "power": lambda: (power(), powerSGD_hook),
    "power, cold": lambda: (power(warm_start=False, use_error_feedback=False), powerSGD_hook),
    "power, stacked": lambda: (power(batch_tensors_with_same_shape=True, orthogonalization_epsilon=1e-8), POWER),
    "batched power": lambda: (power(matrix_approximation_rank=1), batched_powerSGD_hook),
    "fp16 of power": lambda: (power(), default_hooks.fp16_compress_wrapper(powerSGD_hook)),
    "fp16 of allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 of allreduce": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "per tensor": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "per channel": lambda: (None, quantization_hooks.quantization_perchannel_hook),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "local SGD": lambda: (PostLocalSGDState(None, own_group(), 3), post_localSGD_hook),
    "local SGD by host": lambda: (PostLocalSGDState(None, dist.new_group() if PLAIN else None, 3), post_localSGD_hook),
    "own": lambda: ({"steps": 0, "parameters": set()}, halves),
}  # fmt: skip


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(12, 12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def train(case: str) -> str:
    state, hook = CASES[case]()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = [0]
    if PLAIN:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(state, hook)
    else:
        bucket_mb = 25 if "one" in sys.argv else 1e-5
        sync = hb.GradientSynchronizer(model, optimizer, policy=hb.from_comm_hook(state, hook), bucket_mb=bucket_mb)
        wrapped, optimizer = sync.model, sync.optimizer
        original = sync._aggregator.submit

        def counted(piece: Any, last: bool) -> None:
            calls[0] += 1
            original(piece, last)

        sync._aggregator.submit = counted
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        x, y = torch.randn(4, 12, generator=generator), torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        calls[0] = 0
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    assert PLAIN or "one" in sys.argv or calls[0] >= 8, f"{calls[0]} buckets"
    if isinstance(state, dict):
        assert (state["steps"], len(state["parameters"])) == (STEPS, 10), state
    sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return sha.hexdigest()[:16]


results = {}
chosen = [case for case in sys.argv[1:] if case in CASES]
for case in chosen or CASES:
    try:
        results[case] = train(case) if PLAIN or case != "allreduce of WORLD" or hb.backend() == "torch" else "n/a"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        in_torch = "ddp_comm_hooks" in last.filename  # a hook that does not run in this version of torch
        results[case] = f"{type(error).__name__} in {last.name}" if in_torch else traceback.format_exc()
record(RANK, results)
if chosen:
    print(results)
if PLAIN:
    dist.destroy_process_group()
else:
    hb.shutdown()
