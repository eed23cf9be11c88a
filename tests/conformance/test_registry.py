"""The registry of backends imports a backend only when it is used, and every failure names its remedy."""

import subprocess
import sys
from types import ModuleType

import pytest

import hvdbridge.backends.registry as registry
from hvdbridge import config
from hvdbridge.errors import BackendUnavailable, ConfigurationError


def test_importing_the_package_imports_no_backend() -> None:
    code = "import sys, hvdbridge.backends.registry; print({'mpi4py', 'horovod'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'horovod'"):
        registry.load("horovd", "starter")


def test_a_registered_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "registered_backends", {})
    registry.register("json_lines", "json")
    registry.register("json_lines", "json")  # again: harmless
    assert "json_lines" in registry.known()
    assert config.Config.from_environment({"HVDBRIDGE_BACKEND": "json_lines"}).backend == "json_lines"
    monkeypatch.setattr("json.BACKEND", registry.Backend("Json", "json", "", "", ".decoder:JSONDecoder"), raising=False)
    assert registry.load("json_lines", "starter").__name__ == "JSONDecoder"
    for name, module in (("mpi", "json"), ("json_lines", "csv"), ("Json", "json")):
        with pytest.raises(ConfigurationError, match=f"'{name}' "):
            registry.register(name, module)


@pytest.mark.parametrize(("name", "remedy"), [("horovod", "hvdbridge install-horovod"), ("mpi", "hvdbridge[mpich]")])
def test_missing_library(name: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, registry.entry(name).package, None)  # makes its import fail
    with pytest.raises(BackendUnavailable, match=f"HVDBRIDGE_BACKEND={name} but .* is not installed") as caught:
        registry.load(name, "communicator")
    assert remedy in str(caught.value)


class Broken(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError("cannot load MPI library")


def test_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry", lambda _: registry.Backend("M", "os", "Run: pip install m", ".broken:M", ""))
    monkeypatch.setitem(sys.modules, "hvdbridge.backends.mpi.broken", Broken("broken"))
    with pytest.raises(BackendUnavailable, match=r"does not load .*: cannot load MPI library.*pip install") as caught:
        registry.load("mpi", "communicator")
    assert isinstance(caught.value.__cause__, RuntimeError)
