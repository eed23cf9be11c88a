"""``python -m hvdbridge.run train.py ...`` runs an unmodified Horovod script without Horovod.

::

    python -m hvdbridge.run train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdbridge.run train.py --epochs 3
    mpiexec -n 2 python -m hvdbridge.run train.py --epochs 3
    horovodrun -np 2 python -m hvdbridge.run -m my_package.train

Rules:

1. The script's ``import horovod.torch`` imports :mod:`hvdbridge.torch`, with the submodules of :data:`STANDS_FOR`. An
   import of Horovod for another framework raises ModuleNotFoundError.
2. An installed Horovod is hidden from the script and its imports. Horovod itself and hvdbridge, which needs it for the
   backend ``horovod``, import the real one. The name of the importing module decides. Horovod's modules are in
   ``sys.modules`` during these imports only. The exception is ``horovod.runner.*`` below the launcher's API, which
   unpickles its messages by module name.
3. The script runs as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``.
4. The same holds in processes that the script starts by ``multiprocessing``, as a DataLoader does. Forked processes
   inherit it. Others (``spawn``, ``forkserver``) unpickle a :class:`ChildSetup` before they import the script.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import pkgutil
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "0.28.1"
"""Version of Horovod that scripts see."""

STANDS_FOR = {
    **{f"horovod.torch{part}": f"hvdbridge.torch{part}" for part in (
        "", ".compression", ".elastic", ".elastic.sampler", ".elastic.state", ".functions", ".mpi_ops", ".optimizer",
        ".sync_batch_norm",
    )},
    **{f"horovod.common.{part}": f"hvdbridge.torch.{part}" for part in (
        "basics", "exceptions", "process_sets", "util",
    )},
    "horovod.common.elastic": "hvdbridge.torch.elastic.state",
    "horovod.data.data_loader_base": "hvdbridge.torch.data_loader_base",
    "horovod.runner.launch": "hvdbridge.torch.launch",
}  # fmt: skip
"""Module of Horovod -> module of hvdbridge that replaces it."""

LAUNCH = {"run": "hvdbridge.startup.launching:launch"}
PACKAGES: Mapping[str, Mapping[str, str]] = {
    "horovod": {**LAUNCH, "__version__": "hvdbridge.run:VERSION"},
    "horovod.common": {},
    "horovod.data": {
        name: f"hvdbridge.torch.data_loader_base:{name}" for name in ("AsyncDataLoaderMixin", "BaseDataLoader")
    },
    "horovod.runner": LAUNCH,
}
"""Packages of Horovod that stand-in packages replace: package -> attribute -> ``module:attribute`` of its value."""

USAGE = "usage: python -m hvdbridge.run [-m MODULE | SCRIPT] [ARGUMENTS ...]"


def of_horovod(name: str) -> bool:
    """Return whether ``name`` is Horovod's package or a module in it.

    >>> of_horovod("horovod.torch"), of_horovod("horovod_tools")
    (True, False)
    """
    return name == "horovod" or name.startswith("horovod.")


class Package(ModuleType):
    """Stand-in for one of :data:`PACKAGES`. It imports its attributes on first use."""

    def __getattr__(self, name: str) -> Any:
        target = PACKAGES[self.__name__].get(name)
        if target is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} under hvdbridge.run")
        value = pkgutil.resolve_name(target)
        setattr(self, name, value)
        return value


class StandIn(MetaPathFinder, Loader):
    """Importer that loads hvdbridge's modules under Horovod's names, while it is ``on``."""

    stands_in = True
    on = True

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if not (self.on and of_horovod(name)):
            return None
        if name in PACKAGES or name in STANDS_FOR:
            return ModuleSpec(name, self, is_package=name in PACKAGES)
        raise ModuleNotFoundError(
            f"No module named {name!r} under hvdbridge.run, which stands in for horovod.torch: "
            f"it knows {', '.join(sorted([*PACKAGES, *STANDS_FOR]))}",
            name=name,
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in PACKAGES:
            return Package(spec.name)
        module = importlib.import_module(STANDS_FOR[spec.name])
        spec.loader_state = module.__spec__  # importlib overwrites it; exec_module() restores it
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.name in STANDS_FOR:
            module.__spec__ = spec.loader_state


class Imports:
    """Replacement of ``__import__``: Horovod and hvdbridge import the real Horovod, other modules the stand-ins."""

    def __init__(self, finder: StandIn) -> None:
        self._finder = finder
        self._import: Any = builtins.__import__
        self._real: dict[str, ModuleType] = {}
        self._lock = threading.RLock()

    def __call__(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        given = name, globals, locals, fromlist or (), level
        if not of_horovod(importer if level else name):
            return self._import(*given)
        with self._lock:
            if not self._finder.on or not (of_horovod(importer) or importer.startswith("hvdbridge.")):
                return self._import(*given)
            with self._real_horovod():
                return self._import(*given)

    @contextmanager
    def _real_horovod(self) -> Iterator[None]:
        """Context in which the real Horovod's modules are in ``sys.modules``, and the stand-ins are not."""
        self._finder.on = False
        removed = remove_modules()
        sys.modules.update({**{name: m for name, m in removed.items() if name not in replaced()}, **self._real})
        try:
            yield
        finally:
            self._real = remove_modules()
            self._finder.on = True
            sys.modules.update({
                **{n: m for n, m in self._real.items() if n.startswith("horovod.runner.") and n not in replaced()},
                **{n: m for n, m in removed.items() if n in replaced()},
            })  # fmt: skip


