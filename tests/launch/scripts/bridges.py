"""The other bridges: policies as hooks of a plain DDP, DDP's own signature, Horovod's compressions."""

from __future__ import annotations

import copy
import hashlib
import io
import sys
import traceback
from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import leave_torch, record
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

import hvdbridge as hb

LATE = "late" in sys.argv  # the script starts torch.distributed, and hvdbridge comes with the first bucket
if LATE:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
else:
    hb.init()
    RANK, SIZE = hb.rank(), hb.size()
ON_TORCH = LATE or hb.backend() == "torch"
BUCKET_MB = 1e-5  # a bucket per tensor


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def digest(model: nn.Module) -> str:
    tensors = [tensor.detach().contiguous().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(tensors)).hexdigest()[:16]


def train(wrapped: nn.Module, model: nn.Module, steps: int = 4, accumulate: int = 1, before: Any = None) -> str:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            if before is not None:
                before(step)
            with wrapped.no_sync() if part < accumulate - 1 else nullcontext():
                loss_of(wrapped, accumulate * step + part).backward()
        optimizer.step()
    return digest(model)


def plain(hook: Any = None, accumulate: int = 1, **options: Any) -> str:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return train(wrapped, model, accumulate=accumulate)


def hooked(policy: Any, named: str = "", accumulate: int = 1, steps: int = 4, **options: Any) -> tuple[str, Any]:
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, **options)
    of = {"": None, "module": model, "ddp": wrapped}[named]
    state, hook = hb.to_comm_hook(policy, of)
    wrapped.register_comm_hook(state, hook)
    return train(wrapped, model, steps, accumulate), state


# -- A policy as a hook of a plain DDP: torch only ------------------------------------------------------------------


def hook_is_ddp() -> str:
    wanted = plain()
    for named in ("", "module", "ddp"):
        found, state = hooked("mean", named)
        assert found == wanted, named
        assert state.stats()["collectives"] >= 5
        state.close()
    assert hooked("mean", find_unused_parameters=True)[0] == wanted
    assert hooked("mean", static_graph=True)[0] == wanted
    for policy in ("int8", "adasum"):  # of several rounds, and of rounds that are not known: DDP waits within backward
        assert hooked(policy, static_graph=True)[0] == hooked(policy)[0]
    return wanted


def hook_accumulates() -> str:
    wanted = plain(accumulate=3)
    assert hooked("mean", accumulate=3)[0] == wanted
    return wanted


def hook_with_state() -> str:
    """Residuals by name survive the rebuild of buckets, a save and a load; equal to a synchronizer's."""
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model), policy="ef(bf16)", bucket_mb=BUCKET_MB)
    for step in range(4):
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        sync.optimizer.step()
    found, state = hooked("ef(bf16)", "module")
    assert found == digest(model)
    theirs, ours = sync.state_dict(), state.state_dict()
    assert ours["step"] == theirs["step"] == 4
    assert list(ours["state"]["residual"]) == list(theirs["state"]["residual"])
    for name, tensor in theirs["state"]["residual"].items():
        assert torch.equal(ours["state"]["residual"][name], tensor), name
    gathered = state.state_dict(gather=True)
    assert (len(gathered.get("ranks", ())) == SIZE) == (RANK == 0)
    assert ours.keys() == theirs.keys()
    sync.load_state_dict(ours)
    if LATE:
        dist.broadcast_object_list(everyone := [gathered])
    else:
        everyone = [hb.broadcast_object(gathered)]
    sync.load_state_dict(everyone[0])
    fresh = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=BUCKET_MB)
    taker, hook = hb.to_comm_hook("ef(bf16)", fresh)
    taker.load_state_dict(theirs)  # kept until the first step
    fresh.register_comm_hook(taker, hook)
    for each in (sync.model, fresh):
        each.zero_grad()
        loss_of(each, 9).backward()
    for ddp, p in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(ddp.grad, p.grad)
    after, wanted = taker.state_dict(), sync.state_dict()
    assert after["step"] == wanted["step"] == 5
    for name, tensor in wanted["state"]["residual"].items():
        assert torch.equal(after["state"]["residual"][name], tensor), name
    taker.load_state_dict(everyone[0])
    assert taker.state_dict()["step"] == 4
    for refused in (ours | {"size": 3, "nodes": []}, everyone[0] | {"ranks": everyone[0]["ranks"] * 2}):
        with pytest.raises(hb.ConfigurationError, match="ranks"):
            taker.load_state_dict(refused, on_resize="raise")
    taker.load_state_dict(ours | {"size": 3, "nodes": []}, on_resize="reset")
    assert not any(tensor.any() for tensor in taker.state_dict()["state"]["residual"].values())
    with pytest.raises(hb.ConfigurationError, match="missing"):
        hb.to_comm_hook("ef(bf16)")[0].load_state_dict({"policy": "ef(bf16)", "state": {}})
    with pytest.raises(hb.ConfigurationError, match="acts after"):
        hb.to_comm_hook("local_sgd(every=2)")
    taker.close()
    positions, by_position = hooked("ef(bf16)")
    assert positions == found
    saved = by_position.state_dict()
    assert list(saved["state"]["residual"]) == [f"parameter.{i}" for i in range(6)]
    again, hook = hb.to_comm_hook("ef(bf16)")
    again.load_state_dict(saved)
    other = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=BUCKET_MB)
    other.register_comm_hook(again, hook)
    train(other, other.module, 1)
    assert again.state_dict()["step"] == 5
    with pytest.raises(ValueError, match="policy"):
        again.load_state_dict(saved | {"policy": "mean"})
    return found


