"""Jobs of a real Slurm: srun with every backend and kind of PMI, batch scripts, terminals, signals and limits."""

from __future__ import annotations

import re
import time
from pathlib import Path

import jobs
import pytest
from launchers.cluster import NoCluster, Slurm, cluster
from launchers.shell import PLACES, TRAINS, check, last_error

from benchmarks.hosts import NoHosts

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = Path(__file__).parents[1] / "launch" / "scripts"
UNEVEN = [0, 0, 1]
"""The node of each of three tasks on two nodes."""


@pytest.mark.parametrize("pmi", ["none", "pmi2", "pmix"])
@pytest.mark.parametrize("backend", ["torch", "horovod", "mpi"])
def test_srun_on_two_nodes(backend: str, pmi: str, slurm: Slurm) -> None:
    """Three tasks, or one on each node. MPICH joins the helper; other libraries are in test_mpi.py."""
    nodes = UNEVEN if pmi == "none" else [0, 1]
    size = len(nodes)
    check(slurm.run(f"srun --mpi={pmi} -N 2 -n {size} python {TRAINS}", backend, size), backend, "srun", nodes)


@pytest.mark.parametrize(("pmi", "chosen"), [("none", "torch"), ("pmi2", "mpi"), ("pmix", "mpi")])
def test_the_choice_of_auto(pmi: str, chosen: str, slurm: Slurm) -> None:
    job = slurm.run(f"srun --mpi={pmi} -n 2 python {TRAINS}", None, 2, HVDBRIDGE_LOG_LEVEL="INFO")
    check(job, chosen, "srun")
    assert f"backend {chosen}: auto under srun" in job.output


def test_four_tasks_on_one_node(slurm: Slurm) -> None:
    check(slurm.run(f"srun -N 1 -n 4 python {TRAINS}", "torch", 4), "torch", "srun")


INSIDE = {
    "torchrun": "srun --ntasks 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
    "--rdzv-endpoint $(scontrol show hostnames | head -n 1):29500",
    "horovodrun": "horovodrun -np 4 -H $(scontrol show hostnames | sed s/$/:2/ | paste -sd ,) python",
    "mpiexec": "mpiexec -n 4 -ppn 2 python",
}


@pytest.mark.parametrize(
    ("launcher", "chosen"), [("torchrun", "torch"), ("horovodrun", "horovod"), ("mpiexec", "mpi")]
)
def test_a_launcher_in_a_batch_script(launcher: str, chosen: str, slurm: Slurm) -> None:
    """mpiexec of MPICH starts its proxies by srun; their variables do not make srun the launcher."""
    job = slurm.batch(f"{INSIDE[launcher]} {TRAINS}", "-N 2 --ntasks-per-node 2", None, 4)
    check(job, chosen, launcher, [0, 0, 1, 1])


def test_srun_in_a_batch_script(slurm: Slurm) -> None:
    job = slurm.batch(f"srun python {TRAINS}", "-N 2 -n 3", "horovod", 3)
    check(job, "horovod", "srun", UNEVEN)


def test_one_process_in_a_batch_script(slurm: Slurm) -> None:
    """The variables of the batch shell, for four tasks, do not make a launcher."""
    job = slurm.batch(f"python {TRAINS}", "-n 4", None, 1)
    check(job, "torch", "none")
    assert "Put srun before the command" not in job.output


def test_one_process_in_a_shell_of_salloc(slurm: Slurm) -> None:
    job = slurm.run(f"salloc --quiet -n 4 python {TRAINS}", None, 1)
    check(job, "torch", "none")
    assert "has 4 tasks. Put srun before the command" in job.output


def test_doctor_lists_what_srun_would_do(slurm: Slurm) -> None:
    job = slurm.run("hvdbridge doctor", None)
    assert re.search(r"srun +. mpi +. works +. srun --mpi=pmi2", job.output), job.output
    assert re.search(r"srun +. torch +. works", job.output), job.output


def typed(slurm: Slurm, line: str, size: int, **env: str) -> jobs.Job:
    """Type a line in the terminal of a step of four tasks."""
    terminal = 'script --quiet --command "srun -n 4 --pty bash --norc" /dev/null'
    return slurm.run(f"echo '{line}; exit $?' | {terminal}", None, size, **env)


def test_python_in_the_terminal_of_a_step(slurm: Slurm) -> None:
    """It is refused at once, with the step's number: the shells of the other tasks have ended."""
    job = typed(slurm, f"python {PLACES}", 1)
    assert job.records == [None]
    assert job.seconds < 45
    text = last_error(job.output, "RendezvousError")
    assert text.startswith("this is one process in a terminal of step ")
    assert "srun --pty" in text
    for remedy in ("srun --overlap -n 4", "torchrun or SLURM_OVERLAP=1 mpiexec", "RANK=0 WORLD_SIZE=1"):
        assert remedy in text


@pytest.mark.parametrize(
    ("line", "size", "launcher"),
    [
        ("RANK=0 WORLD_SIZE=1 python", 1, "bare"),
        ("srun --overlap -n 2 python", 2, "srun"),
        ("torchrun --standalone --nproc-per-node 2", 2, "torchrun"),
        ("SLURM_OVERLAP=1 mpiexec -n 2 python", 2, "mpiexec"),
    ],
)
def test_what_works_in_the_terminal_of_a_step(line: str, size: int, launcher: str, slurm: Slurm) -> None:
    check(typed(slurm, f"{line} {TRAINS}", size), "mpi" if launcher == "mpiexec" else "torch", launcher)


