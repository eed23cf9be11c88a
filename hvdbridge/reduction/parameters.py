"""The parameters of a model that a synchronizer aggregates, and how it notices that the model has others by now.

Rules:

1. Parameters are named as in the user's module, without what ``torch.compile`` puts in front; shared ones once.
2. What is ignored, by the user or by DDP's own list, is neither broadcast nor compared nor aggregated.
3. A synchronizer knows the parameter objects that it was made with. Objects that take their place, or come beside them,
   get gradients that nobody aggregates, so the next forward raises an error that names them. So it does where an
   object has another name by now (parametrizations): DDP's reducer may have lost its hook.
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
from hvdbridge.policy.bucket import refuse_complex

Ignore = Iterable[str | Tensor] | None


def listed(names: Iterable[str], most: int = 8) -> str:
    """Up to eight names, and how many more there are.

    >>> listed(["a", "b"]), listed("0123456789")
    ("'a', 'b'", "'0', '1', '2', '3', '4', '5', '6', '7' and 2 more")
    """
    found = list(names)
    return ", ".join(map(repr, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


def bare_name(name: str) -> str:
    """A parameter's name without what wrappers put in front.

    >>> bare_name("_orig_mod.layer.module._orig_mod.weight")
    'layer.module.weight'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def ignored(model: Module, ignore: Ignore = None) -> set[str]:
    """The names, as in ``model``, of parameters and buffers that are left alone.

    Args:
        ignore: names, patterns of names (``*``, ``?``, ``[...]``), parameters or buffers. What
            ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` was told is left alone, too.

    Raises:
        ConfigurationError: something in ``ignore`` is not in the model.

    >>> sorted(ignored(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), ["1.*"]))
    ['1.bias', '1.weight']
    """
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    theirs = {name.removeprefix(".") for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    found = tensors.keys() & theirs
    for wanted in [ignore] if isinstance(ignore, str | Tensor) else ignore or ():
        if isinstance(wanted, str):
            matches = {name for name in tensors if fnmatchcase(bare_name(name), wanted)}
        else:
            matches = {name for name, tensor in tensors.items() if tensor is wanted}
        if not matches:
            shown = repr(wanted) if isinstance(wanted, str) else f"a tensor of shape {list(wanted.shape)}"
            raise ConfigurationError(f"ignore={shown} is no parameter and no buffer of {type(model).__name__}")
        found |= matches
    return found


def trainable(model: Module, left_alone: Iterable[str] = ()) -> dict[str, Parameter]:
    """The parameters that get gradients, by bare name, shared ones once; but for those ``left_alone``.

    Raises:
        ConfigurationError: there is none.
        Unsupported: an Embedding with ``sparse=True``, a complex parameter, or one of a lazy module.
    """
    alone = set(left_alone)
    params = {bare_name(name): p for name, p in model.named_parameters() if p.requires_grad and name not in alone}
    known, kinds = set(map(id, params.values())), torch.nn.Embedding | torch.nn.EmbeddingBag
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, kinds) and id(module.weight) in known:
            shown = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise Unsupported(f"{shown} makes sparse gradients. Use sparse=False.")
    if not params:
        raise ConfigurationError(f"{type(model).__name__} has no parameter that requires a gradient")
    if lazy := [name for name, p in params.items() if is_lazy(p)]:
        raise Unsupported(f"parameters of lazy modules have no shape yet: {listed(lazy)}. Run one forward before.")
    refuse_complex(params)
    return params


