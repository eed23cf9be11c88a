"""How many kernels a bucket's flow launches on a CUDA device, counted without one.

Tensors are on torch's ``meta`` device and called CUDA tensors, so flows take the same branches as on a GPU. Operations
that compute are counted, and Triton's kernels by a stub.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hvdbridge.execution import state_store
from hvdbridge.execution.scheduler import drive
from hvdbridge.execution.state_store import StateStore
from hvdbridge.kernels import fused, native
from hvdbridge.policies import from_spec
from hvdbridge.policy.base import finish
from hvdbridge.policy.bucket import Bucket, Layout, Ranks
from hvdbridge.policy.collectives import AllGather, Collective, ReduceScatter

MODULES = [
    pytest.importorskip(f"hvdbridge.kernels.{name}", reason="needs Triton")
    for name in ("cuda", "cuda_flat", "cuda_select")
]
cuda = MODULES[0]

RANKS, WIDTH = 8, 768
LAYER = {
    "norm1.weight": (WIDTH,), "norm1.bias": (WIDTH,), "qkv.weight": (3 * WIDTH, WIDTH), "qkv.bias": (3 * WIDTH,),
    "out.weight": (WIDTH, WIDTH), "out.bias": (WIDTH,), "norm2.weight": (WIDTH,), "norm2.bias": (WIDTH,),
    "up.weight": (4 * WIDTH, WIDTH), "up.bias": (4 * WIDTH,), "down.weight": (WIDTH, 4 * WIDTH), "down.bias": (WIDTH,),
}  # fmt: skip
SHAPES = {f"{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "promote_types", "lift_fresh", "detach", "alias"}


class Launches(TorchDispatchMode):
    """Counts operations that launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name.startswith("_foreach_"):  # one kernel for dense tensors of equal strides, else one for each
            lists = [tensors for tensors in args if isinstance(tensors, list)]
            pairs = list(zip(*lists, strict=True))
            fast = all(len({t.stride() for t in pair}) == 1 and pair[0].is_contiguous() for pair in pairs)
            self.count += 1 if fast else len(pairs)
            return func(*args, **(kwargs or {}))
        self.count += not func.is_view and name not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()

    def launch(*_: object, **__: object) -> None:
        found.count += 1

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"))
    for module in MODULES:
        monkeypatch.setattr(module, "_launch", launch)

    def on_device(*tensors: Tensor, packs: bool = False) -> Any:
        return cuda if all(t.is_contiguous() and t.dtype in native.TYPES for t in tensors) else None

    for name in ("kernels.quantise", "kernels.pack", "policies.sharded"):
        monkeypatch.setattr(f"hvdbridge.{name}.fused", on_device)
    for name in ("fused", "select", "orthogonal", "shuffle"):
        monkeypatch.setattr(f"hvdbridge.kernels.{name}.on_cuda", lambda _: cuda)
    monkeypatch.setattr(state_store, "used_here", lambda _: None)
    monkeypatch.setattr(state_store, "_memory", lambda tensor: tensor.untyped_storage()._cdata)  # meta has no addresses
    return found


def answer(request: Collective) -> Tensor:
    tensor = request.tensor
    if isinstance(request, AllGather):
        return tensor.new_empty((RANKS, *tensor.shape))
    return tensor.new_empty(tensor.shape[1:]) if isinstance(request, ReduceScatter) else torch.empty_like(tensor)


@pytest.mark.parametrize(
    ("spec", "most"),
    [("fp16", 7), ("ef(bf16)", 14), ("int8", 7), ("onebit", 19), ("topk:ratio=0.01", 65), ("powersgd:rank=4", 131)],
)
def test_a_flow_launches_few_kernels(launches: Launches, spec: str, most: int) -> None:
    policy, layout = from_spec(spec), Layout(SHAPES)
    store = StateStore(policy, {name: torch.zeros(shape, device="meta") for name, shape in SHAPES.items()})
    store.in_place = True
    for step in range(3):  # tables and state exist after the first
        bucket = Bucket(torch.zeros(layout.numel, device="meta"), layout, 0, step, ranks=Ranks(0, RANKS))
        launches.count = 0
        with launches:
            result = drive(finish(policy.aggregate(bucket, store.part(layout))), answer)
            store.merge(layout, result.state, result.update)
    assert 0 < launches.count <= most
    assert fused.on_flat(bucket.buffer) is not None, "the branches are those of a GPU"
