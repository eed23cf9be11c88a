"""One rank fails: ``fault.py raise|finally|kill|sleep|exit|leave before|init|start|collective``.

"init": while rank 0 waits in MPI_Init with a shared-memory segment (under mpiexec).
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvdbridge as hb
from hvdbridge.backends import starting
from hvdbridge.policy.collectives import AllReduce
from hvdbridge.startup import launchers
from hvdbridge.supervisor.processes import segments_of

kind, when = sys.argv[1:]
culprit = launchers.detect().rank == int(os.environ.get("CULPRIT", "1"))


def fail() -> None:
    if kind == "raise":
        raise RuntimeError("this rank has a bug")
    if kind == "finally":
        try:
            raise RuntimeError("this rank has a bug")
        finally:
            hb.shutdown()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit(3)
    if kind == "leave":
        sys.exit(0)
    time.sleep(600)


def meet_and_fail(*arguments: object) -> object:
    meeting = meet(*arguments)
    fail()
    return meeting


meet = starting.run_rendezvous
if culprit and when == "before":
    fail()
if when == "init":
    pid = Path(os.environ["JOB_RECORDS"]) / "pid"
    if culprit:
        while not (pid.exists() and segments_of(int(pid.read_text() or 0))):
            time.sleep(0.001)
        time.sleep(0.02)
        fail()
    pid.write_text(str(os.getpid()))
if culprit and when == "start":
    starting.run_rendezvous = meet_and_fail
hb.init()
communicator = hb.current().communicator
for step in range(10**9):
    if culprit and when == "collective" and step == 20:
        fail()
    communicator.execute(AllReduce(torch.ones(1000)))
