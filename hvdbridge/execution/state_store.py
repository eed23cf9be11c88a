"""The state of policies: trees of tensors that stay valid while buckets, backends and ranks change.

Rules:

1. A tree of dicts mirrors the tree of policies; a leaf maps parameter names to tensors. Nothing else is inside.
2. While training, a bucket's part of a leaf lies flat, in the order of the bucket (:class:`.Views`).
   It is laid so when a flow first looks at it, and anew, by name, when a flow over other buckets does: what only
   :meth:`Policy.after_step <hvdbridge.Policy.after_step>` uses is never laid for the gradients' buckets.
3. A parameter whose update is not finite keeps its old state. On CUDA this is decided on the device, without a
   wait on the host.
4. Tensors are replaced, never changed in place: what a flow was given stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hvdbridge.deprecated import own_member
from hvdbridge.errors import ConfigurationError, nearest
from hvdbridge.policy.base import Branch, Policy, Slot, State
from hvdbridge.policy.bucket import Layout, Views, flatten
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.collectives import used_here

Path = tuple[str, ...]
"""Keys from the root to a leaf: ``("inner", "residual")``."""

IN_FLIGHT, BUFFERS = 3, 3
"""Flows in flight, and blocks that each has for messages and sums."""

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
    on_parameters = between_nodes = False
    for key in path[:-1]:
        branch = policy.slots.get(key, Branch())
        on_parameters |= own_member(policy, "on_parameters", getattr(branch, "parameters", False))
        between_nodes |= own_member(policy, "between_nodes", getattr(branch, "nodes", False))
        policy = policy.inners()[key]
    slot = policy.slots.get(path[-1], Slot())
    assert isinstance(slot, Slot), path
    return replace(slot, gradient_units=slot.gradient_units and not on_parameters, by_node=slot.local and between_nodes)


def differences(state: State, saved: State) -> list[str]:
    """How ``saved`` differs from ``state`` in leaves, names, shapes and types, one line each; empty where it fits.
    ``saved`` may be anything.

    >>> differences({"residual": {"w": torch.ones(2)}}, {"residual": {"w": torch.ones(3), "v": torch.ones(1)}})
    ['residual/w is float32[3], expected float32[2]', 'residual/v is not expected']
    """

    def flat(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
        match tree:
            case Tensor():
                yield path, f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
            case Mapping():
                for key, child in tree.items():
                    yield from flat(child, (*path, key))
            case _:
                yield path, f"of type {type(tree).__name__}"

    def text(path: tuple[Any, ...]) -> str:
        return "/".join(map(str, path)) or "it"

    expected, found = dict(flat(state)), dict(flat(saved))
    lines = [f"{text(key)} is missing" for key in expected if key not in found]
    lines += [f"{text(k)} is {found[k]}, expected {e}" for k, e in expected.items() if found.get(k, e) != e]
    strange = {key: what for key, what in found.items() if key not in expected}
    return lines + [
        f"{text(key)} is {what if what.startswith('of type') else 'not expected'}" for key, what in strange.items()
    ]


OnResize = Literal["raise", "reset", "redistribute"]
"""What becomes of a state of another number of ranks; see :func:`redistribute`."""


Nodes = Sequence[int]
"""The node that each rank runs on: any numbers, equal within a node."""


def first_of_node(nodes: Nodes) -> tuple[int, ...]:
    """Of each rank, the first rank on its node.

    >>> first_of_node([7, 7, 3, 7])
    (0, 0, 2, 0)
    """
    return tuple(map(list(nodes).index, nodes))


def redistribute(
    policy: Policy,
    saved: Sequence[State],
    size: int,
    fresh: State | None = None,
    nodes: tuple[Nodes, Nodes] | None = None,
) -> list[State]:
    """The states of ``size`` ranks made from those of other ranks.

    Where the number of ranks is another, rank-local leaves keep their sum: each new rank gets 1/size of it (added in
    float64); where ``fresh`` is given they are its. Replicated ones are those of rank 0. What belonged to the owners of
    elements (:attr:`Slot.owned`) goes to the residual around it, since these elements have other owners now.

    Args:
        nodes: those of the ranks that saved, and of the new ones. What is local to nodes keeps its sum over them, where
            other ranks share a node now. None: every rank is a node.
    """
    before, now = nodes or (range(len(saved)), range(size))
    owners, count = sorted(set(first_of_node(before))), len(set(now))
    if first_of_node(before) == first_of_node(now):
        return list(saved)

    def average(tensors: Sequence[Tensor], by_node: bool) -> Tensor:
        chosen = [tensors[rank] for rank in owners] if by_node else tensors
        total = chosen[0].to(torch.float64)
        for tensor in chosen[1:]:
            total = total + tensor.to(torch.float64)
        return (total / (count if by_node else size)).to(chosen[0].dtype)

    def merge(trees: Sequence[State], fresh: State | None, path: Path) -> dict[str, Any]:
        first = trees[0]
        if not _is_leaf(first):
            new = {key: None if fresh is None else fresh[key] for key in first}
            return {key: merge([tree.get(key, {}) for tree in trees], new[key], (*path, key)) for key in first}
        slot = slot_of(policy, path)
        if not slot.local:
            return dict(first)
        if fresh is not None:
            return dict(fresh)
        return {name: average([tree[name] for tree in trees], slot.by_node) for name in first}

    shared = merge(saved, fresh, ())
    for path, leaf in list(leaves(shared)) if fresh is None else ():
        if slot_of(policy, path).owned:
            *around, _, _ = path  # (..., "inner", slot) stands beside (..., "residual")
            residual = _at(shared, (*around, "residual"))
            residual.update({name: residual[name] + tensor for name, tensor in leaf.items()})
            _at(shared, path).update({name: torch.zeros_like(tensor) for name, tensor in leaf.items()})
    if len(saved) != size:
        return [to_portable(shared) for _ in range(size)]
    # The same ranks on other nodes: only what belonged to these moves.
    states = [to_portable(state) for state in saved]
    for path, leaf in leaves(shared):
        if slot_of(policy, path).by_node:
            for state in states:
                _at(state, path).update({name: tensor.clone() for name, tensor in leaf.items()})
    return list(states)


class StateStore:
    """Holds one rank's state: hands each bucket its part, takes the new part back, saves and loads.

    >>> from hvdbridge.policies import from_spec
    >>> store = StateStore(from_spec("ef(bf16)"), {"w": torch.zeros(2), "b": torch.zeros(1)})
    >>> store.part(Layout({"b": (1,), "w": (2,)}))["residual"].flat
    tensor([0., 0., 0.])
    """

    def __init__(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        self.policy = policy
        self.params = {name: torch.empty_like(p, device="meta") for name, p in params.items()}
        # Leaf by leaf, either the tensors themselves, or while they are laid flat, meta tensors in their place.
        self._tree = to_portable(policy.init(params))
        self._devices = {path: {name: t.device for name, t in leaf.items()} for path, leaf in leaves(self._tree)}
        self._laid: dict[Path, dict[Layout, Mapping[str, Tensor]]] = {}
        self._parts: dict[Layout, _Part] = {}
        self._slots = {path: slot_of(policy, path) for path, _ in leaves(self._tree)}
        # A flow's new values stand beside those that they replace, and one bucket is often smaller than the others.
        reused = sum(slot.reused for slot in self._slots.values())
        self.pool = BufferPool(IN_FLIGHT * (reused + BUFFERS) + (reused > 0))

    @property
    def nbytes(self) -> int:
        """Bytes of state that this rank holds."""
        return sum(t.numel() * t.element_size() for _, leaf in leaves(self._tree) for t in leaf.values())

    def part(self, layout: Layout) -> State:
        """The state of a bucket's parameters, as it is whenever one looks; leaves of the parameters' shapes are flat
        in the bucket's order."""
        if not self._slots:
            return self._tree
        if layout not in self._parts:
            self._parts[layout] = _Part(self, layout, self._tree)
        return self._parts[layout]

    def merge(self, layout: Layout, new: State | None, update: Tensor) -> None:
        """Take a bucket's new state (None, whole or in a branch: unchanged).

        Args:
            update: the bucket's update, flat; a parameter with a non-finite element in it keeps its old state.

        Raises:
            ConfigurationError: ``new`` has a branch that the policy's ``init`` did not give.
        """
        if new is not None and self._slots:
            self._merge((), self._tree, layout, new, _Guard(layout, update))

    def whole(self) -> dict[str, Any]:
        """The whole state as it is now, until the next step; leaves are views, nothing is copied."""
        return self._whole((), self._tree)

    def portable(self) -> dict[str, Any]:
        """A copy of the whole state; see :func:`to_portable`."""
        return to_portable(self.whole())

    def load(
        self,
        saved: State | Sequence[State],
        rank: int = 0,
        size: int = 1,
        on_resize: OnResize = "redistribute",
        nodes: tuple[Nodes, Nodes] | None = None,
    ) -> None:
        """Take up a state that :meth:`portable` gave: this rank's, or those of all ranks in rank order.

        Args:
            rank, size: of this rank, where all ranks' states are given.
            on_resize: what to do with those of another number of ranks: refuse, begin anew with what is local to
                ranks, or redistribute that.
            nodes: as for :func:`redistribute`.

        Raises:
            ConfigurationError: other leaves, names, shapes or types; lists the differences. Or another number of
                ranks where that is refused. Nothing is loaded.
        """
        if on_resize not in get_args(OnResize):
            raise ConfigurationError(f"on_resize={on_resize!r}. {nearest(str(on_resize), get_args(OnResize))}")
        states: list[Any] = list(saved) if isinstance(saved, list | tuple) else [saved]
        if not states:
            raise ConfigurationError("there is no state to load")
        for index, state in enumerate(states):
            if lines := differences(self._tree, state):
                more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
                whose = f" of rank {index}" if len(states) > 1 else ""
                text = "".join(f"\n  {line}" for line in lines[:SHOWN] + more)
                raise ConfigurationError(f"the state{whose} does not fit this policy and model:{text}")
        moved = len(states) != size or (nodes is not None and self.moves(*nodes))
        if moved and on_resize == "raise":
            raise resized(len(states), size)
        fresh = self._fresh() if moved and on_resize == "reset" else None
        mine = dict(leaves(redistribute(self.policy, states, size, fresh, nodes)[rank]))
        self._laid.clear()
        for path, leaf in leaves(self._tree):
            self._put(path, {name: mine[path][name] for name in leaf})

    def moves(self, before: Nodes, now: Nodes) -> bool:
        """Whether something here belongs to nodes, and these have other ranks now."""
        return first_of_node(before) != first_of_node(now) and any(slot.by_node for slot in self._slots.values())

    def reset(self) -> None:
        """Begin anew with what is local to this rank; what is replicated stays."""
        fresh = self._fresh()
        for path, leaf in leaves(fresh):
            if self._slots[path].local:
                self._settle(path)
                self._put(path, leaf)

    def rescale(self, factor: float) -> None:
        """Multiply what is in units of the gradient, after the loss scale changed by ``factor``."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(f"a loss scale changes by a positive finite factor, not by {factor}")
        for path, slot in self._slots.items():
            if slot.gradient_units:
                self._settle(path)
                node = _at(self._tree, path)
                node.update({name: tensor * factor for name, tensor in node.items()})

    def leaf(self, path: Path, layout: Layout) -> Mapping[str, Tensor]:
        """A bucket's part of one leaf, laid."""
        laid = self._laid.get(path, {})
        if layout not in laid:
            if not all(other.sizes.keys().isdisjoint(layout.sizes) for other in laid):
                self._settle(path)
            node = _at(self._tree, path)
            names = [name for name in layout.names if name in node]
            alike = {(node[name].dtype, node[name].device) for name in names}
            if len(alike) == 1 and all(node[name].shape == layout.shapes[name] for name in names):
                own = layout.part(names)
                for name in names:  # made on the user's stream, which has their memory back as soon as they are dropped
                    used_here(node[name])
                flat = self.pool.take(own.numel, *alike.pop(), lasting=True)
                torch.cat([node[name].reshape(-1) for name in names], out=flat)
                part: Mapping[str, Tensor] = Views(own, flat)
            else:
                part = {name: node[name] for name in names}
            self._laid.setdefault(path, {})[layout] = part
            node.update({name: torch.empty_like(node[name], device="meta") for name in names})
        return self._laid[path][layout]

    def _put(self, path: Path, leaf: Mapping[str, Tensor]) -> None:
        devices = self._devices[path]
        _at(self._tree, path).update({name: tensor.to(devices[name], copy=True) for name, tensor in leaf.items()})

    def _settle(self, path: Path) -> None:
        """Take a leaf's tensors back into the tree (views, no copy)."""
        self.pool.clear()  # there will be others
        for part in self._laid.pop(path, {}).values():
            _at(self._tree, path).update(part)

    def _whole(self, path: Path, node: Mapping[str, Any]) -> dict[str, Any]:
        if not _is_leaf(node):
            return {key: self._whole((*path, key), child) for key, child in node.items()}
        whole = dict(node)
        for part in self._laid.get(path, {}).values():
            whole.update(part)
        return whole

    def _merge(self, path: Path, node: Mapping[str, Any], layout: Layout, new: State | None, guard: _Guard) -> None:
        if new is None or isinstance(new, _Part):
            return
        if path in self._slots:
            old = self.leaf(path, layout)
            if new is not old:
                _refuse_unknown(new, old)
                slot = self._slots[path]
                fitted = self._laid[path][layout] = guard.choose(new, old) if slot.guarded else _fit(new, old)
                if slot.reused and isinstance(old, Views) and isinstance(fitted, Views):
                    self.pool.give(old.flat, but=[fitted.flat])
            return
        _refuse_unknown(new, node)
        for key, child in new.items():
            self._merge((*path, key), node[key], layout, child, guard)

    def _fresh(self) -> State:
        return self.policy.init({n: torch.zeros(p.shape, dtype=p.dtype, device="cpu") for n, p in self.params.items()})


