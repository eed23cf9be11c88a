"""What people do to a data-parallel model: per case what came out, the same on every backend and rank.

What is refused is recorded as the error's type and words, without the number of the rank.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jobs import record
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import hvdbridge as hb

hb.init()
torch.set_num_threads(1)
RANK, SIZE = hb.rank(), hb.size()


class Mlp(nn.Sequential):
    """Parts that are put into it later take no part in the forward."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)))


def mlp() -> Any:
    return Mlp()


def data(step: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + RANK))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(sync: Any, steps: int = 2) -> None:
    for step in range(steps):
        sync.optimizer.zero_grad()
        sync.model(data(step)).square().mean().backward()
        sync.optimizer.step()


def digest(*tensors: torch.Tensor | None) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(b"none" if tensor is None else tensor.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return re.sub(r"rank \d+", "rank", f"{type(error).__name__}: {error}")
    return "nothing"


def mesh() -> DeviceMesh:
    if not dist.is_initialized():
        path = hb.broadcast_object(tempfile.mktemp())
        dist.init_process_group("gloo", store=dist.FileStore(path, SIZE), rank=RANK, world_size=SIZE)
    return init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))


def ignored_parameters() -> str:
    """They keep their values and shapes, and their gradients and moments stay local."""
    found = []
    for way in ("name", "pattern", "parameter", "DDP's list", "of the module itself"):
        model = mlp()
        model.own = nn.Parameter(torch.full((2 + RANK,), 1.0 + RANK))
        model.register_buffer("count", torch.full((1 + RANK,), float(RANK)))
        model.head = nn.Linear(2, 2 + RANK)
        with torch.no_grad():
            model.head.weight.fill_(1.0 + RANK)
        names = ["own", "count", "head.weight", "head.bias"]
        optimizer, ignore = sgd(model), None
        if way == "name":
            ignore = names
        elif way == "pattern":
            ignore = ["own", "coun?", "head.*"]
        elif way == "parameter":
            ignore = [model.own, model.count, *model.head.parameters()]
        elif way == "DDP's list":
            hb.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        else:
            model._ddp_params_and_buffers_to_ignore = [".own", "count", "head.weight", "head.bias"]
        optimizer.state[model.head.weight]["momentum_buffer"] = torch.ones_like(model.head.weight)
        sync = hb.GradientSynchronizer(model, optimizer, ignore=ignore)
        assert model.head.weight.eq(1.0 + RANK).all()
        assert model.own.shape == (2 + RANK,)
        assert optimizer.state[model.head.weight]["momentum_buffer"].shape == model.head.weight.shape
        for step in range(2):
            sync.optimizer.zero_grad()
            (sync.model(data(step))[:, :2].square().mean() + model.own.sum()).backward()
            if step == 0:
                assert model.own.grad.eq(1).all()
            sync.optimizer.step()
        assert model.count.eq(RANK).all()
        sync.close()
        found.append(digest(*model[0].parameters(), *model[2].parameters()))
    assert len(set(found)) == 1, found
    return found[0] + said(lambda: hb.GradientSynchronizer(mlp(), ignore="nothing.*"))


def group_is_a_mesh() -> str:
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model), group=mesh()["dp"])
    train(sync)
    sync.close()
    gradients = []
    for given in ({"process_group": mesh()}, {"process_group": mesh().get_group("dp")}, {"device_mesh": mesh()["dp"]}):
        wrapped = hb.DistributedDataParallel(mlp(), **given)
        wrapped(data()).sum().backward()
        gradients.append(digest(*(p.grad for p in wrapped.parameters())))
    assert len(set(gradients)) == 1
    hb.average_gradients(model, group=mesh())
    square = DeviceMesh("cpu", torch.arange(SIZE).reshape(1, SIZE))
    return digest(*model.parameters(), *(p.grad for p in wrapped.parameters())) + re.sub(
        "DeviceMesh.*?has", "mesh has", said(lambda: hb.GradientSynchronizer(mlp(), group=square))
    )


