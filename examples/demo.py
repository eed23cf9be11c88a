"""The main demonstration: train.py on two ranks under three launchers, on three backends, with three policies.

::

    python examples/demo.py [--quick] [--markdown FILE]

Each of the nine cells (launcher x backend) is one job that trains once with each policy; plain_ddp.py is the tenth job.
The script prints a table. Its status is 0 if, for each policy, all nine cells end with the same parameters, bit for
bit, and those of `mean` equal those of plain DistributedDataParallel. On two ranks they must be equal: a sum of two
numbers does not depend on their order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cells import BACKENDS, LAUNCHERS, JobFailed, run
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
POLICIES = {
    "mean": ["--policy=mean"],
    "mean, weighted": ["--policy=mean", "--uneven"],
    "bf16": ["--policy=bf16"],
}
PLAIN = ("torchrun", "plain DDP", "mean")
COLUMNS = ("launcher", "backend", "policy", "accuracy", "ms per step", "bytes per step", "digest")

Cell = tuple[str, str, str]  # launcher, backend, policy
Results = dict[Cell, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch instead of eight")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--metrics", type=Path, help=argparse.SUPPRESS)  # for the ranks of a cell
    args, options = parser.parse_known_args()
    if args.metrics:
        train_one_cell(args.metrics, options)
        return 0
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")

    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # a log file has no width
    length = [f"--epochs={1 if args.quick else 8}"]
    started = time.monotonic()
    results, failures = train_all(console, length)
    console.print(as_table(results))
    if args.markdown:
        args.markdown.write_text(as_markdown(results))
    problems = failures + differences(results)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if not problems:
        console.print("Every policy: nine equal digests. mean: equal to plain DistributedDataParallel.", style="green")
    console.print(f"{len(results)} trainings in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


def train_one_cell(metrics: Path, options: Sequence[str]) -> None:
    """Train once with each policy. Each rank of a cell calls this."""
    import train

    import hvdbridge as hb

    hb.init()
    results = {policy: train.run(train.arguments([*options, *own])) for policy, own in POLICIES.items()}
    if hb.rank() == 0:
        metrics.write_text(json.dumps(results))
    hb.shutdown()


def train_all(console: Console, length: list[str]) -> tuple[Results, list[str]]:
    """Run all jobs in sequence; return their results, and one message for each job that failed."""
    plain, *_ = PLAIN
    jobs: list[tuple[str, str | None, str]] = [(plain, None, "plain_ddp.py")]
    jobs += [(launcher, backend, "demo.py") for launcher in LAUNCHERS for backend in BACKENDS]
    results: Results = {}
    failures = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs))
        for number, (launcher, backend, script) in enumerate(jobs, start=1):
            name = f"{launcher} x {backend or PLAIN[1]}"
            bar.update(task, description=name)
            started = time.monotonic()
            try:
                metrics = run(launcher, backend, EXAMPLES / script, length)
                trained = metrics if backend else {PLAIN[2]: metrics}
                results |= {(launcher, backend or PLAIN[1], policy): result for policy, result in trained.items()}
                outcome = " ".join(result["digest"][:12] for result in trained.values())
            except (JobFailed, FileNotFoundError) as error:  # the launcher is not installed
                failures.append(f"{name} failed")
                outcome = "failed"
                console.print(str(error), style="red", markup=False, highlight=False)
            bar.advance(task)
            if not console.is_terminal:
                seconds = time.monotonic() - started
                print(f"[{number:2}/{len(jobs)}] {name:24} {outcome:38} {seconds:5.1f} s", flush=True)
    return results, failures


def differences(results: Results) -> list[str]:
    """Return one message for each policy whose digests are not all equal."""
    lines = []
    for policy in POLICIES:
        cells: dict[str, list[Cell]] = {}
        for cell, result in results.items():
            if cell[2] == policy:
                cells.setdefault(result["digest"][:12], []).append(cell)
        if len(cells) > 1:
            groups = (f"{digest}: {', '.join(f'{a} x {b}' for a, b, _ in group)}" for digest, group in cells.items())
            lines.append(f"{policy}: the digests differ: {'; '.join(groups)}")
    return lines


def rows(results: Results) -> Iterable[list[str]]:
    for (launcher, backend, policy), result in results.items():
        yield [
            launcher, backend, policy, f"{result['accuracy']:.1%}", f"{1000 * result['step_seconds']:.2f}",
            f"{result['bytes_sent']:,}", result["digest"][:12],
        ]  # fmt: skip


def as_table(results: Results) -> Table:
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, title="train.py on two ranks")
    for column in table.columns[3:6]:
        column.justify = "right"
    for row in rows(results):
        table.add_row(*row)
    return table


def as_markdown(results: Results) -> str:
    lines = [COLUMNS, ("---", "---", "---", "--:", "--:", "--:", "---"), *rows(results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
