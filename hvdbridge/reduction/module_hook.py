"""Hooks on the user's module that stay behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

from torch.nn import Module


class ModuleHook:
    """A forward hook (pre-hook) that calls ``method(output)`` (``method()``), and does not keep its object alive.

    Modules carry their hooks into ``copy.deepcopy``, ``AveragedModel`` and ``torch.save``. A copy of this one does
    nothing: the copy of a model belongs to no synchronizer, whose threads and sockets cannot be copied, either.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, model: Module, args: Any, *output: Any) -> None:
        if (method := self._method()) is not None:
            method(*output)

    def __reduce__(self) -> Any:
        # This takes any arguments and returns None, and what is saved loads where hvdbridge is not installed
        return getattr, (nullcontext(), "__exit__")
