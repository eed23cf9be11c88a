"""Draw the charts of docs/explanation from the tables of its pages, into docs/images.

    python benchmarks/charts.py            # after a change of a table; needs matplotlib

Rules:

1. A chart shows the figures of one table and nothing else. The script reads them from the page, so chart and table
   cannot differ. The picture directly before a table shows it.
2. Each file holds a digest of its table. tests/unit/test_charts.py fails if a table has changed and its chart has not.
3. Series differ by shape and by colour, in colours that readers with colour blindness can distinguish (Okabe and Ito).
"""

from __future__ import annotations

import hashlib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "explanation" / f"{name}.md" for name in ("performance", "convergence")]
IMAGES = ROOT / "docs" / "images"
CHARTED = re.compile(r"!\[.*\]\(\.\./images/(\S+)\.svg\)\n\n((?:\|.*\n)+)")
NUMBER = re.compile(r"[-−]?\d[\d,]*\.?\d*")
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "0.45"
SERIES = list(zip((BLUE, ORANGE, GREEN, RED, PURPLE), "osD^v", strict=True))
WIDTH = 8.0
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "hvdbridge", "svg.fonttype": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip

Table = list[dict[str, str]]


def tables(page: str) -> dict[str, str]:
    """Return the markdown of each table with a chart, by the name of the chart."""
    return dict(CHARTED.findall(page))


def parse(markdown: str) -> Table:
    """Return the rows of a markdown table, as dictionaries by heading; a repeated heading gets a number.

    >>> parse("| a | b | b |\\n|---|---|---|\\n| *x* | 1 | 2 |\\n")
    [{'a': 'x', 'b': '1', 'b (2)': '2'}]
    """
    lines = [[cell.strip().strip("*") for cell in line.strip().strip("|").split("|")] for line in markdown.splitlines()]
    repeats = [lines[0][:i].count(heading) + 1 for i, heading in enumerate(lines[0])]
    headings = [heading if n == 1 else f"{heading} ({n})" for heading, n in zip(lines[0], repeats, strict=True)]
    return [dict(zip(headings, line, strict=True)) for line in lines[2:]]


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell.

    >>> numbers("0.93 .. 1.00"), numbers("-6 .. −1"), numbers("1.434 ± 0.004"), numbers("1,099"), numbers("–")
    ([0.93, 1.0], [-6.0, -1.0], [1.434, 0.004], [1099.0], [])
    """
    return [float(number.replace(",", "").replace("−", "-")) for number in NUMBER.findall(cell)]


def plain(cell: str) -> str:
    return cell.replace("`", "")


def digest(markdown: str) -> str:
    """Return what a chart's file holds of its table."""
    return "table " + hashlib.sha256(markdown.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- charts


def adapter(rows: Table, plt: Any) -> Any:
    """Step time relative to the native way: one panel per model, one line per backend."""
    models = list(rows[0])[2:]
    figure, panels = plt.subplots(1, len(models), figsize=(WIDTH, 1.8), sharey=True)
    for model, axes in zip(models, panels, strict=True):
        axes.axvline(1.0, color="0.6", linewidth=1)
        for row, (colour, shape) in zip(rows, SERIES, strict=False):
            label, values = row["backend"], numbers(row[model])
            axes.plot([min(values), max(values)], [label, label], color=colour, linewidth=3, alpha=0.5)
            axes.plot(values, [label] * len(values), shape, color=colour, markersize=5)
        axes.set(title=model, xlim=(0.75, 1.2), xlabel="step time / native step time")
        axes.grid(axis="x", color="0.92")
    panels[0].invert_yaxis()
    return figure


def slow_link(rows: Table, plt: Any) -> Any:
    """Step time in milliseconds, one panel per link; the label adds the speed relative to torch's fp16 hook."""
    headings = list(rows[0])
    links = [(headings[i], headings[i + 2]) for i in range(1, len(headings), 3)]
    figure, panels = plt.subplots(1, len(links), figsize=(WIDTH, 2.4), sharey=True)
    names = [plain(row[headings[0]]) for row in rows]
    for (step, speed), axes in zip(links, panels, strict=True):
        values = [numbers(row[step])[0] for row in rows]
        axes.barh(names, values, color=[GREY] + [BLUE] * (len(rows) - 1), height=0.65)
        for y, (value, row) in enumerate(zip(values, rows, strict=True)):
            axes.annotate(f"{value:,.0f} ms, {numbers(row[speed])[0]:g}×", (value, y), (3, 0), va="center",
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set(title=step.removesuffix(": step, ms"), xlabel="step time, ms, and × fp16 hook")
        axes.set(xlim=(0, 1.75 * max(values)))
        axes.locator_params(axis="x", nbins=3)
    panels[0].invert_yaxis()
    return figure


def gpu(rows: Table, plt: Any) -> Any:
    """Milliseconds that a policy adds to a step on one GPU, for two bucket sizes."""
    columns = [heading for heading in rows[0] if "buckets" in heading]
    figure, axes = plt.subplots(figsize=(WIDTH, 2.8))
    names, height = [plain(row["policy"]) for row in rows], 0.38
    for offset, column, colour in zip((-0.5, 0.5), columns, (GREY, BLUE), strict=True):
        values = [numbers(row[column])[0] for row in rows]
        places = [y + offset * height for y in range(len(rows))]
        axes.barh(places, values, height, color=colour, label=column)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:g}", (value, place), (3, 0), va="center", textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="milliseconds per step above plain DDP")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    return figure


def memory(rows: Table, plt: Any) -> Any:
    """Resident memory above plain DDP, as a range per group of policies."""
    name, _, resident = rows[0]
    labels = [textwrap.fill(plain(row[name]), 58, break_long_words=False) for row in rows]
    sizes = [label.count("\n") + 1.6 for label in labels]
    places = [sum(sizes[:i]) + sizes[i] / 2 for i in range(len(sizes))]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.165 * sum(sizes) + 0.6))
    axes.axvline(0, color="0.6", linewidth=1)
    for place, row in zip(places, rows, strict=True):
        low, *_, high = numbers(row[resident]) * 2
        axes.barh(place, high - min(low, 0), left=min(low, 0), height=1.0, color=BLUE)
        text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        axes.annotate(text, (max(high, 0), place), (3, 0), va="center", textcoords="offset points", fontsize=8)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set(xlabel="MiB above plain DDP, the policy's state left out", xlim=(-15, 580))
    axes.invert_yaxis()
    return figure


