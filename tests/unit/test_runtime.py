"""One session per process, in a process of its own rank; what init and its readers refuse."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hvdbridge as hb
from hvdbridge.config import Config
from hvdbridge.startup import network


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "HVDBRIDGE_BACKEND", "HVDBRIDGE_POLICY"):
        monkeypatch.delenv(name, raising=False)
    yield
    hb.shutdown()


def test_importing_brings_in_no_library() -> None:
    heavy = "print([name for name in ('torch', 'mpi4py', 'horovod') if name in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", f"import sys, hvdbridge; hvdbridge.HvdbridgeError; {heavy}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(("sizes", "views"), [([300_000], False), ([300_000, 1, 1], True), ([200_000] * 3, True)])
def test_gradients_are_views_where_parameters_are_small(sizes: list[int], views: bool) -> None:
    """From 1 MiB on average, 262,144 numbers, they are copied."""
    hb.init()
    model = torch.nn.ParameterList(torch.zeros(n) for n in sizes)
    sync = hb.GradientSynchronizer(model, policy="mean")
    assert sync.model.gradient_as_bucket_view is views
    sync.close()


def test_buckets_that_are_measured_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import hvdbridge.torch as hvd

    monkeypatch.setenv("HVDBRIDGE_BUCKET_MB", "Auto")
    hb.init("torch")
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    sync = hb.GradientSynchronizer(model, policy="int8")
    assert sync.bucket_mb == 10  # alone there is nothing to measure
    sync.close()
    with pytest.raises(hb.ConfigurationError, match=r"HVDBRIDGE_BUCKET_MB=auto: only a .* average_gradients does not"):
        hb.average_gradients(model)
    hvd.init()
    with pytest.raises(hb.ConfigurationError, match=r"hvdbridge.torch.DistributedOptimizer does not\. Set a number"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def test_every_public_name_is_there_and_typed() -> None:
    tree = ast.parse(Path(hb.__file__).with_suffix(".pyi").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: f"{node.module}.{alias.name}" for node in imported for alias in node.names if alias.asname}
    assert sorted(typed) == sorted(hb.__all__)
    for name, home in typed.items():
        module, _, attribute = home.rpartition(".")
        assert attribute == name
        assert getattr(hb, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nit'"):
        hb.nit  # noqa: B018


def test_init_twice_is_harmless_and_never_changes_a_session() -> None:
    first = hb.init("torch", policy="bf16")
    assert hb.init() is first
    assert hb.init("torch") is first
    assert hb.init(rank=0, size=1) is first  # these are its numbers
    with pytest.raises(hb.ConfigurationError, match=r"Call hb.shutdown\(\) first"):
        hb.init("torch", policy="mean")
    hb.shutdown()
    hb.shutdown()
    with hb.session("torch") as second:
        assert second is hb.current()
        assert (hb.rank(), hb.size(), hb.local_rank(), hb.local_size(), hb.node_rank(), hb.num_nodes()) == (0, 1) * 3
        assert (hb.backend(), hb.launcher(), hb.broadcast_object([1])) == ("torch", "none", [1])
        hb.barrier()
    assert not hb.is_initialized()


@pytest.mark.parametrize("read", [hb.rank, hb.device, hb.barrier, hb.current, lambda: hb.broadcast_object(1)])
def test_init_is_missing(read: object) -> None:
    with pytest.raises(hb.NotInitialized, match=r"call hb.init\(\) first"):
        read()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "horovd"}, hb.ConfigurationError, "Did you mean 'horovod'"),
        ({"policy": "maen"}, hb.ConfigurationError, "Did you mean 'mean'"),
        ({"policy": "mean(", "backend": "torch"}, hb.SpecError, "mean"),
        ({"rank": 1}, hb.ConfigurationError, "give both"),
        ({"rank": 2, "size": 2}, hb.RendezvousError, "rank=2"),
        ({"rank": 0, "size": 2}, hb.RendezvousError, "set MASTER_ADDR and MASTER_PORT"),
        ({"rank": 0, "size": 2, "init_method": "udp://x:1"}, hb.ConfigurationError, "must be tcp://host:port"),
        ({"rank": 0, "size": 2, "init_method": "tcp://x"}, hb.ConfigurationError, "'x' is no port"),
        ({"rank": 0, "size": 2, "init_method": "tcp://x:99999"}, hb.ConfigurationError, "'99999' is no port"),
    ],
)
def test_init_refuses(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        hb.init(**arguments)  # type: ignore[arg-type]
    assert not hb.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HVDBRIDGE_BACKEND", "horovd", "Did you mean 'horovod'"),
        ("HVDBRIDGE_BACKEN", "mpi", "Did you mean 'BACKEND'"),
        ("HVDBRIDGE_POLICY", "maen", "Did you mean 'mean'"),
        ("HVDBRIDGE_TIMEOUT_SECONDS", "-1", "must be a positive number"),
        ("RANK", "1", "WORLD_SIZE is not"),
    ],
)
def test_init_refuses_variables(name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(hb.HvdbridgeError, match=re.escape(text)):
        hb.init()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDBRIDGE_TIMEOUT_SECONDS", "1")
    with pytest.raises(hb.RendezvousError, match=r"rank 1 got no answer within 1 s at 127.0.0.1:9 "):
        hb.init(rank=1, size=2, init_method="tcp://127.0.0.1:9")


def test_rank_0_names_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDBRIDGE_TIMEOUT_SECONDS", "0.5")
    with pytest.raises(hb.RendezvousError, match=r"rank 0 waited 0.5 s for ranks 1-3 of 4"):
        hb.init(rank=0, size=4, init_method=f"tcp://127.0.0.1:{network.free_port()}")


def test_broadcast_parameters_takes_what_people_have() -> None:
    hb.init("torch")
    model = torch.nn.BatchNorm1d(3)
    for source in (model, model.state_dict(), model.named_parameters(), model.parameters()):
        hb.broadcast_parameters(source)
    with pytest.raises(hb.ConfigurationError, match="root=1 is no rank"):
        hb.broadcast_parameters(model, root=1)


def test_variables_that_kubernetes_injects_are_ignored() -> None:
    host = {"HVDBRIDGE_SERVICE_HOST": "10.0.0.1", "HVDBRIDGE_TRAIN_SERVICE_HOST": "10.0.0.2"}
    names = (
        "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO", "PORT_80_TCP_PORT",
        "PORT_80_TCP_ADDR", "TRAIN_SERVICE_PORT", "TRAIN_PORT", "TRAIN_PORT_80_TCP_ADDR",
    )  # fmt: skip
    injected = {f"HVDBRIDGE_{name}": "1" for name in names}
    assert Config.from_environment(host | injected).injected == tuple(sorted(host | injected))
    with pytest.raises(hb.ConfigurationError, match="Unknown environment variable HVDBRIDGE_PORT"):
        Config.from_environment({"HVDBRIDGE_PORT": "1"})  # of no service: somebody means HVDBRIDGE_PORTS
    with pytest.raises(hb.ConfigurationError, match="Unknown environment variable HVDBRIDGE_SERVICE"):
        Config.from_environment(host | {"HVDBRIDGE_SERVICES": "1"})


@pytest.mark.parametrize("text", ["25000", "25000-24000", "0-9", "1-65536", "a-b"])
def test_ports_that_cannot_be(text: str) -> None:
    with pytest.raises(hb.ConfigurationError, match="must be a range of ports"):
        Config.from_environment({"HVDBRIDGE_PORTS": text})


def test_an_address_that_every_host_reaches() -> None:
    mine = ["127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/24"]
    assert network.common_address(mine, [["10.0.0.2/24"], ["10.0.0.3/24"]]) == "10.0.0.1"
    assert network.common_address(mine, [["10.0.0.2/24"]], preferred="172.17.0.1") == "172.17.0.1"
    assert network.common_address(mine, [["10.0.0.2/24"]], preferred="127.0.0.1") == "10.0.0.1"
    assert network.common_address(mine, [[]]) == "172.17.0.1"
    bridge = ["127.0.0.1/8", "172.17.0.1/16"]
    assert network.common_address(mine, [[*bridge, "10.0.0.2/24"]]) == "10.0.0.1"
    assert network.common_address(mine, [[*bridge, "10.0.9.2/32"]], preferred="172.17.0.1") == "10.0.0.1"
    assert network.common_address(bridge, [bridge], preferred="172.17.0.1") is None
    assert network.common_address(["127.0.0.1/8"], [["127.0.0.1/8"]]) is None