def hook_with_weights() -> str:
    model = mlp()
    sync = hb.GradientSynchronizer(model, sgd(model), bucket_mb=BUCKET_MB)
    for step in range(4):
        sync.weight = 1.0 + RANK
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        sync.optimizer.step()
    other = mlp()
    wrapped = nn.parallel.DistributedDataParallel(other, bucket_cap_mb=BUCKET_MB)
    state, hook = hb.to_comm_hook("mean")
    wrapped.register_comm_hook(state, hook)

    def before(step: int) -> None:
        state.weight = 1.0 + RANK

    assert train(wrapped, other, before=before) == digest(model)
    return digest(model)


def hook_joins() -> str:
    """Ranks with unequal numbers of batches go on with equal numbers of steps, so they draw the same elements."""
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    state, hook = hb.to_comm_hook("randomk:ratio=0.05", model)
    wrapped.register_comm_hook(state, hook)
    for _ in range(2):
        with Join([wrapped]):
            for step in range(2 + RANK):
                loss_of(wrapped, step).backward()
    assert state.stats()["step"] == 2 * (1 + SIZE)
    model.zero_grad()
    loss_of(wrapped, 9).backward()
    digests: list[str | None] = [None] * SIZE
    drawn = torch.cat([p.grad.flatten() for p in model.parameters()]) != 0
    dist.all_gather_object(digests, str(drawn.nonzero().tolist()))
    assert len(set(digests)) == 1
    assert drawn.any()
    assert state.stats()["step"] == 2 * (1 + SIZE) + 1
    return str(digests[0])


def hook_joins_late() -> str:
    """What the last step in a join left to travel in the background ends on the ranks that shadow it, too."""
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    state, hook = hb.to_comm_hook("delayed(ef(bf16))", model)
    wrapped.register_comm_hook(state, hook)
    with Join([wrapped]):
        for step in range(2 + RANK):
            loss_of(wrapped, step).backward()
    if RANK:  # the others have run out of batches before
        state.stats()
    dist.barrier()
    held = state.state_dict()["state"]["held"]
    state.close()
    digests: list[str | None] = [None] * SIZE
    dist.all_gather_object(digests, hashlib.sha256(str({n: t.tolist() for n, t in held.items()}).encode()).hexdigest())
    assert len(set(digests)) == 1
    return str(digests[0])


def hook_joins_loaded() -> str:
    """A state that waits for the first step comes into one without batches of its own."""
    model = mlp()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    state, hook = hb.to_comm_hook("randomk:ratio=0.05", model)
    wrapped.register_comm_hook(state, hook)
    loss_of(wrapped, 0).backward()
    other = mlp()
    wrapped = nn.parallel.DistributedDataParallel(other, bucket_cap_mb=BUCKET_MB)
    loaded, hook = hb.to_comm_hook("randomk:ratio=0.05", other)
    wrapped.register_comm_hook(loaded, hook)
    loaded.load_state_dict(state.state_dict())
    with Join([wrapped]):
        for step in range(2 * RANK):
            loss_of(wrapped, step).backward()
    assert loaded.stats()["step"] == 1 + 2 * (SIZE - 1)
    return "in step"


