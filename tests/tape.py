"""A stand-in for a CUDA graph, for tests without a GPU.

A :class:`Tape` records torch's operations of a flow and performs them again on the same tensors, as a replay does.
After each replay it fills the memory that the flow allocated with garbage, since a graph's memory is shared with other
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdbridge.execution.graphs import FlowGraphs, NotCapturable
from hvdbridge.kernels import native, select
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import Collective
from hvdbridge.reduction import context
from hvdbridge.reduction.aggregator import Aggregator

aten = torch.ops.aten
HOST = {
    aten._local_scalar_dense.default: "the host reads a tensor",
    aten.lift_fresh.default: "the host's data are copied to the device",
    aten.nonzero.default: "the shape depends on the values",
    aten.masked_select.default: "the shape depends on the values",
    aten._unique2.default: "the shape depends on the values",
}
"""Operations for which CUDA waits, or copies from memory that is not pinned: a capture fails."""


class Tape(TorchDispatchMode):
    """A graph that records the operations of a flow on CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST and not (func is aten.lift_fresh.default and args[0].dim() == 0):  # a number fills memory
            raise NotCapturable(f"{func}: {HOST[func]}")
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self._own[storage._cdata] = storage
        return out

    @contextmanager
    def capture(self) -> Iterator[None]:
        with self:
            yield
        self._spoil()

    def answer(self, request: Collective) -> Any:
        self.__exit__(None, None, None)  # other ranks run meanwhile
        try:
            answer = yield request
        finally:
            self.__enter__()
        self.operations.append((None, request, {}, answer))
        return answer

    def replay(self) -> Any:
        for func, args, kwargs, out in self.operations:
            new = (yield args) if func is None else func(*args, **kwargs)
            for old_tensor, new_tensor in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old_tensor, Tensor) and new_tensor.data_ptr() != old_tensor.data_ptr():
                    old_tensor.copy_(new_tensor)
        self._spoil()

    def reset(self) -> None:
        self.operations.clear()

    def _spoil(self) -> None:
        for storage in self._own.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)


def as_on_a_device(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Use torch's operations as on a CUDA device: a tape sees neither C nor numpy."""
    replace(native, "_load", lambda: None)
    replace(Layout, "readable", staticmethod(lambda flat: False))
    replace(select, "_largest_on_cpu", lambda *arguments: select._largest(*arguments, kernels=None))


def install() -> None:
    """Run the flows of this process's synchronizers as tapes, one flow at a time."""
    use = Aggregator._set_policy

    def use_alone(self: Aggregator, *arguments: Any) -> None:
        use(self, *arguments)
        self._rounds, self._inline = None, False

    Aggregator._set_policy = use_alone  # type: ignore[method-assign]
    context.open_graphs = lambda *arguments: FlowGraphs(*arguments, Tape)
