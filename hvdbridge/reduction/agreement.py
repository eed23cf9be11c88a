"""What the ranks of a synchronizer have in common: the group, and that they agree about parameters and options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from hvdbridge.backends.communicator import Communicator
from hvdbridge.errors import RankMismatch
from hvdbridge.reduction.parameters import bare_name


def describe(
    model: Module, params: Mapping[str, Tensor], options: Mapping[str, object], left_alone: Iterable[str] = ()
) -> list[str]:
    """What must be equal on all ranks, a line each. Buffers of the names in ``left_alone`` need not."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in set(left_alone)}
    return [
        *(f"parameter {name} {list(p.shape)} {p.dtype}" for name, p in params.items()),
        *(f"buffer {bare_name(name)} {list(b.shape)} {b.dtype}" for name, b in buffers.items()),
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
