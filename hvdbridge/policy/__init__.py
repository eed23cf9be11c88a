"""Defines aggregation policies, without I/O: collectives, buckets, the base class, the grammar of specs."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of :mod:`hvdbridge.policy.base`. Saved models and scripts may import it from here."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("hvdbridge.policy.base"), name)