def optimizers_within_backward() -> str:
    found = []
    for policy in ("mean", "ef(bf16)"):
        model = mlp()
        sync = hb.GradientSynchronizer(model, policy=policy)
        for p in model.parameters():
            own = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        found.append(said(lambda sync=sync: sync.model(data()).square().mean().backward()))
        sync.close()
    model = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return " ".join([*found, said(lambda: hb.DistributedDataParallel(model))])


def other_parameters() -> str:
    """The next forward refuses them by name, whatever optimizer holds them."""

    def assigned(model: nn.Module) -> None:
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)

    def halved(model: nn.Module) -> None:
        parametrizations.weight_norm(model[2])

    def parametrized(model: nn.Module) -> None:
        parametrize.register_parametrization(model[0], "weight", nn.Identity())  # it holds the same object

    def adapted(model: nn.Module) -> None:
        model[2] = nn.Sequential(model[2], nn.Linear(2, 2))

    def tied(model: nn.Module) -> None:
        model[2].weight = nn.Parameter(model[2].weight.clone())

    def unfrozen(model: nn.Module) -> None:
        model.frozen.requires_grad_(True)

    def cast(model: nn.Module) -> None:
        model[2].double()

    def added_and_unfrozen(model: nn.Module) -> None:
        model.adapter = nn.Linear(2, 2).requires_grad_(False)
        sync.model(data()).sum().backward()
        model.adapter.requires_grad_(True)

    def inserted(model: nn.Module) -> None:
        model.frozen.insert(0, nn.Linear(8, 8))

    def shared(model: nn.Module) -> None:
        model[0].weight = model[2].weight

    found = []
    for change in (
        assigned, halved, parametrized, adapted, tied, unfrozen, cast, added_and_unfrozen, inserted, shared
    ):  # fmt: skip
        model = mlp()
        model.frozen = nn.ModuleList([nn.Linear(1, 1).requires_grad_(False)])
        sync = hb.GradientSynchronizer(model)
        sync.model(data()).sum().backward()
        change(model)
        found.append(f"{change.__name__}: {said(lambda sync=sync: sync.model(data()))}")
        sync.close()
    return "\n".join(found)


def the_same_parameters() -> str:
    """Modules may change as long as all parameters stay where they are."""
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model))
    train(sync)
    model[1] = nn.Tanh()
    model.frozen = nn.Linear(1, 1).requires_grad_(False)
    train(sync)
    return digest(*model.state_dict().values())


def without_a_forward() -> str:
    """Any optimizer is told of gradients that nobody aggregated; those that are dropped before do no harm."""
    model = mlp()
    wrapped, optimizer = hb.DistributedDataParallel(model), sgd(model)
    wrapped(data()).sum().backward()
    model[2](model[0](data())).sum().backward()
    loss = wrapped(data()).sum()
    found = said(optimizer.step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return found + digest(*model.parameters())


def optimizer_of_others() -> str:
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(mlp()))
    sync.model(data()).sum().backward()
    found = said(sync.optimizer.step)
    sync.close()
    head = nn.Linear(2, 2)
    sync = hb.GradientSynchronizer(model, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1))
    head(sync.model(data())).sum().backward()
    found += said(sync.optimizer.step)
    sync.close()
    return found


def changed_within_backward() -> str:
    """By hand, in a hook; the gradient stays."""
    found = []
    for policy in ("mean", "ef(bf16)"):
        model = mlp()
        sync = hb.GradientSynchronizer(model, policy=policy)

        def change(p: nn.Parameter) -> None:
            with torch.no_grad():
                p -= 0.1 * p.grad

        model[0].weight.register_post_accumulate_grad_hook(change)
        found.append(said(lambda sync=sync: sync.model(data()).square().mean().backward()))
        sync.close()
    return "\n".join(found)


def left_in_the_middle() -> str:
    """An exception within backward: the next forward says that others wait."""
    model = mlp()
    sync = hb.GradientSynchronizer(model, bucket_mb=1e-4)

    def fail(p: nn.Parameter) -> None:
        raise ValueError("of the user")

    handle = model[0].weight.register_post_accumulate_grad_hook(fail)
    found = [said(lambda: sync.model(data()).sum().backward())]
    handle.remove()
    found.append(said(lambda: sync.model(data())))
    sync.close()
    return "\n".join(found)


