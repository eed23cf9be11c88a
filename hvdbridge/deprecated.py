"""Names of the first edition. Each works for one more release, with a DeprecationWarning that says the new one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
    "ThreadDriver": "ThreadScheduler", "open_driver": "open_scheduler", "room": "output_of",
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
    return getattr(owner, names[name])


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
            if not hasattr(found, name) and name in import_module("hvdbridge").__all__:  # of a file that was cut
                return getattr(import_module("hvdbridge"), name)
            return getattr(found, RENAMED.get(name, name))

        vars(module)["__getattr__"] = look_up
