"""The command line: dispatch, errors, and what `hvdbridge doctor` concludes from what it sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from hvdbridge.config import VARIABLES
from hvdbridge.errors import BackendUnavailable
from hvdbridge.tools import COMMANDS, doctor, install_horovod, main, probe, start_checks
from hvdbridge.tools.doctor import Cell, Facts, Launcher, cells

pytestmark = pytest.mark.slow

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}

TORCH = SimpleNamespace(
    version="2.13.0+cpu",
    git="abc",
    cuda=None,
    cxx11_abi=True,
    cxx_standard=20,
    distributed=True,
    gloo=True,
    nccl=None,
    gpus=[],
)
EVERYTHING = Facts(
    python="3.11.7 (/env/bin/python)",
    system="Linux",
    cores=2,
    torch=TORCH,
    horovod=SimpleNamespace(version="0.28.1", location="/env/horovod", gloo=True, mpi=False, nccl=False),
    mpi=SimpleNamespace(mpi4py="4.1.2", implementation="MPICH Version: 5.0.2"),
    kernels=SimpleNamespace(setting="auto", failure="", file="native.so"),
    launchers={
        "torchrun": Launcher("/env/bin/torchrun"),
        "horovodrun": Launcher("/env/bin/horovodrun"),
        "mpiexec": Launcher("/env/bin/mpiexec", family="MPICH"),
    },
    interfaces={"lo": "127.0.0.1"},
    variables={"HVDBRIDGE_BACKEND": "mpi"},
)
WITHOUT_HOROVOD = replace(
    EVERYTHING,
    horovod=probe.Missing("ModuleNotFoundError: No module named 'horovod'"),
    launchers={k: v for k, v in EVERYTHING.launchers.items() if k != "horovodrun"},
)
OPEN_MPI = replace(
    EVERYTHING,
    mpi=SimpleNamespace(mpi4py="4.1.2", implementation="Open MPI v5.0.11"),
    launchers={**EVERYTHING.launchers, "mpiexec": Launcher("/usr/bin/mpiexec", family="Open MPI 5")},
)
WITHOUT_TORCH = replace(EVERYTHING, torch=probe.Missing("ModuleNotFoundError: No module named 'torch'"))


def table(facts: Facts) -> dict[tuple[str, str], Cell]:
    return {(cell.launcher, cell.backend): cell for cell in cells(facts)}


def working(facts: Facts) -> set[tuple[str, str]]:
    return {key for key, cell in table(facts).items() if cell.works}


def test_help_and_wrong_words_import_no_subcommand():
    source = (
        "import sys, hvdbridge.tools\n"
        "try: hvdbridge.tools.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*[name for name in sys.modules if name.startswith('hvdbridge.tools.')])"
    )
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert all(command in answer.stdout for command in COMMANDS)
    assert answer.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("words", [[], ["docter"], ["doctor", "--yaml"]])
def test_wrong_words_are_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: hvdbridge" in capsys.readouterr().err


def test_an_error_on_purpose_is_one_message_and_status_2(monkeypatch, capsys):
    def fail(arguments):
        raise BackendUnavailable("no compiler. Install one")

    monkeypatch.setattr(install_horovod, "run", fail)
    assert main(["install-horovod"]) == 2
    assert capsys.readouterr().err == "hvdbridge install-horovod: no compiler. Install one\n"


def test_everything_works_where_everything_is_installed():
    nine = table(EVERYTHING)
    assert len(nine) == 9
    assert all(cell.works and not cell.remedy for cell in nine.values())
    assert {k for k, cell in nine.items() if cell.how == "natively"} == {
        ("torchrun", "torch"),
        ("horovodrun", "horovod"),
        ("mpiexec", "mpi"),
    }


def test_without_horovod_its_launcher_and_its_backend_are_missing():
    assert working(WITHOUT_HOROVOD) == {(a, b) for a in ("torchrun", "mpiexec") for b in ("torch", "mpi")}
    remedies = {cell.remedy for cell in table(WITHOUT_HOROVOD).values() if not cell.works}
    assert remedies == {"hvdbridge install-horovod"}


def test_open_mpi_cannot_be_started_by_the_others():
    nine = table(OPEN_MPI)
    assert working(OPEN_MPI) == set(nine) - {("torchrun", "mpi"), ("horovodrun", "mpi")}
    cell = nine["torchrun", "mpi"]
    assert "Open MPI 5 does not speak PMI-1" in cell.how
    assert "mpiexec" in cell.remedy


def test_without_mpi4py_nothing_runs_under_mpiexec():
    facts = replace(EVERYTHING, mpi=probe.Missing("ModuleNotFoundError: No module named 'mpi4py'"))
    assert working(facts) == {(a, b) for a in ("torchrun", "horovodrun") for b in ("torch", "horovod")}
    assert table(facts)["mpiexec", "torch"].remedy == "pip install 'hvdbridge[mpi]'"
    no_launcher = replace(facts, launchers={"torchrun": Launcher("/env/bin/torchrun")})
    assert table(no_launcher)["torchrun", "mpi"].remedy == "pip install 'hvdbridge[mpich]'"


def test_an_mpi_library_that_the_variable_names_and_nobody_has(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    facts = replace(EVERYTHING, mpi=probe.ask(probe.MPI))
    assert table(facts)["mpiexec", "mpi"].remedy == "unset or correct MPI4PY_LIBMPI"


@pytest.mark.parametrize(
    ("mpiexec", "library", "works"),
    [
        ("Open MPI 5", "MPICH Version: 5.0.2", False),
        ("MPICH", "Open MPI v5.0.11, package: x", False),
        ("Open MPI 5", "Open MPI v4.1.4, package: x", False),
        ("Open MPI 4", "Open MPI v5.0.11, package: x", True),
        ("MPICH", "Intel(R) MPI Library 2021.17 for Linux* OS", True),
        ("", "MPICH Version: 5.0.2", True),
    ],
)
def test_an_mpiexec_of_another_mpi(mpiexec, library, works):
    mpi = SimpleNamespace(mpi4py="4.1.2", implementation=library)
    facts = replace(EVERYTHING, mpi=mpi, launchers={"mpiexec": Launcher("/usr/bin/mpiexec", family=mpiexec)})
    for backend in ("torch", "horovod", "mpi"):
        cell = table(facts)["mpiexec", backend]
        assert cell.works == works
        if not works:
            assert cell.how.startswith(f"mpiexec is {mpiexec}'s, which cannot start the ranks of mpi4py's ")
            assert "first on PATH" in cell.remedy


def test_an_mpiexec_of_another_mpi_first_on_the_path(monkeypatch, capsys, tmp_path):
    """The environment's mpi4py loads MPICH; the path begins with the mpiexec of a site's Open MPI."""
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["doctor", "--json"]) == 0
    found = {(c["launcher"], c["backend"]): c for c in json.loads(capsys.readouterr().out)["cells"]}
    assert [found["torchrun", backend]["works"] for backend in ("torch", "mpi")] == [True, True]
    assert found["mpiexec", "torch"]["how"] == (
        "mpiexec is Open MPI 4's, which cannot start the ranks of mpi4py's MPICH"
    )


def test_a_sites_horovod_with_mpi_alone():
    with_mpi = SimpleNamespace(version="0.28.1", location="/site", gloo=False, mpi=True, nccl=False)
    facts = replace(EVERYTHING, horovod=with_mpi)
    nine = table(facts)
    assert nine["mpiexec", "horovod"].how == nine["horovodrun", "horovod"].how == "natively"
    assert nine["horovodrun", "torch"].how == "address by an MPI broadcast"
    assert working(facts) == set(nine) - {("torchrun", "horovod")}


def test_a_horovod_with_another_mpi_than_mpi4py():
    built = SimpleNamespace(gloo=True, mpi=True, nccl=False, version="0.28.1", implementation="Open MPI v4.1.4")
    facts = replace(EVERYTHING, horovod=built)
    assert set(table(facts)) - working(facts) == {("mpiexec", "horovod"), ("horovodrun", "horovod")}
    cell = table(facts)["mpiexec", "horovod"]
    assert cell.how.startswith("Horovod was built with Open MPI 4 and mpi4py loads MPICH")
    assert "MPI4PY_LIBMPI" in cell.remedy
    same = SimpleNamespace(**vars(built) | {"implementation": EVERYTHING.mpi.implementation})
    assert working(replace(EVERYTHING, horovod=same)) == set(table(EVERYTHING))


def test_the_mpi_that_horovod_was_built_with(monkeypatch, tmp_path):
    """A package in Horovod's place loads the MPI library that mpi4py loads, as a Horovod with MPI does."""
    source = "from mpi4py import rc; rc(initialize=False, finalize=False); from mpi4py import MPI\n"
    source += "mpi_built = lambda: True\ngloo_built = nccl_built = lambda: False\n"
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = '0'\n")
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    horovod, mpi = probe.ask(probe.HOROVOD), probe.ask(probe.MPI)
    assert horovod.implementation == mpi.implementation != ""


