"""Every policy gives on every backend the results of Simulation, equal bits on all ranks, and a portable state."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from policies.policies import CASES, OF_FAMILY, Case

SCRIPT = str(Path(__file__).parent / "scripts" / "battery.py")
LIMIT = 240.0  # allows for busy cores

LARGE = [case for case in CASES if case.min_size > 3]
OF_THREE = [case for case in OF_FAMILY if case.min_size <= 3]
AT_3 = {"torch": OF_THREE, "horovod": OF_THREE, "mpi": [case for case in CASES if case.min_size <= 3]}
"""All policies on one backend; one of each family on the others, which add three numbers in orders of their own."""


def states() -> str:
    """Return the folder where the torch job saves states in mid-training, which jobs on other backends resume."""
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
every_at_2 = pytest.mark.parametrize("case", [case for case in CASES if case.min_size <= 2], ids=str)


@every_at_2
@every_backend
def test_the_bits_of_the_simulation_at_2_ranks(case: Case, backend: str) -> None:
    examine(case, at_2(backend))


@every_at_2
@every_backend
def test_a_state_of_another_backend_continues_bit_by_bit(case: Case, backend: str) -> None:
    for own, expected in zip(at_2(backend).records, at_2("torch").records, strict=True):
        assert own[case.spec]["resumed"] == expected[case.spec]["resumed"]


@pytest.mark.parametrize(("backend", "case"), [(backend, case) for backend in AT_3 for case in AT_3[backend]], ids=str)
def test_the_simulation_to_rounding_at_3_ranks(backend: str, case: Case) -> None:
    examine(case, compared(backend, 3, *(case.spec for case in AT_3[backend])))


@pytest.mark.parametrize("case", LARGE, ids=str)
@every_backend
def test_the_simulation_to_rounding_at_5_ranks(case: Case, backend: str) -> None:
    examine(case, compared(backend, 5, *(case.spec for case in LARGE)))