class Weighing(nn.Module):
    """Its gradients are what it is given, however its parameters lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kernel, self.scale = nn.Parameter(torch.randn(8, 6, 3, 3)), nn.Parameter(torch.randn(8))

    def forward(self, kernel: torch.Tensor) -> torch.Tensor:
        return (self.kernel * kernel).sum() + (self.scale * kernel[:, 0, 0, 0]).sum()


def hook_reads_by_index() -> str:
    """A policy sees gradients by index, also where DDP lays them into its buckets as they lie in memory."""
    for policy in ("mean", "int8", "powersgd:rank=2", "randomk:ratio=0.1"):
        seen = []
        for layout in (torch.contiguous_format, torch.channels_last):
            model = Weighing().to(memory_format=layout)
            wrapped = nn.parallel.DistributedDataParallel(model)
            state, hook = hb.to_comm_hook(policy, model)
            wrapped.register_comm_hook(state, hook)
            for step in range(3):
                model.zero_grad()
                wrapped(torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(10 * step + RANK))).backward()
            assert model.kernel.is_contiguous(memory_format=layout)
            seen.append([model.kernel.grad.tolist(), model.scale.grad.tolist()])
            state.close()
        assert seen[0] == seen[1], policy
    return "by index"


def hook_of_another_model() -> str:
    state, hook = hb.to_comm_hook("mean", mlp())
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    wrapped.register_comm_hook(state, hook)
    with pytest.raises((ValueError, RuntimeError), match="does not know"):
        loss_of(wrapped, 0).backward()
    return "refused"


def hook_of_names_without_a_model() -> str:
    """Without a model a pattern of real names is refused, a comparison of sizes is not."""
    for policy, refused in (("partition(*.bias=mean, rest=bf16)", True), ("partition(<20=mean, rest=bf16)", False)):
        state, hook = hb.to_comm_hook(f"warmup(steps=1, then={policy})")
        wrapped = nn.parallel.DistributedDataParallel(mlp())
        wrapped.register_comm_hook(state, hook)
        loss = loss_of(wrapped, 0)
        if refused:
            with pytest.raises((ValueError, RuntimeError), match=r"no parameter matches \*\.bias.*with"):
                loss.backward()
        else:
            loss.backward()
            state.close()
    return "refused"


# -- DDP's own signature ----------------------------------------------------------------------------------------------


def ddp_is_ddp() -> str:
    model = mlp()
    wrapped = hb.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    assert isinstance(wrapped, hb.DistributedDataParallel)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel) == ON_TORCH
    assert wrapped.module is model
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [f"module.{n}" for n, _ in model.named_parameters()]
    saved = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    found = train(wrapped, model)
    assert not ON_TORCH or found == plain()
    wrapped.load_state_dict(saved)
    assert digest(model) == digest(mlp())
    wrapped.eval()
    assert not model.training
    wrapped.train()
    return found


def ddp_accumulates() -> str:
    model = mlp()
    found = train(hb.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), model, accumulate=3)
    assert not ON_TORCH or found == plain(accumulate=3)
    return found


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def ddp_finds_unused() -> str:
    model = Heads()
    wrapped = hb.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.ones(2, 6) * (1 + RANK), head=(RANK + step) % 2).square().mean().backward()
        optimizer.step()
        assert model.heads[2].weight.grad is None
    return digest(model)


def ddp_with_policy_and_weight() -> str:
    model = mlp()
    wrapped = hb.DistributedDataParallel(model, policy="ef(bf16)", bucket_cap_mb=BUCKET_MB)

    def before(step: int) -> None:
        wrapped.weight = 1.0 + RANK

    found = train(wrapped, model, before=before)
    assert "residual" in wrapped.synchronizer.state_dict()["state"]
    return found


def ddp_with_hook() -> str:
    model = mlp()
    wrapped = hb.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found = train(wrapped, model)
    assert not ON_TORCH or found == plain(default_hooks.fp16_compress_hook)
    with pytest.raises(hb.StepError):
        hb.DistributedDataParallel.register_comm_hook(late_hook(), None, default_hooks.fp16_compress_hook)
    with pytest.raises(hb.Unsupported, match="takes the place"):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    return found


def late_hook() -> Any:
    model = mlp()
    wrapped = hb.DistributedDataParallel(model)
    train(wrapped, model, 1)
    return wrapped


def ddp_joins() -> str:
    digests = []
    for by_all in (True, False):
        model = mlp()
        wrapped = hb.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with wrapped.join(divide_by_initial_world_size=by_all):
            for step in range(2 + 2 * RANK):
                optimizer.zero_grad()
                loss_of(wrapped, step).backward()
                optimizer.step()
        digests.append(digest(model))
        if ON_TORCH:
            other = mlp()
            theirs = nn.parallel.DistributedDataParallel(other, bucket_cap_mb=BUCKET_MB)
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            with theirs.join(divide_by_initial_world_size=by_all):
                for step in range(2 + 2 * RANK):
                    optimizer.zero_grad()
                    loss_of(theirs, step).backward()
                    optimizer.step()
            assert digest(other) == digests[-1], by_all
    assert digests[0] != digests[1]
    with pytest.raises(hb.Unsupported), wrapped.join(throw_on_early_termination=True):
        pass
    return " ".join(digests)


def ddp_leaves_gradients() -> str:
    """Who holds gradients of one task while those of another are computed (PCGrad) has both, as with torch's."""

    def tasks(wrapped: nn.Module) -> list[Any]:
        optimizer = sgd(wrapped)
        for _ in range(2):  # DDP has other buckets in its second step
            held = []
            for task in range(2):
                optimizer.zero_grad()
                wrapped(torch.full((2, 6), 1.0 + RANK))[:, task].sum().backward()
                held.append([p.grad for p in wrapped.parameters()])
        return [[grad.tolist() for grad in grads] for grads in held]

    found = tasks(hb.DistributedDataParallel(mlp()))
    assert found[0] != found[1]
    assert not ON_TORCH or found == tasks(nn.parallel.DistributedDataParallel(mlp()))
    in_views = tasks(hb.DistributedDataParallel(mlp(), gradient_as_bucket_view=True))
    assert in_views[0] == in_views[1]
    return hashlib.sha256(str(found).encode()).hexdigest()[:16]