def plan(rows: Table, plt: Any) -> Any:
    """Predicted step time relative to the measured one: a line per job, a mark per policy."""
    name, *policies = rows[0]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.27 * len(rows) + 1.1))
    axes.axvspan(0.85, 1.15, color="0.93", label="within 15 %")
    axes.axvline(1.0, color="0.6", linewidth=1)
    for number, (policy, (colour, shape)) in enumerate(zip(policies, SERIES, strict=True)):
        found = [(ratio, y + 0.13 * (number - 2)) for y, row in enumerate(rows) for ratio in numbers(row[policy])]
        axes.plot(*zip(*found, strict=True), shape, color=colour, markersize=5, linestyle="none", label=plain(policy))
    axes.set_yticks(range(len(rows)), [plain(row[name]) for row in rows])
    axes.set(xlabel="predicted / measured", xlim=(0.8, 1.2), ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="y", color="0.95")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.24), ncols=6, frameon=False, handletextpad=0.2)
    return figure


def convergence(rows: Table, plt: Any) -> Any:
    """Bytes and loss of every policy, relative to ``mean``, in the order of the bytes."""
    left, top = 1.0, 1.2  # per cent at the left border; larger ratios are drawn at the right border
    rows = sorted(rows, key=lambda row: (-share(row), numbers(row["/ mean"])[0]))
    figure, (sent, loss) = plt.subplots(1, 2, figsize=(WIDTH, 0.19 * len(rows) + 1.3), sharey=True)
    kinds = {"yes": ("within 2 % of mean's loss", BLUE, "o"), "no": ("not within 2 %", RED, "^"),
             "control": ("control: expected to lose", GREY, "X")}  # fmt: skip
    for y, row in enumerate(rows):
        _, colour, shape = kinds[row["within 2 %"]]
        sent.plot(max(share(row), left), y, shape, color=colour, markersize=5, clip_on=False)
        if share(row) == 0:
            sent.annotate("0 bytes", (left, y), (7, 0), va="center", textcoords="offset points", fontsize=8)
        nodes = re.search(r"between nodes (\S+) %", row["wire"])
        if nodes:
            x = float(nodes[1])
            sent.plot(x, y, shape, color=colour, markersize=5, fillstyle="none")
            sent.annotate("between nodes", (x, y), (-6, 0), ha="right", va="center", textcoords="offset points",
                          fontsize=7)  # fmt: skip
        (ratio,), (mean, deviation) = numbers(row["/ mean"]), numbers(row["text loss"])
        if ratio > top:
            loss.plot(top, y, shape, color=colour, markersize=5, clip_on=False)
            loss.annotate(f"{ratio:.2f} →", (top, y), (-7, 0), ha="right", va="center", textcoords="offset points",
                          fontsize=8)  # fmt: skip
        else:
            error = ratio * deviation / mean
            loss.errorbar(ratio, y, xerr=error, fmt=shape, color=colour, markersize=5, elinewidth=1.2)
    sent.set(xscale="log", xlim=(left, 130), xlabel="bytes per step, % of mean's", ylim=(len(rows) - 0.4, -0.6))
    sent.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    sent.set_xticks([], minor=True)
    sent.set_yticks(range(len(rows)), [short(row["policy"]) for row in rows], fontsize=8)
    loss.axvspan(0.98, 1.02, color="0.93", zorder=0)
    loss.axvline(1.0, color="0.6", linewidth=1, zorder=0)
    loss.set(xlim=(0.98, top), xlabel="loss / mean's loss (bar: ± deviation)")
    for axes in (sent, loss):
        axes.grid(axis="y", color="0.94")
    used = [kind for kind in kinds if any(row["within 2 %"] == kind for row in rows)]
    marks = [plt.Line2D([], [], color=kinds[kind][1], marker=kinds[kind][2], linestyle="none") for kind in used]
    figure.legend(marks, [kinds[kind][0] for kind in used], loc="outside upper center", ncols=3, frameon=False)
    figure.text(0.01, 0.01, "* after a dense\n   warm-up", fontsize=8, va="bottom")
    return figure


