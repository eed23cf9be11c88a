"""Trains small models in every way that users do, and records a digest of what came out, per scenario.

With ``plain`` as argument it uses torch's own DistributedDataParallel: the reference for every backend. With ``copies``
gradients are no views of buckets, as in large models: on torch DDP divides them while it copies, where it may.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import leave_torch, record
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

PLAIN, COPIES = "plain" in sys.argv, "copies" in sys.argv
BUCKET_MB = 0.001  # a bucket per tensor or so: many flows in flight

if PLAIN:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
else:
    import hvdbridge as hb

    hb.init()
    RANK, SIZE = hb.rank(), hb.size()


class Plain:
    """DDP with the face of a GradientSynchronizer."""

    skipped = False

    def __init__(self, model: nn.Module, optimizer: Any, bucket_mb: float, **options: Any) -> None:
        self.model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, **options)
        self.optimizer = optimizer
        self.weight = None

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def join(self) -> Any:
        return self.model.join(divide_by_initial_world_size=False)


def synchronize(model: nn.Module, optimizer: Any = None, bucket_mb: float = BUCKET_MB, **options: Any) -> Any:
    if PLAIN:
        return Plain(model, optimizer, bucket_mb, **options)
    if COPIES:
        options.setdefault("gradient_as_bucket_view", False)
    return hb.GradientSynchronizer(model, optimizer, bucket_mb=bucket_mb, **options)


def digest(*modules: nn.Module) -> str:
    sha = hashlib.sha256()
    for module in modules:
        for tensor in module.state_dict().values():
            sha.update(tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def batch(step: int, rank: int = RANK, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | more))


def loss_of(model: nn.Module, step: int, **more: Any) -> torch.Tensor:
    x, y = batch(step, **more)
    return nn.functional.mse_loss(model(x), y)


def train(sync: Any, steps: int = 4) -> None:
    for step in range(steps):
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        sync.optimizer.step()


def static_graph() -> str:
    """DDP sends all of its first step at once, at the end; what is coded takes several rounds."""

    def trained(**options: Any) -> str:
        model = mlp()
        train(synchronize(model, sgd(model), policy="ef(bf16)", **options))
        return digest(model)

    found = trained(static_graph=True)
    assert found == trained()
    return found


def default_buckets() -> str:
    """What is coded goes in smaller buckets than what is not, on any backend; who says a size gets it."""

    def buckets(policy: str, **given: Any) -> int:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])  # 4 MiB each
        sync = hb.GradientSynchronizer(model, sgd(model), policy=policy, **given)
        for _ in range(2):  # DDP's first step is one bucket
            sync.optimizer.zero_grad()
            sync.model(torch.ones(1, 1024)).sum().backward()
            sync.optimizer.step()
        sync.close()
        return int(sync.stats()["collectives"])

    few, many = buckets("mean"), buckets("ef(bf16)") / 2
    assert few < many == buckets("ef(bf16)", bucket_mb=10) / 2, (few, many)
    assert few == buckets("ef(bf16)", bucket_mb=25) / 2
    return f"{few} and {many}"


def plain_training() -> str:
    model = mlp()
    train(synchronize(model, sgd(model)))
    return digest(model)


def bucket_by_measurement() -> str:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 3))
    before = torch.get_rng_state()
    sync = synchronize(model, sgd(model), **({} if PLAIN else {"bucket_mb": "auto"}))
    assert torch.equal(torch.get_rng_state(), before)
    if not PLAIN:
        assert len(set(hb.current().control.all_gather_object(sync.bucket_mb))) == 1
    train(sync)
    return digest(model)


class Branches(nn.Module):
    """Three heads; which one a rank uses is data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def branches(choose: Callable[[int], int]) -> str:
    model = Branches()
    sync = synchronize(model, sgd(model), find_unused_parameters=True)
    for step in range(4):
        sync.optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.mse_loss(sync.model(x, choose(step)), y).backward()
        sync.optimizer.step()
    return digest(model)


def unused_on_some_ranks() -> str:
    return branches(lambda step: (RANK + step) % 2)


def unused_on_all_ranks() -> str:
    return branches(lambda step: 1)


