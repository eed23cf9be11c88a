"""One rank is told to stop (SIGUSR1, SIGTERM or hb.stop()) in the middle of a step: after which step each rank stops,
and with which parameters. And patience: one rank does something alone for longer than the limit.

stopping.py stop HOW|join|drift|twice|patience
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time

import torch
from jobs import record

import hvdbridge as hb

CASE = sys.argv[1]
TOLD_AT = 5
MOST = 5000


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def tell(how: str) -> None:
    if how == "stop":
        hb.stop()
    else:
        os.kill(os.getpid(), signal.Signals[how])


def trained(policy: str, how: str, steps: int = MOST, joined: bool = False) -> tuple[int, str]:
    """The number of steps until the loop ends, and the model."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = hb.GradientSynchronizer(model, optimizer, policy=policy)
    made = 0
    with sync.join() if joined else contextlib.nullcontext():
        for step in range(steps):
            if how and step == TOLD_AT and hb.rank() == hb.size() - 1:
                threading.Timer(0.002, tell, [how]).start() if how == "stop" else tell(how)
            sync.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + hb.rank())
            sync.model(torch.randn(2, 4, generator=generator)).sum().backward()
            sync.optimizer.step()
            made += 1
            time.sleep(0.001 * hb.rank())
            if sync.stop_requested:
                break
    assert sync.stop_requested or not how, "it stays so"
    found = made, digest(model)
    sync.close()
    return found


hb.init()
chained: list[int] = []
if CASE == "stop":
    how = sys.argv[2]
    signal.signal(signal.SIGUSR1, lambda number, _: chained.append(number))
    record(hb.rank(), [*trained("mean", how), *trained("bf16", "", 3), len(chained)])
elif CASE == "join":
    record(hb.rank(), [*trained("mean", "SIGUSR1", MOST if hb.rank() else 3, joined=True)])
elif CASE == "drift":
    record(hb.rank(), [*trained("local_sgd(every=8)", "SIGTERM")])
elif CASE == "phases":
    found = [trained("warmup(steps=2,first=local_sgd(every=2),then=mean)", "stop", 500)[0]]
    record(hb.rank(), found)
elif CASE == "twice":
    trained("mean", "SIGTERM")
    if hb.rank() == hb.size() - 1:
        time.sleep(1.0)
        record(hb.rank(), "the second signal comes")
        os.kill(os.getpid(), signal.SIGTERM)
        record(hb.rank(), "it was survived")
    time.sleep(10.0)
else:
    found = []
    for policy in ("mean", "bf16"):
        model = torch.nn.Linear(3, 1)
        sync = hb.GradientSynchronizer(model, policy=policy)
        for step in range(2):
            if step == 1 and hb.rank() == 0:
                with hb.patience(30.0):
                    time.sleep(4.0)
            sync.model(torch.ones(1, 3)).sum().backward()
        found.append(float(model.weight.grad.sum()))
        sync.close()
    if hb.rank() == 1:
        with hb.patience(30.0):
            time.sleep(4.0)
    hb.barrier()
    if sys.argv[2:] == ["too_long"]:
        if hb.rank() == 0:
            with hb.patience(1.0):
                time.sleep(30.0)
        hb.barrier()
    record(hb.rank(), found)
hb.shutdown()
