"""Imports point one way (the drawing in docs/explanation/architecture.md), read from the source by its syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvdbridge

ROOT = Path(hvdbridge.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

POLICIES = {"errors", "deprecated", "policy", "kernels", "policies"}
CORE = {*POLICIES, "config", "startup", "supervisor", "backends", "execution", "reduction", "training"}
MAY_IMPORT = {
    "errors": set(),
    "deprecated": set(),
    "run": set(),
    "config": {"errors"},
    "policy": {"errors", "deprecated"},
    "kernels": {"errors", "deprecated", "config", "policy"},
    "policies": POLICIES,
    "startup": {"errors", "config", "run"},
    "supervisor": {"errors", "config", "startup"},
    "backends": {"errors", "config", "policy", "startup", "supervisor"},
    "execution": {*POLICIES, "backends"},
    "reduction": CORE - {"training"},
    "training": CORE,
    "torch": CORE,
    "tools": {*CORE, "run", "torch"},
    "__main__": {"tools"},
}
"""What each package and module at the top may import, beside itself; in type-checking blocks and functions, too."""

LIBRARIES = ("torch.distributed", "torch.nn.parallel", "mpi4py", "horovod")
SPEAKS = {
    "torch.distributed": ("startup.channels", "backends", "reduction", "training", "torch", "tools.bench.reference"),
    "torch.nn.parallel": ("reduction", "training", "tools.bench.reference"),
    "mpi4py": ("backends.mpi", "tools"),
    "horovod": ("backends.horovod", "reduction.horovod_optimizer", "torch.elastic.restart", "tools"),
}
"""Library -> the modules that may know it; above all no policy, no kernel, no scheduler."""


def imports(module: str, typing: bool = True) -> list[str]:
    """Everything that a module imports anywhere in it, absolute; with and without its type-checking blocks."""
    package = ["hvdbridge", *module.split(".")] if module else ["hvdbridge"]
    if FILES[module].name != "__init__.py":
        package = package[:-1]
    found = []
    tree = ast.parse(FILES[module].read_text())
    for block in () if typing else [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{source}.{alias.name}" for alias in node.names]
    return found


def own_imports(module: str, typing: bool = True) -> set[str]:
    """The files of ours that a file imports."""
    found = set()
    for name in imports(module, typing):
        parts = name.split(".")[1:] if name.startswith("hvdbridge.") else []
        while parts and ".".join(parts) not in FILES:
            parts.pop()
        if parts:
            found.add(".".join(parts))
    return found - {module}


@pytest.mark.parametrize("module", [name for name in FILES if name != "__init__"])
def test_packages_import_one_way(module: str) -> None:
    part = module.split(".")[0]
    own = {name.split(".")[0] for name in own_imports(module)}
    assert own <= {part, *MAY_IMPORT[part]}, f"{module} must not import {sorted(own - MAY_IMPORT[part])}"


def test_the_table_has_no_cycle() -> None:
    left = dict(MAY_IMPORT)
    while free := [name for name, needs in left.items() if not (needs - {name}) & set(left)]:
        for name in free:
            del left[name]
    assert not left


def test_no_file_imports_itself_through_others() -> None:
    """Imports within functions are included."""
    left = {name: own_imports(name, typing=False) for name in FILES}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert not left, "these files import each other"


@pytest.mark.parametrize("module", FILES)
def test_a_library_is_known_to_few(module: str) -> None:
    for library in LIBRARIES:
        uses = [name for name in imports(module) if f"{name}.".startswith(f"{library}.")]
        allowed = any(f"{module}.".startswith(f"{part}.") for part in SPEAKS[library])
        assert not uses or allowed, f"{module} must not import {uses}"


def test_the_test_sees_relative_and_nested_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "bad.py"
    source.write_text("def f():\n    from ..execution import drive\n    import mpi4py.MPI\n")
    monkeypatch.setitem(FILES, "policies.bad", source)
    assert imports("policies.bad") == ["hvdbridge.execution.drive", "mpi4py.MPI"]


def test_importing_the_package_brings_in_no_library() -> None:
    code = "import sys, hvdbridge; print([m for m in ('torch', 'mpi4py', 'horovod') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert run.stdout.strip() == "[]"
