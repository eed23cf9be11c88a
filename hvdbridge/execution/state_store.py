"""The state of policies: trees of tensors that stay valid while buckets, backends and ranks change.

Rules:

1. A tree of dicts mirrors the tree of policies; a leaf maps parameter names to tensors. Nothing else is inside.
2. While training, a bucket's part of a leaf is flat, in the order of the bucket (:class:`.Views`). The store makes it
   when a flow first looks at it, and anew, by name, when a flow over other buckets does. Leaves that only
   :meth:`Policy.after_step <hvdbridge.Policy.after_step>` uses are never cut for the gradients' buckets.
3. A parameter whose update is not finite keeps its old state. On CUDA this is decided on the device, without a
   wait on the host.
4. Tensors are replaced, never changed in place: what a flow was given stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def leaves(state: State | None, path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Tensor]]]:
    """All leaves of a tree with their paths; empty ones, and branches that a flow left as they were, are left out.

    >>> [path for path, _ in leaves({"residual": {"w": torch.ones(2)}, "inner": {}})]
    [('residual',)]
    """
    if state is None or isinstance(state, _Part):
        return
    if _is_leaf(state):
        yield path, state
        return
    for key, child in state.items():
        yield from leaves(child, (*path, key))


def mapped(state: State, change: Callable[[Path, Mapping[str, Tensor]], Any], path: Path = ()) -> dict[str, Any]:
    """A tree with ``change(path, leaf)`` in the place of each leaf."""
    if _is_leaf(state):
        return change(path, state)  # type: ignore[no-any-return]
    return {key: mapped(child, change, (*path, key)) for key, child in state.items()}


def to_portable(state: State) -> dict[str, Any]:
    """A copy in plain dicts that shares no memory: it pickles, and ``torch.load(weights_only=True)`` reads it."""

    def copied(_: Path, leaf: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in leaf.items()}

    return mapped(state, copied)


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
    policy: Policy, saved: Sequence[State], size: int, fresh: State | None = None,
    nodes: tuple[Nodes, Nodes] | None = None,
) -> list[State]:  # fmt: skip
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

    found = [dict(leaves(state)) for state in saved]
    anew = dict(leaves(fresh))

    def merge(path: Path, leaf: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        slot = slot_of(policy, path)
        if not slot.local or fresh is not None:
            return dict(anew[path] if slot.local else leaf)
        return {name: average([each[path][name] for each in found], slot.by_node) for name in leaf}

    shared = mapped(saved[0], merge)
    new: dict[Path, Any] = dict(leaves(shared))
    for path, leaf in new.items() if fresh is None else ():
        if slot_of(policy, path).owned:
            residual = new[(*path[:-2], "residual")]  # (..., "inner", slot) stands beside (..., "residual")
            residual.update({name: residual[name] + tensor for name, tensor in leaf.items()})
            leaf.update({name: torch.zeros_like(tensor) for name, tensor in leaf.items()})
    if len(saved) != size:
        return [to_portable(shared) for _ in range(size)]
    # The same ranks on other nodes: only what belonged to these moves.
    return [
        to_portable(mapped(state, lambda path, leaf: new[path] if slot_of(policy, path).by_node else leaf))
        for state in saved
    ]


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
        state = to_portable(policy.init(params))
        self._tree = mapped(state, lambda _, leaf: {name: tensor.to("meta") for name, tensor in leaf.items()})
        # Of each leaf the bucket's parts, and under None what is in none of them
        self._leaves: dict[Path, dict[Layout | None, Mapping[str, Tensor]]] = {
            path: {None: leaf} for path, leaf in leaves(state)
        }
        self._slots = {path: slot_of(policy, path) for path in self._leaves}
        # A flow's new values stand beside those that they replace, and one bucket is often smaller than the others.
        reused = sum(slot.reused for slot in self._slots.values())
        self.pool = BufferPool(IN_FLIGHT * (reused + BUFFERS) + (reused > 0))

    @property
    def nbytes(self) -> int:
        """Bytes of state that this rank holds."""
        return sum(tensor.nbytes for _, leaf in leaves(self._tree) for tensor in leaf.values())

    def part(self, layout: Layout) -> State:
        """The state of a bucket's parameters, as it is whenever one looks; leaves of the parameters' shapes are flat
        in the bucket's order."""
        return _Part(self, layout, self._tree) if self._slots else self._tree

    def merge(self, layout: Layout, new: State | None, update: Tensor) -> None:
        """Take a bucket's new state (None, whole or in a branch: unchanged).

        Args:
            update: the bucket's update, flat; a parameter with a non-finite element in it keeps its old state.

        Raises:
            ConfigurationError: ``new`` has a branch that the policy's ``init`` did not give.
        """
        if not self._slots:
            return
        guard = _Guard(layout, update)
        for path, leaf in leaves(new):
            if path not in self._slots:
                raise _unknown(["/".join(path)])
            old = self.leaf(path, layout)
            if leaf is not old:
                slot = self._slots[path]
                fitted = self._leaves[path][layout] = guard.choose(leaf, old) if slot.guarded else _fit(leaf, old)
                if slot.reused and isinstance(old, Views) and isinstance(fitted, Views):
                    self.pool.give(old.flat, but=[fitted.flat])

    def whole(self) -> dict[str, Any]:
        """The whole state as it is now, until the next step; leaves are views, nothing is copied."""
        return mapped(self._tree, self._values)

    def portable(self) -> dict[str, Any]:
        """A copy of the whole state; see :func:`to_portable`."""
        return to_portable(self.whole())

    def load(
        self, saved: State | Sequence[State], rank: int = 0, size: int = 1, on_resize: OnResize = "redistribute",
        nodes: tuple[Nodes, Nodes] | None = None,
    ) -> None:  # fmt: skip
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
        for path, leaf in leaves(redistribute(self.policy, states, size, fresh, nodes)[rank]):
            self._put(path, leaf)

    def moves(self, before: Nodes, now: Nodes) -> bool:
        """Whether something here belongs to nodes, and these have other ranks now."""
        return first_of_node(before) != first_of_node(now) and any(slot.by_node for slot in self._slots.values())

    def reset(self) -> None:
        """Begin anew with what is local to this rank; what is replicated stays."""
        for path, leaf in leaves(self._fresh()):
            if self._slots[path].local:
                self._put(path, leaf)

    def rescale(self, factor: float) -> None:
        """Multiply what is in units of the gradient, after the loss scale changed by ``factor``."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(f"a loss scale changes by a positive finite factor, not by {factor}")
        for path, slot in self._slots.items():
            if slot.gradient_units:
                whole = self._values(path)
                self._put(path, {name: tensor * factor for name, tensor in whole.items()}, copy=False)

    def leaf(self, path: Path, layout: Layout) -> Mapping[str, Tensor]:
        """A bucket's part of one leaf: flat, if all its tensors have one type and device and the parameters' shapes."""
        parts = self._leaves[path]
        if layout in parts:
            return parts[layout]
        if not all(other is None or other.sizes.keys().isdisjoint(layout.sizes) for other in parts):
            self._put(path, self._values(path), copy=False)
            parts = self._leaves[path]
        rest = parts[None]
        part: Mapping[str, Tensor] = {name: rest[name] for name in layout.names if name in rest}
        alike = {(tensor.dtype, tensor.device) for tensor in part.values()}
        if len(alike) == 1 and all(tensor.shape == layout.shapes[name] for name, tensor in part.items()):
            for tensor in part.values():  # made on the user's stream, which has their memory back when they are dropped
                used_here(tensor)
            own = layout.part(part)
            flat = self.pool.take(own.numel, *alike.pop(), lasting=True)
            part = Views(own, torch.cat([tensor.reshape(-1) for tensor in part.values()], out=flat))
        parts[layout] = part
        parts[None] = {name: tensor for name, tensor in rest.items() if name not in part}
        return part

    def _put(self, path: Path, leaf: Mapping[str, Tensor], copy: bool = True) -> None:
        """Replace a whole leaf: it is in no bucket any more."""
        self.pool.clear()  # there will be other parts
        if copy:
            devices = {name: tensor.device for name, tensor in self._values(path).items()}
            leaf = {name: tensor.to(devices[name], copy=True) for name, tensor in leaf.items()}
        self._leaves[path] = {None: leaf}

    def _values(self, path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """A whole leaf (views, no copy), in the order of ``like``."""
        found = {name: tensor for part in self._leaves[path].values() for name, tensor in part.items()}
        return found if like is None else {name: found[name] for name in like}

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
    """A bucket's part of a tree, as it is whenever one looks: branches of this class, leaves cut by the store."""

    def __init__(self, store: StateStore, layout: Layout, node: Mapping[str, Any], path: Path = ()) -> None:
        self._store, self._layout, self._node, self._path = store, layout, node, path

    def __getitem__(self, key: str) -> Any:
        child, path = self._node[key], (*self._path, key)
        if _is_leaf(child):
            return self._store.leaf(path, self._layout)
        return _Part(self._store, self._layout, child, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


def _is_leaf(node: State) -> bool:
    return isinstance(node, Views) or isinstance(next(iter(node.values()), None), Tensor)


def _unknown(names: list[str]) -> ConfigurationError:
    return ConfigurationError(f"a policy returned state that its init() did not give: {', '.join(names)}")


def _fit(new: State, old: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``new`` in the shape and type of ``old``; parameters that it leaves out are as they were."""
    if isinstance(old, Views) and isinstance(new, Views) and new.layout is old.layout:
        return Views(old.layout, new.flat.to(old.flat.dtype))
    if unknown := sorted(set(new) - set(old)):
        raise _unknown(unknown)
    if isinstance(old, Views):
        return Views(old.layout, flatten(new, old.layout).to(old.flat.dtype))
    return {name: new.get(name, tensor).to(tensor.dtype) for name, tensor in old.items()}


class _Guard:
    """Keeps the old state of parameters whose update is not finite."""

    def __init__(self, layout: Layout, update: Tensor) -> None:
        self.layout, self.update = layout, update
        self._spread: dict[Layout, Tensor] = {}

    @cached_property
    def flags(self) -> Tensor | None:
        """Whether each parameter's update is finite: bool ``[parameters]``. None: all are, by a look of the host."""
        # One pass: a finite sum has finite terms. (An overflowing sum of finite ones is looked at again.)
        wide = torch.promote_types(self.update.dtype, torch.float32)
        if self.update.device.type == "cpu" and math.isfinite(self.update.sum(dtype=wide).item()):
            return None
        return self.layout.finite(self.update)

    def choose(self, new: State, old: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """``new``, and ``old`` where the update is not finite."""
        fitted = _fit(new, old)
        if self.flags is None:
            return fitted
        if isinstance(old, Views):
            assert isinstance(fitted, Views)
            return Views(old.layout, torch.where(self.elements(old.layout), fitted.flat, old.flat))
        flags = dict(zip(self.layout.names, self.flags, strict=True))
        return {name: torch.where(flags[name], fitted[name], tensor) for name, tensor in old.items()}

    def elements(self, part: Layout) -> Tensor:
        """Bool, ``[part.numel]``; ``part`` is the layout of the bucket or a part of it."""

        def numbers() -> Tensor:
            of = {name: i for i, name in enumerate(self.layout.names)}
            return torch.tensor([of[name] for name in part.names], dtype=torch.int64, device=self.update.device)

        assert self.flags is not None
        if part not in self._spread:
            flags = self.flags
            if part is not self.layout:
                flags = flags[part.derive(("numbers in", self.layout, self.update.device), numbers)]
            self._spread[part] = part.spread(flags)
        return self._spread[part]
