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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hvdbridge.execution.graphs import FlowGraphs
from hvdbridge.execution.trace import CaptureMode
from hvdbridge.kernels import native, select
from hvdbridge.policy.bucket import Layout
from hvdbridge.policy.collectives import Collective
from hvdbridge.reduction import context


class Tape(TorchDispatchMode):
    """A graph that records the operations of a flow on CPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self._own[storage._cdata] = storage
        return out

    @contextmanager
    def capture(self) -> Iterator[None]:
        with self, CaptureMode():
            yield
        self._spoil()

    def answer(self, request: Collective) -> Any:
        with _disable_current_modes():  # other ranks run meanwhile
            answer = yield request
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
    replace(select, "_largest_on_cpu", lambda *arguments: select._largest(*arguments))


def install() -> None:
    """Run the flows of this process's synchronizers as tapes, one flow at a time."""
    context.open_graphs = lambda *arguments: FlowGraphs(*arguments, lambda: Tape)
