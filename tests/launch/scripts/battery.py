"""All policies on this job's backend against Simulation in the same process; what was wrong is recorded by policy.

battery.py compare - [spec ...]
battery.py save DIR         each policy is also interrupted: its state is left for jobs on other backends
battery.py resume DIR       and taken up there
"""

from __future__ import annotations

import hashlib
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jobs import record
from policies.policies import (
    CASES,
    LEARNING_RATE,
    SHAPES,
    START,
    Case,
    Grads,
    Trained,
    bits,
    close,
    gradients,
    weights_for,
)
from torch import Tensor, nn

import hvdbridge as hb

STEPS = 4
BUCKET_MB = 0.004  # four buckets or so
SEED = 5


class Dictated(nn.Module):
    """A model whose gradients are what its input says."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for key in path:
                if not hasattr(owner, key):
                    owner.add_module(key, nn.Module())
                owner = getattr(owner, key)
            owner.register_parameter(last, nn.Parameter(torch.full(shape, START)))

    def forward(self, wanted: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), wanted, strict=True)]).sum()


class Replica:
    """One case on this job's backend."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.module = Dictated()
        self.names = [name for name, _ in self.module.named_parameters()]
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        self.sync = hb.GradientSynchronizer(
            self.module, optimizer, policy=case.policy, bucket_mb=BUCKET_MB, weighted=True, seed=SEED
        )

    @property
    def parameters(self) -> Grads:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def step(self, grads: Grads, weight: float) -> Grads:
        """What the policy did to this rank, as :meth:`Trained.step` says it."""
        self.sync.optimizer.zero_grad()
        self.sync.weight = weight
        self.sync.model([grads[name] for name in self.names]).backward()
        update = {name: p.grad.clone() for name, p in self.module.named_parameters()}  # type: ignore[union-attr]
        self.sync.optimizer.step()
        return update if self.case.first_due is None else {n: p - START for n, p in self.parameters.items()}

    def train(self, steps: Iterable[int]) -> list[str]:
        """Digests of updates and parameters, step by step."""
        found = []
        for step in steps:
            change = self.step(gradients(hb.size(), step)[hb.rank()], plan(self.case, step)[hb.rank()])
            found.append(digest(change) + digest(self.parameters))
        return found


def plan(case: Case, step: int) -> list[float]:
    """Weights: equal, unequal where that means something, and with a rank excluded where that leaves enough."""
    weights = weights_for(case, hb.size()) if step % 3 else [1.0] * hb.size()
    if step % 3 == 2 and hb.size() > case.min_size:
        weights[0] = 0.0
    return weights


def digest(tensors: Grads) -> str:
    return hashlib.sha256(b"".join(bits(t) for t in tensors.values())).hexdigest()[:8]


def compare(case: Case, replica: Replica) -> dict[str, Any]:
    """What differs from Simulation, step by step, and digests that all ranks must share."""
    size, rank = hb.size(), hb.rank()
    # Boundaries of buckets must not matter, so the simulation has one; but for a policy to which they do.
    cut = BUCKET_MB if case.flat else None
    reference = Trained(case, size, names=replica.names, seed=SEED, local_size=None, bucket_mb=cut)
    wrong, digests = [], []
    for step in range(STEPS):
        weights, grads = plan(case, step), gradients(size, step)
        want = reference.step(grads, weights)[rank]
        found = replica.step(grads[rank], weights[rank])
        digests.append(digest(found) if case.alike_after(step) else "")
        if case.flat and hb.backend() == "torch":  # DDP's first step is one bucket
            continue
        differ = [name for name in SHAPES if not torch.equal(found[name], want[name])]
        if size <= 2 and differ:
            wrong.append(f"step {step}: {', '.join(differ)} differ from the simulation")
        elif differ:
            try:
                close(case, found, want, grads, flips=5e-3)
            except AssertionError as error:
                wrong.append(f"step {step}: {str(error).splitlines()[0]}")
    return {"wrong": wrong, "digests": digests}


def save(case: Case, directory: Path) -> list[str]:
    """Train, leave everything in the middle, train on."""
    replica = Replica(case)
    replica.train(range(3))
    gathered = replica.sync.state_dict(gather=True)
    if hb.rank() == 0:
        torch.save(gathered, directory / "sync.pt")
    torch.save(replica.module.state_dict(), directory / f"model{hb.rank()}.pt")
    found = replica.train(range(3, 6))
    replica.sync.close()
    return found


def resume(case: Case, directory: Path) -> list[str]:
    """Train on from what another job left."""
    replica = Replica(case)
    replica.module.load_state_dict(torch.load(directory / f"model{hb.rank()}.pt", weights_only=True))
    replica.sync.load_state_dict(torch.load(directory / "sync.pt", weights_only=True))
    found = replica.train(range(3, 6))
    replica.sync.close()
    return found


def main(mode: str, directory: str, only: list[str]) -> None:
    hb.init()
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        if hb.size() < case.min_size or (only and case.spec not in only):
            continue
        started = time.monotonic()
        try:
            replica = Replica(case)
            found[case.spec] = compare(case, replica)
            replica.sync.close()
            if mode != "compare":
                place = Path(directory) / str(number)
                place.mkdir(parents=True, exist_ok=True)
                found[case.spec]["resumed"] = save(case, place) if mode == "save" else resume(case, place)
        except Exception:
            found[case.spec] = {"wrong": [traceback.format_exc()], "digests": []}
        found[case.spec]["seconds"] = time.monotonic() - started
        record(hb.rank(), found)
    hb.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