def shared_and_frozen() -> str:
    torch.manual_seed(5)
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 6), nn.Linear(6, 3))
    model[3].requires_grad_(False)
    train(synchronize(model, sgd(model)))
    return digest(model)


def several_optimizers() -> str:
    model = mlp()
    first = torch.optim.SGD([{"params": [model[0].weight], "lr": 0.2}, {"params": [model[0].bias]}], lr=0.05)
    second = torch.optim.Adam([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    sync = synchronize(model, [first, second])
    for step in range(4):
        for optimizer in sync.optimizer:
            optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        for optimizer in sync.optimizer:
            optimizer.step()
    return digest(model)


def scheduler() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    schedule = torch.optim.lr_scheduler.StepLR(sync.optimizer, step_size=2, gamma=0.1)
    for step in range(5):
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        sync.optimizer.step()
        schedule.step()
    return digest(model)


def closure() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(3):

        def evaluate(step: int = step) -> torch.Tensor:
            sync.optimizer.zero_grad()
            loss = loss_of(sync.model, step)
            loss.backward()
            return loss

        assert torch.is_tensor(sync.optimizer.step(evaluate))
    return digest(model)


def compiled() -> str:
    model = mlp()
    sync = synchronize(torch.compile(model, backend="aot_eager"), sgd(model), bucket_mb=25)
    train(sync)
    return digest(model)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body[:2](x)
        return self.body[4](checkpoint(self.body[2:4], hidden, use_reentrant=self.reentrant))


def checkpointing() -> str:
    model = Checkpointed(reentrant=False)
    train(synchronize(model, sgd(model)))
    return digest(model)


def two_backwards() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(3):
        sync.optimizer.zero_grad()
        loss_of(sync.model, 2 * step).backward()
        loss_of(sync.model, 2 * step + 1).backward()
        sync.optimizer.step()
    return digest(model)


def accumulation() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(3):
        sync.optimizer.zero_grad()
        for part in range(3):
            with sync.no_sync() if part < 2 else nullcontext():
                loss_of(sync.model, 3 * step + part).backward()
        sync.optimizer.step()
    return digest(model)


def grad_scaler() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scales = []
    for step in range(4):
        sync.optimizer.zero_grad()
        loss = scaler.scale(loss_of(sync.model, step))
        (loss * float("inf") if step == 1 and RANK == SIZE - 1 else loss).backward()
        scaler.unscale_(sync.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(sync.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 8.0, 8.0, 8.0], scales
    return digest(model)


def clipping() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(4):
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        nn.utils.clip_grad_norm_(sync.model.parameters(), 0.05)
        sync.optimizer.step()
    return digest(model)


def adamw_foreach() -> str:
    model = mlp()
    train(synchronize(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)))
    return digest(model)


class Running(nn.Module):
    """Gives itself a new buffer in each forward, in place of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


def buffers() -> str:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), Running(), nn.Linear(8, 3))
    sync = synchronize(model, sgd(model))
    train(sync)
    sync.model.eval()
    with torch.no_grad():
        sync.model(batch(0)[0])  # the first forward after a step still brings rank 0's buffers
    return digest(model)


def gan() -> str:
    torch.manual_seed(11)
    maker, judge = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    make, tell = synchronize(maker, sgd(maker)), synchronize(judge, sgd(judge))
    for step in range(3):
        noise, real = batch(step)
        tell.optimizer.zero_grad()
        (tell.model(make.model(noise).detach()).mean() - tell.model(real).mean()).backward()
        tell.optimizer.step()
        make.optimizer.zero_grad()
        judge.requires_grad_(False)
        (-judge(make.model(noise)).mean()).backward()
        judge.requires_grad_(True)
        make.optimizer.step()
    return digest(maker, judge)


def uneven_join() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model, momentum=0.0))
    for steps in (2 + 3 * RANK, max(1, 4 - 2 * RANK)):  # in each epoch another rank has most
        with sync.join():
            for step in range(steps):
                sync.optimizer.zero_grad()
                loss_of(sync.model, step).backward()
                sync.optimizer.step()
    return digest(model)


def uneven_batchnorm() -> str:
    """Statistics within join() are those of the last rank that has data."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    sync = synchronize(model, sgd(model, momentum=0.0))
    for steps in ((1, 2, 2, 1), (3, 1, 2, 3)):
        with sync.join():
            for step in range(steps[RANK]):
                sync.optimizer.zero_grad()
                loss_of(sync.model, step).backward()
                sync.optimizer.step()
    return digest(model)


def carried_state() -> str:
    model = mlp()
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, rank=0).backward()
        optimizer.step()
    optimizer.zero_grad()
    train(synchronize(model, optimizer))
    return digest(model)


# What follows has no counterpart in plain DDP, or does more than it: compared between backends, or checked here.


def broadcast_from_rank_0() -> str:
    torch.manual_seed(100 + RANK)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = sgd(model, lr=0.1 * (RANK + 1))
    loss_of(model, RANK).backward()
    optimizer.step()
    optimizer.zero_grad()
    sync = hb.GradientSynchronizer(model, optimizer)
    momenta = [state["momentum_buffer"].sum().item() for state in sync.optimizer.state.values()]
    rates = [group["lr"] for group in sync.optimizer.param_groups]
    assert sync.model.state_dict().keys() == model.state_dict().keys()
    return digest(model) + str((momenta, rates))


def weighted() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(3):
        sync.weight = 1.0 + 2.0 * RANK
        sync.optimizer.zero_grad()
        loss_of(sync.model, step, rows=1 + 2 * RANK).backward()
        sync.optimizer.step()
    alone = mlp()
    optimizer = sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        parts = [batch(step, rank, 1 + 2 * rank) for rank in range(SIZE)]
        x, y = (torch.cat(side) for side in zip(*parts, strict=True))
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
    # three steps of a contraction with some 30 float32 roundings (6e-8 each) of values below 2
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3 * 30 * 2 * 6e-8)
    return digest(model)


