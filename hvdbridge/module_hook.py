"""A hook on the user's module that stays behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch.nn import Module


class BeforeForward:
    """Calls a method before each forward, and does not keep its object alive.

    Modules carry their hooks into ``copy.deepcopy``, ``AveragedModel`` and ``torch.save``. A copy of this one gives the
    arguments back as they came: the copy of a model belongs to no synchronizer, whose threads and sockets cannot be
    copied, either.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, model: Module, args: Any) -> None:
        if (method := self._method()) is not None:
            method()

    def __reduce__(self) -> Any:
        # ``{}.get(model, args)`` is args, and what is saved loads where hvdbridge is not installed
        return getattr, ({}, "get")