def sparse_by_function() -> str:
    """No module says that gradients will be sparse; what is ignored may have such."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            torch.manual_seed(7)
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(nn.functional.embedding(x, self.table, sparse=True))

    found, x = [], torch.tensor([RANK, 3])
    for policy in ("mean", "ef(bf16)"):
        model = Lookup()
        sync = hb.GradientSynchronizer(model, policy=policy)
        found.append(said(lambda sync=sync: sync.model(x).sum().backward()))
        sync.close()
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    sync = hb.GradientSynchronizer(model, ignore="0.weight")
    sync.model(x).sum().backward()
    assert model[0].weight.grad.is_sparse
    sync.close()
    return "\n".join([*found, digest(*(p.grad for p in model[1].parameters()))])


def refused_at_construction() -> str:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    sharded = mlp()
    parallelize_module(sharded, mesh(), {"0": ColwiseParallel()})
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    found = []
    with torch.device("meta"):
        meta = mlp()
    for model in (lazy, sharded, sparse, meta):
        found += [said(lambda model=model: hb.GradientSynchronizer(model))]
        found += [said(lambda model=model: hb.DistributedDataParallel(model))]
        found += [said(lambda model=model: hb.average_gradients(model))]
    torch._dynamo.config.compiled_autograd = True
    found += [said(lambda: hb.GradientSynchronizer(mlp()))]
    torch._dynamo.config.compiled_autograd = False
    return "\n".join(found)


def default_device() -> str:
    """Only what is made by the user follows it."""
    model = mlp()
    batches, labels = [data(step) for step in range(2)], torch.tensor([0.5])
    with torch.device("meta"):
        sync = hb.GradientSynchronizer(model, sgd(model), find_unused_parameters=True, weighted=True)
        with sync.join():
            for x in batches[: 1 + RANK]:
                sync.optimizer.zero_grad()
                sync.model(x).square().mean().backward()
                sync.optimizer.step()
        hb.barrier()
        hb.broadcast_object("text")
        hb.all_reduce(labels)
        sync.close()
    return f"{digest(*model.parameters())} {labels.item()}"


def sharded_optimizer() -> str:
    """Each rank keeps a part of the state, in a group of torch's that the script has made."""
    mesh()
    found = []
    for kind in (torch.optim.Adam, ZeroRedundancyOptimizer):
        model = mlp()
        options = {"optimizer_class": torch.optim.Adam} if kind is ZeroRedundancyOptimizer else {}
        sync = hb.GradientSynchronizer(model, kind(model.parameters(), lr=0.1, **options))
        train(sync, 3)
        sync.close()
        found.append(digest(*model.parameters()))
    assert found[0] == found[1], found
    model = mlp()
    wrapped = hb.DistributedDataParallel(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    found = [found[0], said(lambda: Join([wrapped, zero]))]
    wrapped.synchronizer.close()
    sync = hb.GradientSynchronizer(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))
    found += [said(lambda: sync.join().__enter__())]
    sync.close()
    return "\n".join(found)


def hooks_that_change_gradients() -> str:
    """They come before what aggregates, whenever registered; also of the parameter that completes a bucket."""

    def drop(p: nn.Parameter) -> None:
        p.grad = None

    def double(p: nn.Parameter) -> None:
        p.grad = p.grad * 2

    def halve(p: nn.Parameter) -> None:
        p.grad.mul_(0.5)

    found = []
    for change in (double, halve):
        digests = []
        for early, policy in ((True, "mean"), (False, "mean"), (True, "mean:exact=true"), (False, "mean:exact=true")):
            model = mlp()
            if early:
                model[0].weight.register_post_accumulate_grad_hook(change)
            sync = hb.GradientSynchronizer(model, sgd(model), policy)
            if not early:
                model[0].weight.register_post_accumulate_grad_hook(change)
            train(sync, 3)
            sync.close()
            digests.append(digest(*model.parameters()))
        assert len(set(digests)) == 1, (change, digests)
        found.append(digests[0])
    assert len(set(found)) == 2
    for options in ({}, {"find_unused_parameters": True}):
        for way in ("early", "late", "of another"):
            model = mlp()
            hooked = model[0].weight if way == "of another" else model[2].weight
            if way == "early":
                hooked.register_post_accumulate_grad_hook(drop)
            sync = hb.GradientSynchronizer(model, sgd(model), **options)
            if way != "early":
                hooked.register_post_accumulate_grad_hook(lambda _, model=model: drop(model[2].weight))
            found.append(said(lambda sync=sync: train(sync)))
            sync.close()
    assert found[2:] == [found[2]] * 3 + ["nothing"] * 3, found
    return "\n".join(found)