def ddp_misuse() -> str:
    with pytest.raises(hb.Unsupported):
        hb.DistributedDataParallel("model")
    with pytest.raises(hb.Unsupported):
        hb.DistributedDataParallel(mlp(), device_ids=[0, 1])
    with pytest.raises(hb.ConfigurationError):
        hb.DistributedDataParallel(mlp().requires_grad_(False))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_mb'"):
        hb.DistributedDataParallel(mlp(), bucket_mb=1)
    return "refused"


def ddp_options_of_torch() -> str:
    """Every option of torch's, in its order; its default does what it does there, another value does or is refused."""
    theirs, ours = (
        signature(each.__init__).parameters
        for each in (nn.parallel.DistributedDataParallel, hb.DistributedDataParallel)
    )
    assert set(theirs) <= set(ours)
    common = [name for name in ours if name in theirs]
    assert common == [name for name in theirs if name in common]
    defaults = {name: theirs[name].default for name in common[2:]}  # but self and module
    assert {n for n in common if ours[n].default != theirs[n].default} <= {"broadcast_buffers"}
    model = mlp()
    wrapped = hb.DistributedDataParallel(model, **defaults | {"bucket_cap_mb": BUCKET_MB})
    assert train(wrapped, model) == ddp_is_ddp()
    for name, value in {
        "mixed_precision": object(), "delay_all_reduce_named_params": [("a", model[0].weight)],
        "param_to_hook_all_reduce": model[0].weight, "skip_all_reduce_unused_params": True, "bucket_cap_mb_list": [1],
    }.items():  # fmt: skip
        with pytest.raises(hb.Unsupported, match=rf"DistributedDataParallel\({name}=.*\. \w+"):
            hb.DistributedDataParallel(mlp(), **{name: value})
    for options, last in (({}, 0), ({"forward_sync_buffers": False}, RANK), ({"broadcast_buffers": False}, RANK),
                          ({"forward_sync_buffers": True, "broadcast_buffers": False}, 0)):  # fmt: skip
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        wrapped = hb.DistributedDataParallel(model, batched_grad_copy=True, **options)
        for _ in range(2):
            wrapped(torch.full((2, 6), 1.0 + RANK)).sum().backward()
        wrapped.eval()
        wrapped(torch.ones(2, 6))
        seen = [torch.empty_like(model[1].running_mean) for _ in range(SIZE)]
        hb.all_gather(seen, model[1].running_mean)
        assert (last == 0 or RANK == 0) == torch.equal(seen[0], seen[RANK]), options
    return "as there"


