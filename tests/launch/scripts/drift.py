"""Policies that act on parameters or one step late, on this job's backend, against arithmetic in one process.

The reference is a model and an optimizer per rank, and a Simulation between them. Records ``ok`` or a traceback per
scenario. Two ranks: there sums have the same bits everywhere.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from jobs import record
from torch import nn

import hvdbridge as hb

BUCKET_MB = 0.0005  # several buckets
STEPS = 5
Optimizers = list[torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def one(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]


def two(model: nn.Sequential) -> Optimizers:
    return [torch.optim.SGD(model[0].parameters(), lr=0.2), torch.optim.Adam(model[2:].parameters(), lr=0.01)]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return nn.functional.mse_loss(model(x), y)


class Reference:
    """All ranks of a job in this process."""

    def __init__(self, spec: str, optimizers: Callable[[nn.Sequential], Optimizers] = one) -> None:
        self.models = [mlp() for _ in range(hb.size())]
        self.optimizers = [optimizers(model) for model in self.models]
        params = dict(self.models[0].named_parameters())
        # Buckets decide nothing at two ranks, but for policies of scope "step" their order is the order of addition.
        self.simulation = hb.Simulation(spec, params, hb.size(), bucket_mb=BUCKET_MB)

    def step(self, weights: Sequence[float] | None = None, absent: Sequence[int] = (), poisoned: int = -1) -> None:
        """``absent``: ranks whose optimizer does not step; ``poisoned``: one with infinite gradients."""
        grads = []
        step = self.simulation.steps
        for rank, model in enumerate(self.models):
            model.zero_grad()
            (loss_of(model, step, rank) * (float("inf") if rank == poisoned else 1.0)).backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
        updates = self.simulation.step(grads, weights)
        for rank in range(hb.size()):
            self.apply(rank, updates[rank], rank not in absent and not self.simulation.skipped)
        self.average()

    def apply(self, rank: int, update: dict[str, torch.Tensor], steps: bool = True) -> None:
        for name, p in self.models[rank].named_parameters():
            p.grad = update.get(name)
        for optimizer in self.optimizers[rank] if steps else ():
            optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        new = self.simulation.after_step([dict(model.named_parameters()) for model in self.models])
        for model, values in zip(self.models, new, strict=True):
            for name, p in model.named_parameters():
                p.copy_(values[name])

    def flush(self) -> None:
        updates = self.simulation.flush()
        for rank in range(hb.size()) if updates else ():
            self.apply(rank, updates[rank])

    def check(self, model: nn.Module) -> None:
        for (name, mine), theirs in zip(model.named_parameters(), self.models[hb.rank()].parameters(), strict=True):
            assert torch.equal(mine, theirs), f"{name}: off by {(mine - theirs).abs().max():.3g}"


class Replica:
    """This rank's part of the job."""

    def __init__(self, spec: str, optimizers: Callable[[nn.Sequential], Optimizers] = one) -> None:
        self.module = mlp()
        given = optimizers(self.module)
        self.sync = hb.GradientSynchronizer(
            self.module, given if len(given) > 1 else given[0], policy=spec, bucket_mb=BUCKET_MB
        )
        self.optimizers = list(self.sync.optimizer) if len(given) > 1 else [self.sync.optimizer]

    def backward(self, step: int, factor: float | torch.Tensor = 1.0) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (loss_of(self.sync.model, step, hb.rank()) * factor).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        for optimizer in self.optimizers:
            optimizer.step()


POLICIES = [
    "noop", "local_sgd:every=2", "local_sgd(every=3, inner=ef(bf16))", "post_local_sgd:start=2,every=2,group=none",
    "post_local_sgd:start=1,every=2", "diloco:every=2,lr=0.7,momentum=0.9", "diloco(every=2, inner=bf16)", "delayed",
    "delayed(ef(bf16))", "hierarchical(ef(bf16))", "partition(*.bias=delayed, rest=local_sgd:every=2)",
    "clip(mean, norm=0.5)", "clip(delayed(mean), norm=0.5)", "warmup(steps=2, then=diloco:every=2)",
]  # fmt: skip