def share(row: dict[str, str]) -> float:
    """Return the bytes of a step, in per cent of those of ``mean``."""
    return numbers(row["wire"])[0]


def short(spec: str) -> str:
    """Shorten a spec to a label: a warm-up becomes a mark.

    >>> short("`warmup(steps=320, then=topk(ratio=0.01))`"), short("`bf16`")
    ('topk(ratio=0.01) *', 'bf16')
    >>> short("`partition(<1024=mean, rest=warmup(steps=320, then=powersgd(rank=4)))`")
    'partition(<1024=mean, rest=powersgd(rank=4)) *'
    """
    inner = re.sub(r"warmup\(steps=\d+, then=((?:[^()]|\([^()]*\))*)\)", r"\1", plain(spec))
    return inner if inner == plain(spec) else f"{inner} *"


CHARTS: dict[str, Callable[[Table, Any], Any]] = {
    "adapter": adapter, "slow-link": slow_link, "gpu": gpu, "memory": memory, "plan": plan, "convergence": convergence,
}  # fmt: skip


def draw(name: str, markdown: str, path: Path) -> None:
    """Write the chart ``name`` of a table to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({**STYLE, "figure.constrained_layout.use": True}):
        figure = CHARTS[name](parse(markdown), plt)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Description": digest(markdown)})
        plt.close(figure)


def main(names: Sequence[str] = ()) -> int:
    for page in PAGES:
        for name, markdown in tables(page.read_text()).items():
            if not names or name in names:
                path = IMAGES / f"{name}.svg"
                draw(name, markdown, path)
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
