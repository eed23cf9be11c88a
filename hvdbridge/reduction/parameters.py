"""Names of a model's parameters, and ParameterWatch, which detects that parameters were replaced or added.

Rules:

1. Parameters have their names in the user's module, without the prefix of ``torch.compile``; shared ones occur once.
2. Parameters and buffers that the user or DDP's own list ignores are neither broadcast nor compared nor aggregated.
3. A synchronizer aggregates the parameter objects that existed at its construction. Gradients of others would stay
   local, so the next forward raises an error that names them. It also does if an object has another name
   (parametrizations), because DDP's reducer may have lost its hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential
from torch.nn.modules import module as registration
from torch.nn.parameter import is_lazy

from hvdbridge.errors import ConfigurationError, StepError, Unsupported
from hvdbridge.policy.base import refuse_complex

Ignore = Iterable[str | Tensor] | None


def quoted(names: Iterable[str], limit: int = 8) -> str:
    """Return up to eight quoted names, and the number of the others.

    >>> quoted(["a", "b"]), quoted("0123456789")
    ("'a', 'b'", "'0', '1', '2', '3', '4', '5', '6', '7' and 2 more")
    """
    items = list(names)
    return ", ".join(map(repr, items[:limit])) + (f" and {len(items) - limit} more" if len(items) > limit else "")


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes that torch.compile adds.

    >>> bare_name("_orig_mod.layer.module._orig_mod.weight")
    'layer.module.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def ignored_names(model: Module, ignore: Ignore = None) -> set[str]:
    """Return the names, as in ``model``, of parameters and buffers to ignore.

    Args:
        ignore: names, patterns of names (``*``, ``?``, ``[...]``), parameters or buffers. Names passed to
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` are added.

    Raises:
        ConfigurationError: an item of ``ignore`` matches nothing in the model.

    >>> sorted(ignored_names(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), ["1.*"]))
    ['1.bias', '1.weight']
    """
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    ddp_ignored = {name.removeprefix(".") for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    names = tensors.keys() & ddp_ignored
    for selector in [ignore] if isinstance(ignore, str | Tensor) else ignore or ():
        if isinstance(selector, str):
            matches = {name for name in tensors if fnmatchcase(bare_name(name), selector)}
        else:
            matches = {name for name, tensor in tensors.items() if tensor is selector}
        if not matches:
            shown = repr(selector) if isinstance(selector, str) else f"a tensor of shape {list(selector.shape)}"
            raise ConfigurationError(f"ignore={shown} is no parameter and no buffer of {type(model).__name__}")
        names |= matches
    return names


def trainable(model: Module, ignored: Iterable[str] = ()) -> dict[str, Parameter]:
    """Return the parameters that require a gradient by bare name, without those in ``ignored``; shared ones once.

    Raises:
        ConfigurationError: the model has none.
        Unsupported: an Embedding has ``sparse=True``, or a parameter is complex or of a lazy module.
    """
    excluded = set(ignored)
    params = {bare_name(name): p for name, p in model.named_parameters() if p.requires_grad and name not in excluded}
    known, kinds = set(map(id, params.values())), torch.nn.Embedding | torch.nn.EmbeddingBag
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, kinds) and id(module.weight) in known:
            shown = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise Unsupported(f"{shown} makes sparse gradients. Use sparse=False.")
    if not params:
        raise ConfigurationError(f"{type(model).__name__} has no parameter that requires a gradient")
    if lazy := [name for name, p in params.items() if is_lazy(p)]:
        raise Unsupported(f"parameters of lazy modules have no shape yet: {quoted(lazy)}. Run one forward before.")
    refuse_complex(params)
    return params


def refuse_unsupported_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Check that ``tensors`` can be broadcast.

    Raises:
        Unsupported: some are DTensors, or on the meta device.
    """
    for names, reason in (
        (
            [name for name, tensor in tensors.items() if hasattr(tensor, "device_mesh")],
            "DTensors (tensor parallelism, fully_shard) are not aggregated. For fully_shard use "
            "hb.set_all_reduce_hook.",
        ),
        (
            [name for name, tensor in tensors.items() if tensor.is_meta],
            "on the device meta, without values. Call model.to_empty(device=...) and initialise or load them before.",
        ),
    ):
        if names:
            raise Unsupported(f"{quoted(names)}: {reason}")


def sparse_gradient(where: str, name: str) -> Unsupported:
    """Return the error for a sparse gradient of the parameter ``name``; ``where`` begins its message."""
    return Unsupported(
        f"{where}: parameter {name!r} has a sparse gradient, which no policy takes. Use sparse=False in its Embedding, "
        "or leave the parameter out by ignore=."
    )


class ParameterWatch:
    """Detects that a module's parameters differ from those at the construction of a synchronizer.

    torch's registration hooks report every parameter or module that is put into a module: by assignment,
    ``load_state_dict(assign=True)``, parametrizations or adapters. So a forward need not compare all parameters, but
    only the contents of Sequential and ModuleList, whose ``insert()`` calls no hook. A module written directly into
    the ``_modules`` of another is not detected.

    Args:
        model: the user's module.
        params: the parameters to aggregate, by name.
        ignored: names of parameters and buffers to ignore.
    """

    def __init__(self, model: Module, params: Mapping[str, Parameter], ignored: Iterable[str]) -> None:
        self._model = ref(model)
        self._params = dict(params)
        self._ignored = set(ignored)
        self._dtypes_and_devices = list(map(_dtype_and_device, params.values()))
        self._record_structure(model)
        hook = _registration_hook(WeakMethod(self._on_registration))
        self._handles = [
            registration.register_module_parameter_registration_hook(hook),
            registration.register_module_module_registration_hook(hook),
        ]

    def _record_structure(self, model: Module) -> None:
        """Record the present modules and frozen parameters of ``model`` as the expected ones."""
        known = set(map(id, self._params.values()))
        self._frozen = [p for name, p in model.named_parameters() if id(p) not in known and name not in self._ignored]
        self._modules: WeakSet[Module] = WeakSet(model.modules())
        self._containers = [ref(module) for module in self._modules if isinstance(module, Sequential | ModuleList)]
        self._contents = self._container_contents()
        self._changed = False

    def _container_contents(self) -> list[list[Module | None]]:
        """Return the modules in each Sequential and ModuleList."""
        return [list(container._modules.values()) for weak in self._containers if (container := weak()) is not None]

    def _on_registration(self, module: Module) -> None:
        self._changed = self._changed or module in self._modules

    def check(self, where: str) -> None:
        """Check that the model still has the recorded parameters.

        Args:
            where: start of the error message.

        Raises:
            StepError: parameters were replaced, added, unfrozen or cast; the message names them.
        """
        if self._changed or any(map(_requires_grad, self._frozen)) or self._container_contents() != self._contents:
            self._compare(where)
        if list(map(_dtype_and_device, self._params.values())) != self._dtypes_and_devices:
            kinds = zip(self._params.items(), self._dtypes_and_devices, strict=True)
            moved = [name for (name, p), kind in kinds if _dtype_and_device(p) != kind]
            raise StepError(
                f"{where}: {quoted(moved)} had another type or device when the synchronizer was constructed. Cast and "
                "move the model before."
            )

    def _compare(self, where: str) -> None:
        model = self._model()
        if model is None:
            return
        now = {bare_name(name): p for name, p in model.named_parameters() if name not in self._ignored}
        removed = [name for name, p in self._params.items() if now.get(name) is not p]
        added = [name for name, p in now.items() if p.requires_grad and self._params.get(name) is not p]
        if removed or added:
            parts = [f"{what}: {quoted(names)}" for what, names in (
                ("parameters that were replaced", [name for name in removed if name in added]),
                ("parameters that are no longer there", [name for name in removed if name not in added]),
                ("parameters that were added or unfrozen", [name for name in added if name not in removed]),
            ) if names]  # fmt: skip
            raise StepError(
                f"{where}: the model has other parameters than when the synchronizer was constructed; "
                f"{'; '.join(parts)}. Construct it (and optimizers over them) after load_state_dict(assign=True), "
                "adapters and parametrizations; or sync.close() this one, and construct it anew."
            )
        self._record_structure(model)

    def close(self) -> None:
        """Remove the hooks. Harmless when repeated."""
        for handle in self._handles:
            handle.remove()


_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")
_dtype_and_device: Callable[[Any], tuple[torch.dtype, torch.device]] = attrgetter("dtype", "device")


def _registration_hook(method: WeakMethod[Callable[[Module], None]]) -> Callable[[Module, str, Any], None]:
    """Return a registration hook that does not keep the watch alive.

    Compilers construct modules while they trace, so the hook is excluded from tracing. If torch._dynamo is not imported
    yet, it is not excluded, because the import takes seconds.
    """

    def hook(module: Module, name: str, value: Any) -> None:
        if (callback := method()) is not None:
            callback(module)

    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook
