"""The native ways: what a user of each library writes without hvdbridge. Policies are compared with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdbridge.errors import ConfigurationError, nearest
from hvdbridge.reduction.parameters import trainable


@dataclass(frozen=True)
class Way:
    """One way to train: the model to call, and what surrounds its backward."""

    model: nn.Module
    zero_grad: Callable[[], None]
    step: Callable[[], Any]
    settle: Callable[[], Any] = lambda: None  # wait for what goes on behind a step


def ddp(
    model: nn.Module, optimizer: Optimizer, unused: bool = False, hook: Callable[[], tuple[Any, Any]] | None = None
) -> Way:
    """DistributedDataParallel, plain or with the state and the hook that ``hook`` makes; ``unused``: it looks for
    parameters without a gradient."""
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    return Way(wrapped, optimizer.zero_grad, optimizer.step)


def _default_hook(name: str) -> tuple[Any, Any]:
    """torch's all-reduce hook, without which no communication hook can do, and its fp16 hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return None, getattr(default_hooks, name)


def _powersgd() -> tuple[Any, Any]:
    """torch's PowerSGD hook, rank 4. On Gloo it aborts as soon as a model has several buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as of_torch

    state = of_torch.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return state, of_torch.powerSGD_hook


def _topk() -> tuple[Any, Any]:
    """A straightforward top-k of 1 % in a DDP hook: torch.topk, and an all-gather of values and indices."""
    import torch.distributed as dist

    residuals: dict[int, Tensor] = {}

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        residual = residuals.get(bucket.index())
        if residual is None or residual.numel() != buffer.numel():  # DDP rebuilds its buckets after the first step
            residual = torch.zeros_like(buffer)
        corrected = buffer + residual
        indices = corrected.abs().topk(max(1, buffer.numel() // 100)).indices.int()
        values = corrected[indices.long()]
        residuals[bucket.index()] = corrected.index_fill(0, indices.long(), 0)
        everybody = range(dist.get_world_size())
        all_values, all_indices = ([torch.empty_like(mine) for _ in everybody] for mine in (values, indices))
        works = [
            dist.all_gather(all_values, values, async_op=True),
            dist.all_gather(all_indices, indices, async_op=True),
        ]

        def decode(_: Any) -> Any:
            buffer.zero_()
            for each, at in zip(all_values, all_indices, strict=True):
                buffer.index_add_(0, at.long(), each, alpha=1 / len(everybody))
            return buffer

        futures = torch.futures.collect_all([work.get_future() for work in works])
        return futures.then(decode)

    return None, hook


def horovod(model: nn.Module, optimizer: Optimizer, unused: bool = False) -> Way:
    """Plain ``hvd.DistributedOptimizer``, which sends zeros for a parameter without a gradient."""
    import horovod.torch as hvd

    if any(p.dtype == torch.bfloat16 for p in trainable(model).values()):
        raise ConfigurationError("horovod.torch takes no bfloat16")
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return Way(model, wrapped.zero_grad, wrapped.step)


def mpi(model: nn.Module, optimizer: Optimizer, unused: bool = False, each: bool = False) -> Way:
    """By hand, after backward: all gradients in one flat Allreduce; ``each``: one Allreduce per parameter."""
    from mpi4py import MPI

    params: list[Any] = list(trainable(model).values())
    found = {f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in params}
    if found not in ({"float32 on cpu"}, {"float64 on cpu"}):
        raise ConfigurationError(
            f"the hand-written loops over MPI are for models of float32 or of float64 on the CPU, not {sorted(found)}"
        )
    comm = MPI.COMM_WORLD.Dup()
    flat = torch.empty(0 if each else sum(p.numel() for p in params), dtype=params[0].dtype)

    def step() -> None:
        for param in params:  # zeros where this rank's backward left none: ranks must send alike
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [param.grad for param in params]
        if each:
            for grad in grads:
                comm.Allreduce(MPI.IN_PLACE, grad.numpy())
                grad.div_(comm.size)
        else:
            torch.cat([grad.reshape(-1) for grad in grads], out=flat)
            flat.div_(comm.size)
            comm.Allreduce(MPI.IN_PLACE, flat.numpy())
            pieces = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)])
        optimizer.step()

    return Way(model, optimizer.zero_grad, step)


Make = Callable[[nn.Module, Optimizer, bool], Way]
"""A native way for a model and its optimizer; True: some of its parameters may get no gradient."""

WAYS: dict[str, tuple[str, Make]] = {
    "ddp": ("torch", ddp),
    "ddp-hook": ("torch", partial(ddp, hook=partial(_default_hook, "allreduce_hook"))),
    "ddp-fp16": ("torch", partial(ddp, hook=partial(_default_hook, "fp16_compress_hook"))),
    "ddp-powersgd": ("torch", partial(ddp, hook=_powersgd)),
    "ddp-topk": ("torch", partial(ddp, hook=_topk)),
    "horovod": ("horovod", horovod),
    "mpi": ("mpi", mpi),
    "mpi-loop": ("mpi", partial(mpi, each=True)),
}
"""name -> (the backend it needs, how it is made); a backend's first is what it is compared with by default."""


def native(backend: str, name: str | None = None) -> tuple[str, Make]:
    """The native way of this name, or the backend's own.

    Raises:
        ConfigurationError: there is none, or it needs another backend.

    >>> native("mpi")[0]
    'mpi'
    """
    name = name or next(way for way, (owner, _) in WAYS.items() if owner == backend)
    if name not in WAYS:
        raise ConfigurationError(f"unknown native way {name!r}. {nearest(name, WAYS)}")
    owner, make = WAYS[name]
    if owner != backend:
        raise ConfigurationError(f"{name} runs on the {owner} backend, not on {backend}: add --backends {owner}")
    return name, make
