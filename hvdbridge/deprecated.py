"""Deprecated names. Each works for one more release, with a DeprecationWarning that has the new name."""

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
    "after": "reduction.post_step", "aggregator": "reduction.aggregator",
    "agreement": "reduction.context reduction.parameters", "bench": "tools.bench",
    "bench.arithmetic": "tools.bench.cost", "bench.checks": "tools.bench.checks",
    "bench.measure": "tools.bench.measure", "bench.models": "tools.bench.models",
    "bench.native": "tools.bench.reference", "bench.network": "tools.bench.transport",
    "bench.predict": "tools.bench.cost", "bench.report": "tools.bench.report", "bridges": "training",
    "bridges.comm_hook": "training.comm_hook", "bridges.compression": "training.horovod_compression",
    "bridges.ddp": "training.data_parallel", "bridges.fiber": "training.fiber",
    "bridges.foreign_hook": "training.foreign_hook", "bridges.fsdp": "training.fsdp",
    "bridges.hook_state": "training.hook_state", "bridges.process_group": "training.process_group",
    "bucket": "policy.bucket", "checkpoint": "reduction.checkpoint", "cli": "tools",
    "cli.bench": "tools.bench.command", "cli.doctor": "tools.doctor", "cli.horovod_build": "tools.horovod_build",
    "cli.install_horovod": "tools.install_horovod", "cli.plan": "tools.plan", "cli.probe": "tools.probe",
    "cli.process": "tools.horovod_build", "collectives": "policy.collectives", "communicators": "backends.registry",
    "communicators.base": "backends.communicator", "communicators.bridge": "backends.bridge",
    "communicators.horovod": "backends.horovod.communicator", "communicators.mpi": "backends.mpi.communicator",
    "communicators.torch": "backends.torch.communicator", "context": "reduction.context",
    "driver": "execution.scheduler", "dry_run": "policy.dry_run", "flows": "execution.flow", "helper": "supervisor",
    "helper.client": "supervisor.client", "helper.exits": "supervisor.exits", "helper.guard": "supervisor.guard",
    "helper.job": "supervisor.job", "helper.link": "supervisor.link", "helper.pmi": "supervisor.pmi",
    "helper.processes": "supervisor.processes", "helper.server": "supervisor.server",
    "helper.start": "supervisor.spawn", "helper.wire": "supervisor.wire", "launching": "startup.launching",
    "mailbox": "execution.flow", "memory": "policy.buffer_pool", "messages": "backends.point_to_point",
    "messages.mpi": "backends.mpi.communicator", "messages.tcp": "backends.tcp",
    "messages.torch": "backends.torch.communicator", "module_hook": "reduction.autograd", "options": "policy.options",
    "parameters": "reduction.parameters", "primitives": "training.primitives training.messages training.groups",
    "rendezvous": "startup", "rendezvous.channels": "startup.channels",
    "rendezvous.horovod": "backends.horovod.starter", "rendezvous.mpi": "backends.mpi.starter",
    "rendezvous.network": "startup.network", "rendezvous.start": "backends.starting",
    "rendezvous.starter": "backends.starter", "rendezvous.torch": "backends.torch.starter",
    "replicate": "reduction.replicate", "runtime": "training.runtime reduction.session",
    "sampler": "training.distributed_sampler", "simulation": "execution.simulation", "sources": "reduction",
    "sources.base": "reduction.source reduction.autograd", "sources.ddp": "reduction.ddp",
    "sources.hooks": "reduction.hooks reduction.reducer", "sources.horovod": "reduction.horovod_optimizer",
    "sources.wrapper": "reduction.wrapper", "spec": "policy.spec", "state": "execution.state_store",
    "stopping": "training.stopping", "sync_batchnorm": "training.sync_batchnorm",
    "synchronizer": "training.synchronizer training.average", "world": "startup.world",
}  # fmt: skip
"""Old module -> the new modules that have its names, the main one first; all relative to ``hvdbridge``."""

DIVIDED = {
    "kernels.quantise": "kernels.codes kernels.blocks", "kernels.select": "kernels.shuffle",
    "policies.sharded": "policies.shards",
}  # fmt: skip
"""Module -> the modules that have some of its names now."""

