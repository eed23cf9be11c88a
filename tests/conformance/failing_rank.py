"""One of two ranks of a job in which rank 1 fails; rank 0 records its error and the seconds until it.

Arguments: the fate of rank 1 (sleeps, exits; "freezes": all its threads stop, until rank 0 continues them), and the
request of rank 0: AllReduce, AllGather, "many" (all-reduces are started without a pause until one fails), or "late" (an
operation that the library does not know any more).
"""

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress

import torch
from conformance.natives import start
from jobs import record

from hvdbridge.backends.communicator import Communicator
from hvdbridge.backends.registry import load
from hvdbridge.errors import HvdbridgeError
from hvdbridge.policy.collectives import AllGather, AllReduce
from hvdbridge.supervisor import client


def flood(comm: Communicator) -> None:
    """Start thousands of all-reduces, so that the library detects the death while many are in flight."""
    in_flight = []
    while True:
        for elements in range(1, 3000):
            steps = comm.answer(AllReduce(torch.ones(elements)))
            in_flight.append((steps, next(work for work in steps if work is not None)))  # started, not waited for


def late() -> None:
    """Wait for the handle of a refused operation, as if Horovod had accepted it during its shutdown."""
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    from hvdbridge.backends.horovod.communicator import HorovodWork

    with suppress(HorovodInternalError):
        while True:
            accepted = hvd.allreduce_async(torch.ones(1), name="refused")
            with suppress(HorovodInternalError):
                hvd.synchronize(accepted)
    for handle in range(1000):
        with suppress(ValueError):  # no such handle
            if not hvd.poll(handle):
                HorovodWork(handle, "late", 60).wait()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(40, exit=True)
    client.UNWIND = 30.0  # on busy cores the library may take longer than 2 s to report the death
    backend = os.environ["HVDBRIDGE_BACKEND"]
    native = start(backend)
    comm = load(backend, "communicator").world(timeout_seconds={"sleeps": 4, "freezes": 4}.get(sys.argv[1], 60))
    other = int(comm.execute(AllGather(torch.tensor(os.getpid())))[1])
    comm.barrier()
    if comm.rank == 1:
        if sys.argv[1] == "sleeps":
            time.sleep(10)
        if sys.argv[1] == "freezes" or sys.argv[2] == "many":
            time.sleep(0.1)  # until rank 0 has started
        if sys.argv[1] == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    request = AllGather if sys.argv[2] == "AllGather" else AllReduce
    started = time.monotonic()
    try:
        if sys.argv[2] == "many":
            flood(comm)
        for _ in range(2):  # the library may still accept a first message to a dead rank
            comm.execute(request(torch.ones(10)))
    except HvdbridgeError as e:
        record(0, [type(e).__name__, str(e), time.monotonic() - started, type(e.__cause__).__name__])
    if sys.argv[2] == "late":
        started = time.monotonic()
        try:
            late()
        except Exception as e:
            record(0, [type(e).__name__, str(e), time.monotonic() - started])
    if sys.argv[1] == "freezes":
        os.kill(other, signal.SIGCONT)
    os._exit(0)