def weight_zero_hides_nan() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    for step in range(3):
        sync.weight = 0.0 if RANK == SIZE - 1 else 1.0
        sync.optimizer.zero_grad()
        loss = loss_of(sync.model, step)
        (loss * float("nan") if RANK == SIZE - 1 else loss).backward()
        sync.optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return digest(model)


def total_weight_zero_skips() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        sync.weight = 0.0 if step == 1 else 1.0
        before = digest(model)
        sync.optimizer.zero_grad()
        scaler.scale(loss_of(sync.model, step)).backward()
        assert sync.skipped == (step == 1)
        if step == 1:
            assert all((p.grad == 0).all() for p in model.parameters())
        scaler.step(sync.optimizer)
        scaler.update()
        assert (digest(model) == before) == (step == 1)
    return digest(model)


def nan_travels() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model))
    loss = loss_of(sync.model, 0)
    (loss * float("nan") if RANK == 0 else loss).backward()
    assert all(torch.isnan(p.grad).any() for p in model.parameters())
    return "nan"


def addresses(state: dict[str, Any]) -> set[int]:
    """Return where the tensors of a state lie."""
    found = {tensor.data_ptr() for tensor in tree_leaves(state)}
    assert found
    return found


def error_feedback_bf16() -> str:
    model = mlp()
    sync = synchronize(model, sgd(model), policy="ef(bf16)")
    train(sync)
    middle = copy.deepcopy(sync.state_dict())
    sync.load_state_dict(middle)
    train(sync)
    gathered = sync.state_dict(gather=True)
    assert (len(gathered.get("ranks", ())) == SIZE) == (RANK == 0)
    if RANK == 0:  # torch.save writes a state once although it is under two keys, and no two ranks share one
        assert addresses(gathered["state"]) == addresses(gathered["ranks"][0])
        assert all(addresses(gathered["state"]).isdisjoint(addresses(other)) for other in gathered["ranks"][1:])
    return digest(model)


class GlobalClip:
    """Made at run time: a policy of scope "step", the mean clipped to a global norm."""

    @staticmethod
    def make() -> Any:
        from dataclasses import dataclass

        from hvdbridge.policy.base import Aggregated, Policy
        from hvdbridge.policy.collectives import AllReduce

        @dataclass(frozen=True)
        class Clip(Policy):
            scope = "step"

            def aggregate(self, bucket: Any, state: Any) -> Any:
                total = yield AllReduce(bucket.weighted().buffer)
                return Aggregated(total * (0.1 / total.norm()).clamp(max=1.0))

        return Clip()


