"""Every public name of the installed Horovod is ours, with its parameters; but for the differences listed here."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from importlib import import_module
from typing import Any

import pytest
import torch

import hvdbridge as hb
import hvdbridge.torch as hvd
from hvdbridge.errors import Unsupported
from hvdbridge.run import STANDS_FOR
from hvdbridge.torch import exceptions, mpi_ops, util
from hvdbridge.torch.compression import Compressor
from hvdbridge.torch.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from hvdbridge.torch.launch import run_commandline

MISSING = {
    "horovod.common.basics": {"MPI": "a name for annotations"},
    "horovod.common.process_sets": {"MPI": "a name for annotations", "HorovodBasics": "a name for annotations"},
    "horovod.common.util": {
        "get_ext_suffix": "of Horovod's C library", "get_extension_full_path": "of Horovod's C library",
        "is_version_greater_equal_than": "of its TensorFlow part",
    },
    "horovod.runner.launch": {"*": "the parts of the command horovodrun"},
}  # fmt: skip
"""Module -> name -> why it is not here."""

OTHERWISE = {
    "DistributedOptimizer": "more: policy=",
    "allgather_object": "more: process_set=",
    "broadcast_optimizer_state": "more: process_set=",
    "broadcast_parameters": "more: process_set=",
    "init": "its parameters by name, where Horovod has *args",
    "shutdown": "none, where Horovod has *args",
    "split_list": "parameters have names",
    "HostsUpdatedInterrupt.__init__": "skip_sync has a default",
    "forward": "of autograd functions, which apply() calls",
    "backward": "of autograd functions, which autograd calls",
    "ModelStateHandler.__init__": "its base's parameter",
    "OptimizerStateHandler.__init__": "its base's parameter",
    "SamplerStateHandler.__init__": "its base's parameter",
    **dict.fromkeys(("ccl_built", "ddl_built", "gloo_built", "gpu_available", "mpi_built", "nccl_built"), "by name"),
}
"""Name, or a class's member -> how its parameters differ."""

LIST = """
import importlib, inspect, json, sys

def parameters(value):
    try:
        return [[p.name, int(p.kind), p.default is p.empty] for p in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return None

found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = names = {}
    for key, value in vars(module).items():
        if key.startswith("_") or inspect.ismodule(value):
            continue
        home = getattr(value, "__module__", None)  # None: a number, such as Average
        main = name in ("horovod.torch", "horovod.torch.mpi_ops") and (home or name).startswith("horovod")
        if home != name and not main:
            continue  # what a module only uses itself
        names[key] = parameters(value) if inspect.isroutine(value) else None
        if inspect.isclass(value):
            for member in vars(value):
                if not member.startswith("_") or member == "__init__":
                    names[f"{key}.{member}"] = parameters(getattr(value, member))
json.dump(found, sys.stdout)
"""


class Missing:
    """What a module does not have."""


