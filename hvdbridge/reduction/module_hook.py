"""Hooks on the user's module that stay behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

from torch.nn import Module


class _ModuleHook:
    """Calls a method, and does not keep its object alive.

    Modules carry their hooks into ``copy.deepcopy``, ``AveragedModel`` and ``torch.save``. A copy of this one does
    nothing: the copy of a model belongs to no synchronizer, whose threads and sockets cannot be copied, either.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = WeakMethod(method)

    def _call(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*args)

    def __reduce__(self) -> Any:
        # This takes any arguments and returns None, and what is saved loads where hvdbridge is not installed
        return getattr, (nullcontext(), "__exit__")


class BeforeForward(_ModuleHook):
    """Calls ``method()`` before each forward."""

    def __call__(self, model: Module, args: Any) -> None:
        self._call()


class AfterForward(_ModuleHook):
    """Calls ``method(output)`` after each forward."""

    def __call__(self, model: Module, args: Any, output: Any) -> None:
        self._call(output)
