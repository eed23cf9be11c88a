"""Bridges: torch's hooks on every backend, policies as hooks of DDP and FSDP2, DDP's signature, compressions."""

from __future__ import annotations

import re
from pathlib import Path

import jobs
import pytest

SCRIPTS = Path(__file__).parent / "scripts"
HOOKS = str(SCRIPTS / "foreign_hooks.py")
BRIDGES = str(SCRIPTS / "bridges.py")
FSDP = str(SCRIPTS / "fsdp.py")

AS_IN_DDP = [
    "allreduce", "fp16", "power", "power, cold", "power, stacked", "fp16 of power", "fp16 of allreduce",
    "noop", "local SGD", "local SGD by host", "own", "own, regrouped",
]  # fmt: skip
BATCHED = ["batched power", "batched power of rank 3", "fp16 of batched power"]
AS_IN_ONE_BUCKET = ["bf16", "bf16 of allreduce", "per tensor", "per channel", *BATCHED]
"""Hooks that DDP cannot run on Gloo: it refuses bfloat16, the quantising hooks expect NCCL's futures, and batched
PowerSGD fails. The script also compares the latter with an implementation in one process."""


def ddp() -> list[dict[str, str]]:
    """Return the records of torch's own DDP with one bucket."""
    return jobs.once("fork", None, 2, [HOOKS, "plain"]).check().records


def one_bucket() -> list[dict[str, str]]:
    return jobs.once("fork", "torch", 2, [HOOKS, "one", *AS_IN_ONE_BUCKET]).check().records


def hooked(backend: str) -> list[dict[str, str]]:
    """Return the records of the bridge: elementwise hooks have at least eight buckets, the others one."""
    return jobs.once("fork", backend, 2, [HOOKS], timeout=120).check().records


@pytest.mark.parametrize("hook", AS_IN_DDP)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_hook_is_that_of_ddp_with_one_bucket(hook: str, backend: str) -> None:
    found = hooked(backend)
    assert re.fullmatch("[0-9a-f]{16}", found[0][hook]), found[0][hook]
    assert [rank[hook] for rank in found] == [rank[hook] for rank in ddp()]


@pytest.mark.parametrize("hook", AS_IN_ONE_BUCKET)
@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_a_hook_is_that_in_one_bucket(hook: str, backend: str) -> None:
    found = hooked(backend)
    assert re.fullmatch("[0-9a-f]{16}", found[0][hook]), found[0][hook]
    assert [rank[hook] for rank in found] == [rank[hook] for rank in one_bucket()]


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_batched_power_sgd_by_bucket(backend: str) -> None:
    """Each of ten buckets has its own matrix; the script compares with an implementation in one process."""
    first, second = (rank["batched power by bucket"] for rank in hooked(backend))
    assert re.fullmatch("[0-9a-f]{16}", first), first
    assert first == second


@pytest.mark.parametrize("hook", BATCHED)
def test_torch_alone_cannot_run_batched_power_sgd(hook: str) -> None:
    """If this fails, torch has fixed the hook, which then belongs to AS_IN_DDP."""
    assert [rank[hook] for rank in ddp()] == ["AssertionError in _orthogonalize"] * 2


def test_the_default_group_of_torch_is_replaced() -> None:
    case = "allreduce of WORLD"
    records = jobs.run("fork", "torch", 2, [HOOKS, case, "allreduce"]).check().records
    for rank in records:
        assert rank[case] == rank["allreduce"]


def bridged(backend: str) -> list[dict[str, str]]:
    return jobs.once("fork", backend, 2, [BRIDGES], timeout=120).check().records


@pytest.mark.parametrize("backend", ["horovod", "mpi"])
def test_ddp_signature_and_compressions(backend: str) -> None:
    """The script's comparisons with DDP and Horovod pass, and give the same bits on all backends."""
    records, on_torch = bridged(backend), bridged("torch")
    for rank in records:
        for scenario, result in rank.items():
            assert "Traceback" not in result, result
            assert result == on_torch[0][scenario], scenario
    assert records[0].keys() == {name for name in on_torch[0] if not name.startswith("hook_")}


def test_policies_as_hooks() -> None:
    for rank in bridged("torch"):
        for result in rank.values():
            assert "Traceback" not in result, result


def test_a_hook_joins_what_the_script_has_started() -> None:
    for rank in jobs.run("fork", None, 2, [BRIDGES, "late"]).check().records:
        assert len(rank) == 10
        for scenario, result in rank.items():
            assert result == bridged("torch")[0][scenario], result


def fsdp() -> list[dict[str, str]]:
    """Return the records of a job with two shards and two replicas."""
    return jobs.once("fork", "torch", 4, [FSDP], timeout=180).check().records


def test_policies_between_the_replicas_of_fsdp() -> None:
    """The script's comparisons pass: with native HSDP, by name, between replicas, after a save and a load."""
    found = fsdp()
    for result in found[0].values():
        assert "Traceback" not in result, result
    assert len(found[0]) == 7
    assert all(rank == found[0] for rank in found)


@pytest.mark.parametrize(("backend", "options"), [(None, ["late"]), ("mpi", [])], ids=["late", "mpi"])
def test_fsdp_with_whatever_runs(backend: str | None, options: list[str]) -> None:
    """FSDP works if the script started torch itself, and if the traffic between replicas goes through MPI."""
    names = ["mean_is_hsdp", "state_goes_on", "weights_of_replicas"]
    for rank in jobs.run("fork", backend, 4, [FSDP, *options, *names], timeout=120).check().records:
        assert rank == {name: fsdp()[0][name] for name in names}