def step_scope() -> str:
    """One bucket of each type, whatever their size: nothing is sent before the last gradient, so none is joined."""

    class TwoTypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = mlp(), mlp().double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(x) + self.wide(x.double())

    for model, buckets in ((mlp(), 1), (TwoTypes(), 2)):
        sync = synchronize(model, sgd(model), policy=GlobalClip.make())
        handed_in, submit = [], sync._aggregator.submit

        def counted(piece: Any, last: bool, submit: Any = submit, handed_in: list[bool] = handed_in) -> None:
            handed_in.append(last)
            submit(piece, last)

        sync._aggregator.submit = counted
        for step in range(2):  # DDP makes its buckets anew after the first
            sync.optimizer.zero_grad()
            x, y = batch(step)
            out = sync.model(x)
            nn.functional.mse_loss(out, y.to(out.dtype)).backward()
            norm = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()
            # 283 roundings of 6e-8
            torch.testing.assert_close(norm, torch.tensor(0.1, dtype=torch.float64), rtol=2e-5, atol=0)
            sync.optimizer.step()
        assert handed_in == [*[False] * (buckets - 1), True] * 2, handed_in
    return "clipped"


def average_gradients() -> str:
    model = mlp()
    loss_of(model, 0).backward()
    hb.average_gradients(model, weight=1.0 + RANK)
    found = hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    chosen = []
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        hb.average_gradients(model, policy="randomk:ratio=0.1,ef=false")
        chosen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).nonzero().flatten().tolist())
    assert chosen[0] != chosen[1]
    return found + str(chosen)


def refused(call: Callable[[], Any], *names: str) -> None:
    """A StepError that names these parameters."""
    with pytest.raises(hb.StepError) as caught:
        call()
    assert all(repr(name) in str(caught.value) for name in names), str(caught.value)


def local_gradients() -> str:
    """As under DDP one backward that aggregates follows a forward outside of no_sync(); DDP would say nothing."""
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    sync = synchronize(model, sgd(model))
    bare = getattr(sync.model, "module", sync.model)

    def two_forwards() -> None:
        first, second = loss_of(sync.model, 0), loss_of(sync.model, 1)
        first.backward()
        second.backward()

    def two_backwards() -> None:
        loss = loss_of(sync.model, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    def past_the_forward() -> None:
        x, y = batch(0)
        nn.functional.mse_loss(bare[4](torch.tanh(bare[2](torch.tanh(bare[0](x))))), y).backward()

    def mixed() -> None:
        loss_of(sync.model, 0).backward()
        past_the_forward()

    def forward_in_a_closed_block() -> None:
        with sync.no_sync():
            loss = loss_of(sync.model, 0)
        loss.backward()

    train(sync, 2)
    for way in (two_forwards, two_backwards, past_the_forward, mixed, forward_in_a_closed_block):
        sync.optimizer.zero_grad()
        before = digest(model)
        way()
        refused(sync.optimizer.step, *names)
        assert digest(model) == before, way.__name__
        train(sync, 1)
    return digest(model)


def unreduced_gradients() -> str:
    """Under DDP a parameter without a gradient keeps a bucket back, in the first step or later. The backward is refused
    on every backend, by name."""

    def some(sync: Any, heads: tuple[int, ...]) -> torch.Tensor:
        return sum(sync.model(batch(0)[0], head).sum() for head in heads)

    for policy in ("mean", "ef(bf16)"):
        for good in (0, 2):
            for way in ("left out", "inputs"):
                model = Branches()
                sync = synchronize(model, sgd(model), policy=policy)
                for _ in range(good):
                    sync.optimizer.zero_grad()
                    some(sync, (0, 1, 2)).backward()
                    sync.optimizer.step()
                sync.optimizer.zero_grad()
                before = digest(model)
                names = ["heads.1.weight", "heads.1.bias", "find_unused_parameters=True"]
                if way == "left out":
                    call = some(sync, (0, 2)).backward
                else:
                    inputs = [p for p in model.parameters() if p is not model.body.weight]
                    call, names = partial(some(sync, (0, 1, 2)).backward, inputs=inputs), ["body.weight"]
                with pytest.raises(hb.StepError) as caught:
                    call()
                assert all(name in str(caught.value) for name in names), str(caught.value)
                expect("StepError", sync.optimizer.step)
                assert digest(model) == before
                sync.close()
    return "no silent step"


def never_used() -> str:
    """What no rank uses has no gradient, and does not move, with find_unused_parameters and in a static graph."""
    digests = []
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        sync = synchronize(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), **options)
        before = digest(model.heads[1])
        for step in range(3):
            sync.optimizer.zero_grad()
            sync.model(batch(step)[0], 2 * (RANK % 2)).sum().backward()
            sync.optimizer.step()
        assert model.heads[1].weight.grad is None
        assert digest(model.heads[1]) == before
        digests.append(digest(model))
    if not PLAIN:
        sync.optimizer.zero_grad()
        with pytest.raises(hb.StepError, match=r"graph has changed for .*'heads\.1\."):
            sync.model(batch(0)[0], 1).sum().backward()
    return " ".join(digests)


