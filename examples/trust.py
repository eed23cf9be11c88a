"""One rank's labels are wrong: the plain mean learns them; weights keep them out, and so do robust policies.

::

    torchrun --nproc-per-node 3 examples/trust.py
    horovodrun -np 3 python examples/trust.py
    mpiexec -n 3 python examples/trust.py

Every rank keeps its own part of the digits; the last rank calls each digit by the next one's name. The same model
is trained once per trial. Where it is known whom not to trust, `sync.weight` says how far. Where it is only known
that one rank may be faulty, a robust policy outvotes it, whichever it is: that takes three ranks, Krum five.
Two ranks or more; three to five show it best.
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
    """A way to train: with a policy (None: what the job is configured for), or a weight of the last rank where each
    of the others counts 1. ``ranks``: from how many on it is of use."""

    policy: str | None = None
    trust: float | None = None
    ranks: int = 2


TRIALS = {
    "plain mean": Trial(),
    "trust 0.1": Trial(trust=0.1),
    "trust 0": Trial(trust=0.0),
    "median": Trial("median:f=1", ranks=3),
    "trimmed mean": Trial("trimmed_mean:f=1", ranks=4),  # of three it is the median
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
    """Train once; the test accuracy."""
    args = training_arguments([f"--epochs={epochs}", f"--seed={seed}"])
    digits, test = (part.to(hb.device()) for part in data.digits())
    mine = data.Images(digits.images[hb.rank() :: hb.size()], digits.labels[hb.rank() :: hb.size()])
    bad = hb.rank() == hb.size() - 1
    if bad:
        mine = data.Images(mine.images, (mine.labels + 1) % 10)

    net, optimizer = build(args, digits, hb.device())
    sync = hb.GradientSynchronizer(net, optimizer, policy=trial.policy)
    if trial.trust is not None:
        sync.weight = trial.trust if bad else 1.0
    per_epoch = len(digits.labels) // hb.size() // args.batch_size  # of whole batches, which every rank has
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