def test_without_torch_nothing_works():
    assert not working(WITHOUT_TORCH)
    assert {cell.remedy for cell in cells(WITHOUT_TORCH)} == {"pip install torch"}


@pytest.mark.parametrize(("facts", "status"), [(WITHOUT_HOROVOD, 0), (WITHOUT_TORCH, 1)])
def test_json_is_all_there_is_on_stdout(facts, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: facts)
    assert main(["doctor", "--json"]) == status
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["cells"]) == 9
    assert answer["facts"]["variables"] == {"HVDBRIDGE_BACKEND": "mpi"}


@pytest.mark.parametrize("facts", [EVERYTHING, WITHOUT_HOROVOD, OPEN_MPI, WITHOUT_TORCH])
def test_the_report_has_every_remedy_once(facts):
    console = Console(width=100, highlight=False, markup=False)
    with console.capture() as captured:
        doctor.report(facts, cells(facts), console)
    lines = [line.strip() for line in captured.get().splitlines()]
    for remedy in {cell.remedy for cell in cells(facts)} - {""}:
        assert lines.count(remedy) == 1


def test_remedies_of_what_a_job_needs_come_before_those_of_other_backends():
    """A job with torchrun and torch needs nothing from the second list."""
    hosts = doctor.Finding("host name", "loopback", "a line in /etc/hosts", optional=True)
    iface = doctor.Finding("HVDBRIDGE_IFACE", "none such", "unset HVDBRIDGE_IFACE")
    facts = replace(WITHOUT_HOROVOD, starts=[hosts, iface])
    console = Console(width=100, highlight=False, markup=False)
    with console.capture() as captured:
        doctor.report(facts, cells(facts), console)
    needed, others = captured.get().split("Remedies:")[1].split("Only if you want the launcher or backend concerned")
    assert needed.split("\n") == ["", "  unset HVDBRIDGE_IFACE", ""]
    assert others.split("\n")[1:] == ["  hvdbridge install-horovod", "  a line in /etc/hosts", ""]