def misuse() -> str:
    found = []
    model = mlp()
    optimizer = sgd(model)
    sync = synchronize(model, optimizer)
    found.append(expect("StepError", sync.optimizer.step))
    with sync.no_sync():
        loss_of(sync.model, 0).backward()
    found.append(expect("StepError", sync.optimizer.step))
    if sync.optimizer is not optimizer:
        found.append(expect("StepError", optimizer.step))
    loss_of(sync.model, 0).backward()
    sync.optimizer.step()
    sync.weight = 1.0
    found.append(expect("WeightError", lambda: loss_of(sync.model, 0).backward()))
    model = Checkpointed(reentrant=True)
    sync = synchronize(model, sgd(model))
    found.append(expect("Unsupported", lambda: loss_of(sync.model, 0).backward()))
    embedding = nn.Embedding(4, 2, sparse=True)
    found.append(expect("Unsupported", lambda: synchronize(embedding)))
    other = nn.Linear(3, 3 + RANK)
    found.append(expect("RankMismatch", lambda: synchronize(other)))
    found.append(expect("RankMismatch", lambda: synchronize(mlp(), bucket_mb="auto" if RANK else 25.0)))
    if hb.backend() == "torch":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(mlp()))
        found.append(expect("ConfigurationError", lambda: synchronize(model)))
        sync = synchronize(mlp())
        sync.close()
        synchronize(nn.Sequential(sync.model)).close()  # what is in there sends nothing more
    for bucket_mb in (0, "25", float("nan")):
        found.append(expect("ConfigurationError", lambda size=bucket_mb: synchronize(mlp(), bucket_mb=size)))
    assert all(found), found
    return "all refused"


def expect(name: str, call: Callable[[], Any]) -> str:
    with pytest.raises(getattr(hb, name)):
        call()
    return name


def unfrozen_later() -> str:
    model = mlp()
    model[0].requires_grad_(False)
    sync = synchronize(model, sgd(model))
    train(sync, 1)
    model[0].requires_grad_(True)
    refused(lambda: loss_of(sync.model, 1), "0.weight", "0.bias")
    return "StepError"


def evaluation_by_one_rank() -> str:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    sync = synchronize(model, sgd(model))
    train(sync, 2)
    if RANK == 0:
        model.eval()
        with torch.no_grad():
            model(batch(0)[0])
            hb.SyncBatchNorm(6, track_running_stats=False).eval()(batch(0)[0])
        model.train()
    train(sync, 2)
    return digest(nn.ParameterList(model.parameters()))  # DDP brings the buffers with the next forward only


def nothing_stays_alive() -> str:
    alive = []
    for _ in range(3):
        model = mlp()
        sync = synchronize(model, sgd(model))
        train(sync, 2)
        alive.append(weakref.ref(model[0]))
        sync.close()
        del model, sync
    gc.collect()
    assert not any(reference() for reference in alive)
    return "gone"


