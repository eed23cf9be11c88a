"""One training script; torch.distributed, Horovod or MPI below it; the same gradient aggregation on all.

::

    import hvdbridge as hb

    hb.init()                                   # HVDBRIDGE_BACKEND = auto | torch | horovod | mpi
    sync = hb.GradientSynchronizer(model, optimizer, policy="bf16")
    model, optimizer = sync.model, sync.optimizer

Names are imported on first use: ``import hvdbridge`` alone brings in neither torch, mpi4py nor Horovod. The stub
``__init__.pyi`` lists them for type checkers, and this file reads there which module has each of them.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdbridge.deprecated import MovedModules

__version__ = "0.1.0"

_HOME_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = list(_HOME_OF)
sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hvdbridge' has no attribute {name!r}")
    home = _HOME_OF[name]
    value = import_module("hvdbridge.policies") if name == "policies" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
