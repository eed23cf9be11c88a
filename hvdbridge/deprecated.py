"""Names of the first edition. Each works for one more release, with a DeprecationWarning that says the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import getattr_static, signature
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

MOVED = {
    "after": "reduction.post_step", "aggregator": "reduction.aggregator", "agreement": "reduction.context",
    "bridges": "training", "bridges.comm_hook": "training.comm_hook",
    "bridges.compression": "training.horovod_compression", "bridges.ddp": "training.data_parallel",
    "bridges.foreign_hook": "training.foreign_hook", "bridges.fsdp": "training.fsdp",
    "bucket": "policy.bucket", "checkpoint": "reduction.checkpoint", "collectives": "policy.collectives",
    "communicators": "backends.registry", "communicators.base": "backends.communicator",
    "communicators.bridge": "backends.bridge", "communicators.horovod": "backends.horovod.communicator",
    "communicators.mpi": "backends.mpi.communicator", "communicators.torch": "backends.torch.communicator",
    "context": "reduction.context", "driver": "execution.scheduler", "dry_run": "policy.dry_run",
    "flows": "execution.flow", "launching": "startup.launching", "memory": "policy.buffer_pool",
    "options": "policy.options", "parameters": "reduction.parameters", "primitives": "training.primitives",
    "replicate": "reduction.replicate", "runtime": "training.runtime", "sampler": "training.distributed_sampler",
    "simulation": "execution.simulation", "spec": "policy.spec", "state": "execution.state_store",
    "stopping": "training.stopping", "sync_batchnorm": "training.sync_batchnorm",
    "synchronizer": "training.synchronizer", "world": "startup.world",
}  # fmt: skip
"""Old module -> new module, both below ``hvdbridge``."""

RENAMED = {
    "Driver": "Scheduler", "Memory": "BufferPool", "Pending": "Submission", "StreamDriver": "StreamScheduler",
    "Mark": "WeightingState", "ThreadDriver": "ThreadScheduler", "open_driver": "open_scheduler", "room": "output_of",
}  # fmt: skip
"""Old name -> new name within the modules that moved."""


def renamed(owner: object, name: str, names: Mapping[str, str]) -> object:
    """For ``__getattr__``: the attribute of ``owner`` that bears another name now, with a warning.

    Raises:
        AttributeError: there is none.
    """
    kind = type(owner).__name__
    if name not in names:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    text = f"{kind}.{name} is {kind}.{names[name]} now, and the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return attrgetter(names[name])(owner)


class _Former:
    """A member that its class no longer has: a constant, or a function ``"module:name"`` that is called or bound."""

    def __init__(self, name: str, now: Any) -> None:
        self.name, self.now = name, now

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        instead = f"hvdbridge.{self.now.replace(':', '.')}(policy, ...)" if isinstance(self.now, str) else "nothing"
        text = f"{(owner or type(instance)).__name__}.{self.name} goes with the next release; use {instead}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        if not isinstance(self.now, str):
            return self.now
        module, _, name = self.now.partition(":")
        function = getattr(import_module(f"hvdbridge.{module}"), name)
        function = getattr(function, "__wrapped__", function)  # a subclass's member may ask for what it overrides
        if instance is None:
            return function
        return partial(function, instance) if len(signature(function).parameters) > 1 else function(instance)


def former_members(cls: type, **members: Any) -> None:
    """Let old members of ``cls`` work, with a warning: name = its constant value, or the function that replaces it."""
    for name, now in members.items():
        setattr(cls, name, _Former(name, now))


def own_member(owner: object, name: str, otherwise: Any = None, warn: bool = True) -> Any:
    """The former member ``name`` as the class of ``owner`` defines it; ``otherwise`` where the class does not."""
    if isinstance(getattr_static(type(owner), name, None), _Former):
        return otherwise
    if warn:
        text = f"the next release ignores {type(owner).__name__}.{name}; hvdbridge.policy.base says what replaces it"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(owner, name)


F = TypeVar("F", bound=Callable[..., Any])


def own_member_first(warn: bool = True) -> Callable[[F], F]:
    """Decorate a function that replaces a member: where the class of its first argument defines one, that decides."""

    def decorate(function: F) -> F:
        @wraps(function)
        def current(owner: Any, *arguments: Any) -> Any:
            own = own_member(owner, function.__name__, warn=warn)
            if own is None:
                return function(owner, *arguments)
            return own(*arguments) if callable(own) else own

        return current  # type: ignore[return-value]

    return decorate


class MovedModules(MetaPathFinder, Loader):
    """Imports the old modules as stand-ins that look every name up in the new ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "hvdbridge" or name not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{name}.") for other in MOVED))

    def exec_module(self, module: ModuleType) -> None:
        new = f"hvdbridge.{MOVED[module.__name__.removeprefix('hvdbridge.')]}"
        warnings.warn(
            f"{module.__name__} is {new} now, and the old name goes with the next release. What the documentation "
            "names is in hvdbridge itself, as in `from hvdbridge import Policy`.",
            DeprecationWarning,
            stacklevel=2,
        )
        found = import_module(new)

        def look_up(name: str) -> object:
            if name == "bytes_per_step":
                return getattr(import_module("hvdbridge.policies"), name)
            if not hasattr(found, name) and name in import_module("hvdbridge").__all__:  # of a file that was cut
                return getattr(import_module("hvdbridge"), name)
            return getattr(found, RENAMED.get(name, name))

        vars(module)["__getattr__"] = look_up