def test_variables_show_what_they_parse_to(monkeypatch):
    variables = doctor._variables({"HVDBRIDGE_DEBUG": "yes", "HVDBRIDGE_BUCKET_MB": "many", "HVDBRIDGE_X": "1"})
    assert variables["HVDBRIDGE_DEBUG"] == "True"
    assert variables["HVDBRIDGE_BUCKET_MB"].startswith("error: HVDBRIDGE_BUCKET_MB=many")
    assert variables["HVDBRIDGE_X"].startswith("error: Unknown")
    found = doctor._variables({"HVDBRIDGE_SERVICE_HOST": "10.0.0.1", "HVDBRIDGE_PORT": "tcp://10.0.0.1:80"})
    assert set(found.values()) == {"ignored: set by Kubernetes for a service"}


@pytest.mark.parametrize(
    ("environ", "what", "text", "remedy"),
    [
        ({}, "this process", "rank 0 of 1", ""),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, "MASTER_ADDR", "IPv6", ""),
        (STEP | {"SLURM_PTY_PORT": "1"}, "this process", "srun --pty", "RANK=0 WORLD_SIZE=1"),
        (STEP, "Slurm's port", "meet at ", ""),
        ({"HVDBRIDGE_IFACE": "eth77"}, "HVDBRIDGE_IFACE", "no interface of this name", "HVDBRIDGE_IFACE="),
        ({"HVDBRIDGE_PORTS": "25000-25009"}, "HVDBRIDGE_PORTS", "Gloo", "sysctl net.ipv4.ip_local_port_range"),
        ({"HVDBRIDGE_CACHE": "/proc/1/cache"}, "cache", "cannot be written", "HVDBRIDGE_CACHE="),
        ({"HVDBRIDGE_CACHE": "/tmp/cache"}, "cache", "/tmp/cache", ""),
        ({"HVDBRIDGE_PORTS": "9"}, "variables", "HVDBRIDGE_PORTS=9 must be a range", "unset"),
        (
            {"PMIX_NAMESPACE": "n", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "MPI", "does not: MPI joins the helper", "MASTER_ADDR",
        ),
    ],
)  # fmt: skip
def test_what_a_start_from_this_shell_would_meet(environ: dict[str, str], what: str, text: str, remedy: str) -> None:
    found = {finding.what: finding for finding in start_checks.findings(environ)}[what]
    assert text in found.text
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