class Heads(nn.Module):
    """Three, of which a forward takes two; in what it returns them, ``kind`` says."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.body, self.heads = nn.Linear(4, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, kind: Callable[..., Any] = dict) -> Any:
        x = self.body(x)
        return kind(one=self.heads[0](x), two=[self.heads[1](x)])


class Hidden:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts


def outputs_left_out() -> str:
    """find_unused_parameters=True is for what the loss does not depend on."""
    found = []
    for make in (hb.GradientSynchronizer, hb.DistributedDataParallel):
        for case in ("all outputs", "one output", "inputs="):
            model = Heads()
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
            wrapped = make(model, find_unused_parameters=True)
            forward = wrapped.model if make is hb.GradientSynchronizer else wrapped
            for _ in range(2):
                optimizer.zero_grad()
                loss = sum(output.sum() for output in (lambda one, two: (one, *two))(**forward(data())))
                loss.backward()
                optimizer.step()
            if case == "one output":
                loss = forward(data())["one"].sum()
            else:
                loss = (lambda one, two: one.sum() + two[0].sum())(**forward(data()))
            inputs = [*model.heads.parameters()] if case == "inputs=" else None
            found.append(f"{case}: {said(lambda loss=loss, inputs=inputs: loss.backward(inputs=inputs))}")
            found.append(digest(*model.parameters()))
            found.append(said(lambda forward=forward: forward(data(), Hidden)))
            (wrapped if make is hb.GradientSynchronizer else wrapped.synchronizer).close()
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    return "\n".join(found)


class Codebook(nn.Module):
    """Its forward depends on a buffer, which it moves towards this rank's data."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x - self.center)
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.5)
            self.count += 1 + RANK
        return y


def buffers() -> str:
    """Every forward that aggregates sees those of rank 0, as in plain DDP, and one rank may evaluate alone."""
    found = []
    kinds = [hb.GradientSynchronizer, hb.DistributedDataParallel]
    if hb.backend() == "torch":
        kinds.append(torch.nn.parallel.DistributedDataParallel)
    for make in kinds:
        for case in ("one forward", "two forwards", "a step that is left out", "alone"):
            if case == "alone" and make not in kinds[:2]:
                continue
            model = Codebook()
            if make not in kinds[:2]:
                model.count = model.count.int()  # Gloo has no 16 bits
            optimizer = sgd(model)
            wrapped = make(model)
            forward = wrapped.model if make is hb.GradientSynchronizer else wrapped
            for step in range(4):
                optimizer.zero_grad()
                loss = forward(data(step)).square().mean()
                if case == "two forwards":
                    loss = loss + forward(data(step + 9)).square().mean()
                if case == "a step that is left out" and step == 1:
                    continue
                loss.backward()
                optimizer.step()
                if case == "alone" and step % SIZE == RANK:
                    with torch.no_grad():
                        forward(data(step))
            found.append(f"{case}: {digest(*model.parameters())}")
            if make in kinds[:2]:
                (wrapped if make is hb.GradientSynchronizer else wrapped.synchronizer).close()
    ours = found[:4]
    assert found[4:8] == ours
    assert found[8:] in ([], ours[:3]), found
    return "\n".join(ours)


