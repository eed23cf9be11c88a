"""What all modules around the user's have in common: the bare module's state, and a way back to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

from torch.nn import Module
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


class Wrapper(Module):
    """A module around :attr:`module` whose state has the bare module's keys, so that checkpoints move between backends.

    Loaded by itself it hands on to the bare module. As a part of another module (LightningModule, AveragedModel) torch
    loads it part by part and by the names of parts, which its keys then get.
    """

    module: Module
    takes_plain_keys = True
    """Whether :meth:`load_state_dict` takes what plain DDP saved, too: ``module.`` before all keys."""

    _prefix: str  # of its keys, in the load of a module around it

    @property
    def closed(self) -> bool:
        """Whether nobody aggregates its gradients: its synchronizer is closed, or it is a copy."""
        raise NotImplementedError

    @property
    def bare(self) -> Module:
        """The module without what torch.compile puts around it."""
        module: Module = getattr(self.module, "_orig_mod", self.module)
        return module

    @property
    def _way(self) -> str:
        """What names of parts have before the bare module's own."""
        return "module." if self.bare is self.module else "module._orig_mod."

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's."""
        state = self.bare.state_dict(*args, **kwargs)
        versions = getattr(state, "_metadata", {})
        prefix = kwargs.get("prefix", "")
        if prefix:  # a load of the module around it looks for versions by the names of parts
            for key in [key for key in versions if f"{key}.".startswith(prefix)]:
                versions[f"{prefix}{self._way}{key[len(prefix) :]}".removesuffix(".")] = versions[key]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the bare module."""
        plain = self.takes_plain_keys and "module" not in self.bare._modules
        if plain and all(key.startswith("module.") for key in state_dict):
            versions = copy(getattr(state_dict, "_metadata", {}))
            state_dict = OrderedDict(state_dict)
            state_dict._metadata = versions  # type: ignore[attr-defined]
            consume_prefix_in_state_dict_if_present(state_dict, "module.")
        return self.bare.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any) -> None:
        """Called by torch within the load of a module around this one; the dict is a copy, of these keys alone."""
        self._prefix = prefix
        if _bare_keys not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_bare_keys)  # type: ignore[no-untyped-call]
        plain = "module" not in self.bare._modules  # then such keys are those of plain DDP
        for key in list(state_dict):
            name = key[len(prefix) :]
            if not (plain and name.startswith("module.")):
                state_dict[f"{prefix}{self._way}{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _bare_keys(module: Wrapper, incompatible: Any) -> None:
    """What is missing or unexpected is told by the keys of the state."""
    parts = module._prefix + module._way
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [module._prefix + key[len(parts) :] if key.startswith(parts) else key for key in keys]


def unwrapped(model: Module) -> Module:
    """The user's module, where ``model`` is what a synchronizer put around it."""
    while isinstance(model, Wrapper):
        model = model.module
    return model