def resized(saved: int, size: int) -> ConfigurationError:
    """The error about a state of another number of ranks."""
    ranks = f"{saved} ranks and would be loaded by {size}" if saved != size else f"{size} ranks on other nodes"
    return ConfigurationError(
        f"the state was saved by {ranks}. on_resize='reset' begins anew with what "
        "is local to ranks; on_resize='redistribute' keeps its sum, and needs a state of all ranks (gather=True)."
    )


class _Part(Mapping[str, Any]):
    """A bucket's part of a tree, as it is whenever one looks: branches of this class, leaves laid by the store."""

    def __init__(self, store: StateStore, layout: Layout, node: Mapping[str, Any], path: Path = ()) -> None:
        self._store, self._layout = store, layout
        self._children: dict[str, _Part | Path] = {}
        for key, child in node.items():
            at = (*path, key)
            self._children[key] = at if _is_leaf(child) else _Part(store, layout, child, at)

    def __getitem__(self, key: str) -> Any:
        child = self._children[key]
        return child if isinstance(child, _Part) else self._store.leaf(child, self._layout)

    def __iter__(self) -> Iterator[str]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)


def _at(tree: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    for key in path:
        tree = tree[key]
    return tree


def _is_leaf(node: State) -> bool:
    return isinstance(node, Views) or isinstance(next(iter(node.values()), None), Tensor)


def _refuse_unknown(new: State, old: Mapping[str, Any]) -> None:
    if isinstance(new, Views) and isinstance(old, Views) and new.layout is old.layout:
        return
    if unknown := sorted(set(new) - set(old)):
        raise ConfigurationError(f"a policy returned state that its init() did not give: {', '.join(unknown)}")


def _fit(new: State, old: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``new`` laid and typed as ``old``; what it does not say is as it was."""
    if isinstance(old, Views):
        return Views(old.layout, flatten(new, old.layout).to(old.flat.dtype))
    return {name: new.get(name, tensor).to(tensor.dtype) for name, tensor in old.items()}


class _Guard:
    """Keeps the old state of parameters whose update is not finite."""

    def __init__(self, layout: Layout, update: Tensor) -> None:
        self.layout, self.update = layout, update

    @cached_property
    def finite(self) -> _Finite | None:
        """None: everything is, and no more need be known."""
        if self.update.device.type == "cpu" and _surely_finite(self.update):  # the host may look
            return None
        return _Finite(self.layout, self.update)

    def choose(self, new: State, old: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``new``, and ``old`` where the update is not finite."""
        fitted, finite = _fit(new, old), self.finite
        if finite is None:
            return fitted
        if isinstance(old, Views):
            assert isinstance(fitted, Views)
            return Views(old.layout, torch.where(finite.elements(old.layout), fitted.flat, old.flat))
        return {name: torch.where(finite.parameter(name), fitted[name], tensor) for name, tensor in old.items()}


def _surely_finite(update: Tensor) -> bool:
    """One pass: a finite sum has finite terms. (An overflowing sum of finite ones is looked at again.)"""
    return math.isfinite(update.sum(dtype=torch.promote_types(update.dtype, torch.float32)).item())


class _Finite:
    """Which parameters of a bucket have a finite update, as flags on the bucket's device."""

    def __init__(self, layout: Layout, update: Tensor) -> None:
        self.layout = layout
        self.flags = layout.finite(update)
        self._elements: dict[Layout, Tensor] = {}

    def parameter(self, name: str) -> Tensor:
        """Scalar bool."""
        return self.flags[self._numbers()[name]]

    def elements(self, layout: Layout) -> Tensor:
        """Bool, ``[layout.numel]``; ``layout`` is that of the bucket or a part of it."""
        if layout not in self._elements:
            flags = self.flags if layout is self.layout else self.flags[self._numbers_in(layout)]
            self._elements[layout] = layout.spread(flags)
        return self._elements[layout]

    def _numbers(self) -> dict[str, int]:
        return self.layout.derive("numbers", lambda: {name: i for i, name in enumerate(self.layout.names)})

    def _numbers_in(self, part: Layout) -> Tensor:
        def make() -> Tensor:
            numbers = self._numbers()
            return torch.tensor([numbers[name] for name in part.names], dtype=torch.int64, device=self.flags.device)

        return part.derive(("numbers in", self.layout, self.flags.device), make)
