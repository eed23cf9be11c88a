"""What the ranks of a synchronizer have in common: the group, the parameters, and that they agree about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hvdbridge.bucket import refuse_complex
from hvdbridge.communicators.base import Communicator
from hvdbridge.errors import ConfigurationError, RankMismatch, Unsupported


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers put in front.

    >>> bare_name("_orig_mod.layer.module._orig_mod.weight")
    'layer.module.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def trainable(model: Module) -> dict[str, Parameter]:
    """The parameters that get gradients, by bare name, shared ones once.

    Raises:
        ConfigurationError: there is none.
        Unsupported: an Embedding with ``sparse=True``, or a complex parameter.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            shown = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise Unsupported(f"{shown} makes sparse gradients. Use sparse=False.")
    params = {bare_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ConfigurationError(f"{type(model).__name__} has no parameter that requires a gradient")
    refuse_complex(params)
    return params


def describe(model: Module, params: Mapping[str, Tensor], options: Mapping[str, object]) -> list[str]:
    """What must be equal on all ranks, a line each."""
    return [
        *(f"parameter {name} {list(p.shape)} {p.dtype}" for name, p in params.items()),
        *(f"buffer {bare_name(name)} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()),
        *(f"{name}={value}" for name, value in options.items()),
    ]


def agree(control: Communicator, lines: list[str]) -> None:
    """Compare ``lines`` over the ranks.

    Raises:
        RankMismatch: on every rank, naming the first difference and who has what.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(control.all_gather_object(digest))) == 1:
        return
    everyone = control.all_gather_object(lines)
    longest = max(map(len, everyone))
    for i in range(longest):
        values = [theirs[i] if i < len(theirs) else "nothing" for theirs in everyone]
        if len(set(values)) > 1:
            who = "; ".join(
                f"ranks {[r for r, v in enumerate(values) if v == value]} have {value}"
                for value in sorted(set(values), key=values.index)
            )
            raise RankMismatch(f"GradientSynchronizer: the ranks differ: {who}. Construct it alike on every rank.")


def open_group(world: Communicator, group: Any) -> tuple[Communicator, Communicator, list[int] | None]:
    """A communicator of our own over ``group`` (None: all ranks), its host-side control channel, and its ranks.

    Collective over all ranks; each names the group that it belongs to.

    Raises:
        RankMismatch: groups overlap, or a rank is not in the group that it names.
    """
    control = world.control()
    wanted = list(range(world.size)) if group is None else sorted(world.ranks_of(group))
    groups = sorted({tuple(ranks) for ranks in control.all_gather_object(wanted)})
    control.close()
    members = [rank for ranks in groups for rank in ranks]
    if len(members) != len(set(members)) or world.rank not in wanted:
        raise RankMismatch(
            f"rank {world.rank}: group={wanted}, and the ranks name the groups {groups}. "
            "Groups must be disjoint, and each rank names the one that it is in."
        )
    own = world.split(groups)
    assert own is not None
    return own, own.control(), None if len(wanted) == world.size else wanted