def compiled_names() -> str:
    model = mlp()
    wrapped = synchronize(torch.compile(model, backend="aot_eager"), sgd(model), bucket_mb=25).model
    assert hb.backend() != "torch" or wrapped.state_dict().keys() == model.state_dict().keys()
    return "bare"


def without_hook() -> str:
    """Plain DDP's own mean needs no hook of ours; weights in the first step and a join give it one."""

    def has_hook(sync: Any) -> bool:
        return bool(getattr(sync.model, "_comm_hooks", True))

    on_torch, digests = hb.backend() == "torch", []
    for case in ("no weights", "weights", "no weights in a closed block", "weights after another backward", "views"):
        model = mlp()
        sync = synchronize(model, sgd(model), gradient_as_bucket_view=case == "views")
        if case == "weights after another backward" and RANK == 0:  # past the forward, so it aggregates nothing
            next(iter(model.children()))(batch(0)[0]).sum().backward()
            sync.optimizer.zero_grad()
        if case.startswith("weights"):
            sync.weight = RANK + 1.0
        if case == "no weights in a closed block":
            with sync.no_sync():
                loss = sync.model(batch(0)[0]).sum()
            loss.backward()  # aggregates nothing, says its forward
            sync.optimizer.zero_grad()
        train(sync, 3)
        assert has_hook(sync) == (not on_torch or case.startswith("weights")), case
        if case == "no weights":
            with sync.join():
                train(sync, 1 + RANK)
            assert has_hook(sync)
        train(sync, 1)
        digests.append(digest(model))
        sync.close()
    return " ".join(digests)


def backward_in_a_closed_block() -> str:
    """What a backward does is decided by its forward; weights of the first step count, in views and in copies."""
    digests = []
    for views in (False, True):
        model = mlp()
        sync = synchronize(model, gradient_as_bucket_view=views)
        sync.weight = 1.0 + 2 * RANK
        loss = loss_of(sync.model, 0)
        with sync.no_sync():
            loss.backward()
        digests.append(digest(nn.ParameterList(p.grad for p in model.parameters())))
        sync.close()
    assert digests[0] == digests[1]
    return digests[0]


def as_lists(state: Any) -> Any:
    return {key: as_lists(value) for key, value in state.items()} if isinstance(state, dict) else state.tolist()


def channels_last() -> str:
    """Policies read gradients by index, however they lie in DDP's buckets; and so their state fits any backend."""
    found = []
    for policy in ("mean", "int8", "topk:ratio=0.1", "powersgd:rank=2", "randomk:ratio=0.1", "delayed(ef(bf16))"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3))
        model.to(memory_format=torch.channels_last)
        optimizer, saved = sgd(model), None
        for steps in (3, 2):  # the second synchronizer goes on with the first one's state
            sync = synchronize(model, optimizer, policy=policy)
            if saved is not None:
                sync.load_state_dict(saved)
            for step in range(steps):
                optimizer.zero_grad()
                x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + RANK))
                sync.model(x.to(memory_format=torch.channels_last)).square().mean().backward()
                sync.optimizer.step()
            saved = copy.deepcopy(sync.state_dict())
            everyone = hb.current().control.all_gather_object(as_lists(saved["state"]))
            found.append(digest(model) + hashlib.sha256(repr(everyone).encode()).hexdigest()[:16])
            sync.close()
    return " ".join(found)