@pytest.mark.parametrize(
    ("plugins", "library", "how"),
    [
        ("none pmi2", "MPICH Version: 5.0.2", "srun --mpi=pmi2"),
        ("none", "Intel(R) MPI Library 2021.17", "PMI-1 server in the job's helper"),
        ("none pmi2 pmix", "Open MPI v5.0.11", "srun --mpi=pmix"),
        ("none pmi2", "Open MPI v4.1.4", "Open MPI 4 needs srun --mpi=pmix, which this Slurm does not have"),
    ],
)
def test_the_rows_of_srun(
    plugins: str, library: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    listing = f"MPI plugin types are...\\n{plugins}"
    (tmp_path / "srun").write_text(f'#!/bin/sh\ntest "$1" = --mpi=list && printf "{listing}"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    srun = doctor._launcher("srun")
    assert srun == Launcher(str(tmp_path / "srun"), plugins=plugins)
    mpi = SimpleNamespace(mpi4py="4.1.2", implementation=library)
    rows = table(replace(EVERYTHING, mpi=mpi, launchers={"srun": srun}))
    assert rows["srun", "torch"].works
    assert rows["srun", "horovod"].works
    assert (rows["srun", "mpi"].how, rows["srun", "mpi"].works) == (how, "needs" not in how)


def test_an_srun_without_a_cluster_has_no_rows() -> None:
    """srun lists no plug-in where it finds no configuration."""
    facts = replace(EVERYTHING, launchers={**EVERYTHING.launchers, "srun": Launcher("/usr/bin/srun")})
    assert len(table(facts)) == 9


@pytest.mark.parametrize(
    ("library", "way", "plugins", "backend", "remedy"),
    [
        ("MPICH Version: 5.0.2", "none", "none pmi2", "torch", "srun --mpi=pmi2"),
        ("MPICH Version: 5.0.2", "pmix", "none pmi2 pmix", "mpi", ""),
        ("Open MPI v5.0.11", "pmix_v4", "none pmi2 pmix", "mpi", ""),
        ("Open MPI v5.0.11", "pmi2", "none pmi2 pmix", "mpi", "srun --mpi=pmix"),
        ("Open MPI v5.0.11", "none", "none pmi2", "torch", "mpirun of Open MPI 5 within the allocation"),
        (None, "pmi2", "none pmi2", "torch", ""),
    ],
)
def test_what_srun_would_take(
    library: str | None, way: str, plugins: str, backend: str, remedy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    outputs = {"srun": f"MPI plugin types are... {plugins}", "scontrol": f"MpiDefault              = {way}"}
    for name, output in outputs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{output}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = SimpleNamespace(implementation=library) if library else probe.Missing("no mpi4py")
    monkeypatch.setattr(probe, "ask", {probe.MPI: answer}.get)
    found = {finding.what: finding for finding in start_checks.findings({})}["srun"]
    assert found.text.startswith(f"Slurm's MpiDefault is {way}: srun python train.py takes the {backend} backend")
    assert found.remedy.startswith(remedy)
    assert bool(remedy) == bool(found.remedy)


def test_a_child_does_not_take_itself_for_a_rank(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("PMI_RANK", "1")
    answer = probe.ask("import os; answer = dict(seen=[k for k in os.environ if k.endswith('_RANK')])")
    assert answer == SimpleNamespace(seen=[])


def test_a_child_that_prints_more_than_its_answer(capfd):
    source = "import atexit; atexit.register(print, 'bye'); print('loading', end='; '); answer = dict(sum=2)"
    assert probe.ask(source) == SimpleNamespace(sum=2)
    assert probe.ask("raise SystemExit") == probe.Missing("it ended without an answer")


def test_without_a_gpu_there_is_nothing_to_compare(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["doctor", "--gpu"]) == 1
    assert capsys.readouterr().out == "torch sees no GPU here\n"
    assert main(["doctor", "--gpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"gpus": {}}


def test_variables_are_listed_with_their_meanings(capsys):
    assert main(["doctor", "--variables"]) == 0
    text = capsys.readouterr().out
    assert "HVDBRIDGE_STALL_SECONDS\n    a number of seconds (default: 30)\n    Time after which" in text
    assert main(["doctor", "--variables", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == [f"HVDBRIDGE_{name}" for name in VARIABLES]
    assert answer["HVDBRIDGE_PORTS"]["meaning"] == VARIABLES["PORTS"].meaning


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "C, for this processor"),
        ({"CC": "no-such-compiler"}, "several times slower: no compiled kernels (FileNotFoundError: [Errno 2]"),
        ({"CC": "false"}, "several times slower: no compiled kernels (CalledProcessError: Command"),
        ({"CC": "false", "HVDBRIDGE_KERNELS": "native"}, "an error: no compiled kernels (CalledProcessError: Command"),
        ({"CC": "false", "HVDBRIDGE_KERNELS": "torch"}, "torch's operations (HVDBRIDGE_KERNELS=torch)"),
        ({"HVDBRIDGE_KERNELS": "fast"}, "no (hvdbridge.errors.ConfigurationError: HVDBRIDGE_KERNELS=fast"),
    ],
)
def test_what_computes_on_the_cpu(variables, found, monkeypatch, tmp_path):
    for name, value in {"HVDBRIDGE_CACHE": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    facts = replace(EVERYTHING, kernels=probe.ask(probe.KERNELS))
    console = Console(width=300, highlight=False, markup=False)
    with console.capture() as captured:
        doctor.report(facts, cells(facts), console)
    assert found in captured.get()
    remedy = "install a C compiler, or name one in CC: compression takes a fraction of the time"
    assert (remedy in captured.get()) == ("no compiled kernels" in found)


def test_no_directory_for_the_kernels(monkeypatch, tmp_path):
    """The remedy is another directory where each one of this machine belongs to someone else."""
    source = "import os; os.getuid = lambda: 12345\n"  # so that the temporary directory below is another user's
    (tmp_path / "hvdbridge-12345").mkdir()
    monkeypatch.setenv("HVDBRIDGE_CACHE", "/proc/cache")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    facts = replace(EVERYTHING, kernels=probe.ask(source + probe.KERNELS))
    console = Console(width=300, highlight=False, markup=False)
    with console.capture() as captured:
        doctor.report(facts, cells(facts), console)
    assert "belongs to another user" in captured.get()
    assert "\n  set HVDBRIDGE_CACHE to a directory of this node: compression takes" in captured.get()
    assert "install a C compiler" not in captured.get()
