"""Known models: train a small GPT and a ResNet under five policies, and write the tables of docs/explanation.

::

    python benchmarks/known_models.py [--again TASK] [--table] [--tune] [--workers N] [--data-dir DIR]

Rules:

1. Four simulated ranks train, as in convergence.py, whose simulation, store and evaluation this file uses.
2. Learning rates are tuned for ``mean`` alone: the best of a grid with one seed (``--tune``). Every policy gets the
   rate of ``mean`` with the same optimizer, except where a row states a factor.
3. Runs with the same task, optimizer and seed start from equal parameters and see the same batches under every policy.
   The table compares them in pairs.
4. benchmarks/results/known_models.json stores every run as soon as it ends: after Ctrl-C, the next start continues.
   ``--again`` deletes a task's runs first. ``--table`` writes the table of the stored runs and trains nothing.
5. The text is the source of the running Python's standard library, and the images are Fashion-MNIST's four files. The
   store records a fingerprint of both; runs on other data are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import textwrap
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import hvdbridge as hb

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import convergence  # noqa: E402
import data  # noqa: E402
from convergence import RANKS, WITHIN, Replica, Row, Runs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "known_models.json"
PAGE = ROOT / "docs" / "explanation" / "convergence.md"
BEGIN, END = "<!-- known models: begin -->", "<!-- known models: end -->"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
SEEDS = 3

# Half the width of a two-sided 95 % interval, in standard errors: Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# ---------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A pre-norm decoder block: causal self-attention and a feed-forward net, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder like GPT-2 on bytes: learned positions, pre-norm blocks, output weights tied to the embedding.

    The model maps bytes ``[n, length]`` to logits ``[n, 256, length]`` of the next bytes. Matrix products are in
    bfloat16 (autocast); parameters and their gradients are float32.
    """

    def __init__(self, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, characters: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embedding(characters) + self.positions.weight[: characters.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.embedding.weight)
        return logits.float().transpose(1, 2)


class Convolution(nn.Module):
    """A convolution whose weight is stored as the matrix ``[outputs, inputs * kernel * kernel]``, as Muon needs it."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.shape, self.stride = (outputs, inputs, 3, 3), stride
        self.weight = nn.Parameter(torch.empty(outputs, 9 * inputs))
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.view(self.shape), stride=self.stride, padding=1)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut without parameters (option A of He 2016, section 4.2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = Convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = Convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + shortcut)


class ResNet(nn.Module):
    """The ResNet of ``6 blocks + 2`` layers for small images: 16, 32 and 64 channels (He 2016, section 4.2).

    Convolutions are in bfloat16 (autocast); parameters and their gradients are float32.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem, self.norm = Convolution(1, 16), nn.BatchNorm2d(16)
        self.stages = nn.Sequential()
        for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            self.stages.append(BasicBlock(inputs, outputs, stride))
            self.stages.extend(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.stages(F.relu(self.norm(self.stem(images))))
            logits = self.head(x.mean((2, 3)))
        return logits.float()


# ---------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """A model, its data, and the length of training.

    Attributes:
        title: heading of the table.
        model: arguments of the model.
        batch_size: samples per rank and step.
        steps: number of steps; a multiple of diloco's interval, so that training ends with an average.
        test: number of samples in the held-out set.
        clip: largest norm of the aggregated gradient, as usual for GPTs; 0: any.
        rates: optimizer -> the best learning rate for ``mean``.
        grid: optimizer -> the learning rates that were tried.
    """

    name: str
    title: str
    model: dict[str, int]
    batch_size: int
    steps: int
    test: int
    clip: float
    rates: dict[str, float]
    grid: dict[str, tuple[float, ...]]

    def settings(self) -> dict[str, Any]:
        """Return what the results depend on, beside the options of a run."""
        names = ("model", "batch_size", "steps", "test", "clip")
        return {name: value for name, value in asdict(self).items() if name in names}


TASKS = {
    task.name: task
    for task in (
        Task(
            "gpt", "GPT on Python source",
            {"length": 128, "width": 192, "layers": 4, "heads": 3}, batch_size=1, steps=300, test=256, clip=1.0,
            rates={"sgd": 0.05, "adamw": 0.002, "muon": 0.012},
            grid={
                "sgd": (0.02, 0.05, 0.15, 0.5, 1.5), "adamw": (0.001, 0.002, 0.005, 0.012),
                "muon": (0.002, 0.005, 0.012, 0.03),
            },
        ),
        Task(
            "resnet", "ResNet-8 on Fashion-MNIST",
            {"blocks": 1}, batch_size=16, steps=300, test=10_000, clip=0.0,
            rates={"sgd": 0.5, "adamw": 0.03, "muon": 0.1},
            grid={
                "sgd": (0.05, 0.15, 0.5, 1.5), "adamw": (0.003, 0.01, 0.03, 0.1), "muon": (0.003, 0.01, 0.03, 0.1, 0.3),
            },
        ),
    )
}  # fmt: skip

OPTIMIZERS = {"sgd": "SGD, momentum 0.9", "adamw": "AdamW", "muon": "Muon and AdamW"}
ROWS = [
    Row("mean", ""),
    Row("int8", ""),
    Row("warmup(steps={fifth}, then=powersgd(rank=4))", ""),
    Row("warmup(steps={fifth}, then=topk(ratio=0.01))", ""),
    Row("diloco:every=10,lr=1,momentum=0.5", ""),
]
# Beside the five policies: the lower rate that the guide advises for SGD, and a row that must be worse.
MORE = [
    Row("warmup(steps={fifth}, then=powersgd(rank=4))", "", 0.5, "sgd"),
    Row("warmup(steps={fifth}, then=topk(ratio=0.01))", "", 0.5, "sgd"),
    Row("topk:ratio=0.01,ef=false", "", optimizer="adamw", control=True),
]


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: Task
    optimizer: str
    row: Row
    lr: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.task.name} {self.optimizer} {self.lr:g} {self.row.policy(self.task.steps)} {self.seed}"

    def baseline(self) -> Run:
        """Return the run of ``mean`` with the same optimizer and seed."""
        return Run(self.task, self.optimizer, ROWS[0], self.task.rates[self.optimizer], self.seed)


def runs_of(task: Task, row: Row, seed: int) -> list[Run]:
    optimizers = [row.optimizer] if row.optimizer else list(OPTIMIZERS)
    return [Run(task, name, row, task.rates[name] * row.lr, seed) for name in optimizers]


def all_runs(tasks: Sequence[Task]) -> Iterator[Run]:
    """Yield all runs of the tables: the first seed of all policies first."""
    for rows in (ROWS, MORE):
        for seed in range(SEEDS):
            for row in rows:
                for task in tasks:
                    yield from runs_of(task, row, seed)


def grid_runs(tasks: Sequence[Task]) -> Iterator[Run]:
    """Yield the runs that choose the learning rates."""
    for task in tasks:
        for optimizer, rates in task.grid.items():
            yield from (Run(task, optimizer, ROWS[0], lr, seed=0) for lr in rates)


# ---------------------------------------------------------------------------------------------- data


@lru_cache(maxsize=2)
def load(name: str, length: int, directory: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return inputs and labels of the training set and of the held-out set."""
    if name == "resnet":
        return data.load("fashion-mnist", directory or DEBIAN)
    return library_source(length)


def library_source(length: int) -> tuple[data.Text, data.Text]:
    """Return the modules at the top of Python's standard library as bytes, in windows of ``length``.

    A module is held out if the CRC of its file name is a multiple of ten, so the split is the same for every version.
    The text differs between versions.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = {file: zlib.crc32(file.name.encode()) % 10 == 0 for file in files}
    return windows([f for f in files if not held_out[f]], length), windows([f for f in files if held_out[f]], length)


def windows(files: Iterable[Path], length: int) -> data.Text:
    codes = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    count = (len(codes) - 1) // length
    return data.Text(codes[: count * length].view(count, -1), codes[1 : count * length + 1].view(count, -1))


def spread(samples: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` samples at equal distances."""
    inputs, labels = samples
    chosen = torch.arange(min(count, len(labels))) * len(labels) // min(count, len(labels))
    return inputs[chosen], labels[chosen]


def fingerprint(task: Task, directory: Path | None) -> str:
    """Return a short digest of the task's data, and the version of Python if the data are its library."""
    train_set, test = load(task.name, task.model.get("length", 0), directory)
    crc = 0
    for tensor in (*train_set, *test):
        crc = zlib.crc32(tensor.numpy().tobytes(), crc)
    version = f"Python {sys.version.split()[0]}, " if task.name == "gpt" else ""
    return f"{version}{len(train_set[1])} + {len(test[1])} samples, crc {crc:08x}"


# ---------------------------------------------------------------------------------------------- one run


class Trained(Replica):
    """One rank's model with one or two optimizers."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.net = model_of(run.task)
        self.parameters = dict(self.net.named_parameters())
        self.optimizers = optimizers(run.optimizer, self.parameters, run.lr)
        self.clip = run.task.clip

    def step(self, update: Mapping[str, Tensor], lr: float, progress: float) -> None:
        if self.clip:
            norm = nn.utils.get_total_norm(update.values())
            update = {name: gradient * (self.clip / max(self.clip, norm.item())) for name, gradient in update.items()}
        for optimizer in self.optimizers:
            self.optimizer = optimizer
            super().step(update, lr, progress)


def model_of(task: Task) -> nn.Module:
    return GPT(**task.model) if task.name == "gpt" else ResNet(**task.model)


def optimizers(name: str, parameters: dict[str, Tensor], lr: float) -> list[Optimizer]:
    """Return the optimizers of all parameters. Muon takes the matrices of hidden layers, and AdamW all others."""
    if name == "sgd":
        return [SGD(parameters.values(), lr=lr, momentum=0.9, weight_decay=1e-4)]
    hidden = [
        p for key, p in parameters.items() if name == "muon" and p.ndim == 2
        and not key.startswith(("embedding", "positions", "head"))
    ]  # fmt: skip
    others = [p for p in parameters.values() if not any(p is matrix for matrix in hidden)]
    adamw = AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    # With this factor one learning rate serves both optimizers.
    muon = [Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")] if hidden else []
    return [*muon, adamw]


def execute(run: Run, directory: Path | None = None) -> dict[str, Any]:
    """Train and evaluate; return what the store keeps."""
    torch.set_num_threads(1)
    started = time.monotonic()
    task = run.task
    (inputs, labels), test = load(task.name, task.model.get("length", 0), directory)
    policy = hb.policies.from_spec(run.row.policy(task.steps))
    replicas = [Trained(run) for _ in range(RANKS if policy.replicas == "drift" else 1)]
    options = argparse.Namespace(seed=run.seed, batch_size=task.batch_size)
    parts = ([(inputs[i], labels[i]) for i in ranks] for ranks in convergence.batches(options, len(labels)))
    result = convergence.train_replicas(policy, replicas, islice(parts, task.steps), task.steps, run.lr)
    recalibrate(replicas[0].net, spread((inputs, labels), 2000)[0])
    loss, accuracy = convergence.evaluate(replicas[0].net.eval(), spread(test, task.test))
    last = [statistics.fmean(losses) for losses in result["losses"][-max(1, task.steps // 20) :]]
    return {
        "loss": round(loss, 5), "accuracy": round(accuracy, 5), "train": round(statistics.fmean(last), 4),
        "per_step": round(convergence.late_rate(result["bytes"])), "bytes": result["bytes"][-1],
        "equal": result["equal"], "seconds": round(time.monotonic() - started),
    }  # fmt: skip


@torch.no_grad()
def recalibrate(net: nn.Module, images: Tensor) -> None:
    """Set the statistics of batch norms to those of the final parameters, equally for all policies.

    Running averages from training would differ between policies with one replica and those with one per rank.
    """
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all batches
    if norms:
        net.train()
        for part in images.split(250):
            net(part)


# ---------------------------------------------------------------------------------------------- all runs


class Store(Runs):
    """The stored results by :attr:`Run.key`, and the settings of each task."""

    def result(self, run: Run) -> dict[str, Any] | None:
        return self.runs.get(run.key)

    def add(self, run: Run, result: dict[str, Any]) -> None:
        self.runs[run.key] = result
        self.save()

    def check(self, task: Task, data: str | None = None) -> None:
        """Compare the task's settings, and the fingerprint of its data if given, with those of the stored runs.

        Raises:
            ValueError: the stored runs had others.
        """
        now = {**task.settings(), **({"data": data} if data else {})}
        stored = self.runs.get(task.name, now)
        differing = [name for name, value in now.items() if stored[name] != value]
        if data:
            self.runs.setdefault(task.name, {**now, "torch": torch.__version__.split("+")[0]})
        if differing:
            raise ValueError(
                f"stored runs of {task.name} differ in {', '.join(differing)}. "
                f"Run with --again {task.name} to replace them, or with --table to keep them."
            )

    def forget_task(self, task: Task) -> None:
        self.runs = {key: value for key, value in self.runs.items() if key.split()[0] != task.name}
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(self.runs[key])}" for key in sorted(self.runs))
        partial = self.path.with_suffix(".partial")
        partial.write_text(f"{{\n{lines}\n}}\n")
        partial.replace(self.path)


def execute_all(runs: Iterable[Run], store: Store, workers: int, directory: Path | None) -> list[str]:
    """Execute all missing runs in ``workers`` processes; return the messages of those that failed."""
    distinct = {run.key: run for run in runs}.values()
    for task in {run.task.name: run.task for run in distinct}.values():
        store.check(task)
    missing = [run for run in distinct if store.result(run) is None]
    problems = []
    for task in {run.task.name: run.task for run in missing}.values():
        try:
            store.check(task, fingerprint(task, directory))
        except FileNotFoundError as error:
            problems.append(f"{task.name}: {error}. Install Debian's dataset-fashion-mnist, or give --data-dir DIR")
            missing = [run for run in missing if run.task != task]
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(workers, context) as pool:
        futures = {pool.submit(execute, run, directory): run for run in missing}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                key = futures[future].key
                try:
                    result = future.result()
                except Exception as error:  # one failure must not end the other runs
                    problems.append(f"{key}: {type(error).__name__}: {error}")
                    print(problems[-1], flush=True)
                    continue
                store.add(futures[future], result)
                line = f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}, {result['seconds']} s"
                print(f"[{number}/{len(missing)}] {key}: {line}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print("Interrupted; finished runs are stored.")
    return problems


# ---------------------------------------------------------------------------------------------- the page


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, of paired differences that are normally distributed.

    >>> mean, half = interval([0.01, 0.02, 0.03])
    >>> round(mean, 3), round(half, 4)
    (0.02, 0.0248)
    """
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, math.inf
    return mean, STUDENT[count - 2] * statistics.stdev(differences) / math.sqrt(count)


def verdict(mean: float, half: float, baseline: float) -> str:
    """Return what the interval says: the difference's sign if zero is outside, and whether all of it is within 2 %.

    >>> [verdict(mean, half, 2.0) for mean, half in ((0.01, 0.005), (0.01, 0.02), (0.1, 0.01), (0.1, 0.2))]
    ['worse, within 2 %', 'equal within 2 %', 'worse', 'undecided']
    """
    sign = "" if abs(mean) <= half else "worse" if mean > 0 else "better"
    within = "within 2 %" if abs(mean) + half <= (WITHIN - 1) * baseline else ""
    if sign:
        return f"{sign}, {within}" if within else sign
    return f"equal {within}" if within else "undecided"


@dataclass(frozen=True)
class Line:
    """A row of the table: one policy with one optimizer, over the seeds whose runs are stored."""

    row: Row
    optimizer: str
    lr: float
    per_step: float
    share: float
    whole: float
    losses: list[float]
    accuracy: float
    differences: list[float]
    baseline: float
    equal: bool

    @property
    def policy(self) -> str:
        return self.row.spec

    def cells(self, task: Task) -> list[str]:
        losses = self.losses
        deviation = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        recipe = f", lr × {self.row.lr:g}" if self.row.lr != 1 else ""
        share = f"{convergence.share(self.share)} ({convergence.share(self.whole)})"
        mean, half = interval(self.differences)
        difference, outcome = "", ""
        if self.row != ROWS[0]:
            bounds = f" [{mean - half:+.3f}, {mean + half:+.3f}]" if math.isfinite(half) else ""
            difference, outcome = f"{mean:+.3f}{bounds}", verdict(mean, half, self.baseline)
            outcome += " (control)" if self.row.control else ""
        seeds = "" if len(losses) == SEEDS else f" ({len(losses)} of {SEEDS} seeds)"
        return [
            OPTIMIZERS[self.optimizer], f"`{self.row.policy(task.steps)}`{recipe}",
            f"{self.per_step / 1e3:,.0f}", share,
            f"{statistics.fmean(losses):.3f}{deviation}{seeds}", f"{self.accuracy:.1%}", difference, outcome,
        ]  # fmt: skip


COLUMNS = (
    "optimizer", "policy", "kB per step", "share (whole run)", "held-out loss", "accuracy", "difference to `mean`",
    "verdict",
)  # fmt: skip


def lines(task: Task, store: Store) -> Iterator[Line]:
    """Yield the rows of a task's table, by optimizer; only those of which a run is stored."""
    for optimizer in OPTIMIZERS:
        for row in [*ROWS, *MORE]:
            runs = [run for seed in range(SEEDS) for run in runs_of(task, row, seed) if run.optimizer == optimizer]
            pairs = [(store.result(run), store.result(run.baseline())) for run in runs]
            done = [(a, b) for a, b in pairs if a and b]
            if not done:
                continue
            yield Line(
                row,
                optimizer,
                runs[0].lr,
                per_step=done[0][0]["per_step"],
                share=done[0][0]["per_step"] / done[0][1]["per_step"],
                whole=done[0][0]["bytes"] / done[0][1]["bytes"],
                losses=[a["loss"] for a, _ in done],
                accuracy=statistics.fmean(a["accuracy"] for a, _ in done),
                differences=[a["loss"] - b["loss"] for a, b in done],
                baseline=statistics.fmean(b["loss"] for _, b in done),
                equal=all(a["equal"] for a, _ in done),
            )


def grid(task: Task, store: Store) -> str:
    """Return the losses of the learning rates that were tried; the chosen rate is bold."""
    texts = []
    for optimizer, rates in task.grid.items():
        results = [(lr, store.result(Run(task, optimizer, ROWS[0], lr, 0))) for lr in rates]
        losses = [
            f"{f'**{lr:g}**' if lr == task.rates[optimizer] else f'{lr:g}'}: {result['loss']:.3f}"
            for lr, result in results if result
        ]  # fmt: skip
        texts.append(f"- {OPTIMIZERS[optimizer]}: {', '.join(losses) or 'not run'}")
    return "\n".join(texts)


def description(task: Task, store: Store) -> str:
    """Return the paragraph over a task's table."""
    stored = store.runs.get(task.name, {})
    parameters = sum(p.numel() for p in model_of(task).parameters())
    sizes, ranks = task.model, f"{RANKS} ranks × {task.batch_size}"
    if task.name == "gpt":
        tokens = RANKS * task.batch_size * sizes["length"] * task.steps
        what = (
            f"A decoder like GPT-2: {sizes['layers']} pre-norm blocks of width {sizes['width']} with {sizes['heads']} "
            f"heads, context {sizes['length']}, output weights tied to the embedding, {parameters:,} parameters. The "
            "model predicts the next byte of the modules at the top of Python's standard library. A tenth of the files "
            f"is held out. It trains for {task.steps} steps of {ranks} × {sizes['length']} bytes, {tokens:,} bytes in "
            f"total; aggregated gradients are clipped to norm {task.clip:g}. The loss is in nats per byte."
        )
    else:
        images = RANKS * task.batch_size * task.steps
        what = (
            f"ResNet-{6 * sizes['blocks'] + 2} in its CIFAR form: {parameters:,} parameters, batch normalisation per "
            f"rank. The model classifies Fashion-MNIST's images. It trains for {task.steps} steps of {ranks} images, "
            f"{images:,} in total (the training set has 60,000), without augmentation. The held-out set is the 10,000 "
            "test images."
        )
    return textwrap.fill(f"{what} Data: {stored.get('data', 'none')}; torch {stored.get('torch', '')}.", 120)


READING = """\
- **kB per step**: kilobytes that a rank sends per step after any warm-up. **share**: the same relative to `mean` in
  float32. In parentheses: the share in the whole run, with its dense warm-up.
- **held-out loss**: cross-entropy at the end, mean ± standard deviation over {seeds} seeds. **accuracy**: the share of
  correct predictions, mean over the seeds.
- **difference to `mean`**: held-out loss minus that of `mean` with the same seed, mean over the seeds, and in brackets
  its 95 % interval. Both runs of a pair begin with equal parameters and see the same batches, so most of what differs
  between seeds cancels. The interval is that of Student's t, which allows for a deviation estimated from few seeds:
  with three, {student} standard errors to each side.
- **verdict**: "worse" or "better" only if the interval excludes zero. "within 2 %" only if the whole interval is
  within 2 % of the loss of `mean`. "equal within 2 %": the interval contains zero and is within 2 %. "undecided": three
  seeds do not tell. Of twenty comparisons of equal policies, about one excludes zero by chance.
{control}
Four simulated ranks train, as above. Learning rates rise over the first tenth of the steps and fall to zero along a
cosine. They are tuned for `mean` with each optimizer, and all policies use them. "lr × 0.5" marks the exceptions. Muon
takes the weight matrices of hidden layers (a convolution's as `[outputs, inputs × 9]`) with
`adjust_lr_fn="match_rms_adamw"`. AdamW takes all other parameters at the same learning rate. Before the evaluation, the
statistics of batch normalisation are computed anew from 2,000 training images, for every policy alike.

What these runs do not show: both models are small, training is short, and there are four ranks. A policy might do
better at a learning rate of its own. Longer training, larger models and more ranks may change the differences.
"""
CONTROL = """\
- A row "(control)" must be worse: otherwise the experiment could not distinguish policies.
"""
REPEAT = """\
`make convergence-known` executes the runs that `benchmarks/results/known_models.json` lacks, and writes this
section. `python benchmarks/known_models.py --again gpt` repeats those of a task. The GPT's text is the library of the
Python that runs the script, so losses are comparable within one version. Fashion-MNIST's four files come with Debian's
package `dataset-fashion-mnist`; `--data-dir` names another directory.
"""


def text(tasks: Sequence[Task], store: Store) -> str:
    """Return the tables of all tasks, with what was trained."""
    has_control = any(line.row.control for task in tasks for line in lines(task, store))
    parts = [READING.format(seeds=SEEDS, student=STUDENT[SEEDS - 2], control=CONTROL if has_control else "")]
    for task in tasks:
        table = [COLUMNS, ("---", "---", "--:", "--:", "--:", "--:", "--:", "---")]
        table += [line.cells(task) for line in lines(task, store)]
        rows = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
        parts.append(
            f"### {task.title}\n\n{description(task, store)}\n\n{rows}\n"
            f"Learning rates tried for `mean`, with the loss of seed 0:\n\n{grid(task, store)}\n"
        )
    return "\n".join([*parts, REPEAT])


def write(page: Path, content: str) -> None:
    """Replace what stands between the page's markers."""
    head, rest = page.read_text().split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{content}\n{END}{rest.split(END)[1]}")


def faults(tasks: Sequence[Task], store: Store) -> Iterator[str]:
    """Yield a message for each result that the table must not contain, or that it lacks."""
    missing = sum(store.result(run) is None for run in all_runs(tasks))
    if missing:
        yield f"{missing} runs are not stored yet"
    for task in tasks:
        for optimizer, rates in task.grid.items():
            results = {lr: store.result(Run(task, optimizer, ROWS[0], lr, 0)) for lr in rates}
            if all(results.values()):
                best = min(rates, key=lambda lr: results[lr]["loss"])  # type: ignore[index]
                if best != task.rates[optimizer]:
                    yield f"{task.name}, {optimizer}: the grid's best rate is {best:g}, not {task.rates[optimizer]:g}"
        for line in lines(task, store):
            mean, half = interval(line.differences)
            if line.row.control and math.isfinite(half) and mean <= half:
                yield f"{task.name}: the control {line.policy} must be worse than mean"
            if not line.equal:
                yield f"{task.name}: updates of {line.policy} are not equal on all ranks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the grids of learning rates only")
    parser.add_argument("--again", action="append", choices=list(TASKS), default=[], help="delete its runs first")
    parser.add_argument("--table", action="store_true", help="write the table of the stored runs only")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, of one thread each")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=f"Fashion-MNIST's four files (default: {DEBIAN})")
    args = parser.parse_args()
    store, tasks = Store(RESULTS), list(TASKS.values())
    for name in args.again:
        store.forget_task(TASKS[name])
    problems: list[str] = []
    if not args.table:
        wanted = [*grid_runs(tasks)] if args.tune else [*all_runs(tasks), *grid_runs(tasks)]
        problems = execute_all(wanted, store, args.workers, args.data_dir)
    if not args.tune:
        write(PAGE, text(tasks, store))
        problems += faults(tasks, store)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
