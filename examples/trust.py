"""Train with wrong labels on one rank: the plain mean learns them, weights and robust policies reject them.

::

    torchrun --nproc-per-node 3 examples/trust.py
    horovodrun -np 3 python examples/trust.py
    mpiexec -n 3 python examples/trust.py

Each rank has its own part of the digits; the last rank labels each digit as the next one. Each trial trains the same
model once. If the faulty rank is known, `sync.weight` reduces its influence. If only the number of faulty ranks is
known, a robust policy outvotes them: for one faulty rank that takes three ranks, with Krum five. The script needs at
least two ranks; three to five show the effect best.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import data
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from train import accuracy, build, set_learning_rate
from train import arguments as training_arguments

import hvdbridge as hb


class Trial(NamedTuple):
    """A way to train: by ``policy`` (None: the configured one), or with the weight ``trust`` of the last rank, where
    all others have weight 1. ``ranks`` is the least number of ranks for which it is useful."""

    policy: str | None = None
    trust: float | None = None
    ranks: int = 2


TRIALS = {
    "plain mean": Trial(),
    "trust 0.1": Trial(trust=0.1),
    "trust 0": Trial(trust=0.0),
    "median": Trial("median:f=1", ranks=3),
    "trimmed mean": Trial("trimmed_mean:f=1", ranks=4),  # of three values it is the median
    "geometric median": Trial("geometric_median:f=1", ranks=3),
    "clipped mean": Trial("clipped_mean:f=1,radius=1", ranks=3),
    "Krum": Trial("krum:f=1", ranks=5),
    "multi-Krum": Trial("multi_krum:f=1", ranks=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="write the accuracies there, as JSON")
    args = parser.parse_args()
    with hb.session():
        if hb.size() < 2:
            raise SystemExit(f"trust.py needs two ranks or more, this job has one. {__doc__}")
        possible = {name: trial for name, trial in TRIALS.items() if trial.ranks <= hb.size()}
        results = {name: train(trial, args.epochs, args.seed) for name, trial in possible.items()}
        if hb.rank() == 0:
            table = Table("trial", "test accuracy", title=f"{hb.size()} ranks, the last with wrong labels")
            for name, trial in TRIALS.items():
                table.add_row(name, f"{results[name]:.1%}" if name in results else f"from {trial.ranks} ranks on")
            Console().print(table)
            if args.metrics:
                args.metrics.write_text(json.dumps(results))


def train(trial: Trial, epochs: int, seed: int) -> float:
    """Train once and return the test accuracy."""
    args = training_arguments([f"--epochs={epochs}", f"--seed={seed}"])
    digits, test = (part.to(hb.device()) for part in data.digits())
    local = data.Images(digits.images[hb.rank() :: hb.size()], digits.labels[hb.rank() :: hb.size()])
    faulty = hb.rank() == hb.size() - 1
    if faulty:
        local = data.Images(local.images, (local.labels + 1) % 10)

    net, optimizer = build(args, digits, hb.device())
    sync = hb.GradientSynchronizer(net, optimizer, policy=trial.policy)
    if trial.trust is not None:
        sync.weight = trial.trust if faulty else 1.0
    per_epoch = len(digits.labels) // hb.size() // args.batch_size  # whole batches, which all ranks have
    total = epochs * per_epoch
    for step in range(total):
        epoch, k = divmod(step, per_epoch)
        order = torch.randperm(len(local.labels), generator=torch.Generator().manual_seed(seed + epoch))
        indices = order[k * args.batch_size : (k + 1) * args.batch_size]
        set_learning_rate(sync.optimizer, args.lr, step / total)
        sync.optimizer.zero_grad()
        F.cross_entropy(sync.model(local.images[indices]), local.labels[indices]).backward()
        sync.optimizer.step()
    sync.close()
    return accuracy(net, test)


if __name__ == "__main__":
    main()