def trains_like(spec: str) -> None:
    reference, replica = Reference(spec), Replica(spec)
    for step in range(STEPS):
        reference.step()
        replica.step(step)
    reference.flush()
    if replica.sync.flush():
        replica.optimizers[0].step()
    assert not replica.sync.flush()
    reference.check(replica.module)
    assert replica.sync.stats()["state_bytes"] == reference.simulation.stores[0].nbytes
    replica.sync.close()


def weighted() -> None:
    """The last step's weights are those of the average; a rank of weight 0 takes the others'; none: nothing moves."""
    for spec in ("local_sgd:every=2", "diloco:every=2", "delayed"):
        reference, replica = Reference(spec), Replica(spec)
        for step, weights in enumerate(([1.0, 3.0], [1.0, 3.0], [2.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0])):
            reference.step(weights)
            replica.sync.weight = weights[hb.rank()]
            replica.step(step)
        reference.check(replica.module)


def overflow_on_one_rank() -> None:
    """GradScaler skips a step on one rank alone, the one that an average follows. That rank comes to it later."""
    reference, replica = Reference("local_sgd:every=2"), Replica("local_sgd:every=2")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for step in range(STEPS):
        poisoned = 1 if step in (1, 4) else -1
        reference.step(absent=[poisoned], poisoned=poisoned)
        replica.backward(step, scaler.scale(torch.ones(())) * (float("inf") if poisoned == hb.rank() else 1.0))
        scaler.step(replica.optimizers[0])
        scaler.update(1.0)
        if poisoned == hb.rank() == 1 and step == 1:
            replica.module.eval()
            with torch.no_grad():
                replica.sync.model(torch.zeros(1, 6))  # evaluating alone waits for nobody
            replica.module.train()
    assert not replica.sync.flush()
    reference.check(replica.module)


def overflow_before_the_end() -> None:
    """What is outstanding at the end is done by flush(), and by a gathered state."""
    for finish in (lambda sync: sync.flush(), lambda sync: sync.state_dict(gather=True)):
        reference, replica = Reference("diloco:every=3"), Replica("diloco:every=3")
        for step in range(3):
            poisoned = 0 if step == 2 else -1
            reference.step(absent=[poisoned], poisoned=poisoned)
            replica.backward(step, float("inf") if poisoned == hb.rank() else 1.0)
            if poisoned != hb.rank():
                replica.optimizers[0].step()
        finish(replica.sync)
        reference.check(replica.module)


def two_optimizers() -> None:
    """Ranks may step them in another order."""
    reference, replica = Reference("diloco:every=2", two), Replica("diloco:every=2", two)
    for step in range(STEPS):
        reference.step()
        replica.backward(step)
        for optimizer in replica.optimizers[:: 1 - 2 * hb.rank()]:
            optimizer.step()
    reference.check(replica.module)


def parameters_added_later() -> None:
    """Before a backward, and between a backward and the step that nothing is due after."""

    def last(model: nn.Sequential) -> Optimizers:
        return [torch.optim.SGD(model[4].parameters(), lr=0.1)]

    def add(model: nn.Sequential, layer: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": list(model[layer].parameters())})

    for spec in ("local_sgd:every=2", "diloco:every=2,lr=0.7,momentum=0.9"):
        reference, replica = Reference(spec, last), Replica(spec, last)
        for step in range(6):
            if step == 2:
                for model, (optimizer,) in zip(reference.models, reference.optimizers, strict=True):
                    add(model, 2, optimizer)
                    add(model, 0, optimizer)
                add(replica.module, 2, replica.optimizers[0])
            reference.step()
            replica.module.zero_grad()  # not all of its parameters are the optimizer's
            replica.backward(step)
            if step == 2:
                add(replica.module, 0, replica.optimizers[0])
            replica.optimizers[0].step()
        reference.check(replica.module)


def closures() -> None:
    """One that looks several times: what is due waits for the end of the step."""
    reference, replica = Reference("local_sgd:every=1"), Replica("local_sgd:every=1")
    for _ in range(2):
        seen = []

        def evaluate(seen: list[Any] = seen) -> torch.Tensor:
            for _ in range(2):
                replica.backward(replica.sync.stats()["step"])
                seen.append(copy.deepcopy(replica.module.state_dict()))
            return torch.zeros(())

        replica.optimizers[0].step(evaluate)
        assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0]), "parameters moved within the step"
        reference.simulation.steps += 1  # the first look leads to nothing
        reference.step()
    reference.check(replica.module)


