"""One rank's labels are wrong: the plain mean learns them, weights keep them out.

::

    torchrun --nproc-per-node 3 examples/trust.py
    horovodrun -np 3 python examples/trust.py
    mpiexec -n 3 python examples/trust.py

Every rank keeps its own part of the digits; the last rank calls each digit by the next one's name. The same model
is trained once per trial, and `sync.weight` says how far the last rank is trusted. Two ranks or more; three or
four show it best.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import data
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from train import accuracy, build, set_learning_rate
from train import arguments as training_arguments

import hvdbridge as hb

# name: how much the last rank counts, where each of the others counts 1
TRIALS = {"plain mean": None, "trust 0.1": 0.1, "trust 0": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="write the accuracies there, as JSON")
    args = parser.parse_args()
    with hb.session():
        if hb.size() < 2:
            raise SystemExit(f"trust.py needs two ranks or more, this job has one. {__doc__}")
        results = {name: trial(trust, args.epochs, args.seed) for name, trust in TRIALS.items()}
        if hb.rank() == 0:
            table = Table("trial", "test accuracy", title=f"{hb.size()} ranks, the last with wrong labels")
            for name, right in results.items():
                table.add_row(name, f"{right:.1%}")
            Console().print(table)
            if args.metrics:
                args.metrics.write_text(json.dumps(results))


def trial(trust: float | None, epochs: int, seed: int) -> float:
    """Train with the last rank trusted this much; the test accuracy."""
    args = training_arguments([f"--epochs={epochs}", f"--seed={seed}"])
    train, test = (part.to(hb.device()) for part in data.digits())
    mine = data.Images(train.images[hb.rank() :: hb.size()], train.labels[hb.rank() :: hb.size()])
    bad = hb.rank() == hb.size() - 1
    if bad:
        mine = data.Images(mine.images, (mine.labels + 1) % 10)

    net, optimizer = build(args, train, hb.device())
    sync = hb.GradientSynchronizer(net, optimizer)
    if trust is not None:
        sync.weight = trust if bad else 1.0
    per_epoch = len(train.labels) // hb.size() // args.batch_size  # of whole batches, which every rank has
    total = epochs * per_epoch
    for step in range(total):
        epoch, k = divmod(step, per_epoch)
        order = torch.randperm(len(mine.labels), generator=torch.Generator().manual_seed(seed + epoch))
        indices = order[k * args.batch_size : (k + 1) * args.batch_size]
        set_learning_rate(sync.optimizer, args.lr, step / total)
        sync.optimizer.zero_grad()
        F.cross_entropy(sync.model(mine.images[indices]), mine.labels[indices]).backward()
        sync.optimizer.step()
    sync.close()
    return accuracy(net, test)


if __name__ == "__main__":
    main()
