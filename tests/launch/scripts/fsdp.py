"""Policies between the replicas of a sharded model: two shards, two replicas; against native HSDP."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import leave_torch, record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hvdbridge as hb
from hvdbridge.policy.base import Flow, Policy, State
from hvdbridge.policy.bucket import Bucket, Views

LATE = "late" in sys.argv  # the script starts torch.distributed, and hvdbridge joins
if LATE:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
else:
    hb.init()
    if not dist.is_initialized():
        where = hb.broadcast_object(tempfile.mktemp())
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=hb.rank(), world_size=hb.size())
RANK = dist.get_rank()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
REPLICA, SHARD = MESH.get_coordinate()


class Block(nn.Module):
    """A parameter of its own beside a child, and rows that two shards do not divide evenly."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(narrow))
        self.linear = nn.Linear(wide, narrow)
        self.unused: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.shift = nn.Parameter(torch.zeros(3))
        self.first, self.second, self.third = Block(6, 15), Block(15, 8), Block(8, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x)))) + self.shift


def sharded(mesh: Any, net: nn.Module | None = None, **options: Any) -> Any:
    """Groups: the first block; the second and third together; the rest."""
    net = Net() if net is None else net
    fully_shard(net.first, mesh=mesh, **options)
    fully_shard([net.second, net.third], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def hooked(policy: Any, weighted: bool | None = None, **options: Any) -> tuple[Any, Any]:
    net = sharded(MESH["shard"], **options)
    return net, hb.set_all_reduce_hook(net, policy, MESH["replicate"], weighted=weighted)


def train(net: Any, steps: Sequence[int] = range(4), accumulate: int = 1, replica: int = REPLICA) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for part in range(accumulate):
            net.set_requires_gradient_sync(part == accumulate - 1)
            generator = torch.Generator().manual_seed(1000 * (accumulate * step + part) + 2 * replica + SHARD)
            x = torch.randn(4, 6, generator=generator)
            loss = nn.functional.mse_loss(net(x), x[:, :3])
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def digest(net: Any) -> str:
    """Of the whole model; all replicas and shards must have the same."""
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.full_tensor().detach().contiguous().numpy().tobytes())
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, found.hexdigest()[:16])
    assert len(set(everyone)) == 1, everyone
    return everyone[0]


def mean_is_hsdp() -> str:
    """Bit for bit: halving is exact, and two numbers have one sum."""
    for accumulate in (1, 2):
        native = sharded(MESH)
        train(native, accumulate=accumulate)
        net, state = hooked("mean")
        train(net, accumulate=accumulate)
        assert digest(net) == digest(native)
        assert state.stats()["step"] == 4
        assert state.stats()["collectives"] >= 3
        state.close()
    return digest(net)


def mean_is_hsdp_in_mixed_precision() -> str:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    native = sharded(MESH, mp_policy=half)
    train(native)
    net, state = hooked("mean", mp_policy=half)
    train(net)
    assert digest(net) == digest(native)
    state.close()
    return digest(net)


@dataclass(frozen=True)
class Watch(Policy):
    """The mean, and what it was, by name."""

    seen: dict[str, Tensor] = field(default_factory=dict)
    last: list[bool] = field(default_factory=list)
    deterministic = True
    unequal_weights = True

    def aggregate(self, bucket: Bucket, state: State) -> Flow:
        self.last.append(bucket.last)
        result = yield from hb.policies.from_spec("mean").aggregate(bucket, state)
        self.seen.update({name: part.clone() for name, part in Views(bucket.layout, result.update).items()})
        return result