@pytest.mark.parametrize("backend", ["torch", "horovod", "mpi"])
def test_steps_of_one_job_at_a_time(backend: str, slurm: Slurm) -> None:
    """Each step meets at a port of its own."""
    step = f"mkdir s$i; JOB_RECORDS=$PWD/s$i srun --overlap -n 2 python {TRAINS} & pids+=($!)"
    lines = f"for i in 1 2; do {step}; done; for p in ${{pids[@]}}; do wait $p || exit 1; done; cp s2/*.json ."
    check(slurm.batch(lines, "-n 2", backend, 2), backend, "srun")


def test_a_port_that_slurm_reserved() -> None:
    try:
        with cluster(1, "MpiParams=ports=12000-12999") as slurm:
            job = slurm.run(f"srun --resv-ports=1 -n 2 python {LAUNCH / 'ports.py'}", "torch", 2).check()
    except (NoCluster, NoHosts) as error:
        pytest.skip(str(error))
    assert any(12000 <= port <= 12999 for port in job.records[0]["own"])


def test_a_rank_that_fails(slurm: Slurm) -> None:
    """srun waits for the other tasks; hvdbridge ends them."""
    command = f"srun -N 2 -n 3 python {LAUNCH / 'fault.py'} raise start"
    job = slurm.run(command, "torch", 3, timeout=60, CULPRIT="2")
    assert job.status == 1
    assert "this rank has a bug" in job.output
    assert "rank 2" in job.output


@pytest.mark.parametrize("backend", ["torch", "horovod", "mpi"])
def test_scancel(backend: str, slurm: Slurm) -> None:
    """All processes of both nodes are gone within seconds. ``Slurm.run`` checks that nothing is left."""
    lines = (
        f"job=$(sbatch --parsable -N 2 -n 3 -o j.out --wrap 'srun python {SCRIPTS / 'until_stopped.py'}'); "
        "until [ -e 0.json ] && [ -e 1.json ] && [ -e 2.json ]; do sleep 0.2; done; "
        "scancel $job; for i in $(seq 100); do "
        "kill -0 $(cat 0.json) || kill -0 $(cat 1.json) || kill -0 $(cat 2.json) || exit 0; sleep 0.1; done; exit 7"
    )
    job = slurm.run(lines, backend, 3, timeout=60)
    assert job.status == 0, job.output


@pytest.mark.parametrize(
    ("name", "line", "status"),
    [
        ("TERM", "torchrun --standalone --nproc-per-node 2", 1),
        ("USR1", "mpiexec -n 2 -ppn 1 python", 0),
        ("TERM", "horovodrun -np 2 -H $(scontrol show hostnames | sed s/$/:1/ | paste -sd ,) python", 0),
    ],
)
def test_a_signal_to_the_launcher_alone(name: str, line: str, status: int, slurm: Slurm) -> None:
    """``--signal=B:...`` where only the batch shell gets it (proctrack/cgroup), in whose place the launcher runs."""
    send = f"(until [ -e 0.json ] && [ -e 1.json ]; do sleep 0.2; done; kill -{name} $$) &"
    job = slurm.batch(f"{send}\nexec {line} {SCRIPTS / 'until_stopped.py'}", "-N 2 --ntasks-per-node 2", None, 2)
    assert job.status == status, job.output
    assert all(isinstance(seen, list) for seen in job.records), job.output
    assert job.records[0] == job.records[1]


def test_signals_and_the_time_limit(slurm: Slurm) -> None:
    """``--signal`` and the limit's SIGTERM stop all ranks of a job after the same step.

    torchrun passes SIGTERM on, and its own status is 1 then. Slurm's shortest limit is one minute. It looks every half
    minute, so the signal comes up to a minute early.
    """
    folder = "d=$PWD/$0; mkdir $d; cd $d; JOB_RECORDS=$d sbatch --wait -o j.out"
    script = SCRIPTS / "until_stopped.py"
    step = INSIDE["torchrun"].replace("per-node 2", "per-node 1").replace("$", r"\$")
    status = "echo torchrun: $?"
    lines = (
        f"bash -c '{folder} -t 1 --signal=USR1@1 -N 2 -n 3 --wrap \"srun python {script}\"' usr1 & "
        f"bash -c '{folder} -t 1 -N 2 -n 2 --wrap \"exec srun python {script}\"' term & "
        f"bash -c '{folder} -t 1 --signal=TERM@1 -N 2 -n 2 --wrap \"{step} {script}\"; {status}' torchrun & "
        "wait; cat */j.out; cp usr1/0.json 0.json; cp usr1/1.json 1.json; cp usr1/2.json 2.json; "
        "cp term/0.json 3.json; cp term/1.json 4.json; cp torchrun/0.json 5.json; cp torchrun/1.json 6.json"
    )
    started = time.monotonic()
    job = slurm.run(lines, "torch", 7, timeout=150)
    job.check()
    assert all(isinstance(seen, list) for seen in job.records), job.output
    for ranks in (job.records[:3], job.records[3:5], job.records[5:]):
        assert len({str(seen) for seen in ranks}) == 1
    assert "DUE TO TIME LIMIT" in job.output
    assert "torchrun: 1" in job.output
    assert time.monotonic() - started < 120