def after_close() -> str:
    """The model that a closed synchronizer leaves is trained by each rank alone."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}):
        model, alone = mlp(), mlp()
        optimizer = sgd(model)
        sync = synchronize(model, optimizer, **options)
        train(sync, 2)
        alone.load_state_dict(model.state_dict())
        wrapped, before = sync.model, loss_of(sync.model, 2)
        sync.optimizer.zero_grad()
        sync.close()
        before.backward()  # of a forward that told DDP to expect it
        loss_of(alone, 2).backward()
        for _ in range(1 + RANK):  # as often as a rank likes
            loss_of(wrapped, 3).backward()
            loss_of(alone, 3).backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), options
    return "local"


def made_anew() -> str:
    """A layer is unfrozen between two synchronizers, with the objects of the first or with those it was made of."""
    digests = []
    for rebound in (True, False):
        for unused in (True, False):
            model = mlp()
            model[0].requires_grad_(False)
            module, optimizer = model, sgd(model)
            sync = synchronize(module, optimizer, find_unused_parameters=unused)
            train(sync, 2)
            if rebound:
                module, optimizer = sync.model, sync.optimizer
            loss = loss_of(sync.model, 0)  # keeps autograd's nodes, and the hooks on them
            sync.close()
            optimizer.zero_grad()
            loss_of(module, 1).backward()
            local = copy.deepcopy(model)
            local.zero_grad()
            loss_of(local, 1).backward()
            for mine, theirs in zip(model.parameters(), local.parameters(), strict=True):
                assert theirs.grad is None or torch.equal(mine.grad, theirs.grad)
            optimizer.zero_grad()
            model.requires_grad_(True)
            again = synchronize(module, optimizer, find_unused_parameters=unused)
            assert list(again._params) == [name for name, _ in model.named_parameters()]
            for _ in range(2):
                again.optimizer.zero_grad()
                loss_of(again.model, 2).backward()
                everyone = hb.current().control.all_gather_object([p.grad.tolist() for p in model.parameters()])
                assert everyone[0] == everyone[-1], (rebound, unused)
                again.optimizer.step()
            again.close()
            del loss
            digests.append(digest(model))
    assert len(set(digests)) == 1, digests
    return digests[0]


def frozen_later() -> str:
    """What is frozen while training goes on stays where it is, whatever moments and weight decay would do; without a
    used-map it is refused by name."""
    for steps in (0, 2):  # before it
        model = mlp()
        sync = synchronize(
            model, torch.optim.AdamW(model.parameters(), weight_decay=0.1), find_unused_parameters=True
        )
        train(sync, steps)
        model[2].requires_grad_(False)
        before = digest(model[2])
        train(sync, 2)
        assert digest(model[2]) == before
        assert model[2].weight.grad is None
        model[2].weight.grad = torch.ones_like(model[2].weight)  # the user's own
        for p in model[0].parameters():
            p.grad = None
        loss_of(sync.model, 0).backward()
        assert model[2].weight.grad.eq(1).all()
        sync.optimizer.zero_grad()
        model[2].requires_grad_(RANK > 0)  # a rank that alone has frozen it goes with the others
        train(sync, 1)
        assert hb.broadcast_object(digest(model)) == digest(model)
        model[2].requires_grad_(True)
        train(sync, 1)
        assert digest(model[2]) != before
    found = digest(model)
    model = mlp()
    sync = synchronize(model, sgd(model))
    train(sync, 1)
    model[2].requires_grad_(False)
    refused(lambda: train(sync, 1), "2.weight", "2.bias")
    return found


class Scaled(torch.optim.SGD):
    """An optimizer with an option that its groups do not have."""

    def __init__(self, params: Any, lr: float = 1.0, gain: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.gain = gain

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * self.gain)


def optimizer_made_before() -> str:
    """Options, step hooks, a scheduler and the groups of the optimizer that was given count on."""
    model = mlp()
    optimizer = Scaled(model.parameters(), lr=0.1, gain=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    group = optimizer.param_groups[0]
    sync = synchronize(model, optimizer)
    assert isinstance(sync.optimizer, Scaled)
    train(sync, 2)
    handle.remove()
    train(sync, 1)
    rates = []

    def stepped() -> None:
        schedule.step()
        assert sync.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
        rates.append(schedule.get_last_lr()[0])

    stepped()
    for _ in range(2):
        with sync.join():
            train(sync, 1 + RANK)
        stepped()
    assert sync.optimizer.param_groups[0] is group
    for each in (sync.optimizer, optimizer):  # a resume
        each.load_state_dict(copy.deepcopy(each.state_dict()))
        stepped()
    train(sync, 1)
    return f"{digest(model)} {rates} {calls[:5]}"


def join_with_sync_batchnorm() -> str:
    model = nn.Sequential(nn.Linear(6, 8), hb.SyncBatchNorm(8))
    sync = synchronize(model)
    return expect("Unsupported", sync.join().__enter__)


def sync_batchnorm() -> str:
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(6, 8), hb.SyncBatchNorm(8), nn.Linear(8, 3)).double()
    alone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    alone.load_state_dict(model.state_dict())
    sync, optimizer = synchronize(model, sgd(model)), sgd(alone)
    for step in range(3):
        parts = [[side.double() for side in batch(step, rank, 3 + 2 * rank)] for rank in range(SIZE)]
        sync.weight = len(parts[RANK][0])
        sync.optimizer.zero_grad()
        nn.functional.mse_loss(sync.model(parts[RANK][0]), parts[RANK][1]).backward()
        sync.optimizer.step()
        x, y = (torch.cat(side) for side in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)  # some 1e3 roundings of 1.1e-16, values below 2
    return digest(model)


def sync_batchnorm_of_halves() -> str:
    """The output has the input's type, rounded once: bfloat16 rounds by 2^-8 at most, float32 sums by some 1e-6."""
    torch.manual_seed(14)
    norm, whole = hb.SyncBatchNorm(4), nn.BatchNorm1d(4)
    x, dy = ((torch.randn(SIZE, 512, 4) * scale + shift).bfloat16() for scale, shift in ((0.25, 10.0), (1.0, 0.5)))
    mine, union = x[RANK].clone().requires_grad_(), x.flatten(0, 1).float().requires_grad_()
    found, expected = norm(mine), whole(union)
    found.backward(dy[RANK])
    expected.backward(dy.flatten(0, 1).float())
    assert found.dtype == mine.grad.dtype == torch.bfloat16
    of_union = (expected.detach(), union.grad)
    for ours, theirs in zip((found.detach(), mine.grad), of_union, strict=True):
        torch.testing.assert_close(ours.float(), theirs.view(SIZE, 512, 4)[RANK], rtol=2**-8, atol=1e-4)
    return f"{norm.weight.grad.dtype} {norm.bias.grad.dtype} {digest(norm)}"


