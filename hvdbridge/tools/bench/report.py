"""What was measured or predicted, as tables, JSON and plots."""

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
    """Rows, which map headings to cells, as a table; markup is shown as it is."""
    found = Table(*rows[0], title=escape(title), caption=caption)
    for row in rows:
        found.add_row(*map(escape, row.values()))
    return found


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def measured(rows: Sequence[Row]) -> Table:
    """The table of ``hvdbridge bench``; milliseconds are medians."""
    jobs = dict.fromkeys(f"{row.ranks} ranks by {row.launcher}, native: {row.against}" for row in rows)
    caption = "–: work on a GPU is only enqueued, so the host cannot time it"
    title = f"milliseconds per step ({'; '.join(jobs)})"
    return table(title, [_cells(row) for row in rows], caption if any(row.enqueued for row in rows) else None)


def _cells(row: Row) -> dict[str, str]:
    low, middle, high = row.ratio or (0.0, 0.0, 0.0)
    own = ("–", "–", "–") if row.enqueued else (_ms(row.compression), _ms(row.communication), _mega(row.bandwidth))
    return {
        "backend": row.backend, "model": row.model, "policy": row.policy, "step": _ms(row.step),
        "compute": _ms(row.compute), "compress": own[0], "communicate": own[1], "exposed": _ms(row.exposed),
        "bucket": f"{row.bucket_mb:g}", "MB/step": _mega(row.bytes_sent), "MB/s": own[2],
        "/native": f"{middle:.3f}" if row.ratio else "–", "quartiles": f"{low:.2f} .. {high:.2f}" if row.ratio else "–",
        "/limit": f"{row.limit:.2f}",
    }  # fmt: skip


def _mega(amount: float) -> str:
    """In millions, to three digits or more.

    >>> [_mega(amount) for amount in (0, 1234, 5_033_000, 437_930_000)]
    ['0', '0.00123', '5.03', '437.93']
    """
    return f"{amount / 1e6:.2f}" if amount >= 1e6 else f"{amount / 1e6:.3g}"


def predicted(found: Sequence[Prediction]) -> Table:
    """The table of ``hvdbridge plan``: a line per policy, a column per number of ranks, milliseconds and megabytes."""
    at = {(one.policy, one.ranks): f"{_ms(one.step)} ({one.bytes_sent / 1e6:.1f})" for one in found}
    sizes = sorted({one.ranks for one in found})
    rows = [
        {"policy": policy} | {f"{n:,} ranks": at.get((policy, n), "–") for n in sizes}
        for policy in dict.fromkeys(one.policy for one in found)
    ]
    return table("predicted milliseconds per step (megabytes sent per rank)", rows)


def compared(found: Sequence[tuple[Prediction, float]]) -> Table:
    """Predictions beside the seconds that a step took."""
    rows = [
        {"policy": one.policy, "ranks": f"{one.ranks:,}", "predicted": _ms(one.step), "measured": _ms(step),
         "ratio": f"{one.step / step:.2f}"}
        for one, step in found
    ]  # fmt: skip
    return table("milliseconds per step", rows)


def show(table: Table) -> None:
    """Print it whole: where the terminal is narrower its lines wrap, but no figure is cut."""
    Console(width=max(Console().width, Console(width=1000).measure(table).maximum)).print(table)


def save(path: Path, network: Network, rows: Sequence[Row | Prediction], **more: Any) -> None:
    """All figures, in seconds and bytes, as JSON; a file that is there is replaced at once or not at all."""
    figures = [asdict(row) | ({"bandwidth": row.bandwidth} if isinstance(row, Row) else {}) for row in rows]
    content = {**more, "network": asdict(network), "rows": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe whose own name leads nowhere
        path.write_text(text)
        return
    path = path.resolve()
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


@contextmanager
def _axes(path: Path, height: float) -> Iterator[Any]:
    """Axes of a figure that is written in the end."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    yield axes
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_measured(path: Path, rows: Sequence[Row]) -> None:
    """Stacked bars: compute, compression, what is exposed; beside each the native step as a line."""
    labels = [f"{row.policy} · {row.model} · {row.backend}" for row in rows]
    left = [0.0] * len(rows)
    parts = {
        "compute": [row.compute for row in rows],
        # Of compression what a step shows: all where it shares backward's core
        "compression": [max(0.0, row.step - row.compute - row.exposed) for row in rows],
        "exposed": [row.exposed for row in rows],
    }
    with _axes(path, 1.5 + 0.35 * len(rows)) as axes:
        for part, seconds in parts.items():
            values = [1e3 * each for each in seconds]
            axes.barh(labels, values, left=left, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
        native = [(1e3 * row.native, place) for place, row in enumerate(rows) if row.native is not None]
        if native:
            axes.plot(*zip(*native, strict=True), "k|", markersize=14, label="native step")
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per step")


def plot_predicted(path: Path, found: Sequence[Prediction]) -> None:
    """Step time over the number of ranks, a line per policy."""
    with _axes(path, 6) as axes:
        for policy in dict.fromkeys(one.policy for one in found):
            mine = [one for one in found if one.policy == policy]
            axes.plot([one.ranks for one in mine], [1e3 * one.step for one in mine], marker=".", label=policy)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel("milliseconds per step")


def recommend(found: Sequence[Prediction], ranks: int) -> str:
    """The policy to take at ``ranks`` ranks, and why: the fastest, unless a simpler one is as fast within 5 %.

    ``found`` is ordered from the simplest policy to the one that asks most of a training's recipe.
    """
    here = [one for one in found if one.ranks == ranks and math.isfinite(one.step)]
    best = min(here, key=lambda one: one.step)
    simplest = next(one for one in here if one.step <= 1.05 * best.step)
    dense = here[0]
    hidden = simplest.step <= 1.05 * simplest.compute
    if hidden:
        reason = "all it does hides behind backward"
    else:
        busy = simplest.step <= 1.05 * simplest.working
        reason = f"{'cores are' if busy else 'the network is'} what the step waits for"
    text = f"{ranks:,} ranks: {simplest.policy}: {1e3 * simplest.step:.1f} ms a step, {reason}"
    if simplest is not dense:
        text += f"; {dense.step / simplest.step:.1f} times as fast as {dense.policy}"
    elif hidden:
        text += "; nothing is gained by sending less"
    return text + "."


def check_plot(path: Path | None) -> None:
    """Before anything is measured: whether it can be drawn.

    Raises:
        BackendUnavailable: matplotlib is not installed.
        ConfigurationError: it does not write such files.
    """
    if path is None:
        return
    known = pyplot().figure().canvas.get_supported_filetypes()
    pyplot().close()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigurationError(f"--plot {path}: its name must end in one of .{', .'.join(sorted(known))}")


def pyplot() -> Any:
    """Raises BackendUnavailable: matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailable("plots need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
