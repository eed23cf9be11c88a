"""Rank 1's script ends with status 3, and rank 0 waits for it: ``left.py barrier|backward|forward``.

Python looks ``sys.exit`` up before it calls ``main``, so nobody sees the status.
"""

import sys

import torch
from torch import nn

import hvdbridge as hb


def main() -> int:
    kind = sys.argv[1]
    hb.init()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    sync = hb.GradientSynchronizer(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="int8", bucket_mb=0.01)
    if kind == "forward":  # what DDP itself sends comes with the second
        step(sync)
    if hb.rank() == 0 and kind == "barrier":
        hb.barrier()
    elif hb.rank() == 0:
        if kind == "backward":  # the last bucket never comes, as after Ctrl-C
            model[0].weight.register_hook(interrupt)
        try:
            step(sync)
        except InterruptedError:
            return 0
    return 3 * hb.rank()


def step(sync: hb.GradientSynchronizer) -> None:
    sync.optimizer.zero_grad()
    sync.model(torch.ones(2, 64)).sum().backward()
    sync.optimizer.step()


def interrupt(_: torch.Tensor) -> None:
    raise InterruptedError


if __name__ == "__main__":
    sys.exit(main())
