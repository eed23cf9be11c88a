"""The code blocks of docs/ that need Open MPI on two hosts (``tests/pages.py`` has the rules)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pages
import pytest
from launchers.conftest import Library
from launchers.shell import AS_ROOT
from launchers.test_pages import without_other_blocks

from benchmarks.hosts import NoHosts, hosts


@pytest.mark.parametrize("page", pages.needing("hosts", "open-mpi"), ids=pages.name)
@pytest.mark.parametrize("name", ["Open MPI 4.1", "Open MPI 5"])
def test_page(name: str, page: Path, library: Callable[[str], Library], tmp_path: Path) -> None:
    found, folder = library(name), tmp_path / "page"
    folder.mkdir()
    only = tmp_path / page.name
    only.write_text(without_other_blocks(page, {"hosts", "open-mpi"}))
    try:
        with hosts(2, host_names=("node1", "node2")) as cluster:
            for program, command in (("python", found.python), ("mpirun", found.mpiexec)):
                (cluster.folder / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
                (cluster.folder / program).chmod(0o755)
            enter = {f"node{i}": [str(cluster.folder / "ssh"), to] for i, to in enumerate(cluster.addresses, 1)}
            env = {**AS_ROOT, **found.env}
            available = {"hosts", "open-mpi"}
            pages.run(only, folder, available, [cluster.folder], env, real=True, seconds=150, enter=enter)
    except NoHosts as error:
        pytest.skip(str(error))
