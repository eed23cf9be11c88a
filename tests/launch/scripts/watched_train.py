"""examples/train.py that records, for each rank, the samples of each step and the final parameters."""

import sys
from pathlib import Path

import jobs
import torch

import hvdbridge as hb

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import train

batches, build, shutdown = train.batches, train.build, hb.shutdown
dealt: dict[int, list[list[int]]] = {}
built: list[torch.nn.Module] = []


def watched_batches(args, data, epoch):
    dealt[epoch] = batches(args, data, epoch)
    return dealt[epoch]


def watched_build(*args):
    net, optimizer = build(*args)
    built.append(net)
    return net, optimizer


def watched_shutdown():
    parameters = torch.cat([p.detach().flatten() for p in built[0].parameters()])
    jobs.record(hb.rank(), {"batches": [dealt[epoch] for epoch in sorted(dealt)], "parameters": parameters.tolist()})
    shutdown()


train.batches, train.build, hb.shutdown = watched_batches, watched_build, watched_shutdown
train.main()
