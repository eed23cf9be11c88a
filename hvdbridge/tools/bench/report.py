"""Measurements and predictions as tables, JSON and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdbridge.errors import BackendUnavailable, ConfigurationError
from hvdbridge.tools.bench.cost import Prediction
from hvdbridge.tools.bench.measure import Row
from hvdbridge.tools.bench.transport import Network


def table(title: str, rows: Sequence[Mapping[str, str]], caption: str | None = None) -> Table:
    """Make a table of rows, which map headings to cells; rich's markup in cells is escaped."""
    result = Table(*rows[0], title=escape(title), caption=caption)
    for row in rows:
        result.add_row(*map(escape, row.values()))
    return result


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def measured(rows: Sequence[Row]) -> Table:
    """Return the table of ``hvdbridge bench``, in milliseconds (medians)."""
    jobs = dict.fromkeys(f"{row.ranks} ranks by {row.launcher}, native: {row.against}" for row in rows)
    caption = "–: work on a GPU is only enqueued, so the host cannot time it"
    title = f"milliseconds per step ({'; '.join(jobs)})"
    return table(title, [_cells(row) for row in rows], caption if any(row.enqueued for row in rows) else None)


def _cells(row: Row) -> dict[str, str]:
    low, middle, high = row.ratio or (0.0, 0.0, 0.0)
    timed = ("–", "–", "–") if row.enqueued else (_ms(row.compression), _ms(row.communication), _mega(row.bandwidth))
    return {
        "backend": row.backend, "model": row.model, "policy": row.policy, "step": _ms(row.step),
        "compute": _ms(row.compute), "compress": timed[0], "communicate": timed[1], "exposed": _ms(row.exposed),
        "bucket": f"{row.bucket_mb:g}", "MB/step": _mega(row.bytes_sent), "MB/s": timed[2],
        "/native": f"{middle:.3f}" if row.ratio else "–", "quartiles": f"{low:.2f} .. {high:.2f}" if row.ratio else "–",
        "/limit": f"{row.limit:.2f}",
    }  # fmt: skip


def _mega(amount: float) -> str:
    """Format a number in millions, to three digits or more.

    >>> [_mega(amount) for amount in (0, 1234, 5_033_000, 437_930_000)]
    ['0', '0.00123', '5.03', '437.93']
    """
    return f"{amount / 1e6:.2f}" if amount >= 1e6 else f"{amount / 1e6:.3g}"


def predicted(predictions: Sequence[Prediction]) -> Table:
    """Return the table of ``hvdbridge plan``: milliseconds (megabytes) by policy (rows) and ranks (columns)."""
    cells = {(row.policy, row.ranks): f"{_ms(row.step)} ({_mega(row.bytes_sent)})" for row in predictions}
    sizes = sorted({row.ranks for row in predictions})
    rows = [
        {"policy": policy} | {f"{n:,} ranks": cells.get((policy, n), "–") for n in sizes}
        for policy in dict.fromkeys(row.policy for row in predictions)
    ]
    return table("predicted milliseconds per step (megabytes sent per rank)", rows)


def compared(pairs: Sequence[tuple[Prediction, float]]) -> Table:
    """Return a table of predictions and of the measured seconds of their steps."""
    rows = [
        {"policy": row.policy, "ranks": f"{row.ranks:,}", "predicted": _ms(row.step), "measured": _ms(step),
         "ratio": f"{row.step / step:.2f}"}
        for row, step in pairs
    ]  # fmt: skip
    caption = (
        "Each is predicted with the computation of its own run. Far below 1: the run waited for more than its parts "
        "took alone, as ranks do for each other and for busy cores. That matters in steps of a few milliseconds."
    )
    return table("milliseconds per step", rows, caption)


def show(table: Table) -> None:
    """Print a table in full width: on a narrow terminal lines wrap, but no value is cut."""
    Console(width=max(Console().width, Console(width=1000).measure(table).maximum)).print(table)


def save(path: Path, network: Network, rows: Sequence[Row | Prediction], **more: Any) -> None:
    """Write all figures, in seconds and bytes, as JSON. An existing file is replaced atomically."""
    figures = [asdict(row) | ({"bandwidth": row.bandwidth} if isinstance(row, Row) else {}) for row in rows]
    content = {**more, "network": asdict(network), "rows": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, or a pipe, whose resolved name cannot be opened
        path.write_text(text)
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def _axes(path: Path, height: float) -> Iterator[Any]:
    """Yield the axes of a figure, which is written to ``path`` at exit; height in inches."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    yield axes
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_measured(path: Path, rows: Sequence[Row]) -> None:
    """Plot stacked bars of compute, compression and exposed time, with a mark at the native step's time."""
    labels = [f"{row.policy} · {row.model} · {row.backend}" for row in rows]
    left = [0.0] * len(rows)
    parts = {
        "compute": [row.compute for row in rows],
        # The compression that is visible in a step: all of it if it shares backward's core
        "compression": [max(0.0, row.step - row.compute - row.exposed) for row in rows],
        "exposed": [row.exposed for row in rows],
    }
    with _axes(path, 1.5 + 0.35 * len(rows)) as axes:
        for part, seconds in parts.items():
            values = [1e3 * second for second in seconds]
            axes.barh(labels, values, left=left, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
        native = [(1e3 * row.native, position) for position, row in enumerate(rows) if row.native is not None]
        if native:
            axes.plot(*zip(*native, strict=True), "k|", markersize=14, label="native step")
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per step")


def plot_predicted(path: Path, predictions: Sequence[Prediction]) -> None:
    """Plot step time over the number of ranks, with one curve per policy."""
    with _axes(path, 6) as axes:
        for policy in dict.fromkeys(row.policy for row in predictions):
            of_policy = [row for row in predictions if row.policy == policy]
            axes.plot([row.ranks for row in of_policy], [1e3 * row.step for row in of_policy], marker=".", label=policy)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel("milliseconds per step")


def recommend(predictions: Sequence[Prediction], ranks: int) -> str:
    """Return a sentence with the recommended policy at ``ranks`` ranks: the simplest one within 5 % of the fastest.

    ``predictions`` are ordered from the simplest policy to the one that changes the training's recipe most.
    """
    candidates = [row for row in predictions if row.ranks == ranks and math.isfinite(row.step)]
    if not candidates:
        return f"{ranks:,} ranks: no policy has a prediction"
    best = min(candidates, key=lambda row: row.step)
    simplest = next(row for row in candidates if row.step <= 1.05 * best.step)
    dense = candidates[0]
    hidden = simplest.step <= 1.05 * simplest.compute
    if hidden:
        reason = "all of its work overlaps with backward"
    else:
        cores_limit = simplest.step <= 1.05 * simplest.working
        reason = f"{'cores are' if cores_limit else 'the network is'} what the step waits for"
    text = f"{ranks:,} ranks: {simplest.policy}: {1e3 * simplest.step:.1f} ms a step, {reason}"
    if simplest is not dense:
        text += f"; {dense.step / simplest.step:.1f} times as fast as {dense.policy}"
    elif hidden:
        text += "; nothing is gained by sending less"
    return text + "."


def check_plot(path: Path | None) -> None:
    """Check, before anything is measured, that a plot can be written.

    Raises:
        BackendUnavailable: matplotlib is not installed.
        ConfigurationError: matplotlib does not write this type of file.
    """
    if path is None:
        return
    known = pyplot().figure().canvas.get_supported_filetypes()
    pyplot().close()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigurationError(f"--plot {path}: its name must end in one of .{', .'.join(sorted(known))}")


def pyplot() -> Any:
    """Import pyplot with a backend for files; raise BackendUnavailable if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
