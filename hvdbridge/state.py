"""The state of policies: trees of tensors that stay valid while buckets, backends and ranks change.

Rules:

1. A tree of dicts mirrors the tree of policies; a leaf maps parameter names to tensors. Nothing else is inside.
2. The tree is the truth about what was saved and loaded; while training, each bucket's part of it lies flat, in
   the order of the bucket (:class:`~hvdbridge.bucket.Views`), and is laid anew by name when buckets change.
3. A parameter whose update is not finite keeps its old state. On CUDA this is decided on the device, without a
   wait on the host.
4. Tensors are replaced, never changed in place: what a flow was given stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdbridge.bucket import Layout, Views, flatten
from hvdbridge.errors import ConfigurationError
from hvdbridge.policy import Policy, Slot, State

Path = tuple[str, ...]
"""Keys from the root to a leaf: ``("inner", "residual")``."""

SHOWN = 8
"""Differences that an error lists before it only counts them."""


def leaves(state: State, path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Tensor]]]:
    """All leaves of a tree with their paths; empty ones are left out.

    >>> [path for path, _ in leaves({"residual": {"w": torch.ones(2)}, "inner": {}})]
    [('residual',)]
    """
    if _is_leaf(state):
        yield path, state
        return
    for key, child in state.items():
        yield from leaves(child, (*path, key))


def select(state: State, names: Iterable[str]) -> dict[str, Any]:
    """The part of a tree that belongs to these parameters; the same branches.

    >>> select({"residual": {"w": torch.ones(2), "b": torch.ones(1)}, "inner": {}}, ["b"])
    {'residual': {'b': tensor([1.])}, 'inner': {}}
    """
    chosen = set(names)
    if _is_leaf(state):
        return {name: tensor for name, tensor in state.items() if name in chosen}
    return {key: select(child, chosen) for key, child in state.items()}


def to_portable(state: State) -> dict[str, Any]:
    """A copy in plain dicts that shares no memory: it pickles, and ``torch.load(weights_only=True)`` reads it."""
    if _is_leaf(state):
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    return {key: to_portable(child) for key, child in state.items()}


def slot_of(policy: Policy, path: Path) -> Slot:
    """What the leaf at ``path`` is, by the policy that declares it."""
    for key in path[:-1]:
        policy = policy.inners()[key]
    return policy.slots.get(path[-1], Slot())


def differences(state: State, saved: State) -> list[str]:
    """How ``saved`` differs from ``state`` in leaves, names, shapes and types, one line each; empty where it fits.

    >>> differences({"residual": {"w": torch.ones(2)}}, {"residual": {"w": torch.ones(3), "v": torch.ones(1)}})
    ['residual/w is float32[3], expected float32[2]', 'residual/v is not expected']
    """

    def flat(tree: State) -> dict[str, str]:
        return {
            "/".join((*path, name)): f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for path, leaf in leaves(tree)
            for name, t in leaf.items()
        }

    expected, found = flat(state), flat(saved)
    lines = [f"{key} is missing" for key in expected if key not in found]
    lines += [f"{k} is {found[k]}, expected {e}" for k, e in expected.items() if found.get(k, e) != e]
    return lines + [f"{key} is not expected" for key in found if key not in expected]


def redistribute(policy: Policy, saved: Sequence[State], size: int) -> list[State]:
    """The states of ``size`` ranks made from those of another number of ranks.

    Rank-local leaves keep their sum: each new rank gets 1/size of it (added in float64). Replicated ones are
    those of rank 0.
    """
    if len(saved) == size:
        return list(saved)

    def average(tensors: Sequence[Tensor]) -> Tensor:
        total = tensors[0].to(torch.float64)
        for tensor in tensors[1:]:
            total = total + tensor.to(torch.float64)
        return (total / size).to(tensors[0].dtype)

    def merge(trees: Sequence[State], path: Path) -> dict[str, Any]:
        first = trees[0]
        if not _is_leaf(first):
            return {key: merge([tree[key] for tree in trees], (*path, key)) for key in first}
        if not slot_of(policy, path).local:
            return dict(first)
        return {name: average([tree[name] for tree in trees]) for name in first}

    shared = merge(saved, ())
    return [to_portable(shared) for _ in range(size)]


class StateStore:
    """Holds one rank's state: hands each bucket its part, takes the new part back, saves and loads.

    >>> from hvdbridge.policies import from_spec
    >>> store = StateStore(from_spec("ef(bf16)"), {"w": torch.zeros(2), "b": torch.zeros(1)})
    >>> store.part(Layout({"b": (1,), "w": (2,)}))["residual"].flat
    tensor([0., 0., 0.])
    """

    def __init__(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        self.policy = policy
        self._tree = to_portable(policy.init(params))
        self._parts: dict[Layout, State] = {}
        self._stateless = not any(True for _ in leaves(self._tree))

    def part(self, layout: Layout) -> State:
        """The state of a bucket's parameters; leaves of the parameters' shapes are flat in the bucket's order."""
        if self._stateless:
            return self._tree
        if layout not in self._parts:
            self._settle()
            names = set(layout.names)
            self._parts = {other: part for other, part in self._parts.items() if names.isdisjoint(other.names)}
            self._parts[layout] = _lay(self._tree, layout)
        return self._parts[layout]

    def merge(self, layout: Layout, new: State | None, update: Tensor) -> None:
        """Take a bucket's new state (None, whole or in a branch: unchanged).

        Args:
            update: the bucket's update, flat; a parameter with a non-finite element in it keeps its old state.

        Raises:
            ConfigurationError: ``new`` has a branch that the policy's ``init`` did not give.
        """
        if new is None or self._stateless:
            return
        keep = None
        if update.is_cuda or not _surely_finite(update):
            keep = _Finite(layout, update)
        self._parts[layout] = _merge(self.part(layout), new, keep)

    def portable(self) -> dict[str, Any]:
        """A copy of the whole state; see :func:`to_portable`."""
        self._settle()
        return to_portable(self._tree)

    def load(self, saved: State | Sequence[State], rank: int = 0, size: int = 1) -> None:
        """Take up a state that :meth:`portable` gave: this rank's, or those of all ranks in rank order.

        Args:
            rank, size: of this rank, where all ranks' states are given; another number of them is redistributed.

        Raises:
            ConfigurationError: other leaves, names, shapes or types; lists the differences. Nothing is loaded.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        if not states:
            raise ConfigurationError("there is no state to load")
        for index, state in enumerate(states):
            if lines := differences(self._tree, state):
                more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
                whose = f" of rank {index}" if len(states) > 1 else ""
                text = "".join(f"\n  {line}" for line in lines[:SHOWN] + more)
                raise ConfigurationError(f"the state{whose} does not fit this policy and model:{text}")
        mine = dict(leaves(redistribute(self.policy, states, size)[rank]))
        self._parts.clear()
        for path, leaf in leaves(self._tree):
            self._put(path, {name: mine[path][name].to(old.device, copy=True) for name, old in leaf.items()})

    def rescale(self, factor: float) -> None:
        """Multiply what is in units of the gradient, after the loss scale changed by ``factor``."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(f"a loss scale changes by a positive finite factor, not by {factor}")
        self._settle()
        self._parts.clear()
        for path, leaf in leaves(self._tree):
            if slot_of(self.policy, path).gradient_units:
                self._put(path, {name: tensor * factor for name, tensor in leaf.items()})

    def _put(self, path: Path, leaf: Mapping[str, Tensor]) -> None:
        node = self._tree
        for key in path:
            node = node[key]
        node.update(leaf)

    def _settle(self) -> None:
        """Let the tree say what the buckets' parts say (views of them, no copy)."""
        for part in self._parts.values():
            for path, leaf in leaves(part):
                self._put(path, leaf)