def a_forward_of_one_rank() -> str:
    """It meets the others' weights, and all hear of it."""
    model = Codebook()
    sync = hb.GradientSynchronizer(model, sgd(model), weighted=True)

    def steps() -> None:
        for step in range(2):
            sync.weight = 1.0 + RANK
            if step == 1 and RANK == 0:
                sync.model(data())
            train(sync, 1)

    found = said(steps)
    sync.close()
    return found


def buffers_of_the_last() -> str:
    """Within join() they are those of a rank that still has data, of whatever type."""
    model = Codebook()
    sync = hb.GradientSynchronizer(model, sgd(model))
    with sync.join():
        train(sync, 2 + RANK)
    sync.close()
    return digest(*model.parameters(), *model.buffers())


class Own(torch.optim.SGD):
    """Its constructor wants more than parameters."""

    def __init__(self, params: Any, lr: float, name: str) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.name = name


def an_optimizer_of_the_users() -> str:
    model = mlp()
    sync = hb.GradientSynchronizer(model, Own(model.parameters(), 0.1, "mine"))
    assert sync.optimizer.name == "mine"
    assert isinstance(sync.optimizer, Own)
    train(sync)
    sync.close()
    other = mlp()
    train(hb.GradientSynchronizer(other, sgd(other)))
    assert digest(*model.parameters()) == digest(*other.parameters())
    return digest(*model.parameters())


def static_graph_that_accumulates_first() -> str:
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model), static_graph=True)
    with sync.no_sync():
        return said(lambda: sync.model(data()))


class Checkpointed(Mlp):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        return checkpoint(self[2], x, use_reentrant=True) if self.reentrant else self[2](x)


def reentrant_from_the_second_step_on() -> str:
    model = Checkpointed()
    sync = hb.GradientSynchronizer(model, sgd(model))
    train(sync, 1)
    model.reentrant = True
    found = said(lambda: train(sync, 1))
    sync.close()
    return found


def torchs_ddp_is_replaced() -> str:
    """Scripts put ours in the place of torch's, ask for a static graph late, and register hooks on theirs."""
    found = []
    torchs, nn.parallel.DistributedDataParallel = nn.parallel.DistributedDataParallel, hb.DistributedDataParallel
    try:
        for options in ({}, {"hook": fp16_compress_hook}, {"policy": "ef(bf16)"}):
            hook = options.pop("hook", None)
            model = nn.parallel.DistributedDataParallel(
                mlp(), find_unused_parameters=True, bucket_cap_mb=1e-4 if hook or options else None, **options
            )
            model._set_static_graph()
            if hook is not None:
                model.register_comm_hook(None, hook)
            optimizer = sgd(model)
            with model.join():
                for step in range(2 + RANK):
                    optimizer.zero_grad()
                    model(data(step)).square().mean().backward()
                    optimizer.step()
            found += [digest(*model.parameters()), said(model._set_static_graph)]
            model.synchronizer.close()
    finally:
        nn.parallel.DistributedDataParallel = torchs
    return "\n".join(found)


def checkpoints_of_plain_ddp() -> str:
    """Their keys begin with ``module.``."""
    saved = torch.nn.DataParallel(mlp()).state_dict()
    assert all(key.startswith("module.") for key in saved)
    for value in saved.values():
        value.add_(1.0)
    model = mlp()
    wrapped = hb.DistributedDataParallel(model)
    found = [str(wrapped.load_state_dict(saved)), digest(*model.parameters())]
    found += [said(lambda: wrapped.load_state_dict({"module.0.weight": saved["module.0.weight"]}))]
    wrapped.synchronizer.close()
    sync = hb.GradientSynchronizer(model)
    found += [said(lambda: sync.model.load_state_dict(saved))]
    sync.close()
    return "\n".join(found)


