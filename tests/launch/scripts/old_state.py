"""Loads the state that release 0.1.0 saved, trains on, and records what differs from what 0.1.0 computed.

old_state.py [write FILE]: with ``write``, the installed release saves FILE instead. Gradients are exact fractions, so
that every machine computes the same ones. The optimizer has no state, and both counts of steps end with an average, so
that ranks differ in nothing that the file does not hold.
"""

import io
import lzma
import sys
from pathlib import Path

import torch
from jobs import record

import hvdbridge as hb

SAVED = Path(__file__).parents[1] / "saved" / "state_0.1.0.pt.xz"
SPECS = (
    "int8:ef=true,block=64", "topk:ratio=0.1", "dgc:ratio=0.1,warmup=2", "oktopk:ratio=0.1", "sign:momentum=0.9",
    "efsign", "onebit", "powersgd:rank=2", "delayed(ef(bf16))", "local_sgd(ef(bf16), every=2)", "diloco(every=2)",
    "adasum_delta", "hierarchical(ef(bf16))", "warmup(powersgd(rank=2), steps=2, first=ef(bf16))",
    "partition(*.bias=mean, 2d=topk(ratio=0.1), rest=ef(fp16))",
)  # fmt: skip
BEFORE, AFTER = 4, 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"wide": (9, 7), "bias": (7,), "tall": (12, 3)}.items():
            numbers = torch.arange(torch.Size(shape).numel()).view(shape)
            setattr(self, name, torch.nn.Parameter((numbers * 29 % 64 - 32) / 64))

    def forward(self, step: int) -> torch.Tensor:
        return sum((p * gradient(i, p, step)).sum() for i, p in enumerate(self.parameters()))


def gradient(index: int, like: torch.Tensor, step: int) -> torch.Tensor:
    numbers = torch.arange(like.numel()).view_as(like)
    return (numbers * (37 + index) + step * 17 + hb.rank() * 11) % 101 / 64 - 0.75


def train(sync: hb.GradientSynchronizer, steps: range, weighted: bool) -> None:
    for step in steps:
        sync.optimizer.zero_grad()
        if weighted:
            sync.weight = 1 + (hb.rank() + step) % 3
        sync.model(step).backward()
        sync.optimizer.step()


def synchronizer(spec: str) -> tuple[Model, hb.GradientSynchronizer]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    return model, hb.GradientSynchronizer(model, optimizer, policy=spec)


def weights(model: Model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def write(spec: str) -> dict:
    model, sync = synchronizer(spec)
    weighted = spec != "adasum_delta"
    train(sync, range(BEFORE), weighted)
    saved = {"model": weights(model), "sync": sync.state_dict(gather=True)}
    train(sync, range(BEFORE, BEFORE + AFTER), weighted)
    sync.close()
    return saved | {"after": weights(model)}


def read(spec: str, saved: dict) -> float:
    """The largest difference of any parameter from what 0.1.0 had after the same steps."""
    model, sync = synchronizer(spec)
    weighted = spec != "adasum_delta"
    model.load_state_dict(saved["model"])
    sync.load_state_dict(saved["sync"])
    train(sync, range(BEFORE, BEFORE + AFTER), weighted)
    sync.close()
    return max((p - saved["after"][name]).abs().max().item() for name, p in weights(model).items())


with hb.session():
    if sys.argv[1:2] == ["write"]:
        states = {spec: write(spec) for spec in SPECS}
        if hb.rank() == 0:
            with lzma.open(sys.argv[2], "wb") as file:
                torch.save(states, file)
    else:
        with lzma.open(SAVED) as file:
            states = torch.load(io.BytesIO(file.read()), weights_only=True)
        record(hb.rank(), {spec: read(spec, states[spec]) for spec in SPECS})
