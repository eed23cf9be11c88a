"""Gradient aggregation for distributed training: the same policies on torch.distributed, Horovod and MPI.

::

    import hvdbridge as hb

    hb.init()                                   # HVDBRIDGE_BACKEND = auto | torch | horovod | mpi
    sync = hb.GradientSynchronizer(model, optimizer, policy="bf16")
    model, optimizer = sync.model, sync.optimizer

Names are imported on first use: ``import hvdbridge`` alone imports neither torch, mpi4py nor Horovod. The stub
``__init__.pyi`` lists the names for type checkers. This file reads from it which module has each name.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdbridge.deprecated import MovedModules

__version__ = "0.2.0"

_MODULE_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_MODULE_OF)
sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hvdbridge' has no attribute {name!r}")
    module = _MODULE_OF[name]
    value = import_module("hvdbridge.policies") if name == "policies" else getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
