"""Train on handwritten digits or text: one script for four launchers, on torch.distributed, Horovod or MPI.

One process::

    python examples/train.py

One node, two ranks::

    torchrun --nproc-per-node 2 examples/train.py
    horovodrun -np 2 python examples/train.py
    mpiexec -n 2 python examples/train.py
    srun -n 2 python examples/train.py
    # no launcher: one line in each of two terminals, the second with RANK=1
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 python examples/train.py

Two nodes of two ranks::

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29500 \\
        examples/train.py                                                    # on both nodes
    horovodrun -np 4 -H node1:2,node2:2 python examples/train.py
    mpiexec -n 4 -ppn 2 -hosts node1,node2 python examples/train.py
    srun -N 2 --ntasks-per-node 2 python examples/train.py
    # no launcher: one line per rank, with MASTER_ADDR=node1 WORLD_SIZE=4 and RANK=0 to 3

Each command runs on each backend: put ``HVDBRIDGE_BACKEND=torch`` (or ``horovod``, ``mpi``) before it. ``mpi`` under
torchrun, horovodrun and without a launcher needs MPICH or Intel MPI (docs/how-to/several-hosts.md). On two ranks the
final parameters are equal, bit for bit, under all launchers and on all backends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import data
import models
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import BatchSampler

import hvdbridge as hb

Samples = data.Images | data.Text


def main() -> None:
    args = arguments()
    hb.init()
    run(args)
    hb.shutdown()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train with ``args`` in the open session; return the results on rank 0, an empty dictionary on other ranks."""
    train, test = (part.to(hb.device()) for part in data.load(args.data, args.data_dir))
    net, optimizer = build(args, train, hb.device())
    start, saved = resume(args, net, optimizer)

    sync = hb.GradientSynchronizer(net, optimizer, policy=args.policy)
    model, optimizer = sync.model, sync.optimizer
    if saved:
        sync.load_state_dict(saved)

    inputs, labels = train
    per_epoch = len(batches(args, train, epoch=0))
    total = min(args.epochs * per_epoch, args.steps or sys.maxsize)
    step = start
    with Log(step, total, visible=hb.rank() == 0) as log:
        while step < total:
            epoch, done = divmod(step, per_epoch)
            for indices in islice(batches(args, train, epoch), done, total - epoch * per_epoch):
                if args.uneven:
                    sync.weight = len(indices)
                    indices = indices or [0]  # backward needs a loss, whose weight is 0
                set_learning_rate(optimizer, args.lr, step / total)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs[indices]), labels[indices])
                loss.backward()
                optimizer.step()
                step += 1
                log.step(loss)
                if args.checkpoint and step % args.checkpoint_every == 0:
                    save(args, step, net, optimizer, sync)
            log.epoch(epoch, accuracy(model, test))
    if start == total:  # resumed from the final checkpoint
        log.accuracy = accuracy(model, test)
    result: dict[str, Any] = {}
    if hb.rank() == 0:
        sent = int(sync.stats()["bytes_sent"])
        result = report(log, net, args.metrics, bytes_sent=sent, backend=hb.backend(), launcher=hb.launcher())
    sync.close()
    return result


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=sorted(models.MODELS), help="default: cnn; for text gated-cnn")
    parser.add_argument("--data", choices=["digits", "fashion-mnist", "text"], default="digits")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where Fashion-MNIST's four IDX files are")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, metavar="N", help="end after N steps")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank (default: 16)")
    parser.add_argument("--lr", type=float, help="highest learning rate (default: 0.06; for text 0.5)")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--momentum", type=float, default=0.9, help="of sgd (default: 0.9)")
    parser.add_argument("--policy", help="how gradients are aggregated, e.g. bf16 (default: HVDBRIDGE_POLICY, mean)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uneven", action="store_true", help="rank r has r + 1 shares of the data; weighted")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save there as training goes on")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--metrics", type=Path, metavar="PATH", help="write the results there, as JSON")
    args = parser.parse_args(argv)
    args.model = args.model or ("gated-cnn" if args.data == "text" else "cnn")
    args.lr = args.lr or (0.5 if args.data == "text" else 0.06)
    if args.data == "fashion-mnist" and args.data_dir is None:
        parser.error("--data fashion-mnist needs --data-dir DIR, the directory of its four IDX files")
    if (args.data == "text") != (args.model == "gated-cnn"):
        parser.error(f"--model {args.model} does not go with --data {args.data}: gated-cnn is for text alone")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint PATH")
    return args