def remove_modules() -> dict[str, ModuleType]:
    """Remove all modules with Horovod's names from ``sys.modules``, and return them by name."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if of_horovod(name)}


def replaced() -> set[str]:
    """Return the names of Horovod's modules that hvdbridge replaces."""
    return {*PACKAGES, *STANDS_FOR}


class ChildSetup:
    """Object that calls :func:`stand_in` in the process that unpickles it.

    Args:
        path: ``sys.path`` of the process.
    """

    def __init__(self, path: Sequence[str]) -> None:
        self._path = [*path, str(Path(__file__).parents[1])]

    def __reduce__(self) -> Any:
        # Source text, because the process cannot import hvdbridge before its sys.path is set.
        return exec, (f"import sys; sys.path[:] = {self._path!r}; import hvdbridge.run; hvdbridge.run.stand_in()", {})


def set_up_children() -> None:
    """Patch ``multiprocessing`` so that it sends a :class:`ChildSetup` to each new process, before other data."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        if name == "ignore":  # of the fork server itself: it gets no pickle, so it must not import the script
            return {key: value for key, value in data.items() if not key.startswith("init_main")}
        return {**data, "hvdbridge": ChildSetup(data["sys_path"])}

    spawn.get_preparation_data = prepared


_finder: StandIn | None = None


def stand_in() -> None:
    """Make ``import horovod.torch`` import hvdbridge.torch in this process. May be called repeatedly.

    Raises:
        ImportError: the real Horovod is imported already.
    """
    global _finder
    if _finder is not None:
        return
    if "horovod" in sys.modules:
        raise ImportError("hvdbridge.run: horovod is imported already in this process; stand_in() comes first")
    _finder = StandIn()
    sys.meta_path.insert(0, _finder)
    builtins.__import__ = Imports(_finder)
    set_up_children()


def stands_in() -> bool:
    """Return whether :func:`stand_in` was called."""
    return _finder is not None


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script, or a module after ``-m``, as ``__main__``. ``argv`` defaults to the process's arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in ([], ["-h"], ["--help"]) or words == ["-m"]:
        print(USAGE, file=sys.stderr)
        raise SystemExit(0 if words[:1] in (["-h"], ["--help"]) else 2)
    stand_in()
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = words[0]
    try:
        code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        print(f"hvdbridge.run: cannot read {script}: {error.strerror}\n{USAGE}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    module = ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    # Imported under its own name, because the script becomes the module __main__.
    from hvdbridge.run import main as run

    run()
