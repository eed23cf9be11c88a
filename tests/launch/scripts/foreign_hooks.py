"""Every hook that torch ships, through the bridge with buckets of a few parameters; with ``plain``: under DDP, in one.

Batched PowerSGD, which torch 2.13 cannot run by itself, is compared with :func:`batched_power_in_one_process`.
"""

from __future__ import annotations

import hashlib
import math
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jobs import leave_torch, record
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


def regrouped(state, bucket):  # type: ignore[no-untyped-def]
    """A user's own that sets another group in the third step."""
    group = state.group
    state.steps += bucket.is_last()
    if state.steps == 3:
        state.group = state.later[0]
    return default_hooks.allreduce_hook(group, bucket)


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "allreduce of WORLD": lambda: (dist.group.WORLD, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "power": lambda: (power(), powerSGD_hook),
    "power, cold": lambda: (power(warm_start=False, use_error_feedback=False), powerSGD_hook),
    "power, stacked": lambda: (power(batch_tensors_with_same_shape=True, orthogonalization_epsilon=1e-8), POWER),
    "batched power": lambda: (power(matrix_approximation_rank=1), batched_powerSGD_hook),
    "batched power of rank 3": lambda: (power(matrix_approximation_rank=3), batched_powerSGD_hook),
    "batched power by bucket": lambda: (power(matrix_approximation_rank=1), batched_powerSGD_hook),
    "fp16 of batched power": lambda: (power(), default_hooks.fp16_compress_wrapper(batched_powerSGD_hook)),
    "fp16 of power": lambda: (power(), default_hooks.fp16_compress_wrapper(powerSGD_hook)),
    "fp16 of allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 of allreduce": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "per tensor": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "per channel": lambda: (None, quantization_hooks.quantization_perchannel_hook),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "local SGD": lambda: (PostLocalSGDState(None, own_group(), 3), post_localSGD_hook),
    "local SGD by host": lambda: (PostLocalSGDState(None, dist.new_group() if PLAIN else None, 3), post_localSGD_hook),
    "own": lambda: ({"steps": 0, "parameters": set()}, halves),
    "own, regrouped": lambda: (SimpleNamespace(group=None, steps=0, later=[own_group()]), regrouped),
}  # fmt: skip


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(12, 12), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 12, generator=generator), torch.randn(4, 3, generator=generator)


def batched_power_in_one_process(state: PowerSGDState, by_bucket: bool) -> list[torch.Tensor]:
    """The parameters after training with batched PowerSGD, by its paper: every rank's matrices are here.

    A bucket's gradients, filled up by zeros, are a square M_r. P is an orthonormal basis of sum(M_r) Q; the update is
    P P' mean(M_r), the next Q is mean(M_r)' P, and what the update lacks of M_r is added to rank r's next gradients.
    """
    model = mlp()
    parameters = list(model.parameters())[::-1]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    buckets = [[p] for p in parameters] if by_bucket else [parameters]
    numbers = np.random.RandomState(0)
    q: dict[int, torch.Tensor] = {}
    error = {(i, rank): torch.zeros(()) for i in range(len(buckets)) for rank in range(SIZE)}
    for step in range(STEPS):
        gradients = []
        for rank in range(SIZE):
            x, y = batch(step, rank)
            found = torch.autograd.grad(nn.functional.mse_loss(model(x), y), parameters)
            gradients.append(dict(zip(parameters, found, strict=True)))
        for i, bucket in enumerate(buckets):
            flats = [torch.cat([of_rank[p].flatten() for p in bucket]) for of_rank in gradients]
            update = sum(flats) / SIZE
            if step >= state.start_powerSGD_iter:
                side = math.ceil(math.sqrt(len(update)))
                matrices = [torch.zeros(side, side) for _ in flats]
                for rank, (matrix, flat) in enumerate(zip(matrices, flats, strict=True)):
                    matrix.view(-1)[: len(flat)] = flat
                    matrix += error[i, rank]
                if i not in q:
                    generator = torch.Generator().manual_seed(numbers.randint(1_000_000_000))
                    q[i] = torch.randn(side, state.matrix_approximation_rank, generator=generator)
                basis = torch.linalg.qr(sum(matrices) @ torch.linalg.qr(q[i]).Q).Q
                q[i] = sum(matrices).T @ basis / SIZE
                approximation = basis @ q[i].T
                for rank, matrix in enumerate(matrices):
                    error[i, rank] = matrix - approximation
                update = approximation.view(-1)[: len(update)]
            for p, piece in zip(bucket, update.split([p.numel() for p in bucket]), strict=True):
                p.grad = piece.view_as(p).clone()
        optimizer.step()
    return list(model.parameters())


def train(case: str) -> str:
    state, hook = CASES[case]()
    by_bucket = case.endswith("by bucket")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls = [0]
    if PLAIN:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(state, hook)
    else:
        bucket_mb = 25 if "one" in sys.argv else 1e-5
        policy = hb.from_comm_hook(state, hook, scope="bucket" if by_bucket else None)
        sync = hb.GradientSynchronizer(model, optimizer, policy=policy, bucket_mb=bucket_mb)
        wrapped, optimizer = sync.model, sync.optimizer
        original = sync._aggregator.submit

        def counted(piece: Any, last: bool) -> None:
            calls[0] += 1
            original(piece, last)

        sync._aggregator.submit = counted
    for step in range(STEPS):
        x, y = batch(step, RANK)
        optimizer.zero_grad()
        calls[0] = 0
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    if not PLAIN:
        whole = "one" in sys.argv or policy.scope == "step"
        assert calls[0] == 1 if whole else calls[0] >= 8, f"{calls[0]} buckets for scope {policy.scope!r}"
    if isinstance(state, dict):
        assert (state["steps"], len(state["parameters"])) == (STEPS, 10), state
    if case.startswith("batched power") and not PLAIN:
        expected = batched_power_in_one_process(state, by_bucket)
        torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-4, atol=1e-5)
    sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return sha.hexdigest()[:16]


results = {}
chosen = [case for case in sys.argv[1:] if case in CASES]
for case in chosen or CASES:
    try:
        results[case] = train(case) if PLAIN or case != "allreduce of WORLD" or hb.backend() == "torch" else "n/a"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        in_torch = PLAIN and "ddp_comm_hooks" in last.filename  # a hook that does not run in this version of torch
        results[case] = f"{type(error).__name__} in {last.name}" if in_torch else traceback.format_exc()
record(RANK, results)
if chosen:
    print(results)
if PLAIN:
    leave_torch()
hb.shutdown()
