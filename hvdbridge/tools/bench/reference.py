"""The native ways: training as users of each library write it without hvdbridge; the baselines for policies."""

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
    """One way to train: the model to call, and the calls before and after its backward."""

    model: nn.Module
    zero_grad: Callable[[], None]
    step: Callable[[], Any]
    settle: Callable[[], Any] = lambda: None  # waits for transfers that overlap the next step


def ddp(
    model: nn.Module, optimizer: Optimizer, unused: bool = False, hook: Callable[[], tuple[Any, Any]] | None = None
) -> Way:
    """Train with DistributedDataParallel. ``hook`` makes the state and the communication hook to register; ``unused``
    sets ``find_unused_parameters``."""
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=unused)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    return Way(wrapped, optimizer.zero_grad, optimizer.step)


def _default_hook(name: str) -> tuple[Any, Any]:
    """Return a stateless hook of torch: ``allreduce_hook``, the minimum of any hook, or ``fp16_compress_hook``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return None, getattr(default_hooks, name)


def _powersgd() -> tuple[Any, Any]:
    """Return torch's PowerSGD hook of rank 4. On Gloo it aborts if a model has several buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

    state = torch_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return state, torch_hook.powerSGD_hook


def _topk() -> tuple[Any, Any]:
    """Return a plain top-k hook that sends 1 % of the elements: torch.topk, and all-gathers of values and indices."""
    import torch.distributed as dist

    residuals: dict[int, Tensor] = {}

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
        buffer = bucket.buffer()
        residual = residuals.get(bucket.index())
        if residual is None or residual.numel() != buffer.numel():  # DDP rebuilds its buckets after the first step
            residual = torch.zeros_like(buffer)
        corrected = buffer + residual
        indices = corrected.abs().topk(max(1, buffer.numel() // 100)).indices.int()
        values = corrected[indices.long()]
        residuals[bucket.index()] = corrected.index_fill(0, indices.long(), 0)
        ranks = range(dist.get_world_size())
        all_values, all_indices = ([torch.empty_like(tensor) for _ in ranks] for tensor in (values, indices))
        works = [
            dist.all_gather(all_values, values, async_op=True),
            dist.all_gather(all_indices, indices, async_op=True),
        ]

        def decode(_: Any) -> Any:
            buffer.zero_()
            for rank_values, rank_indices in zip(all_values, all_indices, strict=True):
                buffer.index_add_(0, rank_indices.long(), rank_values, alpha=1 / len(ranks))
            return buffer

        futures = torch.futures.collect_all([work.get_future() for work in works])
        return futures.then(decode)

    return None, hook


def horovod(model: nn.Module, optimizer: Optimizer, unused: bool = False) -> Way:
    """Train with plain ``hvd.DistributedOptimizer``, which sends zeros for a parameter without a gradient."""
    import horovod.torch as hvd

    if any(p.dtype == torch.bfloat16 for p in trainable(model).values()):
        raise ConfigurationError("horovod.torch takes no bfloat16")
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return Way(model, wrapped.zero_grad, wrapped.step)


def mpi(model: nn.Module, optimizer: Optimizer, unused: bool = False, per_parameter: bool = False) -> Way:
    """All-reduce by mpi4py after backward, in one flat tensor; ``per_parameter``: one Allreduce per parameter."""
    from mpi4py import MPI

    params: list[Any] = list(trainable(model).values())
    kinds = {f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in params}
    if kinds not in ({"float32 on cpu"}, {"float64 on cpu"}):
        raise ConfigurationError(
            f"the hand-written loops over MPI are for models of float32 or of float64 on the CPU, not {sorted(kinds)}"
        )
    comm = MPI.COMM_WORLD.Dup()
    flat = torch.empty(0 if per_parameter else sum(p.numel() for p in params), dtype=params[0].dtype)

    def step() -> None:
        for param in params:  # zeros for a missing gradient, because all ranks must send the same tensors
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [param.grad for param in params]
        if per_parameter:
            for grad in grads:
                comm.Allreduce(MPI.IN_PLACE, grad.numpy())
                grad.div_(comm.size)
        else:
            torch.cat([grad.reshape(-1) for grad in grads], out=flat)
            flat.div_(comm.size)
            comm.Allreduce(MPI.IN_PLACE, flat.numpy())
            averages = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [average.view_as(grad) for average, grad in zip(averages, grads, strict=True)])
        optimizer.step()

    return Way(model, optimizer.zero_grad, step)


WayFactory = Callable[[nn.Module, Optimizer, bool], Way]
"""Makes a native way from a model, its optimizer, and whether some parameters may get no gradient."""

WAYS: dict[str, tuple[str, WayFactory]] = {
    "ddp": ("torch", ddp),
    "ddp-hook": ("torch", partial(ddp, hook=partial(_default_hook, "allreduce_hook"))),
    "ddp-fp16": ("torch", partial(ddp, hook=partial(_default_hook, "fp16_compress_hook"))),
    "ddp-powersgd": ("torch", partial(ddp, hook=_powersgd)),
    "ddp-topk": ("torch", partial(ddp, hook=_topk)),
    "horovod": ("horovod", horovod),
    "mpi": ("mpi", mpi),
    "mpi-loop": ("mpi", partial(mpi, per_parameter=True)),
}
"""Name of a native way -> (its backend, its factory); the first one of a backend is its default."""


def native(backend: str, name: str | None = None) -> tuple[str, WayFactory]:
    """Return the name and the factory of a native way; None: the backend's default.

    Raises:
        ConfigurationError: the name is unknown, or that way needs another backend.

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
