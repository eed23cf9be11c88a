"""One way in which operations do not come together, named by the first argument; each rank records what it is told."""

from __future__ import annotations

import os
import signal
import sys
import time

import jobs
import torch

import hvdbridge.torch as hvd


def told(call: object) -> None:
    """Record the error that an operation ends with, and after how long."""
    since = time.monotonic()
    try:
        call()  # type: ignore[operator]
    except hvd.HorovodInternalError as error:
        jobs.record(hvd.rank(), [str(error), time.monotonic() - since])
        return
    raise AssertionError("the operation should have failed")


def main(way: str) -> None:
    if way == "optimizer":  # before the limits hold: torch imports its compiler now, on busy cores for seconds
        m = torch.nn.Linear(3, 2)
        sgd = torch.optim.SGD(m.parameters(), lr=0.1)
    hvd.init()
    rank = hvd.rank()
    hvd.allreduce(torch.ones(2))
    lonely = lambda: hvd.allreduce(torch.ones(2), name="lonely")  # noqa: E731
    if way == "stall":  # rank 1 comes when it is over
        if rank == 1:
            time.sleep(5.0)
        told(lonely)
        told(lambda: hvd.broadcast(torch.ones(1), 0, name="later"))
        hvd.shutdown()
    elif way == "order":
        told(lonely if rank == 0 else lambda: hvd.allgather(torch.ones(2), name="other"))
        hvd.shutdown()
    elif way == "join":
        if rank == 1:
            time.sleep(5.0)
        told(hvd.join if rank == 0 else lonely)
        hvd.shutdown()
    elif way == "leave":
        if rank == 0:
            told(lonely)
        else:
            jobs.record(rank, None)
    elif way == "shutdown":
        if rank == 0:
            told(lonely)
        else:
            jobs.record(rank, None)
        hvd.shutdown()
    elif way in ("raise", "kill") and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, which may come before the cause is recorded
        told(lonely)
    elif way == "raise":
        time.sleep(0.5)
        raise ValueError("nothing to add")
    elif way == "kill":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "optimizer":
        optimizer = hvd.DistributedOptimizer(sgd, m.named_parameters())
        m(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if rank == 1:  # comes when it is over
            jobs.wait_for_records(1)
        m(torch.ones(1, 3)).sum().backward()
        told(optimizer.step)
    elif way == "uncaught":
        hvd.allreduce(torch.ones(2 + rank), name="lonely")


if __name__ == "__main__":
    main(sys.argv[1])
