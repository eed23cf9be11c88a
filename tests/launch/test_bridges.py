"""Bridges: every hook of torch on every backend, policies as hooks of DDP and FSDP2, DDP's signature, compressions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jobs
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
HOOKS = str(SCRIPTS / "foreign_hooks.py")
BRIDGES = str(SCRIPTS / "bridges.py")
FSDP = str(SCRIPTS / "fsdp.py")

AS_IN_DDP = [
    "allreduce", "fp16", "power", "power, cold", "power, stacked", "fp16 of power", "fp16 of allreduce",
    "noop", "local SGD", "local SGD by host", "own",
]  # fmt: skip
BATCHED = ["batched power", "batched power of rank 3", "fp16 of batched power"]
AS_IN_ONE_BUCKET = ["bf16", "bf16 of allreduce", "per tensor", "per channel", *BATCHED]
"""What DDP does not run on Gloo at all: it refuses bfloat16, the quantising hooks expect NCCL's futures, and batched
PowerSGD fails by itself. The script compares the latter with an implementation in one process, too."""


@pytest.fixture(scope="module")
def ddp() -> list[dict[str, str]]:
    """torch's own DDP with one bucket."""
    return jobs.run("torchrun", None, 2, [HOOKS, "plain"]).check().records


@pytest.fixture(scope="module")
def one_bucket() -> list[dict[str, str]]:
    return jobs.run("torchrun", "torch", 2, [HOOKS, "one", *AS_IN_ONE_BUCKET]).check().records


@pytest.fixture(scope="module", params=jobs.BACKENDS)
def hooked(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Through the bridge: elementwise hooks in eight buckets or more, the others in one, as the script asserts."""
    return jobs.run(jobs.NATIVE[request.param], request.param, 2, [HOOKS], timeout=120).check().records


@pytest.mark.parametrize("hook", AS_IN_DDP)
def test_a_hook_is_that_of_ddp_with_one_bucket(
    hook: str, ddp: list[dict[str, str]], hooked: list[dict[str, str]]
) -> None:
    assert re.fullmatch("[0-9a-f]{16}", hooked[0][hook]), hooked[0][hook]
    assert [rank[hook] for rank in hooked] == [rank[hook] for rank in ddp]


@pytest.mark.parametrize("hook", AS_IN_ONE_BUCKET)
def test_a_hook_is_that_in_one_bucket(
    hook: str, one_bucket: list[dict[str, str]], hooked: list[dict[str, str]]
) -> None:
    assert re.fullmatch("[0-9a-f]{16}", hooked[0][hook]), hooked[0][hook]
    assert [rank[hook] for rank in hooked] == [rank[hook] for rank in one_bucket]


def test_batched_power_sgd_by_bucket(hooked: list[dict[str, str]]) -> None:
    """Ten buckets, each with a matrix of its own: the script compares with an implementation in one process."""
    first, second = (rank["batched power by bucket"] for rank in hooked)
    assert re.fullmatch("[0-9a-f]{16}", first), first
    assert first == second


@pytest.mark.parametrize("hook", BATCHED)
def test_torch_alone_cannot_run_batched_power_sgd(hook: str, ddp: list[dict[str, str]]) -> None:
    """Should this fail, torch is mended: the hook belongs to AS_IN_DDP then."""
    assert [rank[hook] for rank in ddp] == ["AssertionError in _orthogonalize"] * 2


def test_the_default_group_of_torch_is_replaced() -> None:
    case = "allreduce of WORLD"
    records = jobs.run("torchrun", "torch", 2, [HOOKS, case, "allreduce"]).check().records
    for rank in records:
        assert rank[case] == rank["allreduce"]


@pytest.fixture(scope="module")
def on_torch() -> list[dict[str, str]]:
    return jobs.run("torchrun", "torch", 2, [BRIDGES], timeout=120).check().records


@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_ddp_signature_and_compressions(backend: str, on_torch: list[dict[str, str]]) -> None:
    """What the script itself compares with DDP, by hand, or with Horovod; and the same bits on all backends."""
    records: list[dict[str, Any]] = jobs.run(jobs.NATIVE[backend], backend, 2, [BRIDGES], timeout=120).check().records
    for rank in records:
        for scenario, result in rank.items():
            assert "Traceback" not in result, result
            assert result == on_torch[0][scenario], scenario
    assert records[0].keys() == {name for name in on_torch[0] if not name.startswith("hook_")}


def test_policies_as_hooks(on_torch: list[dict[str, str]]) -> None:
    for rank in on_torch:
        for result in rank.values():
            assert "Traceback" not in result, result


def test_a_hook_joins_what_the_script_has_started(on_torch: list[dict[str, str]]) -> None:
    for rank in jobs.run("torchrun", None, 2, [BRIDGES, "late"]).check().records:
        assert len(rank) == 9
        for scenario, result in rank.items():
            assert result == on_torch[0][scenario], result


@pytest.fixture(scope="module")
def fsdp() -> list[dict[str, str]]:
    """Two shards, two replicas."""
    return jobs.run("torchrun", "torch", 4, [FSDP], timeout=180).check().records


def test_policies_between_the_replicas_of_fsdp(fsdp: list[dict[str, str]]) -> None:
    """What the script itself compares: with native HSDP, by name, between replicas, after a save and a load."""
    for result in fsdp[0].values():
        assert "Traceback" not in result, result
    assert len(fsdp[0]) == 7
    assert all(rank == fsdp[0] for rank in fsdp)


@pytest.mark.parametrize(
    ("launcher", "backend", "options"), [("torchrun", None, ["late"]), ("mpiexec", "mpi", [])], ids=["late", "mpi"]
)
def test_fsdp_with_whatever_runs(
    launcher: str, backend: str | None, options: list[str], fsdp: list[dict[str, str]]
) -> None:
    """hvdbridge joins what the script has started; or the replicas' traffic is MPI's, and the shards' FSDP's own."""
    names = ["mean_is_hsdp", "state_goes_on", "weights_of_replicas"]
    records = jobs.run(launcher, backend, 4, [FSDP, *options, *names], timeout=120).check().records
    for rank in records:
        assert rank == {name: fsdp[0][name] for name in names}
