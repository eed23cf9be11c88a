"""The counterpart of ``horovod.runner.launch``: hvdbridge has no horovodrun, and raises an error with a remedy."""

from __future__ import annotations

from typing import NoReturn

from hvdbridge.errors import Unsupported


def run_commandline() -> NoReturn:
    """Refuse the command ``horovodrun``.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(
        "horovod.runner.launch.run_commandline() is the command horovodrun, which hvdbridge does not replace. "
        "Start the script by `torchrun --nproc-per-node N -m hvdbridge.run script.py` or "
        "`mpiexec -n N python -m hvdbridge.run script.py`; within Python, call horovod.run(func, np=N)."
    )