def _is_leaf(node: State) -> bool:
    return isinstance(node, Views) or isinstance(next(iter(node.values()), None), Tensor)


def _lay(state: State, layout: Layout) -> State:
    """The part of a tree for one bucket."""
    if not _is_leaf(state):
        return {key: _lay(child, layout) for key, child in state.items()}
    names = [name for name in layout.names if name in state]
    alike = {(state[name].dtype, state[name].device) for name in names}
    if len(alike) != 1 or any(state[name].shape != layout.shapes[name] for name in names):
        return {name: state[name] for name in names}
    own = layout.part(names)
    return Views(own, flatten(state, own))


def _merge(old: State, new: State | None, keep: _Finite | None) -> State:
    """``new`` where it says something and the update is finite, else ``old``."""
    if new is None or new is old:
        return old
    if unknown := sorted(set(new) - set(old)):
        raise ConfigurationError(f"a policy returned state that its init() did not give: {', '.join(unknown)}")
    if isinstance(old, Views):
        flat = flatten(new, old.layout).to(old.flat.dtype)
        return Views(old.layout, flat if keep is None else torch.where(keep.elements(old.layout), flat, old.flat))
    if _is_leaf(old):
        return {name: _chosen(name, new.get(name, tensor), tensor, keep) for name, tensor in old.items()}
    return {key: _merge(child, new.get(key), keep) for key, child in old.items()}


def _chosen(name: str, new: Tensor, old: Tensor, keep: _Finite | None) -> Tensor:
    return new if keep is None else torch.where(keep.parameter(name), new, old)


def _surely_finite(update: Tensor) -> bool:
    """One pass: a finite sum has finite terms. (An overflowing sum of finite ones is looked at again.)"""
    return math.isfinite(update.sum(dtype=torch.promote_types(update.dtype, torch.float32)).item())


class _Finite:
    """Which parameters of a bucket have a finite update, as flags on the bucket's device."""

    def __init__(self, layout: Layout, update: Tensor) -> None:
        self.layout, self.device = layout, update.device
        # Non-finite elements up to each parameter's end; equal at both ends of a parameter = none in it.
        count = torch.zeros(layout.numel + 1, dtype=torch.int32, device=update.device)
        torch.cumsum(~torch.isfinite(update), 0, dtype=torch.int32, out=count[1:])
        starts = self._index("starts", layout, [layout.offsets[name] for name in layout.names])
        ends = self._index("ends", layout, [layout.offsets[name] + layout.sizes[name] for name in layout.names])
        self.flags = count[ends] == count[starts]

    def parameter(self, name: str) -> Tensor:
        """Scalar bool."""
        return self.flags[self._numbers()[name]]

    def elements(self, layout: Layout) -> Tensor:
        """Bool, ``[layout.numel]``; ``layout`` is that of the bucket or a part of it."""
        numbers, key = self._numbers(), ("numbers in", self.layout)
        flags = self.flags[self._index(key, layout, [numbers[name] for name in layout.names])]
        sizes = self._index("sizes", layout, [layout.sizes[name] for name in layout.names])
        return torch.repeat_interleave(flags, sizes, output_size=layout.numel)

    def _numbers(self) -> dict[str, int]:
        return self.layout.derive("numbers", lambda: {name: i for i, name in enumerate(self.layout.names)})

    def _index(self, key: Any, layout: Layout, values: list[int]) -> Tensor:
        return layout.derive((key, self.device), lambda: torch.tensor(values, dtype=torch.int64, device=self.device))
