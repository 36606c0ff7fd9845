"""The plots of the pages: the tables that they are drawn from, and the plots themselves."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def plots():
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        import plots
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}, of the extra docs")
    finally:
        sys.path.pop(0)
    return plots


def test_tables_are_read_whole(plots):
    text = (ROOT / "docs" / "benchmarks_data" / "tables.inc").read_text(encoding="utf-8")
    found = plots.tables()
    assert len(found) == text.count(".. csv-table::") == 28
    for table in found:
        for column in ("native", "auto, private arrays", "auto, symmetric arrays"):
            points = table.column(column)
            assert [n for n, _ in points] == sorted({n for n, _ in points})
            assert len(points) == len(table.rows) and all(ratio > 0 for _, ratio in points)


def test_outputs_of_the_pages_are_read(plots):
    rows = plots.printed("hierarchical.rst", "MPI       bytes")
    assert [row["MPI"] for row in rows] == ["Open MPI"] * 5 + ["MPICH"] * 5
    for row in rows:
        two, ring = plots.number(row["two levels"]), plots.number(row["ring"])
        assert ring / two == pytest.approx(float(row["over ring"]), abs=0.06), "the page's ratio"


@pytest.mark.long
def test_every_plot_is_drawn_and_shown(plots, tmp_path):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.rst"))
    shown = set(re.findall(r"^\.\. plot:: (\S+)$", pages, re.MULTILINE))
    assert shown == set(plots.PLOTS)
    for name, draw in plots.PLOTS.items():
        plots.with_colours(draw, plots.LIGHT, tmp_path / f"{name}.svg")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


def test_plot_of_the_readme_has_the_figures_of_the_tables(plots, tmp_path):
    plots.with_colours(plots.draw_readme, plots.LIGHT, tmp_path / "now.svg")
    drawn, now = (lines_of(path) for path in (plots.README_PLOT, tmp_path / "now.svg"))
    assert len(drawn) > 20 and len(drawn) == len(now)
    for line, other in zip(drawn, now):
        assert line.shape == other.shape, "run: python docs/_ext/plots.py"
        assert np.allclose(line, other, atol=2e-3), "run: python docs/_ext/plots.py"


def lines_of(path):
    """The lines of a plot as points, in units of their panel's width and height.

    Another matplotlib, or another font, gives the panels another place and size.
    """
    found = []
    for panel in path.read_text(encoding="utf-8").split('<g id="axes_')[1:]:
        lines = [
            np.array(re.findall(r"[ML] (\S+) (\S+)", line), float)
            for line in re.findall(r'<path d="(M [^"]*?L [^"]*?)" clip-path', panel)
        ]
        low, high = (get([get(line, 0) for line in lines], 0) for get in (np.min, np.max))
        found += [(line - low) / (high - low) for line in lines]
    return found


@pytest.mark.long
def test_plots_for_phones_are_narrow(plots, tmp_path):
    """At 390 pixels a letter of 8 points is 9 pixels high in them, 4 in the wide ones."""
    for name, draw in plots.PLOTS.items():
        path = tmp_path / f"{name}.svg"
        plots.with_colours(draw, plots.LIGHT | plots.PHONE, path)
        width = re.search(r'<svg[^>]* width="([\d.]+)pt"', path.read_text(encoding="utf-8"))[1]
        assert float(width) <= 340, name


def test_panels_are_all_drawn(plots, tmp_path):
    for colours in (plots.LIGHT, plots.LIGHT | plots.PHONE):
        plots.with_colours(plots.draw_pipelines, colours, tmp_path / "pipelines.svg")
        text = (tmp_path / "pipelines.svg").read_text(encoding="utf-8")
        assert ">8 microbatches<" in text and ">16 microbatches<" in text
