"""Every policy on every backend: what Simulation says, the same bits on all ranks, and a state that moves."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from policies.policies import CASES, Case

SCRIPT = str(Path(__file__).parent / "scripts" / "battery.py")
LIMIT = 240.0  # a quarter of it suffices on two cores that others use, too

LARGE = [case for case in CASES if case.min_size > 3]
every_at = {
    2: pytest.mark.parametrize("case", [case for case in CASES if case.min_size <= 2], ids=str),
    3: pytest.mark.parametrize("case", [case for case in CASES if case.min_size <= 3], ids=str),
    5: pytest.mark.parametrize("case", LARGE, ids=str),
}


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Job]:
    """The job whose states the others take up."""
    directory = tmp_path_factory.mktemp("states")
    return directory, jobs.run("torchrun", "torch", 2, [SCRIPT, "save", str(directory)], LIMIT).check()


@pytest.fixture(scope="module", params=jobs.BACKENDS)
def at_2(request: pytest.FixtureRequest, on_torch: tuple[Path, jobs.Job]) -> jobs.Job:
    directory, job = on_torch
    if request.param == "torch":
        return job
    return jobs.run(jobs.NATIVE[request.param], request.param, 2, [SCRIPT, "resume", str(directory)], LIMIT).check()


def compared(backend: str, size: int, *specs: str) -> jobs.Job:
    return jobs.run(jobs.NATIVE[backend], backend, size, [SCRIPT, "compare", "-", *specs], LIMIT).check()


@pytest.fixture(scope="module", params=jobs.BACKENDS)
def at_3(request: pytest.FixtureRequest) -> jobs.Job:
    return compared(request.param, 3)


@pytest.fixture(scope="module", params=jobs.BACKENDS)
def at_5(request: pytest.FixtureRequest) -> jobs.Job:
    return compared(request.param, 5, *(case.spec for case in LARGE))


def examine(case: Case, job: jobs.Job) -> None:
    for rank, record in enumerate(job.records):
        wrong = record[case.spec]["wrong"]
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)
        assert record[case.spec]["digests"] == job.records[0][case.spec]["digests"], f"rank {rank}"


@every_at[2]
def test_the_bits_of_the_simulation_at_2_ranks(case: Case, at_2: jobs.Job) -> None:
    examine(case, at_2)


@every_at[2]
def test_a_state_of_another_backend_continues_bit_by_bit(
    case: Case, at_2: jobs.Job, on_torch: tuple[Path, jobs.Job]
) -> None:
    for mine, theirs in zip(at_2.records, on_torch[1].records, strict=True):
        assert mine[case.spec]["resumed"] == theirs[case.spec]["resumed"]


@every_at[3]
def test_the_simulation_to_rounding_at_3_ranks(case: Case, at_3: jobs.Job) -> None:
    examine(case, at_3)


@every_at[5]
def test_the_simulation_to_rounding_at_5_ranks(case: Case, at_5: jobs.Job) -> None:
    examine(case, at_5)
