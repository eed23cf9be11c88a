"""Convergence: measure the loss and the bytes sent under every policy, and write the table of
docs/explanation/convergence.md.

::

    python benchmarks/convergence.py [--only SPEC] [--steps N] [--seeds N] [--again] [--jobs]

Rules:

1. Under every policy four ranks train the same steps on the same batches, with three seeds each: a character-level
   language model on Python's own manual, and the digits of examples/train.py.
2. One process simulates the ranks: it computes their gradients in sequence, and one :class:`hvdbridge.Simulation`
   aggregates them. Four processes compute the same, but take time to start; ``--jobs`` compares real jobs with it.
3. A policy runs by its recipe, one line of :data:`ROWS`: the learning rate relative to that of ``mean``, the
   optimizer's momentum, and the options of its spec (warm-up). Nothing else differs.
4. The language model's loss relative to ``mean`` with the same seed decides. The table also shows that of the digits.
5. build/convergence.json stores every run as soon as it ends: after Ctrl-C, the next start continues.
   ``--again`` deletes the runs of the chosen rows first; use it after a change of a policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import BatchSampler

import hvdbridge as hb
from hvdbridge.execution.state_store import leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import charts  # noqa: E402
import data  # noqa: E402
import train  # noqa: E402
from cells import JobFailed, run  # noqa: E402

RANKS = 4
WITHIN = 1.02
KEPT = ROOT / "build" / "convergence.json"
PAGE = ROOT / "docs" / "explanation" / "convergence.md"
PLOT = ROOT / "docs" / "images" / "convergence.svg"
BEGIN, END = "<!-- convergence: begin -->", "<!-- convergence: end -->"


@dataclass(frozen=True)
class Task:
    """A data set, its optimizer, and the number of steps. Learning rates are the best ones found for ``mean``."""

    data: str
    batch_size: int
    steps: int
    optimizer: str
    sgd: float
    adam: float

    def options(self, row: Row, seed: int, steps: int) -> list[str]:
        """Return the options of examples/train.py."""
        optimizer = row.optimizer or self.optimizer
        return [
            f"--data={self.data}", f"--batch-size={self.batch_size}", f"--seed={seed}", f"--steps={steps}",
            "--epochs=1000", f"--optimizer={optimizer}", f"--momentum={row.momentum}",
            f"--lr={row.lr * getattr(self, optimizer):g}", f"--policy={row.policy(steps)}",
        ]  # fmt: skip


TASKS = {
    "text": Task("text", 4, 1600, "adam", sgd=1.0, adam=0.015),
    "digits": Task("digits", 16, 400, "sgd", sgd=0.06, adam=0.003),
}


@dataclass(frozen=True)
class Row:
    """A policy, its recipe, and its text in the table.

    Attributes:
        spec: the policy; "{tenth}" and "{fifth}" stand for a tenth and a fifth of the steps.
        use: when to choose the policy.
        lr: learning rate, relative to the best of ``mean`` with the same optimizer.
        optimizer: "sgd" or "adam"; empty: that of the task.
        momentum: of sgd; 0 for a policy with a momentum of its own.
        why: the reason why a policy is not within 2 % of ``mean``.
        control: the policy must lose, or this comparison does not distinguish policies.
        local_size: ranks per node.
    """

    spec: str
    use: str
    lr: float = 1.0
    optimizer: str = ""
    momentum: float = 0.9
    why: str = ""
    control: bool = False
    local_size: int | None = None

    def policy(self, steps: int = 1600) -> str:
        """The spec for a run of ``steps`` steps; the table shows that of the language model."""
        return self.spec.format(tenth=steps // 10, fifth=steps // 5)

    def recipe(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("spec", "lr", "optimizer", "momentum", "local_size")}


SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0}
ROWS = [
    # Dense
    Row("mean", "the default: lossless, with nothing to tune; the reference of this table"),
    Row("mean:exact=true", "equal bits on every backend at any number of ranks, for the bytes of `mean`"),
    Row("sum", "scripts written for sums: the update is N times the mean, so the learning rate is an Nth", 0.25, "sgd"),
    Row("fp16", "half the bytes, if gradients and their sums stay below 65504"),
    Row("bf16", "half the bytes with the range of float32: the first policy to try"),
    # Quantised
    Row("int8", "about a quarter of the bytes, without state"),
    Row("fp8", "as int8, with smaller errors in the small elements of a block and larger ones in the large"),
    Row("int4", "about an eighth of the bytes; its error feedback keeps a residual"),
    Row("natural", "9 bits per element, unbiased, without state or scales: gradients of any range"),
    Row("qsgd", "4 bits per element, unbiased, without state"),
    Row(
        "terngrad",
        "3 bits per element at 4 ranks, unbiased, without state: many ranks, whose errors average out",
        why="a parameter has three values: noise as large as the gradient, of which four ranks average little",
    ),
    # Sparse
    Row("topk:ratio=0.05", "few ranks, since its bytes grow with N; gradients that are sparse by nature (embeddings)"),
    Row(
        "warmup(steps={fifth}, then=topk(ratio=0.01))",
        "few ranks on a slow link, in training so long that a dense warm-up is short",
    ),
    Row(
        "warmup(steps={fifth}, then=oktopk(ratio=0.02))",
        "as topk for more ranks: with large parameters its bytes hardly grow with N",
    ),
    Row("threshold:value=0.001", "gradients with a known magnitude below which elements do not matter"),
    Row(
        "dgc:ratio=0.02,warmup={fifth}",
        "as topk, for plain SGD: the momentum is part of the policy",
        **SGD,
        why="SGD ends behind AdamW here (see `sum`); sending elements late may explain the rest",
    ),
    Row(
        "warmup(steps={fifth}, then=randomk(ratio=0.1))",
        "no search and no indices, at any number of ranks; lower the learning rate of SGD with momentum",
    ),
    # Signs
    Row(
        "warmup(steps={fifth}, then=onebit)",
        "few bytes at any number of ranks; lower the learning rate of SGD with momentum",
    ),
    Row("warmup(steps={fifth}, then=efsign)", "as onebit, with half the state"),
    Row(
        "sign:momentum=0.9",
        "one bit per element without a residual, for plain SGD at a small learning rate of its own",
        0.004,
        **SGD,
        why="every step has the same length, so its learning rate bounds how near it ends",
    ),
    # Low rank
    Row(
        "warmup(steps={fifth}, then=powersgd(rank=4))",
        "large matrices, any number of ranks: the larger the matrix, the smaller the share of bytes",
    ),
    Row("warmup(steps={fifth}, then=powersgd(rank=2))", "as rank 4, with fewer bytes"),
    Row(
        "warmup(steps={fifth}, then=powersgd(rank=4, alternate=true))",
        "about half of rank 4's bytes, in one round",
    ),
    Row(
        "warmup(steps={fifth}, then=powersgd(rank=8, batched=true))",
        "many small parameters: one matrix per bucket in place of one per parameter",
    ),
    # Combining
    Row("adasum", "many ranks at an unchanged learning rate, as its authors propose (not tested by four ranks)"),
    Row("adasum_delta", "as adasum, for an optimizer that scales its steps, as Horovod does it", 0.5),
    # Robust
    Row(
        "median",
        "fewer than half of the ranks broken or hostile, element by element",
        why="gradients of small batches are skewed, so their median is not their mean at any number of ranks",
    ),
    Row(
        "trimmed_mean:f=1",
        "as median for a known number f of faulty ranks; it averages the other N - 2 f values",
        why="of four values the middle two remain, and their mean is the median",
    ),
    Row(
        "geometric_median",
        "fewer than half of the ranks broken or hostile, whole gradients; near the mean if none is",
    ),
    Row(
        "krum:f=0",
        "the one gradient that is nearest to the others",
        why="one of four gradients counts, so the batch is a quarter",
    ),
    Row(
        "multi_krum:f=0",
        "as krum, averaged over several gradients; f hostile ranks of 2 f + 3 and more",
        why="the two most similar of four gradients count, so the batch is a half",
    ),
    Row("clipped_mean", "hostile ranks whose gradients lie within the spread of honest ones"),
    # Private
    Row(
        "dp:norm=1.0,noise=0.01",
        "ranks whose contribution must not be recognisable in the model (differential privacy)",
        why="every step adds noise",
    ),
    # Later or less often
    Row("delayed", "communication as long as a whole step overlaps; lower the learning rate of SGD with momentum"),
    Row("local_sgd", "one round every 8 steps: high latency"),
    Row("post_local_sgd:start={tenth}", "as local_sgd between nodes only, after a dense start", local_size=2),
    Row("diloco:every=10,lr=1,momentum=0.5", "links between sites: one round every 10 steps"),
    # Wrappers
    Row("hierarchical(int8)", "fast links within a node, slow links between nodes", local_size=2),
    Row("ef(bf16)", "bf16 whose rounding errors are fed back"),
    Row("clip(mean)", "single ranks with exploding gradients"),
    Row(
        "partition(<1024=mean, rest=warmup(steps={fifth}, then=powersgd(rank=4)))",
        "small parameters dense, large ones compressed",
    ),
    # Controls
    Row(
        "noop",
        "debugging, and step times without communication: each rank trains alone",
        control=True, why="each rank learns from a quarter of the data",
    ),
    Row("topk:ratio=0.01,ef=false", "never", control=True, why="elements that are not sent are lost"),
    Row("int4:ef=false", "never", control=True, why="small elements are rounded to zero in every step"),
    Row("sign", "never", 0.001, **SGD, control=True, why="the vote ignores magnitudes"),
]


# ---------------------------------------------------------------------------------------------- one run


def simulate(row: Row, task: Task, seed: int, steps: int) -> dict[str, Any]:
    """Train with simulated ranks and return the results of the run."""
    args = train.arguments(task.options(row, seed, steps))
    samples, test = data.load(args.data)
    inputs, labels = samples
    policy = hb.policies.from_spec(row.policy(steps))
    # If the policy keeps parameters equal, one replica represents all ranks.
    replicas = [Replica(args, samples) for _ in range(RANKS if policy.replicas == "drift" else 1)]
    parts = ([(inputs[i], labels[i]) for i in ranks] for ranks in batches(args, len(labels)))
    result = train_replicas(policy, replicas, islice(parts, steps), steps, args.lr, row.local_size)
    loss, accuracy = evaluate(replicas[0].net, test)
    return {"loss": loss, "accuracy": accuracy, **result, "digest": train.digest(replicas[0].net)}


def train_replicas(
    policy: hb.Policy,
    replicas: Sequence[Replica],
    batches: Iterable[Sequence[tuple[Tensor, Tensor]]],
    steps: int,
    lr: float,
    local_size: int | None = None,
) -> dict[str, Any]:
    """Train on the batches of all ranks; return losses and bytes per step, and the policy's state per parameter.

    Args:
        policy: how the ranks' gradients are aggregated.
        replicas: one per rank, or a single one for all ranks if the policy keeps parameters equal.
        batches: the inputs and labels of each rank, for each of the ``steps`` steps.
        steps: the number of steps, which determines the learning rate's schedule.
        lr: the highest learning rate.
        local_size: ranks per node.
    """
    ranks = [replicas[rank % len(replicas)] for rank in range(RANKS)]
    simulation = hb.Simulation(policy, replicas[0].parameters, RANKS, local_size)
    losses, sent, outside, equal = [], [], [], True
    for step, parts in enumerate(batches):
        results = [replica.gradients(*part) for replica, part in zip(ranks, parts, strict=True)]
        updates = simulation.step([gradients for _, gradients in results])
        equal &= policy.replicas == "drift" or all(torch.equal(u[n], updates[0][n]) for u in updates for n in u)
        for replica, update in zip(replicas, updates, strict=False):
            replica.step(update, lr, step / steps)
        if policy.due(step):
            for replica, new in zip(replicas, simulation.after_step([r.parameters for r in ranks]), strict=False):
                replica.replace(new)
        losses.append([loss for loss, _ in results])
        sent.append(max(simulation.bytes_sent))
        outside.append(max(sum(by.values()) - by["node"] for by in simulation.bytes_by_group))
    for replica, update in zip(replicas, simulation.flush() or [], strict=False):
        replica.step(update, lr, (steps - 1) / steps)
    numel = sum(p.numel() for p in replicas[0].parameters.values())
    state = (t for _, leaf in leaves(simulation.stores[0].portable()) for t in leaf.values())
    return {
        "losses": losses, "bytes": sent, "outside": outside, "equal": equal,
        "state": sum(t.numel() * t.element_size() for t in state) / numel,
    }  # fmt: skip


class Replica:
    """One rank's model and optimizer."""

    def __init__(self, args: argparse.Namespace, samples: train.Samples) -> None:
        self.net, self.optimizer = train.build(args, samples, torch.device("cpu"))
        self.parameters = dict(self.net.named_parameters())

    def gradients(self, inputs: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and its gradients; parameters do not change."""
        loss = F.cross_entropy(self.net(inputs), labels)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return loss.item(), dict(zip(self.parameters, gradients, strict=True))

    def step(self, update: Mapping[str, Tensor], lr: float, progress: float) -> None:
        for name, p in self.parameters.items():
            p.grad = update[name]
        train.set_learning_rate(self.optimizer, lr, progress)
        self.optimizer.step()

    @torch.no_grad()
    def replace(self, parameters: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(parameters[name])


def batches(args: argparse.Namespace, samples: int) -> Iterator[list[list[int]]]:
    """Yield the indices of all ranks for each step, as examples/train.py draws them."""
    for epoch in count():
        ranks = []
        for rank in range(RANKS):
            sampler = hb.DistributedSampler(range(samples), rank, RANKS, seed=args.seed, pad=True)
            sampler.set_epoch(epoch)
            ranks.append(list(BatchSampler(sampler, args.batch_size, drop_last=False)))
        yield from map(list, zip(*ranks, strict=True))


@torch.no_grad()
def evaluate(net: nn.Module, test: train.Samples) -> tuple[float, float]:
    """Return mean loss and accuracy on the test set."""
    inputs, labels = test
    outputs = torch.cat([net(part) for part in inputs.split(500)])
    return F.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()


# ---------------------------------------------------------------------------------------------- all runs


class Runs:
    """The stored results, keyed by the settings of their runs, in a file that is complete at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    @staticmethod
    def key(row: Row, task: str, seed: int, steps: int) -> str:
        return json.dumps({**row.recipe(), "task": asdict(TASKS[task]), "seed": seed, "steps": steps})

    def get(self, row: Row, task: str, seed: int, steps: int) -> dict[str, Any] | None:
        return self.runs.get(self.key(row, task, seed, steps))

    def put(self, row: Row, task: str, seed: int, steps: int, result: dict[str, Any]) -> None:
        self.runs[self.key(row, task, seed, steps)] = result
        self.save()

    def forget(self, row: Row) -> None:
        """Delete all runs of a row."""
        recipe = row.recipe().items()
        self.runs = {key: result for key, result in self.runs.items() if not recipe <= json.loads(key).items()}
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.runs))
        os.replace(partial, self.path)


