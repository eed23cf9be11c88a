"""The state of policies: trees of tensors that stay valid while buckets, backends and ranks change.

Rules:

1. A state is a tree of dicts that mirrors the tree of policies. A leaf maps parameter names to tensors.
2. While training, a bucket's part of a leaf is one flat tensor in the order of the bucket (:class:`.Views`). The store
   concatenates it when a flow first reads it. If bucket boundaries change, it divides and copies it by name. Leaves
   that only :meth:`Policy.after_step <hvdbridge.Policy.after_step>` reads are never divided into the gradients'
   buckets.
3. A parameter whose update is not finite keeps its old state where :attr:`Slot.guarded` is True. On CUDA the device
   decides this, and the host does not wait.
4. The store replaces tensors and never changes them in place, so a flow's input stays as it was until it is merged.
   Then the pool gets the memory of leaves whose :attr:`Slot.reused` is True.
5. With :attr:`StateStore.in_place`, which CUDA graphs need, new values are copied to the addresses of the old ones.
   They change only if a flow reads a bucket that overlaps with earlier ones, or by :meth:`StateStore.undivide`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hvdbridge.deprecated import own_member
from hvdbridge.errors import ConfigurationError, nearest
from hvdbridge.execution.scheduler import ACROSS_NODES
from hvdbridge.kernels.finite import Finite
from hvdbridge.policy.base import Branch, Policy, Slot, State
from hvdbridge.policy.bucket import Layout, Views, flatten
from hvdbridge.policy.buffer_pool import BufferPool
from hvdbridge.policy.capture import refuse_in_capture
from hvdbridge.policy.collectives import used_here

Path = tuple[str, ...]
"""Keys from the root to a leaf: ``("inner", "residual")``."""

BUFFERS = 3
"""Number of pool buffers that each flow in flight has for messages and sums."""

SHOWN = 8
"""Maximum number of differences that an error lists. It counts the others."""


def leaves(state: State | None, path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Tensor]]]:
    """Yield all leaves of a tree with their paths, except empty leaves, and branches that a flow returned unchanged.

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


def map_leaves(state: State, change: Callable[[Path, Mapping[str, Tensor]], Any], path: Path = ()) -> dict[str, Any]:
    """Return the tree with each leaf replaced by ``change(path, leaf)``."""
    if _is_leaf(state):
        return change(path, state)  # type: ignore[no-any-return]
    return {key: map_leaves(child, change, (*path, key)) for key, child in state.items()}


def to_portable(state: State) -> dict[str, Any]:
    """Return a copy in plain dicts that shares no memory, which ``torch.load(weights_only=True)`` can read."""

    def copied(_: Path, leaf: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in leaf.items()}

    return map_leaves(state, copied)


