"""Imports point one way (the drawing in docs/architecture.md), read from the source by its syntax tree."""

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

VOCABULARY = {"errors", "options", "collectives", "memory", "bucket", "policy"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "ports": set(),
    "options": {"errors"},
    "collectives": {"errors"},
    "memory": {"kernels"},  # the compiled functions, which know nothing of buckets
    "bucket": {"errors", "memory"},
    "policy": VOCABULARY | {"dry_run"},
    "dry_run": VOCABULARY,
    "spec": VOCABULARY,
    "kernels": {"errors", "config", "bucket", "kernels"},
    "policies": VOCABULARY | {"spec", "kernels", "policies"},
    "state": VOCABULARY,
    "simulation": VOCABULARY | {"state", "policies"},
    "communicators": {"errors", "collectives", "communicators"},
    "mailbox": set(),
    "flows": {"mailbox", "collectives", "communicators"},
    "driver": {"errors", "flows", "mailbox", "collectives", "communicators"},
    "aggregator": VOCABULARY | {"state", "flows", "driver", "communicators"},
    "replicate": {"errors", "collectives", "communicators", "driver"},
    "module_hook": set(),
    "parameters": {"errors", "bucket"},
    "sources": VOCABULARY | {"parameters", "flows", "driver", "aggregator", "module_hook", "replicate", "sources"},
    "messages": {"errors", "ports", "communicators", "messages"},
    "helper": {"errors", "config", "ports", "helper"},
    "world": {"errors"},
    "rendezvous": {"errors", "config", "ports", "world", "helper", "communicators", "rendezvous"},
    "torch.coordinator": {"helper"},
    "torch.control": {"errors", "helper", "ports", "torch"},
    "torch.arithmetic": {"collectives", "communicators"},
    "torch.operations": {"errors", "mailbox", "collectives", "communicators", "runtime", "torch"},
    "torch.mpi_ops": {"communicators", "memory", "runtime", "torch"},
    "torch.functions": {"torch"},
}
"""Top-level part -> what it may import; parts that join others (runtime, synchronizer, cli) are not limited."""

LIBRARIES = ("torch.distributed", "torch.nn.parallel", "mpi4py", "horovod")
SPEAKS = {
    "torch.distributed": (
        "bench.native",
        "bridges",
        "communicators.torch",
        "rendezvous",
        "sources",
        "torch",
        "synchronizer",
    ),
    "torch.nn.parallel": ("bench.native", "bridges", "sources", "synchronizer"),
    "mpi4py": ("bench.native", "communicators.mpi", "messages.mpi", "rendezvous.mpi", "cli"),
    "horovod": (
        "bench.native",
        "communicators.horovod",
        "rendezvous.horovod",
        "sources.horovod",
        "torch.elastic.restart",
        "cli",
    ),
}
"""Library -> the modules that may know it; above all no policy, no kernel, no driver."""


def imports(module: str) -> list[str]:
    """Everything that a module imports anywhere in it, absolute; type-checking blocks included."""
    package = ["hvdbridge", *module.split(".")] if module else ["hvdbridge"]
    if FILES[module].name != "__init__.py":
        package = package[:-1]
    found = []
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{source}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("module", [name for name in FILES if {name, name.split(".")[0]} & set(MAY_IMPORT)])
def test_own_imports_point_one_way(module: str) -> None:
    part = module if module in MAY_IMPORT else module.split(".")[0]
    own = {name.split(".")[1] for name in imports(module) if name.startswith("hvdbridge.")}
    assert own <= MAY_IMPORT[part], f"{module} must not import {sorted(own - MAY_IMPORT[part])}"


@pytest.mark.parametrize("module", FILES)
def test_a_library_is_known_to_few(module: str) -> None:
    for library in LIBRARIES:
        uses = [name for name in imports(module) if f"{name}.".startswith(f"{library}.")]
        allowed = any(f"{module}.".startswith(f"{part}.") for part in SPEAKS[library])
        assert not uses or allowed, f"{module} must not import {uses}"


def test_the_test_sees_relative_and_nested_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "bad.py"
    source.write_text("def f():\n    from ..driver import drive\n    import mpi4py.MPI\n")
    monkeypatch.setitem(FILES, "policies.bad", source)
    assert imports("policies.bad") == ["hvdbridge.driver.drive", "mpi4py.MPI"]


def test_importing_the_package_brings_in_no_library() -> None:
    code = "import sys, hvdbridge; print([m for m in ('torch', 'mpi4py', 'horovod') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert run.stdout.strip() == "[]"
