"""The pictures and pages of results."""

import re

import pytest
from click.testing import CliRunner

from mpidist.bench import Results, Row
from mpidist.bench.compare import compare
from mpidist.bench.report import as_svg, bench_page, draw, draw_comparison
from mpidist.cli import main
from mpidist.errors import Unsupported
from tests.support.bench_kits import example, line, row, runs


@pytest.mark.long
def test_bench_page_has_no_external_files():
    page = bench_page(example())
    links = set(re.findall(r"""(?:src|href)=["']([^#"'][^"']*)""", page))
    assert not links and "<svg" in page and "WRONG" in page and "&lt;of&gt;" in page
    assert "<script" not in page and "@import" not in page and "url(http" not in page


def test_draw_has_a_line_for_each_candidate():
    figure = draw(example())
    assert len(figure.axes) == 2 and len(figure.axes[0].lines) == 2
    assert as_svg(figure).startswith("<svg")


def test_draw_styles_are_distinct():
    rows = [one for k in range(14) for one in line(f"w{k}", 1 + k, 1e-3)]
    rows += line("mpi4py", 1, 1) + line("native", 1, 1) + line("w3", 1, 1, memory="symmetric")
    left, right = draw(Results({}, rows)).axes
    styles = {(one.get_color(), one.get_marker(), one.get_linestyle()) for one in left.lines[:17]}
    assert len(styles) == 17
    assert len(right.get_legend().get_texts()) == 17


def test_draw_comparison_marks_slower_ones(tmp_path):
    first, second = runs()
    for results in (first, second):
        results.rows += [row("e", 64, 10.4 if results is second else 10.0)]
        results.rows += [Row("step", "x", 2, 10.0), Row("step", "y", 2, 10.0)]
    collective, step = draw_comparison({"b": compare(first, second)}).axes
    (ringed,) = [one for one in collective.lines if one.get_label() == "_worse"]
    assert list(ringed.get_ydata()) == [0.5]  # not e, which is 4 % slower
    ratios = {one.get_label(): list(one.get_ydata()) for one in collective.lines}
    assert ratios["a"] == [2.0] and [1, 1] in ratios.values()
    assert [text.get_text() for text in step.get_xticklabels()] == ["x", "y"]
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json", "p.svg", "p.html")]
    for path, results in zip(paths, (first, second, second)):
        results.save(path)
    done = CliRunner().invoke(
        main, ["bench", "compare", *paths[:3], "--plot", paths[3], "--report", paths[4]]
    )
    assert done.exit_code == 0 and done.output.count("1 worse") == 2, done.output
    page = (tmp_path / "p.html").read_text()
    assert "<svg" in page and page.count('class="worse') == 2 and f"{paths[2]}: " in page
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(Unsupported, match="no row is in both runs"):
        draw_comparison({"b": compare(Results({}, first.rows[:1]), Results({}))})


def test_bench_page_busy_machine_is_warned_of():
    row = Row(
        **{"work": "allreduce", "candidate": "ring", "ranks": 2, "time_us": 1.0, "ratio": 1.0},
        **{"correct": True, "bytes": 8, "busbw_gbs": 1.0, "dtype": "float32"},
    )
    page = bench_page(Results({"busy": [("here", 2, 1.7)]}, [row]))
    assert "1.7 of the 2 cores of here" in page and 'class="warning"' in page
    assert "prefers-color-scheme: dark" in page and "currentColor" in page
    assert page.count("<svg") == 2, "a wide one and one for phones"
    assert "#000000" not in page and 'class="warning"' not in bench_page(Results({}, [row]))