def the_forward_decides() -> str:
    found = []
    kinds = (hb.DistributedDataParallel, hb.GradientSynchronizer)
    for inside, make in itertools.product(("forward", "backward"), kinds):
        model = mlp()
        made = make(model)
        wrapped = made.model if isinstance(made, hb.GradientSynchronizer) else made
        wrapped.require_backward_grad_sync = inside != "forward"
        loss = wrapped(data()).mean()
        wrapped.require_backward_grad_sync = inside == "forward"
        loss.backward()
        everyone = hb.current().control.all_gather_object([p.grad.tolist() for p in model.parameters()])
        assert (everyone[0] == everyone[1]) == (inside == "backward"), inside
        found.append(str(everyone))
    return " ".join(found)


class Subclass(hb.DistributedDataParallel):
    """With a constructor and a forward of its own."""

    def __init__(self, module: nn.Module, scale: float) -> None:
        super().__init__(module)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


def wrappers() -> str:
    """A second wrapper takes the place of the first, dropped or not; a second synchronizer is refused."""
    found = []
    model = mlp()
    first = hb.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no momentum: as under DDP join() would leave it unequal

    def steps(wrapped: nn.Module, count: int) -> None:
        for step in range(count):
            optimizer.zero_grad()
            wrapped(data(step)).square().mean().backward()
            optimizer.step()

    steps(first, 1)
    del first
    second = hb.DistributedDataParallel(model)
    with second.join():
        steps(second, 1 + RANK)
    third = Subclass(second, 0.5)
    steps(third, 2)
    assert isinstance(third, hb.DistributedDataParallel)
    assert third.module is model
    found.append(digest(*model.parameters()))
    found.append(said(lambda: second(data())))
    with torch.no_grad():
        second(data())
    found.append(said(lambda: third._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)))
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model))
    train(sync)
    found.append(said(lambda: hb.GradientSynchronizer(model)))
    found.append(said(lambda: hb.DistributedDataParallel(model)))
    found.append(said(lambda: hb.GradientSynchronizer(nn.Sequential(model, nn.Linear(2, 2)))))
    found.append(said(lambda: hb.GradientSynchronizer(model[2])))
    train(sync)
    sync.close()
    train(hb.GradientSynchronizer(model, sgd(model)))
    return "\n".join([*found, digest(*model.parameters()), said(lambda: hb.DistributedDataParallel(mlp(), [0]))])


def large_copies() -> str:
    """Weights that are copied in several messages, whatever they consist of; those that are frozen may be left out."""
    model = nn.Sequential(nn.Conv2d(512, 512, 3), nn.Linear(3000, 1500), nn.Linear(2, 2).to(torch.float8_e4m3fn))
    if RANK == 0:  # the same shapes, in another order in memory
        model.to(memory_format=torch.channels_last)
    model[2].requires_grad_(False)
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * RANK + index)))
    for broadcast in ("trainable", "all"):
        hb.GradientSynchronizer(model, broadcast=broadcast).close()
        everyone = hb.current().control.all_gather_object(digest(*(p.view(torch.uint8) for p in model[2].parameters())))
        assert (everyone[0] == everyone[1]) == (broadcast == "all"), broadcast
    return digest(*(p.float() for p in model.parameters()))


