"""One of two ranks of a job in which rank 1 fails; rank 0 records what it was told, and when.

Arguments: rank 1's fate (sleeps, exits), and what rank 0 asks for (AllReduce, AllGather, or "many" all-reduces under
way at once, begun without a pause until one fails).
"""

import faulthandler
import os
import sys
import time

import torch
from conformance.natives import start
from jobs import record

from hvdbridge.collectives import AllGather, AllReduce
from hvdbridge.communicators import load
from hvdbridge.communicators.base import Communicator
from hvdbridge.errors import HvdbridgeError


def flood(comm: Communicator) -> None:
    """Thousands under way, so that the library is told of the death while it has many and is given more."""
    under_way = []
    while True:
        for elements in range(1, 3000):
            steps = comm.answer(AllReduce(torch.ones(elements)))
            under_way.append((steps, next(work for work in steps if work is not None)))  # begun, not waited for


if __name__ == "__main__":
    faulthandler.dump_traceback_later(40, exit=True)
    backend = os.environ["HVDBRIDGE_BACKEND"]
    native = start(backend)
    comm = load(backend).world(timeout_seconds=1 if sys.argv[1] == "sleeps" else 60)
    comm.barrier()
    if comm.rank == 1:
        if sys.argv[1] == "sleeps":
            time.sleep(4)
        if sys.argv[2] == "many":
            time.sleep(0.1)
        os._exit(0)
    request = AllGather if sys.argv[2] == "AllGather" else AllReduce
    started = time.monotonic()
    try:
        if sys.argv[2] == "many":
            flood(comm)
        for _ in range(2):  # what is sent to a rank that died may still be taken from us
            comm.execute(request(torch.ones(10)))
    except HvdbridgeError as e:
        record(0, [type(e).__name__, str(e), time.monotonic() - started, type(e.__cause__).__name__])
    os._exit(0)