def pieces_have_names() -> str:
    """What a policy sees under a name is that parameter's gradient: this shard of it, padded to equal shapes."""
    for reduced in (None, torch.bfloat16):  # cast afterwards: FSDP makes no views that the bridge could compare
        watch = Watch()
        net, state = hooked(watch, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        train(net, [0])
        assert watch.last == [False, False, True]
        assert watch.seen.keys() == dict(net.named_parameters()).keys()
        for name, parameter in net.named_parameters():
            mine = parameter.grad.to_local()
            piece = watch.seen[name]
            assert piece.shape == (-(-parameter.shape[0] // 2), *parameter.shape[1:])
            assert torch.equal(piece[: len(mine)].to(mine.dtype), mine), name
            assert not piece[len(mine) :].any()
        state.close()
    return "named"


def policies_train() -> str:
    found = {}
    for spec in ("ef(bf16)", "topk:ratio=0.1", "ef(int8)", "powersgd:rank=2", "delayed(mean)"):
        net, state = hooked(spec)
        losses = train(net, range(30))
        found[spec] = digest(net)
        first, last = torch.tensor(losses[:5]).mean(), torch.tensor(losses[-5:]).mean()
        assert last < 0.85 * first, (spec, first, last)
        state.close()
    assert len(set(found.values())) == len(found)
    return str(found)


def state_goes_on() -> str:
    """Four steps, or two, a save, and two of another object: the same bits. Of this shard, in all replicas."""
    for spec in ("ef(bf16)", "topk:ratio=0.1"):
        straight, state = hooked(spec)
        train(straight)
        wanted = state.state_dict()["state"]["residual"]
        state.close()
        half, before = hooked(spec)
        train(half, range(2))
        saved, gathered = before.state_dict(), before.state_dict(gather=True)
        assert saved["step"] == saved["size"] == 2
        assert (len(gathered.get("ranks", ())) == 2) == (REPLICA == 0)
        before.close()
        again, after = hooked(spec)
        again.load_state_dict(half.state_dict())
        after.load_state_dict(saved)
        train(again, range(2, 4))
        assert digest(again) == digest(straight)
        ours = after.state_dict()["state"]["residual"]
        assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())
        assert any(tensor.any() for tensor in wanted.values())
        with pytest.raises(hb.ConfigurationError, match="policy"):
            after.load_state_dict(saved | {"policy": "mean"})
        after.close()
    return "goes on"


def weights_of_replicas() -> str:
    alone = sharded(MESH)
    train(alone, replica=0)  # both replicas on the data of the first
    net, state = hooked("mean", weighted=True)
    for step in range(4):
        state.weight = 1.0 - REPLICA
        train(net, [step])
    assert digest(net) == digest(alone)
    state.close()
    return digest(net)


def refusals() -> str:
    for policy, error, match in (
        ("clip(mean, norm=1)", hb.Unsupported, "scope"), ("local_sgd(every=2)", hb.ConfigurationError, "acts after"),
        ("powersgd(rank=", hb.SpecError, ""),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            hb.set_all_reduce_hook(sharded(MESH["shard"]), policy, MESH["replicate"])
    with pytest.raises(hb.Unsupported, match="native HSDP"):
        hb.set_all_reduce_hook(sharded(MESH), "mean", MESH["replicate"])
    with pytest.raises(hb.Unsupported, match="not sharded"):
        hb.set_all_reduce_hook(Net(), "mean", MESH["replicate"])
    with pytest.raises(hb.RankMismatch, match="shard"):
        hb.set_all_reduce_hook(sharded(MESH["shard"]), "mean", MESH["shard"])
    net = Net()
    net.second.unused = nn.Linear(2, 2)
    lacking = sharded(MESH["shard"], net)
    state = hb.set_all_reduce_hook(lacking, "mean", MESH["replicate"].get_group())
    with pytest.raises(hb.Unsupported, match="no gradient"):
        train(lacking, [0])
    lacking.reset_iter_state()
    with pytest.raises(hb.StepError, match="left by an exception"):
        train(lacking, [0])
    state.close()
    net = Net()
    net.second.unused = nn.Linear(2, 2)
    lacking = sharded(MESH["shard"], net)
    lacking.set_reduce_scatter_unused_params(True)
    state = hb.set_all_reduce_hook(lacking, "mean", [SHARD, SHARD + 2])
    train(lacking)
    found = digest(lacking)
    state.close()
    for _ in range(2):
        with pytest.raises(hb.NotInitialized):
            train(lacking, [4])
        lacking.reset_iter_state()
    return found


SCENARIOS = [
    mean_is_hsdp, mean_is_hsdp_in_mixed_precision, pieces_have_names, policies_train, state_goes_on,
    weights_of_replicas, refusals,
]  # fmt: skip

results = {}
chosen = [name for name in sys.argv[1:] if name != "late"]
for scenario in SCENARIOS:
    if chosen and scenario.__name__ not in chosen:
        continue
    try:
        results[scenario.__name__] = scenario()
    except Exception:
        results[scenario.__name__] = traceback.format_exc()
    record(RANK, results)
hb.shutdown()
if dist.is_initialized():
    leave_torch()