class Versioned(nn.Linear):
    """Learns with which version it was saved."""

    _version = 3
    loaded: int | None = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Around(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(2, 1)


def inside_another_module() -> str:
    """What wraps the model, as Lightning and AveragedModel do, has the same keys on all backends, and loads them."""
    model = nn.Sequential(Versioned(4, 2), nn.BatchNorm1d(2))
    other = copy.deepcopy(model)
    keys = [f"net.{key}" for key in model.state_dict()]
    sync = hb.GradientSynchronizer(model)
    for wrapped in (sync.model, hb.DistributedDataParallel(other)):
        bare, versions = getattr(wrapped, "module", wrapped), model.state_dict()._metadata
        assert wrapped.state_dict()._metadata == versions
        around = Around(wrapped)
        for each in (around, copy.deepcopy(around)):
            saved = each.state_dict()
            assert list(saved) == [*keys, "head.weight", "head.bias"]
            assert {key: saved._metadata[f"net.{key}".rstrip(".")] for key in versions} == versions
            sevens = type(saved)((key, torch.full_like(tensor, 7)) for key, tensor in saved.items())
            sevens._metadata = saved._metadata
            for options in ({}, {"strict": False}, {"assign": True}):
                each.load_state_dict(saved)
                assert str(each.load_state_dict(sevens, **options)) == "<All keys matched successfully>"
                assert all((tensor == 7).all() for tensor in each.state_dict().values()), options
            assert getattr(each.net, "module", each.net)[0].loaded == 3
            few = {key: saved[key] for key in list(saved)[1:]} | {"net.2.weight": saved["net.0.weight"]}
            told = each.load_state_dict(few, strict=False)
            assert told == (["net.0.weight"], ["net.2.weight"])
            with pytest.raises(RuntimeError, match=r'Missing.*"net\.0\.weight"'):
                each.load_state_dict(few)
            assert each.state_dict(keep_vars=True)["net.0.weight"].requires_grad
        if wrapped is not bare:  # saved by plain DDP
            around.load_state_dict({key.replace("net.", "net.module."): tensor for key, tensor in sevens.items()})
            assert (bare[0].weight == 7).all()
            of_ddp = type(sevens)((f"module.{key}", tensor) for key, tensor in bare.state_dict().items())
            of_ddp._metadata = {f"module.{key}".rstrip("."): version for key, version in versions.items()}
            if wrapped is sync.model:
                with pytest.raises(RuntimeError, match=r'Missing.*"0\.weight"'):
                    wrapped.load_state_dict(of_ddp)
            else:
                assert str(wrapped.load_state_dict(of_ddp)) == "<All keys matched successfully>"
                assert bare[0].loaded == 3
        averaged = torch.optim.swa_utils.AveragedModel(wrapped)
        assert list(averaged.state_dict()) == ["n_averaged", *(f"module.{key}" for key in model.state_dict())]
        averaged.load_state_dict(averaged.state_dict())
        if wrapped is not sync.model:
            compiled = Around(hb.DistributedDataParallel(torch.compile(copy.deepcopy(bare), backend="eager")))
            compiled.load_state_dict(around.state_dict())
            assert list(compiled.state_dict()) == list(around.state_dict())
    return " ".join(keys)


def copies() -> str:
    """A trained model, and its optimizer, can be copied, averaged and saved whole; what comes out works alone."""
    for policy in ("mean", "local_sgd(every=2)"):
        model, other = mlp(), mlp()
        sync = hb.GradientSynchronizer(model, sgd(model), policy=policy)
        wrapped = hb.DistributedDataParallel(other, policy=policy)
        outer = sgd(other)
        for step in range(2):
            for each, optimizer in ((sync.model, sync.optimizer), (wrapped, outer)):
                optimizer.zero_grad()
                loss_of(each, step).backward()
                optimizer.step()
        x = torch.ones(2, 6)
        for each in (model, other, sync.model, wrapped):
            averaged = torch.optim.swa_utils.AveragedModel(each)
            averaged.update_parameters(each)
            file = io.BytesIO()
            torch.save(each, file)
            loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            for made in (copy.deepcopy(each), averaged, loaded, copy.deepcopy(loaded)):
                if RANK == 0:  # alone: a copy belongs to no synchronizer
                    with torch.no_grad():
                        assert torch.equal(made(x), model(x) if each in (model, sync.model) else other(x))
            if each in (model, other):
                assert b"hvdbridge" not in file.getvalue(), "it loads where there is no hvdbridge"
        if RANK == 0:
            alone = copy.deepcopy(model)
            loss_of(alone, 5).backward()
            assert alone[0].weight.grad is not None
        made = copy.deepcopy(wrapped)
        with pytest.raises(hb.StepError, match="copy"):
            made(x)
        made.eval()(x)
        assert list(made.state_dict()) == list(other.state_dict())
        for optimizer in (sync.optimizer, outer):
            assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
            torch.save(optimizer.state_dict(), io.BytesIO())
        loss_of(sync.model, 9).backward()  # and the model itself goes on
        sync.optimizer.step()
        sync.close()
        wrapped.synchronizer.close()
    return "work"


# -- Horovod's compressions -------------------------------------------------------------------------------------------


class Half:
    """What hvd.Compression.fp16 does, where there is no Horovod."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class Top:
    """An object with a context: what is small is not sent."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return torch.where(tensor.abs() < 0.01, 0.0, tensor).reshape(-1), tensor.shape

    def decompress(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.view(shape)


def by_hand(compression: Any) -> str:
    """The same in plain words: compress each gradient, sum, divide, decompress."""
    model = mlp()
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for p in model.parameters():
            small, context = compression.compress(p.grad)
            small = small.clone()
            hb.all_reduce(small)
            p.grad.copy_(compression.decompress(small.div_(SIZE), context))
        optimizer.step()
    return digest(model)


def compression() -> str:
    found = []
    for each in (Half, Top()):
        model = mlp()
        sync = hb.GradientSynchronizer(model, sgd(model), policy=hb.from_horovod_compression(each), bucket_mb=BUCKET_MB)
        for step in range(4):
            sync.optimizer.zero_grad()
            loss_of(sync.model, step).backward()
            sync.optimizer.step()
        found.append(digest(model))
        assert found[-1] == by_hand(each), each
    with pytest.raises(ValueError, match="no decompress"):
        hb.from_horovod_compression(type("Bad", (), {"compress": lambda tensor: tensor}))
    return " ".join(found)


def real_horovod() -> str:
    """Against Horovod itself, where it runs."""
    if LATE or hb.backend() != "horovod":
        return "n/a"
    import horovod.torch as hvd

    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    other = mlp()
    sync = hb.GradientSynchronizer(other, sgd(other), policy=hb.from_horovod_compression(hvd.Compression.fp16))
    for step in range(4):
        sync.optimizer.zero_grad()
        loss_of(sync.model, step).backward()
        sync.optimizer.step()
    assert digest(other) == digest(model)
    theirs, ours = mlp(), mlp()
    for target, compression in ((theirs, hvd.Compression.none), (ours, hb.to_horovod_compression("mean"))):
        optimizer = hvd.DistributedOptimizer(
            sgd(target), named_parameters=target.named_parameters(), compression=compression
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(target, step).backward()
            optimizer.step()
    assert digest(ours) == digest(theirs)
    return "n/a"


HOOKS = [
    hook_is_ddp, hook_accumulates, hook_with_state, hook_with_weights, hook_joins, hook_joins_late,
    hook_joins_loaded, hook_reads_by_index, hook_of_another_model, hook_of_names_without_a_model,
]  # fmt: skip
DDP = [
    ddp_is_ddp, ddp_accumulates, ddp_finds_unused, ddp_with_policy_and_weight, ddp_with_hook, ddp_joins, ddp_misuse,
    ddp_leaves_gradients, ddp_options_of_torch, inside_another_module, copies, compression, real_horovod,
]  # fmt: skip

results = {}
chosen = [name for name in sys.argv[1:] if name != "late"]
for scenario in [*(HOOKS if ON_TORCH else []), *([] if LATE else DDP)]:
    if chosen and scenario.__name__ not in chosen:
        continue
    try:
        results[scenario.__name__] = scenario()
    except Exception:
        results[scenario.__name__] = traceback.format_exc()
    record(RANK, results)
if hb.is_initialized():
    hb.shutdown()
if LATE:
    leave_torch()