RENAMED = {
    "Driver": "Scheduler", "Memory": "BufferPool", "Pending": "Submission", "StreamDriver": "StreamScheduler",
    "Mark": "WeightingState", "ThreadDriver": "ThreadScheduler", "open_driver": "open_scheduler", "room": "output_of",
    "Piece": "SourceBucket", "brought": "copy_if_needed", "Run": "Submission", "fold": "reduce_rows",
    "Works": "TorchWork", "Meeting": "RendezvousInfo", "Numbers": "RankAndSize", "Variables": "EnvironmentOverrides",
    "usual_bucket_mb": "default_bucket_mb", "views_pay": "prefer_bucket_views", "Layouts": "BucketLayouts",
    "future_of": "bucket_future", "kinds": "step_kinds", "Large": "LargeParam", "Rows": "RowGroup",
    "reaching": "threshold_positions", "swapped": "permuted", "Line": "AlphaBeta",
}  # fmt: skip
"""Old name -> new name within these modules."""


def renamed(owner: object, name: str, names: Mapping[str, str]) -> object:
    """Return the attribute of ``owner`` that replaces ``name``, with a warning. For use in ``__getattr__``.

    Args:
        names: deprecated name -> new name, with dots for attributes of attributes.

    Raises:
        AttributeError: ``name`` is not in ``names``.
    """
    kind = type(owner).__name__
    if name not in names:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    text = f"{kind}.{name} is {kind}.{names[name]} now, and the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return attrgetter(names[name])(owner)


class _Former:
    """Descriptor of a deprecated member. Its value is a constant, or a function ``"module:name"`` that replaces it.

    Access through an instance calls a function of one parameter, and binds one of several parameters.
    """

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
        function = getattr(function, "__wrapped__", function)  # undecorated, since a subclass's member may call super()
        if instance is None:
            return function
        return partial(function, instance) if len(signature(function).parameters) > 1 else function(instance)


def former_members(cls: type, **members: Any) -> None:
    """Give ``cls`` deprecated members, which warn: name = its constant value, or the function that replaces it."""
    for name, now in members.items():
        setattr(cls, name, _Former(name, now))


def own_member(owner: object, name: str, otherwise: Any = None, warn: bool = True) -> Any:
    """Return the deprecated member ``name`` if the class of ``owner`` defines it itself, else ``otherwise``."""
    if isinstance(getattr_static(type(owner), name, None), _Former):
        return otherwise
    if warn:
        text = f"the next release ignores {type(owner).__name__}.{name}; hvdbridge.policy.base says what replaces it"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(owner, name)


F = TypeVar("F", bound=Callable[..., Any])


def own_member_first(warn: bool = True) -> Callable[[F], F]:
    """Decorate a function that replaces a member. A member that the first argument's class defines takes precedence."""

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
    """Importer of deprecated module names: the modules look up all names in their replacements."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "hvdbridge" or name not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{name}.") for other in MOVED))

    def exec_module(self, module: ModuleType) -> None:
        targets = MOVED[module.__name__.removeprefix("hvdbridge.")].split()
        warnings.warn(
            f"{module.__name__} is hvdbridge.{targets[0]} now, and the old name goes with the next release. What the "
            "documentation names is in hvdbridge itself, as in `from hvdbridge import Policy`.",
            DeprecationWarning,
            stacklevel=2,
        )
        vars(module)["__getattr__"] = partial(_look_up, module.__name__, targets)


def moved_names(module: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module of :data:`DIVIDED`, which warns."""

    own = module.removeprefix("hvdbridge.")

    def look_up(name: str) -> object:
        value = _look_up(module, [own, *DIVIDED[own].split()], name)
        new = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else "elsewhere"
        text = f"{module}.{name} is {new} now, and the old name goes with the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return look_up


def _look_up(module: str, targets: Sequence[str], name: str) -> Any:
    """Return the value of a deprecated name from the first of ``targets`` that has it, or from the package."""
    if name == "bytes_per_step":
        return getattr(import_module("hvdbridge.policies"), name)
    for target in () if name.startswith("__") else targets:
        found = vars(import_module(f"hvdbridge.{target}"))  # without its own __getattr__, which may be this function
        for known in (name, RENAMED.get(name, name)):
            if known in found:
                return found[known]
    package = import_module("hvdbridge")
    if name in package.__all__:
        return getattr(package, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}; internal names changed with release 0.2.0")
