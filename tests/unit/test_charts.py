"""benchmarks/charts.py: every chart shows the table of its page, and no two labels overlap."""

from __future__ import annotations

import doctest
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def charts():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import charts
    finally:
        del sys.path[0]
    return charts


@pytest.fixture(scope="module")
def tables(charts):
    return {name: table for page in charts.PAGES for name, table in charts.tables(page.read_text()).items()}


def test_every_chart_has_its_table_and_the_other_way_round(charts, tables):
    assert set(tables) == set(charts.CHARTS)
    assert {path.stem for path in charts.IMAGES.glob("*.svg")} >= set(tables)


def test_charts_show_the_tables_of_today(charts, tables):
    """After a change of a table: python benchmarks/charts.py."""
    for name, table in tables.items():
        assert charts.digest(table) in (charts.IMAGES / f"{name}.svg").read_text(), name


def test_a_changed_figure_is_a_changed_digest(charts, tables):
    table = tables["convergence"]
    assert charts.digest(table.replace("1.434", "1.435")) != charts.digest(table)


def test_no_labels_overlap(charts, tables):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, table in tables.items():
        with pyplot.rc_context({**charts.STYLE, "figure.constrained_layout.use": True}):
            figure = charts.CHARTS[name](charts.parse(table), pyplot)
            figure.canvas.draw()
            for axes in figure.axes:
                labels = [label for label in axes.get_yticklabels() if label.get_visible() and label.get_text()]
                boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
                assert len(boxes) >= len(charts.parse(table)) or axes is not figure.axes[0], name
                assert all(low.y1 <= high.y0 for low, high in pairwise(boxes)), name
                assert all(box.x0 >= 0 for box in boxes), name
                label = axes.xaxis.label.get_window_extent()
                assert label.x0 >= 0, name
                assert label.x1 <= figure.bbox.width, name
            pyplot.close(figure)


def test_doctests(charts):
    assert doctest.testmod(charts, raise_on_error=True).attempted