class Unwilling(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


def sharded_optimizer() -> str:
    """ZeRO under torch, whose state is on all ranks together, does what a whole optimizer does elsewhere."""
    model, options = mlp(), {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    if hb.backend() == "torch":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    sync = synchronize(model, optimizer)
    train(sync)
    if hb.backend() == "torch":
        expect("Unsupported", sync.join().__enter__)
    return digest(model) + expect("Unsupported", lambda: synchronize(mlp(), Unwilling(model.parameters(), lr=0.1)))


def complex_parameters() -> str:
    model = nn.ParameterDict({"spectrum": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    return expect("Unsupported", lambda: synchronize(model))


REFERENCED = [
    plain_training, unused_on_some_ranks, unused_on_all_ranks, shared_and_frozen, several_optimizers, scheduler,
    closure, compiled, checkpointing, two_backwards, accumulation, grad_scaler, clipping, adamw_foreach, buffers, gan,
    uneven_join, uneven_batchnorm, carried_state, bucket_by_measurement, never_used,
]  # fmt: skip
OWN = [
    broadcast_from_rank_0, weighted, weight_zero_hides_nan, total_weight_zero_skips, nan_travels, error_feedback_bf16,
    step_scope, average_gradients, local_gradients, unreduced_gradients, sync_batchnorm, misuse,
    unfrozen_later, static_graph, default_buckets, nothing_stays_alive, compiled_names, join_with_sync_batchnorm,
    sync_batchnorm_of_halves, complex_parameters, sharded_optimizer,
    evaluation_by_one_rank, without_hook, backward_in_a_closed_block, channels_last, after_close,
    made_anew, frozen_later, optimizer_made_before,
]  # fmt: skip

if __name__ == "__main__":
    results = {}
    chosen = [name for name in sys.argv[1:] if name not in ("plain", "copies")]
    for scenario in REFERENCED if PLAIN else REFERENCED + OWN:
        if chosen and scenario.__name__ not in chosen:
            continue
        try:
            results[scenario.__name__] = scenario()
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        record(RANK, results)
    if chosen:
        print(results)
    if PLAIN:
        leave_torch()
    hb.shutdown()