def refuse_untouchable(tensors: Mapping[str, Tensor]) -> None:
    """
    Raises:
        Unsupported: some of ``tensors`` are DTensors, or on the device ``meta``.
    """
    for names, why in (
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
            raise Unsupported(f"{listed(names)}: {why}")


def sparse_gradient(where: str, name: str) -> Unsupported:
    """The error about a sparse gradient of the parameter ``name``."""
    return Unsupported(
        f"{where}: parameter {name!r} has a sparse gradient, which no policy takes. Use sparse=False in its Embedding, "
        "or leave the parameter out by ignore=."
    )


class ParameterWatch:
    """Tells when a module does not have the parameters any more that a synchronizer was made with.

    Whatever puts another parameter or module into a module (assignment, ``load_state_dict(assign=True)``,
    parametrizations, adapters) is seen by torch's registration hooks, so that a forward need not look at all of them,
    only at what Sequential and ModuleList hold, whose ``insert()`` calls no hook. Not seen: a module that is written
    into the ``_modules`` of another.

    Args:
        model: the user's module.
        params: what is aggregated, by name.
        left_alone: names of what is ignored.
    """

    def __init__(self, model: Module, params: Mapping[str, Parameter], left_alone: Iterable[str]) -> None:
        self._model = ref(model)
        self._params = dict(params)
        self._alone = set(left_alone)
        self._kinds = list(map(_kind, params.values()))
        self._record(model)
        hook = _registered(WeakMethod(self._register))
        self._handles = [
            registration.register_module_parameter_registration_hook(hook),
            registration.register_module_module_registration_hook(hook),
        ]

    def _record(self, model: Module) -> None:
        """The modules and frozen parameters that ``model`` has now are those that it may have."""
        known = set(map(id, self._params.values()))
        self._frozen = [p for name, p in model.named_parameters() if id(p) not in known and name not in self._alone]
        self._modules: WeakSet[Module] = WeakSet(model.modules())
        self._containers = [ref(module) for module in self._modules if isinstance(module, Sequential | ModuleList)]
        self._layers = self._contained()
        self._changed = False

    def _contained(self) -> list[list[Module | None]]:
        """The modules that each container holds."""
        return [list(found._modules.values()) for module in self._containers if (found := module()) is not None]

    def _register(self, module: Module) -> None:
        self._changed = self._changed or module in self._modules

    def check(self, where: str) -> None:
        """
        Args:
            where: begins the message.

        Raises:
            StepError: parameters were replaced, added, unfrozen or cast; by name.
        """
        if self._changed or any(map(_requires_grad, self._frozen)) or self._contained() != self._layers:
            self._compare(where)
        if list(map(_kind, self._params.values())) != self._kinds:
            kinds = zip(self._params.items(), self._kinds, strict=True)
            moved = [name for (name, p), kind in kinds if _kind(p) != kind]
            raise StepError(
                f"{where}: {listed(moved)} had another type or device when the synchronizer was constructed. Cast and "
                "move the model before."
            )

    def _compare(self, where: str) -> None:
        model = self._model()
        if model is None:
            return
        now = {bare_name(name): p for name, p in model.named_parameters() if name not in self._alone}
        gone = [name for name, p in self._params.items() if now.get(name) is not p]
        new = [name for name, p in now.items() if p.requires_grad and self._params.get(name) is not p]
        if gone or new:
            parts = [f"{what}: {listed(names)}" for what, names in (
                ("parameters that were replaced", [name for name in gone if name in new]),
                ("parameters that are no longer there", [name for name in gone if name not in new]),
                ("parameters that were added or unfrozen", [name for name in new if name not in gone]),
            ) if names]  # fmt: skip
            raise StepError(
                f"{where}: the model has other parameters than when the synchronizer was constructed; "
                f"{'; '.join(parts)}. Construct it (and optimizers over them) after load_state_dict(assign=True), "
                "adapters and parametrizations; or sync.close() this one, and construct it anew."
            )
        self._record(model)

    def close(self) -> None:
        """Take the hooks off. Harmless when repeated."""
        for handle in self._handles:
            handle.remove()


_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")
_kind: Callable[[Any], tuple[torch.dtype, torch.device]] = attrgetter("dtype", "device")


def _registered(method: WeakMethod[Callable[[Module], None]]) -> Callable[[Module, str, Any], None]:
    """torch's hook: does not keep the watch alive. Compilers make modules while they trace, and would trace this, too;
    but to import theirs for that would take seconds.
    """

    def registered(module: Module, name: str, value: Any) -> None:
        if (register := method()) is not None:
            register(module)

    return torch.compiler.disable(registered) if "torch._dynamo" in sys.modules else registered
