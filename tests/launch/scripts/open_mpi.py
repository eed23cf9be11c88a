"""wrong.py with an mpi4py that says it is built on Open MPI."""

import runpy
from pathlib import Path

from hvdbridge.backends.mpi import starter

real = starter._library()


class OpenMpi:
    def __getattr__(self, name: str) -> object:
        if name == "Get_library_version":
            return lambda: "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
        return getattr(real, name)


starter._library = lambda: OpenMpi()
runpy.run_path(str(Path(__file__).with_name("wrong.py")), run_name="__main__")
