"""The MPI backend, through mpi4py."""

from hvdbridge.backends.registry import Backend

BACKEND = Backend(
    "mpi4py", "mpi4py", "Run: pip install 'hvdbridge[mpich]' (for a site's own MPI: 'hvdbridge[mpi]')",
    ".communicator:MpiCommunicator", ".starter:MpiStarter", ".communicator:MpiMessages",
)  # fmt: skip
