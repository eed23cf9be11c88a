"""The Horovod backend."""

from hvdbridge.backends.registry import Backend

BACKEND = Backend(
    "Horovod", "horovod", "Run: hvdbridge install-horovod", ".communicator:HorovodCommunicator",
    ".starter:HorovodStarter", front_end="horovod",
)  # fmt: skip
