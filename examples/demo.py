"""The main job: train.py on two ranks under three launchers, on three backends, with three policies.

::

    python examples/demo.py [--quick] [--markdown FILE]

Ends with a table and status 0 if, for each policy, all nine jobs end with the same parameters, bit for bit, and
those of `mean` are the ones of plain DistributedDataParallel (plain_ddp.py). On two ranks they must be: a sum of
two numbers does not depend on who adds them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch instead of eight")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()

    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # a log has no width of its own
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
    console.print(f"{len(results)} jobs in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


def train_all(console: Console, length: list[str]) -> tuple[dict[Cell, dict[str, Any]], list[str]]:
    """Run all jobs, one after the other; what they measured, and which failed."""
    cells: list[Cell] = [PLAIN]
    cells += [(launcher, backend, policy) for policy in POLICIES for launcher in LAUNCHERS for backend in BACKENDS]
    results: dict[Cell, dict[str, Any]] = {}
    failures = []
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(cells))
        for number, cell in enumerate(cells, start=1):
            launcher, backend, policy = cell
            bar.update(task, description=" x ".join(cell))
            started = time.monotonic()
            try:
                if cell == PLAIN:
                    results[cell] = run(launcher, None, EXAMPLES / "plain_ddp.py", length)
                else:
                    results[cell] = run(launcher, backend, EXAMPLES / "train.py", length + POLICIES[policy])
                outcome = results[cell]["digest"][:12]
            except JobFailed as error:
                failures.append(f"{' x '.join(cell)} failed")
                outcome = "failed"
                console.print(str(error), style="red", markup=False, highlight=False)
            bar.advance(task)
            if not console.is_terminal:
                seconds = time.monotonic() - started
                print(f"[{number:2}/{len(cells)}] {' x '.join(cell):42} {outcome:12} {seconds:5.1f} s", flush=True)
    return results, failures


def differences(results: dict[Cell, dict[str, Any]]) -> list[str]:
    """One line for each policy whose digests are not all equal."""
    lines = []
    for policy in POLICIES:
        cells: dict[str, list[Cell]] = {}
        for cell, result in results.items():
            if cell[2] == policy:
                cells.setdefault(result["digest"][:12], []).append(cell)
        if len(cells) > 1:
            groups = (f"{digest}: {', '.join(f'{a} x {b}' for a, b, _ in who)}" for digest, who in cells.items())
            lines.append(f"{policy}: the digests differ: {'; '.join(groups)}")
    return lines


def rows(results: dict[Cell, dict[str, Any]]) -> Iterable[list[str]]:
    for (launcher, backend, policy), result in results.items():
        yield [
            launcher, backend, policy, f"{result['accuracy']:.1%}", f"{1000 * result['step_seconds']:.2f}",
            f"{result['bytes_sent']:,}", result["digest"][:12],
        ]  # fmt: skip


def as_table(results: dict[Cell, dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, box=box.SIMPLE_HEAD, title="train.py on two ranks")
    for column in table.columns[3:6]:
        column.justify = "right"
    for row in rows(results):
        table.add_row(*row)
    return table


def as_markdown(results: dict[Cell, dict[str, Any]]) -> str:
    lines = [COLUMNS, ("---", "---", "---", "--:", "--:", "--:", "---"), *rows(results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
