"""The code blocks of docs/ that need Slurm, Open MPI or Intel MPI (``tests/pages.py`` has the rules)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import jobs
import pages
import pytest
from launchers.cluster import Slurm
from launchers.conftest import Library
from launchers.shell import AS_ROOT

BASH = """#!/bin/sh
export PATH="${{PATH#*:}}"
exec ip netns exec {name} unshare --uts /bin/sh -c 'hostname "$0"; exec /bin/bash "$@"' {name} "$@"
"""
"""In place of bash, in the first folder of PATH: a shell on the first node, which finds the real bash."""

SBATCH = """#!/bin/sh
test "$1" = --wait || exec {sbatch} "$@"
shift
line=$({sbatch} "$@") || exit
echo "$line"
while squeue --noheader --jobs "${{line##* }}" | grep -q .; do sleep 0.5; done
scontrol show job "${{line##* }}" | grep -q ExitCode=0:0
"""
"""sbatch, whose own ``--wait`` looks for the end of a job once in half a minute."""


@pytest.mark.parametrize("page", pages.needing("slurm"), ids=pages.name)
def test_page_of_slurm(page: Path, slurm: Slurm, tmp_path: Path) -> None:
    folder, first, second = (tmp_path / name for name in ("page", "first", "second"))
    for path in (folder, first, second):
        path.mkdir()
    (first / "bash").write_text(BASH.format(name=slurm.hosts.names[0]))
    (second / "sbatch").write_text(SBATCH.format(sbatch=shutil.which("sbatch")))
    for file in (first / "bash", second / "sbatch"):
        file.chmod(0o755)
    variables = slurm.environment(None)
    env = {name: variables[name] for name in ("SLURM_CONF", "UCX_TLS")}
    pages.run(page, folder, {"slurm"}, [first, second, slurm.hosts.folder, jobs.BIN], env, real=True, seconds=150)


@pytest.mark.parametrize("page", pages.needing("open-mpi"), ids=pages.name)
@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5"])
def test_page_of_open_mpi(name: str, page: Path, library: Callable[[str], Library], tmp_path: Path) -> None:
    run(page, library(name), "open-mpi", tmp_path)


@pytest.mark.parametrize("page", pages.needing("intel-mpi"), ids=pages.name)
def test_page_of_intel_mpi(page: Path, library: Callable[[str], Library], tmp_path: Path) -> None:
    run(page, library("Intel MPI"), "intel-mpi", tmp_path)


def run(page: Path, found: Library, need: str, tmp_path: Path) -> None:
    """Run those blocks of a page that need this library, and the files that they use, with its launcher as mpirun."""
    folder, binaries = tmp_path / "page", tmp_path / "bin"
    folder.mkdir()
    binaries.mkdir()
    (binaries / "python").write_text(f'#!/bin/sh\nexec {found.python} "$@"\n')
    (binaries / "torchrun").write_text(f'#!/bin/sh\nexec {found.python} -m torch.distributed.run "$@"\n')
    for name in ("mpirun", "mpiexec"):
        (binaries / name).write_text(f'#!/bin/sh\nexec {found.mpiexec} "$@"\n')
    for file in binaries.iterdir():
        file.chmod(0o755)
    only = tmp_path / page.name
    only.write_text(without_other_blocks(page, {need}))
    own = Path(found.mpiexec).parent  # has ompi_info
    pages.run(only, folder, {need}, [binaries, own], {**AS_ROOT, **found.env}, real=True, seconds=90)


def without_other_blocks(page: Path, needs: set[str]) -> str:
    """Return the page's text with those of its blocks that need exactly ``needs`` or write a file, at their lines."""
    lines = page.read_text().splitlines()
    kept = [""] * len(lines)
    for block in pages.blocks(page):
        if block.needs == needs or block.title:
            first, last = block.line - 2, block.line + block.text.count("\n")
            kept[first:last] = lines[first:last]
    return "\n".join(kept) + "\n"
