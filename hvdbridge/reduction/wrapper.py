"""Wrapper: base class of the modules around the user's module; their state has the bare module's keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

from torch.nn import Module
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


class Wrapper(Module):
    """A module around :attr:`module` whose state has the bare module's keys, so that checkpoints fit all backends.

    ``load_state_dict()`` of the wrapper itself loads the bare module. Within another module (LightningModule,
    AveragedModel) torch loads submodule by submodule. There the keys are renamed to those of the submodules.
    """

    module: Module
    takes_plain_keys = True
    """True if :meth:`load_state_dict` also loads a plain DDP's state, whose keys all begin with ``module.``."""

    _prefix: str  # prefix of this wrapper's keys while a module around it is loaded

    @property
    def closed(self) -> bool:
        """True if no synchronizer aggregates the gradients: it was closed, or this module is a copy."""
        raise NotImplementedError

    @property
    def bare(self) -> Module:
        """The user's module, without the module that torch.compile puts around it."""
        module: Module = getattr(self.module, "_orig_mod", self.module)
        return module

    @property
    def _key_prefix(self) -> str:
        """Prefix of the bare module's keys among the keys of submodules."""
        return "module." if self.bare is self.module else "module._orig_mod."

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the bare module's state."""
        state = self.bare.state_dict(*args, **kwargs)
        metadata = getattr(state, "_metadata", {})
        prefix = kwargs.get("prefix") or (args[1] if len(args) > 1 else "")
        if prefix:  # a load of the module around this one looks up versions by the names of submodules
            for key in [key for key in metadata if f"{key}.".startswith(prefix)]:
                metadata[f"{prefix}{self._key_prefix}{key[len(prefix) :]}".removesuffix(".")] = metadata[key]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the bare module's state, or a plain DDP's."""
        accepts_ddp_keys = self.takes_plain_keys and "module" not in self.bare._modules
        if accepts_ddp_keys and all(key.startswith("module.") for key in state_dict):
            metadata = copy(getattr(state_dict, "_metadata", {}))
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = metadata  # type: ignore[attr-defined]
            consume_prefix_in_state_dict_if_present(state_dict, "module.")
        return self.bare.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """Rename the keys to those of submodules; torch calls this with a copy of the dict, only with these keys."""
        self._prefix = prefix
        if _bare_keys not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_bare_keys)  # type: ignore[no-untyped-call]
        accepts_ddp_keys = "module" not in self.bare._modules  # keys with "module." are then those of a plain DDP
        for key in list(state_dict):
            name = key[len(prefix) :]
            if not (accepts_ddp_keys and name.startswith("module.")):
                state_dict[f"{prefix}{self._key_prefix}{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bare_keys(module: Wrapper, incompatible: Any) -> None:
    """Load hook: name missing and unexpected keys as in the loaded state."""
    prefix = module._prefix + module._key_prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [module._prefix + key[len(prefix) :] if key.startswith(prefix) else key for key in keys]


def unwrapped(model: Module) -> Module:
    """Return the user's module, without the wrappers of synchronizers."""
    while isinstance(model, Wrapper):
        model = model.module
    return model
