"""Unmodified Horovod scripts under ``hvdbridge.run`` give the bits of the real Horovod on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest

from hvdbridge.startup.network import free_port

SCRIPTS = Path(__file__).parent / "scripts"
OPTIMIZER, MNIST, BENCHMARK = (str(SCRIPTS / f"horovod_style_{n}.py") for n in ("optimizer", "mnist", "benchmark"))
CLI = "import sys; from hvdbridge.tools import main; sys.exit(main())"


def native(*argv: str) -> list[Any]:
    """Return the records of a script at 2 ranks under the real Horovod."""
    return jobs.once("horovodrun", None, 2, argv).check().records


def ours(launcher: str, backend: str, *argv: str) -> list[Any]:
    return jobs.run(launcher, backend, 2, ["-m", "hvdbridge.run", *argv], timeout=90).check().records


@pytest.mark.parametrize(
    ("launcher", "backend"), [("torchrun", "horovod"), ("horovodrun", "mpi"), ("mpiexec", "torch")]
)
def test_the_optimizer_in_many_ways(launcher: str, backend: str) -> None:
    assert ours(launcher, backend, OPTIMIZER) == native(OPTIMIZER)


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_mnist(backend: str) -> None:
    records = ours("fork", backend, MNIST)
    assert records == native(MNIST)
    assert records[0]["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("backend", "option"),
    [("torch", "--fp16-allreduce"), ("mpi", "--fp16-allreduce"), ("horovod", "--gradient-predivide-factor=3")],
)
def test_mnist_with_options(backend: str, option: str) -> None:
    assert ours("fork", backend, MNIST, option, "--epochs=1") == native(MNIST, option, "--epochs=1")


@pytest.mark.parametrize("backend", jobs.BACKENDS)
def test_the_benchmark(backend: str) -> None:
    records = ours("fork", backend, BENCHMARK)
    assert records == native(BENCHMARK)


def test_through_horovod_run() -> None:
    """A script that starts its own ranks gets hvdbridge in them, too."""
    job = jobs.run(None, None, 2, ["-m", "hvdbridge.run", MNIST, "--num-proc=2", "--epochs=1"]).check()
    assert "results 0." in job.output
    assert job.records[0] == job.records[1]


def test_a_module_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import sys\nimport horovod, horovod.torch as hvd\nfrom horovod.common.util import split_list\n"
        "from horovod.common.exceptions import HorovodInternalError\nfrom horovod.torch.mpi_ops import Average\n"
        "assert hvd.__name__ == 'hvdbridge.torch' and hvd.Average is Average and __name__ == '__main__'\n"
        "assert hvd.HorovodInternalError is HorovodInternalError\n"
        "import horovod.runner.launch, horovod.data.data_loader_base\n"
        "from horovod.common.basics import HorovodBasics\nfrom horovod.data import AsyncDataLoaderMixin\n"
        "from horovod.torch.mpi_ops import _basics\nassert isinstance(_basics, HorovodBasics)\n"
        "assert horovod.runner.launch.run_commandline.__module__ == 'hvdbridge.torch.launch'\n"
        "assert AsyncDataLoaderMixin is horovod.data.data_loader_base.AsyncDataLoaderMixin\n"
        "try:\n    import horovod.tensorflow\nexcept ImportError as error:\n    print(error)\n"
        "hvd.init()\nprint('arguments', sys.argv[1:], horovod.__version__, hvd.size())\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{jobs.environment()['PYTHONPATH']}"}
    for argv in (["-m", "tiny"], [str(tmp_path / "tiny.py")]):
        job = jobs.run(None, None, 0, ["-c", CLI, "run", *argv, "-x", "1"], env=env).check()
        assert "arguments ['-x', '1'] 0.28.1 1" in job.output
        assert "No module named 'horovod.tensorflow' under hvdbridge.run" in job.output


@pytest.fixture
def without_horovod(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a finder that precedes hvdbridge's hides the real Horovod."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec\n"
        "def without(name, path=None, target=None):\n"
        "    return None if name.partition('.')[0] == 'horovod' else find(name, path, target)\n"
        "machinery.PathFinder.find_spec = without\n"
    )
    return {"PYTHONPATH": f"{tmp_path}:{jobs.environment()['PYTHONPATH']}"}


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "torch"), ("mpiexec", "mpi"), ("torchrun", "mpi")])
def test_where_horovod_is_not_installed(launcher: str, backend: str, without_horovod: dict[str, str]) -> None:
    job = jobs.run(launcher, backend, 2, ["-m", "hvdbridge.run", BENCHMARK], env=without_horovod).check()
    assert job.records[0] == job.records[1] == native(BENCHMARK)[0]


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_processes_that_the_script_starts(as_module: bool, without_horovod: dict[str, str], tmp_path: Path) -> None:
    """DataLoader workers import the script, and with it Horovod, under each start method of multiprocessing."""
    (tmp_path / "loads.py").write_text(
        "import horovod.torch as hvd\nimport jobs\nimport torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n"
        "        import horovod.torch.mpi_ops as ops\n"
        "        assert ops.Average is hvd.Average and not hvd.is_initialized()\n"
        "        return torch.tensor(float(index))\n"
        "if __name__ == '__main__':\n"
        "    hvd.init()\n"
        "    sums = {way: [batch.sum().item() for batch in DataLoader(Numbers(), batch_size=2, num_workers=1,\n"
        "                  multiprocessing_context=way)] for way in ('spawn', 'forkserver')}\n"
        "    jobs.record(hvd.rank(), sums)\n"
        "    hvd.shutdown()\n"
    )
    argv = ["-m", "loads"] if as_module else [str(tmp_path / "loads.py")]
    job = jobs.run("torchrun", "torch", 2, ["-m", "hvdbridge.run", *argv], env=without_horovod, timeout=120).check()
    assert job.records == [{"spawn": [1.0, 5.0], "forkserver": [1.0, 5.0]}] * 2


def test_ranks_that_the_script_spawns(without_horovod: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(
        "import os, torch\nimport horovod.torch as hvd\nimport jobs\n"
        "def train(rank):\n"
        "    os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank)}\n"
        "    hvd.init()\n"
        "    jobs.record(rank, hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum).item())\n"
        "    hvd.shutdown()\n"
        "if __name__ == '__main__':\n"
        f"    os.environ |= {{'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '{free_port()}', 'WORLD_SIZE': '2'}}\n"
        "    torch.multiprocessing.spawn(train, nprocs=2)\n"
    )
    argv = ["-m", "hvdbridge.run", str(tmp_path / "spawns.py")]
    assert jobs.run(None, "torch", 2, argv, env=without_horovod).check().records == [3.0, 3.0]


def test_what_cannot_be_run(tmp_path: Path) -> None:
    for argv, message in (([], "usage:"), (["nowhere.py"], "cannot read nowhere.py: No such file")):
        job = jobs.run(None, None, 0, ["-m", "hvdbridge.run", *argv])
        assert job.status == 2
        assert message in job.output


def test_launching_names_the_rank_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdbridge as hb\n"
        "def work(limit):\n"
        "    with hb.session():\n"
        "        import torch\n"
        "        assert hb.size() == 2 and torch.ones(2).sum() == 2\n"
        "        if hb.rank() >= limit:\n            raise ValueError('this rank has a bug')\n"
        "        return hb.rank() * 10\n"
        "if __name__ == '__main__':\n"
        "    print(hb.launch(work, (2,), np=2, backend='torch'))\n"
        "    try:\n        hb.launch(work, (1,), np=2, backend='torch')\n"
        "    except hb.RankFailed as error:\n        print('caught:', error)\n"
        "    for wrong in (dict(np=0), dict(np=2, hosts='elsewhere:2'), dict(np=2, hosts='localhost:1'),\n"
        "                  dict(np=2, hosts='localhost:many')):\n"
        "        try:\n            hb.launch(work, (2,), **wrong)\n"
        "        except (hb.ConfigurationError, hb.Unsupported) as error:\n            print('refused:', error)\n"
    )
    job = jobs.run(None, None, 0, [str(script)], real=True).check()  # forked ranks have imported torch already
    assert "[0, 10]" in job.output
    assert "caught: hb.launch: rank 1 of 2 ended with status 1" in job.output
    assert "ValueError: this rank has a bug" in job.output
    assert job.output.count("refused:") == 4
    assert "'localhost:many' in hosts='localhost:many' must be HOST or HOST:SLOTS" in job.output