def slot_of(policy: Policy, path: Path) -> Slot:
    """Return the properties of the leaf at ``path``, including those that outer policies' branches imply."""
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
    """Return how ``saved``, any object, differs from ``state`` in leaves, names, shapes and dtypes, one line each.

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

    expected, given = dict(flat(state)), dict(flat(saved))
    lines = [f"{text(key)} is missing" for key in expected if key not in given]
    lines += [f"{text(k)} is {given[k]}, expected {e}" for k, e in expected.items() if given.get(k, e) != e]
    surplus = {key: kind for key, kind in given.items() if key not in expected}
    return lines + [
        f"{text(key)} is {kind if kind.startswith('of type') else 'not expected'}" for key, kind in surplus.items()
    ]


OnResize = Literal["raise", "reset", "redistribute"]
"""How to load the state of another number of ranks; see :meth:`StateStore.load`."""


Nodes = Sequence[int]
"""The node that each rank runs on: any numbers, equal within a node."""


def first_of_node(nodes: Nodes) -> tuple[int, ...]:
    """Return for each rank the first rank on its node.

    >>> first_of_node([7, 7, 3, 7])
    (0, 0, 2, 0)
    """
    return tuple(map(list(nodes).index, nodes))


def redistribute(
    policy: Policy, saved: Sequence[State], size: int, fresh: State | None = None,
    nodes: tuple[Nodes, Nodes] | None = None,
) -> list[State]:  # fmt: skip
    """Return the states of ``size`` ranks, made from the saved states of a job with other ranks or nodes.

    Replicated leaves are copied from rank 0. Local leaves keep their sum over ranks, computed in float64: each of the
    ``size`` ranks gets 1/size of it. With ``fresh``, local leaves are copied from there instead. An owned leaf
    (:attr:`Slot.owned`) is added to the residual around it, because its elements have other owners now.

    Args:
        nodes: the node of each rank that saved, and of each new rank. Leaves that are local to nodes keep their sum
            over nodes. If only the nodes differ, no other leaves change. None: every rank is a node.
    """
    old_nodes, new_nodes = nodes or (range(len(saved)), range(size))
    first_ranks, node_count = sorted(set(first_of_node(old_nodes))), len(set(new_nodes))
    if first_of_node(old_nodes) == first_of_node(new_nodes):
        return list(saved)

    def share_of_sum(tensors: Sequence[Tensor], by_node: bool) -> Tensor:
        chosen = [tensors[rank] for rank in first_ranks] if by_node else tensors
        total = chosen[0].to(torch.float64)
        for tensor in chosen[1:]:
            total = total + tensor.to(torch.float64)
        return (total / (node_count if by_node else size)).to(chosen[0].dtype)

    saved_leaves = [dict(leaves(state)) for state in saved]
    fresh_leaves = dict(leaves(fresh))

    def merge(path: Path, leaf: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        slot = slot_of(policy, path)
        if not slot.local or fresh is not None:
            return dict(fresh_leaves[path] if slot.local else leaf)
        return {name: share_of_sum([of_rank[path][name] for of_rank in saved_leaves], slot.by_node) for name in leaf}

    shared = map_leaves(saved[0], merge)
    new: dict[Path, Any] = dict(leaves(shared))
    for path, leaf in new.items() if fresh is None else ():
        if slot_of(policy, path).owned:
            residual = new.get((*path[:-2], "residual"))  # sibling of (..., "inner", slot)
            if residual is None:
                name = "/".join(path)
                raise ConfigurationError(f"{name}: Slot(owned=True) needs error feedback around its policy")
            residual.update({name: residual[name] + tensor for name, tensor in leaf.items()})
            leaf.update({name: torch.zeros_like(tensor) for name, tensor in leaf.items()})
    if len(saved) != size:
        return [to_portable(shared) for _ in range(size)]
    # The same ranks on other nodes: only leaves that are local to nodes change.
    return [
        to_portable(map_leaves(state, lambda path, leaf: new[path] if slot_of(policy, path).by_node else leaf))
        for state in saved
    ]


class StateStore:
    """Stores one rank's state: gives each bucket its part, takes the new part, saves and loads.

    >>> from hvdbridge.policies import from_spec
    >>> store = StateStore(from_spec("ef(bf16)"), {"w": torch.zeros(2), "b": torch.zeros(1)})
    >>> store.part(Layout({"b": (1,), "w": (2,)}))["residual"].flat
    tensor([0., 0., 0.])
    """

    def __init__(self, policy: Policy, params: Mapping[str, Tensor]) -> None:
        self.policy = policy
        self.in_place = False
        self.params = {name: torch.empty_like(p, device="meta") for name, p in params.items()}
        state = to_portable(policy.init(params))
        self._tree = map_leaves(state, lambda _, leaf: {name: tensor.to("meta") for name, tensor in leaf.items()})
        # Path of a leaf -> layout of a bucket -> the bucket's part; None -> what no bucket has read yet
        self._leaves: dict[Path, dict[Layout | None, Mapping[str, Tensor]]] = {
            path: {None: leaf} for path, leaf in leaves(state)
        }
        self._slots = {path: slot_of(policy, path) for path in self._leaves}
        # A flow needs buffers for new values beside the old ones. One more, since one bucket is often smaller.
        reused = sum(slot.reused for slot in self._slots.values())
        self.pool = BufferPool(ACROSS_NODES * (reused + BUFFERS) + (reused > 0))

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state."""
        return sum(tensor.nbytes for _, leaf in leaves(self._tree) for tensor in leaf.values())

    def part(self, layout: Layout) -> State:
        """Return a live view of the state of a bucket's parameters. Leaves that have the parameters' shapes are flat,
        in the order of ``layout``."""
        return _Part(self, layout, self._tree) if self._slots else self._tree

    def merge(self, layout: Layout, new: State | None, update: Tensor) -> Tensor:
        """Replace a bucket's state by ``new``. None, for the whole or for a branch, leaves it unchanged.

        Args:
            update: the bucket's flat update. A parameter whose update is not finite keeps its old state.

        Returns:
            ``update``, or a copy if its memory was that of a value that was replaced in place.

        Raises:
            ConfigurationError: ``new`` has a leaf or a name that the policy's ``init`` did not return.
        """
        if not self._slots:
            return update
        finite = Finite(update, layout)
        copies: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor], bool]] = []
        for path, leaf in leaves(new):
            if path not in self._slots:
                raise _unknown(["/".join(path)])
            old = self.leaf(path, layout)
            if leaf is not old:
                slot, fitted = self._slots[path], _fit(leaf, old)
                if self.in_place:
                    copies.append((fitted, old, slot.guarded))
                    continue
                self._leaves[path][layout] = kept = _keep(fitted, old, layout, finite) if slot.guarded else fitted
                if slot.reused and isinstance(old, Views) and isinstance(kept, Views):
                    self.pool.give(old.flat, but=[kept.flat])
        # A flow may return a part of one old leaf in the place of another
        replaced = {_memory(tensor) for _, old, _ in copies for tensor in _tensors(old)}
        if _memory(update) in replaced:
            update = update.clone()
            finite = Finite(update, layout)
        for fitted, old, guarded in [(_apart(fitted, replaced), old, guarded) for fitted, old, guarded in copies]:
            kept = _keep(fitted, old, layout, finite, in_place=True) if guarded else fitted
            if kept is not old:
                torch._foreach_copy_(_tensors(old), _tensors(kept))
        return update

    def whole(self) -> dict[str, Any]:
        """Return the whole state without copies. The views are valid until the next step."""
        return map_leaves(self._tree, self._values)

    def portable(self) -> dict[str, Any]:
        """Return a copy of the whole state; see :func:`to_portable`."""
        return to_portable(self.whole())

    def load(
        self, saved: State | Sequence[State], rank: int = 0, size: int = 1, on_resize: OnResize = "redistribute",
        nodes: tuple[Nodes, Nodes] | None = None,
    ) -> None:  # fmt: skip
        """Load states that :meth:`portable` returned: this rank's, or those of all ranks in rank order.

        Args:
            rank, size: this rank and the number of ranks, if the states of all ranks are given.
            on_resize: for states of another number of ranks: ``"raise"`` an error, ``"reset"`` what is local to ranks
                to its initial value, or ``"redistribute"`` it.
            nodes: as for :func:`redistribute`.

        Raises:
            ConfigurationError: leaves, names, shapes or dtypes differ (the message lists how), or the number of ranks
                or their nodes do with ``on_resize="raise"``. No state is loaded then.
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
        """Return whether the state has leaves that are local to nodes, and nodes have other ranks now."""
        return first_of_node(before) != first_of_node(now) and any(slot.by_node for slot in self._slots.values())

    def reset(self) -> None:
        """Reset leaves that are local to this rank to their initial value. Replicated leaves stay."""
        for path, leaf in leaves(self._fresh()):
            if self._slots[path].local:
                self._put(path, leaf)

    def rescale(self, factor: float) -> None:
        """Multiply all leaves in units of the gradient by ``factor``, by which the loss scale has changed.

        Raises:
            ConfigurationError: ``factor`` is not positive and finite.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(f"a loss scale changes by a positive finite factor, not by {factor}")
        for path, slot in self._slots.items():
            if slot.gradient_units:
                scaled = {name: tensor * factor for name, tensor in self._values(path).items()}
                self._put(path, scaled, copy=False)

    def leaf(self, path: Path, layout: Layout) -> Mapping[str, Tensor]:
        """Return a bucket's part of one leaf, flat if it has one dtype and device, and the parameters' shapes."""
        parts = self._leaves[path]
        if layout in parts:
            return parts[layout]
        refuse_in_capture("state of its bucket that no flow before it has read")
        if not all(other is None or other.sizes.keys().isdisjoint(layout.sizes) for other in parts):
            self._divide(path, self._values(path))
            parts = self._leaves[path]
        rest = parts[None]
        part: Mapping[str, Tensor] = {name: rest[name] for name in layout.names if name in rest}
        kinds = {(tensor.dtype, tensor.device) for tensor in part.values()}
        if len(kinds) == 1 and all(tensor.shape == layout.shapes[name] for name, tensor in part.items()):
            for tensor in part.values():  # allocated on the user's stream, which may reuse their memory once freed
                used_here(tensor)
            sublayout = layout.part(part)
            flat = self.pool.take(sublayout.numel, *kinds.pop(), lasting=True)
            part = Views(sublayout, torch.cat([tensor.reshape(-1) for tensor in part.values()], out=flat))
        parts[layout] = part
        parts[None] = {name: tensor for name, tensor in rest.items() if name not in part}
        return part

    def _put(self, path: Path, leaf: Mapping[str, Tensor], copy: bool = True) -> None:
        """Replace a whole leaf."""
        if self.in_place:
            for name, tensor in self._values(path).items():
                tensor.copy_(leaf[name])
            return
        if copy:
            devices = {name: tensor.device for name, tensor in self._values(path).items()}
            leaf = {name: tensor.to(devices[name], copy=True) for name, tensor in leaf.items()}
        self._divide(path, leaf)

    def _divide(self, path: Path, leaf: Mapping[str, Tensor]) -> None:
        """Set a whole leaf, which is then in no bucket's part."""
        self.pool.clear()  # parts of other sizes will follow
        self._leaves[path] = {None: leaf}

    def undivide(self) -> None:
        """Forget the division into buckets, before flows read other ones."""
        for path in self._leaves:
            self._divide(path, self._values(path))

    def tensors(self, layout: Layout) -> list[Tensor]:
        """Return the tensors with a bucket's state that flows have read so far."""
        parts = [leaf[layout] for leaf in self._leaves.values() if layout in leaf]
        return [tensor for part in parts for tensor in _tensors(part)]

    def _values(self, path: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a whole leaf as views, without copies, in the order of ``like``."""
        values = {name: tensor for part in self._leaves[path].values() for name, tensor in part.items()}
        return values if like is None else {name: values[name] for name in like}

    def _fresh(self) -> State:
        """Return the policy's initial state on the CPU, for parameters of zeros."""
        return self.policy.init({n: torch.zeros(p.shape, dtype=p.dtype, device="cpu") for n, p in self.params.items()})


def resized(saved: int, size: int) -> ConfigurationError:
    """Return the error for a state of another number of ranks, or of ranks on other nodes."""
    ranks = f"{saved} ranks and would be loaded by {size}" if saved != size else f"{size} ranks on other nodes"
    return ConfigurationError(
        f"the state was saved by {ranks}. on_resize='reset' begins anew with what "
        "is local to ranks; on_resize='redistribute' keeps its sum, and needs a state of all ranks (gather=True)."
    )


class _Part(Mapping[str, Any]):
    """Live view of a bucket's part of a state. Branches are of this class, leaves come from :meth:`StateStore.leaf`."""

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
    """Return whether ``node`` maps names to tensors. An empty node is a branch."""
    return isinstance(node, Views) or isinstance(next(iter(node.values()), None), Tensor)


def _unknown(names: list[str]) -> ConfigurationError:
    return ConfigurationError(f"a policy returned state that its init() did not give: {', '.join(names)}")


def _fit(new: State, old: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return ``new`` in the form and dtype of ``old``; ``new`` may lack unchanged names."""
    if isinstance(old, Views) and isinstance(new, Views) and new.layout is old.layout:
        return Views(old.layout, new.flat.to(old.flat.dtype))
    if unknown := sorted(set(new) - set(old)):
        raise _unknown(unknown)
    if isinstance(old, Views):
        new = {**old, **new} if len(new) < len(old) else new
        return Views(old.layout, flatten(new, old.layout).to(old.flat.dtype))
    return {name: new.get(name, tensor).to(tensor.dtype) for name, tensor in old.items()}


def _keep(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], layout: Layout, finite: Finite, in_place: bool = False
) -> Mapping[str, Tensor]:
    """Return ``new``, with the values of ``old`` for parameters of ``layout`` that are not finite.

    With ``in_place``, flat values are written to ``old``, which is returned.
    """
    if finite.known:
        return new
    if isinstance(old, Views):
        assert isinstance(new, Views)
        kept = finite.keep(new.flat, old.flat, old.layout, old.flat if in_place else None)
        return old if in_place else Views(old.layout, kept)
    flags = dict(zip(layout.names, finite.flags, strict=False))
    return {name: torch.where(flags[name], new[name], tensor) for name, tensor in old.items()}


def _apart(leaf: Mapping[str, Tensor], addresses: Collection[int]) -> Mapping[str, Tensor]:
    """Return the leaf with copies of the tensors whose memory is at one of ``addresses``."""
    if isinstance(leaf, Views):
        return Views(leaf.layout, leaf.flat.clone()) if _memory(leaf.flat) in addresses else leaf
    return {name: tensor.clone() if _memory(tensor) in addresses else tensor for name, tensor in leaf.items()}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(leaf: Mapping[str, Tensor]) -> list[Tensor]:
    return [leaf.flat] if isinstance(leaf, Views) else list(leaf.values())
