"""What an aggregation policy is, without I/O: collectives, buckets, the base class, the grammar of specs."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """The names of :mod:`hvdbridge.policy.base`, which the first edition had here."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("hvdbridge.policy.base"), name)