def without_an_optimizer() -> None:
    """The average comes before parameters are used again."""
    reference = Reference("local_sgd:every=1")
    module = mlp()
    sync = hb.GradientSynchronizer(module, policy="local_sgd:every=1", bucket_mb=BUCKET_MB)
    optimizer = one(module)[0]
    for step in range(3):
        reference.step()
        optimizer.zero_grad()
        loss_of(sync.model, step, hb.rank()).backward()
        optimizer.step()
    sync.flush()
    reference.check(module)


def joined() -> None:
    """Ranks with unequal numbers of steps, with and without an average after the last of the shorter one."""
    for spec in ("local_sgd:every=2", "diloco:every=1", "delayed", "post_local_sgd:start=1,every=3,group=none"):
        replica = Replica(spec)
        with replica.sync.join():
            for step in range(2 + 3 * hb.rank()):
                replica.step(step)
        found = hb.current().control.all_gather_object([p.tolist() for p in replica.module.parameters()])
        assert found[0] == found[1], spec
        assert all(p.isfinite().all() for p in replica.module.parameters())


def resumed() -> None:
    """Saved after an average and taken up anew, a run is the one that was not interrupted."""
    for spec in ("diloco:every=2", "delayed(ef(bf16))", "local_sgd(every=2, inner=ef(bf16))"):
        whole = Replica(spec)
        for step in range(4):
            whole.step(step)
        gathered = whole.sync.state_dict(gather=True)
        state = hb.broadcast_object(gathered)
        model, optimizer = copy.deepcopy((whole.module.state_dict(), whole.optimizers[0].state_dict()))
        for step in range(4, 7):
            whole.step(step)
        part = Replica(spec)
        part.step(0)
        part.module.load_state_dict(model)
        part.optimizers[0].load_state_dict(optimizer)
        part.sync.load_state_dict(state)
        for step in range(4, 7):
            part.step(step)
        for mine, theirs in zip(part.module.parameters(), whole.module.parameters(), strict=True):
            assert torch.equal(mine, theirs), spec


def another_number_of_ranks() -> None:
    replica = Replica("ef(bf16)")
    replica.step(0)
    local = replica.sync.state_dict()
    gathered = hb.broadcast_object(replica.sync.state_dict(gather=True))
    assert replica.sync.stats()["state_bytes"] == 4 * sum(p.numel() for p in replica.module.parameters())
    three = gathered | {"ranks": [*gathered["ranks"], gathered["ranks"][0]], "size": 3, "nodes": []}
    for saved in (three, local | {"size": 3, "nodes": []}):
        with pytest.raises(hb.ConfigurationError, match=r"by 3 ranks .* by 2\."):
            replica.sync.load_state_dict(saved, on_resize="raise")
        replica.sync.load_state_dict(saved, on_resize="reset")
        assert not any(t.any() for t in replica.sync.state_dict()["state"]["residual"].values())
    replica.sync.load_state_dict(three)
    mine = replica.sync.state_dict()["state"]["residual"]
    for name, tensor in mine.items():
        total = sum(saved["residual"][name].double() for saved in three["ranks"])
        assert torch.equal(tensor, (total / 2).float())


SCENARIOS = [
    weighted, overflow_on_one_rank, overflow_before_the_end, two_optimizers, parameters_added_later, closures,
    without_an_optimizer, joined, resumed, another_number_of_ranks,
]  # fmt: skip

if __name__ == "__main__":
    hb.init()
    results: dict[str, str] = {}
    runs: dict[str, Callable[[], None]] = {spec: lambda spec=spec: trains_like(spec) for spec in POLICIES}
    runs |= {name: lambda spec=name: trains_like(spec) for name in sys.argv[1:] if name not in POLICIES}
    runs |= {scenario.__name__: scenario for scenario in SCENARIOS}
    for name, run in runs.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        try:
            run()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        record(hb.rank(), results)
    hb.shutdown()