@pytest.fixture(scope="module")
def horovods() -> dict[str, dict[str, Any]]:
    """Read in a process of its own, so that this one never imports it."""
    done = subprocess.run([sys.executable, "-c", LIST, *STANDS_FOR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", STANDS_FOR)
def test_names_and_parameters_are_horovods(module: str, horovods: dict[str, dict[str, Any]]) -> None:
    ours = import_module(STANDS_FOR[module])
    excused = MISSING.get(module, {})
    assert horovods[module], "something is compared"
    differences = []
    for name, parameters in horovods[module].items():
        first, _, member = name.partition(".")
        mine = getattr(ours, first, Missing)
        if mine is not Missing and member:
            mine = getattr(mine, member, Missing)
        if mine is Missing:
            differences += [] if {first, name, "*"} & set(excused) else [f"{name} is missing"]
        elif parameters is not None and not {name, member} & set(OTHERWISE):
            found = [[p.name, int(p.kind), p.default is p.empty] for p in inspect.signature(mine).parameters.values()]
            if found not in (parameters, parameters[1:] if member else None):  # a method of ours may be static
                differences.append(f"{name}{inspect.signature(mine)}, not {[p[0] for p in parameters]}")
    assert not differences, "\n".join(differences)


def test_the_differences_are_real(horovods: dict[str, dict[str, Any]]) -> None:
    names = {part for each in horovods.values() for name in each for part in (name, name.partition(".")[2])}
    assert set(OTHERWISE) <= names
    for module, excused in MISSING.items():
        assert set(excused) - {"*"} <= set(horovods[module])
        assert not [name for name in excused if hasattr(import_module(STANDS_FOR[module]), name)]


def test_basics_ask_hvd() -> None:
    basics = mpi_ops._basics
    assert mpi_ops._basics is basics
    assert (basics.Sum, basics.rank) == (mpi_ops.Sum, mpi_ops.rank)
    assert basics.is_initialized() is False
    with pytest.raises(ValueError, match="not been initialized"):
        basics.size()


def test_what_average_means() -> None:
    made = util.get_average_backwards_compatibility_fun(mpi_ops)
    for chosen in (made, mpi_ops.handle_average_backwards_compatibility):
        assert chosen(None, None) is mpi_ops.Average
        assert chosen(mpi_ops.Max, None) is mpi_ops.Max
        with pytest.warns(DeprecationWarning, match="average"):
            assert chosen(None, False) is mpi_ops.Sum
        with pytest.raises(ValueError, match="supersedes"):
            chosen(mpi_ops.Sum, True)


def test_there_is_no_horovodrun() -> None:
    with pytest.raises(Unsupported, match="torchrun"):
        run_commandline()
    assert "torch 1" in exceptions.get_version_mismatch_message("torch", "1", "2")


class Numbers(BaseDataLoader):
    def __init__(self, numbers: int, fails: bool = False) -> None:
        self.numbers, self.fails = numbers, fails

    def __len__(self) -> int:
        return self.numbers

    def _iterate(self) -> Any:
        yield from range(self.numbers)
        if self.fails:
            raise OSError("the disk is gone")

    def _process_batch(self, batch: int) -> int:
        return batch * 10


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_loader_that_reads_ahead(size: int) -> None:
    loader = Ahead(size, False, 5)
    for _ in range(2):
        assert list(loader) == list(Numbers(5)) == [0, 10, 20, 30, 40]
    assert len(loader) == 5
    broken = iter(Ahead(async_loader_queue_size=size, numbers=2, fails=True))
    assert [next(broken), next(broken)] == [0, 10]
    with pytest.raises(OSError, match="disk"):
        next(broken)
    left = Ahead(size, numbers=1000)
    held = iter(left)
    next(held)
    left.close_async_loader()
    assert not readers()
    loader.close_async_loader()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hvdbridge-loader"]


@pytest.mark.parametrize("size", [1, 3])
def test_epochs_that_are_left_leave_no_thread(size: int) -> None:
    loader = Ahead(size, numbers=1000)
    for _ in range(3):
        for _ in loader:
            break
    for thread in readers():
        thread.join(timeout=10)
    assert not readers()


def test_a_handle_of_the_session_before_is_unknown() -> None:
    hvd.init()
    handle = hvd.allreduce_async_(torch.ones(2), name="left")
    hvd.shutdown()
    hvd.init()
    try:
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="was not created or has been cleared"):
            hvd.poll(handle)
    finally:
        hvd.shutdown()


def test_a_compressor_without_its_methods_is_an_error() -> None:
    class Half(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.half(), tensor.dtype

    with pytest.raises(NotImplementedError):
        Half.decompress(torch.ones(1), torch.float32)


def test_a_converted_batch_norm_is_independent_of_the_module_it_was_made_of() -> None:
    module = torch.nn.BatchNorm1d(3)
    converted = hb.SyncBatchNorm.convert(torch.nn.Sequential(module))
    assert converted[0].weight is module.weight  # type: ignore[index]
    module.register_buffer("more", torch.ones(1))
    assert "more" not in dict(converted.named_buffers())
