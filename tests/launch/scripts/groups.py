"""Four ranks: two groups at once, by ranks and by the backend's own group, and what four ranks must have in common."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from jobs import record
from torch import nn

import hvdbridge as hb

hb.init()
RANK, SIZE = hb.rank(), hb.size()
PAIRS = [[0, 2], [1, 3]]


def own_groups() -> Any:
    """The two pairs as groups of the library below; this rank's one."""
    if hb.backend() == "torch":
        import torch.distributed as dist

        return [dist.new_group(pair) for pair in PAIRS][RANK % 2]
    if hb.backend() == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.Split(RANK % 2, RANK)
    import horovod.torch as hvd

    return [hvd.add_process_set(pair) for pair in PAIRS][RANK % 2]


def train(steps: int = 3, **options: Any) -> tuple[str, list[float]]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
    for step in range(steps * (1 + RANK % 2) if "group" in options else steps):
        generator = torch.Generator().manual_seed(100 * step + RANK)
        sync.optimizer.zero_grad()
        sync.model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        sync.optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16], flat.tolist()


OWN = own_groups()  # before ours: Horovod knows one process set for the same ranks
record(
    RANK,
    {
        "by_ranks": train(group=PAIRS[RANK % 2])[0],
        "by_own_group": train(group=OWN)[0],
        "mean": train(),
        "exact": train(policy="mean:exact=true"),
        "bf16": train(policy="bf16"),
    },
)
hb.shutdown()