def build(args: argparse.Namespace, train: Samples, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer, which depend on the arguments alone."""
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(args.seed)
    net = models.MODELS[args.model](train[0].shape[-1]).to(device)
    if args.optimizer == "adam":
        return net, AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.99))
    return net, SGD(net.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=1e-4)


def batches(args: argparse.Namespace, train: Samples, epoch: int) -> list[list[int]]:
    """Return this rank's indices for each step of an epoch, which depend on arguments, epoch and rank alone."""
    if args.uneven:
        shares = range(1, hb.size() + 1)
        global_batch = args.batch_size * hb.size()
        return data.deal(len(train.labels), global_batch, shares, hb.rank(), args.seed + epoch)
    sampler = hb.DistributedSampler(train.labels, seed=args.seed, pad=True)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, args.batch_size, drop_last=False))


def set_learning_rate(optimizer: Optimizer, highest: float, progress: float) -> None:
    """Warm up linearly over the first tenth of training, and decay along a cosine; ``progress`` is 0 to 1."""
    for group in optimizer.param_groups:
        group["lr"] = highest * min(1.0, 0.1 + 9 * progress) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def accuracy(model: nn.Module, test: Samples) -> float:
    """Return the share of the labels that the model predicts correctly."""
    model.eval()
    chunks = zip(*(part.split(1000) for part in test), strict=True)
    correct = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in chunks)
    model.train()
    return correct / test.labels.numel()


def digest(net: nn.Module) -> str:
    """Return the SHA-256 of all parameters in the order of their names: equal digests mean equal bits."""
    sha = hashlib.sha256()
    for name, parameter in sorted(net.named_parameters()):
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def save(
    args: argparse.Namespace, step: int, net: nn.Module, optimizer: Optimizer, sync: hb.GradientSynchronizer
) -> None:
    """Write a checkpoint atomically. All ranks call this, because the synchronizer's state is gathered."""
    state = sync.state_dict(gather=True)
    if hb.rank() == 0:
        partial = args.checkpoint.with_name(f"{args.checkpoint.name}.partial")
        torch.save(
            {"run": identity(args), "step": step, "model": net.state_dict(),
             "optimizer": optimizer.state_dict(), "sync": state},
            partial,
        )  # fmt: skip
        os.replace(partial, args.checkpoint)


def resume(args: argparse.Namespace, net: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Any]]:
    """Return the step to continue from and the synchronizer's state; 0 and {} for a fresh start.

    Only rank 0 needs access to the file: the constructor of the synchronizer broadcasts the loaded model and optimizer.
    """
    if not args.resume:
        return 0, {}
    error, step, state = None, 0, {}
    if hb.rank() == 0 and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        if saved["run"] != identity(args):
            error = f"{args.checkpoint} is of another run: {saved['run']}, this is {identity(args)}"
        else:
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            step, state = saved["step"], saved["sync"]
            print(f"going on after step {step}", flush=True)
    error, step, state = hb.broadcast_object((error, step, state))
    if error:
        raise ValueError(error)
    return step, state


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that must equal those of a checkpoint, so that its step is the same position in the data."""
    names = ("model", "data", "epochs", "steps", "batch_size", "lr", "optimizer", "momentum", "seed", "uneven")
    return {name: getattr(args, name) for name in names} | {"ranks": hb.size()}


class Log:
    """Record loss and duration of each step. Show a progress bar on a terminal, else print one line per epoch."""

    def __init__(self, step: int, total: int, visible: bool = True) -> None:
        self.total = total
        self.lines = visible and not sys.stdout.isatty()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            disable=not visible or self.lines,
        )  # fmt: skip
        self.task = self.bar.add_task("training", total=total, completed=step)
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    def __enter__(self) -> Log:
        self.bar.start()
        self.clock = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def step(self, loss: Tensor) -> None:
        if loss.is_cuda:
            torch.cuda.synchronize()  # otherwise only the launch of the kernels is timed
        now = time.perf_counter()
        self.seconds.append(now - self.clock)
        self.clock = now
        self.losses.append(loss.detach())
        self.bar.advance(self.task)

    def epoch(self, epoch: int, accuracy: float) -> None:
        self.accuracy = accuracy
        text = f"epoch {epoch + 1:2}  loss {self.losses[-1].item():.3f}  accuracy {accuracy:.1%}"
        self.bar.update(self.task, description=text)
        if self.lines:
            print(text, flush=True)
        self.clock = time.perf_counter()


def report(log: Log, net: nn.Module, path: Path | None, **more: Any) -> dict[str, Any]:
    """Print the results of a run, write them to ``path`` as JSON, and return them."""
    result = more | {
        "accuracy": log.accuracy,
        "step_seconds": statistics.median(log.seconds) if log.seconds else None,
        "steps": log.total,
        "losses": [loss.item() for loss in log.losses],
        "digest": digest(net),
    }
    print(f"accuracy {result['accuracy']:.1%}  digest {result['digest'][:12]}", flush=True)
    if path:
        path.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