def train_all(rows: Sequence[Row], seeds: int, lengths: dict[str, int], store: Runs, console: Console) -> None:
    """Execute all missing runs, the first seed of all rows first. The next start repeats those that failed."""
    wanted = [(row, task, seed) for seed in range(seeds) for row in rows for task in TASKS]
    missing = [(row, t, seed) for row, t, seed in wanted if "loss" not in (store.get(row, t, seed, lengths[t]) or {})]
    columns = (TextColumn("{task.description:60}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        progress = bar.add_task("", total=len(missing))
        for number, (row, name, seed) in enumerate(missing, start=1):
            bar.update(progress, description=f"{row.spec} · {name} · seed {seed}")
            started = time.monotonic()
            try:
                result = condensed(simulate(row, TASKS[name], seed, lengths[name]))
                outcome = f"loss {result['loss']:.4f}"
            except Exception as error:  # the failure of one policy must not end the others
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
                outcome = result["error"]
            store.put(row, name, seed, lengths[name], result)
            bar.advance(progress)
            if not console.is_terminal:
                seconds = time.monotonic() - started
                print(f"[{number}/{len(missing)}] {row.spec} · {name} · {seed}: {outcome}, {seconds:.0f} s", flush=True)


def condensed(result: dict[str, Any]) -> dict[str, Any]:
    """Return the results to store. Bytes per step are those of the second half, after any warm-up."""
    return {
        "loss": result["loss"], "accuracy": result["accuracy"], "state": result["state"],
        "per_step": late_rate(result["bytes"]), "outside": late_rate(result["outside"]), "equal": result["equal"],
    }  # fmt: skip


def late_rate(counts: Sequence[int]) -> float:
    """Return the mean increase per step in the second half of a cumulative count."""
    half = (len(counts) - 1) // 2
    return (counts[-1] - counts[half]) / max(1, len(counts) - 1 - half)


# ---------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Summary:
    """A row of the table: the runs of one policy over all seeds."""

    row: Row
    wire: float
    outside: float
    state: float
    loss: float
    deviation: float
    ratio: float
    digits: float
    accuracy: float
    equal: bool

    @property
    def within(self) -> bool:
        return self.ratio <= WITHIN


def summarise(rows: Sequence[Row], seeds: int, lengths: dict[str, int], store: Runs) -> tuple[list[Summary], list[str]]:
    """Return the rows whose runs are complete, and a message for each other row. The first row is ``mean``."""
    runs = {row: {t: [store.get(row, t, s, lengths[t]) or {} for s in range(seeds)] for t in TASKS} for row in rows}
    dense = runs[rows[0]]["text"]
    summaries, problems = [], []
    for row, by_task in runs.items():
        all_runs = [run for results in by_task.values() for run in results]
        errors = {run["error"] for run in all_runs if "error" in run}
        if errors or not all("loss" in run for run in all_runs + dense):
            problems.append(f"{row.spec}: {'; '.join(sorted(errors)) or 'not all runs are done'}")
            continue
        text, digits = by_task["text"], by_task["digits"]
        losses = [run["loss"] for run in text]
        summaries.append(
            Summary(
                row,
                wire=statistics.fmean(a["per_step"] / b["per_step"] for a, b in zip(text, dense, strict=True)),
                outside=statistics.fmean(a["outside"] / b["outside"] for a, b in zip(text, dense, strict=True)),
                state=text[0]["state"],
                loss=statistics.fmean(losses),
                deviation=statistics.stdev(losses) if seeds > 1 else 0.0,
                ratio=statistics.fmean(a["loss"] / b["loss"] for a, b in zip(text, dense, strict=True)),
                digits=statistics.fmean(run["loss"] for run in digits),
                accuracy=statistics.fmean(run["accuracy"] for run in digits),
                equal=all(run["equal"] for run in all_runs),
            )
        )
    return summaries, problems


CAPTION = "Bytes and loss of every policy relative to mean, and the spread of the loss over seeds"
COLUMNS = (
    "policy", "recipe", "wire", "state", "text loss", "/ mean", "within 2 %", "digits loss", "accuracy",
    "when to choose it",
)  # fmt: skip


def cells(summaries: Iterable[Summary]) -> Iterator[list[str]]:
    for one in summaries:
        row = one.row
        wire = share(one.wire) + (f"; between nodes {share(one.outside)}" if row.local_size else "")
        recipe = [f"lr × {row.lr:g}"] if row.lr != 1 else []
        recipe += [{"sgd": "SGD", "adam": "AdamW"}[row.optimizer]] if row.optimizer else []
        recipe += [f"momentum {row.momentum:g}"] if row.momentum != 0.9 else []
        recipe += [f"nodes of {row.local_size}"] if row.local_size else []
        use = row.use if one.within else f"{row.use}. Not within 2 %: {row.why or 'NOT EXPLAINED'}"
        yield [
            f"`{row.policy()}`", ", ".join(recipe) or "–", wire, f"{one.state:.2g}",
            f"{one.loss:.3f} ± {one.deviation:.3f}", f"{one.ratio:.3f}",
            "control" if row.control else "yes" if one.within else "no",
            f"{one.digits:.3f}", f"{one.accuracy:.1%}", use,
        ]  # fmt: skip


def share(wire: float) -> str:
    """Format a share as per cent, with two digits."""
    return f"{100 * wire:.{0 if wire >= 0.1 or wire == 0 else 1 if wire >= 0.01 else 2}f} %"


def faults(summaries: Iterable[Summary]) -> Iterator[str]:
    """Yield a message for each result that the table must not contain."""
    for one in summaries:
        if one.row.control and one.within:
            yield f"{one.row.spec}: a control must lose, and it is within 2 % of mean"
        if not one.within and not one.row.why:
            yield f"{one.row.spec}: {one.ratio:.3f} of mean's loss, and its row does not say why"
        if not one.equal:
            yield f"{one.row.spec}: updates are not equal on all ranks"


def write(summaries: Sequence[Summary], problems: Sequence[str], seeds: int, lengths: dict[str, int]) -> None:
    """Write the table and its chart between the page's markers."""
    lines = [COLUMNS, ("---", "---", "--:", "--:", "--:", "--:", "---", "--:", "--:", "---"), *cells(summaries)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    text = f"{RANKS} ranks, {seeds} seeds, {' and '.join(f'{n} steps of {t}' for t, n in lengths.items())}.\n"
    if problems:
        text += "\nMissing here:\n\n" + "".join(f"- {problem}\n" for problem in problems)
    head, tail = PAGE.read_text().split(BEGIN)
    text = f"![{CAPTION}](../images/{PLOT.name})\n\n{table}\n{text}"
    PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail.split(END)[1]}")
    charts.draw("convergence", table, PLOT)


# ---------------------------------------------------------------------------------------------- real jobs

JOBS = ("mean:exact=true", "bf16", "int8", "topk:ratio=0.01", "powersgd:rank=2")


def jobs(console: Console, steps: int = 100) -> list[str]:
    """Compare four processes with four simulated ranks; return a message for each failure or difference."""
    problems = []
    for spec in JOBS:
        task = TASKS["text"]
        try:
            options = task.options(Row(spec, ""), 0, steps)
            real = run("torchrun", "torch", ROOT / "examples" / "train.py", options, ranks=RANKS, timeout=300)
        except JobFailed as error:
            problems.append(f"{spec}: {error}")
            continue
        simulated = simulate(Row(spec, ""), task, 0, steps)
        equal = real["digest"] == simulated["digest"]
        last = real["losses"][-1], simulated["losses"][-1][0]
        console.print(f"{spec}: last loss of rank 0 {last[0]:.6f} and {last[1]:.6f}; same parameters: {equal}")
        if abs(last[0] / last[1] - 1) > 0.01:
            problems.append(f"{spec}: a real job ends with the loss {last[0]:.4f}, the simulation with {last[1]:.4f}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SPEC", help="this row, or a policy that has none (several)")
    parser.add_argument("--steps", type=int, metavar="N", help="of both tasks (default: each its own)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--again", action="store_true", help="forget what was kept of these rows")
    parser.add_argument("--jobs", action="store_true", help="compare real jobs with simulated ones instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if args.jobs:
        problems = jobs(console)
        console.print("\n".join(problems) or "Real jobs and simulated ones agree.", markup=False, highlight=False)
        return 1 if problems else 0

    rows = list(ROWS)
    if args.only:
        by_spec = {row.spec: row for row in ROWS}
        rows = [ROWS[0], *(by_spec.get(spec, Row(spec, "")) for spec in args.only if spec != ROWS[0].spec)]
    lengths = {name: args.steps or task.steps for name, task in TASKS.items()}
    store = Runs(KEPT)
    if args.again:
        for row in rows[1:] if args.only else rows:
            store.forget(row)
    try:
        train_all(rows, args.seeds, lengths, store, console)
    except KeyboardInterrupt:
        console.print("Interrupted; what was done is kept.")
    summaries, problems = summarise(rows, args.seeds, lengths, store)
    table = Table(*COLUMNS[:-1], box=box.SIMPLE_HEAD)
    for line in cells(summaries):
        table.add_row(*line[:-1])
    console.print(table)
    problems += faults(summaries)
    if args.only or args.steps or args.seeds < 3:
        console.print("docs/explanation/convergence.md is not written: that takes all rows, all steps and three seeds.")
    else:
        write(summaries, problems, args.seeds, lengths)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
