"""Every policy on every backend: what Simulation says, the same bits on all ranks, and a state that moves."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from policies.policies import CASES, OF_FAMILY, Case

SCRIPT = str(Path(__file__).parent / "scripts" / "battery.py")
LIMIT = 240.0  # a quarter of it suffices on two cores that others use, too

LARGE = [case for case in CASES if case.min_size > 3]
every_at = {
    2: pytest.mark.parametrize("case", [case for case in CASES if case.min_size <= 2], ids=str),
    3: pytest.mark.parametrize(
        ("backend", "case"),
        [
            (backend, case)
            for backend in jobs.BACKENDS
            for case in (CASES if backend == "torch" else OF_FAMILY)
            if case.min_size <= 3
        ],
        ids=str,
    ),
    5: pytest.mark.parametrize("case", LARGE, ids=str),
}


def states() -> str:
    """Where the job on torch leaves states in the middle of training, for the others to resume."""
    return str(jobs.folder() / "states")


def at_2(backend: str) -> jobs.Job:
    saved = jobs.once("fork", "torch", 2, [SCRIPT, "save", states()], LIMIT).check()
    return saved if backend == "torch" else jobs.once("fork", backend, 2, [SCRIPT, "resume", states()], LIMIT).check()


def compared(backend: str, size: int, *specs: str) -> jobs.Job:
    return jobs.once("fork", backend, size, [SCRIPT, "compare", "-", *specs], LIMIT).check()


def examine(case: Case, job: jobs.Job) -> None:
    for rank, record in enumerate(job.records):
        wrong = record[case.spec]["wrong"]
        assert not wrong, f"rank {rank}: " + "\n".join(wrong)
        assert record[case.spec]["digests"] == job.records[0][case.spec]["digests"], f"rank {rank}"


every_backend = pytest.mark.parametrize("backend", jobs.BACKENDS)


@every_at[2]
@every_backend
def test_the_bits_of_the_simulation_at_2_ranks(case: Case, backend: str) -> None:
    examine(case, at_2(backend))


@every_at[2]
@every_backend
def test_a_state_of_another_backend_continues_bit_by_bit(case: Case, backend: str) -> None:
    for mine, theirs in zip(at_2(backend).records, at_2("torch").records, strict=True):
        assert mine[case.spec]["resumed"] == theirs[case.spec]["resumed"]


@every_at[3]
def test_the_simulation_to_rounding_at_3_ranks(case: Case, backend: str) -> None:
    """On the other backends, whose sums of three numbers are the libraries' own, one policy of each family."""
    specs = [] if backend == "torch" else [case.spec for case in OF_FAMILY if case.min_size <= 3]
    examine(case, compared(backend, 3, *specs))


@every_at[5]
@every_backend
def test_the_simulation_to_rounding_at_5_ranks(case: Case, backend: str) -> None:
    examine(case, compared(backend, 5, *(case.spec for case in LARGE)))
