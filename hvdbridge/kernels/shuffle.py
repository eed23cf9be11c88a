"""Random subsets of parameters' elements, drawn on the device by keyed permutations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdbridge.kernels.fused import on_cuda
from hvdbridge.kernels.random import key
from hvdbridge.kernels.select import Plan, check_indices, owners

ROUNDS = 20
"""Number of rounds of the shuffle. Each halves the probability that an element has not been moved."""


def round_keys(seed: int) -> list[int]:
    """Return the keys of the rotation and of all rounds."""
    return [key(seed, round_) for round_ in range(ROUNDS + 1)]


def shuffled(plan: Plan, keys: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return random, distinct elements of each parameter, as many as the plan says: int64 indices ``[plan.total]``.

    They depend on the keys (:func:`round_keys`) and the name alone. Slot i of a parameter of n elements has image i of
    a keyed permutation of n, "swap or not" (Hoang, Morris, Rogaway 2012) after a random rotation. Each slot is uniform;
    the host does not wait.

    >>> from hvdbridge.policy.bucket import Layout
    >>> layout = Layout({"a": (100,), "b": (3,)})
    >>> chosen = shuffled(Plan.of(layout, {"a": 50, "b": 3}, torch.device("cpu")), round_keys(1), torch.device("cpu"))
    >>> len(set(chosen[:50].tolist())), sorted(chosen[50:].tolist())
    (50, [100, 101, 102])
    """

    def make() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        layout = plan.layout
        check_indices(max(layout.sizes.values(), default=0), "a parameter", "partition(...) it out")
        sizes = torch.tensor([max(1, layout.sizes[name]) for name in layout.names], dtype=torch.int64, device=device)
        names = torch.tensor([key(name) for name in layout.names], dtype=torch.int64, device=device)
        counts = torch.tensor([plan.counts[name] for name in layout.names], dtype=torch.int64, device=device)
        first = torch.cumsum(counts, 0) - counts
        start = torch.tensor([layout.offsets[name] for name in layout.names], dtype=torch.int64, device=device)
        return sizes, names, counts, first.int(), start

    sizes, names, counts, first, start = plan.layout.derive(("shuffle", plan, device), make)
    owner = owners(counts, plan.total)
    # By round and parameter: 62 bits of pivot, 31 of salt.
    # The keys are Python numbers: copying a tensor of them to a GPU would wait for its stream.
    mixed = _mixed(names ^ keys[:, None] if isinstance(keys, Tensor) else torch.stack([names ^ key for key in keys]))
    pivots = ((mixed >> 1) & ((1 << 62) - 1)).remainder_(sizes).int()
    salts = (_mixed(mixed) & 0x7FFFFFFF).int()
    kernels = on_cuda(device) if device.type == "cuda" else None
    tables = owner, sizes.int(), first, pivots, salts
    images = kernels.shuffle(*tables) if kernels else None
    return start.index_select(0, owner).add_(permuted(*tables) if images is None else images)


def permuted(owner: Tensor, sizes: Tensor, first: Tensor, pivots: Tensor, salts: Tensor) -> Tensor:
    """Return the shuffle's image of each slot, as an offset in its parameter: int32 ``[slots]``.

    Args:
        owner: position of each slot's parameter, int64 ``[slots]``.
        sizes, first: number of elements, and first slot, of each parameter, int32 ``[parameters]``.
        pivots, salts: int32 ``[rounds + 1, parameters]``. The first pivot is the rotation; the first salt is not used.
    """
    size = sizes.index_select(0, owner)
    x = torch.arange(owner.numel(), dtype=torch.int32, device=owner.device) - first.index_select(0, owner)
    x = x.sub_(size).add_(pivots[0].index_select(0, owner))  # no int32 overflows
    x.add_((x >> 31).bitwise_and_(size))
    for pivot, salt in zip(pivots[1:], salts[1:], strict=True):
        other = pivot.index_select(0, owner).sub_(x)
        other.add_((other >> 31).bitwise_and_(size))
        swap = torch.maximum(x, other).add_(salt.index_select(0, owner)).mul_(-1640531535)
        swap.bitwise_xor_(swap >> 15).mul_(-2048144789)
        x = torch.where(swap < 0, other, x)
    return x


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 to int64, so that each bit depends on all: splitmix64's finalizer with arithmetic shifts."""
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)