class Either(nn.Module):
    """Returns a tensor, or something that hides one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, hides: bool) -> Any:
        found = self.body(x)
        return torch.distributions.Categorical(logits=found) if hides else found


def backwards_of_all_kinds() -> str:
    """Gradients of inputs, of frozen models, of outputs that are hidden, of weights that a forward normalizes."""
    found = []
    for policy in ("mean", "ef(bf16)"):
        model = mlp()
        sync = hb.GradientSynchronizer(model, sgd(model), policy=policy)
        for step in range(2):
            x = data(step).requires_grad_()
            sync.optimizer.zero_grad()
            (slope,) = torch.autograd.grad(sync.model(x).sum(), x, create_graph=True)
            (sync.model(x).square().mean() + slope.square().mean()).backward()
            sync.optimizer.step()
            sync.model(x).sum().backward(inputs=[x])
            model.requires_grad_(False)
            sync.model(x).sum().backward()
            model.requires_grad_(True)
        train(sync, 1)
        found.append(digest(*model.parameters()))
        sync.close()
        either = Either()
        sync = hb.GradientSynchronizer(either, sgd(either), policy=policy)
        for step, hides in enumerate((False, False, True, False, True)):
            sync.optimizer.zero_grad()
            out = sync.model(data(step), hides)
            (out.entropy().mean() if hides else out.square().mean()).backward()
            sync.optimizer.step()
        found.append(digest(*either.parameters()))
        sync.close()
        torch.manual_seed(7)
        embedding = nn.Embedding(9, 4, max_norm=1.0)
        model = nn.Sequential(embedding, nn.Linear(4, 2))
        sync = hb.GradientSynchronizer(model, sgd(model), policy=policy)
        model.forward = lambda x, m=model: m[1](checkpoint(m[0], x, use_reentrant=False))
        for step in range(2):
            sync.optimizer.zero_grad()
            sync.model(torch.tensor([step, 3])).square().mean().backward()
            sync.optimizer.step()
        found.append(digest(*model.parameters()))
        sync.close()
    return " ".join(found)


def shared_parts() -> str:
    """Two wrappers share a part, each trained by its own forward."""
    torch.manual_seed(7)
    shared = nn.Linear(4, 4)
    first = hb.DistributedDataParallel(nn.Sequential(shared, nn.Linear(4, 2)))
    second = hb.DistributedDataParallel(nn.Sequential(shared, nn.Linear(4, 3)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    for step in range(4):
        wrapped, optimizer = (first, second)[step % 2], optimizers[step % 2]
        optimizer.zero_grad()
        wrapped(data(step)).square().mean().backward()
        optimizer.step()
    return digest(*first.parameters(), *second.parameters())


def compiled() -> str:
    """torch.compile around or inside of a wrapper, in place, or of the whole step, changes nothing."""
    found = []
    for way in ("not", "around", "inside", "around a synchronizer", "in place", "aot around", "step"):
        torch._dynamo.reset()
        model = mlp()
        optimizer = sgd(model)
        if way == "inside":
            trained: Any = hb.DistributedDataParallel(torch.compile(model, backend="eager"))
        elif "around" in way:
            wrapped: Any = (
                hb.GradientSynchronizer(model).model if "synchronizer" in way else hb.DistributedDataParallel(model)
            )
            trained = torch.compile(wrapped, backend="aot_eager" if way == "aot around" else "eager")
        else:
            trained = hb.DistributedDataParallel(model)
            if way == "in place":
                trained.compile(backend="eager")

        def gradients(x: torch.Tensor, trained: Any = trained) -> None:
            trained(x).square().mean().backward()

        for step in range(3):
            optimizer.zero_grad()
            (torch.compile(gradients, backend="aot_eager") if way == "step" else gradients)(data(step))
            optimizer.step()
        found.append(digest(*model.parameters()))
    assert len(set(found)) == 1, found
    return found[0]


CASES = [
    ignored_parameters, group_is_a_mesh, optimizers_within_backward, other_parameters, the_same_parameters,
    without_a_forward, changed_within_backward, left_in_the_middle, sparse_by_function,
    optimizer_of_others, refused_at_construction, default_device, checkpoints_of_plain_ddp,
    torchs_ddp_is_replaced, sharded_optimizer, hooks_that_change_gradients, the_forward_decides, outputs_left_out,
    buffers, a_forward_of_one_rank, buffers_of_the_last, an_optimizer_of_the_users,
    static_graph_that_accumulates_first, reentrant_from_the_second_step_on, wrappers,
    large_copies, compiled, backwards_of_all_kinds, shared_parts,
]  # fmt: skip

if __name__ == "__main__":
    results = {}
    for case in CASES:
        if sys.argv[1:] and case.__name__ not in sys.argv[1:]:
            continue
        try:
            results[case.__name__] = case()
        except Exception:
            results[case.__name__] = traceback.format_exc()
        record(RANK, results)
        if sys.argv[1:] and RANK == 0:
            sys.stdout.write(f"{case.__name__}: {results[case.__name__]}\n")
    if dist.is_initialized() and hb.backend() != "torch":
        dist.destroy_process_group()
    hb.shutdown()
