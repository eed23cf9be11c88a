"""``python -m hvdbridge.run train.py ...`` runs an unmodified Horovod script, without Horovod.

::

    python -m hvdbridge.run train.py --epochs 3
    torchrun --nproc-per-node 2 -m hvdbridge.run train.py --epochs 3
    mpiexec -n 2 python -m hvdbridge.run train.py --epochs 3
    horovodrun -np 2 python -m hvdbridge.run -m my_package.train

Rules:

1. The script's ``import horovod.torch`` is :mod:`hvdbridge.torch`, with the submodules of :data:`STANDS_FOR`. Modules
   of other frameworks are refused by name.
2. An installed Horovod is hidden from the script and from what the script imports, but not from itself and from
   hvdbridge, whose backend ``horovod`` it is. The importing module decides. Horovod's modules leave ``sys.modules``
   between their own imports. Only ``horovod.runner.*`` below the launcher's API remains: it unpickles its own messages
   by name.
3. The script runs as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``.
4. Processes that the script starts by ``multiprocessing``, as a DataLoader does, inherit this. Forked processes have it
   already; others (``spawn``, ``forkserver``) get it with what they are sent before they import the script.
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
"""The version of Horovod that scripts see."""

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
"""Horovod's module -> ours."""

LAUNCH = {"run": "hvdbridge.startup.launching:launch"}
PACKAGES: Mapping[str, Mapping[str, str]] = {
    "horovod": {**LAUNCH, "__version__": "hvdbridge.run:VERSION"},
    "horovod.common": {},
    "horovod.data": {
        name: f"hvdbridge.torch.data_loader_base:{name}" for name in ("AsyncDataLoaderMixin", "BaseDataLoader")
    },
    "horovod.runner": LAUNCH,
}
"""Packages that consist of what they hold here: name -> ``module:attribute``."""

USAGE = "usage: python -m hvdbridge.run [-m MODULE | SCRIPT] [ARGUMENTS ...]"


def of_horovod(name: str) -> bool:
    """
    >>> of_horovod("horovod.torch"), of_horovod("horovod_tools")
    (True, False)
    """
    return name == "horovod" or name.startswith("horovod.")


class Package(ModuleType):
    """One of :data:`PACKAGES`; its contents are imported on first use."""

    def __getattr__(self, name: str) -> Any:
        target = PACKAGES[self.__name__].get(name)
        if target is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} under hvdbridge.run")
        value = pkgutil.resolve_name(target)
        setattr(self, name, value)
        return value


class StandIn(MetaPathFinder, Loader):
    """Finds and loads our modules under Horovod's names, as long as it is ``on``."""

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
        spec.loader_state = module.__spec__  # importlib puts its own in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.name in STANDS_FOR:
            module.__spec__ = spec.loader_state


class Imports:
    """``import`` that gives the real Horovod to itself and to hvdbridge, and ours to everybody else."""

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
        """Within, the real modules are under Horovod's names."""
        self._finder.on = False
        there = taken()
        sys.modules.update({**{name: m for name, m in there.items() if name not in known()}, **self._real})
        try:
            yield
        finally:
            self._real = taken()
            self._finder.on = True
            sys.modules.update({
                **{n: m for n, m in self._real.items() if n.startswith("horovod.runner.") and n not in known()},
                **{n: m for n, m in there.items() if n in known()},
            })  # fmt: skip


def taken() -> dict[str, ModuleType]:
    """Remove all modules under Horovod's names, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if of_horovod(name)}


def known() -> set[str]:
    """The names that are ours while a script runs."""
    return {*PACKAGES, *STANDS_FOR}


class Heritage:
    """What a process that begins anew is sent; to unpickle it there calls :func:`stand_in`."""

    def __init__(self, path: Sequence[str]) -> None:
        self._path = [*path, str(Path(__file__).parents[1])]

    def __reduce__(self) -> Any:
        # As text: there is no path yet by which hvdbridge could be imported.
        return exec, (f"import sys; sys.path[:] = {self._path!r}; import hvdbridge.run; hvdbridge.run.stand_in()", {})


def bequeath() -> None:
    """Have ``multiprocessing`` send a :class:`Heritage` with what its new processes begin with."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        if name == "ignore":  # for the fork server itself, which may import the script, and is sent text alone
            return {key: value for key, value in data.items() if not key.startswith("init_main")}
        return {**data, "hvdbridge": Heritage(data["sys_path"])}

    spawn.get_preparation_data = prepared


_finder: StandIn | None = None


def stand_in() -> None:
    """From now on this process's ``import horovod.torch`` is hvdbridge's. Harmless when repeated.

    Raises:
        ImportError: the real Horovod was imported before.
    """
    global _finder
    if _finder is not None:
        return
    if "horovod" in sys.modules:
        raise ImportError("hvdbridge.run: horovod is imported already in this process; stand_in() comes first")
    _finder = StandIn()
    sys.meta_path.insert(0, _finder)
    builtins.__import__ = Imports(_finder)
    bequeath()


def stands_in() -> bool:
    """Whether :func:`stand_in` was called."""
    return _finder is not None


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script, or with ``-m`` a module, as ``__main__``."""
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
    # Under its own name: the script becomes the module __main__.
    from hvdbridge.run import main as run

    run()
